"""`megatron-grpo dry-run`: problems of a run, found on a few rows before anything loads."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.cli import main
from tests.tiny_models import write_tiny

REWARDS = """
import time

def right(completions, answer, **columns):
    return [float(text == want) for text, want in zip(completions, answer)]

def raises(completions, **columns):
    return [len(text) / len(text) for text in completions]

def short(completions, **columns):
    return [0.0] * (len(completions) - 1)

def not_a_number(completions, **columns):
    return [float("nan") for _ in completions]

def constant(completions, **columns):
    return [0.5] * len(completions)

def silent(completions, **columns):
    return [None] * len(completions)

def needs(completions, solution, **columns):
    return [1.0] * len(completions)

def slow(completions, **columns):
    time.sleep(0.2)
    return [float(len(text)) for text in completions]

def prints(completions, **columns):
    print("hello")
    return [float(len(text)) for text in completions]

def backwards(completions, answer, **columns):
    return [float(text != want) for text, want in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry_run")
    write_tiny(folder / "model")
    lines = [{"prompt": " ".join(str(4 + j) for j in range(2 + i % 5)), "answer": str(4 + i)} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARDS)
    return folder


@pytest.fixture
def dry_run(folder, capsys):
    def dry_run(*functions: str, more: str = "") -> tuple[int, dict]:
        flags = ["--model", str(folder / "model"), "--dataset", str(folder / "data.jsonl"), "--reward_funcs"]
        code = main(["dry-run", *flags, *(f"{folder}/reward.py:{name}" for name in functions), "--json", *more.split()])
        return code, json.loads(capsys.readouterr().out)

    return dry_run


def test_dry_run_of_valid_run_exits_0_with_lengths_scores_and_prompt(dry_run):
    code, found = dry_run("right", "prints", more="--rows 4")
    assert (code, found["passed"], found["wrong"]) == (0, True, [])
    assert found["lengths"] == {"shortest": 2, "median": 4, "90 %": 6, "99 %": 6, "longest": 6} and found["prompt"] == "4 5"
    kinds = found["rewards"]["right"]
    assert {kind: one["scores"] for kind, one in kinds.items()} == {"its answer": [1.0] * 4, "nothing": [0.0] * 4, "garbage": [0.0] * 4}


def test_one_row_of_several_can_be_tried(dry_run):
    code, found = dry_run("right", more="--rows 1")
    assert (code, found["rewards"]["right"]["its answer"]["scores"]) == (0, [1.0])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "On nothing: Reward `raises` raised ZeroDivisionError: division by zero (reward.py line 8, in "),
        ("short", "On garbage: Reward `short` returned 7 values for 8 completions"),
        ("not_a_number", "On its answer: Reward `not_a_number` returned nan"),
        ("silent", "Reward `silent` returns None for all tested completions, so it has no effect on the run."),
        ("needs", "Reward `needs` needs the column `solution`; the data set has `answer`."),
    ],
)
def test_dry_run_with_failing_reward_exits_1_with_message(dry_run, function, sentence):
    code, found = dry_run(function, "right")
    assert code == 1 and not found["passed"]
    assert any(told.startswith(sentence) for told in found["wrong"]), found["wrong"]
    assert found["rewards"]["right"]["its answer"]["scores"] == [1.0] * 8, "the others are judged all the same"


def test_dry_run_constant_reward_is_error_alone_and_note_beside_another(dry_run):
    code, found = dry_run("constant")
    sentence = "No reward scores the data set's answers differently from garbage."
    assert (code, [text[: len(sentence)] for text in found["wrong"]]) == (1, [sentence])
    code, found = dry_run("right", "constant")
    assert (code, found["wrong"]) == (0, []) and "Reward `constant` returns 0.5 for all tested completions." in found["notes"]


def test_dry_run_format_and_length_rewards_are_accepted_beside_accuracy(dry_run):
    code, found = dry_run(more="--reward_funcs accuracy format soft_overlong --soft_cache_length 8 --max_completion_length 64")
    assert (code, found["wrong"]) == (0, [])


