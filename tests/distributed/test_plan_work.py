"""Activations and FLOPs of `plan` against what autograd stores and multiplies, on one rank."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.planning.activations import layer_bytes, stored_by_linears
from megatron_grpo.commands.planning.cost import count_flops
from megatron_grpo.commands.planning.parameters import TrainableSpec
from megatron_grpo.commands.planning.token_counts import StepTokens
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import CHUNK
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

PROMPT, COMPLETION, LAYERS = 8, 24, 4
LORA = dict(tuner_type="lora", lora_rank=4)
RUNS = {
    "full": {},
    "all-linear": LORA,
    "attention": LORA | dict(target_modules=["linear_qkv", "linear_proj"]),
    "MLP": LORA | dict(target_modules=["linear_fc1", "linear_fc2"]),
    "half frozen": dict(freeze_parameters=["model.layers.0.", "model.layers.1.", "model.embed_tokens"]),
}
SHARED = dict(share_prefix="true", micro_batch_size=8, global_batch_size=8)


def count_attention_flops(q, k, v, is_causal):
    """Return the FLOPs of one attention call by shapes: two products of all queries with all keys, or with half of them."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) // (2 if is_causal else 1)


def measure_runs(rank, world, path, runs):
    """Return measurements of one sequence by run.

    Bytes that autograd stores (each storage once), FLOPs forward and backward, tokens and trained tokens.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_grpo.core.policy.packed_batch import to_local

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    attends = {  # torch's own counter does not see the CPU's attention
        flash: lambda q, k, v, dropout=0.0, is_causal=False, **_: count_attention_flops(q, k, v, is_causal),
        flash_backward: lambda grad, q, k, v, out, lse, dropout=0.0, is_causal=False, **_: 2 * count_attention_flops(q, k, v, is_causal),
    }
    parallel, found = cases.join(cases.settings(), world), {}
    for name, changes in runs.items():
        policy = cases.build(path, cases.settings(**changes), world, parallel)
        samples = cases.stored_rollout(path, groups=((PROMPT, (COMPLETION,) * 8),))[0]
        local = to_local(cases.make_batch(policy, samples, 0).micro_batches[0], parallel)
        [chunk] = policy.chunks
        held = {tensor.untyped_storage().data_ptr() for tensor in (*chunk.parameters(), *chunk.buffers())}
        kept = {}

        def keep(tensor, held=held, kept=kept):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no address is used twice
            return tensor

        with (
            FlopCounterMode(display=False, custom_mapping=attends) as forward,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            logprobs = chunk(local)
        logprobs = logprobs[0] if isinstance(logprobs, tuple) else logprobs
        with FlopCounterMode(display=False, custom_mapping=attends) as backward:
            logprobs.sum().backward()
        kept_bytes = sum(size for size, _ in kept.values())
        found[name] = (kept_bytes, forward.get_total_flops(), backward.get_total_flops(), len(local.positions), len(local.targets))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=LAYERS, std=0.02)


@pytest.fixture(scope="module")
def found(model):
    return run_ranks(measure_runs, 1, str(model), RUNS | {"shared": SHARED})[0]


def read_plan(model, changes):
    cfg, shape = cases.settings(**changes), ModelShape.from_pretrained(model)
    return cfg, shape, TrainableSpec.from_config(cfg, shape), checked_sizes(cfg, num_layers=LAYERS, num_experts=0)


def assert_counted(work, run, shape):
    _, forward, backward, _, trained = run
    head = 2 * trained * shape.hidden_size * shape.vocab_size
    assert (forward, backward) == (work.forward, work.backward + head)  # without a loss, its logits are computed again in the backward


@pytest.mark.parametrize("run", RUNS)
def test_plan_flops_equal_counted_flops(model, found, run):
    _, shape, tuning, _ = read_plan(model, RUNS[run])
    *_, tokens, trained = found[run]
    assert_counted(count_flops(shape, tuning, tokens, squares=tokens**2, head_positions=trained), found[run], shape)


def test_plan_flops_with_shared_prefix_equal_counted_flops(model, found):
    cfg, shape, tuning, sizes = read_plan(model, SHARED)
    step = StepTokens.from_lengths(0.0, sizes, cfg, [(PROMPT, COMPLETION)] * 8)
    *_, tokens, trained = found["shared"]
    assert step.shared.tokens == tokens == PROMPT + 8 * (COMPLETION - 1)
    work = count_flops(shape, tuning, tokens, squares=step.shared.squares, head_positions=trained)
    assert_counted(work, found["shared"], shape)


@pytest.mark.parametrize("run", [run for run in RUNS if run != "full"])
def test_plan_activations_differ_from_full_training_by_planned_bytes(model, found, run):
    def count_layer_bytes(which):
        cfg, shape, tuning, sizes = read_plan(model, RUNS[which])
        tokens = found[which][3]
        return LAYERS * layer_bytes(shape, sizes, cfg, stored_by_linears(shape, sizes, tuning, range(LAYERS)), tokens, adapter_size=4)

    more = found["full"][0] - found[run][0]
    assert abs(more - (count_layer_bytes("full") - count_layer_bytes(run))) <= 400, (
        more,
        count_layer_bytes("full") - count_layer_bytes(run),
    )


STATES = dict(family="qwen3_5_text", layers=LAYERS, std=0.02, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
              linear_value_head_dim=48)  # fmt: skip


def count_rule_flops(rank, world, path):
    """Return, for one sequence of two full chunks: FLOPs forward and backward with triangular systems, tokens and trained tokens."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_grpo.core.policy import gated_delta_net
    from megatron_grpo.core.policy.packed_batch import to_local
    from megatron_grpo.core.weights.sizes import CHUNK

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    also = {
        flash: lambda q, k, v, dropout=0.0, is_causal=False, **_: count_attention_flops(q, k, v, is_causal),
        flash_backward: lambda grad, q, k, v, out, lse, dropout=0.0, is_causal=False, **_: 2 * count_attention_flops(q, k, v, is_causal),
        torch.ops.aten.linalg_solve_triangular: lambda a, b, **_: b[0] * b[1] * b[2] * b[2] * b[3],
    }
    parallel = cases.join(cases.settings(), world)
    policy = cases.build(path, cases.settings(), world, parallel)
    gated_delta_net.CHUNK = CHUNK
    samples = cases.stored_rollout(path, groups=((PROMPT, (2 * CHUNK + 1 - PROMPT,) * 8),))[0]
    local = to_local(cases.make_batch(policy, samples, 0).micro_batches[0], parallel)
    with FlopCounterMode(display=False, custom_mapping=also) as forward:
        logprobs = policy.chunks[0](local)
    with FlopCounterMode(display=False, custom_mapping=also) as backward:
        logprobs.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops(), len(local.positions), len(local.targets)


def test_plan_flops_of_gated_delta_rule_equal_counted_flops(tmp_path):
    path = write_tiny(tmp_path, **STATES)
    [(forward, backward, tokens, trained)] = run_ranks(count_rule_flops, 1, str(path))
    shape = ModelShape.from_pretrained(path)
    work = count_flops(shape, TrainableSpec.from_config(cases.settings(), shape), tokens, squares=tokens**2, head_positions=trained)
    assert (tokens, forward) == (2 * CHUNK, work.forward)
    # The first chunk has no state to give a gradient to, and no one needs the state behind the last.
    delta = shape.delta_net
    ends = sum(delta.layers) * CHUNK * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    assert backward == work.backward + 2 * trained * shape.hidden_size * shape.vocab_size - 8 * ends
