"""Files of a checkpoint before they are published: writers, metadata, copies, checksums and threads."""

from __future__ import annotations

import io
import pickle
import threading
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.cleanup import run_in_thread
from megatron_grpo.core.policy.sharded_state import boxes
from megatron_grpo.run.checkpoint.distributed import (
    MissingShardError,
    PlacedShard,
    Shard,
    Staging,
    _write,
    check_coverage,
    divide_tensors,
    serialize_metadata,
    write_file,
    write_pieces,
)
from megatron_grpo.run.checkpoint.safe_unpickle import _Data
from tests.checkpoint_files import fingerprints

# ---- who writes what ---------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(1, 9), st.booleans()), max_size=12))
def test_divide_tensors_assigns_each_tensor_to_one_rank_that_has_it(tensors):
    held = [
        [(n, size, is_rank_zero and rank == min(ranks)) for n, (ranks, size, is_rank_zero) in enumerate(tensors) if rank in ranks]
        for rank in range(5)
    ]
    given = divide_tensors(held)
    for number, (ranks, _, is_rank_zero) in enumerate(tensors):
        writers = {rank for rank in range(5) if number in given[rank]}
        assert len(writers) == is_rank_zero and writers <= ranks


def test_divide_tensors_balances_bytes_over_ranks():
    sizes = [512, 512, 512, 512, 300, 300, 200, 100, 8, 8, 8, 8]
    given = divide_tensors([[(number, size, rank == 0) for number, size in enumerate(sizes)] for rank in range(4)])
    loads = [sum(sizes[number] for number in names) for names in given]
    assert max(loads) - min(loads) <= 300 and max(loads) < 0.3 * sum(sizes)


# ---- .metadata ---------------------------------------------------------------------------------------------------------------------------


def make_piece(offset, shape, whole=(4, 4), key="w"):
    return PlacedShard(Shard(key, offset, shape, whole, torch.float32), 0, 64)


def test_serialized_metadata_is_readable_by_torch():
    said = serialize_metadata(
        [
            ("__0_0.distcp", [make_piece((0, 0), (2, 4)), PlacedShard(Shard("object"), 64, 8)]),
            ("", []),
            ("__2_0.distcp", [make_piece((2, 0), (2, 4))]),
        ]
    )
    found = _Data(io.BytesIO(said)).load()
    assert {part.relative_path for part in found.storage_data.values()} == {"__0_0.distcp", "__2_0.distcp"}
    assert found.state_dict_metadata["w"].size == (4, 4) and found.state_dict_metadata["w"].properties.dtype is torch.float32
    assert pickle.loads(said).state_dict_metadata["w"].chunks[1].offsets == (2, 0)


@pytest.mark.parametrize("second", [[], [make_piece((1, 0), (3, 4))], [make_piece((0, 0), (2, 4))], [make_piece((2, 0), (3, 4))]],
                         ids=["gap", "overlap", "twice", "outside"])  # fmt: skip
def test_shard_check_rejects_incomplete_pieces(second):
    with pytest.raises(MissingShardError, match="w"):
        serialize_metadata([("__0_0.distcp", [make_piece((0, 0), (2, 4))]), ("__1_0.distcp", second)])


@given(shape=st.lists(st.integers(1, 4), max_size=3).map(tuple), data=st.data())
def test_shard_check_accepts_boxes_that_cover_each_element_once(shape, data):
    """Against counting: runs of a tensor cut anywhere, as boxes, of which some are lost, doubled or moved."""
    size = prod(shape)
    places = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    found = [box for start, end in zip(places, places[1:]) for box in boxes(start, end, shape)]
    for _ in range(data.draw(st.integers(0, 2))):
        box = data.draw(st.sampled_from(found))
        change = data.draw(st.sampled_from(["lose", "double", "move"]))
        if change != "double" and len(found) > 1:
            found.remove(box)
        if change == "double":
            found.append(box)
        if change == "move":
            found.append((tuple(max(0, min(a + data.draw(st.integers(-1, 1)), m - n)) for a, n, m in zip(*box, shape)), box[1]))
    counts = np.zeros(shape, dtype=int)
    for offset, lengths in found:
        counts[tuple(slice(a, a + n) for a, n in zip(offset, lengths, strict=True))] += 1
    if (counts == 1).all():
        check_coverage("w", shape, found)
    else:
        with pytest.raises(MissingShardError, match="^w "):
            check_coverage("w", shape, found)


