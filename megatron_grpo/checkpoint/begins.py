"""A run that begins with the weights of a checkpoint alone (`--mcore_model`): which one that is, and whether it fits. No torch."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem, config_error, problem_with
from megatron_grpo.checkpoint.content import vocabulary_fingerprint
from megatron_grpo.checkpoint.continuity import FREEZING
from megatron_grpo.checkpoint.folder import POINTER, Folder, damage
from megatron_grpo.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_grpo.checkpoint.resume import several
from megatron_grpo.config.config import Config

FLAG = "mcore_model"
_ALONE = ("tuner_type", *FREEZING)  # of these a checkpoint holds a part of the model's weights alone, or is read as one that does


def beginning_of(path: str | Path) -> Manifest:
    """The checkpoint at `path`, a directory iter_*, a checkpoints/ or a run's output_dir, as of its names and sizes. Raises ConfigError."""
    source = Path(path)
    if not source.is_dir():
        raise _wrong(
            f"{FLAG} ({path}) {'is a file' if source.exists() else 'does not exist'}. Name a directory like OLD/checkpoints/iter_0000100."
        )
    inner = source / "checkpoints"
    is_one = (source / MANIFEST).exists()
    found = [read_manifest(source)] if is_one else Folder(inner if inner.is_dir() else source).candidates()
    refused = [one for one in found if isinstance(one, str)]
    for one in found:
        if isinstance(one, Manifest):
            if faults := damage(one.directory, one.files, read_bytes=False):
                refused.append(several(faults))
                continue
            return one
    foreign = (".metadata", "metadata.json", "common.pt", POINTER)
    theirs = [*(source / name for name in foreign if (source / name).exists()), *source.glob("iter_*"), *source.glob("mp_rank_*")]
    if theirs and not any((place / MANIFEST).exists() for place in theirs):
        raise _wrong(
            f"{FLAG} ({path}) is a checkpoint of Megatron-Core that another program wrote: its tensors have other names than here. Export "
            "it to Hugging Face format there, and give that as model."
        )
    raise _wrong(f"{FLAG} ({path}) holds no checkpoint of ours{': ' + several(refused) if refused else f' ({MANIFEST} is missing)'}.")


def resolved(path: str) -> str:
    """The checkpoint's own directory; the path as it is where there is none, which is said elsewhere."""
    try:
        return str(beginning_of(path).directory.absolute())
    except ConfigError:
        return str(Path(path).absolute())


def problems_of_beginning(cfg: Config, model_path: Path | None) -> list[Problem]:
    """What a checkpoint's weights say against beginning with them. Raises ConfigError where there is none."""
    path = cfg.run.mcore_model
    if not path:
        return []
    manifest = beginning_of(path)
    was, problems = manifest.origin, []
    for name in _ALONE:
        theirs, ours = was.settings.get(name, getattr(cfg.tuner, name)), getattr(cfg.tuner, name)
        if theirs != ours:
            message = (
                f"{FLAG} ({path}) was trained with {name} {_plain(theirs)}, and this run has {_plain(ours)}: it holds other weights than "
            )
            problems.append(
                problem_with((FLAG, name), message + f"are wanted. Use {name} {_plain(theirs)}, or export it and give that as model.")
            )
    vocabulary = vocabulary_of(manifest, model_path)
    if vocabulary:
        problems.append(problem_with((FLAG, "model"), f"{FLAG} ({path}) {vocabulary}"))
    return problems


def vocabulary_of(manifest: Manifest, model_path: Path | None) -> str | None:
    """What is wrong with the vocabulary of the model that is given beside a checkpoint."""
    theirs = manifest.origin.content.get("vocabulary")
    ours = vocabulary_fingerprint(model_path) if model_path is not None else None
    if theirs and ours and theirs != ours:
        return "was trained with another vocabulary than the model's: the same token ids would be other words. Give its own model."
    return None


def _plain(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
    )


def _wrong(message: str) -> ConfigError:
    return config_error(FLAG, message)
