"""Settings that rules read exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo.run.config.rules import PLUG_INS, Rule
from megatron_grpo.run.config.table import table
from megatron_grpo.run.plug_ins import PLUGINS, PlugIn

PACKAGE = Path(megatron_grpo.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if " Rule(" in file.read_text(encoding="utf-8"))


def list_given_names(source: str) -> set[str]:
    """What `make_namespace` is given, for the rules of the file and of plug-ins."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func) in ("make_namespace", "SimpleNamespace")]
    return {word.arg for call in named for word in call.keywords}


GIVEN_TO_PLUG_INS = set().union(*(list_given_names(file.read_text(encoding="utf-8")) for file in FILES))


def find_unknown_names(source: str, given: set[str] = frozenset()) -> set[str]:
    """Of what is read of the settings `c`: all that is neither a setting, nor given to `make_namespace`, nor a word that is found."""
    nodes = list(ast.walk(ast.parse(source)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "c"}
    given = {"cfg", "plays", "player", "teacher", "name", "value", "off"} | list_given_names(source) | given
    words = {key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    return read - table().keys() - given - words


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}.{file.stem}")
def test_rules_read_existing_settings(file):
    given = GIVEN_TO_PLUG_INS if "plugins" in file.parts else set()
    assert find_unknown_names(file.read_text(encoding="utf-8"), given) == set()


def test_rules_check_detects_unknown_setting_name():
    assert find_unknown_names('Rule("lr", lambda c: c.lrr > c.lr or c.near, "", {"near": 1})') == {"lrr"}


@pytest.mark.parametrize("name", PLUG_INS)
def test_plug_in_settings_and_rules_exist(name):
    assert set(PLUG_INS[name].settings.split()) <= table().keys()
    assert all(isinstance(row, (Rule, tuple)) for row in PlugIn(f"{PLUGINS}.{PLUG_INS[name].path}").load())
