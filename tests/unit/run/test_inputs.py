"""Inputs that `plan` and `train` check with one list: both reject the same, in the same words, all together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import yaml

from megatron_grpo.cli import main
from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.planning.command import plan_run
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.checkpoint.fingerprints import DAY, values_equal_on_ranks
from megatron_grpo.run.checkpoint.resume_compatibility import changes_since
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.write import as_yaml
from megatron_grpo.run.rewards.loading import close_rewards
from megatron_grpo.run.validate import load_inputs
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Flags of a run that is right, in a folder of its own: {flag: value}."""
    folder = tmp_path_factory.mktemp("inputs")
    model = write_tiny(folder / "model", "qwen3")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"5 {n}", "answer": n}) + "\n" for n in range(6, 16)))
    (folder / "reward.py").write_text(
        "def good(completions, answer): return [0.0] * len(completions)\ndef wants(completions, hint): return [0.0] * len(completions)\n"
    )
    return {"model": str(model), "dataset": str(folder / "data.jsonl"), "reward_funcs": f"{folder}/reward.py:good",
            "output_dir": str(folder / "out"), "max_completion_length": "8", "num_generations": "4"}  # fmt: skip


def parse_flags(flags):
    return parse([word for name, value in flags.items() for word in (f"--{name}", *str(value).split())], dialects=lambda: DIALECTS)


def list_problems(look, flags) -> list[str]:
    try:
        look(parse_flags(flags))
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


def test_valid_inputs_pass_plan_and_train_and_plan_lists_unchecked(good):
    made, inputs = load_inputs(parse_flags(good))
    close_rewards(inputs.rewards)
    planned = plan_run(parse_flags(good))
    machine = "this machine's GPUs and memory, and whether output_dir can be written"
    assert planned.not_checked == (machine, "the tokenizer (chat template, prompt lengths in tokens)")
    assert (made.num_prompts, planned.num_prompts, planned.schedule) == (10, 10, made.schedule)


@pytest.mark.parametrize("epochs", [1, 2.5])
def test_prompt_stream_and_schedule_drop_the_same_prompts(good, epochs, tmp_path):
    """Ten rows of two sets, four a rollout; three micro-steps an optimizer step, 16 an epoch, the last step of which has one."""
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"prompt": f"7 {n}", "answer": n}) + "\n" for n in range(3)))
    sizes = {"global_batch_size": 6, "generation_batch_size": 16, "micro_batch_size": 2, "allow_unaligned_generation": "true"}
    mixed = {"dataset": f"{good['dataset']}#7 {more}", "dataset_drop_last": "true", "num_train_epochs": epochs}
    made, inputs = load_inputs(parse_flags(good | sizes | mixed))
    close_rewards(inputs.rewards)
    assert (made.num_prompts, inputs.prompts.per_epoch, made.schedule.prompts_per_epoch) == (10, 8, 8)
    assert made.schedule.num_steps == {1: 6, 2.5: 15}[epochs]  # 16 micro-steps an epoch
    drawn = [prompt.row for prompt in inputs.prompts.take(16)]
    assert len(set(drawn[:8])) == len(set(drawn[8:])) == 8
    made, inputs = load_inputs(parse_flags(good | sizes | mixed | {"dataset_drop_last": "false"}))
    close_rewards(inputs.rewards)
    assert (inputs.prompts.per_epoch, made.schedule.num_steps) == (10, {1: 7, 2.5: 17}[epochs])


