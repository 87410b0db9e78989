"""Layers per model chunk of a pipeline. The only place that counts them, for `plan` and for validation. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.settings import ParallelConfig
from megatron_grpo.run.config.settings import Config

LAYOUT = "pipeline_model_parallel_layout"
ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
SINGLE_DEPTH_SETTINGS = (LAYOUT, *_ENDS)  # settings in layers, which fit models of one depth
_LARGEST = 4096  # characters of an expanded layout


def counted_layers(parallel: ParallelConfig, num_layers: int) -> int:
    """Return the number of layers to distribute over stages.

    The embedding and the loss count as one layer each, where the settings account for them.
    """
    return num_layers + sum(getattr(parallel, name) for name in ACCOUNTS)


def layer_counts(parallel: ParallelConfig, num_layers: int) -> list[list[int]]:
    """Return the layers of each model chunk of each stage, [chunk, stage].

    Where they do not divide evenly, which validation rejects, the counts are lower bounds.
    """
    pp, chunks = max(1, parallel.pipeline_model_parallel_size), max(1, parallel.virtual_pipeline_model_parallel_size or 1)
    if parallel.pipeline_model_parallel_layout:
        stages = [piece.count("t") for piece in expand_layout(parallel.pipeline_model_parallel_layout)]
        return [stages[first : first + pp] for first in range(0, len(stages), pp)]
    first, last = (getattr(parallel, name) for name in _ENDS)
    middle = pp - (first is not None) - (last is not None)
    layers_per_stage = (counted_layers(parallel, num_layers) - (first or 0) - (last or 0)) // middle if middle > 0 else 0
    stage_problems = [layers_per_stage] * pp
    if first is not None:
        stage_problems[0] = first
    if last is not None:
        stage_problems[-1] = last
    counts = [[count // chunks for count in stage_problems] for _ in range(chunks)]
    counts[0][0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1][-1] -= parallel.account_for_loss_in_pipeline_split
    return counts


def expand_layout(layout: str) -> list[str]:
    """Expand a layout in Megatron-Core's notation (`E`, `t`, `L`) into its stages: `Et*2|(t|)*2L` is Ett, t, t, L.

    Raises:
        ValueError: The expanded layout is too long.
    """
    text = layout.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        if sum(len(part) * int(times) for part, times in re.findall(pattern, text)) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} layers")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def problems(cfg: Config, num_layers: int | None) -> Iterator[Problem]:
    """Yield problems with the pipeline layout, besides divisions (`run.config.rules.sizes`).

    Args:
        num_layers: Layers of the model, if known.
    """
    parallel = cfg.parallel
    pp, layout = parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout
    accounts = [name for name in ACCOUNTS if getattr(parallel, name)]
    ends = [name for name in _ENDS if getattr(parallel, name) is not None]
    if accounts and ends:
        message = f"{accounts[0]} and {ends[0]} both set the layers of the first and last stage. Keep one of them."
        yield _problem(accounts[0], message, *accounts, *ends)
    if layout is not None:
        if conflicting := [*accounts, *ends]:
            message = f"{LAYOUT} sets the layers of every stage and cannot be combined with {' and '.join(conflicting)}. Keep one of them."
            yield _problem(LAYOUT, message, *conflicting)
        elif fault := _layout_fault(parallel, layout, num_layers):
            yield _problem(LAYOUT, f"{LAYOUT} ({layout}): {fault}")
    elif accounts and num_layers and pp > 1 and min(min(row) for row in layer_counts(parallel, num_layers)) < 0:
        message = f"{' and '.join(accounts)} leaves a negative number of layers in the first or last model chunk. Use fewer chunks."
        yield _problem(accounts[0], message, *accounts)
    yield from _group(cfg)


def _layout_fault(parallel: ParallelConfig, layout: str, num_layers: int | None) -> str | None:
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    try:
        stages = expand_layout(layout)
    except ValueError as error:
        return f"{error}."
    symbols = "".join(stages)
    if unknown := sorted(set(symbols) - set("EtL")):
        supported = "multi-token prediction (m) is not supported" if unknown == ["m"] else "supported symbols are E, t, L, |, * and ( )"
        return f"{' '.join(unknown)} is not a supported symbol: {supported}."
    if symbols.count("E") != 1 or symbols.count("L") != 1 or not symbols.startswith("E") or not symbols.endswith("L"):
        return "it must begin with one embedding (E) and end with one loss (L)."
    if len(stages) != pp * chunks:
        remedy = f" Use virtual_pipeline_model_parallel_size {len(stages) // pp}." if len(stages) % pp == 0 and len(stages) > pp else ""
        return f"it has {len(stages)} parts, for {pp} stages{f' of {chunks} chunks' if chunks > 1 else ''}.{remedy}"
    if pp == 1:
        return "pipeline_model_parallel_size is 1. Leave it out."
    if "" in stages[1:-1]:
        return "a part between the first and the last is empty."
    if num_layers is not None and symbols.count("t") != num_layers:
        return f"it has {symbols.count('t')} layers (t), and the model has {num_layers}."
    return None


def _group(cfg: Config) -> Iterator[Problem]:
    size, pp = cfg.parallel.microbatch_group_size_per_vp_stage, max(1, cfg.parallel.pipeline_model_parallel_size)
    if size is None:
        return
    name = "microbatch_group_size_per_vp_stage"
    if (cfg.parallel.virtual_pipeline_model_parallel_size or 1) == 1:
        yield _problem(name, f"{name} ({size}) applies to the interleaved schedule only. Set virtual_pipeline_model_parallel_size too.")
    elif size % pp:
        lower, higher = size // pp * pp, -(-size // pp) * pp
        yield Problem(
            flags=(name, "pipeline_model_parallel_size"), nearest={name: [size_near for size_near in (lower, higher) if size_near]},
            message=f"{name} ({size}) must be a multiple of pipeline_model_parallel_size ({pp}), as the number of micro-batches is. "
            f"Use {' or '.join(str(size_near) for size_near in (lower, higher) if size_near)}.",
        )  # fmt: skip


def _problem(flag: str, message: str, *other_flags: str) -> Problem:
    return Problem(flags=tuple(dict.fromkeys((flag, *other_flags))), message=message)
