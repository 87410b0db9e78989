"""The rows of refusals name settings that there are: what a function of a rule looks at is typed nowhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo.run.config.table import table

PACKAGE = Path(megatron_grpo.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if " Rule(" in file.read_text(encoding="utf-8"))


def unknown_names(source: str) -> set[str]:
    """Of what is read of the settings `c`: all that is neither a setting, nor given to `settings_of`, nor a word that is found."""
    nodes = list(ast.walk(ast.parse(source)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "c"}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in ("settings_of", "SimpleNamespace")]
    given = {"cfg", "plays", "player", "teacher", "name", "value", "off"} | {word.arg for call in calls for word in call.keywords}
    words = {key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    return read - table().keys() - given - words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_rules_read_settings_that_there_are(file):
    assert unknown_names(file.read_text(encoding="utf-8")) == set()


def test_a_name_that_is_no_setting_is_seen():
    assert unknown_names('Rule("lr", lambda c: c.lrr > c.lr or c.near, "", {"near": 1})') == {"lrr"}