def test_run_settings_have_absolute_paths(good, tmp_path, monkeypatch):
    """Also where the reward changes the folder as it is imported. `export` and `eval --resume` take the settings from these records."""
    home = Path(good["model"]).parent
    (home / "mover.py").write_text("import os\nos.chdir('/')\ndef other(completions): return [0.0] * len(completions)\n")
    monkeypatch.chdir(home)
    flags = {"model": "model", "dataset": "data.jsonl#7", "reward_funcs": "reward.py:good mover.py:other", "eval_reward": "reward.py:good",
             "eval_datasets": "held=./data.jsonl", "output_dir": "new"}  # fmt: skip
    made, inputs = load_inputs(parse_flags(good | flags))
    close_rewards(inputs.rewards)
    expected = {"model": f"{home}/model", "dataset": f"{home}/data.jsonl#7", "eval_datasets": {"held": f"{home}/data.jsonl"},
                "reward_funcs": [f"{home}/reward.py:good", f"{home}/mover.py:other"], "eval_reward": f"{home}/reward.py:good",
                "output_dir": f"{home}/new"}  # fmt: skip
    recorded = {name: inputs.resume.origin.settings[name] for name in expected}
    assert recorded == expected
    assert {name: value for group in yaml.safe_load(as_yaml(made.checked.config)).values() for name, value in group.items()}.items() >= {
        "model": f"{home}/model", "output_dir": f"{home}/new"
    }.items()  # fmt: skip
    monkeypatch.chdir(home)
    old = replace(
        inputs.resume.origin, settings={**inputs.resume.origin.settings, "model": "model", "reward_funcs": flags["reward_funcs"].split()}
    )
    assert changes_since(old, inputs.resume.origin) == []  # written by an earlier version, in this folder
    assert [name for name in inputs.resume.origin.content if name.startswith("reward ")] == [
        "reward reward.py:good",
        "reward mover.py:other",
    ]


def write(path, text):
    path.write_text(text)
    return path


def damage_model(good, tmp_path):
    """A model whose only file of weights ends too early."""
    for file in os.listdir(good["model"]):
        content = open(os.path.join(good["model"], file), "rb").read()
        (tmp_path / file).write_bytes(content[:-10] if file.endswith(".safetensors") else content)
    return tmp_path


def run_in(at):
    """A folder as a run leaves it."""
    write(at / "run.lock", "")
    return write(at / "metrics.jsonl", "{}\n").parent


