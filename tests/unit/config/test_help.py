"""`--help` of each command reads right: its own usage once, and no default told twice."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_how_the_command_is_used_once_and_what_it_does(command, capsys):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: megatron-grpo {command}") and told.count("usage:") == 1
    assert ("--lora_rank" in told) == (command != "doctor"), "doctor takes no settings"
    assert "build_run" not in told and "\n\n\n" not in told
    assert not re.search(r"default:[^()]*\)\s\(default", told), "a default is told once"
