"""Files of lengths: (prompt, completion) in tokens, as rows that packing uses. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.base.files import read_text
from megatron_grpo.core.types import SequenceLengths

Lengths = Sequence[tuple[int, int]]  # (prompt, completion) in tokens


def read_lengths(path: str) -> Lengths:
    """Read a file of lengths: two integers per line, separated by blanks, a tab or a comma. Blank lines and # comments are skipped.

    Args:
        path: File of lengths, or the output directory of a run, of which the lengths of all logged completions are read.

    Returns:
        (prompt, completion) lengths in tokens; completions of a prompt follow each other.

    Raises:
        ConfigError: If the file cannot be read, a line is malformed, or there are no lengths.
    """
    if Path(path).is_dir():
        return _lengths_of_run(path)
    pairs, invalid = list[tuple[int, int]](), list[int]()
    for number, line in enumerate(read_text(path, errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\d+)[\s,]+(\d+)", text)
        if match and int(match[1]) + int(match[2]) > 0:
            pairs.append((int(match[1]), int(match[2])))
        else:
            invalid.append(number)
    if invalid:
        lines = ", ".join(map(str, invalid[:5])) + (", ..." if len(invalid) > 5 else "")
        raise config_error(
            "lengths",
            f"lengths: {len(invalid)} line{'s' if len(invalid) > 1 else ''} of {path} are not a prompt length and a completion length in "
            "tokens: "
            f"line {lines}.",
        )
    if not pairs:
        raise config_error("lengths", f"lengths: {path} contains no lengths.")
    return pairs


def _lengths_of_run(output_dir: str) -> Lengths:
    files = sorted((Path(output_dir) / "completions").rglob("*.parquet"))
    if not files:
        raise config_error(
            "lengths",
            f"lengths: {output_dir} has no completions/*.parquet. Use a file, or the output_dir of a run that logs completions.",
        )
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise config_error("lengths", f"lengths: the completions in {output_dir} are read with pyarrow. Install pyarrow.") from error
    names = ["prompt_number", "generation", "num_prompt_tokens", "num_completion_tokens"]
    rows = [row for path in files for row in zip(*pyarrow.parquet.read_table(path, columns=names).to_pydict().values(), strict=True)]
    return [(prompt, completion) for _, _, prompt, completion in sorted(rows)]


def lengths_of(pairs: Sequence[tuple[int, int]], num_generations: int) -> list[SequenceLengths]:
    """Convert (prompt, completion) lengths to the rows that packing uses.

    Args:
        pairs: (prompt, completion) lengths in tokens.
        num_generations: Rows per group. Consecutive rows with one prompt length form a group.
    """
    lengths = []
    for begin in range(0, len(pairs), num_generations):
        group = pairs[begin : begin + num_generations]
        is_group = len({prompt for prompt, _ in group}) == 1
        # The last token of a sequence predicts no token and is not computed.
        prefix = min(min(prompt, prompt + completion - 1) for prompt, completion in group) if is_group else 0
        lengths += [SequenceLengths((sum(pair),), (0, begin if is_group else begin + i), prefix) for i, pair in enumerate(group)]
    return lengths
