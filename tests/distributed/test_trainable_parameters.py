"""Full training with frozen parameters: gradients equal the float64 reference, and frozen weights stay equal bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.core.weights.trainable_parameters import trains
from megatron_grpo.run.checkpoint.distributed import read_sharded
from tests import parity_cases as cases
from tests.checkpoint_files import write_sharded
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
# (model, layout, what is frozen, how it is run)
CASES = {
    "embedding and attention, TP2 SP, recomputed": ("dense", "TP2 SP", dict(freeze_parameters_regex="embed|self_attn"), FULL),
    "a whole stage and the tied embedding, PP2": (
        "dense", "PP2", dict(freeze_parameters=["model.embed_tokens", "model.layers.0.", "model.layers.1."]), {}),
    "all but the last norm, PP2, recomputed": (
        "dense", "PP2", dict(freeze_parameters=["model"], trainable_parameters=["model.norm"]), FULL),
    "norms alone, PP2 VPP2 DP2, overlapped": (
        "dense", "PP2 VPP2 DP2", dict(freeze_parameters=["model"], trainable_parameters_regex="layernorm"),
        dict(overlap_grad_reduce=True, overlap_param_gather=True)),
    "biases too, DP2, optimizer not distributed": (
        "biases", "DP2", dict(freeze_parameters_regex=r"layers\.[02]\.self_attn|lm_head"), dict(use_distributed_optimizer=False)),
    "routers, EP2": ("MoE", "EP2", dict(freeze_parameters_regex=r"\.gate\.|embed"), FULL),
    "experts, TP2 ETP1": ("MoE", "TP2 ETP1", dict(freeze_parameters_regex=r"\.experts\."), {}),
    "all but experts, EP2": ("MoE", "EP2", dict(freeze_parameters=["model", "lm_head"], trainable_parameters_regex=r"\.experts\."), {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict = {}

    def model(name):
        if name not in made:
            path = write_tiny(tmp_path_factory.mktemp("models") / name, **cases.MODELS[name])
            made[name] = path, cases.stored_rollout(path, vocab=125, num_steps=2)
        return made[name]

    return model


@pytest.mark.parametrize("name", CASES)
def test_trainable_parameters_equal_float64_and_frozen_ones_stay(models, name):
    model, layout_name, frozen, way = CASES[name]
    path, batches = models(model)
    layout = cases.LAYOUTS[layout_name]
    cfg = cases.settings(**cases.MODEL_SETTINGS.get(model, {}), **layout.settings, **frozen, **way)
    right = cases.reference(path, cfg, batches)
    before = get_weights(path)
    rule = trains(cfg.tuner)
    for found in run_ranks(lambda rank, world: cases.train(rank, world, path, cfg, batches), layout.world_size):
        assert {name for name in found.weights if rule(name) and "e_score" not in name} == set(found.gradients)
        assert cases.distance(found, right).within(), cases.distance(found, right)
        moved = {name for name, tensor in found.weights.items() if not np.array_equal(tensor, before[name])}
        assert moved == set(found.gradients)


def get_weights(path):
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


HALF = dict(freeze_parameters=["model.embed_tokens", "model.layers.0.", "model.layers.1."])
ONE_NORM = dict(freeze_parameters=["model"], trainable_parameters=["model.norm"])


@pytest.mark.parametrize(
    ("saved", "continued", "frozen"), [("PP2", "PP2", HALF), ("PP2", "TP2 SP", HALF), ("1", "PP2", HALF), ("DP2", "DP2", ONE_NORM)]
)
def test_resume_with_a_rank_without_trainable_parameters_is_exact(models, tmp_path, saved, continued, frozen):
    """Only trainable parameters have moments: the first of two stages has none, nor has the second of two ranks that share 64 numbers."""
    path, batches = models("dense")

    def begin(rank, world):
        policy = cases.build(path, cases.settings(**frozen, **cases.LAYOUTS[saved].settings), world)
        policy.train_step(cases.make_batch(policy, batches[0], 0))
        write_sharded(policy.sharded_state_dict(is_loading=False), tmp_path)

    def go_on(rank, world):
        policy = cases.build(path, cases.settings(**frozen, **cases.LAYOUTS[continued].settings), world)
        policy.load_sharded_state_dict(read_sharded(policy.sharded_state_dict(is_loading=True), tmp_path))
        policy.train_step(cases.make_batch(policy, batches[1], 1))
        return {name: tensor.numpy().copy() for name, tensor in policy.named_weights()}

    run_ranks(begin, cases.LAYOUTS[saved].world_size)
    right = cases.reference(path, cases.settings(**frozen), batches).weights
    for found in run_ranks(go_on, cases.LAYOUTS[continued].world_size):
        worst = max(cases.relative_error(found[name], right[name]) for name in right)
        assert worst < 1e-5
