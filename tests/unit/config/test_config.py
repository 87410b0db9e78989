"""Config objects: created once and immutable."""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError

import pytest

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.run.check import check_parsed
from megatron_grpo.run.config import parse, settings, table
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from tests.checked import check


def test_config_and_its_groups_are_frozen():
    cfg = Config()
    with pytest.raises(FrozenInstanceError):
        cfg.sources = {}
    for section in cfg.groups().values():
        with pytest.raises(FrozenInstanceError):
            setattr(section, next(iter(vars(section))), 1)


def test_config_with_different_values_is_not_equal():
    cfg = Config()
    other = cfg.with_values({"lr": 0.5, "seed": 7}, sources={"lr": "here"})
    assert (other.optimizer.lr, other.run.seed, other.sources["lr"]) == (0.5, 7, "here")
    assert (cfg.optimizer.lr, cfg.run.seed, cfg.sources) == (1e-6, 42, {})
    assert other.batch is cfg.batch
    with pytest.raises(KeyError, match="lern_rate"):
        cfg.with_values({"lern_rate": 1.0})


def test_check_does_not_change_the_parsed_config():
    parsed = parse(["--generation_batch_size", "32"], dialects=lambda: DIALECTS)
    checked = check_parsed(parsed)
    assert (parsed.config.batch.steps_per_generation, checked.config.batch.steps_per_generation) == (None, 2)
    assert parsed.config.groups() == parse(["--generation_batch_size", "32"], dialects=lambda: DIALECTS).config.groups()
    assert check(["--generation_batch_size", "32"]).config == checked.config


@pytest.mark.parametrize(
    ("name", "bad", "edge"),
    [
        ("delta", 1.0, None),
        ("epsilon", 0.0, None),
        ("beta", -0.1, 0.0),
        ("top_entropy_quantile", 0.0, None),
        ("top_entropy_quantile", 1.5, 1.0),
        ("temperature", 0.0, 0.01),
        ("temperature", 2.5, 2),
        ("adam_beta2", 1.0, None),
        ("adam_beta1", -0.5, 0.0),
        ("code_timeout", 0.01, 0.1),
        ("code_memory_mb", 1, 64),
        ("code_num_workers", 0, 1),
        ("repetition_n_grams", 0, 1),
        ("repetition_max_penalty", 1.0, 0.0),
        ("llm_judge_max_score", 0.0, None),
        ("cosine_max_len", 0, 1),
        ("seed", 2**32, 2**32 - 1),
    ],
)
def test_setting_outside_its_range_is_rejected_with_nearest_legal_bound(name, bad, edge):
    (problem,) = validate(Config().with_values({name: bad}))
    assert problem.flags == (name,) and f"{name} ({bad}) must be {table()[name].range}" in problem.message
    assert problem.nearest == ({} if edge is None else {name: [edge]})


def test_setting_defaults_are_within_their_range():
    for setting in table().values():
        if isinstance(setting.default, (int, float)) and not isinstance(setting.default, bool):
            assert setting.range.admits(setting.default), setting.name


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "1e999"])
def test_setting_range_rejects_infinite_numbers(word):
    (problem,) = parse(["--lr", word]).problems
    assert f"lr must be a number, not '{word}'" in problem.message


def test_config_groups_are_in_the_order_of_help():
    """A group that the order lacks would have no flags."""
    sections = {field.name for field in dataclasses.fields(Config)} - {"sources", "typed", "origins"}
    assert sorted(settings.GROUPS) == sorted(sections)
