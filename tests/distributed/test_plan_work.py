"""What `plan` says of activations and FLOPs against what autograd keeps and multiplies, on one rank."""

from __future__ import annotations

import pytest

from megatron_grpo.planning.activations import kept_by_linears, layer_bytes
from megatron_grpo.planning.cost import work_of
from megatron_grpo.planning.tuning import Tuning
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.shape import ModelShape
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

PROMPT, COMPLETION, LAYERS, HIDDEN, QUERY, KEY = 8, 24, 4, 64, 128, 64
LORA = dict(tuner_type="lora", lora_rank=4)
RUNS = {
    "full": {},
    "all-linear": LORA,
    "attention": LORA | dict(target_modules=["linear_qkv", "linear_proj"]),
    "MLP": LORA | dict(target_modules=["linear_fc1", "linear_fc2"]),
    "half frozen": dict(freeze_parameters=["model.layers.0.", "model.layers.1.", "model.embed_tokens"]),
}


def measured(rank, world, path, runs):
    """By run, of one sequence: bytes that autograd keeps, each storage once; FLOPs forward and backward; tokens, and those that train."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_grpo.policy.stream import to_local

    parallel, found = cases.join(cases.settings(), world), {}
    for name, changes in runs.items():
        policy = cases.build(path, cases.settings(**changes), world, parallel)
        samples = cases.stored_rollout(path, groups=((PROMPT, (COMPLETION,) * 8),))[0]
        local = to_local(cases.batch_of(policy, samples, 0).micro_batches[0], parallel)
        [chunk] = policy.chunks
        held = {tensor.untyped_storage().data_ptr() for tensor in (*chunk.parameters(), *chunk.buffers())}
        kept = {}

        def keep(tensor, held=held, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no address is used twice
            return tensor

        with FlopCounterMode(display=False) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = chunk(local)
        logprobs = logprobs[0] if isinstance(logprobs, tuple) else logprobs
        with FlopCounterMode(display=False) as backward:
            logprobs.sum().backward()
        kept_bytes = sum(size for size, _ in kept.values())
        found[name] = (kept_bytes, forward.get_total_flops(), backward.get_total_flops(), len(local.positions), len(local.targets))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=LAYERS, std=0.02)


@pytest.fixture(scope="module")
def found(model):
    return run_ranks(measured, 1, str(model), RUNS)[0]


def told(model, run):
    cfg, shape = cases.settings(**RUNS[run]), ModelShape.from_pretrained(model)
    return cfg, shape, Tuning.of(cfg, shape), BatchSizes.from_config(cfg, num_layers=LAYERS, num_experts=0)


@pytest.mark.parametrize("run", RUNS)
def test_flops_are_those_that_are_counted(model, found, run):
    _, shape, tuning, _ = told(model, run)
    _, forward, backward, tokens, trained = found[run]
    work = work_of(shape, tuning, tokens, squares=tokens**2, head_positions=trained)
    head = 2 * trained * shape.hidden_size * shape.vocab_size
    assert forward == work.forward - work.attention  # torch's counter does not see the CPU's attention
    # Without a loss the head's logits are computed again in the backward; and the counter does not see its weight's gradient (`addmm_`).
    again, unseen = head, head if tuning.trains("lm_head.weight") else 0
    assert backward == work.backward - 2 * work.attention + again - unseen


@pytest.mark.parametrize("run", [run for run in RUNS if run != "full"])
def test_activations_differ_from_full_training_as_they_are_said_to(model, found, run):
    def layers_of(which):
        cfg, shape, tuning, sizes = told(model, which)
        tokens = found[which][3]
        return LAYERS * layer_bytes(shape, sizes, cfg, kept_by_linears(shape, sizes, tuning, range(LAYERS)), tokens, adapter_size=4)

    more = found["full"][0] - found[run][0]
    assert abs(more - (layers_of("full") - layers_of(run))) <= 400, (more, layers_of("full") - layers_of(run))
