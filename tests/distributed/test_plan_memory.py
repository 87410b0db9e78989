"""The bytes that `plan` announces against the tensors that Megatron-Core really makes, rank by rank."""

from __future__ import annotations

import pytest

from megatron_grpo.planning.memory import static_memory
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.shape import ModelShape
from tests.parity_cases import build
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny


def measured(rank, world, path, cfg):
    """(stage, rank's place in its dense buffers, bytes of weights, gradients, optimizer state, padding) of real tensors, after one step."""
    import torch
    from megatron.core import parallel_state as ps

    policy = build(path, cfg, world)
    policy.optimizer.zero_grad()
    policy.optimizer.step()  # Adam makes its moments at the first step

    def size(tensors):
        return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)

    parameters = [p for chunk in policy.wrapped for p in chunk.parameters() if p.requires_grad]
    buffers = [b for chunk in policy.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    grads = size(b.grad_data for b in buffers)
    storage = grads + (size(b.param_data for b in buffers) if cfg.optimizer.use_distributed_optimizer else size(parameters))
    state = {}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for moments in part.optimizer.state.values():
            state |= {id(t): t for name, t in moments.items() if name in ("exp_avg", "exp_avg_sq")}
        if cfg.model.torch_dtype == "bfloat16":
            state |= {id(p): p for group in part.optimizer.param_groups for p in group["params"]}
    assert all(t.dtype is torch.float32 for t in state.values())
    place = ps.get_data_parallel_rank(with_context_parallel=True)
    expert_place = ps.get_expert_data_parallel_rank()
    weights, gradients = size(parameters), sum(p.main_grad.nelement() * 4 for p in parameters)
    return (
        ps.get_pipeline_model_parallel_rank(),
        place,
        expert_place,
        weights,
        gradients,
        size(state.values()),
        storage - weights - gradients,
    )


CASES = {
    "one rank, float32, tied": (1, "qwen3", dict(tied=True), dict(), dict(torch_dtype="float32")),
    "tp 2": (2, "qwen3", dict(), dict(tensor_model_parallel_size=2, sequence_parallel=True), dict()),
    "pp 2, tied": (2, "qwen3", dict(tied=True), dict(pipeline_model_parallel_size=2), dict()),
    "pp 2 uneven, dp 2": (
        4,
        "qwen2",
        dict(layers=3),
        dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=2),
        dict(),
    ),
    "vpp 2": (2, "llama", dict(layers=4), dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), dict()),
    "dp 3, odd vocabulary": (3, "qwen3", dict(vocab=131, tied=True), dict(), dict()),
    "cp 2, dp 2, tied": (4, "qwen3", dict(tied=True), dict(context_parallel_size=2), dict()),
    "experts, ep 2": (2, "qwen3_moe", dict(), dict(expert_model_parallel_size=2), dict()),
    "experts, ep 1, dp 2": (2, "mixtral", dict(), dict(), dict()),
    "plain optimizer": (2, "qwen3", dict(), dict(), dict(use_distributed_optimizer=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_gradients_and_optimizer_state_are_equal_to_the_byte(tmp_path, name):
    world, family, model, layout, settings = CASES[name]
    path = write_tiny(tmp_path, family, **model)
    sizes = {"world_size": world, "global_batch_size": 2 * world * 2, "num_generations": 2 * world}
    cfg = Config().with_values({**layout, **settings, **sizes})
    shape = ModelShape.from_pretrained(path)
    sizes = BatchSizes.from_config(cfg, num_layers=shape.num_layers, num_experts=shape.moe.num_experts if shape.moe else 0)
    found = run_ranks(measured, world, str(path), cfg)
    for stage, place, expert_place, weights, gradients, optimizer, padding in found:
        told = static_memory(shape, sizes, cfg, stage, dp_rank=place, expert_dp_rank=expert_place)
        assert (told.weights_bytes, told.gradients_bytes, told.optimizer_bytes, told.padding_bytes) == (
            weights,
            gradients,
            optimizer,
            padding,
        )
