"""Lengths of prompts and completions: from a file, or the longest that the settings allow; and how well they pack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.parallel.layout import sequence_alignment
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.types import Extent

if TYPE_CHECKING:
    from megatron_grpo.batching.split import BatchCut

ASSUMED_PROMPT = 512  # tokens, where neither max_prompt_length nor a file says


@dataclass(frozen=True, slots=True)
class Lengths:
    """(prompt, completion) in tokens, one pair a line of the file."""

    pairs: Sequence[tuple[int, int]]


def read_lengths(path: str) -> Lengths:
    """Two whole numbers a line, parted by blanks, a tab or a comma; blank lines and # comments are passed over. Raises ConfigError."""
    pairs, bad = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
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
        raise ConfigError(
            [
                Problem(
                    flags=("lengths",),
                    message=f"lengths: {len(bad)} line{'s' if len(bad) > 1 else ''} of "
                    f"{path} do not hold a "
                    f"prompt and a completion length in tokens: line {lines}.",
                )
            ]
        )
    if not pairs:
        raise ConfigError([Problem(flags=("lengths",), message=f"lengths: {path} holds no lengths.")])
    return Lengths(pairs)


def sequence_tokens(cfg: Config, lengths: Lengths | None, *, longest: bool) -> tuple[int, int]:
    """(prompt, completion) tokens of the longest sequence of the file, or of its mean; without a file, the longest that may occur."""
    if lengths is None:
        return cfg.data.max_prompt_length or ASSUMED_PROMPT, cfg.rollout.max_completion_length
    if longest:
        return max(lengths.pairs, key=sum)
    count = len(lengths.pairs)
    return round(sum(p for p, _ in lengths.pairs) / count), round(sum(c for _, c in lengths.pairs) / count)


def packing(sizes: BatchSizes, cfg: Config, lengths: Lengths) -> dict[str, Any]:
    """How these lengths, taken in order as the rows of the run, fill micro-batches: cut as training cuts them.

    packing_efficiency: computed tokens without the alignment that CP and sequence parallelism need, and with it. padded_efficiency: what
    it would be if each micro-batch were padded to its longest sequence instead. balance: mean / slowest of the DP ranks in a micro-step,
    by tokens.
    """
    from megatron_grpo.batching.split import deal_filled  # numpy, which other plans do without

    cut = _cut(sizes, cfg)
    totals = [p + c for p, c in lengths.pairs]
    micro_steps: list[Sequence[list[int]]] = []  # [micro-step][DP rank] -> lengths
    streams = 0  # tokens in the streams of all micro-batches
    for begin in range(0, len(totals), sizes.global_batch_size):
        rows = totals[begin : begin + sizes.global_batch_size]
        if len(rows) < cut.rows_per_slice * cut.multiple and micro_steps:
            break  # the file's last lines are too few for a step of their own
        filled = [*rows, *[rows[0]] * cut.rows_per_slice * cut.multiple]
        dealt = deal_filled([Extent((row,)) for row in rows], cut)
        streams += sum(portion.num_tokens for mine in dealt for portion in mine)
        micro_steps += zip(*[[[filled[i] for i in portion.rows] for portion in mine] for mine in dealt], strict=True)
    micro_batches = [rows for step in micro_steps for rows in step]
    tokens = [sum(rows) for rows in micro_batches]
    useful = sum(sum(rows) - len(rows) for rows in micro_batches)  # the last token of a sequence predicts nothing and is not computed
    full = [[sum(rows) for rows in step] for step in micro_steps]
    return {
        "sequences": len(totals),
        "micro_batches": len(micro_batches),
        "mean_tokens_per_micro_batch": sum(tokens) / len(tokens),
        "min_tokens_per_micro_batch": min(tokens),
        "max_tokens_per_micro_batch": max(tokens),
        "packing_efficiency": useful / streams,
        "padded_efficiency": sum(tokens) / sum(max(rows) * len(rows) for rows in micro_batches),
        "balance": sum(sum(step) / (len(step) * max(step)) for step in full) / len(full),
    }


def _cut(sizes: BatchSizes, cfg: Config) -> BatchCut:
    from megatron_grpo.batching.alignment import Alignment
    from megatron_grpo.batching.split import BatchCut

    layout = sizes.layout
    sequence, stream = sequence_alignment(layout, cfg.parallel.sequence_parallel)
    return BatchCut(
        dp_size=sizes.dp_size,
        micro_batch_size=sizes.micro_batch_size,
        alignment=Alignment(sequence=sequence, stream=stream),
        multiple=layout.pp if layout.vpp else 1,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
    )
