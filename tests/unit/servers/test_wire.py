"""Claims about what crosses HTTP: what one side writes the other reads, bit by bit, and nothing else is taken."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.servers import wire
from megatron_grpo.types import Kept

_texts = st.text(max_size=20)
_small = st.integers(-(2**40), 2**40)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_VALUES = {
    "str": _texts, "str | None": st.none() | _texts, "int": _small, "int | None": st.none() | _small, "float": _floats,
    "bool": st.booleans(), "Kind": st.sampled_from(["weights", "merged"]),
    "dict[str, Any]": st.dictionaries(_texts, _small | _texts | st.none(), max_size=3),
}  # fmt: skip
BODIES = (wire.Claim, wire.Nothing, wire.Join, wire.WeightPush, wire.AdapterPush, wire.Generate, wire.Score, wire.Scores, wire.State)


def _of(cls):
    return st.builds(cls, **{f.name: _values(f.type) for f in dataclasses.fields(cls)})


def _values(kind):
    if kind.removesuffix(" | None") in wire._NESTED and kind.endswith(" | None"):
        return st.none() | _values(kind.removesuffix(" | None"))
    if kind in wire._NESTED:
        return _of(wire._NESTED[kind])
    if kind.startswith("tuple["):
        return st.lists(_values(kind.removeprefix("tuple[").removesuffix(", ...]")), max_size=3).map(tuple)
    return _VALUES[kind]


@pytest.mark.parametrize("cls", BODIES)
def test_every_body_comes_out_as_it_went_in(cls):
    @given(_of(cls))
    @settings(max_examples=30, deadline=None)
    def check(body):
        assert wire.decode(cls, wire.encode(body)) == body

    check()


@pytest.mark.parametrize("cls", BODIES)
def test_every_field_is_looked_at(cls):
    """Another kind of value in any field, and a field more or less, are refused by the name of the field."""

    @given(_of(cls))
    @settings(max_examples=3, deadline=None)
    def check(body):
        form = json.loads(wire.encode(body))
        for f in dataclasses.fields(cls):
            with pytest.raises(wire.Malformed, match=f"{cls.__name__}.{f.name} is"):
                wire.decode(cls, json.dumps({**form, f.name: {} if f.type.startswith("tuple") else [None]}))
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                with pytest.raises(wire.Malformed, match=f"lacks {f.name}"):
                    wire.decode(cls, json.dumps({name: value for name, value in form.items() if name != f.name}))
        with pytest.raises(wire.Malformed, match="has no field 'sounds'; its fields are"):
            wire.decode(cls, json.dumps({**form, "sounds": []}))

    check()


@pytest.mark.parametrize(("body", "says"), [
    (b"{", "the body is not JSON"), (b"\xff", "the body is not JSON"), (b"[" * 100_000, "the body is not JSON"),
    (b"[]", "Score is a JSON object"),
    (b'{"sequences": [[1, true]]}', r"sequences\[0\]\[1\] is a whole number, not true"),
    (b'{"sequences": [[1.0]]}', "is a whole number, not 1.0"), (b'{"sequences": [3]}', r"sequences\[0\] is a list, not 3"),
    (b'{"sequences": [[NaN]]}', "NaN is not a number"),
])  # fmt: skip
def test_what_is_no_body_is_refused_by_a_sentence(body, says):
    with pytest.raises(wire.Malformed, match=says):
        wire.decode(wire.Score, body)


def test_an_unknown_field_inside_a_request_is_refused_by_its_name():
    request = wire.Request(key="1", ids=(4,), seed=0, n=1, max_tokens=2)
    form = json.loads(wire.encode(wire.Generate(version=1, sampling=wire.Sampling(), requests=(request, request))))
    form["requests"][1]["sounds"] = []
    with pytest.raises(wire.Malformed, match=r"Generate.requests\[1\] has no field 'sounds'"):
        wire.decode(wire.Generate, json.dumps(form))
    with pytest.raises(wire.Malformed, match="Generate.sampling has no field 'n'"):
        wire.decode(wire.Generate, json.dumps({**form, "requests": [], "sampling": {"n": 4}}))


def _same(one: wire.Drawn, other: wire.Drawn) -> bool:
    def arrays(drawn):
        return [a for a in (drawn.tokens, drawn.logprobs, drawn.experts, *(drawn.kept or ())) if a is not None]

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
    return wire.Drawn(
        tokens=np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length)), np.int32),
        logprobs=np.array(bits, np.uint32).view(np.float32), text=draw(st.text(max_size=9)),
        reason=draw(st.sampled_from(["stop", "length"])),
        versions=((draw(st.integers(0, 9)), 0, length),),
        experts=np.arange(length * 6, dtype=np.int16).reshape(length, 3, 2) - 1 if routed else None,
        kept=None if counts is None else Kept(np.cumsum([0, *counts]), np.arange(sum(counts), dtype=np.int32)),
    )  # fmt: skip


@given(_texts, st.lists(_drawn(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_an_answer_is_one_line_and_keeps_every_bit(key, drawn):
    line = wire.encode_line(wire.Answer(key=key, completions=tuple(drawn)))
    assert line.count(b"\n") == 1
    answer = wire.decode_line(line)
    assert answer.key == key and answer.error is None and len(answer.completions) == len(drawn)
    assert all(_same(a, b) for a, b in zip(drawn, answer.completions, strict=True))


def test_lines_that_are_no_answers():
    assert wire.decode_line(b"\n") is None
    assert wire.decode_line(wire.encode_line(wire.Answer(key="3", error="too long"))).error == "too long"
    whole = wire.encode_line(wire.Answer(key="3"))
    short = json.dumps({"key": "3", "completions": [{"tokens": "AAAAAA==", "logprobs": "", "text": "", "reason": "stop", "versions": []}]})
    shorter = wire.encode_line(wire.Answer(key="3", completions=(wire.Drawn(
        tokens=np.zeros(1, np.int32), logprobs=np.zeros(1), text="", reason="stop", versions=(),
        kept=Kept(np.array([0, 1, 2]), np.array([5, 6])),
    ),)))  # fmt: skip
    for line, says in ((whole[:-1], "in the middle of a line"), (whole[3:], "not of the expected form"),
                       (shorter, "2 kept words of 2 tokens, 2 by their counts, for 1 tokens"), (b"[]\n", "not of the expected form"),
                       (short.encode() + b"\n", "0 log-probs for 1 tokens"), (b'{"key": "3"}\n', "completions")):  # fmt: skip
        with pytest.raises(wire.Malformed, match=says):
            wire.decode_line(line)


def test_the_sentence_of_a_refusal_and_what_another_program_says():
    assert wire.decode_error(wire.encode_error("not yours")) == "not yours"
    assert wire.decode_error(b"<html>nginx</html>") == "<html>nginx</html>"
    assert wire.decode_error(b"") == "no reason was given"
