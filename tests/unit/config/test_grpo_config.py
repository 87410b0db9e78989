"""`GRPOConfig`: every setting of a run, typed, with a record of those set explicitly."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from typing import get_type_hints

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.grpo_config import Aliases, GRPOConfig
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table

OF_TRAIN = {name: setting for name, setting in table().items() if setting.group != "serve"}


def test_grpo_config_has_a_field_with_default_for_every_train_setting():
    config = GRPOConfig()
    assert {name: getattr(config, name) for name in OF_TRAIN} == {name: setting.default for name, setting in OF_TRAIN.items()}
    assert set(inspect.signature(GRPOConfig).parameters) == {one.name for one in dataclasses.fields(GRPOConfig)}


def test_grpo_config_aliases_have_types_of_their_settings():
    aliases = {alias: setting for setting in OF_TRAIN.values() for alias in setting.aliases}
    groups = {name: annotation for group in Config().groups().values() for name, annotation in get_type_hints(type(group)).items()}
    assert get_type_hints(Aliases) == {alias: groups[setting.name] for alias, setting in aliases.items()}
    assert vars(Aliases()) == {alias: setting.default for alias, setting in aliases.items()}


def test_grpo_config_records_explicit_values_equal_to_default():
    config = GRPOConfig(lr=1e-6, learning_rate=1e-6)
    assert config.explicit == {"lr": 1e-6, "learning_rate": 1e-6}
    assert repr(GRPOConfig(max_steps=3)) == "GRPOConfig(max_steps=3)"


def test_grpo_config_setting_and_alias_share_one_value():
    config = GRPOConfig(learning_rate=3e-4)
    assert config.lr == config.learning_rate == 3e-4
    config.lr = 1e-5
    assert config.learning_rate == 1e-5 and config.explicit == {"lr": 1e-5}


def test_grpo_config_replace_marks_only_changed_settings_as_explicit():
    config = GRPOConfig(learning_rate=3e-4, max_steps=5)
    changed = dataclasses.replace(config, lr=1e-5, seed=7)
    assert changed.explicit == {"max_steps": 5, "lr": 1e-5, "seed": 7} and changed.learning_rate == 1e-5
    assert config.explicit == {"learning_rate": 3e-4, "max_steps": 5}
    assert dataclasses.replace(GRPOConfig(), seed=7).explicit == {"seed": 7}


def test_grpo_config_copy_and_pickle_are_equal():
    config = GRPOConfig(stop=["a"], learning_rate=3e-4)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert copy.copy(config).explicit == config.explicit


@pytest.mark.parametrize("use", [lambda name: GRPOConfig(**{name: 1}), lambda name: setattr(GRPOConfig(), name, 1)])
def test_grpo_config_with_unknown_name_is_rejected_with_nearest_one(use):
    with pytest.raises(ConfigError, match="lerning_rate is not a setting of train. Did you mean learning_rate?"):
        use("lerning_rate")
    with pytest.raises(ConfigError, match="ssl_certfile is not a setting of train"):
        use("ssl_certfile")


def test_grpo_config_accepts_framework_names_with_dialect():
    config = GRPOConfig(dialect="trl", per_device_train_batch_size=4)
    assert config.explicit == {"dialect": "trl", "per_device_train_batch_size": 4}
    assert dataclasses.replace(config, seed=3).explicit == {"dialect": "trl", "per_device_train_batch_size": 4, "seed": 3}


def test_grpo_config_is_imported_without_torch():
    code = "import sys; from megatron_grpo import GRPOConfig; GRPOConfig(lr=1.0); print({'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
