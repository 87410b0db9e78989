"""Rollouts by a user's function: valid outputs, sampling and failures."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_grpo.core.base.errors import ConfigError, RunError
from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import request_seed
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.plugins.environments.loading import load_rollout_func
from megatron_grpo.plugins.environments.rollout_func import RolloutFunc, RolloutFuncSampler
from megatron_grpo.plugins.environments.rollout_func_output import (
    InvalidRolloutOutputError,
    TokenLimits,
    completion_requests,
    convert_completions,
)
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.rewards.reward_manager import as_batch

N = 2
LIMITS = TokenLimits(vocab_size=100, max_completion_length=6, max_model_len=9, end_ids=frozenset({2}))
SAMPLING = SamplingSettings(n=N, max_completion_length=6)


def make_prompts(count: int = 2) -> list[Prompt]:
    return [Prompt(number=7 + i, row=i, raw=f"q{i}", token_ids=(10 + i, 11), columns={"answer": str(i)}) for i in range(count)]


def format_ids(ids) -> str:
    return " ".join(map(str, ids))


def convert_output(returned, count: int = 2):
    return convert_completions(returned, completion_requests(make_prompts(count), N), LIMITS, version=3, decode=format_ids)


GOOD = {"completion_ids": [[5, 2], [6], [7, 8, 9], [5] * 6], "logprobs": [[-0.5, -0.1], [-1.0], [-1.0, 0.0, -2.0], [-1.0] * 6]}


def test_rollout_func_output_becomes_completions_after_prompt_tokens():
    found = convert_output(GOOD)
    assert [one.sequence.token_ids.tolist() for one in found] == [
        [10, 11, 5, 2], [10, 11, 6], [11, 11, 7, 8, 9], [11, 11, *[5] * 6],
    ]  # fmt: skip
    assert [one.sequence.mask.tolist() for one in found[:2]] == [[False, False, True, True], [False, False, True]]
    assert found[0].logprobs.tolist() == [0.0, 0.0, np.float32(-0.5), np.float32(-0.1)]
    assert [one.finish_reason for one in found] == ["stop", "stop", "stop", "length"] and found[3].text == " 5 5 5 5 5 5"
    assert found[0].versions == ((3, 2, 4),) and found[0].answer_ids == (5, 2)


def test_rollout_func_completion_ending_at_limit_is_not_truncated():
    assert convert_output(GOOD | {"completion_ids": [*GOOD["completion_ids"][:3], [5] * 5 + [2]]})[3].finish_reason == "stop"


def test_rollout_func_env_mask_excludes_tokens_not_sampled():
    """As TRL's env_mask. Prompts may be longer than the data set's, the same for a group."""
    found = convert_output(
        {
            "prompt_ids": [[1, 10, 11], [1, 10, 11], [1, 12], [1, 12]],
            "completion_ids": np.array([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]]),
            "logprobs": [[-1.0, -9.0, -1.0], [-1.0, None, -1.0], [-1.0, 5.0, -1.0], [-1.0, 0.0, -1.0]],
            "env_mask": [[1, 0, 1], [True, False, True], np.array([1, 0, 1]), [1.0, 0.0, 1.0]],
        }
    )
    assert all(one.sequence.mask[-3:].tolist() == [True, False, True] and one.logprobs[-3:].tolist() == [-1.0, 0.0, -1.0] for one in found)
    assert all(not one.sequence.mask[:-3].any() for one in found) and len(found[0].sequence.token_ids) == 6


def test_rollout_func_extra_outputs_become_reward_columns():
    completions = convert_output(GOOD | {"env_reward": [0.1, 0.2, 0.3, 0.4], "answer": ["a", "b", "c", "d"]})
    groups = [Group(prompt=prompt, completions=tuple(completions[2 * i : 2 * i + 2])) for i, prompt in enumerate(make_prompts())]
    columns = as_batch(groups).columns
    assert columns["env_reward"] == [0.1, 0.2, 0.3, 0.4] and columns["answer"] == ["a", "b", "c", "d"], "as in TRL, over the data set's"


def replace_first_value(name, value):
    return GOOD | {name: [value, *GOOD.get(name, GOOD["logprobs"])[1:]]}


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "None; expected a dict of lists"),
        ([GOOD], "of type list; expected a dict"),
        ({"completion_ids": GOOD["completion_ids"]}, "no logprobs"),
        (GOOD | {"logprobs": None}, "no logprobs"),
        (GOOD | {"completion_mask": []}, "completion_mask, which is not used. Use env_mask"),
        (GOOD | {"completions": ["x"] * 4}, "a reserved argument name of reward functions"),
        (GOOD | {3: []}, "the key 3; expected strings"),
        (GOOD | {"seen": "abcd"}, "seen of type str"),
        (GOOD | {"lock": [threading.Lock()] * 4}, "lock, which cannot be sent"),
        ({name: values[:2] for name, values in GOOD.items()}, "2 completion_ids for 4 prompts"),
        (GOOD | {"extra": [1]}, "1 extra for 4 prompts"),
        (replace_first_value("completion_ids", [5, True]), "True (bool) at index 1, which is not a token ID"),
        (replace_first_value("completion_ids", [5.0, 2]), "5.0 (float) at index 0"),
        (replace_first_value("completion_ids", [5, 100]), "100 at index 1, which is not a token ID (0 to 99)"),
        (replace_first_value("completion_ids", [5, -1]), "-1 at index 1"),
        (replace_first_value("completion_ids", "52"), "of type str; expected a list"),
        (replace_first_value("completion_ids", [[5, 2]]), "not a token ID"),
        (replace_first_value("completion_ids", []), "2 logprobs for 0 completion_ids"),
        (replace_first_value("logprobs", [-0.5]), "1 logprobs for 2 completion_ids of completion 0 of prompt 7 (data-set row 0)"),
        (replace_first_value("logprobs", [-0.5, float("nan")]), "nan at index 1"),
        (replace_first_value("logprobs", [-0.5, float("-inf")]), "-inf at index 1"),
        (replace_first_value("logprobs", [-0.5, 0.3]), "0.3 at index 1"),
        (replace_first_value("logprobs", [-0.5, None]), "None at index 1"),
        (replace_first_value("logprobs", [[-0.5], [-0.1]]), "of type list at index 0"),
        (GOOD | {"env_mask": [[1], [1], [1, 1, 1], [1] * 6]}, "1 values of env_mask for 2"),
        (GOOD | {"env_mask": [[1, 2], [1], [1, 1, 1], [1] * 6]}, "env_mask of completion 0 of prompt 7 (data-set row 0) with 2"),
        (GOOD | {"env_mask": [[0, 0], [1], [1, 1, 1], [1] * 6]}, "without a sampled token"),
        (GOOD | {"prompt_ids": [[1], [2], [1], [1]]}, "two prompt_ids for one prompt"),
        (GOOD | {"prompt_ids": [[], [], [1], [1]]}, "empty prompt_ids"),
        (GOOD | {"prompt_ids": [[1] * 8, [1] * 8, [1], [1]]}, "10 tokens, and vllm_max_model_len is 9"),
        (GOOD | {"completion_ids": [*GOOD["completion_ids"][:3], [5] * 7], "logprobs": [*GOOD["logprobs"][:3], [-1.0] * 7]},
         "7 completion_ids of completion 1 of prompt 8 (data-set row 1), and max_completion_length is 6"),
    ],
)  # fmt: skip
def test_rollout_func_with_invalid_output_raises(returned, says):
    with pytest.raises(InvalidRolloutOutputError) as bad:
        convert_output(returned)
    assert says in str(bad.value)


# ---- the sampler, over an engine that counts


class SeedTurns:
    """Samples the token of a request's seed repeatedly; a request takes one step per token."""

    def __init__(self, version: int = 3):
        self.running, self.asked, self.most_running, self.version = {}, [], 0, version

    def submit(self, key, token_ids, *, seed, max_tokens):
        assert key not in self.running
        self.running[key] = [max_tokens, SampledTurn(token_ids=(seed % 97,) * max_tokens, logprobs=(-1.0,) * max_tokens, is_cut=True,
                                              version=self.version)]  # fmt: skip
        self.asked.append((key, tuple(token_ids), seed, max_tokens))
        self.most_running = max(self.most_running, len(self.running))

    def poll(self):
        for request in self.running.values():
            request[0] -= 1
        finish_reason = [key for key, (left, _) in self.running.items() if left <= 0]
        return [(key, self.running.pop(key)[1]) for key in finish_reason]

    @property
    def num_running(self):
        return len(self.running)


