"""Family-specific parameters (sinks, norms over all heads, expert biases) in checkpoints that are resumed in other layouts."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megatron_grpo.core.metadata import Progress
from tests import parity_cases as cases
from tests.distributed.test_checkpoint import PendingRows, Prompts, make_checkpoint_manager, restore_samples
from tests.offload_cases import LOW
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

# family -> (settings of write_tiny, the layout that saves, the one that goes on)
MODELS = {
    "gpt_oss": ({"heads": 12, "kv_heads": 4, "head_dim": 10, "ffn": 36, "experts": 6, "swiglu_limit": 0.6}, "1", "TP2 ETP1"),
    "qwen3_next": ({"layers": 4, "std": 0.06}, "EP2", "PP2 VPP2 EP2"),
    "qwen3_5_text": ({"layers": 4, "std": 0.06}, "TP2", "CP2"),
    "olmo2": ({"heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 34}, "TP2", "PP2"),
}


def take_step_and_save(rank, world, path, layout, folder, batch):
    policy = cases.build(path, cases.settings(micro_batch_size=2, **layout), world)
    policy.train_step(cases.make_batch(policy, batch, 0))
    make_checkpoint_manager(folder).save(Progress(step=1, num_rollouts=1, num_prompts=4, num_tokens=1), PendingRows(), policy, Prompts())
    return export_weights(policy)


def go_on(rank, world, path, layout, folder, batches):
    policy = cases.build(path, cases.settings(micro_batch_size=2, **layout), world)
    restore_samples(make_checkpoint_manager(folder), policy, Prompts())
    before = export_weights(policy)
    policy.train_step(cases.make_batch(policy, batches[1], 1))
    return before, export_weights(policy)


def take_a_step(rank, world, path, layout, folder, batches, first, last):
    """Take the steps from `first` to `last` after a resume from the checkpoint before them; save the first of them."""
    policy = cases.build(path, cases.settings(micro_batch_size=2, **layout), world)
    if first:
        restore_samples(make_checkpoint_manager(folder), policy, Prompts())
    found = [export_weights(policy)]
    for step in range(first, last + 1):
        policy.train_step(cases.make_batch(policy, batches[step], step))
        found.append(export_weights(policy))
        if step == first:
            progress = Progress(step=step + 1, num_rollouts=1, num_prompts=4, num_tokens=1)
            make_checkpoint_manager(folder).save(progress, PendingRows(), policy, Prompts())
    return found


def export_weights(policy):
    return {name: tensor.detach().float().numpy().copy() for name, tensor in policy.named_weights()}


@pytest.mark.parametrize("family", MODELS)
def test_family_resume_in_another_layout_equals_uninterrupted_run(tmp_path, family):
    sizes, first, second = MODELS[family]
    path = write_tiny(tmp_path / "model", family, **{"layers": 2, "vocab": 125, "std": 0.1, **sizes})
    batches = cases.stored_rollout(path, num_steps=2, vocab=125)
    want = cases.reference(path, cases.settings(), batches)
    layouts = [cases.LAYOUTS[name] for name in (first, second)]
    saved = run_ranks(take_step_and_save, layouts[0].world_size, path, layouts[0].settings, tmp_path, batches[0])[0]
    for before, after in run_ranks(go_on, layouts[1].world_size, path, layouts[1].settings, tmp_path, batches):
        assert before.keys() == saved.keys() == after.keys() == want.weights.keys()
        for name, value in saved.items():
            assert np.array_equal(before[name], value), name
            # AdamW's second step by the moments of the first; without them it is off by the step itself.
            assert np.linalg.norm(after[name] - want.weights[name]) < 1e-5 * np.linalg.norm(want.weights[name]), name


@pytest.mark.parametrize(("dtype", "more"), [("float32", {}), ("bfloat16", {}), ("bfloat16", LOW)], ids=["float32", "bfloat16", "few bits"])
def test_hybrid_resume_in_another_layout_and_back_is_exact(tmp_path, dtype, more):
    """Layouts TP2, TP2, CP2, TP2: each begins with the exact weights of the one before, and the second equals an uninterrupted run.

    In a bfloat16 model some weights are float32, in its file too.
    """
    path = write_tiny(tmp_path / "model", "qwen3_5_text", layers=4, vocab=125, std=0.06, dtype=dtype)
    tensors = load_file(path / "model.safetensors")
    if dtype == "bfloat16":
        for name in (name for name in tensors if name.endswith((".A_log", ".dt_bias", ".linear_attn.norm.weight"))):
            tensors[name] = tensors[name].float() * (1 + 2**-15)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    batches = cases.stored_rollout(path, num_steps=4, vocab=125)
    left = uninterrupted = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    for layout, first, last in (("TP2", 0, 1), ("TP2", 1, 1), ("CP2", 2, 2), ("TP2", 3, 3)):
        settings = cases.LAYOUTS[layout].settings | {"torch_dtype": dtype, **more}
        ranks = run_ranks(take_a_step, 2, path, settings, tmp_path, batches, first, last)
        assert all(assert_equal(found[0], left) for found in ranks)
        if (first, last) == (1, 1):
            assert all(assert_equal(found[1], uninterrupted) for found in ranks)
        left, uninterrupted = ranks[0][1], ranks[0][-1]
    if dtype == "float32":
        want = cases.reference(path, cases.settings(), batches).weights
        assert {name for name in want if np.linalg.norm(left[name] - want[name]) > 1e-5 * np.linalg.norm(want[name])} == set()


def assert_equal(weights, others) -> bool:
    return weights.keys() == others.keys() and all(np.array_equal(weights[name], others[name]) for name in weights)
