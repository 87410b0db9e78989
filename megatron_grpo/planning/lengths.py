"""Lengths of prompts and completions: from a file, or the longest that the settings allow; and how well they pack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes

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
    """How these lengths, taken in order as the rows of the run, fill micro-batches.

    packing_efficiency: tokens / tokens with the alignment that CP and sequence parallelism need. padded_efficiency: what it would be if
    each micro-batch were padded to its longest sequence instead. balance: mean / slowest of the DP ranks in a micro-step, by tokens.
    """
    align = 2 * sizes.cp if sizes.cp > 1 else 1
    stream = sizes.cp * sizes.tp if cfg.parallel.sequence_parallel else 1
    totals = [p + c for p, c in lengths.pairs]
    most = cfg.batch.max_tokens_per_micro_batch
    micro_steps = _by_count(totals, sizes) if most is None else _by_tokens(totals, sizes, most, align)
    micro_batches = [rows for step in micro_steps for rows in step]
    tokens = [sum(rows) for rows in micro_batches]
    aligned = [sum(-(-row // align) * align for row in rows) for rows in micro_batches]
    computed = sum(-(-size // stream) * stream for size in aligned)
    full = [[sum(rows) for rows in step] for step in micro_steps if len(step) == sizes.dp_size]
    return {
        "sequences": len(totals),
        "micro_batches": len(micro_batches),
        "mean_tokens_per_micro_batch": sum(tokens) / len(tokens),
        "min_tokens_per_micro_batch": min(tokens),
        "max_tokens_per_micro_batch": max(tokens),
        "packing_efficiency": sum(tokens) / computed,
        "padded_efficiency": sum(tokens) / sum(max(rows) * len(rows) for rows in micro_batches),
        "balance": sum(sum(step) / (len(step) * max(step)) for step in full) / len(full) if full else None,
    }


def _by_count(totals: Sequence[int], sizes: BatchSizes) -> list[list[Sequence[int]]]:
    """[micro-step][DP rank] -> lengths: micro_batch_size rows each, in order."""
    size, dp = sizes.micro_batch_size, sizes.dp_size
    micro_batches = [totals[begin : begin + size] for begin in range(0, len(totals), size)]
    return [micro_batches[begin : begin + dp] for begin in range(0, len(micro_batches), dp)]


def _by_tokens(totals: Sequence[int], sizes: BatchSizes, max_tokens: int, align: int) -> list[list[Sequence[int]]]:
    """The same, packed up to max_tokens within each global batch, as training does it."""
    from megatron_grpo.batching.pack import pack  # numpy, which other plans do without

    steps: list[list[Sequence[int]]] = []
    multiple = sizes.pp if sizes.vpp else 1
    for begin in range(0, len(totals), sizes.global_batch_size):
        rows = totals[begin : begin + sizes.global_batch_size]
        if len(rows) < sizes.dp_size * multiple and steps:
            break  # the file's last lines are too few for a step of their own
        rows = list(rows) + [rows[-1]] * (sizes.dp_size * multiple - len(rows))
        lengths = [-(-row // align) * align for row in rows]
        ranks = pack(lengths, max_tokens=max_tokens, dp_size=sizes.dp_size, multiple=multiple)
        steps += [[[rows[i] for i in chosen] for chosen in step] for step in zip(*ranks)]
    return steps