class Engine:
    def __init__(self):
        self.turns, self.steps = SeedTurns(), []

    def play(self, prompts, sampling, begin):
        player = begin(prompts)
        while not player.advance(self.turns, 0.05, version=self.turns.version):
            for step in self.steps:
                step()
        return player.groups()


class Tokenizer:
    @staticmethod
    def decode(ids, **options):
        return format_ids(ids)


def make_sampler(function, engine=None, *, timeout: float = 60.0):
    return RolloutFuncSampler(
        engine or Engine(), RolloutFunc(name="mine.py:f", function=function, tokenizer=Tokenizer(), limits=LIMITS, timeout=timeout)
    )


def sample_plainly(asked, sampler):
    drawn = sampler(asked, max_tokens=3)
    return {"completion_ids": [one.token_ids for one in drawn], "logprobs": [one.logprobs for one in drawn]}


def test_rollout_func_that_only_samples_uses_single_turn_seeds():
    engine = Engine()
    groups = make_sampler(sample_plainly, engine).generate(make_prompts(), SAMPLING, seed=5)
    assert [seed for _, _, seed, _ in engine.turns.asked] == [request_seed(5, number, i, 0, n=N) for number in (7, 8) for i in range(N)]
    assert [[one.answer_ids for one in group.completions] for group in groups] == [
        [(request_seed(5, number, i, 0, n=N) % 97,) * 3 for i in range(N)] for number in (7, 8)
    ]
    assert engine.turns.most_running == 4, "all together"


