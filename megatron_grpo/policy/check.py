"""What Megatron-Core cannot compute of a model, or of a model in a layout, said before anything loads. No torch: `plan` asks too."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config import Config
from megatron_grpo.errors import Problem
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import MoeShape


def problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Everything that stands between this configuration and this model, besides divisions (`weights.fit`) and batch sizes."""
    found = [Problem(flags=("model",), message=f"model: {message}") for message in (_routing(shape.moe) if shape.moe else ())]
    if shape.mla:
        found += _latent_attention(cfg)
    return found


def _routing(moe: MoeShape) -> Iterator[str]:
    if moe.score_function == "softmax" and moe.topk == 1 and moe.norm_topk_prob:
        yield "one expert a token (num_experts_per_tok 1) with norm_topk_prob weighs that expert 1 whatever the router says, so it " \
              "cannot be trained. Use a model with norm_topk_prob false, or with more experts a token."
    if moe.score_function == "sigmoid" and moe.norm_topk_prob != (moe.topk > 1):
        yield f"Megatron-Core's sigmoid router makes the chosen experts' weights sum to 1 where there are several, not where there " \
              f"is one; this model has norm_topk_prob {str(moe.norm_topk_prob).lower()} with num_experts_per_tok {moe.topk}."
    if moe.is_group_limited and moe.topk // moe.group_topk != 2:
        yield f"Megatron-Core rates a group of experts by its best num_experts_per_tok / topk_group ({moe.topk} / {moe.group_topk} = " \
              f"{moe.topk // moe.group_topk}) experts, the model by its best 2; they choose alike where the quotient is 2, or where " \
              f"topk_group is n_group ({moe.num_groups})."


def _latent_attention(cfg: Config) -> Iterator[Problem]:
    if cfg.model.transformer_impl == "transformer_engine":
        yield Problem(flags=("transformer_impl",), nearest={"transformer_impl": ["auto", "local"]},
                      message="transformer_impl transformer_engine: multi-latent attention has local layers only. Use auto or local.")
    if cfg.model.recompute_granularity == "selective" and "mla_up_proj" in cfg.model.recompute_modules:
        yield Problem(flags=("recompute_modules",),
                      message="recompute_modules: mla_up_proj is not one that multi-latent attention can recompute here. Leave it out.")
