"""Parsing of command lines and files into one Config that knows the source of each value."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import parse, resolve, table
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.write import as_yaml
from tests.checked import check


def list_problems(*argv: str, **kwargs) -> list:
    with pytest.raises(ConfigError) as error:
        resolve(argv, dialects=lambda: DIALECTS, **kwargs)
    return list(error.value.problems)


def write(path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_parse_reads_common_command_line_forms():
    cfg = resolve(
        (
            "--micro-batch-size 4 --bf16 true --sequence_parallel --reward_funcs a b.py:f --epsilon_high none "
            "--top_k=5 --no_export_hf --save-steps 1e2 --reward_weights -0.5 1 --stop"
        ).split()
    )
    assert (cfg.batch.micro_batch_size, cfg.model.torch_dtype, cfg.parallel.sequence_parallel) == (4, "bfloat16", True)
    assert (cfg.rewards.reward_funcs, cfg.rewards.reward_weights, cfg.rollout.stop) == (["a", "b.py:f"], [-0.5, 1.0], [])
    assert (cfg.grpo.epsilon_high, cfg.rollout.top_k, cfg.run.export_hf, cfg.run.save_steps) == (None, 5, False, 100)


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), ("1", True), ("no", False), ("on", True), ("0", False)])
def test_parse_bool_accepts_common_spellings(word, value):
    assert resolve(["--export_hf", word]).run.export_hf is value


def test_bf16_false_is_float32_and_contradicting_it_is_an_error():
    assert resolve(["--bf16", "false"]).model.torch_dtype == "float32"
    [problem] = list_problems("--bf16", "--torch_dtype", "float32")
    assert problem.flags == ("bf16", "torch_dtype")


def test_flat_and_grouped_files_mean_the_same(tmp_path):
    flat = write(tmp_path / "flat.yaml", "micro-batch-size: 2\nlr: 1e-5\nreward_funcs: math\nmodel: x\nepsilon_high: null\n")
    grouped = write(
        tmp_path / "grouped.yaml",
        "batch: {micro_batch_size: 2}\noptimizer:\n  lr: 1e-5\nrewards: {reward_funcs: "
        "[math]}\nmodel: {model: x}\n"
        "grpo: {epsilon_high: none}\n",
    )
    a, b = resolve(["--config", flat]), resolve(["--config", grouped])
    assert a.groups() == b.groups()
    assert a.optimizer.lr == 1e-5, "PyYAML reads 1e-5 as a string"


def test_parse_prefers_command_line_then_later_files(tmp_path):
    first, second = write(tmp_path / "a.yaml", "lr: 1\nseed: 1\ntop_k: 1\n"), write(tmp_path / "b.yaml", "learning_rate: 2\nseed: 2\n")
    cfg = resolve(["--seed", "3", "--config", first, second])
    assert (cfg.optimizer.lr, cfg.run.seed, cfg.rollout.top_k) == (2, 3, 1)
    assert (cfg.sources["lr"], cfg.sources["seed"], cfg.sources["top_k"], cfg.sources["min_lr"]) == (
        "b.yaml",
        "command line",
        "a.yaml",
        "default",
    )


def test_parse_reports_all_problems_together(tmp_path):
    file = write(tmp_path / "run.yaml", "mirco_batch_size: 2\nlr: fast\nlr: slow\nbatch: {num_generation: 3}\n")
    found = list_problems("--config", file, "--top_q", "1", "--seed", "x", "stray", "--seed", "1", "2")
    text = "\n".join(map(str, found))
    for part in (
        "mirco_batch_size in run.yaml is not a setting. Did you mean micro_batch_size?",
        "lr (run.yaml) must be a number, not 'slow'",
        "lr is set twice in run.yaml",
        "Did you mean num_generations",
        "top_q is not a setting",
        "seed takes one value, but got 2 (x stray)",
        "seed takes one value, but got 2 (1 2)",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--seed", "1.5"], "seed must be a whole number, not '1.5'"),
        (["--seed"], "seed requires a value"),
        (["--lr", "nan"], "lr must be a number"),
        (["--seed", "none"], "seed cannot be none"),
        (["--tuner_type", "dora"], "dora"),
        (["--config"], "config requires the name of a file"),
        (["--config", "/nowhere/x.yaml"], "cannot be read"),
        (["--lr", "1", "--learning_rate", "2"], "set the same setting"),
        (["x"], "does not belong to a flag"),
    ],
)
def test_parse_problem_names_flag_and_value(argv, part):
    [problem] = list_problems(*argv)
    assert part in problem.message


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "lr: {deep: {deeper: 1}}"])
def test_files_that_are_no_configuration_are_refused(tmp_path, text):
    assert len(list_problems("--config", write(tmp_path / "x.yaml", text))) == 1


def test_a_setting_in_an_unknown_section_is_an_error_that_names_the_sections(tmp_path):
    [problem] = list_problems("--config", write(tmp_path / "x.yaml", "trainer: {lr: 1}"))
    assert problem.flags == ("trainer.lr",) and "optimizer" in problem.message


def test_parse_takes_world_size_from_launcher():
    assert resolve([], launcher_world_size=8).parallel.world_size == 8
    assert resolve(["--world_size", "8"], launcher_world_size=8).sources["world_size"] == "launcher"
    assert resolve([]).parallel.world_size == 1
    [problem] = list_problems("--num_processes", "4", launcher_world_size=8)
    assert problem.flags == ("num_processes",) and problem.nearest == {"num_processes": [8]}


def test_messages_name_aliases_as_given():
    with pytest.raises(ConfigError) as error:
        check(["--num_processes", "3", "--global_batch_size", "16"])
    [problem] = error.value.problems
    assert "num_processes" in problem.flags and "world_size" not in problem.message


def test_nearest_values_of_settings_are_valid():
    def nearest(*argv):
        with pytest.raises(ConfigError) as error:
            check(argv)
        return [problem.nearest for problem in error.value.problems]

    assert nearest("--top_p", "1.5") == [{"top_p": [1.0]}]
    assert nearest("--lr_decay_style", "cosin") == [{"lr_decay_style": ["cosine"]}]
    assert nearest("--top_p", "1.5", "--lr_decay_style", "cosin") == [{}, {}], "changing one of them is not enough"


def test_written_config_file_parses_to_equal_config(tmp_path):
    cfg = check(["--num_generations", "4", "--stop", "a", "b: c", "--lr", "1e-5", "--generation_batch_size", "32"]).config
    again = check(["--config", write(tmp_path / "config.yaml", as_yaml(cfg))]).config
    assert again.groups() == cfg.groups()


def test_written_config_file_of_framework_run_is_native(tmp_path):
    checked = check(
        "--dialect trl --num_processes 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --steps_per_generation 6".split()
    )
    again = check(["--world_size", "2", "--config", write(tmp_path / "config.yaml", as_yaml(checked.config))])
    assert again.config.plan.dialect is None and again.sizes == checked.sizes


def test_settings_have_one_name_each_over_all_groups():
    names = [f.name for section in fields(Config) if section.name in Config().groups() for f in fields(section.default_factory)]
    aliases = [alias for setting in table().values() for alias in setting.aliases]
    assert len(set(names + aliases)) == len(names + aliases)
    assert all(setting.kind in ("int", "float", "bool", "str", "Any") and setting.help is not None for setting in table().values())


def test_setting_defaults_are_parsed_back_from_text():
    for setting in table().values():
        default = setting.default
        words = [] if default == [] else default if isinstance(default, list) else ["none" if default is None else str(default)]
        cfg = resolve([f"--{setting.name}", *map(str, words)])
        assert getattr(getattr(cfg, setting.group), setting.name) in (default, 1), setting.name  # world_size resolves to 1


def test_a_launch_script_is_read_like_a_file(tmp_path):
    script = write(
        tmp_path / "run.sh",
        """#!/bin/bash
