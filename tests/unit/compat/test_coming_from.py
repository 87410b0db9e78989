"""docs/coming_from.md: each framework script and the native command beside it give the same run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from megatron_grpo.run.config.settings import Config
from tests.checked import check

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"


def flatten_config(config: Config) -> dict[str, object]:
    groups = [field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, field.name))]
    return {f"{group}.{name}": value for group in groups for name, value in dataclasses.asdict(getattr(config, group)).items()}


@pytest.mark.parametrize("dialect", ["verl", "slime"])
def test_coming_from_page_native_command_equals_framework_script(dialect, tmp_path):
    chapter = PAGE.read_text().split(f"## {dialect}\n")[1].split("\n## ")[0]
    before, after = re.findall(r"```\n(.*?)```", chapter, re.DOTALL)
    script = tmp_path / "before.sh"
    script.write_text(before)
    theirs = check(["--dialect", dialect, "--config", str(script), "--reward_funcs", "math"])
    words = shlex.split(after.replace("\\\n", " "))
    ours = check([*words[words.index("train") + 1 :], "--world_size", words[words.index("--nproc_per_node") + 1]])
    assert theirs.sizes == ours.sizes
    here, there = flatten_config(ours.config), flatten_config(theirs.config)
    assert there.pop("plan.dialect") == dialect and here.pop("plan.dialect") is None
    assert {name: (there[name], here[name]) for name in here if here[name] != there[name]} == {}
