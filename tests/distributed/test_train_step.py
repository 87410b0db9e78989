"""The train step around the gradient: its sum over ranks, whether the optimizer may use it, and the learning rate."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", layers=2, vocab=125, std=0.1)


@pytest.fixture(scope="module")
def batches(dense):
    return cases.stored_rollout(dense, vocab=125, num_steps=2, stale=0)


def get_weights(policy) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().numpy().copy() for name, tensor in policy.named_weights()}


def is_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def read_optimizer_state(policy) -> list[torch.Tensor]:
    """Return Adam's moments, flat, and its step count."""
    inner = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    states = [state for one in inner for state in one.optimizer.state.values()]
    return [torch.as_tensor(value).clone() for state in states for value in state.values()]


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed optimizer", "all-reduce"])
def test_bfloat16_gradients_are_summed_over_ranks_in_float32(dense, sharded):
    """bfloat16 would round 256 + 1 to 256."""
    cfg = cases.settings(torch_dtype="bfloat16", use_distributed_optimizer=sharded)

    def body(rank, world):
        policy = cases.build(dense, cfg, world)
        for chunk in policy.wrapped:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(256.0 if rank == 0 else 1.0)
            chunk.finish_grad_sync()
        return sorted({float(value) for gradient in cases.full_gradients(policy).values() for value in np.unique(gradient)})

    assert run_ranks(body, 2) == [[257.0]] * 2


@pytest.mark.parametrize("name", ["1", "PP2"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_train_step_with_nonfinite_loss_changes_no_weights_or_moments(dense, batches, name, wrong):
    layout = cases.LAYOUTS[name]

    def body(rank, world):
        from megatron_grpo.core.policy.passes import StepLoss

        policy = cases.build(dense, cases.settings(**layout.settings), world)
        policy.train_step(cases.make_batch(policy, batches[0], 0))
        before, moments, loss = get_weights(policy), read_optimizer_state(policy), StepLoss.__call__

        def broken(*args):
            value, kept = loss(*args)
            return value * wrong, kept

        StepLoss.__call__ = broken
        trained = policy.train_step(cases.make_batch(policy, batches[1], 1))
        left = all(torch.equal(a, b) for a, b in zip(moments, read_optimizer_state(policy), strict=True)) and bool(moments)
        return trained.skipped, is_same(before, get_weights(policy)), left

    assert run_ranks(body, layout.world_size) == [("its gradient is not finite", True, True)] * layout.world_size


@pytest.mark.parametrize("name", ["PP2", "TP2 SP"])
def test_train_step_computes_logits_once_for_token_losses(dense, batches, name):
    """Gradients are compared with float64 in other tests; a fused path that is never taken would only be slow."""
    layout = cases.LAYOUTS[name]
    losses = {"grpo": dict(beta=0.05, log_entropy=True), "adapters": dict(tuner_type="lora"), "GSPO": cases.LOSSES["GSPO"]}

    def body(rank, world):
        from megatron_grpo.core.parallel import vocab

        parallel, found = cases.join(cases.settings(**layout.settings), world), {}
        for loss, settings in losses.items():
            policy = cases.build(dense, cases.settings(**settings, **layout.settings), world, parallel)
            batch = cases.make_batch(policy, batches[0], 0)
            with mock.patch.object(vocab, "_again", wraps=vocab._again) as again:
                policy.train_step(batch)
            found[loss] = again.call_count, len(batch.micro_batches) if parallel.is_last_stage else 0
        return found

    for found in run_ranks(body, layout.world_size):
        assert found["grpo"][0] == found["adapters"][0] == 0
        assert found["GSPO"][0] == found["GSPO"][1]


def refuse_by_check(policy, batch):
    policy.gradient_check = SimpleNamespace(allows=lambda gradient: False)
    return policy.train_step(batch)


def without_a_trained_token(policy, batch):
    micro_batches = [dataclasses.replace(micro, token_weights=np.zeros_like(micro.token_weights)) for micro in batch.micro_batches]
    return policy.train_step(dataclasses.replace(batch, micro_batches=micro_batches, num_loss_tokens=0))


@pytest.mark.parametrize("skipped", [refuse_by_check, without_a_trained_token])
@pytest.mark.parametrize("name", ["1", "DP2"])
def test_train_step_skipped_changes_no_state(dense, batches, name, skipped):
    """Weights do not change (decay would change them without a gradient), nor moments, nor the next step."""
    layout = cases.LAYOUTS[name]

    def body(rank, world):
        parallel = cases.join(cases.settings(**layout.settings), world)
        policy, other = (cases.build(dense, cases.settings(**layout.settings), world, parallel) for _ in range(2))
        for one in (policy, other):
            one.train_step(cases.make_batch(one, batches[0], 0))
        before, guard = get_weights(policy), policy.gradient_check
        trained = skipped(policy, cases.make_batch(policy, batches[1], 1))
        after, policy.gradient_check = get_weights(policy), guard
        for one in (policy, other):
            one.train_step(cases.make_batch(one, batches[1], 1))
        moved = not is_same(after, get_weights(policy))
        moments = [torch.equal(a, b) for a, b in zip(read_optimizer_state(policy), read_optimizer_state(other), strict=True)]
        return bool(trained.skipped), is_same(before, after), moved, is_same(get_weights(policy), get_weights(other)), all(moments)

    assert run_ranks(body, layout.world_size) == [(True,) * 5] * layout.world_size


@pytest.mark.parametrize(
    "shape",
    [
        dict(lr_decay_style="cosine", lr_warmup_iters=3, min_lr=1e-5),
        dict(lr_decay_style="linear", lr_warmup_fraction=0.26),  # 2.6 of 10 steps are 3
        dict(lr_decay_style="constant", lr_warmup_iters=1),
        dict(lr_decay_style="linear", min_lr=1e-4),
    ],
    ids=str,
)
def test_train_step_logged_learning_rate_is_used_and_equals_formula(dense, batches, shape):
    """Also after a refused step: learning rates depend on the step index only."""
    cfg, num_steps, refused = cases.settings(**shape), 10, 4

    def body(rank, world):
        from megatron_grpo.core.policy.optimizer import build_scheduler

        policy = cases.build(dense, cfg, world)
        policy.scheduler = build_scheduler(policy.optimizer, cfg.optimizer, num_steps=num_steps)
        used, act = [], policy.optimizer.step
        policy.optimizer.step = lambda: (used.append([group["lr"] for group in policy.optimizer.param_groups]), act())[1]
        samples = batches[0][:2]
        batch, logged = cases.make_batch(policy, samples, 0), []
        policy.gradient_check = SimpleNamespace(allows=lambda gradient: len(logged) != refused)
        for _ in range(num_steps):
            logged.append(policy.train_step(batch).metrics["learning_rate"])
        return logged, used

    [(logged, used)] = run_ranks(body, 1)
    wanted = [cases.learning_rate(cfg.optimizer, step, num_steps) for step in range(num_steps)]
    assert logged == pytest.approx(wanted, rel=1e-12)
    del wanted[refused]
    assert all(rate == pytest.approx(one, rel=1e-12) for one, rates in zip(wanted, used, strict=True) for rate in rates)
