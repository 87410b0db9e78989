"""What Megatron-Core cannot compute of a model, or of a model in a layout, said before anything loads. No torch: `plan` asks too."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.batching.stages import layer_counts
from megatron_grpo.config.config import Config
from megatron_grpo.policy.fp8 import fp8_machine_problems, fp8_problems
from megatron_grpo.policy.refused_bits import gpu_problem
from megatron_grpo.weights.lora import linear_modules, lora_of
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import MoeShape, VisionShape, yarn_mscale


def problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Everything that stands between this configuration and this model, besides divisions (`weights.fit`) and batch sizes."""
    found = [Problem(flags=("model",), message=f"model: {message}") for message in (_routing(shape.moe) if shape.moe else ())]
    found += _local_layers(cfg, shape)
    if shape.moe and shape.moe.has_biases:
        found += _biased_experts(cfg, shape)
    if shape.vision:
        found += _vision(cfg, shape, shape.vision)
    if cfg.optimizer.optimizer_cpu_offload and not cfg.optimizer.use_distributed_optimizer:
        message = "optimizer_cpu_offload needs use_distributed_optimizer true: with it alone Megatron-Core keeps float32 weights there."
        found.append(Problem(flags=("optimizer_cpu_offload", "use_distributed_optimizer"), message=message,
                             nearest={"use_distributed_optimizer": [True], "optimizer_cpu_offload": [False]}))  # fmt: skip
    return [
        *found,
        *_dispatch(cfg, shape),
        *_kernels(cfg, shape),
        *_recompute(cfg, shape),
        *_replay(cfg, shape),
        *fp8_problems(cfg, shape, needs_local_layers(shape)),
        *sharing_problems(cfg, shape),
    ]


def sharing_obstacle(cfg: Config, shape: ModelShape | None) -> str | None:
    """Why prompts cannot be computed once; a phrase."""
    tuner = cfg.tuner
    if cfg.rollout.same_bits:
        return "parts of attention that are merged have other bits than the whole (same_bits)"
    longest = (cfg.data.max_prompt_length or (shape and shape.max_position_embeddings) or 0) + cfg.rollout.max_completion_length
    if shape and shape.sliding_window and shape.sliding_window < longest:
        return f"{shape.architecture} has layers that see {shape.sliding_window} tokens, where sequences have up to {longest}"
    if tuner.tuner_type == "lora" and tuner.lora_dropout > 0:
        return f"lora_dropout ({tuner.lora_dropout:g}) would draw one mask for all copies of a prompt, which is another estimator"
    return None


MOST_FLASH_CHANNELS = 256


def flash_obstacle(dtype: str, channels: int) -> str | None:
    """Why flash attention of GPUs does not take heads of so many channels; a phrase. What the GPU itself lacks: `policy.attention`."""
    if dtype not in ("bfloat16", "float16"):
        return f"flash attention takes bfloat16 and float16, not {dtype}"
    if channels > MOST_FLASH_CHANNELS or channels % 8:
        return f"flash attention takes heads of at most {MOST_FLASH_CHANNELS} channels, a multiple of 8; these have {channels}"
    return None


def attention_channels(shape: ModelShape) -> int:
    """Of one head, as the kernels take it: queries, keys and values alike."""
    return max(shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim, shape.mla.v_head_dim) if shape.mla else shape.head_dim


def sharing_problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """`share_prompts true` where it cannot be."""
    reason = sharing_obstacle(cfg, shape)
    if cfg.batch.share_prompts != "true" or reason is None:
        return []
    others = {"lora_dropout": ", or lora_dropout 0", "parts of attention": ", or same_bits false"}
    other = next((words for begin, words in others.items() if reason.startswith(begin)), "")
    return [_problem("share_prompts", f"true cannot be: {reason}. Use auto or false{other}.", "auto", "false")]


