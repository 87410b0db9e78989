"""What Megatron-Core cannot compute of a model, or of a model in a layout, said before anything loads. No torch: `plan` asks too."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.errors import Problem
from megatron_grpo.settings.config import Config
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import MoeShape, VisionShape


def problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Everything that stands between this configuration and this model, besides divisions (`weights.fit`) and batch sizes."""
    found = [Problem(flags=("model",), message=f"model: {message}") for message in (_routing(shape.moe) if shape.moe else ())]
    if shape.mla:
        found += _latent_attention(cfg)
    if shape.vision:
        found += _vision(cfg, shape, shape.vision)
    if cfg.optimizer.optimizer_cpu_offload and not cfg.optimizer.use_distributed_optimizer:
        message = (
            "optimizer_cpu_offload needs use_distributed_optimizer true: Megatron-Core keeps float32 weights on the host with it alone."
        )
        found.append(Problem(flags=("optimizer_cpu_offload", "use_distributed_optimizer"), message=message,
                             nearest={"use_distributed_optimizer": [True], "optimizer_cpu_offload": [False]}))  # fmt: skip
    return [*found, *_dispatch(cfg, shape), *_recompute(cfg, shape), *_replay(cfg, shape), *_fp8(cfg, shape), *sharing_problems(cfg)]


def sharing_obstacle(cfg: Config) -> str | None:
    """Why prompts cannot be computed once; a phrase."""
    tuner = cfg.tuner
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
    """Channels of a query's head."""
    return shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim if shape.mla else shape.head_dim


def sharing_problems(cfg: Config) -> list[Problem]:
    """`share_prompts true` where it cannot be."""
    reason = sharing_obstacle(cfg)
    if cfg.batch.share_prompts != "true" or reason is None:
        return []
    return [_problem("share_prompts", f"true cannot be: {reason}. Use auto or false, or lora_dropout 0.", "auto", "false")]


# By fp8_recipe: what Transformer Engine asks of a GPU (compute capability), and of both sides of a matrix (a multiple). Read in 2.9 and
# 2.20: `quantization.check_fp8_*_support`, `utils.assert_dim_for_fp8_exec`, `Float8BlockQuantizer.is_quantizable`, MXFP8's block of 32.
FP8_NEEDS = {"tensorwise": ((8, 9), 16), "blockwise": ((9, 0), 128), "mxfp8": ((10, 0), 32)}


def rank_multiple(cfg: Config) -> int:
    """What the tokens of a micro-batch on one rank are rounded up to."""
    rows = FP8_NEEDS[cfg.model.fp8_recipe][1] if cfg.model.fp8_format else 1
    return math.lcm(cfg.batch.pad_to_multiple_of, rows)


