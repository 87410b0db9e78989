"""Linear layers in FP8, which are Transformer Engine's: what they ask of a model, a layout and a machine. No torch: `plan` asks too."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.weights.shape import ModelShape

# By fp8_recipe: what Transformer Engine asks of a GPU (compute capability), and of both sides of a matrix (a multiple). Read in 2.9 and
# 2.20: `quantization.check_fp8_*_support`, `utils.assert_dim_for_fp8_exec`, `Float8BlockQuantizer.is_quantizable`, MXFP8's block of 32.
NEEDS = {"tensorwise": ((8, 9), 16), "blockwise": ((9, 0), 128), "mxfp8": ((10, 0), 32)}


def rank_multiple(cfg: Config) -> int:
    """What the tokens of a micro-batch on one rank are rounded up to."""
    rows = NEEDS[cfg.model.fp8_recipe][1] if cfg.model.fp8_format else 1
    return math.lcm(cfg.batch.pad_to_multiple_of, rows)


def fp8_problems(cfg: Config, shape: ModelShape, local: str | None) -> Iterator[Problem]:
    """local: why the model has local layers only; None where it has not."""
    model, tp = cfg.model, cfg.parallel.tensor_model_parallel_size
    if not model.fp8_format:
        if cfg.sources.get("fp8_recipe") == COMMAND_LINE:  # a file that a run has written has every setting
            yield _problem("fp8_recipe", f"{model.fp8_recipe} says how FP8 is scaled, and fp8_format is not set. Add --fp8_format hybrid.")
        return
    if local or model.transformer_impl == "local":
        why = f"{local} has local layers only" if local else "transformer_impl is local"
        yield _problem("fp8_format", f"{model.fp8_format} needs Transformer Engine's layers, and {why}. Leave it out.", None)
    if model.torch_dtype != "bfloat16":
        yield _problem("fp8_format", f"{model.fp8_format} needs torch_dtype bfloat16, not {model.torch_dtype}.", None)
    multiple = NEEDS[model.fp8_recipe][1]
    heads = (shape.num_attention_heads + 2 * max(shape.num_query_groups, tp)) * shape.head_dim
    ffn = shape.moe.ffn_hidden_size // cfg.parallel.expert_tensor_parallel_size if shape.moe else shape.ffn_hidden_size // tp
    sizes = {"hidden_size": shape.hidden_size, "queries, keys and values of a rank": heads // tp,
             "intermediate_size of a rank": ffn, "heads of a rank": shape.num_attention_heads * shape.head_dim // tp}  # fmt: skip
    if wrong := [f"{name} ({size})" for name, size in sizes.items() if size % multiple]:
        yield _problem("fp8_format", f"fp8_recipe {model.fp8_recipe} takes matrices whose sides are multiples of {multiple}, and "
                       f"{', '.join(wrong)} is not. Leave fp8_format out.", None)  # fmt: skip


def fp8_machine_problems(
    cfg: Config, *, has_gpu: bool, has_transformer_engine: bool, capability: tuple[int, int] | None
) -> Iterator[Problem]:
    model = cfg.model
    if not model.fp8_format:
        return
    if not (has_gpu and has_transformer_engine):
        lacks = "there is no GPU here" if not has_gpu else "Transformer Engine is not installed here (the extra `te`)"
        yield _problem("fp8_format", f"{model.fp8_format} computes with Transformer Engine on a GPU, and {lacks}. Leave it out.", None)
    elif capability and capability < (least := NEEDS[model.fp8_recipe][0]):
        here, needed = (".".join(map(str, version)) for version in (capability, least))
        others = [name for name, (at_least, _) in NEEDS.items() if at_least <= capability]
        yield _problem("fp8_recipe", f"{model.fp8_recipe} needs a GPU of compute capability {needed}, this one has {here}. "
                       f"{'Use ' + ' or '.join(others) if others else 'Leave fp8_format out'}.", *others)  # fmt: skip


def _problem(flag: str, message: str, *nearest: object) -> Problem:
    return Problem(flags=(flag,), message=f"{flag}: {message}", nearest={flag: list(nearest)} if nearest else {})