def test_rollout_func_sampling_is_independent_of_batching_and_number_of_ranks():
    def twice(asked, sampler):
        first = sampler(asked, max_tokens=2)
        second = sampler(asked, [[*one.token_ids, *drawn.token_ids] for one, drawn in zip(asked, first)], max_tokens=2)
        both = [one.token_ids + other.token_ids for one, other in zip(first, second)]
        return {"completion_ids": both, "logprobs": [[-1.0] * len(ids) for ids in both]}

    def one_by_one(asked, sampler):
        parts = [twice([one], sampler) for one in reversed(asked)]
        return {name: [part[name][0] for part in reversed(parts)] for name in ("completion_ids", "logprobs")}

    together = make_sampler(twice).generate(make_prompts(), SAMPLING, seed=5)
    apart = make_sampler(one_by_one).generate(make_prompts(), SAMPLING, seed=5)
    on_two = [group for prompt in make_prompts() for group in make_sampler(twice).generate([prompt], SAMPLING, seed=5)]
    told = [[[one.answer_ids for one in group.completions] for group in groups] for groups in (together, apart, on_two)]
    assert told[0] == told[1] == told[2]
    assert all(ids[:2] != ids[2:] for group in told[0] for ids in group), "the second draw has random numbers of its own"


def test_rollout_func_may_sample_several_continuations_from_threads():
    def find_best_checkpoint(asked, sampler):
        found: dict[int, list] = {}

        def work(place):
            found[place] = sampler([asked[place]] * 3, max_tokens=2)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = [max(found[place], key=lambda one: one.token_ids) for place in range(len(asked))]
        return {"completion_ids": [one.token_ids for one in best], "logprobs": [one.logprobs for one in best]}

    engine = Engine()
    groups = make_sampler(find_best_checkpoint, engine).generate(make_prompts(), SAMPLING, seed=5)
    assert len(engine.turns.asked) == 12 and len({seed for _, _, seed, _ in engine.turns.asked}) == 12
    assert groups[0].completions[0].answer_ids == (max(request_seed(5, 7, 0, count, n=N) % 97 for count in range(3)),) * 2


