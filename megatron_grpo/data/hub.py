"""Where a model is: a directory here, or a name of the Hub that is fetched."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem, first_line, said_by
from megatron_grpo.data.files import is_path

_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def find_model(name: str, *, flag: str = "model", with_code: bool = False) -> Path:
    """The directory of a Hugging Face checkpoint; a Hub name is fetched first.

    flag: the setting that names it. with_code: Python files are fetched as well; nothing is run.
    """
    if not name:
        raise ConfigError([Problem(flags=("model",), message="model is missing: give a Hugging Face checkpoint directory or a Hub name.")])
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    if is_path(name):
        what = "is a file" if path.is_file() else "does not exist"
        beside = sorted(config.parent.name for config in path.parent.glob("*/config.json"))[:8]
        there = f" In {path.parent}: {', '.join(beside)}." if beside else ""
        raise ConfigError([Problem(
            flags=(flag,),
            message=f"{flag} ({name}) {what}. It is a directory with config.json, tokenizer files and *.safetensors, or a Hub name.{there}"
        )])  # fmt: skip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_FETCHED, *(["*.py"] if with_code else [])]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = said_by(error, first_line)
        raise ConfigError([Problem(
            flags=(flag,), message=f"{flag} ({name}) is neither a directory here nor a model that can be fetched from the Hub: {reason}"
        )]) from error  # fmt: skip
