"""Lengths of prompts and completions: from a file, or the longest that the settings allow; and how well they pack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.errors import config_error
from megatron_grpo.base.files import read_text
from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.parallel.layout import sequence_alignment
from megatron_grpo.policy.fp8 import rank_multiple

if TYPE_CHECKING:
    from megatron_grpo.batching.split import BatchCut, Portion
    from megatron_grpo.types import Extent

ASSUMED_PROMPT = 512  # tokens, where neither max_prompt_length nor a file says


@dataclass(frozen=True, slots=True)
class Lengths:
    """(prompt, completion) in tokens, one pair a line of the file."""

    pairs: Sequence[tuple[int, int]]


def read_lengths(path: str) -> Lengths:
    """Two whole numbers a line, parted by blanks, a tab or a comma; blank lines and # comments are passed over. Raises ConfigError."""
    pairs, bad = [], []
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
            f"lengths: {len(bad)} line{'s' if len(bad) > 1 else ''} of "
            f"{path} do not hold a "
            f"prompt and a completion length in tokens: line {lines}.",
        )
    if not pairs:
        raise config_error("lengths", f"lengths: {path} holds no lengths.")
    return Lengths(pairs)


def sequence_tokens(cfg: Config, lengths: Lengths | None, *, longest: bool) -> tuple[int, int]:
    """(prompt, completion) tokens of the longest sequence of the file, or of its mean; without a file, the longest that may occur."""
    if lengths is None:
        return cfg.data.max_prompt_length or ASSUMED_PROMPT, cfg.rollout.max_completion_length
    if longest:
        return max(lengths.pairs, key=sum)
    count = len(lengths.pairs)
    return round(sum(p for p, _ in lengths.pairs) / count), round(sum(c for _, c in lengths.pairs) / count)


def extents_of(pairs: Sequence[tuple[int, int]], num_generations: int) -> list[Extent]:
    """Rows of these (prompt, completion) lengths, as packing sees them: so many in a row of one prompt length are a group."""
    from megatron_grpo.types import Extent  # numpy, which other plans do without

    extents = []
    for begin in range(0, len(pairs), num_generations):
        group = pairs[begin : begin + num_generations]
        is_group = len({prompt for prompt, _ in group}) == 1
        # The last token of a sequence predicts nothing and is not computed.
        prefix = min(min(prompt, prompt + completion - 1) for prompt, completion in group) if is_group else 0
        extents += [Extent((sum(pair),), (0, begin if is_group else begin + i), prefix) for i, pair in enumerate(group)]
    return extents


def packing(sizes: BatchSizes, cfg: Config, lengths: Lengths, least_saving: float | None) -> dict[str, Any]:
    """How these lengths, taken in order as the rows of the run, fill micro-batches: cut as training cuts them.

    packing_efficiency: computed tokens without the alignment that CP and sequence parallelism need, and with it. padded_efficiency: what
    it would be if each micro-batch were padded to its longest sequence instead. balance: mean / slowest of the DP ranks in a micro-step,
    by tokens. least_saving: as in `BatchCut`.
    """
    from megatron_grpo.batching.split import deal_filled  # numpy, which other plans do without

    cut = cut_of(sizes, cfg, least_saving)
    full: list[list[int]] = []  # [micro-step][DP rank] tokens, the last of each sequence included
    padded = streams = sequences = 0  # tokens if padded, tokens in the streams, rows
    unit = cut.rows_per_slice * cut.multiple
    for begin in range(0, len(lengths.pairs), sizes.global_batch_size):
        rows = extents_of(lengths.pairs[begin : begin + sizes.global_batch_size], sizes.num_generations)
        if len(rows) < unit and full:
            break  # the file's last lines are too few for a step of their own
        filled = [*rows, *[rows[0]] * unit]
        for together in zip(*deal_filled(rows, cut), strict=True):
            full.append([_computed(portion, filled) + len(portion.rows) for portion in together])
            sequences += sum(len(portion.rows) for portion in together)
            streams += sum(portion.num_tokens for portion in together)
            padded += sum(len(portion.rows) * max(filled[i].contexts[0] for i in portion.rows) for portion in together)
    tokens = [count for step in full for count in step]
    return {
        "sequences": len(lengths.pairs),
        "micro_batches": len(tokens),
        "mean_tokens_per_micro_batch": sum(tokens) / len(tokens),
        "min_tokens_per_micro_batch": min(tokens),
        "max_tokens_per_micro_batch": max(tokens),
        "packing_efficiency": (sum(tokens) - sequences) / streams,
        "padded_efficiency": sum(tokens) / padded,
        "balance": sum(sum(step) / (len(step) * max(step)) for step in full) / len(full),
    }


def _computed(portion: Portion, rows: Sequence[Extent]) -> int:
    """Tokens of a micro-batch that are computed, alignment left out."""
    computed = [rows[i].contexts[0] - 1 for i in portion.rows]
    return sum(computed) - sum((len(family.members) - 1) * family.prefix for family in portion.families)


def cut_of(sizes: BatchSizes, cfg: Config, least_saving: float | None) -> BatchCut:
    """As `policy.policy.cut_for` makes it, but that costs are tokens alone."""
    from megatron_grpo.batching.alignment import Alignment
    from megatron_grpo.batching.split import BatchCut

    layout = sizes.layout
    sequence, stream = sequence_alignment(layout, cfg.parallel.sequence_parallel, rank_multiple(cfg))
    return BatchCut(
        dp_size=sizes.dp_size,
        micro_batch_size=sizes.micro_batch_size,
        alignment=Alignment(sequence=sequence, stream=stream),
        multiple=layout.pp if layout.vpp else 1,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        least_saving=least_saving,
    )
