"""HTTP bodies: each round-trips bit for bit, and any other content is rejected."""

from __future__ import annotations

import base64
import json
from types import NoneType, UnionType
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.plugins.servers import wire

_texts = st.text(max_size=20)
_small = st.integers(-(2**40), 2**40)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_VALUES = {
    str: _texts, int: _small, float: _floats, bool: st.booleans(), NoneType: st.none(), bytes: st.binary(max_size=9),
    dict: st.dictionaries(_texts, _small | _texts | st.none(), max_size=3),
}  # fmt: skip
BODIES = (
    wire.ClaimRequest, wire.EmptyBody, wire.JoinRequest, wire.WeightUpdateRequest, wire.AdapterUpdateRequest,
    wire.GenerateRequest, wire.ScoreRequest, wire.ScoreResponse, wire.ServerState,
    wire.PromptLogprobsRequest,
)  # fmt: skip


def _of(cls):
    return st.builds(cls, **{name: _values(kind) for name, kind in get_type_hints(cls).items() if name in cls.__struct_fields__})


def _values(kind):
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is UnionType:
        return st.one_of(*map(_values, args))
    if origin is tuple:
        return st.lists(_values(args[0]), max_size=3).map(tuple)
    return _VALUES[origin or kind] if (origin or kind) in _VALUES else _of(kind)


@pytest.mark.parametrize("cls", BODIES)
def test_wire_bodies_round_trip(cls):
    @given(_of(cls))
    @settings(max_examples=30, deadline=None)
    def check(body):
        assert wire.decode(cls, wire.encode(body)) == body

    check()


@pytest.mark.parametrize("cls", BODIES)
def test_wire_decode_checks_every_field(cls):
    """Another kind of value in any field, and a field more or less, are refused by the name of the field."""

    @given(_of(cls))
    @settings(max_examples=3, deadline=None)
    def check(body):
        form = json.loads(wire.encode(body))
        for field in msgspec.structs.fields(cls):
            with pytest.raises(wire.MalformedMessageError, match=rf"{cls.__name__} is malformed: Expected .* - at `\$\.{field.name}"):
                wire.decode(cls, json.dumps({**form, field.name: {} if get_origin(field.type) is tuple else [None]}))
            if field.required:
                with pytest.raises(wire.MalformedMessageError, match=f"missing required field `{field.name}`"):
                    wire.decode(cls, json.dumps({name: value for name, value in form.items() if name != field.name}))
        with pytest.raises(wire.MalformedMessageError, match="unknown field `sounds`"):
            wire.decode(cls, json.dumps({**form, "sounds": []}))

    check()


@pytest.mark.parametrize(("body", "says"), [
    (b"{", "ScoreRequest is not JSON"), (b"\xff", "ScoreRequest is not JSON"), (b'{"sequences": [[NaN]]}', "ScoreRequest is not JSON"),
    (b"[" * 100_000, "Expected `object`, got `array`"), (b"[]", "ScoreRequest is malformed: Expected `object`, got `array`"),
    (b'{"sequences": [[1, true]]}', r"Expected `int`, got `bool` - at `\$.sequences\[0\]\[1\]`"),
    (b'{"sequences": [[1.5]]}', "Expected `int`, got `float`"), (b'{"sequences": [3]}', r"Expected `array`, got `int` - at `\$.sequences"),
    (b'{"sequences": [], "image_data": [{"key": "a", "data": "AAA"}]}', "Invalid base64"),
])  # fmt: skip
def test_wire_decode_of_invalid_body_raises(body, says):
    with pytest.raises(wire.MalformedMessageError, match=says):
        wire.decode(wire.ScoreRequest, body)


def test_wire_decode_of_deeply_nested_body_raises():
    with pytest.raises(wire.MalformedMessageError, match="Sampling is not JSON"):
        wire.decode(wire.Sampling, b'{"more": {"a": ' + b"[" * 100_000)


