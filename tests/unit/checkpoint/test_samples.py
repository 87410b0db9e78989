"""Serialized pending samples: every field of every kind, bit for bit, and files with unknown content."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import pytest

from megatron_grpo.core.types import Sample, SampleWithOldLogprobs
from megatron_grpo.run.checkpoint import samples as file_of_samples
from megatron_grpo.run.checkpoint.samples import UnknownFormatError, column_types, read_samples, serialize_samples, unreadable_reason


def make_sample(kind=Sample, **changes):
    mask = "loss_mask" if "loss_mask" in kind.__dataclass_fields__ else "mask"
    common = dict(
        row=0,
        rollout=1,
        prompt_number=2,
        version=3,
        token_ids=np.arange(4),
        sampler_logprobs=np.array([0, 0, -0.1, -1e-30], dtype=np.float32),
        advantage=0.1 + 0.2,
        is_zero_std=False,
        is_truncated=True,
        **{mask: np.array([False, False, True, True])},
    )
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in ({"on_policy_version": 3} | common | changes).items() if name in known})


def assert_same(back, samples):
    assert [type(one) for one in back] == [type(one) for one in samples]
    for one, other in zip(back, samples):
        for name in one.__dataclass_fields__:
            a, b = getattr(one, name), getattr(other, name)
            if isinstance(b, np.ndarray):
                assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=b.dtype.kind == "f"), name
            else:
                assert (type(a), a) == (type(b), b), name


@pytest.mark.parametrize("samples", [
    [],
    [make_sample()],
    [
        make_sample(SampleWithOldLogprobs, old_logprobs=np.zeros(4, np.float32), old_logprobs_from="cached"),
        make_sample(row=7),
        make_sample(row=8, advantage=-1.5),
    ],
    [make_sample(SampleWithOldLogprobs, old_logprobs=np.full(4, -2, np.float32), old_logprobs_from="rollout", row=1)] * 3,
    [make_sample(SampleWithOldLogprobs, old_logprobs=np.array([0, 0, np.nan, -1], np.float32), old_logprobs_from="rollout")],
    [make_sample(teacher_logprobs=np.array([0, 0, -3.5, -1e-3], np.float32)), make_sample(row=1)],
], ids=["none", "one", "mixed", "anchored", "without some log-probs", "one that a teacher has seen"])  # fmt: skip
def test_samples_survive_a_file_bit_for_bit(tmp_path, samples):
    (tmp_path / "pending.npz").write_bytes(serialize_samples(samples))
    assert_same(read_samples(tmp_path / "pending.npz"), samples)
    assert unreadable_reason(tmp_path / "pending.npz") is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A sample class with every type that a field may have."""

    number: int
    token_ids: np.ndarray
    mask: np.ndarray
    starts: tuple[int, ...] = (0,)
    images: tuple = ()  # pictures
    experts: np.ndarray | None = None  # [T, layers, k]
    mask_offsets: np.ndarray | None = None
    where: Literal["here", "there"] = "here"
    factor: float = 1.0
    is_zero_std: bool = False
    limit: int | None = None
    version: int = 0
    on_policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MarkedRow(Row):
    marks: np.ndarray


def make_row(length, kind=Row, **changes):
    return kind(**{"number": length, "token_ids": np.arange(length) + 2**31 - 1 - length, "mask": np.arange(length) > 1} | changes)


EVERYTHING = [
    make_row(5, starts=(0, 2, 4), experts=np.arange(20, dtype=np.int16).reshape(5, 2, 2), where="there"),
    make_row(3, starts=(0, 1), factor=float("-inf")),
    make_row(0, starts=(), experts=np.empty((0, 2, 2), np.int16), limit=3),
    make_row(4, MarkedRow, marks=np.zeros((4, 1)), mask_offsets=np.array([0, 2**40]), is_zero_std=True),
    make_row(2, limit=0, factor=0.1),
]


