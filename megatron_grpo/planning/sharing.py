"""Whether a run computes each prompt once (`--share_prompts`), why, and what that saves. Decided once, before training. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.planning.lengths import Lengths, cut_of, extents_of, read_lengths, sequence_tokens
from megatron_grpo.policy.refused import sharing_obstacle
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.shape import ModelShape

LEAST_SAVING = 1 / 16  # of a group's tokens; on CPU, sharing that saved less was slower than computing them again
MOST_ROWS = 65_536  # of an optimizer step whose packing is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The decision. least_saving: as in `BatchCut`, None if nothing is shared. why: a phrase."""

    least_saving: float | None
    why: str

    def __str__(self) -> str:
        return f"{'off' if self.least_saving is None else 'on'}: {self.why}"


def decide(cfg: Config, shape: ModelShape | None, *, has_gpu: bool | None = None, has_transformer_engine: bool | None = None) -> Sharing:
    """has_gpu, has_transformer_engine: of the machine that trains, None where that is not known.

    Raises ConfigError where the file of lengths cannot be read. `true` with an obstacle is refused before (`policy.refused`).
    """
    if cfg.batch.share_prompts == "false":
        return Sharing(least_saving=None, why="share_prompts false")
    if cfg.batch.share_prompts == "true":
        return Sharing(least_saving=0.0, why="share_prompts true, wherever a token is saved")
    reason = sharing_obstacle(cfg, shape, has_transformer_engine=bool(has_transformer_engine)) or _nothing_to_gain(cfg)
    if reason is None and has_gpu:
        reason = "attention with parents has no kernel for GPUs yet, only plain matrix products (share_prompts true takes them)"
    if reason is not None:
        return Sharing(least_saving=None, why=reason)
    return Sharing(least_saving=LEAST_SAVING, why="each group in which 1/16 of the tokens or more need not be computed again")


def _nothing_to_gain(cfg: Config) -> str | None:
    batch = cfg.batch
    if batch.num_generations == 1:
        return "num_generations 1 has one completion a prompt"
    if batch.micro_batch_size == 1 and batch.max_tokens_per_micro_batch is None:
        return "micro_batch_size 1 puts no two completions together; max_tokens_per_micro_batch would"
    if cfg.plan.lengths:
        pairs = read_lengths(cfg.plan.lengths).pairs
        apart, least = _tokens(extents_of(pairs, batch.num_generations))
        if least > (1 - LEAST_SAVING) * apart:
            return f"of the lengths in {cfg.plan.lengths}, {1 - least / apart:.1%} of the tokens could be saved, less than 1/16"
    return None


def _tokens(extents: Sequence[Any]) -> tuple[int, int]:
    """Computed tokens if every row is computed by itself, and if every prefix is computed once."""
    apart = sum(tokens - 1 for extent in extents for tokens in extent.contexts)
    copies = sum(extent.prefix for extent in extents)
    once = sum({extent.group: extent.prefix for extent in extents}.values())
    return max(apart, 1), apart - copies + once


def estimate_sharing(sharing: Sharing, sizes: BatchSizes, cfg: Config, lengths: Lengths | None) -> dict[str, Any]:
    """The `sharing` object of `plan --json`: one optimizer step, packed with and without, alignment included.

    Where no file gives lengths, every sequence is as long as the settings allow, which is where sharing saves least.
    """
    from megatron_grpo.batching.split import deal_filled  # numpy, which other plans do without

    cut = cut_of(sizes, cfg, sharing.least_saving)
    unit = cut.rows_per_slice * cut.multiple
    most = min(sizes.global_batch_size, max(MOST_ROWS // unit, 1) * unit)
    pairs = lengths.pairs[:most] if lengths else [sequence_tokens(cfg, None, longest=True)] * most
    extents = extents_of(pairs, sizes.num_generations)
    apart, shared = (deal_filled(extents, one) for one in (replace(cut, least_saving=None), cut))
    tokens = [sum(portion.num_tokens for mine in dealt for portion in mine) for dealt in (apart, shared)]
    pieces = {(extents[i % len(extents)].group, id(portion)) for mine in shared for portion in mine for i in portion.rows}
    return {
        "setting": cfg.batch.share_prompts,
        "shares": sharing.least_saving is not None,
        "why": sharing.why,
        "sequences": len(extents),
        "tokens_apart": tokens[0],
        "tokens_shared": tokens[1],
        "groups": len({extent.group for extent in extents}),
        "pieces": len(pieces),
        "micro_batches_apart": sum(map(len, apart)),
        "micro_batches_shared": sum(map(len, shared)),
    }
