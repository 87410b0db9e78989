"""The gradient check with a gradient that one rank spoils by a hook: no rank applies it or hangs, and all ranks name that rank."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.distributed.test_train_step import get_weights, is_same, read_optimizer_state
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

BAD_RANK, BAD_MICRO_BATCH = 1, 2
# Layout -> settings besides; and whether the spoilt gradient stays on its rank until it is summed (tensor and context parallel ranks
# exchange the gradients of activations, a later pipeline stage hands them down, and so do experts).
LAYOUTS = {
    "DP2": [
        {},
        dict(use_distributed_optimizer=False),
        dict(overlap_grad_reduce=True, overlap_param_gather=True),
        dict(torch_dtype="bfloat16"),
        dict(
            torch_dtype="bfloat16",
            use_precision_aware_optimizer=True,
            main_grads_dtype="bf16",
            main_params_dtype="fp16",
            exp_avg_dtype="fp8",
            exp_avg_sq_dtype="fp16",
        ),
        dict(tuner_type="lora", lora_dropout=0.1),
        dict(loss_type="dapo", top_entropy_quantile=0.8, beta=0.05),
    ],
    "TP2": [{}, dict(use_distributed_optimizer=False)],
    "TP2 SP": [dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)],
    "PP2": [{}],
    "PP2 VPP2": [dict(overlap_grad_reduce=True, overlap_param_gather=True)],
    "CP2": [{}],
    "EP2": [{}, dict(use_distributed_optimizer=False)],
    "CP2 EP2": [dict(recompute_granularity="selective")],
}
STAYS = ("DP2",)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"qwen3": ("qwen3", 2), "qwen3_moe": ("qwen3_moe", 2), "four layers": ("qwen3", 4)}
    return {name: write_tiny(folder / name, family, layers=layers, vocab=125, std=0.1) for name, (family, layers) in sizes.items()}


@pytest.fixture(scope="module")
def batches(models):
    return {family: cases.stored_rollout(path, vocab=125, num_steps=2, stale=0) for family, path in models.items()}


@contextlib.contextmanager
def spoil_gradient(policy, rank: int, spoil, *, micro_batch: int = BAD_MICRO_BATCH, once: bool = False):
    """Replace the gradient of the last layer's output for one micro-batch on one rank by `spoil` of it. Yields what was replaced."""
    chunk, done, number = policy.chunks[-1], [], []

    def learn(module, args):
        number[:] = [args[0].number]

    def attach(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if number == [micro_batch] and hidden.requires_grad and not (once and done):
            done.append(micro_batch)
            hidden.register_hook(spoil)

    handles = []
    if policy.parallel.rank == rank:
        handles = [chunk.register_forward_pre_hook(learn), chunk.decoder.layers[-1].register_forward_hook(attach)]
    yield done
    for handle in handles:
        handle.remove()


def is_unchanged(policy, act) -> tuple:
    """Return the result of `act`, whether weights and optimizer are unchanged, and by how much the schedule has advanced."""
    weights, moments, steps = get_weights(policy), read_optimizer_state(policy), policy.scheduler.num_steps
    found = act()
    same = is_same(weights, get_weights(policy)) and all(map(torch.equal, moments, read_optimizer_state(policy)))
    return found, same and bool(moments), policy.scheduler.num_steps - steps


def is_no_number(gradient):
    return torch.full_like(gradient, float("nan"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_check_bad_gradient_on_one_rank_skips_the_step_on_all_ranks(models, batches, name):
    """The next step, and Adam's step count, equal those of a policy without the bad gradient."""
    family = "qwen3_moe" if "EP" in name else "four layers" if "VPP" in name else "qwen3"
    layout, path, (first, second) = cases.LAYOUTS[name], models[family], batches[family]

    def body(rank, world):
        parallel, found = cases.join(cases.settings(**layout.settings), world), []
        for settings in LAYOUTS[name]:
            cfg = cases.settings(**layout.settings, **settings)
            policy, other = (cases.build(path, cfg, world, parallel) for _ in range(2))
            for one in (policy, other):
                assert one.train_step(cases.make_batch(one, first, 0)).skipped_step is None
            batch = cases.make_batch(policy, second, 1)
            with spoil_gradient(policy, BAD_RANK, is_no_number) as done:
                trained, same, scheduled = is_unchanged(policy, lambda: policy.train_step(batch))  # noqa: B023 - called at once
            assert len(done) >= 1 or rank != BAD_RANK, "the hook ran"
            assert same and scheduled == 1 and trained.logprobs == {}
            assert trained.metrics["grad_norm"] == math.inf and trained.metrics["skipped_iterations"] == 1
            for one in (policy, other):
                torch.manual_seed(0)
                after = one.train_step(cases.make_batch(one, second, 1))
                assert after.skipped is None
            if not settings.get("lora_dropout"):
                assert is_same(get_weights(policy), get_weights(other))
                assert all(map(torch.equal, read_optimizer_state(policy), read_optimizer_state(other)))
            assert (policy.skips.total, policy.skips.in_a_row) == (1, 0)
            rows = batch.micro_batches[BAD_MICRO_BATCH].rows if parallel.dp_rank == (BAD_RANK if parallel.dp_size > 1 else 0) else None
            found.append((trained.skipped_step, rows))
        return found

    for settings, *by_rank in zip(LAYOUTS[name], *run_ranks(body, layout.world_size, timeout=240), strict=True):
        refusals, rows = zip(*by_rank, strict=True)
        assert len({str(skipped_step) for skipped_step in refusals}) == 1
        [skipped_step], [bad] = {id(refusals[0]): refusals[0]}.values(), refusals[0].bad_micro_batches
        assert skipped_step.why == "its gradient is not finite" and skipped_step.weights == ()
        assert BAD_RANK in bad.ranks and BAD_RANK in skipped_step.ranks, settings
        if name in STAYS:
            assert bad.ranks == (BAD_RANK,)
            assert skipped_step.ranks == (BAD_RANK,) or settings.get("overlap_grad_reduce")
        assert bad.micro_batch == BAD_MICRO_BATCH and bad.rows == next(row for row in rows if row) and bad.what == ""


def test_gradient_check_covers_copies_that_the_norm_does_not_count(models, batches):
    """Each tensor-parallel rank has a copy of a norm's weight, and Megatron-Core counts the first only."""
    layout, (first, _) = cases.LAYOUTS["TP2"], batches["qwen3"]

    def body(rank, world):
        policy = cases.build(models["qwen3"], cases.settings(**layout.settings), world)
        if rank == BAD_RANK:
            policy.chunks[0].decoder.final_layernorm.weight.register_hook(is_no_number)
        trained = policy.train_step(cases.make_batch(policy, first, 0))
        return trained.metrics["grad_norm"], trained.skipped_step.ranks, {one.ranks for one in trained.skipped_step.bad_micro_batches}

    assert run_ranks(body, 2) == [(math.inf, (BAD_RANK,), {(BAD_RANK,)})] * 2


def test_gradient_check_names_rows_with_nan_and_the_size_of_spikes(models, batches):
    """On two data-parallel ranks, two rows per micro-batch: a NaN advantage, a gradient a million times too large, and one NaN."""
    layout, (first, second) = cases.LAYOUTS["DP2"], batches["qwen3"]

    def body(rank, world):
        from megatron_grpo.core.policy.gradient_check import GradNormSpikeCheck

        found = []
        policy = cases.build(models["qwen3"], cases.settings(micro_batch_size=2, **layout.settings), world)
        samples = [dataclasses.replace(sample, advantage=math.nan) if row == 3 else sample for row, sample in enumerate(first)]
        batch = cases.make_batch(policy, samples, 0)
        [where] = [(rank, number) for number, micro in enumerate(batch.micro_batches) if (0, 3) in micro.rows] or [None]
        found.append((policy.train_step(batch).skipped_step, where))

        policy = cases.build(models["qwen3"], cases.settings(**layout.settings), world, policy.parallel)
        usual = policy.train_step(cases.make_batch(policy, first, 0)).metrics["grad_norm"]
        policy.gradient_check = GradNormSpikeCheck(max_norm=10 * usual)
        with spoil_gradient(policy, BAD_RANK, lambda gradient: 1e6 * gradient):
            trained, same, _ = is_unchanged(policy, lambda: policy.train_step(cases.make_batch(policy, second, 1)))
        assert same and 10 * usual < trained.metrics["grad_norm"] < math.inf
        found.append((trained.skipped_step, None))

        with spoil_gradient(policy, BAD_RANK, is_no_number, once=True):
            found.append((policy.train_step(cases.make_batch(policy, second, 1)).skipped_step, None))
        return found

    (advantage, where), (spike, _), (transient, _) = (
        (refusals[0], next((one for one in places if one), None))
        for refusals, places in (zip(*by_rank, strict=True) for by_rank in zip(*run_ranks(body, 2), strict=True))
    )
    [bad] = advantage.bad_micro_batches
    assert (bad.ranks, bad.micro_batch) == ((where[0],), where[1])
    assert bad.rows == ((0, 3),) and bad.what == "advantages"
    [bad] = spike.bad_micro_batches
    assert (bad.ranks, bad.micro_batch) == ((BAD_RANK,), BAD_MICRO_BATCH) and len(bad.rows) == 1 and bad.norm > 1
    assert "skip_grad_norm_above" in spike.why and spike.skips.in_a_row == 1 and transient.skips.in_a_row == 2
    assert transient.ranks == (BAD_RANK,) and transient.bad_micro_batches == ()


def test_gradient_check_names_ranks_with_nan_weights(models, batches):
    layout, (first, _) = cases.LAYOUTS["PP2"], batches["four layers"]

    def body(rank, world):
        policy = cases.build(models["four layers"], cases.settings(**layout.settings), world)
        if rank == BAD_RANK:
            with torch.no_grad():
                policy.chunks[0].decoder.layers[1].mlp.linear_fc2.weight[0, 0] = math.nan
        skipped_step = policy.train_step(cases.make_batch(policy, first, 0)).skipped_step
        return skipped_step.weights, skipped_step.bad_micro_batches

    weights = ((BAD_RANK, "decoder.layers.1.mlp.linear_fc2.weight"),)
    assert run_ranks(body, 2) == [(weights, ())] * 2


def test_gradient_check_row_with_nan_logprobs_is_not_trained_again(models, batches):
    """A row with NaN log-probs is emptied on all ranks after the refused step; the others get old log-probs."""
    layout, (first, _) = cases.LAYOUTS["DP2"], batches["qwen3"]

    def body(rank, world):
        from types import SimpleNamespace

        from megatron_grpo.core.metadata import TrainingRows
        from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

        policy = cases.build(models["qwen3"], cases.settings(**layout.settings), world)
        rows = TrainingRows.from_samples(first, dp_rank=policy.cut.find_dp_rank(np.array([sample.row for sample in first])))
        mine = {sample.key: sample for sample, home in zip(first, rows.dp_rank, strict=True) if home == policy.parallel.dp_rank}
        pending = SampleBuffer(parallel=policy.parallel, cut=policy.cut, rows=rows, samples=mine)
        score = policy.scorer.old_logprobs

        def without_numbers(micro_batches):
            values, experts = score(micro_batches)
            for micro, found in zip(micro_batches, values, strict=True):
                found[np.isin(micro.targets, first[5].token_ids[-1:])] = math.nan
            return values, experts

        policy.scorer.old_logprobs = without_numbers
        step = SimpleNamespace(keeps=tuple((0, number) for number in range(4)))
        after = pending.after_skipped_step(policy.scorer, step)
        held = {key: (int(sample.mask.sum()), bool(np.isfinite(sample.old_logprobs).all())) for key, sample in after.samples.items()}
        return dict(zip(after.rows.keys, after.rows.num_masked.tolist(), strict=True)), held

    token = first[5].token_ids[-1]
    lost = {sample.key for sample in first if token in sample.token_ids[sample.mask]}
    (masked, held), (masked_there, held_there) = run_ranks(body, 2)
    assert masked == masked_there == {sample.key: 0 if sample.key in lost else sample.num_masked for sample in first}
    assert {*held, *held_there} == {sample.key for sample in first} and lost and len(lost) < len(first)
    assert all(found == (masked[key], True) for key, found in (held | held_there).items())


@pytest.mark.parametrize("settings", [{}, dict(overlap_grad_reduce=True, overlap_param_gather=True)], ids=["plain", "overlapped"])
def test_gradient_check_offload_after_refused_step_restores_the_policy(models, batches, settings):
    """What is offloaded after that step returns as before it."""
    layout, (first, second) = cases.LAYOUTS["DP2"], batches["qwen3"]

    def body(rank, world):
        from megatron_grpo.run.assemble.policy import build_policy

        cfg = cases.settings(torch_dtype="bfloat16", **layout.settings, **settings)
        other = cases.build(models["qwen3"], cfg, world)
        policy = build_policy(
            cfg, other.parallel, model_path=models["qwen3"], num_steps=100,
            offload=("weights", "reference", "gradients", "optimizer"),
        )  # fmt: skip
        refused = []
        for one in (policy, other):
            for step, samples in enumerate((first, second, second)):
                is_spoilt = one is policy and step == 1
                if one is other and step == 1:
                    continue
                with one.on_device("all"), spoil_gradient(one, BAD_RANK if is_spoilt else -1, is_no_number):
                    refused.append(one.train_step(cases.make_batch(one, samples, min(step, 1))).skipped_step is not None)
                one.free_memory()
        with policy.on_device("all"):
            same = (
                is_same(get_weights(policy), get_weights(other)),
                all(map(torch.equal, read_optimizer_state(policy), read_optimizer_state(other))),
            )
        return refused, *same

    assert run_ranks(body, 2, timeout=120) == [([False, True, False, False, False], True, True)] * 2
