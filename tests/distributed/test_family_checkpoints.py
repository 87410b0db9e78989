"""What some families bring besides matrices (sinks, norms over all heads, experts' biases) goes through a checkpoint to other layouts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.types import Progress
from tests import parity_cases as cases
from tests.distributed.test_checkpoint import Prompts, Waiting, checkpoints, restored
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

# family -> (settings of write_tiny, the layout that saves, the one that goes on)
MODELS = {
    "gpt_oss": ({"heads": 12, "kv_heads": 4, "head_dim": 10, "ffn": 36, "experts": 6, "swiglu_limit": 0.6}, "1", "TP2 ETP1"),
    "qwen3_next": ({"layers": 4, "std": 0.06}, "CP2", "TP2 ETP1"),
    "qwen3_5_text": ({"layers": 4, "std": 0.06}, "TP2", "PP2 VPP2"),
    "olmo2": ({"heads": 6, "kv_heads": 2, "head_dim": 10, "ffn": 34}, "TP2", "PP2"),
}


def one_step_and_save(rank, world, path, layout, folder, batch):
    policy = cases.build(path, cases.settings(micro_batch_size=2, **layout), world)
    policy.train_step(cases.batch_of(policy, batch, 0))
    checkpoints(folder).save(Progress(step=1, num_rollouts=1, num_prompts=4, num_tokens=1), Waiting(), policy, Prompts())
    return exported(policy)


def go_on(rank, world, path, layout, folder, batches):
    policy = cases.build(path, cases.settings(micro_batch_size=2, **layout), world)
    restored(checkpoints(folder), policy, Prompts())
    before = exported(policy)
    policy.train_step(cases.batch_of(policy, batches[1], 1))
    return before, exported(policy)


def exported(policy):
    return {name: tensor.detach().float().numpy().copy() for name, tensor in policy.named_weights()}


@pytest.mark.parametrize("family", MODELS)
def test_a_run_goes_on_under_another_layout_as_if_it_had_not_stopped(tmp_path, family):
    sizes, first, second = MODELS[family]
    path = write_tiny(tmp_path / "model", family, **{"layers": 2, "vocab": 125, "std": 0.1, **sizes})
    batches = cases.stored_rollout(path, num_steps=2, vocab=125)
    want = cases.reference(path, cases.settings(), batches)
    layouts = [cases.LAYOUTS[name] for name in (first, second)]
    saved = run_ranks(one_step_and_save, layouts[0].world_size, path, layouts[0].settings, tmp_path, batches[0])[0]
    for before, after in run_ranks(go_on, layouts[1].world_size, path, layouts[1].settings, tmp_path, batches):
        assert before.keys() == saved.keys() == after.keys() == want.weights.keys()
        for name, value in saved.items():
            assert np.array_equal(before[name], value), name
            # AdamW's second step by the moments of the first; without them it is off by the step itself.
            assert np.linalg.norm(after[name] - want.weights[name]) < 1e-5 * np.linalg.norm(want.weights[name]), name
