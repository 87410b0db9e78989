"""User code may modify its arguments: the next completion, function, episode and epoch receives the row as it is in the file."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw

from megatron_grpo import score
from megatron_grpo.api.callbacks import CallbackHandler
from megatron_grpo.core.base.errors import RewardError
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.plugins.environments.foreign_environments import adapted
from megatron_grpo.plugins.environments.protocol import Environment, StepOutput
from megatron_grpo.plugins.environments.rollout_func_output import TokenLimits, completion_requests, convert_completions
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.checks import check_lengths
from megatron_grpo.run.data.prompts import PromptStream, load_rows
from megatron_grpo.run.python_objects import copy_for_user
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction
from megatron_grpo.run.rewards.reward_manager import RewardManager
from megatron_grpo.run.rewards.scoring import score as score_batch
from tests.agents import Ledger
from tests.agents import played as play_agents
from tests.unit.environments.scripted import QUESTION, run_episodes

CHAT = [{"role": "user", "content": "Q "}]


def make_reward(function, **settings):
    return RewardFunction(name=function.__name__, function=function, timeout=5.0, **settings)


def list_process_groups(prompts, texts=("a", "b", "c")):
    completions = tuple(make_completion((1,), (2,), (0.0,), text=text, finish_reason="stop", version=0) for text in texts)
    return [Group(prompt=prompt, completions=completions) for prompt in prompts]


def empties(completions, todo, notes, **columns):
    """Empties a list, a dict in it, an array, a picture and an object."""
    left = []
    for tasks, note in zip(todo, notes):
        tasks["list"].pop()
        left.append(float(len(tasks["list"]) + note["array"].sum() + note["picture"].size[0] + len(note["object"].items)))
        note["array"][:] = 0
        note["picture"].thumbnail((2, 2))
        note["object"].items.clear()
    return left


async def empties_later(completions, todo, notes):
    return empties(completions, todo, notes)


def test_reward_functions_receive_unmodified_row_copies():
    columns = {
        "todo": {"list": [1, 2, 3]},
        "notes": {"array": np.ones(4), "picture": Image.new("RGB", (8, 8)), "object": SimpleNamespace(items=[1, 2])},
    }  # fmt: skip
    prompt = Prompt(number=0, row=0, raw=CHAT, token_ids=(1,), columns=columns)
    manager = RewardManager([make_reward(empties), make_reward(empties_later), make_reward(empties)])
    for _ in range(2):  # a later rollout, of the same rows
        [scored] = manager(list_process_groups([prompt]))
        assert scored.rewards == ((16.0, 16.0, 16.0),) * 3
    assert columns["todo"] == {"list": [1, 2, 3]} and columns["notes"]["picture"].size == (8, 8)


def test_reward_function_retry_receives_unmodified_rows():
    def takes(completions, todo):
        taken = [float(tasks.pop()) for tasks in todo]
        if "bad" in completions:
            raise ValueError("no")
        return taken

    batch = RewardBatch(prompts=["p"] * 4, completions=["ok", "ok", "bad", "ok"], completion_ids=[[1]] * 4, columns={"todo": [[5.0]] * 4},
                        labels=list("abcd"))  # fmt: skip
    assert [row[0] for row in score_batch([make_reward(takes, on_error="none")], batch).rows] == [5.0, 5.0, None, 5.0]
    with pytest.raises(RewardError, match="ValueError: no .*on c"):
        score_batch([make_reward(takes)], batch)


def test_reward_that_edits_inputs_does_not_affect_others_or_resume(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": f" Q{n} "}], "n": [n]}) + "\n" for n in range(6)))

    def stream():
        return PromptStream(check_lengths(load_rows(DataConfig(dataset=str(path))), lambda raw: [1], DataConfig()), seed=0)

    def trims(prompts, completions, **columns):
        for prompt, completion in zip(prompts, completions):
            prompt[-1]["content"] = prompt[-1]["content"].strip()
            completion[0]["content"] += "x"
        return [float(len(prompt[-1]["content"]) + len(completion[0]["content"])) for prompt, completion in zip(prompts, completions)]

    first, kept = stream(), stream().state()
    prompts = first.take(6)
    for scored in RewardManager([make_reward(trims), make_reward(trims)])(list_process_groups(prompts)):
        assert scored.rewards == ((4.0, 4.0),) * 3
    assert {prompt.raw[0]["content"] for prompt in prompts} == {f" Q{n} " for n in range(6)}
    assert stream().problems_with(first.state()) == [] and first.state()["fingerprint"] == kept["fingerprint"]


def test_dataset_fingerprint_ignores_later_changes_by_the_program(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": CHAT}) + "\n")
    rows = load_rows(DataConfig(dataset=str(path)))
    stream = PromptStream(check_lengths(rows, lambda raw: [1], DataConfig()), seed=0)
    before = stream.state()["fingerprint"]
    rows.rows[0]["prompt"][0]["content"] = "another"
    assert stream.state()["fingerprint"] == before


def test_score_does_not_modify_recorded_rows():
    def pops(completions, todo, completion_ids, **columns):
        return [float(len(tasks.pop()) + ids.pop()) for tasks, ids in zip(todo, completion_ids)]

    def pops_by_keyword(completions, **columns):
        return [float(len(tasks.pop()) + ids.pop()) for tasks, ids in zip(columns["todo"], columns["completion_ids"])]

    rows = [{"completion": "a", "todo": ["x", "yy"], "completion_ids": [1, 2]}]
    for function in (pops, pops_by_keyword):
        assert [score([function, function], rows)[0]["reward"] for _ in range(2)] == [8.0, 8.0]
    assert rows == [{"completion": "a", "todo": ["x", "yy"], "completion_ids": [1, 2]}]


# ---- episodes


class Deck(Environment):
    def __init__(self, columns):
        super().__init__(columns)
        self.deck = columns["todo"]["deck"]

    def start(self, prompt):
        prompt[0]["content"] += "!"  # of a copy: the prompt is the row's
        return QUESTION

    def step(self, turn):
        self.deck.pop(0)
        turn.messages[0]["content"] = "edited"
        return StepOutput(messages=[{"role": "user", "content": "go"}], reward=float(len(self.deck)))


def test_episodes_receive_unmodified_row_copies():
    columns = {"todo": {"deck": list(range(20))}}
    for _ in range(2):
        completions, _ = run_episodes(Deck, "a", n=4, columns=columns, max_turns=2)
        assert [one.record.turn_rewards for one in completions] == [(19.0, 18.0)] * 4
        assert {one.record.messages[0]["content"] for one in completions} == {"q"}
    assert QUESTION == [{"role": "user", "content": "q"}]


class TrlDeck:
    def reset(self, prompt, todo, **row):
        prompt[0]["content"] = "edited"
        todo["deck"].pop()
        self.left = todo["deck"]

    def look(self, place: str) -> str:
        """Looks.

        Args:
            place: Where.
        """
        return place

    def get_reward(self):
        return float(len(self.left))


class SwiftDeck:
    def __init__(self, env_config):
        env_config["sizes"].pop()

    def reset(self, config):
        config.data_dict["todo"]["deck"].pop()
        config.messages[0]["content"] = "edited"
        self.row = config.data_dict
        return None, {}, None

    def step(self, messages):
        messages.clear()
        return "", float(len(self.row["todo"]["deck"]) + len(self.row["env_config"]["sizes"])), True, {}


class VerifiersDeck:
    def setup_state(self, state):
        state["todo"]["deck"].pop()
        state["info"]["seen"].pop()
        state["prompt"][0]["content"] = "edited"

    def env_response(self, messages, state):
        messages[0]["content"] = "edited"
        left = len(state["todo"]["deck"]) + len(state["info"]["seen"])
        return [{"role": "user", "content": str(left)}]


@pytest.mark.parametrize(("cls", "left"), [(TrlDeck, 2.0), (SwiftDeck, 4.0), (VerifiersDeck, "2")])
def test_third_party_environments_receive_row_copy_per_episode(cls, left):
    columns = {"todo": {"deck": [1, 2, 3]}, "env_config": {"sizes": [1, 2]}, "info": {"seen": [1]}}
    for _ in range(2):
        completions, _ = run_episodes(adapted(cls), "a", n=3, columns=columns, max_turns=1)
        found = [one.record.messages[-1]["content"] if isinstance(left, str) else one.record.turn_rewards[-1] for one in completions]
        assert found == [left] * 3, completions[0].record
        assert {one.record.messages[0]["content"] for one in completions} == {"q"}
    assert columns == {"todo": {"deck": [1, 2, 3]}, "env_config": {"sizes": [1, 2]}, "info": {"seen": [1]}}


def test_agents_receive_row_copies_and_return_values_are_copied(monkeypatch):
    log = {"steps": []}

    def solve(row, endpoint):
        row["prompt"][0]["content"] += "!"
        import openai

        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        client.chat.completions.create(model="policy", messages=row["prompt"])
        endpoint.messages()[0]["content"] = "edited"
        log["steps"].append(row["prompt"][0]["content"])
        return {"reward": 1.0, "log": log["steps"]}

    rows, _ = play_agents(solve, Ledger(), n=3, concurrency=1)
    assert [(row.finish_reason, row.record.numbers.fault) for row in rows] == [("done", "")] * 3
    assert len(set(log["steps"])) == 1 and log["steps"][0].count("!") == 1
    assert sorted(len(row.columns["log"]) for row in rows) == [1, 2, 3] and all(
        row.record.messages[0]["content"] != "edited" for row in rows
    )


def test_rollout_func_requests_receive_row_and_prompt_copies():
    prompt = Prompt(number=0, row=0, raw=CHAT, token_ids=(1,), columns={"todo": {"deck": [1, 2]}})
    requests = completion_requests([prompt], 2)
    requests[0].columns["todo"]["deck"].clear()
    requests[0].prompt[0]["content"] = "edited"
    assert requests[1].columns == prompt.columns == {"todo": {"deck": [1, 2]}} and requests[1].prompt == prompt.raw == [
        {"role": "user", "content": "Q "}
    ]
    shared = ["x"]
    returned = {"completion_ids": [[2], [2]], "logprobs": [[-1.0], [-1.0]], "note": [shared, shared]}
    found = convert_completions(
        returned, requests, TokenLimits(vocab_size=9, max_completion_length=4, max_model_len=9), version=0, decode=str
    )
    shared.append("y")
    assert [one.columns for one in found] == [{"note": ["x"]}] * 2


def test_callbacks_receive_separate_metric_copies():
    class EditingCallback:
        def on_log(self, args, state, control, logs):
            seen.append(logs.pop("reward"))

    seen: list[float] = []
    CallbackHandler([EditingCallback(), EditingCallback()], None).listen(1, {"num_tokens": 8, "reward": 0.5})
    assert seen == [0.5, 0.5]


# ---- the copy


def test_row_copy_is_cheap_and_shares_no_mutable_object():
    row = {"answer": "x" * 2000, "tests": ["assert f(1) == 1"] * 20, "meta": {"id": 7, "tags": ["a", "b"], "pair": ([1], 2)}, "none": None}
    start = time.perf_counter()
    copies = [copy_for_user(row) for _ in range(1000)]
    assert time.perf_counter() - start < 0.5  # 10 ms on an idle machine
    copies[0]["meta"]["pair"][0].append(2)
    copies[0]["tests"].pop()
    assert copies[1] == row and row["meta"]["pair"] == ([1], 2) and copies[1]["answer"] is row["answer"]
    image = Image.new("RGB", (4, 4), "red")
    edited = [copy_for_user([image])[0] for _ in range(3)]
    edited[0].putpixel((0, 0), (0, 0, 0))
    edited[1].paste("blue", (0, 0, 2, 2))
    ImageDraw.Draw(edited[2]).rectangle((0, 0, 1, 1), fill="blue")
    assert image.getpixel((0, 0)) == (255, 0, 0) and len({one.getpixel((0, 0)) for one in (image, *edited)}) == 3
    palette = image.convert("P")
    copy_for_user(palette).putpalette([0] * 768)
    assert palette.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    lock = threading.Lock()
    assert copy_for_user([lock])[0] is lock, "what cannot be copied is shared"
