"""Log-probs from hidden states: equal to torch.log_softmax, with no more logits in memory than one chunk."""

from __future__ import annotations

import threading
import time
from functools import partial
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.core.parallel import vocab
from megatron_grpo.core.parallel.vocab import linear_logprobs
from tests.ranks import run_ranks

POSITIONS, HIDDEN, VOCAB, PADDED = 13, 8, 37, 48  # 11 rows of padding, so that with 4 shards one has 1 word and 11 rows of padding
TEMPERATURE = 0.7


def make_tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, dtype=torch.float64, generator=generator).to(dtype)
    targets = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    grads = torch.randn(2, POSITIONS, dtype=torch.float64, generator=generator)
    return hidden, weight, targets, grads


def compute_expected(hidden, weight, targets, grads, with_entropy):
    """By torch, in float64: log-probs, entropy, and the gradients of (grads . outputs)."""
    hidden, weight = (tensor.detach().double().clone().requires_grad_() for tensor in (hidden, weight))
    log_softmax = torch.log_softmax(hidden @ weight[:VOCAB].t() / TEMPERATURE, dim=-1)
    logprobs = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    loss = (grads[0] * logprobs).sum() + ((grads[1] * entropy).sum() if with_entropy else 0.0)
    loss.backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def compute_on_shard(rank, world_size, tensors, with_entropy, chunk_size, slope=None, vocab_mask=None):
    """One tensor-parallel rank's answer: (logprobs, entropy, partial grad of hidden summed over ranks, grad of its rows)."""
    import torch.distributed as dist

    hidden, weight, targets, grads = tensors
    rows = PADDED // world_size
    start = rank * rows
    hidden, shard = hidden.clone().requires_grad_(), weight[start : start + rows].clone().requires_grad_()
    logprobs, entropy = linear_logprobs(
        hidden,
        shard,
        targets,
        temperature=TEMPERATURE,
        vocab_start=start,
        num_valid_rows=max(0, min(rows, VOCAB - start)),
        group=dist.group.WORLD if world_size > 1 else None,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        slope=slope and partial(slope, grads[0]),
        vocab_mask=vocab_mask,
    )
    loss = (grads[0].to(logprobs.dtype) * logprobs).sum()
    if with_entropy:
        loss = loss + (grads[1].to(logprobs.dtype) * entropy).sum()
    loss.backward()
    grad_hidden = hidden.grad
    if world_size > 1:
        dist.all_reduce(grad_hidden)
    return logprobs.detach(), None if entropy is None else entropy.detach(), grad_hidden, shard.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_vocab_logprobs_equal_log_softmax_at_every_tensor_parallel_size(world_size):
    tensors = make_tensors()

    def every_variant(rank, world_size):
        variants = [(with_entropy, chunk) for with_entropy in (False, True) for chunk in (1, 5, 64)]
        return [compute_on_shard(rank, world_size, tensors, *variant) for variant in variants]

    by_rank = run_ranks(every_variant, world_size) if world_size > 1 else [every_variant(0, 1)]
    for number, answers in enumerate(zip(*by_rank, strict=True)):
        with_entropy = number >= 3
        logprobs, entropy, grad_hidden, grad_weight = compute_expected(*tensors, with_entropy)
        for found in answers:
            torch.testing.assert_close(found[0], logprobs, rtol=0, atol=1e-13)
            assert (found[1] is None) is not with_entropy
            if with_entropy:
                torch.testing.assert_close(found[1], entropy, rtol=0, atol=1e-13)
            torch.testing.assert_close(found[2], grad_hidden, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([found[3] for found in answers]), grad_weight, rtol=0, atol=1e-12)


def compute_right_slope(grads, chunk, logprobs):
    """The slope of the loss of `on_a_shard`."""
    return grads[chunk].to(logprobs.dtype)


def compute_wrong_slope(grads, chunk, logprobs):
    return compute_right_slope(grads, chunk, logprobs) * (1 + 1e-6)


