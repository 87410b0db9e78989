"""What a command that looks back was asked about: a run, a checkpoint or a model's files; and the settings that go with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem, config_error, problem_with
from megatron_grpo.checkpoint.folder import Folder
from megatron_grpo.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_grpo.config import Parsed
from megatron_grpo.config.config import Config
from megatron_grpo.run.opened import settings_of_checkpoint, settings_over

ROWS = 16
_NUMBERS = {"--row": 0, "--rows": 1}  # words of the command itself -> the least that goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is looked at. run: output_dir of a run; None for files of a model. checkpoint: None for the weights that a run began with."""

    name: str
    run: Path | None
    checkpoint: Path | None
    step: int
    cfg: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """row: to look into; None for the worst. num_rows: to compare. dtype: of both sides; None for the run's."""

    subject: Subject
    row: int | None
    num_rows: int
    dtype: str | None


def read_asked(argv: Sequence[str], parse: Callable[[Sequence[str]], Parsed]) -> Asked:
    """argv: a directory, then words of the command and settings. Raises ConfigError with all that is wrong."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if not words or words[0].startswith("--"):
        raise ConfigError("mismatch needs a directory first: an output_dir, one of its checkpoints (checkpoints/iter_0000100), or a model.")
    name, rest, found, problems = words[0], list[str](), dict[str, int](), list[Problem]()
    place, dtype = 1, None
    while place < len(words):
        word, value = words[place], words[place + 1] if place + 1 < len(words) else ""
        if word in _NUMBERS:
            least = _NUMBERS[word]
            if not value.isdecimal() or int(value) < least:
                problems.append(problem_with(word[2:], f"{word[2:]} ({value or 'nothing'}) must be a whole number, {least} or more."))
            found[word] = int(value) if value.isdecimal() else least
            place += 2
        elif word == "--dtype":
            dtype, rest, place = value, [*rest, "--torch_dtype", value], place + 2
        else:
            rest, place = [*rest, word], place + 1
    parsed = parse(rest)
    problems += parsed.problems
    subject = None
    try:
        subject = _subject(Path(name), parsed, parse)
    except ConfigError as error:
        problems += error.problems
    if problems or subject is None:
        raise ConfigError(problems)
    return Asked(subject=subject, row=found.get("--row"), num_rows=found.get("--rows", ROWS), dtype=dtype)


def _subject(path: Path, parsed: Parsed, parse: Callable[[Sequence[str]], Parsed]) -> Subject:
    typed, path = parsed.config, path.absolute()
    if (path / MANIFEST).is_file():
        beside = path.parent.parent
        return _of_checkpoint(path, typed, run=beside if (beside / "metrics.jsonl").is_file() else None)
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file():
        candidates = Folder(path / "checkpoints").candidates()
        newest = next((one for one in candidates if isinstance(one, Manifest)), None)
        if newest is not None:
            return _of_checkpoint(newest.directory, typed, run=path)
        if not (path / "config.yaml").is_file():
            raise _refused(f"{path} has neither a checkpoint nor a config.yaml, so its model is not known.")
        of_run = parse(["--config", str(path / "config.yaml")]).config
        cfg = settings_over(typed, {name: value for section in of_run.groups().values() for name, value in vars(section).items()})
        return Subject(name=f"{path}, which has no checkpoint: the weights it began with", run=path, checkpoint=None, step=0, cfg=cfg)
    if (path / "config.json").is_file():
        cfg = typed.with_values({"model": str(path)})
        return Subject(name=str(path), run=None, checkpoint=None, step=0, cfg=cfg)
    what = "holds no run (metrics.jsonl), checkpoint (manifest.json) or model (config.json)"
    there = "is a file, not a directory" if path.is_file() else what
    raise _refused(f"{path} {there if path.exists() else 'does not exist'}.")


def _of_checkpoint(directory: Path, typed: Config, *, run: Path | None) -> Subject:
    cfg, manifest = settings_of_checkpoint(typed, directory), read_manifest(directory)
    assert not isinstance(manifest, str)  # its settings have been read
    return Subject(name=str(directory), run=run, checkpoint=directory, step=manifest.step, cfg=cfg)


def _refused(message: str) -> ConfigError:
    return config_error("mismatch", f"mismatch: {message}")