# ---- files -------------------------------------------------------------------------------------------------------------------------------


def test_write_pieces_hash_equals_hash_of_file(tmp_path):
    pieces = [(Shard("a", (0,), (5,), (5,), torch.float32), torch.arange(5.0)), (Shard("object"), b"bytes"),
              (Shard("b", (0, 0), (3, 2), (3, 2), torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16))]  # fmt: skip
    entry, placed = write_pieces(tmp_path / "file", pieces)
    assert {"file": entry} == fingerprints(tmp_path, ["file"])
    content = (tmp_path / "file").read_bytes()
    found = [content[start : start + length] for _, start, length in placed]
    assert b"".join(found) == content and found[1] == b"bytes"
    assert torch.equal(torch.load(io.BytesIO(found[2]), weights_only=True), pieces[2][1])
    assert {"in/it": write_file(tmp_path / "in" / "it", b"words")} == fingerprints(tmp_path, ["in/it"])


@pytest.mark.parametrize("is_main", [True, False])
def test_the_display_counts_the_tensors_of_a_save_that_the_run_waits_for(tmp_path, is_main):
    shown = []

    class Pieces(list):
        def __iter__(self):
            for piece in super().__iter__():
                shown.append(activity.describe(activity.current()))
                yield piece

    pieces = Pieces((Shard(name, (0,), (5,), (5,), torch.float32), torch.ones(5)) for name in "ab")
    run_in_thread(lambda: write_pieces(tmp_path / "file", pieces), name="save", in_thread=not is_main).result()
    counted = ["saving 0 of 2 tensors", "saving 1 of 2 tensors"]
    assert shown == (counted if is_main else ["between two phases"] * 2) and activity.current() == ()


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    whole = torch.zeros(100_000)
    entry, _ = write_pieces(tmp_path / "file", [(Shard("a", (0,), (5,), (5,), torch.float32), whole[:5])])
    assert entry["bytes"] < 4000


def test_checkpoint_rank_without_pieces_writes_no_file(tmp_path):
    written = _write([], {}, tmp_path, rank=3)
    assert not list(tmp_path.iterdir()) and (written.files, written.file, written.placed) == ({}, "", [])


# ---- copies ------------------------------------------------------------------------------------------------------------------------------


def test_staging_copy_is_independent_and_reuses_memory():
    staging, source = Staging(), [torch.arange(7.0), torch.arange(6, dtype=torch.int8).view(2, 3), torch.arange(9.0).bfloat16()]
    before = [tensor.clone() for tensor in source]
    pieces = [(Shard(str(n)), tensor) for n, tensor in enumerate(source)] + [(Shard("object"), b"bytes")]
    copied = staging.copies(pieces)
    for tensor in source:
        tensor.fill_(3)
        tensor.untyped_storage().resize_(0)  # as where the memory is given to the sampler
    assert [key for (key, *_), _ in copied] == ["0", "1", "2", "object"] and copied[3][1] == b"bytes"
    for (_, contents), wanted in zip(copied, before, strict=False):
        assert contents.dtype == wanted.dtype and torch.equal(contents, wanted)
    places = [contents.data_ptr() for _, contents in copied[:3]]
    again = staging.copies([(Shard(str(n)), tensor + 1) for n, tensor in enumerate(before)])
    assert [contents.data_ptr() for _, contents in again] == places


def test_background_save_error_is_raised_when_awaited():
    held = threading.Event()

    def work():
        held.wait()
        raise OSError("disk")

    task = run_in_thread(work, name="writing")
    assert not task.done()
    held.set()
    with pytest.raises(OSError, match="disk"):
        task.result()
    assert task.done() and isinstance(task.exception(), OSError)
    assert run_in_thread(lambda: 3, name="at once", in_thread=False).result() == 3
