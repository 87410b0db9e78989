"""Tokens of a run: lengths of prompts and completions, from a file or the longest that the settings allow; how well they pack; and what the
passes over one optimizer step compute, with each prompt once and with one for every completion. Imports numpy,
which a plan of sizes alone does without.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.base.errors import config_error
from megatron_grpo.base.files import read_text
from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.batching.prefix_groups import Alignment, num_tokens
from megatron_grpo.batching.split import BatchPartitioner, MicroBatchSpec, partition_padded
from megatron_grpo.config.config import Config
from megatron_grpo.config.optimizer import rank_multiple
from megatron_grpo.parallel.layout import sequence_alignment
from megatron_grpo.planning.summary import bubble_fraction
from megatron_grpo.types import SequenceLengths

MOST_ROWS = 65_536  # of an optimizer step whose packing is tried
ASSUMED_PROMPT = 512  # tokens, where neither max_prompt_length nor a file says


Lengths = Sequence[tuple[int, int]]  # (prompt, completion) in tokens, one pair a line of the file


def read_lengths(path: str) -> Lengths:
    """Two whole numbers a line, parted by blanks, a tab or a comma; blank lines and # comments are passed over. Raises ConfigError."""
    pairs, bad = list[tuple[int, int]](), list[int]()
    for number, line in enumerate(read_text(path, errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\d+)[\s,]+(\d+)", text)
        if match and int(match[1]) + int(match[2]) > 0:
            pairs.append((int(match[1]), int(match[2])))
        else:
            bad.append(number)
    if bad:
        lines = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        raise config_error(
            "lengths",
            f"lengths: {len(bad)} line{'s' if len(bad) > 1 else ''} of {path} do not hold a prompt and a completion length in tokens: "
            f"line {lines}.",
        )
    if not pairs:
        raise config_error("lengths", f"lengths: {path} holds no lengths.")
    return pairs


def sequence_tokens(cfg: Config, lengths: Lengths | None, *, longest: bool) -> tuple[int, int]:
    """(prompt, completion) tokens of the longest sequence of the file, or of its mean; without a file, the longest that may occur."""
    if lengths is None:
        return cfg.data.max_prompt_length or ASSUMED_PROMPT, cfg.rollout.max_completion_length
    if longest:
        return max(lengths, key=sum)
    count = len(lengths)
    return round(sum(p for p, _ in lengths) / count), round(sum(c for _, c in lengths) / count)


def extents_of(pairs: Sequence[tuple[int, int]], num_generations: int) -> list[SequenceLengths]:
    """Rows of these (prompt, completion) lengths, as packing sees them: so many in a row of one prompt length are a group."""
    extents = []
    for begin in range(0, len(pairs), num_generations):
        group = pairs[begin : begin + num_generations]
        is_group = len({prompt for prompt, _ in group}) == 1
        # The last token of a sequence predicts nothing and is not computed.
        prefix = min(min(prompt, prompt + completion - 1) for prompt, completion in group) if is_group else 0
        extents += [SequenceLengths((sum(pair),), (0, begin if is_group else begin + i), prefix) for i, pair in enumerate(group)]
    return extents


def packing(sizes: BatchSizes, cfg: Config, lengths: Lengths, min_saving_ratio: float | None) -> dict[str, Any]:
    """How these lengths, taken in order as the rows of the run, fill micro-batches: cut as training cuts them.

    packing_efficiency: computed tokens without the alignment that CP and sequence parallelism need, and with it. padded_efficiency: what
    it would be if each micro-batch were padded to its longest sequence instead. balance: mean / slowest of the DP ranks in a micro-step,
    by tokens. least_saving: as in `BatchPartitioner`.
    """
    cut = cut_of(sizes, cfg, min_saving_ratio)
    full: list[list[int]] = []  # [micro-step][DP rank] tokens, the last of each sequence included
    padded = streams = sequences = 0  # tokens if padded, tokens in the streams, rows
    unit = cut.rows_per_slice * cut.multiple
    for begin in range(0, len(lengths), sizes.global_batch_size):
        rows = extents_of(lengths[begin : begin + sizes.global_batch_size], sizes.num_generations)
        if len(rows) < unit and full:
            break  # the file's last lines are too few for a step of their own
        filled = [*rows, *[rows[0]] * unit]
        for together in zip(*partition_padded(rows, cut), strict=True):
            full.append([_computed(portion, filled) + len(portion.rows) for portion in together])
            sequences += sum(len(portion.rows) for portion in together)
            streams += sum(portion.num_tokens for portion in together)
            padded += sum(len(portion.rows) * max(filled[i].contexts[0] for i in portion.rows) for portion in together)
    tokens = [count for step in full for count in step]
    return {
        "sequences": len(lengths),
        "micro_batches": len(tokens),
        "mean_tokens_per_micro_batch": sum(tokens) / len(tokens),
        "min_tokens_per_micro_batch": min(tokens),
        "max_tokens_per_micro_batch": max(tokens),
        "packing_efficiency": (sum(tokens) - sequences) / streams,
        "padded_efficiency": sum(tokens) / padded,
        "balance": sum(sum(step) / (len(step) * max(step)) for step in full) / len(full),
    }


def _computed(portion: MicroBatchSpec, rows: Sequence[SequenceLengths]) -> int:
    """Tokens of a micro-batch that are computed, alignment left out."""
    computed = [rows[i].contexts[0] - 1 for i in portion.rows]
    return sum(computed) - sum((len(family.members) - 1) * family.prefix for family in portion.families)


def cut_of(sizes: BatchSizes, cfg: Config, min_saving_ratio: float | None) -> BatchPartitioner:
    """As `policy.policy.cut_for` makes it, but that costs are tokens alone."""
    layout = sizes.layout
    sequence, stream = sequence_alignment(layout, cfg.parallel.sequence_parallel, rank_multiple(cfg))
    return BatchPartitioner(
        dp_size=sizes.dp_size,
        micro_batch_size=sizes.micro_batch_size,
        alignment=Alignment(sequence=sequence, stream=stream),
        multiple=layout.pp if layout.vpp else 1,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        min_saving_ratio=min_saving_ratio,
    )


# ---- one optimizer step -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Over all ranks, in one forward, of so many sequences."""

    sequences: int
    tokens: int  # in the streams, alignment included
    squares: int  # of attention: twice its pairs of a query and a key, which makes T^2 of a sequence of T tokens
    lengths: Mapping[int, int]  # sequences by their tokens
    scored: int  # places of the output layer
    pieces: int
    micro_batches: int
    largest: int  # tokens of the fullest stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """One optimizer step, or the first MOST_ROWS rows of a larger one. `shared` is as the run does it: `apart`, if nothing is shared."""

    sizes: BatchSizes
    cut: BatchPartitioner
    pairs: Sequence[tuple[int, int]]  # (prompt, completion) tokens of its rows
    extents: Sequence[SequenceLengths]
    apart: Computed
    shared: Computed

    @classmethod
    def of(cls, min_saving_ratio: float | None, sizes: BatchSizes, cfg: Config, lengths: Lengths | None) -> StepTokens:
        """A file of fewer rows than a step is taken again from its first line; without a file, all sequences are as long as may be."""
        cut = cut_of(sizes, cfg, min_saving_ratio)
        unit = cut.rows_per_slice * cut.multiple
        most = min(sizes.global_batch_size, max(MOST_ROWS // unit, 1) * unit)
        given = lengths if lengths else [sequence_tokens(cfg, None, longest=True)]
        pairs = [given[i % len(given)] for i in range(most)]
        extents = extents_of(pairs, sizes.num_generations)
        apart = packed(pairs, extents, replace(cut, min_saving_ratio=None))
        shared = packed(pairs, extents, cut) if min_saving_ratio is not None else apart
        return cls(sizes=sizes, cut=cut, pairs=pairs, extents=extents, apart=apart, shared=shared)

    def with_budget(self, max_tokens: int, min_saving_ratio: float) -> Computed:
        """The same rows under another token budget, prompts shared."""
        # A budget beyond all rows together changes nothing, and packing needs room for every length up to it.
        max_tokens = min(max_tokens, self.cut.alignment.of_stream(self.apart.tokens))
        return packed(self.pairs, self.extents, replace(self.cut, max_tokens=max_tokens, min_saving_ratio=min_saving_ratio))

    def micro_batches_of_rank(self, computed: Computed) -> int:
        """Of the whole step, where only its first rows were packed too."""
        return -(-computed.micro_batches * self.sizes.global_batch_size // (computed.sequences * self.sizes.dp_size))

    def bubble(self, computed: Computed) -> float:
        return bubble_fraction(self.sizes, self.micro_batches_of_rank(computed))


def packed(pairs: Sequence[tuple[int, int]], extents: Sequence[SequenceLengths], cut: BatchPartitioner) -> Computed:
    """Rows that do not come out even are filled up with the first one again, as in passes that train nothing."""
    portions = [portion for mine in partition_padded(extents, cut) for portion in mine]
    rows = [i if i < len(pairs) else 0 for portion in portions for i in portion.rows]
    return Computed(
        sequences=len(rows),
        tokens=sum(portion.num_tokens for portion in portions),
        squares=sum((sum(pairs[i]) - 1) ** 2 for i in rows) - sum(_squares_saved(portion, extents, cut.alignment) for portion in portions),
        lengths=Counter(sum(pairs[i]) - 1 for i in rows),
        scored=sum(min(pairs[i][1], sum(pairs[i]) - 1) for i in rows),
        pieces=sum(len({extents[i if i < len(extents) else 0].group for i in portion.rows}) for portion in portions),
        micro_batches=len(portions),
        largest=max(portion.num_tokens for portion in portions),
    )


def _squares_saved(portion: MicroBatchSpec, extents: Sequence[SequenceLengths], alignment: Alignment) -> int:
    """A child attends to all of its trunk: P^2 + sum (2 P t + t^2) is sum (P + t)^2 less P^2 for every copy of the trunk but one."""
    saved = 0
    for family in portion.families:
        if len(family.members) > 1 and family.prefix:
            members = [extents[i if i < len(extents) else 0] for i in (portion.rows[place] for place in family.members)]
            computed = [extent.contexts[0] - 1 for extent in members]
            if num_tokens(computed, family.prefix, alignment) < num_tokens(computed, 0, alignment):
                saved += (len(members) - 1) * family.prefix**2
    return saved
