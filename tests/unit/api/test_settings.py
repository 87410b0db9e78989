"""Settings that reach a run from GRPOConfig, from TRL's config and from a mapping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_grpo import GRPOConfig
from megatron_grpo.api.settings import explicit_settings, write_settings
from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config import parse


def parse_settings(args, tmp_path):
    return parse(write_settings(tmp_path, explicit_settings(args)), dialects=lambda: DIALECTS)


def test_settings_of_other_types_are_converted_to_yaml_values(tmp_path):
    args = {"output_dir": Path("out"), "lr": np.float32(0.5), "stop": ("a", "b"), "columns": {"question": "prompt"}, "max_steps": None}
    found = parse_settings(args, tmp_path)
    assert not found.problems
    config = found.config
    assert (config.run.output_dir, config.optimizer.lr, config.rollout.stop) == ("out", 0.5, ["a", "b"])
    assert config.data.columns == {"question": "prompt"}


def test_settings_with_function_value_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="reward_funcs is a function, which a setting cannot be"):
        write_settings(tmp_path, {"reward_funcs": test_settings_with_empty_list_are_not_read_as_true})
    with pytest.raises(ConfigError, match="args is a int: pass a GRPOConfig"):
        explicit_settings(3)


def test_settings_explicit_default_is_recorded_with_source(tmp_path):
    found = parse_settings(GRPOConfig(lr=1e-6, num_generations="many"), tmp_path)
    assert found.config.sources["lr"] == "GRPOConfig" and found.config.sources["seed"] == "default"
    assert [str(one) for one in found.problems] == ["num_generations (GRPOConfig) must be a whole number, not 'many'."]


@pytest.mark.parametrize("name", ["sequence_parallel", "bf16"])
def test_settings_with_empty_list_are_not_read_as_true(name, tmp_path):
    [problem] = parse_settings({name: []}, tmp_path).problems
    assert f"{name} (GRPOConfig) requires a value" in str(problem)


@pytest.fixture(scope="module")
def of_trl():
    """Settings of TRL's own GRPOConfig; on a CPU it refuses its default bf16."""
    trl = pytest.importorskip("trl", reason="trl is not installed (pip install 'megatron-grpo[dev]')")

    def of(**settings):
        return explicit_settings(trl.GRPOConfig(output_dir="out", **({"bf16": False} | settings)))

    return of


def test_settings_from_trl_config_are_the_passed_ones_without_derived_ones(of_trl, tmp_path):
    own = {"dialect": "trl", "output_dir": "out", "bf16": False}
    assert of_trl() == own
    assert of_trl(learning_rate=3e-4, max_steps=5, report_to="none") == own | {"learning_rate": 3e-4, "max_steps": 5}
    assert of_trl(use_cpu=True, bf16=None) == {"dialect": "trl", "output_dir": "out", "use_cpu": True}
    assert of_trl(gradient_accumulation_steps=4) == own | {"gradient_accumulation_steps": 4}
    assert of_trl(gradient_accumulation_steps=4, steps_per_generation=2)["steps_per_generation"] == 2
    assert of_trl(generation_batch_size=16, num_generations=4) == own | {"num_generations": 4, "steps_per_generation": 2}
    found = parse_settings(of_trl(lr_scheduler_type="cosine", loss_type="dr_grpo", report_to="wandb", num_generations=4), tmp_path)
    assert not found.problems
    assert (found.config.optimizer.lr_decay_style, found.config.grpo.loss_type) == ("cosine", "dr_grpo")
