"""Shared prefixes: exact in each layout, and each silent mutation is detected. docs/shared_prompts.md lists the mutations."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest

from tests import lora_cases
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

LOSSES = {"grpo": dict(beta=0.05), "GSPO": cases.LOSSES["GSPO"]}
RUNS = (("grpo", "packed, 32"), ("GSPO", "packed, 96"), ("grpo", "4 each"))
RECOMPUTED = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
EXPERTS_RECOMPUTED = dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = {}

    def get(model: str):
        if model not in found:
            path = write_tiny(tmp_path_factory.mktemp("models") / model, **(cases.MODELS | cases.FAMILIES)[model])
            batches = cases.shared_rollout(path, num_steps=2)
            own = cases.MODEL_SETTINGS.get(model, {})
            found[model] = path, batches, {loss: cases.reference(path, cases.settings(**own, **LOSSES[loss]), batches) for loss in LOSSES}
        return found[model]

    return get


@pytest.mark.parametrize(("model", "layout", "more"), [
    ("dense", "1", {}),
    ("dense", "TP2 SP CP2", {}),
    ("dense", "PP2 VPP2", RECOMPUTED),
    ("dense", "DP2", {}),
    ("MoE", "EP2", EXPERTS_RECOMPUTED),
    ("MoE", "PP2 VPP2", RECOMPUTED),
    ("MLA", "CP2", {}),
    ("MLA", "TP2 SP", {}),
    ("Qwen3.5", "TP2 SP CP2", {}),
    ("Qwen3.5", "PP2 VPP2", RECOMPUTED),
], ids=str)  # fmt: skip
def test_shared_prefix_steps_equal_float64(made, model, layout, more):
    path, batches, losses = made(model)
    layout = cases.LAYOUTS[layout]
    chosen = [key for key in RUNS if cases.is_legal(layout, cases.SHARED_CUTS[key[1]], cases.SHARED_ROWS)]
    runs = {(loss, cut): LOSSES[loss] | cases.SHARED_CUTS[cut] | cases.SHARED | more for loss, cut in chosen}
    found = cases.compare(model, path, layout, runs, batches, {key: losses[key[0]] for key in runs})
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


@pytest.mark.parametrize(("model", "layout"), [("dense", "1"), ("MLA", "CP2")])
def test_shared_prefix_logprobs_and_loss_equal_unshared_run(made, model, layout):
    path, batches, _ = made(model)
    layout = cases.LAYOUTS[layout]

    def body(rank, world):
        parallel, found = cases.join(cases.settings(**layout.settings), world), {}
        for share in ("true", "false"):
            cfg = cases.settings(beta=0.05, share_prefix=share, max_tokens_per_micro_batch=96, **layout.settings)
            policy = cases.build(path, cfg, world, parallel)
            batch = cases.make_batch(policy, batches[0], 0)
            scored = {}
            for who, scorer in (("policy", policy.scorer), ("reference", policy.reference)):
                for micro, values in zip(batch.micro_batches, scorer.logprobs(batch.micro_batches), strict=True):
                    scored |= {(who, row): values[micro.sequence == place] for place, row in enumerate(micro.rows)}
            entropies = policy.scorer.last_stage_entropies(batch.micro_batches)
            mean = float(np.concatenate(entropies).mean())
            found[share] = scored, mean, batch.metrics["packing/shared"], policy.train_step(batch).metrics
        return found

    for rank_outcome in run_ranks(body, layout.world_size):
        (shared, entropy, saved, metrics), (apart, wanted, nothing, others) = rank_outcome["true"], rank_outcome["false"]
        assert nothing == 0 and saved > 0.15
        assert shared.keys() == apart.keys() and len(shared) == 2 * cases.SHARED_ROWS
        assert max(np.abs(shared[key] - apart[key]).max() for key in shared) < 1e-5
        assert entropy == pytest.approx(wanted, rel=1e-5)
        # A clip ratio's extremes are those of a micro-batch, and these are other ones.
        same = {name: value for name, value in others.items() if np.isfinite(value) and not name.endswith(("_min", "_max"))}
        assert {name: metrics[name] for name in same} == pytest.approx(same, rel=1e-5, abs=1e-6)


def test_shared_prefix_lora_steps_equal_peft(made, tmp_path):
    """Against PEFT in float64; the KL's reference is the policy with its initial adapter."""
    path, batches, _ = made("dense")
    adapter = lora_cases.write_random_adapter(path, tmp_path / "adapter")
    settings = dict(tuner_type="lora", adapters=str(adapter), **LOSSES["grpo"])
    right = cases.reference(path, cases.settings(**settings), batches)
    runs = {cut: settings | cases.SHARED_CUTS[cut] | cases.SHARED for cut in ("packed, 32", "packed, 96")}
    found = cases.compare("dense", path, cases.LAYOUTS["TP2 SP"], runs, batches, dict.fromkeys(runs, right))
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


