"""A configuration is made once and never written to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from megatron_grpo.planning.check import check, check_parsed
from megatron_grpo.settings import parse
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.dialects import DIALECTS


def test_neither_a_configuration_nor_a_group_of_it_can_be_written_to():
    cfg = Config()
    with pytest.raises(FrozenInstanceError):
        cfg.sources = {}
    for section in cfg.groups().values():
        with pytest.raises(FrozenInstanceError):
            setattr(section, next(iter(vars(section))), 1)


def test_other_values_make_another_configuration_whatever_their_groups():
    cfg = Config()
    other = cfg.with_values({"lr": 0.5, "seed": 7}, sources={"lr": "here"})
    assert (other.optimizer.lr, other.run.seed, other.sources["lr"]) == (0.5, 7, "here")
    assert (cfg.optimizer.lr, cfg.run.seed, cfg.sources) == (1e-6, 42, {})
    assert other.batch is cfg.batch
    with pytest.raises(KeyError, match="lern_rate"):
        cfg.with_values({"lern_rate": 1.0})


def test_a_check_leaves_what_was_parsed_as_it_was():
    parsed = parse(["--generation_batch_size", "32"], dialects=DIALECTS)
    checked = check_parsed(parsed)
    assert (parsed.config.batch.steps_per_generation, checked.config.batch.steps_per_generation) == (None, 2)
    assert parsed.config.groups() == parse(["--generation_batch_size", "32"], dialects=DIALECTS).config.groups()
    assert check(["--generation_batch_size", "32"]).config == checked.config
