"""Python files that build TRL's GRPOConfig: they are read and not run, and values that need a run are reported."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.compat.python import read_python
from megatron_grpo.run.config import parse

START = """import os
from trl import GRPOConfig, GRPOTrainer
open({mark!r}, "w")
LR = 3e-6
NAME = "math.jsonl"
SEED = 1
SEED += 1
def right(completions, **columns): return [1.0 for _ in completions]
"""


def read(config: str, trainer: str = "", more: str = "", mark: str = "/nowhere/mark") -> tuple[dict, list[str]]:
    text = f"{START.format(mark=mark)}{more}\nargs = GRPOConfig({config})\nGRPOTrainer(args=args, {trainer}).train()\n"
    entries, problems = read_python(text, source="train.py", path="dir/train.py")
    return {entry.name: entry.raw for entry in entries}, [problem.message for problem in problems]


def test_python_config_is_read_as_trl_arguments_without_running_it(tmp_path):
    """Constants, functions of the file, data sets by name, and LoRA: up to the settings that they become here."""
    file, mark = tmp_path / "train.py", tmp_path / "ran"
    lora = "from peft import LoraConfig\nlora = LoraConfig(r=4, target_modules=['q_proj'], bias='none')"
    words = 'learning_rate=LR, beta=-0.0, num_generations=4, chat_template_kwargs={"enable_thinking": False, "effort": 2}'
    trainer = "model='m', reward_funcs=[right, accuracy_reward], train_dataset=load_dataset(NAME, split='train'), peft_config=lora"
    file.write_text(f"{START.format(mark=str(mark))}{lora}\nargs = GRPOConfig({words})\nGRPOTrainer(args=args, {trainer}).train()\n")
    parsed = parse(["--dialect", "trl", "--config", str(file)], dialects=lambda: DIALECTS)
    cfg = parsed.config
    assert [problem.message for problem in parsed.problems] == []
    assert (cfg.optimizer.lr, cfg.data.dataset, cfg.rewards.reward_funcs) == (3e-6, "math.jsonl", [f"{file}:right", "math"])
    assert (cfg.tuner.tuner_type, cfg.tuner.lora_rank, cfg.tuner.target_modules) == ("lora", 4, ["q_proj"])
    assert cfg.data.chat_template_kwargs == {"enable_thinking": False, "effort": 2}
    assert not mark.exists()


def make_adapter_code(tmp_path, lora: str, *flags: str) -> tuple[dict, dict]:
    """The adapter's settings of a file with this LoraConfig, or of TRL's command line without one; and the defaults that plan lists."""
    file = tmp_path / "train.py"
    file.write_text(f"args = GRPOConfig(per_device_train_batch_size=8)\nGRPOTrainer(model='m', args=args, peft_config={lora})\n")
    parsed = parse(["--dialect", "trl", *(["--config", str(file)] if lora else ["--use_peft"]), *flags], dialects=lambda: DIALECTS)
    assert not parsed.problems
    return vars(parsed.config.tuner), {row.name: row.theirs for row in parsed.defaults if row.name.startswith("lora_")}


def test_python_config_adapter_defaults_apply_if_adapter_object_is_built(tmp_path):
    """LoraConfig has PEFT's, and the command line those of TRL's ModelConfig."""
    from peft import LoraConfig
    from trl import ModelConfig

    theirs = LoraConfig()
    found, listed = make_adapter_code(tmp_path, "LoraConfig(task_type='CAUSAL_LM')")
    assert (found["tuner_type"], found["lora_rank"], found["lora_alpha"]) == ("lora", theirs.r, theirs.lora_alpha)
    assert (found["lora_dropout"], found["use_rslora"], listed["lora_alpha"]) == (theirs.lora_dropout, theirs.use_rslora, "8")
    assert "lora_r" not in listed and "lora_dropout" not in listed, "they are ours too"
    found, _ = make_adapter_code(tmp_path, "LoraConfig(r=4, lora_dropout=0.1)", "--lora_alpha", "16")
    assert (found["lora_rank"], found["lora_alpha"], found["lora_dropout"]) == (4, 16.0, 0.1)
    assert make_adapter_code(tmp_path, "LoraConfig()", "--use_peft", "false")[0]["tuner_type"] == "full"

    theirs = ModelConfig()
    found, listed = make_adapter_code(tmp_path, "")
    assert (found["lora_rank"], found["lora_alpha"], found["lora_dropout"]) == (theirs.lora_r, theirs.lora_alpha, theirs.lora_dropout)
    assert (listed["lora_r"], listed["lora_dropout"]) == ("16", "0.05")


@pytest.mark.parametrize(
    ("words", "name", "said"),
    [
        ("learning_rate=LR * 2", "learning_rate", "LR * 2"),
        ("seed=SEED", "seed", "SEED"),  # given twice
        ("output_dir=os.environ['OUT']", "output_dir", "os.environ['OUT']"),
        ("epsilon=me", "epsilon", "me"),  # me = me
    ],
)
def test_python_config_with_computed_value_is_marked_unknown(words, name, said):
    found, problems = read(words, more="me = me")
    assert (found[name], problems) == ([f"\x01{said}"], [])


@pytest.mark.parametrize(
    "data",
    [
        "load_dataset('text', data_files='a')", "load_dataset('json', data_files=['a', 'b'])", "load_dataset('a', split='test')",
        "load_dataset('a', 'main')",
    ],
)  # fmt: skip
def test_python_config_with_dataset_other_than_training_split_is_marked_unknown(data):
    assert read("", "train_dataset=load_dataset('json', data_files='a.jsonl', split='train')")[0]["dataset_name"] == "a.jsonl"
    assert read("", f"train_dataset={data}")[0]["dataset_name"] == [f"\x01{data}"]


@pytest.mark.parametrize(
    ("config", "trainer", "more", "sentence"),
    [
        ("**words", "", "", "GRPOConfig gets words, which cannot be determined"),
        ("", "callbacks=[Stop()]", "", "GRPOTrainer's callbacks ([Stop()]) is not read here"),
        ("", "", "LoraConfig(r=4, bias='all')", "LoraConfig's bias ('all') is not read here"),
        ("", "peft_config=get_peft_config(a)", "", "GRPOTrainer's peft_config (get_peft_config(a)) cannot be determined"),
        ("", "", "GRPOConfig()", "builds 2 GRPOConfig"),
        ("", "", "LoraConfig(r=4)\nLoraConfig(r=8)", "builds 2 LoraConfig"),
        ("", "", "def", "line 9 is not Python"),
    ],
)
def test_python_config_with_unsupported_code_gives_one_problem(config, trainer, more, sentence):
    _, problems = read(config, trainer, more)
    assert len(problems) == 1 and sentence in problems[0], problems
