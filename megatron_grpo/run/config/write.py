"""Write the resolved configuration as YAML for `--config`, and detect secrets, which must not be typed as settings.

Every setting is written to config.yaml, to checkpoints and to tracking services; secrets belong in environment variables. No message here
repeats what was typed.
"""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.files import atomic_write_text
from megatron_grpo.run.config.settings import Config

# Sources whose values another launch may derive differently.
_NOT_WRITTEN = ("derived", "launcher", "implied")
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+@", re.IGNORECASE)  # in a URL: scheme://name:password@host
# Prefixes of the keys of well-known services, so that ordinary words do not match.
_KEY = re.compile(
    r"(?<![A-Za-z0-9])(sk-[\w-]{16,}|hf_[A-Za-z0-9]{24,}|gh[pousr]_[A-Za-z0-9]{24,}|github_pat_\w{24,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{24,}|gsk_[A-Za-z0-9]{24,}|ey[\w-]{16,}\.ey[\w-]{16,}\.[\w-]+|Bearer\s+[\w.-]{16,})"
)
_PARAMETER = re.compile(r"(.*[-_])?(\w*key|token|\w*secret|password|passwd|sig|signature|auth|authorization|credentials?)", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_ENV = "llm_judge_api_key_env"


def as_yaml(cfg: Config) -> str:
    """Return every setting by section as YAML.

    Values derived from other settings or from the launcher are omitted, so that the file can be used with another layout.
    """
    import yaml

    sections = {
        group: {name: value for name, value in vars(section).items() if not cfg.sources.get(name, "").startswith(_NOT_WRITTEN)}
        for group, section in cfg.groups().items()
    }
    if cfg.plan.dialect:  # everything has been translated: the file speaks the native vocabulary
        sections["plan"]["dialect"] = None
    if cfg.origins:
        names = (
            "micro_batch_size",
            "global_batch_size",
            "generation_batch_size",
            "num_generations",
            "num_iterations",
            "allow_unaligned_generation",
        )
        sections["batch"] |= {name: getattr(cfg.batch, name) for name in names}
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


_FORMS = {  # settings that name files or folders -> their form, with the path as its first group
    r"@?(.*?)(#\d+)?": """model ref_model teacher_model reward_model dataset further_datasets eval_dataset eval_datasets data_root
        llm_judge_prompt vllm_server_host vllm_server_ca vllm_server_token_file agent_ssl_certfile agent_ssl_keyfile""",
    r"(.*\.py):[\w.]+": "reward_funcs eval_reward environment tools rollout_func agent agent_verdict",
}


def absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return, with absolute paths, the settings that name existing files and folders: a run's records are read in other folders too."""
    forms = {name: form for form, names in _FORMS.items() for name in names.split()}
    changed = {name: _absolute(values.get(name), form) for name, form in forms.items()}
    with suppress(ValueError):  # an open quote, which is reported elsewhere
        words = shlex.split(values.get("agent_command") or "")
        absolute_words = [str(Path(word).absolute()) if os.path.isfile(word) else word for word in words]
        changed |= {} if words == absolute_words else {"agent_command": shlex.join(absolute_words)}
    return {name: value for name, value in changed.items() if value != values.get(name)}


def _absolute(value: Any, form: str) -> Any:
    if isinstance(value, dict):
        return {name: _absolute(item, form) for name, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, form) for item in value]
    match = re.fullmatch(form, value or "")
    is_there = match is not None and os.path.exists(match[1])
    return f"{'@' * value.startswith('@')}{Path(value.removeprefix('@')).absolute()}" if is_there else value


def write_config(cfg: Config, path: str | Path) -> None:
    """Write the configuration to a file, completely or not at all."""
    atomic_write_text(path, as_yaml(cfg))


# ---- secrets


def find_secrets(cfg: Config, environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Yield (setting, what it seems to contain) for each setting that would disclose a secret."""
    for section in cfg.groups().values():
        for name, value in vars(section).items():
            secrets = _secret_in(name, value, environ)
            if secrets:
                yield name, secrets


def _secret_in(name: str, value: Any, environ: Mapping[str, str]) -> str | None:
    texts = [value] if isinstance(value, str) else [*map(str, value)] if isinstance(value, (list, dict)) else []
    texts += map(str, value.values()) if isinstance(value, dict) else []
    if name == _ENV:
        is_name = not texts or value in environ or _VARIABLE.fullmatch(value)
        return None if is_name else "something other than the name of an environment variable"
    for text in texts:
        if _PASSWORD.search(text):
            return "an address with a user name or password"
        if _KEY.search(text):
            return "a key"
        if name.endswith("_url") and _has_key(text):
            return "an address with a key"
    return None


def _has_key(url: str) -> bool:
    try:
        query = urllib.parse.urlsplit(url).query
    except ValueError:  # not a URL: reported where it is used
        return False
    return any(_PARAMETER.fullmatch(name) for name, _ in urllib.parse.parse_qsl(query))
