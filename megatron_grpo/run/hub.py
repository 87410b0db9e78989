"""`--push_to_hub`: exports go to the Hugging Face Hub, through its own client. The token is the client's business (HF_TOKEN).

A repository is made, or found, before anything is trained, so that a missing token or a wrong name costs nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem, RunError, first_line, keep_secret, said_by
from megatron_grpo.base.files import MARK
from megatron_grpo.config.config import Config
from megatron_grpo.parallel import collectives


def open_repositories(cfg: Config, folders: Sequence[Path]) -> dict[Path, str]:
    """{folder to be pushed: its repository}. The first rank asks; ConfigError on every rank where it is refused. Collective.

    folders: the export, and the merged model that may be beside it.
    """
    if not cfg.run.push_to_hub:
        return {}
    found: dict[Path, str] | ConfigError = {}
    if collectives.rank() == 0:
        try:
            found = {folder: _made(cfg, suffix) for folder, suffix in zip(folders, ("", "-merged"), strict=False)}
        except ConfigError as error:
            found = error
    found = collectives.from_first(found)
    if isinstance(found, ConfigError):
        raise found
    return found


def push(repositories: dict[Path, str]) -> None:
    """Uploads each folder; for one rank. Raises RunError, with the command that does it again, for all that failed."""
    from huggingface_hub import upload_folder

    failures = []
    for folder, repository in repositories.items():
        try:
            upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=MARK, commit_message="Trained with megatron_grpo")
        except Exception as error:  # noqa: BLE001 - of HTTP, of files, of the client itself: the export is there all the same
            again = shlex.join(["hf", "upload", repository, str(folder.absolute()), "."])
            reason = said_by(error, first_line) or type(error).__name__
            failures.append(f"{folder} was not uploaded to {repository} ({reason}). It is complete on this disk; upload it with: {again}")
        else:
            print(f"Pushed: {folder} to {repository}", flush=True)
    if failures:
        raise RunError("\n".join(failures))


def _made(cfg: Config, suffix: str) -> str:
    from huggingface_hub import create_repo, get_token

    name = (cfg.run.hub_model_id or Path(cfg.run.output_dir).absolute().name) + suffix
    keep_secret(token := get_token())
    if not token:
        raise _wrong("push_to_hub true needs a token that may write: set HF_TOKEN, or log in with `hf auth login`.")
    try:
        return create_repo(name, private=cfg.run.hub_private_repo, exist_ok=True).repo_id
    except Exception as error:  # of HTTP, of a name, of a network that is not there
        reason = said_by(error, first_line) or type(error).__name__
        raise _wrong(f"push_to_hub: the repository {name} can neither be made nor used: {reason}") from error


def _wrong(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("push_to_hub", "hub_model_id"), message=message)])