# --micro_batch_size 9
MODEL=/models/qwen
export CUDA_VISIBLE_DEVICES=0,1,2,3
NPROC_PER_NODE=4 \\
megatron rlhf \\
    --model "$MODEL" \\
    --micro_batch_size 2 \\
    --global_batch_size 32 --packing true \\
    --tensor_model_parallel_size ${TP:-2} # tail
""",
    )
    parsed = parse(["--config", script, "--dialect", "swift-megatron"], dialects=lambda: DIALECTS)
    cfg = parsed.config
    assert not parsed.problems
    assert (cfg.model.model, cfg.batch.micro_batch_size, cfg.batch.global_batch_size) == ("/models/qwen", 2, 32)
    assert (cfg.parallel.tensor_model_parallel_size, cfg.parallel.world_size) == (2, 4)
    assert parsed.aside == {"run.sh": ["packing"]}


def test_help_and_plan_import_neither_torch_nor_numpy(tmp_path):
    code = (
        "import sys; from megatron_grpo.cli import main; main(['--help']); main(['train', '--help']); main(['plan']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers', 'megatron', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=tmp_path).returncode == 0


def test_print_config_shows_values_and_where_they_come_from(capsys, tmp_path):
    from megatron_grpo.cli import main

    file = write(tmp_path / "run.yaml", yaml.safe_dump({"lr": 0.5}))
    assert main(["train", "--print_config", "--config", file, "--generation_batch_size", "32"]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "run.yaml" in lines["lr"] and "0.5" in lines["lr"]
    assert "command line" in lines["generation_batch_size"] and "derived" in lines["steps_per_generation"] and "default" in lines["top_p"]


def test_system_setting_reads_text_file_and_rejects_other_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("Think first.\n")
    (tmp_path / "prompt.md").write_text("Think first.")
    assert parse(["--system", "prompt.txt"]).config.data.system == "Think first.\n"
    assert parse(["--system", "Think."]).config.data.system == "Think."
    for name, said in (("prompt.md", "is the name of a file"), ("absent.txt", "cannot be read as a text file: No such file")):
        (problem,) = parse(["--system", name]).problems
        assert said in problem.message


def test_parse_config_reads_a_pipe_and_rejects_an_endless_file(tmp_path):
    (problem,) = parse(["--config", "/dev/zero"]).problems
    assert problem.message == "config /dev/zero cannot be read: it has more than 64 million characters."
    read, write = os.pipe()
    os.write(write, b"num_generations: 4\n")
    os.close(write)
    assert parse(["--config", f"/dev/fd/{read}"]).config.batch.num_generations == 4
    os.close(read)


def test_plan_rollouts_setting_is_bounded():
    with pytest.raises(ConfigError, match="plan_rollouts .100000000. must be at least 1 and at most 1000"):
        check(["--plan_rollouts", "1e8"])


def test_settings_have_help_text():
    assert [name for name, setting in table().items() if not setting.help] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--loss_kwargs", "real_tau=0.25", "fipo_clip_range=none"],
        ["--loss-kwargs", '{"real_tau": 0.25, "fipo_clip_range": null}'],
        ["--loss_kwargs.real_tau", "0.25", "--loss_kwargs.fipo_clip_range", "none"],
        ["--real_tau", "0.25", "--loss_kwargs", "fipo_clip_range=none"],
    ],
)
def test_parse_map_setting_sets_its_keys(words):
    cfg = resolve(words)
    assert (cfg.grpo.real_tau, cfg.grpo.fipo_clip_range) == (0.25, None)
    assert cfg.typed == {"real_tau": "real_tau", "fipo_clip_range": "fipo_clip_range"}


def test_parse_map_section_of_file_with_or_without_group(tmp_path):
    for text in ("loss_kwargs: {real_tau: 0.25}", "grpo:\n  loss_kwargs:\n    real_tau: 0.25", "loss_kwargs: real_tau=0.25"):
        (tmp_path / "a.yaml").write_text(text)
        assert resolve(["--config", str(tmp_path / "a.yaml")]).grpo.real_tau == 0.25
    assert resolve(["--config", str(tmp_path / "a.yaml"), "--real_tau", "0.5"]).grpo.real_tau == 0.5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--loss_kwargs", "lr=1"], "loss_kwargs has no key lr. Supported: sapo_temperature_pos,"),
        (["--loss_kwargs", "real_tau"], "loss_kwargs requires name=value, or a JSON object, not 'real_tau'."),
        (["--loss_kwargs", "real_tau=warm"], "real_tau must be a number, not 'warm'."),
        (["--loss_kwargs.lr", "1"], "loss_kwargs.lr is not a setting."),
        (["--loss_kwargs", "real_tau=1", "--real_tau", "2"], None),
    ],
)
def test_parse_map_with_invalid_key_is_rejected(words, says):
    parsed = parse(words)
    assert [says in problem.message for problem in parsed.problems] == ([True] if says else [])
    assert says or parsed.repeated == ["real_tau is set twice on the command line (1.0, 2.0): the last value is used."]


@pytest.mark.parametrize("none", ["none", "null", "None"])
def test_parse_none_clears_optional_settings_and_is_rejected_elsewhere(none, tmp_path):
    flags = ("eval_dataset", "system", "tools", "eval_datasets")
    cfg = parse([word for name in flags for word in (f"--{name}", none)]).config
    assert (cfg.eval.eval_dataset, cfg.data.system, cfg.turns.tools, cfg.eval.eval_datasets) == ("", None, [], {})
    (tmp_path / "run.yaml").write_text("".join(f"{name}:\n" for name in flags))
    assert parse(["--config", str(tmp_path / "run.yaml")]).config.eval.eval_dataset == ""
    [problem] = parse(["--output_dir", none]).problems
    assert problem.message == "output_dir cannot be none. Expected a word."
    [problem] = parse(["--loss_type", none]).problems
    assert problem.message.startswith(f"loss_type cannot be {none!r}. Supported: grpo")