# ---- each of these mistakes must be seen -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def change_collation(change):
    """Mutation: micro-batches are `change(batch)`; only TrainingMicroBatches, because the reference scores the same ones."""
    from megatron_grpo.core.trainer import sample_buffer

    right = sample_buffer.collate_samples
    with mock.patch.object(sample_buffer, "collate_samples", lambda *args, **how: change(right(*args, **how))):
        yield


def iterate_first_tokens(batch):
    """Yield (trained position, its child) where the last position of a trunk predicts a child's first token."""
    child_segments = {segment.start: segment for segment in batch.segments if segment.parent >= 0}
    for i in range(len(batch.logit_positions) - 1):
        follows = batch.sequence[i] == batch.sequence[i + 1] and batch.logit_positions[i + 1] != batch.logit_positions[i] + 1
        if follows and batch.logit_positions[i + 1] in child_segments:
            yield i, child_segments[batch.logit_positions[i + 1]]


def move_positions(offset: int):
    def change(batch):
        at = batch.logit_positions.copy()
        for i, child in iterate_first_tokens(batch):
            at[i] = child.start + offset
        return dataclasses.replace(batch, logit_positions=at)

    return change


def keep_one_token_per_position(batch):
    _, first = np.unique(batch.logit_positions, return_index=True)
    kept = np.isin(np.arange(len(batch.logit_positions)), first)
    return dataclasses.replace(batch, token_weights=batch.token_weights * kept)


def divide_weights_by_copies(batch):
    _, place, counts = np.unique(batch.logit_positions, return_inverse=True, return_counts=True)
    return dataclasses.replace(batch, token_weights=batch.token_weights / counts[place])


def place_children_at(first):
    def change(batch):
        positions = batch.positions.copy()
        for segment in batch.segments:
            if segment.parent >= 0:
                positions[segment.start : segment.end] = first(batch, segment) + np.arange(segment.end - segment.start)
        return dataclasses.replace(batch, positions=positions)

    return change


def show_siblings(batch):
    merged = []
    for segment in batch.segments:
        if segment.parent >= 0 and merged[-1].parent == segment.parent:
            merged[-1] = dataclasses.replace(merged[-1], end=segment.end, length=segment.end - merged[-1].start)
        else:
            merged.append(segment)
    return dataclasses.replace(batch, segments=tuple(merged))


def drop_parents(batch):
    return dataclasses.replace(batch, segments=tuple(dataclasses.replace(segment, parent=-1) for segment in batch.segments))


def show_parent_padding(batch):
    parents = {segment.parent for segment in batch.segments}
    widened = [
        dataclasses.replace(segment, length=segment.end - segment.start) if number in parents else segment
        for number, segment in enumerate(batch.segments)
    ]
    return dataclasses.replace(batch, segments=tuple(widened))


@contextlib.contextmanager
def kernel(**methods):
    """Replace methods of the CPU kernel; each gets the right one."""
    from megatron_grpo.core.policy import attention

    right = attention.FLASH_ON_CPU
    wrong = type("Wrong", (), {name: staticmethod(getattr(right, name)) for name in ("forward", "backward")})
    for name, method in methods.items():
        setattr(wrong, name, staticmethod(lambda *args, method=method, name=name: method(getattr(right, name), *args)))
    with mock.patch.object(attention, "FLASH_ON_CPU", wrong):
        yield


def without_gradient_of_inherited_keys(right, *args):
    dq, dk, dv = right(*args)
    part = args[6]
    return (dq, dk, dv) if part.is_causal else (dq, dk * 0, dv * 0)


def patch_log_sum_exp(right, grad, q, k, v, out, lse, part, scale):
    from megatron_grpo.core.policy import attention

    return right(grad, q, k, v, out, attention.FLASH_RIGHT.forward(q, k, v, part, scale)[1], part, scale)


@contextlib.contextmanager
def use_own_log_sum_exp():
    from megatron_grpo.core.policy import attention

    with mock.patch.object(attention, "FLASH_RIGHT", attention.FLASH_ON_CPU, create=True), kernel(backward=patch_log_sum_exp):
        yield


@contextlib.contextmanager
def average_parts():
    import torch

    with mock.patch.object(torch, "logaddexp", lambda one, other: other + np.log(2)):
        yield


@contextlib.contextmanager
def merge_outside():
    """Mutation: autograd differentiates the merge; kernels have no gradient for their log-sum-exp."""
    import torch

    from megatron_grpo.core.policy import attention

    class Alone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, part, scale, kernel):
            out, lse = kernel.forward(q, k, v, part, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.rest = part, scale, kernel
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx, grad, unused):
            part, scale, kernel = ctx.rest
            return *kernel.backward(grad, *ctx.saved_tensors, part, scale), None, None, None

    def merged(q, k, v, packed, scale, kernel, sinks):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], -np.inf)
        for part in (packed.causal, *packed.full):
            found, found_lse = Alone.apply(q[part.queries], k[part.keys], v[part.keys], part, scale, kernel)
            here = torch.zeros_like(out), torch.full_like(lse, -np.inf)
            here[0][part.queries], here[1][:, part.queries] = found, found_lse
            both = torch.logaddexp(lse, here[1])
            shares = [torch.where(both > -np.inf, (one - both).exp(), 0.0).t()[..., None] for one in (lse, here[1])]
            out, lse = out * shares[0] + here[0] * shares[1], both
        return out

    with mock.patch.object(attention, "_Attention", type("Merged", (), {"apply": staticmethod(merged)})):
        yield