def test_dry_run_without_answer_column_notes_that_rewards_are_untested(folder, dry_run):
    lines = [{"prompt": f"{4 + i} 5"} for i in range(8)]
    (folder / "bare.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = dry_run("silent", more=f"--dataset {folder}/bare.jsonl")
    assert (code, found["wrong"]) == (0, [])
    code, found = dry_run(more=f"--dataset {folder}/bare.jsonl --reward_funcs format")
    assert (code, found["wrong"]) == (0, [])
    assert found["notes"][-1] == (
        "No row has answer or solution or completion, so no correct completion was tested. Name the column of answers with answer_column."
    )


def test_dry_run_uses_answers_of_rows_that_have_one(folder, dry_run):
    lines = [{"prompt": f"{4 + i} 5", "answer": "4" if i % 2 else None} for i in range(8)]
    (folder / "half.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = dry_run("right", more=f"--dataset {folder}/half.jsonl")
    assert code == 0 and found["rewards"]["right"]["its answer"]["scores"] == [1.0] * 4


def test_dry_run_missing_column_is_reported_with_rows(folder, dry_run):
    lines = [{"prompt": f"{4 + i} 5", **({"answer": "4"} if i != 2 else {})} for i in range(8)]
    (folder / "gap.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = dry_run("right", more=f"--dataset {folder}/gap.jsonl")
    assert code == 1 and found["wrong"][0].startswith(
        "Reward `right` needs the column `answer`, but 1 of 8 rows (gap.jsonl line 3) lack it"
    )


def test_dry_run_slow_reward_exits_1_with_arithmetic(dry_run):
    code, found = dry_run("slow", more="--rows 2 --reward_timeout 10 --generation_batch_size 256 --global_batch_size 256")
    assert code == 1
    assert "s for 2 completions. A rank scores 256 at a time: " in found["wrong"][0] and "reward_timeout is 10." in found["wrong"][0]
    assert dry_run("slow", more="--rows 2 --reward_timeout 10000 --generation_batch_size 256 --global_batch_size 256")[0] == 0


def test_dry_run_reports_long_and_duplicate_prompts(dry_run):
    code, found = dry_run("right", more="--max_prompt_length 4")
    assert code == 1 and found["num_too_long"] == 8
    assert found["wrong"][0].startswith(
        "8 of 20 prompts are longer than max_prompt_length (4), and truncation_strategy raise rejects them."
    )
    code, found = dry_run("right", more="--max_prompt_length 4 --truncation_strategy delete")
    assert code == 0 and "truncation_strategy delete skips them" in found["notes"][0]
    assert found["notes"][1] == "15 of 20 prompts are duplicates; the most frequent prompt occurs 4 times."


def test_dry_run_reports_columns_and_shared_held_out_prompts(folder, dry_run, capsys):
    rows = [{"prompt": f"{4 + i} 5", "answer": "4", "tools": [], "history": [["a", "b"]] * (i > 1)} for i in range(4)]
    (folder / "both").mkdir(exist_ok=True)
    for split, part in (("train", rows), ("test", [rows[1], {"prompt": "9 9", "answer": "4"}])):
        (folder / "both" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    code, found = dry_run("right", more=f"--dataset {folder}/both --eval_dataset {folder}/both --enable_thinking false")
    assert code == 0 and found["columns"] == {
        "prompt": "4 of 4 rows: shown to the model",
        "answer": "4 of 4 rows: passed to the reward functions",
        "tools": "0 of 4 rows: shown to the model by the chat template, for chats",
        "history": "2 of 4 rows: passed to the reward functions",
    }
    notes = "\n".join(found["notes"])
    assert "eval_dataset: 1 of 2 held-out prompts are in the training set too." in notes
    assert "dataset: `history` does not change the prompt: earlier turns belong into `messages`." in notes
    assert "enable_thinking has no effect on dataset: all prompts are strings" in notes
    assert "enable_thinking has no effect: the model's chat template has no variable of that name." in notes
    flags = ["--model", str(folder / "model"), "--dataset", f"{folder}/both", "--reward_funcs", f"{folder}/reward.py:right"]
    assert main(["dry-run", *flags]) == 0
    assert "  answer                4 of 4 rows: passed to the reward functions\n" in capsys.readouterr().out


def test_dry_run_template_without_tool_support_is_rejected(folder, capsys):
    row = {"prompt": [{"role": "user", "content": "4 5"}], "answer": "4", "tools": [{"type": "function", "function": {"name": "f"}}]}
    (folder / "tools.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        flags = ["--model", str(folder / "model"), "--dataset", f"{folder}/tools.jsonl", "--reward_funcs", f"{folder}/reward.py:right"]
        assert main(["dry-run", *flags]) == 2
    finally:
        (folder / "model/chat_template.jinja").unlink()
    told = " ".join(capsys.readouterr().err.split())
    assert "1 of 1 rows have `tools`, of which the model's chat template has no variable: tools.jsonl line 1." in told


def test_dry_run_reward_highest_for_garbage_gives_a_note(dry_run):
    assert dry_run("backwards")[1]["notes"][-1] == "Reward `backwards` does not score the data set's answers higher than garbage."


def test_dry_run_reports_prompts_rejected_by_chat_template(folder, dry_run):
    chats = [{"prompt": [{"role": role, "content": "4 5"}], "answer": "4"} for role in ["user"] * 3 + ["oracle"]]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chats))
    (folder / "model/chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'oracle' %}{{ raise_exception('no oracles here') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    try:
        code, found = dry_run("right", more=f"--dataset {folder}/chats.jsonl")
    finally:
        (folder / "model/chat_template.jinja").unlink()
    assert code == 1
    assert "rejects 1 of 4 prompts: TemplateError: no oracles here" in found["wrong"][0]


def test_dry_run_with_invalid_settings_exits_2_with_all_problems(folder, capsys):
    code = main(["dry-run", "--model", "./nowhere", "--dataset", "./nothing.jsonl", "--reward_funcs", "acuracy"])
    told = capsys.readouterr().err
    assert code == 2 and "3 problems" in told and "Did you mean accuracy?" in told
    assert main(["dry-run", "--rows", "none"]) == 2
    assert "rows (none) is a number of rows" in capsys.readouterr().err


def test_dry_run_prints_a_table(folder, capsys):
    flags = ["--model", str(folder / "model"), "--dataset", str(folder / "data.jsonl"), "--reward_funcs", f"{folder}/reward.py:raises"]
    assert main(["dry-run", *flags, "--rows=3"]) == 1
    told = capsys.readouterr().out
    assert "20 prompts" in told and "The first prompt, as the model receives it:\n4 5\n" in told
    assert any(line.split()[:3] == ["raises", "nothing", "fails"] for line in told.splitlines())
    assert "Problems:\n  1. On nothing: Reward `raises`" in told and told.endswith("1 problem.\n")


def test_dry_run_with_streaming_reads_first_block(dry_run):
    code, found = dry_run("right", more="--streaming true --shuffle_buffer_size 7")
    assert code == 0 and found["num_rows"] == 7
    assert any("only the first 7 rows were checked; a run checks the others when it reads them" in note for note in found["notes"])


def test_dry_run_runs_environment_without_model(tmp_path, monkeypatch):
    """Turns are made up; what the environment does wrong is said, and its episodes are judged."""
    from megatron_grpo.commands.start.dry_run import dry_run
    from megatron_grpo.run.config import parse
    from tests.chat_models import write_chat

    monkeypatch.chdir(tmp_path)
    write_chat(tmp_path / "model", layers=1)
    (tmp_path / "e.py").write_text(
        "from megatron_grpo.plugins.environments.protocol import Environment\n"
        "class E(Environment):\n"
        "    def step(self, turn):\n"
        "        return [], float(turn.text == self.columns['answer']), 1 / len(turn.text) > 0\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "q"}], "answer": "7"}\n' * 2)
    words = "--model model --dataset data.jsonl --environment e.py:E --reward_funcs environment"
    found = dry_run(parse(words.split()).config, 2)
    assert found.episodes["its answer"] == "2 episodes, 1.0 turns; done 2; mean environment reward 1"
    assert found.rewards["environment"]["its answer"].scores == (1.0, 1.0) and "nothing" not in found.rewards["environment"]
    assert found.wrong == [
        "The environment, where the model says nothing: 2 of 2 episodes: step raised ZeroDivisionError: division by zero."
    ]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model whose template opens <think>, and which has `</think>` as a special token; its turns end with a token that ends nothing."""
    from tests.chat_models import THINKS, chat_tokenizer, write_chat
    from tools.make_tiny_chat_model import PAD

    folder = tmp_path_factory.mktemp("thinker")
    write_chat(folder / "model", layers=1)
    tokenizer = chat_tokenizer(THINKS)
    tokenizer.add_special_tokens({"eos_token": PAD, "additional_special_tokens": ["</think>"]})
    tokenizer.save_pretrained(folder / "model")
    for file in (folder / "model").glob("*config.json"):
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"eos_token_id": 0} if "eos_token_id" in config else config))
    answers = ["One and two.\n</think>\n<answer>3</answer>", "<think>\nTwo and two.\n</think>\n<answer>4</answer>"]
    lines = [{"prompt": [{"role": "user", "content": "What?"}], "answer": answer} for answer in answers]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["dry-run", "--model", str(folder / "model"), "--dataset", str(folder / "data.jsonl"), "--reward_funcs", "format", "--json"]


def test_dry_run_scores_answer_after_opened_tag(thinker, capsys):
    assert main(thinker) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rewards"]["format"]["its answer"]["scores"] == [1.0, 1.0] and found["prompt"].endswith("<think>\n")
    assert [note for note in found["notes"] if "Use --stop_token_ids 2." in note and "does not stop at it" in note]


def test_dry_run_scores_answer_as_decoded_in_the_run(thinker, capsys):
    assert main([*thinker, "--generation_kwargs", "skip_special_tokens=true"]) == 1
    assert json.loads(capsys.readouterr().out)["rewards"]["format"]["its answer"]["scores"] == [0.0, 0.0]


@pytest.mark.parametrize("stop", [["--stop", "<|im_end|>"], ["--stop_token_ids", "2"]])
def test_dry_run_with_stop_at_end_of_turn_gives_no_note(thinker, capsys, stop):
    assert main([*thinker, *stop]) == 0
    assert "does not stop at it" not in capsys.readouterr().out


def test_dry_run_stop_string_containing_special_token_is_rejected(thinker, capsys):
    assert main([*thinker, "--stop", "so<|im_end|>"]) == 2
    assert "stop 'so<|im_end|>' contains the special token '<|im_end|>'" in capsys.readouterr().err
    assert main([*thinker, "--stop", "so<|im_end|>", "--generation_kwargs", "skip_special_tokens=false"]) == 0