def test_ragged_tuples_arrays_of_any_shape_and_fields_that_are_none_survive(tmp_path):
    (tmp_path / "file").write_bytes(serialize_samples(EVERYTHING))
    assert_same(read_samples(tmp_path / "file", Row), EVERYTHING)
    equal = [make_row(3, starts=(0, 1)), make_row(4, starts=(0, 2))]  # one shape: numpy would make a table of them
    (tmp_path / "file").write_bytes(serialize_samples(equal))
    assert_same(read_samples(tmp_path / "file", Row), equal)


def test_token_ids_take_four_bytes_in_the_file_and_eight_in_memory(tmp_path):
    (tmp_path / "file").write_bytes(serialize_samples(EVERYTHING))
    with np.load(tmp_path / "file") as arrays:
        assert arrays["Row.token_ids"].dtype == np.int32 and arrays["MarkedRow.mask_offsets"].dtype == np.int64
    assert read_samples(tmp_path / "file", Row)[0].token_ids.dtype == np.int64


def test_samples_file_omits_images(tmp_path):
    (tmp_path / "file").write_bytes(serialize_samples([make_row(3, images=((0, object()),))]))
    assert read_samples(tmp_path / "file", Row)[0].images == ()


def change_header(path, change):
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(str(arrays["header"]))
    change(header)
    with path.open("wb") as stream:
        np.savez(stream, **arrays | {"header": np.array(json.dumps(header))})


def test_samples_file_without_a_field_gives_its_default(tmp_path):
    (tmp_path / "file").write_bytes(serialize_samples([make_row(3, where="there", starts=(0, 1))]))
    change_header(tmp_path / "file", lambda header: [header["kinds"]["Row"].pop(name) for name in ("where", "starts")])
    [back] = read_samples(tmp_path / "file", Row)
    assert (back.where, back.starts) == ("here", (0,))
    change_header(tmp_path / "file", lambda header: header["kinds"]["Row"].pop("number"))
    with pytest.raises(UnknownFormatError, match="lacks Row.number, which has no default"):
        read_samples(tmp_path / "file", Row)


@pytest.mark.parametrize("change, says", [
    (lambda header: header["kinds"]["Row"].update(color="str"), "the field Row.color, which megatron_grpo 0.1.0 does not know"),
    (lambda header: header["kinds"].update(Column={}), "samples of the kind Column, which"),
    (lambda header: header["kinds"]["Row"].update(number="str"), "Row.number as str; in megatron_grpo 0.1.0 it is int"),
    (lambda header: header.update(format=3), "has format 3; megatron_grpo 0.1.0 reads format 2"),
], ids=["field", "kind", "type", "format"])  # fmt: skip
def test_samples_file_with_unknown_content_is_rejected_with_writer_version(tmp_path, change, says):
    (tmp_path / "file").write_bytes(serialize_samples([make_row(3)]))
    change_header(tmp_path / "file", lambda header: (header.update(written_by="megatron_grpo 7.0"), change(header)))
    for read in (lambda: read_samples(tmp_path / "file", Row), lambda: _raise(unreadable_reason(tmp_path / "file", Row))):
        with pytest.raises(UnknownFormatError, match="was written by megatron_grpo 7.0 and has") as told:
            read()
        assert says in str(told.value)


def _raise(sentence):
    raise UnknownFormatError(sentence)


def test_sample_field_of_unsupported_type_raises():
    @dataclass
    class Odd:
        table: dict

    Odd.__annotations__["table"] = dict
    with pytest.raises(TypeError, match="Odd.table"):
        column_types(Odd)
    with pytest.raises(TypeError, match="experts has arrays of"):
        serialize_samples([make_row(1, experts=np.zeros(1)), make_row(1, experts=np.zeros((1, 1)))])


def test_sample_fields_are_all_serializable():
    for kind in (Sample, SampleWithOldLogprobs):
        assert column_types(kind).keys() == {field.name for field in fields(kind)} - set(file_of_samples.NOT_SAVED)