@contextlib.contextmanager
def group_by_number_only():
    from megatron_grpo.core.batching import collate

    right = collate.common_prefix

    def longer(sequences, contexts):
        return max(right(sequences, contexts), min(4, min(context.num_computed for context in contexts)))

    with mock.patch.object(collate, "common_prefix", longer):
        yield


@contextlib.contextmanager
def count_z_loss_once():
    from megatron_grpo.core.policy.router import PolicyRouter

    right = PolicyRouter.apply_z_loss

    def wrong(self, logits, padding_mask=None):
        self.copies = self.copies.clamp(max=1)
        return right(self, logits, padding_mask)

    with mock.patch.object(PolicyRouter, "apply_z_loss", wrong):
        yield


@contextlib.contextmanager
def average_z_loss_over_computed():
    from megatron_grpo.core.types import GlobalBatch

    computed = property(lambda self: sum(micro.num_tokens - micro.num_padding_tokens for micro in self.micro_batches))
    with mock.patch.object(GlobalBatch, "num_computed_tokens", computed), count_z_loss_once():
        yield


MISTAKES = {
    "nothing": contextlib.nullcontext,
    "first token from its own hidden state": lambda: change_collation(move_positions(0)),
    "first token from the place before it, its sibling's end": lambda: change_collation(move_positions(-1)),
    "a place predicts one token": lambda: change_collation(keep_one_token_per_position),
    "weights divided by copies": lambda: change_collation(divide_weights_by_copies),
    "completions at positions from 0": lambda: change_collation(place_children_at(lambda batch, child: 0)),
    "positions by place": lambda: change_collation(
        place_children_at(lambda batch, child: child.start - batch.segments[child.parent].start)
    ),
    "siblings see each other": lambda: change_collation(show_siblings),
    "parents dropped": lambda: change_collation(drop_parents),
    "parts averaged": average_parts,
    "parts merged outside": merge_outside,
    "prompt's keys without gradient": lambda: kernel(backward=without_gradient_of_inherited_keys),
    "backward with a part's own log-sum-exp": use_own_log_sum_exp,
}


def measure_distances(path, batches, settings, mistakes, layout="1") -> dict[str, cases.Distance]:
    case = cases.LAYOUTS[layout]
    cfg = cases.settings(**settings, **case.settings)
    right = cases.reference(path, cfg, batches)

    def body(rank, world):
        parallel, found = cases.join(cfg, world), {}
        for name, mistake in mistakes.items():
            with mistake():
                found[name] = cases.train(rank, world, path, cfg, batches, parallel=parallel)
        return found

    by_rank = run_ranks(body, case.world_size, timeout=120)
    return {name: cases.merge_worst([cases.distance(found[name], right) for found in by_rank]) for name in mistakes}


def assert_seen(found: dict[str, cases.Distance]) -> None:
    assert found.pop("nothing").within()
    assert {name: distance for name, distance in found.items() if distance.gradient < 0.01} == {}


SHARED = dict(beta=0.05, max_tokens_per_micro_batch=96, **cases.SHARED)


def test_shared_prefix_mutation_is_detected(made):
    path, batches, _ = made("dense")
    assert_seen(measure_distances(path, batches[:1], SHARED, MISTAKES))


def test_shared_prefix_visible_padding_is_detected(made):
    path, batches, _ = made("dense")
    mistakes = {"nothing": contextlib.nullcontext, "padding": lambda: change_collation(show_parent_padding)}
    assert_seen(measure_distances(path, batches[:1], SHARED, mistakes, "CP2"))


def test_shared_prefix_z_loss_mutation_is_detected(made):
    path, batches, _ = made("MoE")
    mistakes = {"nothing": contextlib.nullcontext, "once": count_z_loss_once, "over computed tokens": average_z_loss_over_computed}
    assert_seen(measure_distances(path, batches[:1], SHARED | cases.MODEL_SETTINGS["MoE"], mistakes))


def test_shared_prefix_grouping_by_number_only_is_detected(made):
    """One row of each group has another second token, as with a date or an image."""
    path, batches, _ = made("dense")
    changed = []
    for sample in batches[0]:
        tokens = sample.token_ids.copy()
        if sample.row % 2 and not sample.mask[:3].any() and len(tokens) > 3:
            tokens[1] = (tokens[1] + 1) % 125
        changed.append(dataclasses.replace(sample, token_ids=tokens, prefix=0))
    assert_seen(measure_distances(path, [changed], SHARED, {"nothing": contextlib.nullcontext, "number": group_by_number_only}))