def machine_problems(
    cfg: Config, *, has_gpu: bool, has_transformer_engine: bool, capability: tuple[int, int] | None = None
) -> list[Problem]:
    """What this configuration asks of a machine that has it not. `train` knows the machine; `plan` may be made for another.

    capability: of the GPU to compute.
    """
    found = list(gpu_problem(cfg)) if has_gpu else []
    model, optimizer = cfg.model, cfg.optimizer
    if model.transformer_impl == "transformer_engine" and not has_transformer_engine:
        found.append(_problem("transformer_impl", "transformer_engine is not installed here. Install the extra `te`, or use auto or local.",
                              "auto", "local"))  # fmt: skip
    if optimizer.optimizer_cpu_offload and not has_gpu:
        found.append(_problem("optimizer_cpu_offload", "there is no GPU here: the optimizer is on the host already. Leave it out.", False))
    found += fp8_machine_problems(cfg, has_gpu=has_gpu, has_transformer_engine=has_transformer_engine, capability=capability)
    kernels = cfg.kernels
    if kernels.moe_permute_fusion and not has_transformer_engine:
        found.append(_problem("moe_permute_fusion", "it is Transformer Engine's, which is not installed here. Leave it out.", False))
    if kernels.cp_comm_type and model.transformer_impl == "auto" and not has_transformer_engine:
        found.append(
            _problem("cp_comm_type", "it is for Transformer Engine's attention, which is not installed here. Leave it out.", "none")
        )
    if kernels.moe_shared_expert_overlap and not has_gpu:
        found.append(_problem("moe_shared_expert_overlap", "it needs CUDA streams, and there is no GPU here. Leave it out.", False))
    if kernels.moe_enable_deepep and not (has_gpu and find_spec("deep_ep")):
        lacks = "DeepEP (the package deep_ep) is not installed here" if has_gpu else "there is no GPU here"
        found.append(_problem("moe_enable_deepep", f"{lacks}. Use false and moe_token_dispatcher_type alltoall.", False))
    fused = _fused_recompute(cfg)
    if fused and model.transformer_impl == "auto" and not has_transformer_engine:
        found.append(_problem("recompute_modules", f"{' and '.join(fused)} can be recomputed with Transformer Engine only, which is not "
                              "installed here. Leave it out."))  # fmt: skip
    return found


def sampler_problems(shape: ModelShape) -> list[Problem]:
    """What vLLM 0.32 would sample otherwise than the model is: its gpt-oss has as constants what config.json may say."""
    if not shape.sinks:
        return []
    rope, yarn = shape.rope, yarn_mscale(shape.rope.factor)
    others = {
        "rms_norm_eps is 1e-5": shape.norm_epsilon == 1e-5,
        "swiglu_alpha is 1.702 and swiglu_limit 7": shape.clamp == (1.702, 7.0),
        "attention_bias is true": shape.qkv_bias,
        "tie_word_embeddings is false": not shape.tied_embeddings,
        "every other layer has a window, from the first": all(bool(window) != bool(i % 2) for i, window in enumerate(shape.windows)),
        "the rope is stretched by yarn, without an attention_factor": rope.type == "yarn" and rope.attention_scaling == yarn,
    }
    wrong = [words for words, holds in others.items() if not holds]
    what = f"vLLM 0.32 samples every {shape.architecture} as if it had these: {'; '.join(wrong)}"
    return [_problem("model", f"{what}. This one has not. Use a checkpoint that has.")] if wrong else []


def _problem(flag: str, message: str, *nearest: object) -> Problem:
    return Problem(flags=(flag,), message=f"{flag}: {message}", nearest={flag: list(nearest)} if nearest else {})


def _routing(moe: MoeShape) -> Iterator[str]:
    if moe.score_function == "softmax" and moe.topk == 1 and moe.norm_topk_prob:
        yield (
            "one expert a token (num_experts_per_tok 1) with norm_topk_prob weighs that expert 1 whatever the router says, so it "
            "cannot be trained. Use a model with norm_topk_prob false, or with more experts a token."
        )
    if moe.score_function == "sigmoid" and moe.norm_topk_prob != (moe.topk > 1):
        yield (
            f"Megatron-Core's sigmoid router makes the chosen experts' weights sum to 1 where there are several, not where there "
            f"is one; this model has norm_topk_prob {str(moe.norm_topk_prob).lower()} with num_experts_per_tok {moe.topk}."
        )
    if moe.is_group_limited and moe.group_topk and moe.topk // moe.group_topk != 2:
        yield (
            f"Megatron-Core rates a group of experts by its best num_experts_per_tok / topk_group ({moe.topk} / {moe.group_topk} = "
            f"{moe.topk // moe.group_topk}) experts, the model by its best 2; they choose alike where the quotient is 2, or where "
            f"topk_group is n_group ({moe.num_groups})."
        )


def needs_local_layers(shape: ModelShape) -> str | None:
    """What of a model is computed by the local layers alone, also where Transformer Engine is present; a phrase."""
    reasons = {
        "multi-latent attention": shape.mla,
        "positions with three axes": shape.vision,
        "attention within a window": shape.sliding_window,
        "a rotation of a part of each head": shape.mla is None and shape.rope.dim < shape.head_dim,
        "a norm over all heads": shape.qk_norm_is_whole,
        "a norm behind attention": shape.post_norm,
        "attention with sinks": shape.sinks,
        "a gate that is not SiLU": shape.activation != "silu",
    }
    return next((reason for reason, has in reasons.items() if has), None)