def count_recomputed_chunks(answer, *arguments):
    """(how many chunks' logits the backward made again, the answer)."""
    with mock.patch.object(vocab, "_again", wraps=vocab._again) as again:
        found = answer(*arguments)
    return again.call_count, found


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_vocab_logprobs_forward_gradients_equal_backward_for_any_slope(world_size):
    """On 6 shards the last holds no word. What asks for the entropy's gradient too is not to be had in the forward."""
    tensors = make_tensors()
    variants = [
        (False, 5, compute_right_slope),
        (False, 64, compute_right_slope),
        (False, 5, compute_wrong_slope),
        (True, 5, compute_right_slope),
    ]

    def every_variant(rank, world_size):
        return [count_recomputed_chunks(compute_on_shard, rank, world_size, tensors, *variant) for variant in variants]

    by_rank = run_ranks(every_variant, world_size) if world_size > 1 else [every_variant(0, 1)]
    for variant, answers in zip(variants, zip(*by_rank, strict=True), strict=True):
        assert [again for again, _ in answers] == [0 if variant[0] is False and variant[2] is compute_right_slope else 1] * world_size
        logprobs, _, grad_hidden, grad_weight = compute_expected(*tensors, variant[0])
        for _, found in answers:
            torch.testing.assert_close(found[0], logprobs, rtol=0, atol=1e-13)
            torch.testing.assert_close(found[2], grad_hidden, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([found[3] for _, found in answers]), grad_weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_vocab_logprobs_forward_gradients_in_low_precision_are_accurate(dtype, bound):
    tensors = make_tensors(dtype)
    again, found = count_recomputed_chunks(compute_on_shard, 0, 1, tensors, False, 5, compute_right_slope)
    assert again == 0 and found[2].dtype == found[3].dtype == dtype
    for value, wanted in zip(found[2:], compute_expected(*tensors, False)[2:], strict=True):
        assert (value.double() - wanted).norm() <= bound * wanted.norm()


def test_vocab_logprobs_ignore_shard_of_padding():
    """37 words on 6 shards of 8 rows: the last shard holds rows 40 to 47, none of them a word."""
    tensors = make_tensors()
    by_rank = run_ranks(lambda rank, size: compute_on_shard(rank, size, tensors, True, 5), 6)
    logprobs, entropy, grad_hidden, grad_weight = compute_expected(*tensors, True)
    for found in by_rank:
        torch.testing.assert_close(found[0], logprobs, rtol=0, atol=1e-13)
        torch.testing.assert_close(found[1], entropy, rtol=0, atol=1e-13)
        torch.testing.assert_close(found[2], grad_hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([found[3] for found in by_rank]), grad_weight, rtol=0, atol=1e-12)
    assert by_rank[-1][3].abs().sum() == 0


def test_vocab_logprobs_and_entropy_pass_gradcheck():
    hidden, weight, targets, _ = make_tensors()
    hidden, weight = hidden[:4].requires_grad_(), weight[:10].requires_grad_()

    def both(hidden, weight):
        return tuple(linear_logprobs(hidden, weight, targets[:4] % 9, temperature=0.6, num_valid_rows=9, chunk_size=3, with_entropy=True))

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_vocab_logprobs_in_float32_are_within_rounding_of_float64():
    tensors = make_tensors(torch.float32)
    found = compute_on_shard(0, 1, tensors, True, 5)
    assert found[0].dtype == found[1].dtype == torch.float32
    for value, right in zip(found, compute_expected(*tensors, True), strict=True):
        assert (value.double() - right).norm() <= 1e-6 * right.norm()


def test_bfloat16_inputs_give_float32_log_probs_and_bfloat16_gradients():
    tensors = make_tensors(torch.bfloat16)
    found = compute_on_shard(0, 1, tensors, True, 5)
    logprobs, entropy, grad_hidden, grad_weight = compute_expected(*tensors, True)
    assert [value.dtype for value in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    # The logits are bfloat16 products: up to 16, rounded to within 1/32, then divided by 0.7, twice (target, maximum). Nothing after is.
    assert (found[0].double() - logprobs).abs().max() < 2 / 32 / TEMPERATURE
    assert (found[2].double() - grad_hidden).norm() < 0.02 * grad_hidden.norm()
    assert (found[3].double() - grad_weight).norm() < 0.02 * grad_weight.norm()


def test_a_frozen_output_layer_gets_no_gradient():
    hidden, weight, targets, _ = make_tensors()
    hidden.requires_grad_()
    linear_logprobs(hidden, weight, targets, temperature=1.0).logprobs.sum().backward()
    assert weight.grad is None and hidden.grad.norm() > 0
    before, hidden.grad = hidden.grad, None
    of_a_sum = linear_logprobs(hidden, weight, targets, temperature=1.0, slope=lambda chunk, logprobs: torch.ones_like(logprobs))
    of_a_sum.logprobs.sum().backward()
    torch.testing.assert_close(hidden.grad, before, rtol=0, atol=1e-12)


def test_vocab_logprobs_of_no_positions_still_give_weight_gradient():
    hidden, weight, targets, _ = make_tensors()
    weight.requires_grad_()
    scores = linear_logprobs(hidden[:0], weight, targets[:0], temperature=1.0, with_entropy=True)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    assert weight.grad.shape == weight.shape and weight.grad.abs().sum() == 0


def test_vocab_logprobs_of_large_logits_are_finite():
    hidden, weight, targets, _ = make_tensors(torch.float32)
    scores = linear_logprobs(hidden * 1e3, weight, targets, temperature=TEMPERATURE, num_valid_rows=VOCAB, with_entropy=True)
    right = compute_expected(hidden * 1e3, weight, targets, torch.ones(2, POSITIONS), False)[0]
    torch.testing.assert_close(scores.logprobs.double(), right, rtol=1e-5, atol=1e-3)
    assert scores.entropy.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


class TestMemory:
    """Peak memory.

    With a vocabulary of 32,768, one float32 [tokens, vocabulary] tensor of 1,024 tokens has 128 MiB; a chunk of 32 tokens has 4 MiB.
    """

    TOKENS, WIDE, NARROW, CHUNK = 1024, 32_768, 16, 32
    FULL = TOKENS * WIDE * 4
    OF_A_CHUNK = CHUNK * WIDE * 4
    WEIGHT = WIDE * NARROW * 4  # 2 MiB: the gradient of the weight is as large, and one chunk's share of it

    def peak(self, run) -> int:
        """Most bytes that this process held above what it held before, sampled every 0.2 ms."""
        process, highest, done = psutil.Process(), 0, threading.Event()
        before = process.memory_info().rss

        def watch():
            nonlocal highest
            while not done.is_set():
                highest = max(highest, process.memory_info().rss)
                time.sleep(0.0002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        run()
        done.set()
        watcher.join()
        return highest - before

    def arrange(self):
        hidden = torch.randn(self.TOKENS, self.NARROW, requires_grad=True)
        weight = torch.randn(self.WIDE, self.NARROW, requires_grad=True)
        targets = torch.randint(0, self.WIDE, (self.TOKENS,))

        def ours():
            scores = linear_logprobs(hidden, weight, targets, temperature=0.9, chunk_size=self.CHUNK, with_entropy=True)
            (scores.logprobs.sum() + 0.01 * scores.entropy.sum()).backward()

        def whole():
            torch.log_softmax(hidden @ weight.t(), dim=-1).sum().backward()

        return ours, whole

    def test_vocab_logprobs_make_no_tensor_above_one_chunk(self):
        ours, whole = self.arrange()
        with LargestTensor() as largest:
            ours()
        assert largest.num_bytes == self.OF_A_CHUNK
        with LargestTensor() as largest:
            whole()
        assert largest.num_bytes == self.FULL

    def test_vocab_logprobs_peak_memory_is_a_few_chunks(self):
        ours, whole = self.arrange()
        ours()  # threads, kernels and the allocator's first pages are not what is measured
        bound = 4 * self.OF_A_CHUNK + 3 * self.WEIGHT
        assert bound < self.FULL / 4
        assert self.peak(ours) < bound
        # The measure sees what it should: the plain way holds at least one full tensor.
        assert self.peak(whole) > self.FULL


class TestSamplingMask:
    """The softmax over a sampling mask; positions without one use the whole vocabulary."""

    def kept(self):
        generator = torch.Generator().manual_seed(1)
        targets = make_tensors()[2]
        words = [
            torch.cat([target[None], torch.randint(0, VOCAB, (n % 6,), generator=generator)]).unique() for n, target in enumerate(targets)
        ]
        words[3] = words[5] = words[8] = words[3][:0]  # 5 begins a chunk, whose other positions have some
        counts = [len(ids) for ids in words]
        return vocab.SamplingMaskTensors.from_offsets(
            np.cumsum([0, *counts]), torch.cat(words).numpy().astype(np.int32), torch.device("cpu")
        )

    def expected(self, tensors, kept):
        """As `expected`, with what was left out at -inf, in torch's own softmax."""
        hidden, weight, targets, grads = tensors
        hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in (hidden, weight))
        left = torch.ones(POSITIONS, VOCAB, dtype=torch.bool)
        for position in range(POSITIONS):
            if kept.at[position] < kept.at[position + 1]:
                left[position] = False
                left[position, kept.ids[kept.at[position] : kept.at[position + 1]]] = True
        log_softmax = torch.log_softmax((hidden @ weight[:VOCAB].t() / TEMPERATURE).masked_fill(~left, -torch.inf), dim=-1)
        logprobs = log_softmax.gather(1, targets[:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax.masked_fill(~left, 0)).sum(dim=-1)
        ((grads[0] * logprobs).sum() + (grads[1] * entropy).sum()).backward()
        return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad

    @pytest.mark.parametrize("world_size", [1, 2, 6])
    def test_masked_vocab_logprobs_equal_softmax_over_mask(self, world_size):
        """Some shards have none of a position's words, and the last of six has no word at all."""
        tensors, kept = make_tensors(), self.kept()

        def both_chunks(rank, world_size):
            return [compute_on_shard(rank, world_size, tensors, True, chunk, vocab_mask=kept) for chunk in (5, 64)]

        by_rank = run_ranks(both_chunks, world_size) if world_size > 1 else [both_chunks(0, 1)]
        right = self.expected(tensors, kept)
        for answers in zip(*by_rank, strict=True):
            for found in answers:
                for value, wanted in zip(found[:3], right[:3], strict=True):
                    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(torch.cat([found[3] for found in answers]), right[3], rtol=0, atol=1e-12)

    def test_masked_vocab_logprobs_forward_gradients_equal_backward(self):
        tensors, kept = make_tensors(), self.kept()
        again, found = count_recomputed_chunks(partial(compute_on_shard, vocab_mask=kept), 0, 1, tensors, False, 5, compute_right_slope)
        wanted = self.expected((*tensors[:3], torch.stack([tensors[3][0], torch.zeros(POSITIONS)])), kept)
        assert again == 0
        for value, one in ((found[0], wanted[0]), *zip(found[2:], wanted[2:], strict=True)):
            torch.testing.assert_close(value, one, rtol=0, atol=1e-12)

    def test_masked_vocab_logprobs_pass_gradcheck(self):
        hidden, weight, targets, _ = make_tensors()
        kept = vocab.SamplingMaskTensors.from_offsets(
            np.array([0, 3, 3, 4]), np.array([targets[0], 2, 30, targets[2]]), torch.device("cpu")
        )
        hidden, weight = hidden[:3].requires_grad_(), weight[:VOCAB].requires_grad_()

        def both(*x):
            return tuple(linear_logprobs(*x, targets[:3], temperature=0.6, chunk_size=2, with_entropy=True, vocab_mask=kept))

        assert torch.autograd.gradcheck(both, (hidden, weight))