# name: (flags that replace good ones, what is said)
BAD = {
    "no such model": (lambda good, at: {"model": "/no/such/model"}, "model (/no/such/model) does not exist."),
    "a model that is cut short": (lambda good, at: {"model": damage_model(good, at)}, "it is damaged or was not downloaded completely."),
    "no such reward file": (lambda good, at: {"reward_funcs": "gone.py:f"}, "File 'gone.py' does not exist"),
    "no such reward function": (lambda good, at: {"reward_funcs": good["reward_funcs"] + "ly"}, "no function 'goodly'. Did you mean good?"),
    "no such built-in": (lambda good, at: {"reward_funcs": "lenght"}, "Unknown built-in reward 'lenght'. Did you mean length?"),
    "a file that exits": (
        lambda good, at: {"reward_funcs": f"{write(at / 'leaves.py', 'import sys; sys.exit(0)')}:f"},
        "it tried to end the process with SystemExit: 0."),
    "a column that is missing": (
        lambda good, at: {"reward_funcs": good["reward_funcs"].replace("good", "wants")}, "needs the column `hint`; the data set"),
    "a column that rows lack": (
        lambda good, at: {"dataset": write(at / "d.jsonl", '{"prompt": "5"}\n{"prompt": "6", "answer": 1}\n{"prompt": "7"}\n')},
        "Reward `good` needs the column `answer`, but 2 of 3 rows (d.jsonl line 1, d.jsonl line 3) lack it. Add it to these rows, as null"),
    "a column that rows of the first block lack": (
        lambda good, at: {"dataset": write(at / "d.jsonl", '{"prompt": "5"}\n{"prompt": "6", "answer": 1}\n{"prompt": "7"}\n'),
                          "streaming": "true", "shuffle_buffer_size": 2, "max_steps": 2, "max_prompt_length": 4},
        "Reward `good` needs the column `answer`, but 1 of 2 rows (d.jsonl line 1) lack it"),
    "weights for fewer functions": (lambda good, at: {"reward_weights": "1 2"}, "reward_weights has 2 values for 1 reward_funcs"),
    "no such data": (lambda good, at: {"dataset": str(at / "gone.jsonl")}, "gone.jsonl' does not exist."),
    "rows that are no prompts": (lambda good, at: {"dataset": write(at / "d.jsonl", '{"text": "a"}\n')}, "neither `prompt` nor `messages`"),
    "rows with images": (
        lambda good, at: {"dataset": write(at / "d.jsonl", '{"prompt": "a", "images": ["b.png"]}\n')},
        "which would not be passed to the model"),
    "no held-out data": (lambda good, at: {"eval_dataset": str(at / "gone.jsonl")}, "eval_dataset"),
    "an unknown service": (lambda good, at: {"report_to": "tensorbord"}, "tensorbord"),
    "heads that vLLM cannot share": (
        lambda good, at: {"world_size": 3, "vllm_tensor_parallel_size": 3, "global_batch_size": 12}, "vllm_tensor_parallel_size (3): "),
    "a model that vLLM samples from memory that nobody wrote": (
        lambda good, at: {"model": write_tiny(at / "tied", "qwen3_next", layer_types=["linear_attention", "full_attention"], tied=True)},
        "vLLM 0.32 does not tie the embeddings of Qwen3NextForCausalLM"),
    "a run that is there": (lambda good, at: {"output_dir": run_in(at), "resume": "never"},
                            "contains an earlier run, but resume is never"),
    "a file that no run wrote": (lambda good, at: {"output_dir": write(at / "config.yaml", "{}").parent},
                                 "config.yaml was not written by `train`, which would replace it"),
    "an empty list in a file": (lambda good, at: {"config": write(at / "c.yaml", "sequence_parallel: []")},
                                "sequence_parallel (c.yaml) requires a value"),
    "two ways to begin": (lambda good, at: {"overwrite_output_dir": "true", "resume": str(at)}, "Leave one of them out."),
    "a zero among it all": (lambda good, at: {"micro_batch_size": 0, "dataset": "gone.jsonl", "reward_funcs": "lenght"},
                            "micro_batch_size must be at least 1, not 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_plan_and_train_reject_the_same_inputs(good, tmp_path, name):
    change, said = BAD[name]
    flags = good | change(good, tmp_path)
    by_plan, by_train = list_problems(plan_run, flags), list_problems(load_inputs, flags)
    assert by_plan == by_train
    assert any(said in message for message in by_plan), by_plan
    assert len(by_plan) == {"a zero among it all": 3, "heads that vLLM cannot share": 3}.get(name, 1)  # the latter: by heads, width, groups


def test_reward_columns_may_be_null_and_one_of_alternatives_suffices(good, tmp_path):
    rows = [{"prompt": "5", "answer": None}, {"prompt": "6", "answer": 6}]
    data = write(tmp_path / "d.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert list_problems(plan_run, good | {"dataset": data}) == []
    data = write(tmp_path / "e.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "7", "solution": "7"}]))
    assert list_problems(plan_run, good | {"dataset": data, "reward_funcs": "accuracy"}) == []
    data = write(tmp_path / "f.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "7"}]))
    assert list_problems(plan_run, good | {"dataset": data, "reward_funcs": "accuracy"}) == [
        "Reward `accuracy` needs the column `answer` or `solution`, but 1 of 3 rows (f.jsonl line 3) lack it. Add it to these rows, as "
        "null where it does not apply."
    ]


def test_plan_lists_inputs_missing_on_this_machine_as_unchecked(good, tmp_path):
    foreign = write(
        tmp_path / "grpo.yaml",
        "model_name_or_path: /data/models/qwen\nper_device_train_batch_size: 4\nnum_generations: 4\nreport_to: swanlab\n",
    )
    found = plan_run(parse_flags({"dialect": "trl", "config": foreign, "dataset": "someone/prompts"}))
    assert "whether swanlab can be reported to" in found.not_checked
    assert "the model's weights (/data/models/qwen is not on this machine)" in found.not_checked
    assert "the rows of dataset (someone/prompts is not on this machine)" in found.not_checked


def test_plan_with_missing_adapter_uses_rank_of_settings(good, tmp_path):
    foreign = write(tmp_path / "run.sh", "megatron rlhf --tuner_type lora --lora_rank 16 --adapters /data/adapter --loss_type grpo")
    found = plan_run(parse_flags(good | {"dialect": "swift", "config": foreign}))
    assert "adapters (/data/adapter is not on this machine): ranks and targets are taken from the settings" in found.not_checked
    assert found.checked.config.tuner.lora_rank == 16
    (message,) = list_problems(plan_run, good | {"tuner_type": "lora", "adapters": "/data/adapter"})
    assert message.startswith("adapters: /data/adapter is not an adapter")


def test_relative_paths_are_resolved_before_a_reward_changes_directory(good, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text("import os\nprint('hello')\nos.chdir('/')\ndef f(completions): return []\n")
    os.symlink(good["model"], tmp_path / "model")
    write(tmp_path / "lengths", "3 4\n")
    assert plan_run(parse_flags(good | {"lengths": "lengths", "reward_funcs": "moves.py:f"})).cost is not None
    assert capsys.readouterr().out == "", "stdout is for the plan"
    sys.modules.pop(next(name for name in sys.modules if "_reward_moves_" in name))
    os.chdir(tmp_path)
    made, inputs = load_inputs(parse_flags(good | {"model": "model", "output_dir": "out", "reward_funcs": "moves.py:f"}))
    assert os.getcwd() == "/"
    assert made.checked.config.run.output_dir == str(tmp_path / "out") and made.checked.config.run.resume == "auto"
    assert inputs.model_path == tmp_path / "model"


def test_plan_with_all_inputs_imports_no_torch(good):
    good = good | {"report_to": "tensorboard"}
    program = (
        "import sys; from megatron_grpo.cli import main; "
        f"code = main(['plan', '--json', *{[word for name, value in good.items() for word in ('--' + name, value)]!r}]); "
        "heavy = [name for name in ('torch', 'transformers', 'megatron', 'vllm') if name in sys.modules]; "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_plan_rejects_invalid_ref_model_and_accepts_hub_name(capsys):
    words = ["plan", "--beta", "0.1", "--global_batch_size", "8", "--num_generations", "4", "--ref_model"]
    assert main([*words, "nowhere"]) == 2 and "ref_model (nowhere) is neither a local directory nor a Hub name" in capsys.readouterr().err
    assert main([*words, "owner/name"]) == 0 and "owner/name is not on" in " ".join(capsys.readouterr().out.split())


PROGRAM = """
open({mark!r}, "w")
def right(completions): return [1.0 for _ in completions]
def look(text: str) -> str:
    "Looks. Args: text: what."
args = GRPOConfig(per_device_train_batch_size=8)
trainer = GRPOTrainer(model="someone/model", args=args, reward_funcs=[right], train_dataset="someone/rows", {more})
{train}
"""


@pytest.mark.parametrize("more", ["", "tools=[look]"])
@pytest.mark.parametrize("train", ["trainer.train()", ""])
def test_plan_of_python_script_does_not_run_it(tmp_path, monkeypatch, capfd, more, train):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.py", PROGRAM.format(mark=str(tmp_path / "ran"), more=more, train=train))
    assert main(["plan", "--dialect", "trl", "--config", "train.py"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "the reward train.py:right (train.py is read, not run)" in said
    assert ("the environment train.py:look (train.py is read, not run)" in said) == bool(more)
    assert not (tmp_path / "ran").exists()


def test_plan_announces_imports_of_user_files(good, tmp_path, capfd):
    file = write(tmp_path / "loud.py", "import sys\nprint('loud', file=sys.stderr)\ndef f(completions): return [0.0] * len(completions)\n")
    plan_run(parse_flags(good | {"reward_funcs": f"{file}:f"}))
    told = capfd.readouterr().err
    assert told.index(f"plan imports {file}:f, which executes") < told.index("loud\n")
    plan_run(parse_flags(good | {"reward_funcs": "math"}))
    assert "imports" not in capfd.readouterr().err


def test_plan_warns_that_missing_model_was_not_checked(good):
    found = plan_run(parse_flags({"model": "someone/model"}))
    assert "someone/model is not on this machine and was not checked" in found.warnings[0]
    assert not any("was not checked" in warning for warning in plan_run(parse_flags(good)).warnings)


def test_the_day_that_a_chat_template_prints_is_recorded_and_compared_between_ranks(good, tmp_path):
    model = write_tiny(tmp_path / "model", "qwen3")
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y') }} {{ messages[0].content }}")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": [{"role": "user", "content": "5 7"}], "answer": 7}) + "\n")
    flags = good | {"model": model, "dataset": chats, "output_dir": tmp_path / "out"}
    _, inputs = load_inputs(parse_flags(flags))
    close_rewards(inputs.rewards)
    day = inputs.resume.origin.content[DAY]
    assert values_equal_on_ranks(parse_flags(flags).config, inputs.resume.origin.content)[f"The {DAY}"] == day == date.today().isoformat()
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    _, inputs = load_inputs(parse_flags(flags))
    close_rewards(inputs.rewards)
    assert DAY not in inputs.resume.origin.content
