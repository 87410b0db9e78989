"""Whether a PEFT adapter's files fit a model: its configuration, and the header of its tensors. No torch: `plan` asks too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.table import table
from megatron_grpo.config.tuner import NO_ADAPTER
from megatron_grpo.weights.lora import CONFIG, PREFIX, WEIGHTS, LoraSettings, own_name, own_sizes
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.stored import stored_shapes


def adapter_problems(directory: str | Path, settings: LoraSettings, shape: ModelShape, *, flag: str) -> list[Problem]:
    """What is wrong with an adapter whose configuration has been read, for this model. flag: the setting that named it."""
    if found := [*_numbers(settings), *_expressions(settings)]:
        return [_of(flag, f"{directory}: its {CONFIG} has {message}") for message in found]
    if named := [name for name in settings.target_modules if name in NO_ADAPTER]:
        return [_of(flag, f"{directory}: an adapter on {name} is not there: {NO_ADAPTER[name]}.") for name in named]
    wanted = {PREFIX + name: size for name, size in own_sizes(settings, shape).items()}
    # A name of the file that matches nothing in this model does no harm: its matrices are compared one by one.
    if not wanted and (unfit := settings.problems(shape)):
        return [replace(problem, flags=(flag,), message=f"{flag}: {directory}: {problem.message}") for problem in unfit]
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        pickled = (Path(directory) / "adapter_model.bin").is_file()
        hint = " It has adapter_model.bin: save it as safetensors first." if pickled else " PEFT's save_pretrained writes it."
        return [_of(flag, f"{directory} has no {WEIGHTS}.{hint}")]
    try:
        held = stored_shapes(path, flag=flag)
    except ConfigError as error:
        return list(error.problems)
    ours = {PREFIX + own_name(name.removeprefix(PREFIX), shape) if name.startswith(PREFIX) else name: size for name, size in held.items()}
    return [_of(flag, f"{path} {message}") for message in _differences(ours, wanted)]


def _differences(held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for what, some in (
        ("lacks", wanted.keys() - held.keys()),
        ("has, besides what its configuration asks for,", held.keys() - wanted.keys()),
    ):
        if some:
            yield f"{what} {len(some)} of this model's matrices: {_some(sorted(some))}."
    wrong = [name for name, size in wanted.items() if held.get(name, size) != size]
    if wrong:
        first = wrong[0]
        others = f" {len(wrong) - 1} more differ." if len(wrong) > 1 else ""
        yield f"holds {first} as {held[first]}; this model's module with the rank in {CONFIG} needs {wanted[first]}.{others}"


def _numbers(settings: LoraSettings) -> Iterator[str]:
    allowed = table()["lora_rank"].range
    for name, rank in {"r": settings.rank, **{f"rank_pattern {key}": rank for key, rank in settings.rank_pattern.items()}}.items():
        if not isinstance(rank, int) or not allowed.admits(rank):
            yield f"{name} ({rank}), which must be {allowed}."
    for name, alpha in {
        "lora_alpha": settings.alpha,
        **{f"alpha_pattern {key}": alpha for key, alpha in settings.alpha_pattern.items()},
    }.items():
        if not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
            yield f"{name} ({alpha}), which must be a number above 0."


def _expressions(settings: LoraSettings) -> Iterator[str]:
    for pattern in (settings.target_regex, settings.exclude_regex, *settings.rank_pattern, *settings.alpha_pattern):
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            yield f"a pattern ({pattern}) that is not a regular expression: {error}."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _of(flag: str, message: str) -> Problem:
    return Problem(flags=(flag,), message=f"{flag}: {message}")
