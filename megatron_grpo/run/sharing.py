"""Decide whether a run computes each prompt once (`--share_prefix`), and read the files of lengths on which that may depend. No torch.

The decision is fixed before training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.base.files import read_text
from megatron_grpo.core.policy.requirements import flash_obstacle
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.policy import attention_channels, sharing_obstacle
from megatron_grpo.run.config.settings import Config

if TYPE_CHECKING:
    from megatron_grpo.core.arrays import SequenceLengths

Lengths = Sequence[tuple[int, int]]  # (prompt, completion) in tokens
LEAST_SAVING = 1 / 16  # of a group's tokens; on a CPU, sharing that saved less was slower than recomputing them

_PLAIN = "attention with shared prefixes uses plain matrix products, and all scores of a sequence are in memory at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """Decision about prompt sharing.

    Args:
        min_saving_ratio: Minimum share of a group's tokens that sharing must save, as in `BatchPartitioner`; None if nothing is shared.
        why: Reason, a phrase.
    """

    min_saving_ratio: float | None
    why: str

    def __str__(self) -> str:
        return f"{'off' if self.min_saving_ratio is None else 'on'}: {self.why}"


def decide(cfg: Config, shape: ModelShape | None, *, has_gpu: bool | None = None, gpu_lacks: str | None = None) -> PrefixSharing:
    """Decide whether prompts are shared.

    Args:
        cfg: Configuration of the run. A set `gpu_memory_gb` means that the plan is for GPUs.
        shape: Shape of the model; None if unknown.
        has_gpu: Whether the training machine has a GPU; None if unknown.
        gpu_lacks: Why this GPU has no kernel for attention with shared prefixes (`policy.attention.gpu_kernel`).

    Raises:
        ConfigError: If the file of lengths cannot be read. Validation rejects `true` with an obstacle before (`run.config.rules.policy`).
    """
    obstacle = gpu_lacks
    if has_gpu is None:
        obstacle = flash_obstacle(cfg.model.torch_dtype, attention_channels(shape) if shape else 8)
    if cfg.batch.share_prefix == "false":
        return PrefixSharing(min_saving_ratio=None, why="share_prefix false")
    if cfg.batch.share_prefix == "true":
        kernel = _kernel(has_gpu, f"{_PLAIN}: {obstacle}" if obstacle else None)
        return PrefixSharing(min_saving_ratio=0.0, why="share_prefix true: all groups that save at least one token" + kernel)
    reason = sharing_obstacle(cfg, shape) or _nothing_to_gain(cfg)
    if reason is None and obstacle and (has_gpu or cfg.plan.gpu_memory_gb):
        reason = f"{obstacle}; share_prefix true uses plain matrix products"
    if reason is not None:
        return PrefixSharing(min_saving_ratio=None, why=reason)
    explanation = "groups for which it saves at least 1/16 of the tokens"
    return PrefixSharing(
        min_saving_ratio=LEAST_SAVING, why=explanation + _kernel(has_gpu, f"it is disabled: {obstacle}" if obstacle else None)
    )


def _kernel(has_gpu: bool | None, otherwise: str | None) -> str:
    """Describe the attention kernel on a GPU.

    Args:
        otherwise: Alternative to torch's flash attention, a phrase; None if flash attention is used.
    """
    if has_gpu is False:
        return ""
    condition = "" if otherwise or has_gpu else ", of compute capability 8.0 or more,"
    return f". On {'this' if has_gpu else 'a'} GPU{condition} {otherwise or 'attention with shared prefixes uses flash attention'}"


def _nothing_to_gain(cfg: Config) -> str | None:
    batch = cfg.batch
    if batch.num_generations == 1:
        return "num_generations 1: one completion per prompt"
    if batch.micro_batch_size == 1 and batch.max_tokens_per_micro_batch is None:
        return "micro_batch_size 1: one completion per micro-batch; use max_tokens_per_micro_batch"
    if cfg.plan.lengths:
        tokens_apart, tokens_shared = _tokens(convert_lengths(read_lengths(cfg.plan.lengths), batch.num_generations))
        if tokens_shared > (1 - LEAST_SAVING) * tokens_apart:
            return (
                f"of the lengths in {cfg.plan.lengths}, {1 - tokens_shared / tokens_apart:.1%} of the tokens could be saved, less than 1/16"
            )
    return None


def _tokens(lengths: Sequence[Any]) -> tuple[int, int]:
    """Return computed tokens (with every row separate, with every prefix computed once)."""
    tokens_apart = sum(tokens - 1 for row in lengths for tokens in row.contexts)
    copies = sum(row.prefix for row in lengths)
    prefix_tokens = sum({row.group: row.prefix for row in lengths}.values())
    return max(tokens_apart, 1), tokens_apart - copies + prefix_tokens


# ---- files of lengths


def read_lengths(path: str) -> Lengths:
    """Read a file of lengths: two integers per line, separated by blanks, a tab or a comma. Blank lines and # comments are skipped.

    Files that have not changed are read once.

    Args:
        path: File of lengths, or the output directory of a run, of which the lengths of all logged completions are read.

    Returns:
        (prompt, completion) lengths in tokens; completions of a prompt follow each other.

    Raises:
        ConfigError: If the file cannot be read, a line is malformed, or there are no lengths.
    """
    files = _find_completions(path) if Path(path).is_dir() else [Path(path)]
    return _read_once(path, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()))


@lru_cache(maxsize=1)
def _read_once(path: str, files: tuple[tuple[Path, int, int], ...]) -> Lengths:
    """Read lengths from files, given with the time of their last change and their size."""
    return _read_run(path) if Path(path).is_dir() else _read_file(path)


def _read_file(path: str) -> Lengths:
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


def _find_completions(output_dir: str) -> list[Path]:
    return sorted((Path(output_dir) / "completions").rglob("*.parquet"))


def _read_run(output_dir: str) -> Lengths:
    files = _find_completions(output_dir)
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


def convert_lengths(pairs: Sequence[tuple[int, int]], num_generations: int) -> list[SequenceLengths]:
    """Convert (prompt, completion) lengths to the rows that packing uses.

    Args:
        pairs: (prompt, completion) lengths in tokens.
        num_generations: Rows per group. Consecutive rows with one prompt length form a group.
    """
    from megatron_grpo.core.arrays import SequenceLengths  # needs NumPy, which plan imports only for them

    lengths = []
    for begin in range(0, len(pairs), num_generations):
        group = pairs[begin : begin + num_generations]
        is_group = len({prompt for prompt, _ in group}) == 1
        # The last token of a sequence predicts no token and is not computed.
        prefix = min(min(prompt, prompt + completion - 1) for prompt, completion in group) if is_group else 0
        lengths += [SequenceLengths((sum(pair),), (0, begin if is_group else begin + i), prefix) for i, pair in enumerate(group)]
    return lengths
