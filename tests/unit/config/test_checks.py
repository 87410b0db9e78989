"""Values that no run can use, rejected with the value as given."""

from __future__ import annotations

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.table import table
from tests.checked import check


def list_problems(*argv):
    with pytest.raises(ConfigError) as error:
        check(list(argv))
    return [problem.message for problem in error.value.problems]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", [name for name, setting in table().items() if setting.kind == "float"])
def test_settings_with_infinite_numbers_are_rejected(name, value):
    assert any(message.startswith(name) and value in message for message in list_problems(f"--{name}={value}"))


@pytest.mark.parametrize("weights", [["nan", "1"], ["1", "inf"], ["1e300", "1"]])
def test_reward_weights_with_infinite_numbers_are_rejected(weights):
    assert any(
        message.startswith("reward_weights")
        for message in list_problems("--reward_funcs", "length", "format", "--reward_weights", *weights)
    )


def test_parse_byte_size_accepts_common_units():
    from megatron_grpo.run.config.rules.settings import validate
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.config.table import parse_byte_size

    said = {
        "5GB": 5 * 10**9,
        "500 mb": 5 * 10**8,
        "2GiB": 2 << 30,
        "1.5KiB": 1536,
        "7": 7,
        "0GB": None,
        "5 apples": None,
        "": None,
        "1.2.3GB": None,
    }
    assert {text: parse_byte_size(text) for text in said} == said
    [problem] = validate(Config().with_values({"max_shard_size": "big"}))
    assert "max_shard_size (big) is a size above 0" in problem.message
