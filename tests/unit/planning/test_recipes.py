"""Recipes of published runs: `plan` accepts each file, and its sizes are those of the paper, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.cli import main
from tests.checked import check

RECIPES = Path(__file__).parents[3] / "docs" / "recipes"
# file -> (prompts in a rollout, responses, optimizer steps a rollout); None where the paper is silent
SIZES = {
    "deepseekmath": (16, 64, 1),
    "deepseek_r1_zero": (512, 16, 16),
    "dapo": (512, 16, 16),
    "dr_grpo": (128, 8, 8),
    "gspo": (None, None, 4),
    "minimax_m1_cispo": (None, None, 16),
    "magistral": (None, None, 1),
    "skywork_or1": (256, 16, 1),
    "intellect_2": (256, 16, 8),
}


def test_recipe_files_are_in_table_and_test():
    files = {file.stem for file in RECIPES.glob("*.yaml")}
    table = (RECIPES / "README.md").read_text()
    assert files == set(SIZES) and all(f"[{name}.yaml]({name}.yaml)" in table for name in files)


@pytest.mark.parametrize("name", SIZES)
def test_plan_accepts_a_recipe_and_its_sizes_are_those_of_the_paper(name, capsys):
    file = RECIPES / f"{name}.yaml"
    text = file.read_text()
    assert "arXiv" in text and "silent" in text.lower(), "a source, and what it does not say"
    sizes = check(["--config", str(file), "--world_size", "64"]).sizes
    found = (sizes.num_rollout_prompts, sizes.num_generations, sizes.steps_per_generation)
    assert all(said is None or said == here for said, here in zip(SIZES[name], found)), found
    assert main(["plan", "--json", "--config", str(file), "--world_size", "64"]) == 0
    assert '"timetable"' in capsys.readouterr().out