def test_wire_decode_of_unknown_nested_field_raises_with_its_name():
    request = wire.Request(key="1", ids=(4,), seed=0, n=1, max_tokens=2)
    form = json.loads(wire.encode(wire.GenerateRequest(version=1, sampling=wire.Sampling(), requests=(request, request))))
    form["requests"][1]["sounds"] = []
    with pytest.raises(wire.MalformedMessageError, match=r"unknown field `sounds` - at `\$.requests\[1\]`"):
        wire.decode(wire.GenerateRequest, json.dumps(form))
    with pytest.raises(wire.MalformedMessageError, match=r"unknown field `n` - at `\$.sampling`"):
        wire.decode(wire.GenerateRequest, json.dumps({**form, "requests": [], "sampling": {"n": 4}}))


def _same(one: wire.SampledCompletion, other: wire.SampledCompletion) -> bool:
    def arrays(drawn):
        return [a for a in (drawn.tokens, drawn.logprobs, drawn.experts, *(drawn.sampling_mask or ())) if a is not None]

    pairs = list(zip(arrays(one), arrays(other), strict=True))
    return (one.text, one.reason, one.versions) == (other.text, other.reason, other.versions) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs
    )


@st.composite
def _drawn(draw):
    length = draw(st.integers(0, 9))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length))
    routed = draw(st.booleans())
    counts = draw(st.none() | st.lists(st.integers(0, 3), min_size=length, max_size=length))
    return wire.SampledCompletion(
        tokens=np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length)), np.int32),
        logprobs=np.array(bits, np.uint32).view(np.float32), text=draw(st.text(max_size=9)),
        reason=draw(st.sampled_from(["stop", "length"])),
        versions=((draw(st.integers(0, 9)), 0, length),),
        experts=np.arange(length * 6, dtype=np.int16).reshape(length, 3, 2) - 1 if routed else None,
        sampling_mask=None if counts is None else SamplingMask(np.cumsum([0, *counts]), np.arange(sum(counts), dtype=np.int32)),
    )  # fmt: skip


@given(_texts, st.lists(_drawn(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_wire_answer_line_round_trips_exactly(key, drawn):
    line = wire.encode_line(wire.GenerateLine(key=key, completions=tuple(drawn)))
    assert line.count(b"\n") == 1
    answer = wire.decode_line(wire.GenerateLine, line)
    assert answer.key == key and answer.error is None and len(answer.completions) == len(drawn)
    assert all(_same(a, b) for a, b in zip(drawn, answer.completions, strict=True))


def test_wire_decode_of_invalid_answer_lines_raises():
    assert wire.decode_line(wire.GenerateLine, b"\n") is None
    assert wire.decode_line(wire.GenerateLine, wire.encode_line(wire.GenerateLine(key="3", error="too long"))).error == "too long"
    whole = wire.encode_line(wire.GenerateLine(key="3"))
    drawn = wire.SampledCompletion(
        tokens=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), text="", reason="stop", versions=(),
        sampling_mask=SamplingMask(np.array([0, 2]), np.array([5, 6], np.int32)),
    )  # fmt: skip
    right = wire.encode_line(wire.GenerateLine(key="3", completions=(drawn,)))
    at, two, one = (base64.b64encode(np.array(at, np.int64)) for at in ([0, 2], [0, 1, 2], [0, 1]))
    short = right.replace(b'"logprobs":"AAAAAA=="', b'"logprobs":""')
    shorter, shortest = right.replace(at, two), right.replace(at, one)
    for line, says in ((whole[:-1], "in the middle of a line"), (whole[3:], "not JSON"),
                       (shorter, "sampling mask of 2 IDs for 2 tokens, 2 by its counts, for 1 tokens"), (b"[]\n", "Expected `object`"),
                       (shortest, "sampling mask of 2 IDs for 1 tokens, 1 by its counts, for 1 tokens"),
                       (short, "0 log-probs for 1 tokens"), (b"{}\n", "missing required field `key`")):  # fmt: skip
        with pytest.raises(wire.MalformedMessageError, match=says):
            wire.decode_line(wire.GenerateLine, line)


def test_wire_decode_error_of_own_and_other_programs():
    assert wire.decode_error(wire.encode_error("not yours")) == "not yours"
    assert wire.decode_error(b"<html>nginx</html>") == "<html>nginx</html>"
    assert wire.decode_error(b"") == "no reason was given"
