"""`--help`: descriptions of commands, settings by section, and the search for a setting."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo.cli import COMMANDS, main
from megatron_grpo.run import config
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import MAPS, keys, table

PACKAGE = Path(megatron_grpo.__file__).parent


@pytest.mark.parametrize("command", COMMANDS)
def test_help_starts_with_description_and_one_usage_line(command, capsys):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    what, usage = told.splitlines()[:3:2]
    assert what == COMMANDS[command]["help"][0] and what.endswith(".") and len(what) <= 110
    assert usage.startswith(f"usage: megatron-grpo {command} ") and told.count("usage:") == 1
    assert ("--lora_rank" in told) == (command not in ("doctor", "init", "completion", "report", "watch")), "these take no settings"
    assert "\n\n\n" not in told
    assert not re.search(r"default:[^()]*\)\s\(default", told), "a default is told once"


@pytest.mark.parametrize("command", COMMANDS)
def test_command_table_rows_name_functions_with_listed_arguments(command):
    row = COMMANDS[command]
    assert row.keys() == {"run", "takes", "needs", "usage", "help"} and set(row["needs"]) <= {"linux", "launcher", "files", "quiet"}
    module, _, name = row["run"].partition(":")
    inspect.signature(getattr(importlib.import_module(module), name)).bind(*row["takes"])


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_names_no_file_and_no_class_of_the_package(command, capsys):
    main([*command.split(), "--help", *(["all"] if command == "train" else [])])
    told = capsys.readouterr().out
    modules = {path.name for path in PACKAGE.rglob("*.py")} - {"__init__.py"}
    classes = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"^class (\w+)", path.read_text(), re.M)}
    assert {word for word in re.findall(r"\w+\.py\b", told) if word in modules} == set()
    inner = {name for name in classes if re.search(r"[a-z][A-Z]", name)}
    assert inner & set(re.findall(r"\w+", told)) == set() and len(inner) > 100


def test_help_overview_describes_each_command_in_the_imperative(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in COMMANDS:
        verb = re.search(rf"^  {command} +(\w+) ", told, re.M)[1]
        assert verb[0].isupper() and not verb.endswith("s"), (command, verb)
    assert "Train a model with GRPO." in told and "--help-search" in told


def list_flags(capsys, *words):
    """What `train` explains, flag by flag."""
    assert main(["train", *words]) == 0
    return re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.M)


def test_help_lists_every_setting_or_its_map(capsys):
    in_maps = [key for name in MAPS for key in keys()[name]]
    assert len(in_maps) == len(set(in_maps)), "a setting is a key of one map"
    assert all(len({table()[key].group for key in keys()[name]}) == 1 for name in MAPS)
    listed = {name for name, setting in table().items() if not setting.is_hidden}
    assert sorted(list_flags(capsys, "--help")) == sorted({*listed, *MAPS} - {*in_maps} | {"config", "print_config", "help", "help-search"})
    assert sorted(list_flags(capsys, "--help", "all")) == sorted(listed)
    assert list_flags(capsys, "--help", "loss-kwargs", "learning_rate") == [*keys()["loss_kwargs"], "lr"]
    assert list_flags(capsys, "--help", "kernels") == keys()["kernel_kwargs"]
    assert main(["--help", "kernels"]) == 0, "without a command"
    assert re.findall(r"^  --(\w+)", capsys.readouterr().out, re.M) == keys()["kernel_kwargs"]
    main(["train", "--help"])
    told = capsys.readouterr().out
    assert all(key in told for key in in_maps) and not re.search(r"\(default: [^()]*\)\s\(", told)


def test_help_lists_the_sections_at_its_end_and_explains_each(capsys):
    main(["train", "--help"])
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out.rpartition("Sections,")[2], re.M)
    assert listed == list(Config().groups())
    for section in listed:
        own = [name for name, setting in table().items() if setting.group == section and not setting.is_hidden]
        assert [name for name in list_flags(capsys, "--help", section) if table()[name].group == section] == own


@pytest.mark.parametrize(
    ("searched", "found", "not_found"),
    [
        (["lr"], {"lr", "vit_lr", "lr_decay_style", "min_lr"}, {"loss_type"}),
        (["learning_rate"], {"lr"}, {"min_lr"}),
        (["gradient-accumulation"], {"gradient_accumulation_steps"}, {"lr"}),
        (["EXPERT", "parallel"], {"expert_model_parallel_size"}, {"tensor_model_parallel_size", "moe_permute_fusion"}),
    ],
)
def test_help_search_finds_names_aliases_and_help_text(capsys, searched, found, not_found):
    flags = set(list_flags(capsys, "--help-search", *searched))
    assert found <= flags and not flags & not_found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--help", "lora_rnk"], "'lora_rnk' is not a setting or section. Did you mean lora_rank"),
        (["--help", "zzz"], "Sections: model, tuner,"),
        (["--help-search", "zzz"], "No setting has 'zzz' in its name, aliases or help."),
        (["--help-search"], "--help-search needs a word"),
    ],
)
def test_help_on_an_unknown_name_is_an_error(capsys, words, message):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_texts_are_phrases_without_idiom():
    odd = re.compile(r"\b(is said|is told|so many|so long|nobody|whatever|of its own|kept words|pictures?|timetable|judged?)\b")
    assert {name: row.help for name, row in table().items() if odd.search(row.help) or row.help.endswith(".")} == {}


def test_further_datasets_setting_is_hidden_in_help(capsys):
    assert config.resolve(["--further_datasets", "b.jsonl", "--dataset", "a.jsonl"]).data.further_datasets == ["b.jsonl"]
    assert main(["train", "--help", "all"]) == 0
    assert "further_datasets" not in capsys.readouterr().out