def _local_layers(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    reason, chosen = needs_local_layers(shape), cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    if reason and cfg.model.transformer_impl == "transformer_engine":
        yield Problem(
            flags=("transformer_impl",),
            nearest={"transformer_impl": ["auto", "local"]},
            message=f"transformer_impl transformer_engine: {reason}, which {shape.architecture} has, is computed by local layers only. "
            "Use auto or local.",
        )
    if shape.mla and "mla_up_proj" in chosen:
        yield _problem("recompute_modules", "mla_up_proj is not one that multi-latent attention can recompute here. Leave it out.")
    if reason and cfg.model.transformer_impl == "auto" and _fused_recompute(cfg):
        yield _problem("recompute_modules", f"{' and '.join(_fused_recompute(cfg))} can be recomputed with Transformer Engine only, and "
                       f"{reason} is computed by local layers only. Leave it out.")  # fmt: skip


def _biased_experts(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    if (ranks := cfg.parallel.expert_tensor_parallel_size or 1) > 1:
        yield _problem("expert_tensor_parallel_size", f"{ranks} would add the biases of {shape.architecture}'s experts {ranks} times "
                       "(Megatron-Core refuses it). Use 1, and expert_model_parallel_size for more ranks.", 1)  # fmt: skip
    if cfg.tuner.tuner_type != "lora":
        return
    try:
        settings = lora_of(cfg.tuner, shape)
    except ConfigError:  # of the adapter's own file: said where that is looked at
        return
    if settings and any(settings.rank_of(module.name) for module in linear_modules(shape) if module.is_expert):
        yield _problem("target_modules", f"{shape.architecture} keeps the experts of a layer in one tensor, for which PEFT's files and "
                       "vLLM's adapters have other names than the adapters here. Use q_proj k_proj v_proj o_proj, or tuner_type full."
                       )  # fmt: skip


def _vision(cfg: Config, shape: ModelShape, vision: VisionShape) -> Iterator[Problem]:
    if not vision.num_deepstack:
        return
    if cfg.model.recompute_granularity == "full":
        yield Problem(
            flags=("recompute_granularity",),
            nearest={"recompute_granularity": ["selective", "none"]},
            message=f"recompute_granularity full: what the tower of {shape.architecture} adds to its first {vision.num_deepstack} layers "
            "(DeepStack) is not there any more when a layer is computed again. Use selective, or none.",
        )
    here, p = first_chunk_layers(cfg, shape.num_layers), cfg.parallel
    if here < vision.num_deepstack:
        chunks = p.virtual_pipeline_model_parallel_size or 1
        yield Problem(
            flags=("pipeline_model_parallel_size", *(("virtual_pipeline_model_parallel_size",) if chunks > 1 else ())),
            nearest={"decoder_first_pipeline_num_layers": [vision.num_deepstack * chunks]},
            message=f"the first model chunk has {here} of {shape.num_layers} layers (pipeline_model_parallel_size "
            f"{p.pipeline_model_parallel_size}{f', {chunks} chunks a stage' if chunks > 1 else ''}), and {shape.architecture} adds what "
            f"its tower sees to the first {vision.num_deepstack} (DeepStack). Use fewer stages or chunks, or "
            f"decoder_first_pipeline_num_layers {vision.num_deepstack * chunks} or more.",
        )


def first_chunk_layers(cfg: Config, num_layers: int) -> int:
    """Of the first stage's first model chunk."""
    return layer_counts(cfg.parallel, num_layers)[0][0]


def _dispatch(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    if shape.moe and cfg.model.moe_token_dispatcher_type == "allgather" and cfg.parallel.pipeline_model_parallel_size > 1:
        yield Problem(
            flags=("moe_token_dispatcher_type", "pipeline_model_parallel_size"), nearest={"moe_token_dispatcher_type": ["alltoall"]},
            message="moe_token_dispatcher_type allgather does not go with pipeline_model_parallel_size "
            f"({cfg.parallel.pipeline_model_parallel_size}): packed micro-batches differ in length, which Megatron-Core's pipeline allows "
            "with alltoall only.",
        )  # fmt: skip


def _kernels(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    """Megatron-Core's kernels and exchanges, where the layers of this model have no place for them. The machine: `machine_problems`."""
    kernels, cp = cfg.kernels, cfg.parallel.context_parallel_size
    is_local = cfg.model.transformer_impl == "local" or shape.mla is not None or shape.vision is not None
    if kernels.cp_comm_type is not None and (cp == 1 or is_local):
        why = "context_parallel_size is 1, and nothing is exchanged" if cp == 1 else "local layers exchange keys in one way, all at once"
        yield _problem("cp_comm_type", f"{kernels.cp_comm_type}: {why}. Leave it out.", "none")
    elif kernels.cp_comm_type == "a2a" and shape.num_query_groups % (cp * cfg.parallel.tensor_model_parallel_size):
        yield _problem("cp_comm_type", f"a2a deals heads over ranks, and {shape.num_query_groups} key heads cannot be dealt "
                       f"to TP {cfg.parallel.tensor_model_parallel_size} x CP {cp}. Use p2p or allgather.", "p2p", "allgather")  # fmt: skip
    asked = [name for name in ("moe_permute_fusion", "moe_shared_expert_overlap", "moe_enable_deepep") if getattr(kernels, name)]
    if asked and not shape.moe:
        yield _problem(asked[0], f"{shape.architecture} has no experts. Leave {' and '.join(asked)} out.", False)
    if shape.moe and kernels.moe_shared_expert_overlap:
        if not shape.moe.shared_ffn_hidden_size:
            yield _problem("moe_shared_expert_overlap", f"{shape.architecture} has no shared experts. Leave it out.", False)
        elif cfg.model.moe_token_dispatcher_type == "allgather" or cfg.tuner.tuner_type == "lora":
            why = "tuner_type lora puts adapters beside them" if cfg.tuner.tuner_type == "lora" else "allgather does nothing meanwhile"
            yield _problem("moe_shared_expert_overlap", f"{why}. Leave it out.", False)
    if kernels.moe_enable_deepep != (cfg.model.moe_token_dispatcher_type == "flex"):
        yield Problem(
            flags=("moe_enable_deepep", "moe_token_dispatcher_type"),
            nearest={"moe_token_dispatcher_type": ["flex" if kernels.moe_enable_deepep else "alltoall"]},
            message="moe_enable_deepep true and moe_token_dispatcher_type flex go together: flex is the dispatcher that DeepEP works in. "
            "Use both, or neither.",
        )


def _replay(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    mode = cfg.grpo.router_replay_mode
    if mode != "disabled" and not shape.moe:
        message = f"router_replay_mode {mode} needs a MoE model: {shape.architecture} has no experts to choose. Use disabled."
        yield Problem(flags=("router_replay_mode",), nearest={"router_replay_mode": ["disabled"]}, message=message)


RECOMPUTABLE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")


def _fused_recompute(cfg: Config) -> list[str]:
    """Modules that only Transformer Engine's layers can recompute."""
    chosen = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    return [name for name in chosen if name in ("layernorm", "moe_act")]


def _recompute(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    model = cfg.model
    if model.recompute_granularity == "selective":
        unknown = [name for name in model.recompute_modules if name not in RECOMPUTABLE]
        if unknown:
            yield _problem("recompute_modules", f"{', '.join(unknown)} is none of {', '.join(RECOMPUTABLE)}.")
        missing = [name for name in ("moe", "moe_act", "shared_experts") if name in model.recompute_modules and not shape.moe]
        if missing:
            yield _problem("recompute_modules", f"the model has no experts, so there is no {', '.join(missing)}. Leave it out.")
        if "mla_up_proj" in model.recompute_modules and not shape.mla:
            yield _problem("recompute_modules", "the model has no latent attention, so there is no mla_up_proj. Leave it out.")
        if "mlp" in model.recompute_modules and shape.mlp_bias:
            yield _problem("recompute_modules", "Megatron-Core's backward does not end where an MLP with biases (mlp_bias) is recomputed "
                           "by itself. Leave mlp out, or use recompute_granularity full.")  # fmt: skip
        fused = _fused_recompute(cfg)
        if fused and model.transformer_impl == "local":
            yield _problem("recompute_modules", f"{' and '.join(fused)} can be recomputed with Transformer Engine only, and "
                           "transformer_impl is local. Leave it out, or use transformer_impl transformer_engine.")  # fmt: skip
    if model.recompute_granularity == "full" and model.recompute_method == "uniform" and model.recompute_num_layers:
        yield from _uniform_recompute(cfg, shape, model.recompute_num_layers)


def _uniform_recompute(cfg: Config, shape: ModelShape, size: int) -> Iterator[Problem]:
    """Megatron-Core cuts the layers of a model chunk into units of `size`, and fails where the last unit is short."""
    counts = {count for row in layer_counts(cfg.parallel, shape.num_layers) for count in row} - {0}
    wrong = sorted(n for n in counts if n % size)
    if wrong:
        works = [n for n in range(max(counts), 0, -1) if all(count % n == 0 for count in counts)]
        yield Problem(
            flags=("recompute_num_layers",),
            nearest={"recompute_num_layers": [n for n in works if n < size][:1] + [n for n in works if n > size][-1:]},
            message=f"recompute_num_layers ({size}) must divide the layers of each model chunk under recompute_method uniform: "
            f"{wrong[0]} = {wrong[0] // size} x {size} + {wrong[0] % size}. Use {' or '.join(str(n) for n in reversed(works))}, "
            "or recompute_method block.",
        )
