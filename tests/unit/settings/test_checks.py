"""Values that no run can use are refused, each with what was typed."""

from __future__ import annotations

import pytest

from megatron_grpo.errors import ConfigError
from megatron_grpo.planning.check import check
from megatron_grpo.settings.table import table


def problems(*argv):
    with pytest.raises(ConfigError) as error:
        check(list(argv))
    return [problem.message for problem in error.value.problems]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", [name for name, setting in table().items() if setting.kind == "float"])
def test_no_number_is_without_end(name, value):
    assert any(message.startswith(name) and value in message for message in problems(f"--{name}={value}"))


@pytest.mark.parametrize("weights", [["nan", "1"], ["1", "inf"], ["1e300", "1"]])
def test_neither_is_a_weight(weights):
    assert any(
        message.startswith("reward_weights") for message in problems("--reward_funcs", "length", "format", "--reward_weights", *weights)
    )