def _fp8(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    model, tp = cfg.model, cfg.parallel.tensor_model_parallel_size
    if not model.fp8_format:
        if "fp8_recipe" in cfg.typed:
            yield _problem("fp8_recipe", f"{model.fp8_recipe} says how FP8 is scaled, and fp8_format is not set. Add --fp8_format hybrid.")
        return
    if model.transformer_impl == "local" or shape.mla or shape.vision:
        why = "transformer_impl is local" if model.transformer_impl == "local" else f"{shape.architecture} has local layers only"
        yield _problem("fp8_format", f"{model.fp8_format} needs Transformer Engine's layers, and {why}. Leave it out.", None)
    if model.torch_dtype != "bfloat16":
        yield _problem("fp8_format", f"{model.fp8_format} needs torch_dtype bfloat16, not {model.torch_dtype}.", None)
    multiple = FP8_NEEDS[model.fp8_recipe][1]
    heads = (shape.num_attention_heads + 2 * max(shape.num_query_groups, tp)) * shape.head_dim
    ffn = shape.moe.ffn_hidden_size // cfg.parallel.expert_tensor_parallel_size if shape.moe else shape.ffn_hidden_size // tp
    sizes = {"hidden_size": shape.hidden_size, "queries, keys and values of a rank": heads // tp,
             "intermediate_size of a rank": ffn, "heads of a rank": shape.num_attention_heads * shape.head_dim // tp}  # fmt: skip
    if wrong := [f"{name} ({size})" for name, size in sizes.items() if size % multiple]:
        yield _problem("fp8_format", f"fp8_recipe {model.fp8_recipe} takes matrices whose sides are multiples of {multiple}, and "
                       f"{', '.join(wrong)} is not. Leave fp8_format out.", None)  # fmt: skip


def machine_problems(
    cfg: Config, *, has_gpu: bool, has_transformer_engine: bool, capability: tuple[int, int] | None = None
) -> list[Problem]:
    """What this configuration asks of a machine that has it not. `train` knows the machine; `plan` may be made for another.

    capability: of the GPU to compute.
    """
    found = []
    model, optimizer = cfg.model, cfg.optimizer
    if model.transformer_impl == "transformer_engine" and not has_transformer_engine:
        found.append(_problem("transformer_impl", "transformer_engine is not installed here. Install the extra `te`, or use auto or local.",
                              "auto", "local"))  # fmt: skip
    if optimizer.optimizer_cpu_offload and not has_gpu:
        found.append(_problem("optimizer_cpu_offload", "there is no GPU here: the optimizer is on the host already. Leave it out.", False))
    if model.fp8_format and not (has_gpu and has_transformer_engine):
        lacks = "there is no GPU here" if not has_gpu else "Transformer Engine is not installed here (the extra `te`)"
        found.append(
            _problem("fp8_format", f"{model.fp8_format} computes with Transformer Engine on a GPU, and {lacks}. Leave it out.", None)
        )
    elif model.fp8_format and capability and capability < (least := FP8_NEEDS[model.fp8_recipe][0]):
        here, needed = (".".join(map(str, version)) for version in (capability, least))
        others = [name for name, (at_least, _) in FP8_NEEDS.items() if at_least <= capability]
        found.append(_problem("fp8_recipe", f"{model.fp8_recipe} needs a GPU of compute capability {needed}, this one has {here}. "
                              f"{'Use ' + ' or '.join(others) if others else 'Leave fp8_format out'}.", *others))  # fmt: skip
    fused = _fused_recompute(cfg)
    if fused and model.transformer_impl == "auto" and not has_transformer_engine:
        found.append(_problem("recompute_modules", f"{' and '.join(fused)} can be recomputed with Transformer Engine only, which is not "
                              "installed here. Leave it out."))  # fmt: skip
    return found


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


def _latent_attention(cfg: Config) -> Iterator[Problem]:
    if cfg.model.transformer_impl == "transformer_engine":
        yield Problem(
            flags=("transformer_impl",),
            nearest={"transformer_impl": ["auto", "local"]},
            message="transformer_impl transformer_engine: multi-latent attention has local layers only. Use auto or local.",
        )
    chosen = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    if "mla_up_proj" in chosen:
        yield _problem("recompute_modules", "mla_up_proj is not one that multi-latent attention can recompute here. Leave it out.")
    if cfg.model.transformer_impl == "auto" and _fused_recompute(cfg):
        yield _problem("recompute_modules", f"{' and '.join(_fused_recompute(cfg))} can be recomputed with Transformer Engine only, and "
                       "multi-latent attention has local layers only. Leave it out.")  # fmt: skip


def _vision(cfg: Config, shape: ModelShape, vision: VisionShape) -> Iterator[Problem]:
    if cfg.model.transformer_impl == "transformer_engine":
        yield Problem(
            flags=("transformer_impl",),
            nearest={"transformer_impl": ["auto", "local"]},
            message="transformer_impl transformer_engine: its rotary path has not been compared yet for positions with three axes, which "
            f"{shape.architecture} has. Use auto or local.",
        )
    if _fused_recompute(cfg) and cfg.model.transformer_impl == "auto":
        yield _problem("recompute_modules", f"{' and '.join(_fused_recompute(cfg))} can be recomputed with Transformer Engine only, and "
                       "models that see have local layers only. Leave it out.")  # fmt: skip
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
    """Of the first stage's first model chunk. Where stages do not come out even, which is refused elsewhere, at least so many."""
    p = cfg.parallel
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    middle = p.pipeline_model_parallel_size - (first is not None) - (last is not None)
    of_stage = first if first is not None else (num_layers - (last or 0)) // max(middle, 1)
    return of_stage // (p.virtual_pipeline_model_parallel_size or 1)


def _dispatch(cfg: Config, shape: ModelShape) -> Iterator[Problem]:
    if shape.moe and cfg.model.moe_token_dispatcher_type == "allgather" and cfg.parallel.pipeline_model_parallel_size > 1:
        yield Problem(
            flags=("moe_token_dispatcher_type", "pipeline_model_parallel_size"), nearest={"moe_token_dispatcher_type": ["alltoall"]},
            message="moe_token_dispatcher_type allgather does not go with pipeline_model_parallel_size "
            f"({cfg.parallel.pipeline_model_parallel_size}): packed micro-batches differ in length, which Megatron-Core's pipeline allows "
            "with alltoall only.",
        )  # fmt: skip


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
    p = cfg.parallel
    ends = [n for n in (p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers) if n]
    stages, chunks = p.pipeline_model_parallel_size - len(ends), p.virtual_pipeline_model_parallel_size or 1
    counts = {n // chunks for n in ends} | ({(shape.num_layers - sum(ends)) // stages // chunks} if stages > 0 else set())
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
