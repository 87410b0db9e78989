"""`--help` of each command reads right: its own usage once, and no default told twice."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.cli import COMMANDS, main
from megatron_grpo.config.table import MAPS, keys, table


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_how_the_command_is_used_once_and_what_it_does(command, capsys):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: megatron-grpo {command}") and told.count("usage:") == 1
    assert ("--lora_rank" in told) == (command != "doctor"), "doctor takes no settings"
    assert "build_run" not in told and "\n\n\n" not in told
    assert not re.search(r"default:[^()]*\)\s\(default", told), "a default is told once"


def flags_of(capsys, *words):
    """What `train` explains, flag by flag."""
    assert main(["train", *words]) == 0
    return re.findall(r"^  --(\w+)", capsys.readouterr().out, re.M)


def test_every_setting_is_in_the_help_or_in_its_map_and_explained_on_demand(capsys):
    in_maps = [key for name in MAPS for key in keys()[name]]
    assert len(in_maps) == len(set(in_maps)), "a setting is a key of one map"
    assert all(len({table()[key].group for key in keys()[name]}) == 1 for name in MAPS)
    listed = {name for name, setting in table().items() if not setting.is_hidden}
    assert sorted(flags_of(capsys, "--help")) == sorted({*listed, *MAPS} - {*in_maps} | {"config", "print_config", "help"})
    assert sorted(flags_of(capsys, "--help", "all")) == sorted(listed)
    assert flags_of(capsys, "--help", "loss-kwargs", "learning_rate") == [*keys()["loss_kwargs"], "lr"]
    assert flags_of(capsys, "--help", "kernels") == keys()["kernel_kwargs"]
    main(["train", "--help"])
    told = capsys.readouterr().out
    assert all(key in told for key in in_maps)
