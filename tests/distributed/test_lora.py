"""LoRA in every layout against PEFT in float64: losses, norms, every matrix's gradient, weights after three AdamW steps. And its traps."""

from __future__ import annotations

import pytest

from megatron_grpo.weights.lora import LoraSettings
from tests import lora_cases
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

MODELS = cases.MODELS | {"one group": dict(family="qwen3", layers=4, vocab=125, std=0.1, heads=4, kv_heads=1)}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS = {
    "odd": lora_cases.ODD,
    "attention": LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    "mlp": LoraSettings(rank=4, alpha=8.0, use_rslora=True, target_modules=MLP),
    "early layers": LoraSettings(rank=4, alpha=8.0, target_regex=r".*layers\.[01]\..*_proj"),
    "late layers": LoraSettings(rank=4, alpha=8.0, target_regex=r".*layers\.[23]\..*_proj"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder, models, right = tmp_path_factory.mktemp("lora"), {}, {}

    def of(model: str, targets: str, loss: str = "grpo"):
        """(model directory, global batches, settings, what PEFT makes of them)."""
        if model not in models:
            path = write_tiny(folder / model, **MODELS[model])
            models[model] = path, cases.stored_rollout(path, num_steps=3, vocab=125)
        path, batches = models[model]
        adapter = folder / f"{model}, {targets}"
        if not adapter.exists():
            lora_cases.random_adapter(path, adapter, TARGETS[targets])
        settings = cases.MODEL_SETTINGS.get(model, {}) | dict(tuner_type="lora", adapters=str(adapter)) | cases.LOSSES[loss]
        if (adapter, loss) not in right:
            right[adapter, loss] = cases.reference(path, cases.settings(**settings), batches)
        return path, batches, settings, right[adapter, loss]

    return of


def assert_equal(made, model: str, layout: str, runs) -> None:
    """runs: (targets, loss, other settings), on the same ranks one after another."""
    given = {str(run): made(model, run[0], run[1]) for run in runs}
    (path, batches, *_), right = next(iter(given.values())), {key: found[3] for key, found in given.items()}
    settings = {str(run): given[str(run)][2] | run[2] for run in runs}
    found = cases.compare(model, path, cases.LAYOUTS[layout], settings, batches, right)
    assert [(key, distance) for key, distance in found.items() if not distance.within()] == []


PACKED = cases.CUTS["packed"]
# beta in dr_grpo and cispo: the reference is then the adapter that the run began with.
DENSE = {
    "1": [("odd", "dr_grpo", {}), ("odd", "grpo", BLOCK), ("mlp", "grpo", dict(recompute_granularity="selective", recompute_modules=["mlp"]))],
    "TP2": [("odd", "grpo", {}), ("odd", "grpo", dict(use_distributed_optimizer=False))],
    "TP2 SP": [("odd", "cispo", PACKED), ("attention", "grpo", FULL), ("mlp", "grpo", {})],
    "PP2": [("late layers", "grpo", FULL), ("early layers", "grpo", {})],
    "PP2 VPP2": [("odd", "dr_grpo", {}), ("late layers", "grpo", {})],
    "CP2": [("odd", "grpo", {})],
    "DP2": [("odd", "grpo", OVERLAP), ("odd", "grpo", FULL | dict(overlap_grad_reduce=True))],
}  # fmt: skip
EXPERTS = {
    "TP2 ETP1": [("odd", "grpo", {}), ("mlp", "grpo", dict(use_distributed_optimizer=False))],
    "TP2 ETP2": [("odd", "dr_grpo", {})],
    "EP2": [("odd", "grpo", OVERLAP), ("attention", "grpo", {}), ("mlp", "grpo", dict(use_distributed_optimizer=False))],
    "CP2 EP2": [("odd", "grpo", PACKED)],
    "TP2 EP2 ETP1": [("odd", "grpo", dict(moe_token_dispatcher_type="allgather"))],
}


@pytest.mark.parametrize("layout", DENSE)
def test_dense_steps_equal_peft(made, layout):
    assert_equal(made, "dense", layout, DENSE[layout])


@pytest.mark.parametrize("layout", EXPERTS)
def test_steps_with_an_adapter_in_each_expert_equal_the_definition(made, layout):
    assert_equal(made, "MoE", layout, EXPERTS[layout])


@pytest.mark.parametrize(("model", "layout"), [("biases", "TP2 SP"), ("one group", "TP2 SP"), ("MLA", "TP2 ETP2"), ("MLA", "EP2")])
def test_other_families_equal_peft(made, model, layout):
    assert_equal(made, model, layout, [("odd", "grpo", {})])
