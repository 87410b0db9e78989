"""Bytes of `plan` against the tensors that Megatron-Core allocates, rank by rank."""

from __future__ import annotations

import pytest

from megatron_grpo.commands.planning.cost import checkpoint_bytes
from megatron_grpo.commands.planning.memory import OffloadPlan
from megatron_grpo.commands.planning.parameters import TrainableSpec, state_bytes, static_memory
from megatron_grpo.core.policy.requirements import BYTES
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
from megatron_grpo.run.config.settings import Config
from tests.lora_cases import ODD, write_random_adapter
from tests.offload_cases import LOW
from tests.parity_cases import join
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny
from tests.vision_cases import FAMILIES as SEE
from tests.vision_cases import write_vlm


def measure_rank(rank, world, path, cfg):
    """Return measurements of this rank after one step: its parallel ranks, bytes of tensors, buffer alignment, part of a checkpoint."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    from megatron_grpo.core.policy.memory_offload import ROLES
    from megatron_grpo.run.assemble.policy import build_policy

    policy = build_policy(cfg, join(cfg, world), model_path=path, num_steps=100, offload=ROLES)
    policy.optimizer.zero_grad()
    policy.optimizer.step()  # Adam makes its moments at the first step

    def size(tensors):
        return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)

    own = [p for chunk in policy.wrapped for name, p in chunk.named_parameters() if ".lora_" not in name]
    adapters = [p for chunk in policy.wrapped for name, p in chunk.named_parameters() if ".lora_" in name]
    trained = [p for p in (*own, *adapters) if p.requires_grad]
    adapters += [b for chunk in policy.wrapped for name, b in chunk.named_buffers() if name.endswith("lora_part")]
    reference = [b for chunk in policy.wrapped for name, b in chunk.named_buffers() if name.endswith(("ref_a", "ref_b"))]
    if policy.reference is not None and not cfg.tuner.tuner_type == "lora":
        reference = [p for chunk in policy.reference.scorer.model for p in chunk.parameters()]
    buffers = [b for chunk in policy.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    storage = size(b.grad_data for b in buffers)
    storage += size(b.param_data for b in buffers) if cfg.optimizer.use_distributed_optimizer else size(trained)
    state, weights = {}, {p.untyped_storage().data_ptr() for p in trained}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        kept = [t for moments in part.optimizer.state.values() for name, t in moments.items() if name != "step"]
        kept += [] if cfg.optimizer.use_precision_aware_optimizer else [p for group in part.optimizer.param_groups for p in group["params"]]
        state |= {id(t): t for t in kept if t.untyped_storage().data_ptr() not in weights}  # a float32 weight is its own main weight
    assert cfg.optimizer.use_precision_aware_optimizer or all(t.dtype is torch.float32 for t in state.values())
    gradients = size(p.main_grad for p in trained)
    saved = policy.sharded_state_dict(is_loading=False)
    apply_factories(saved)
    saved = [t for t in nested_values(saved) if isinstance(t, ShardedTensor) and is_main_replica(t.replica_id)]
    # What no plan counts: scales of adapters, the buffers of routers; and, on a CPU, the matrix that a frozen adapter's shard is a view of.
    counted = ("lora_part", "ref_a", "ref_b")
    models = [*policy.chunks, *(policy.reference.chunks if policy.reference is not None and cfg.tuner.tuner_type == "full" else ())]
    buffers = [(name, b) for chunk in models for name, b in chunk.named_buffers()]
    small = sum(b.untyped_storage().nbytes() - (b.nbytes if name.endswith(counted) else 0) for name, b in buffers)
    policy.free_memory(keep="weights")
    during_push = policy.offloader.offloaded_bytes
    policy.free_memory()
    return (
        (ps.get_pipeline_model_parallel_rank(), ps.get_expert_model_parallel_rank()),
        dict(
            weights_bytes=size(own),
            adapters_bytes=size(adapters),
            num_trainable_parameters=sum(p.nelement() for p in trained),
            gradients_bytes=gradients,
            optimizer_bytes=size(state.values()),
            reference_bytes=size(reference),
        ),
        storage - size(trained) - gradients,
        size(t.data for t in saved if t.data is not None),
        (policy.offloader.offloaded_bytes - small, during_push),
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
    "pp 2, vpp 2, laid out": (
        2,
        "qwen3",
        dict(layers=4),
        dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tt|t|L"),
        dict(),
    ),
    "dp 3, odd vocabulary": (3, "qwen3", dict(vocab=131, tied=True), dict(), dict()),
    "cp 2, dp 2, tied": (4, "qwen3", dict(tied=True), dict(context_parallel_size=2), dict()),
    # Of sizes that no alignment divides, so that a parameter in the wrong buffer shows.
    "experts, tp 2, etp 1": (2, "qwen3_moe", dict(ffn=36, experts=3), dict(tensor_model_parallel_size=2, sequence_parallel=True), dict()),
    "latent attention, experts, ep 2, pp 2": (
        4,
        "deepseek_v3",
        dict(layers=4),
        dict(expert_model_parallel_size=2, pipeline_model_parallel_size=2),
        dict(),
    ),
    "frozen, pp 2, tied": (
        2,
        "qwen3",
        dict(tied=True, layers=4),
        dict(pipeline_model_parallel_size=2),
        dict(freeze_parameters=["model.embed_tokens", "model.layers.0."], trainable_parameters_regex="_norm"),
    ),
    "experts frozen in part, ep 2": (
        2,
        "qwen3_moe",
        dict(experts=6),
        dict(expert_model_parallel_size=2),
        dict(freeze_parameters_regex=r"experts\.[023]\."),
    ),
    "lora": (1, "qwen3", dict(tied=True), dict(), dict(tuner_type="lora", beta=0.1, rank_pattern={"v_proj": 3, r"1\.mlp.*": 11})),
    "lora, tp 2, from an adapter": (
        2,
        "qwen2",
        dict(),
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
        dict(tuner_type="lora", torch_dtype="float32", beta=0.1, adapters=ODD),
    ),
    "lora, another adapter as reference": (
        1,
        "qwen3",
        dict(),
        dict(),
        dict(tuner_type="lora", beta=0.1, target_modules=["linear_fc1"], ref_adapters=ODD),
    ),
    "lora, pp 2, vpp 2, dp 2, a stage with little": (
        4,
        "qwen3",
        dict(layers=4),
        dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        dict(tuner_type="lora", target_regex=r".*layers\.(0|2|3)\..*_proj"),
    ),
    "lora, experts, ep 2, tp 2, etp 2, plain optimizer": (
        4,
        "qwen3_moe",
        dict(),
        dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        dict(tuner_type="lora", use_distributed_optimizer=False),
    ),
    "lora, experts, ep 1, dp 2": (2, "mixtral", dict(ffn=36, experts=3), dict(), dict(tuner_type="lora", lora_rank=5)),
    "lora, latent attention, ep 2": (2, "deepseek_v3", dict(), dict(expert_model_parallel_size=2), dict(tuner_type="lora", beta=0.1)),
    "norms behind attention and over all heads, tp 2, pp 2": (
        4,
        "olmo2",
        dict(),
        dict(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2),
        dict(),
    ),
    "four norms a layer, lora": (1, "gemma3_text", dict(tied=True), dict(), dict(tuner_type="lora")),
    "recurrent states, experts, pp 2, ep 2": (
        4,
        "qwen3_next",
        dict(layers=4, experts=6),
        dict(expert_model_parallel_size=2, pipeline_model_parallel_size=2),
        dict(),
    ),
    "recurrent states, tp 2": (2, "qwen3_5_text", dict(layers=4), dict(tensor_model_parallel_size=2, sequence_parallel=True), dict()),
    "sees, pp 2, the aligner trains": (
        2,
        "qwen3_vl",
        dict(tied=True),
        dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1),
        dict(freeze_aligner=False),
    ),
    "sees, dp 2, all trains": (2, "qwen2_5_vl", dict(), dict(), dict(freeze_vit=False, freeze_aligner=False, beta=0.1)),
    "few bits, dp 2": (
        2,
        "qwen3",
        dict(tied=True),
        dict(),
        dict(use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16", beta=0.1),
    ),
    "few bits, experts, ep 2, lora": (
        2,
        "qwen3_moe",
        dict(experts=6),
        dict(expert_model_parallel_size=2),
        dict(use_precision_aware_optimizer=True, main_params_dtype="fp16", exp_avg_dtype="fp16", tuner_type="lora"),
    ),
    "few bits, float32": (
        1,
        "qwen3",
        dict(),
        dict(),
        dict(use_precision_aware_optimizer=True, exp_avg_sq_dtype="fp8", torch_dtype="float32"),
    ),
    "recurrent states, few bits": (2, "qwen3_5_text", dict(layers=4), dict(), LOW),
    "plain optimizer, float32": (2, "qwen3", dict(), dict(), dict(use_distributed_optimizer=False, torch_dtype="float32")),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_bytes_equal_real_tensors_and_optimizer_up_to_alignment(tmp_path, name):
    world, family, model, layout, settings = CASES[name]
    path = (write_vlm if family in SEE else write_tiny)(tmp_path, family, **model)
    batch = {"world_size": world, "global_batch_size": 2 * world * 2, "num_generations": 2 * world}
    files = {key: str(write_random_adapter(path, tmp_path / key, value)) for key, value in settings.items() if value is ODD}
    cfg = Config().with_values({**layout, **settings, **batch, **files})
    shape = ModelShape.from_pretrained(path)
    sizes = checked_sizes(cfg, num_layers=shape.num_layers, num_experts=shape.num_experts)
    tuning = TrainableSpec.from_config(cfg, shape)
    found = run_ranks(measure_rank, world, str(path), cfg)
    everything, kept = OffloadPlan(model=True, optimizer=True), state_bytes(cfg.optimizer, tuning.size_of_trained)
    too_much = 0
    for place, bytes_, padding, _, (given, during_push) in found:
        told, optimizer_bytes = static_memory(shape, sizes, cfg, tuning, *place), bytes_.pop("optimizer_bytes")
        assert {field: getattr(told, field) for field in bytes_} == bytes_
        # A rank owns an equal run of each padded buffer, and what is padding in it is nobody's.
        unequal = padding * kept / (tuning.size_of_trained + BYTES[cfg.optimizer.main_grads_dtype]) + 2 * kept
        assert abs(told.optimizer_bytes - optimizer_bytes) <= unequal
        too_much += told.optimizer_bytes - optimizer_bytes
        assert everything.freed(told) == told.total() == given - padding + told.optimizer_bytes - optimizer_bytes, "all is given away"
        rest = padding + unequal + (told.reference_bytes if tuning.adapter_size else 0)  # matrices in the policy's own modules
        assert -unequal <= everything.freed(told, during_sync=True) - during_push <= rest
    assert 0 <= too_much < 2 * world * kept, "together ranks hold the state of each parameter once; shares are rounded up"
    assert checkpoint_bytes(shape, sizes, cfg, tuning) == sum(saved for *_, saved, _ in found)
