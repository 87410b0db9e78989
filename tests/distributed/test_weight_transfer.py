"""The weight-transfer link between real processes, one of which sends: receivers get exactly what was sent, or an error."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.core.weights.buckets import TensorSlice, joined
from megatron_grpo.plugins.servers.weight_transfer import LinkError, Rendezvous, TransferCancelledError, WeightReceiverWorker, WeightSender
from tests.ranks import run_ranks


def _make_tensors():
    """Return tensors of all kinds: dtypes of 1 to 8 bytes, empty, scalar, non-contiguous, larger than a bucket."""
    generator = torch.Generator().manual_seed(3)
    return [
        ("a", torch.randn(5, 7, generator=generator)), ("half", torch.randn(3, generator=generator).bfloat16()),
        ("none", torch.empty(0, 4)), ("number", torch.tensor(2.5, dtype=torch.float64)), ("flags", torch.tensor([True, False, True])),
        ("turned", torch.randn(6, 4, generator=generator).T), ("large", torch.randn(300, generator=generator)), ("ids", torch.arange(9)),
    ]  # fmt: skip


def _make_link(rank, world, name="link", seconds=20.0, meeting=None):
    """Return a link of all ranks over a store of their own beside the default group."""
    meeting = meeting or (Rendezvous() if rank == 0 else None)
    box = [meeting.port if meeting else None]
    dist.broadcast_object_list(box, 0)
    if rank == 0:
        return meeting, WeightSender(meeting, name=name, world=world, local_host="127.0.0.1", seconds=seconds)
    return None, WeightReceiverWorker(address="127.0.0.1", port=box[0], rank=rank, world=world, name=name, seconds=seconds)


def _catch_error(receiver):
    try:
        return [name for name, _ in receiver.receive()]
    except LinkError as error:
        return f"{type(error).__name__}: {error}"


def test_weight_transfer_is_exact_for_each_bucket_size():
    def run(rank, world):
        meeting, link = _make_link(rank, world)
        for bucket_bytes in (1, 100, 10_000):
            if rank == 0:
                assert link.send(iter(_make_tensors()), bucket_bytes) == (8, sum(t.nbytes for _, t in _make_tensors()))
                continue
            got = list(link.receive())
            assert [name for name, _ in got] == [name for name, _ in _make_tensors()]
            for (_, theirs), (_, ours) in zip(got, _make_tensors(), strict=True):
                assert theirs.dtype == ours.dtype and theirs.shape == ours.shape and torch.equal(theirs, ours)
        dist.barrier()

    run_ranks(run, 3)


def test_weight_transfer_slices_form_the_tensor():
    whole = torch.arange(30.0).view(5, 6).bfloat16()
    slices = [TensorSlice(whole[a:b, c:d], (a, c), (5, 6)) for a, b in ((0, 2), (2, 5)) for c, d in ((0, 1), (1, 6))]

    def run(rank, world):
        meeting, link = _make_link(rank, world)
        for bucket_bytes in (1, 100, 10_000):
            if rank == 0:
                link.send(iter([("a", torch.ones(3)), *(("sliced", one) for one in slices), ("b", torch.ones(2))]), bucket_bytes)
                continue
            (a, _), *got, (b, last) = link.receive()
            assert (a, b, last.tolist()) == ("a", "b", [1, 1])
            assert [(one.start, one.shape) for _, one in got] == [(one.start, one.shape) for one in slices]
            [(name, found)] = joined(got)
            assert name == "sliced" and torch.equal(found, whole)
        dist.barrier()

    run_ranks(run, 2)


def test_weight_transfer_keeps_received_tensors():
    def run(rank, world):
        meeting, link = _make_link(rank, world)
        if rank == 0:
            link.send(((str(i), torch.full((50,), float(i))) for i in range(20)), 256)
        else:
            assert [float(tensor.mean()) for _, tensor in list(link.receive())] == list(range(20))
        dist.barrier()

    run_ranks(run, 2)


def test_weight_transfer_source_error_reaches_all_and_next_sync_is_exact():
    def failing():
        yield from _make_tensors()[:3]
        raise ZeroDivisionError("the trainer's own")

    def run(rank, world):
        meeting, link = _make_link(rank, world)
        if rank == 0:
            with pytest.raises(ZeroDivisionError):
                link.send(failing(), 64)
            assert link.is_whole
            link.send(iter(_make_tensors()), 64)
            return None
        with pytest.raises(TransferCancelledError):
            list(link.receive())
        return [name for name, _ in link.receive()]

    assert run_ranks(run, 3)[1:] == [[name for name, _ in _make_tensors()]] * 2


def test_weight_transfer_lost_member_ends_the_sync_and_others_reconnect():
    def run(rank, world):
        meeting, link = _make_link(rank, world, seconds=30.0)
        start = time.monotonic()
        if rank == 0:
            with pytest.raises(LinkError, match="broke"):
                link.send(((str(i), torch.zeros(100_000)) for i in range(100)), 400_000)
            with pytest.raises(LinkError, match="is closed"):  # not one byte more: a short message would complete a long one
                link.send(iter(_make_tensors()), 64)
        elif rank == 1:
            with pytest.raises(LinkError, match="broke"):
                list(link.receive())
        else:
            for _name, _ in link.receive():
                break
            gc.collect()
            with pytest.raises(LinkError, match="is closed"):
                list(link.receive())
        assert time.monotonic() - start < 20  # not the limit of 30
        dist.barrier()
        box = [meeting.port if meeting else None]
        dist.broadcast_object_list(box, 0)
        if rank == 0:
            WeightSender(meeting, name="second", world=2, local_host="127.0.0.1", seconds=20).send(iter(_make_tensors()), 64)
        elif rank == 1:
            second = WeightReceiverWorker(address="127.0.0.1", port=box[0], rank=1, world=2, name="second", seconds=20)
            assert [name for name, _ in second.receive()] == [name for name, _ in _make_tensors()]
        dist.barrier()

    run_ranks(run, 3)


def test_weight_transfer_absent_member_is_an_error_within_the_timeout():
    def run(rank, world):
        meeting = Rendezvous()
        start = time.monotonic()
        with pytest.raises(LinkError, match="the link of 2 members was not established within 1 s"):
            WeightSender(meeting, name="alone", world=2, local_host="127.0.0.1", seconds=1.0)
        with pytest.raises(LinkError, match="does not answer"):
            WeightReceiverWorker(address="127.0.0.1", port=1, rank=1, world=2, name="alone", seconds=1.0)
        assert time.monotonic() - start < 20

    run_ranks(run, 1)


def test_weight_transfer_message_out_of_order_is_an_error():
    """This is what a sync that continued after a failed broadcast would look like."""

    def run(rank, world):
        meeting, link = _make_link(rank, world)
        if rank == 0:
            link._numbers(1, 5, 8, 8)
        else:
            assert "expected message 0 of a weight update" in _catch_error(link)
        dist.barrier()

    run_ranks(run, 2)
