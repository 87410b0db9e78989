"""LoRA in each layout against PEFT in float64: losses, norms, each matrix's gradient and weights after two AdamW steps; and mutations."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import megatron.core
import numpy as np
import pytest
import torch
from packaging.version import Version

from megatron_grpo.core.policy import lora
from megatron_grpo.core.weights.lora import LoraSettings
from tests import lora_cases
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

MODELS = cases.MODELS | cases.FAMILIES | {"one group": dict(family="qwen3", layers=4, vocab=125, std=0.1, heads=4, kv_heads=1)}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["mlp"])
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "odd": lora_cases.ODD,
    "attention": LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    "mlp": LoraSettings(rank=4, alpha=8.0, use_rslora=True, target_modules=MLP),
    "all linear": LoraSettings(rank=3, alpha=6.0, rank_pattern={r"in_proj_(ba|b|a)": 2}),
    "early layers": LoraSettings(rank=4, alpha=8.0, target_regex=r".*layers\.[01]\..*_proj"),
    "late layers": LoraSettings(rank=4, alpha=8.0, target_regex=r".*layers\.[23]\..*_proj"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, models, right = tmp_path_factory.mktemp("lora"), {}, {}

    def get(model: str, targets: str, loss: str = "grpo"):
        """Return (model directory, global batches, settings, PEFT's results)."""
        if model not in models:
            path = write_tiny(folder / model, **MODELS[model])
            models[model] = path, cases.stored_rollout(path, num_steps=2, vocab=125)
        path, batches = models[model]
        adapter = folder / f"{model}, {targets}"
        if not adapter.exists():
            lora_cases.write_random_adapter(path, adapter, TARGETS[targets])
        settings = cases.MODEL_SETTINGS.get(model, {}) | dict(tuner_type="lora", adapters=str(adapter)) | cases.LOSSES[loss]
        if (adapter, loss) not in right:
            right[adapter, loss] = cases.reference(path, cases.settings(**settings), batches)
        return path, batches, settings, right[adapter, loss]

    return get


def assert_equal(made, model: str, layout: str, runs) -> None:
    """Compare runs (targets, loss, other settings) on the same ranks, one after another."""
    given = {str(run): made(model, run[0], run[1]) for run in runs}
    (path, batches, *_), right = next(iter(given.values())), {key: found[3] for key, found in given.items()}
    settings = {str(run): given[str(run)][2] | run[2] for run in runs}
    found = cases.compare(model, path, cases.LAYOUTS[layout], settings, batches, right)
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


PACKED = cases.CUTS["packed"]
ONCE = dict(max_tokens_per_micro_batch=40) | cases.SHARED  # what two completions of a prompt begin with is computed once
# beta in dr_grpo and cispo: the reference is then the adapter that the run began with.
DENSE = {
    "1": [("odd", "dr_grpo", {}), ("odd", "grpo", BLOCK), ("mlp", "grpo", SELECTIVE)],
    "TP2": [("odd", "grpo", {}), ("odd", "grpo", dict(use_distributed_optimizer=False))],
    "TP2 SP": [("odd", "cispo", ONCE), ("attention", "grpo", FULL), ("mlp", "grpo", {})],
    "PP2": [("late layers", "grpo", FULL), ("early layers", "grpo", {})],
    "PP2 VPP2": [("odd", "dr_grpo", {}), ("late layers", "grpo", {})],
    "CP2": [("odd", "grpo", ONCE)],
    "DP2": [("odd", "grpo", OVERLAP | ONCE), ("odd", "grpo", FULL | dict(overlap_grad_reduce=True))],
}  # fmt: skip
EXPERTS = {
    "TP2 ETP1": [("odd", "grpo", {}), ("mlp", "grpo", dict(use_distributed_optimizer=False))],
    "TP2 ETP2": [("odd", "dr_grpo", {})],
    "DP2 ETP2": [("mlp", "grpo", {})],
    "EP2": [("odd", "grpo", OVERLAP), ("attention", "grpo", {}), ("mlp", "grpo", dict(use_distributed_optimizer=False))],
    "CP2 EP2": [("odd", "grpo", PACKED | dict(share_prefix="false"))],
    "TP2 EP2 ETP1": [("odd", "grpo", dict(moe_token_dispatcher_type="allgather"))],
}


@pytest.mark.parametrize("layout", DENSE)
def test_dense_steps_equal_peft(made, layout):
    assert_equal(made, "dense", layout, DENSE[layout])


@pytest.mark.parametrize("layout", EXPERTS)
def test_expert_adapter_steps_equal_float64(made, layout):
    assert_equal(made, "MoE", layout, EXPERTS[layout])


OTHERS = [
    ("biases", "TP2 SP", "odd"),
    ("one group", "TP2 SP", "odd"),
    ("MLA", "TP2 ETP2", "odd"),
    ("MLA", "EP2", "odd"),
    ("GLM", "TP2 EP2 ETP1", "odd"),
    ("GLM-4.7-Flash", "TP2 EP2 ETP1", "odd"),
    ("MiniMax-M2", "TP2 ETP1", "attention"),
    ("Qwen2-MoE", "EP2", "odd"),
    ("gpt-oss", "TP2 ETP1", "attention"),
    ("Qwen3-Next", "TP2 ETP1", "all linear"),
    ("Qwen3.5", "CP2", "all linear"),
    ("Qwen3.5-MoE", "EP2", "all linear"),
]
TESTED = ("dense", "MoE", *(model for model, *_ in OTHERS))


@pytest.mark.parametrize(("model", "layout", "targets"), OTHERS)
def test_other_families_equal_peft(made, model, layout, targets):
    assert_equal(made, model, layout, [(targets, "grpo", {})])


# ---- mistakes that run to the end without an error ---------------------------------------------------------------------------------------


def _matrices(policy):
    for linear in policy.adapters.linears.values():
        yield linear, *((linear.lora_a, linear.lora_b) if linear.lora_place.is_column else (linear.lora_b, linear.lora_a))  # shared, cut


def _change_optimizer_marks(policy):
    """Change marks of parameters where distributed optimizers hold copies of them."""
    return [p for group in policy.optimizer.param_groups for p in group["params"]]


def drop_sequence_parallel_mark(policy, patch):
    for _, shared, _ in _matrices(policy):
        shared.sequence_parallel = False


def mark_experts_sequence_parallel(policy, patch):
    for linear, shared, _ in _matrices(policy):
        shared.sequence_parallel = linear.lora_place.sequence_parallel


def unmark_split_matrices(policy, patch):
    for parameter in _change_optimizer_marks(policy):
        parameter.tensor_model_parallel = False


def mark_whole_matrices(policy, patch):
    for parameter in _change_optimizer_marks(policy):
        parameter.tensor_model_parallel = True


def skip_sum_over_ranks(policy, patch):
    patch(lora, "copy_to_ranks", lambda x, group: x)


def copy_like_megatron(policy, patch):
    """Mutation: use Megatron-Core 0.16.1's copy, which loses the sum if the gradient is not contiguous."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    transposed = _Transposed.apply
    patch(lora, "copy_to_ranks", lambda x, group: transposed(copy_to_tensor_model_parallel_region(x, group=group)))


class _Transposed(torch.autograd.Function):
    """Return a gradient that is not contiguous, like an expanded or transposed use of `x`."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(0, -1).contiguous().transpose(0, -1)


def skip_inner_reduction(policy, patch):
    patch(lora, "reduce_from_tensor_model_parallel_region", lambda x, group: x)


def gather_with_split_gradient(policy, patch):
    real = lora.gather_from_sequence_parallel_region
    patch(lora, "gather_from_sequence_parallel_region",
          lambda x, tensor_parallel_output_grad, group: real(x, tensor_parallel_output_grad=False, group=group))  # fmt: skip


def detach_embedding(policy, patch):
    for chunk in policy.chunks:
        if chunk.pre_process:
            chunk.embedding._forward_hooks.clear()


def swap_gate_and_up(policy, patch):
    for linear in policy.adapters.linears.values():
        if linear.lora_place.is_gated:
            linear.lora_part = linear.lora_part.flip(1)


def split_qkv_in_blocks(policy, patch):
    for linear in policy.adapters.linears.values():
        if linear.lora_part is not None and linear.lora_part.shape[1] == 3:
            rows = linear.lora_part.argmax(1).sort().values
            linear.lora_part = torch.nn.functional.one_hot(rows, 3).to(linear.weight)


def count_expert_copies(policy, patch):
    for linear, shared, _ in _matrices(policy):
        if linear.lora_place.is_expert:
            for parameter in [shared, *_change_optimizer_marks(policy)]:
                parameter.shared = False


# layout -> (mistake, model, targets, settings, what shows it)
MISTAKES = {
    "1": [
        (swap_gate_and_up, "dense", "odd", {}, "gradient"),
        (split_qkv_in_blocks, "dense", "odd", {}, "gradient"),
        (detach_embedding, "dense", "odd", FULL, "gradient"),
        (detach_embedding, "dense", "odd", BLOCK, "gradient"),
        (detach_embedding, "dense", "mlp", SELECTIVE, "gradient"),
    ],
    "TP2": [
        (unmark_split_matrices, "dense", "odd", {}, "grad_norm"),
        (mark_whole_matrices, "dense", "odd", {}, "grad_norm"),
        (skip_sum_over_ranks, "dense", "odd", {}, "gradient"),
        (copy_like_megatron, "dense", "odd", {}, "gradient"),
        (skip_inner_reduction, "dense", "odd", {}, "gradient"),
    ],
    "TP2 SP": [
        (drop_sequence_parallel_mark, "dense", "odd", {}, "gradient"),
        (gather_with_split_gradient, "dense", "odd", {}, "gradient"),
    ],
    "PP2": [(detach_embedding, "dense", "odd", FULL, "gradient")],
    "TP2 ETP1": [
        (mark_experts_sequence_parallel, "MoE", "odd", {}, "gradient"),
        (mark_whole_matrices, "MoE", "odd", {}, "grad_norm"),
    ],
    "TP2 ETP2": [(skip_sum_over_ranks, "MoE", "mlp", {}, "gradient")],
    "DP2 ETP2": [(count_expert_copies, "MoE", "mlp", {}, "grad_norm")],
}


# What megatron-core 0.19 does right by itself: gradients that are not contiguous, and copies of experts in the norm.
MENDED = () if Version(megatron.core.__version__) < Version("0.19") else (copy_like_megatron, count_expert_copies)


@pytest.mark.parametrize("layout", MISTAKES)
def test_lora_mutation_is_detected(made, layout):
    case, given = cases.LAYOUTS[layout], {}
    for _, model, targets, *_ in MISTAKES[layout]:
        given[model, targets] = made(model, targets)

    def all_mistakes(rank, world):
        found, parallel = [], None
        for mistake, model, targets, settings, shows in MISTAKES[layout]:
            path, batches, base, right = given[model, targets]
            cfg = cases.settings(**base | case.settings | settings)
            parallel = parallel or cases.join(cfg, world)
            with ExitStack() as stack:

                def tamper(policy, mistake=mistake, stack=stack):
                    mistake(policy, lambda *args: stack.enter_context(mock.patch.object(*args)))

                trained = cases.train(rank, world, path, cfg, batches[:1], tamper, parallel)
                weights = dict.fromkeys(right.gradients, np.zeros(1))
                off = cases.distance(replace(trained, weights=weights), replace(right, weights=weights))
            found.append((mistake.__name__, shows, getattr(off, shows)))
        return found

    for rank_outcomes in run_ranks(all_mistakes, case.world_size, timeout=300):
        mended = {mistake.__name__ for mistake in MENDED}
        assert {name for name, _, error in rank_outcomes if error < 1e-3} <= mended, rank_outcomes


# ---- dropout -----------------------------------------------------------------------------------------------------------------------------


def with_dropout(rank, world, path, cfg, batches):
    """Return, after two steps, replicated matrices, two scores of a text, and the first gradient norm."""
    policy, norms = cases.build(path, cfg, world), []
    for index, samples in enumerate(batches):
        norms.append(policy.train_step(cases.make_batch(policy, samples, index)).metrics["grad_norm"])
    shared = {name: linear.lora_a if linear.lora_place.is_column else linear.lora_b for name, linear in policy.adapters.linears.items()}
    scores = [cases.score_tokens(policy, [[5, 6, 7, 8, 9]])[0].tolist() for _ in range(2)]
    return {name: tensor.detach().numpy() for name, tensor in shared.items()}, scores, norms


@pytest.mark.parametrize("layout", ["TP2", "TP2 SP"])
def test_lora_dropout_keeps_replicas_equal_and_scores_deterministic(made, layout):
    path, batches, settings, _ = made("dense", "odd")
    case = cases.LAYOUTS[layout]
    runs = {name: cases.settings(**settings | case.settings | more) for name, more in {
        "without": {}, "with": dict(lora_dropout=0.3), "recomputed": dict(lora_dropout=0.3) | FULL}.items()}  # fmt: skip
    found = {name: run_ranks(with_dropout, case.world_size, path, cfg, batches) for name, cfg in runs.items()}
    for ranks in found.values():
        (one, scores, _), (other, *_) = ranks
        assert scores[0] == scores[1]
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    norms = {name: ranks[0][2] for name, ranks in found.items()}
    assert abs(norms["with"][0] / norms["without"][0] - 1) > 1e-3
    assert norms["recomputed"] == pytest.approx(norms["with"], rel=1e-5)