def test_rollout_func_open_requests_are_resent_and_oldest_version_is_recorded():
    engine = Engine()
    first, second = SeedTurns(version=3), SeedTurns(version=4)

    def play(asked, sampling, begin):
        player = begin(asked)
        player.advance(first, 0.0, version=3)
        while not first.asked:
            player.advance(first, 0.0, version=3)
        first.running = {key: value for key, value in first.running.items() if key[0] == 7}
        while first.running:
            player.advance(first, 0.0, version=3)
        while not player.advance(second, 0.1, version=4):
            pass
        return player.groups()

    engine.play = play
    groups = make_sampler(sample_plainly, engine).generate(make_prompts(), SAMPLING, seed=5)
    assert {key[0] for key, *_ in second.asked} == {8} and [group.version for group in groups] == [3, 3]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda asked, sampler: 1 / 0, "rollout_func mine.py:f raised ZeroDivisionError: division by zero (line"),
        (lambda asked, sampler: (_ for _ in ()).throw(SystemExit(3)), "raised SystemExit: 3"),
        (lambda asked, sampler: {"completion_ids": [], "logprobs": []}, "returned 0 completion_ids for 4 prompts"),
        (lambda asked, sampler: sampler(asked, [[1]]), "raised ValueError: 1 contexts for 4 entries"),
        (lambda asked, sampler: sampler(asked[:1], [[1] * 9]), "a context of 9 tokens"),
        (lambda asked, sampler: sampler(asked[:1], [[100]]), "100 is not a token ID"),
        (lambda asked, sampler: time.sleep(5), "has neither called the sampler nor returned for 0.3 s (rollout_func_timeout)"),
    ],
)
def test_rollout_func_that_raises_ends_run_with_error(function, says):
    began = time.monotonic()
    with pytest.raises(RunError) as error:
        make_sampler(function, timeout=0.3).generate(make_prompts(), SAMPLING, seed=5)
    assert says in str(error.value) and time.monotonic() - began < 3


def test_rollout_func_calls_end_if_run_is_interrupted():
    told = threading.Event()

    def catches(asked, sampler):
        try:
            sampler(asked)
        except Exception:  # noqa: BLE001 - what users write
            told.set()
        finally:
            finish_reason.set()

    finish_reason, engine = threading.Event(), Engine()
    engine.turns.poll = lambda: []

    def stop():
        raise KeyboardInterrupt

    engine.steps = [stop]
    with pytest.raises(KeyboardInterrupt):
        make_sampler(catches, engine).generate(make_prompts(), SAMPLING, seed=5)
    assert finish_reason.wait(5) and not told.is_set()


def test_rollout_func_with_images_is_rejected():
    describe_value = replace(make_prompts(1)[0], images=((0, None),))
    with pytest.raises(RunError, match="rollout_func does not support images"):
        make_sampler(sample_plainly).generate([describe_value], SAMPLING, seed=5)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def f(prompts, sampler): pass", None),
        ("def f(prompts): pass", "must accept the call f(prompts, sampler)"),
        ("async def f(prompts, sampler): pass", "a coroutine or a generator"),
        ("def f(prompts, sampler): yield 1", "a coroutine or a generator"),
        ("class f: pass", "is not a function"),
        ("g = 1", "no function 'f'"),
        ("raise ValueError('x')", "cannot be loaded"),
    ],
)
def test_rollout_func_setting_is_validated_before_model_load(tmp_path, body, says):
    path = tmp_path / "mine.py"
    path.write_text(body)
    cfg = resolve(["--rollout_func", f"{path}:f"])
    if says is None:
        assert callable(load_rollout_func(cfg))
        return
    with pytest.raises(ConfigError) as error:
        load_rollout_func(cfg)
    assert says in str(error.value) and [problem.flags for problem in error.value.problems] == [("rollout_func",)]
