"""Every row of the plug-in table names an existing function with the arguments of its protocol."""

from __future__ import annotations

import inspect
import typing

import pytest

from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.run import plug_ins
from megatron_grpo.run.config.settings import TurnsConfig
from megatron_grpo.run.inputs import PARTS
from megatron_grpo.run.plug_ins import PlugIn


def list_rows_with_protocols():
    """(row, Protocol of its function) of every table, by what mypy is told about them."""
    for name, hint in typing.get_type_hints(plug_ins).items():
        value = getattr(plug_ins, name)
        [row_hint] = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is PlugIn]
        [protocol] = typing.get_args(row_hint)
        for row in [value] if isinstance(value, PlugIn) else value.values():
            yield pytest.param(row, protocol, id=f"{name}-{row.path.rpartition('.plugins.')[2]}")


@pytest.mark.parametrize(("row", "protocol"), list_rows_with_protocols())
def test_plug_in_functions_exist_with_protocol_arguments(row, protocol):
    function = row.load()
    assert f"{function.__module__}.{function.__name__}" == row.path
    taken, called = inspect.signature(function).parameters, inspect.signature(protocol.__call__).parameters
    assert list(taken.values()) == [parameter for name, parameter in called.items() if name != "self"]


def test_plug_in_with_unknown_name_raises():
    with pytest.raises(AttributeError, match="no_such"):
        PlugIn("megatron_grpo.plugins.servers.no_such").load()


def test_plug_in_tables_have_a_row_for_every_setting_value():
    modes = typing.get_args(typing.get_type_hints(RolloutConfig)["vllm_mode"])
    assert set(plug_ins.ENGINES) == set(modes)
    players = {TurnsConfig(**values).player for values in ({}, {"agent": "a"}, {"agent_command": "a"}, {"environment": "a"})}
    assert set(plug_ins.SAMPLERS) == {*players, "rollout_func"}
    assert set(plug_ins.READERS) <= {part.name for part in PARTS}
