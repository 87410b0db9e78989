"""Directories and shapes of the models that a run names: the policy's, and the teacher's in the training ranks (`--teacher_model`).

Shapes come from the config.json on this machine. It is read as plain JSON, because importing transformers takes about a second. The module
also derives the teacher's configuration and its problems. Does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.core import images
from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, first_line, one_line, problem_with
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.weights.families import FAMILIES, NOT_YET_BY_NAME
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules import policy as validation
from megatron_grpo.run.config.rules import stages
from megatron_grpo.run.config.rules.layout import layout_problems, length_problems
from megatron_grpo.run.config.settings import Config, DataConfig
from megatron_grpo.run.config.sizes import ModelDivisors
from megatron_grpo.run.data.files import is_path

FLAG = "teacher_model"
_ANY_DEPTH = {name: None for name in stages.SINGLE_DEPTH_SETTINGS} | dict.fromkeys(stages.ACCOUNTS, False)
_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")  # from the Hub
_WITHOUT_EXPERTS = dict(expert_model_parallel_size=1, expert_tensor_parallel_size=1, moe_token_dispatcher_type="alltoall",
                        moe_permute_fusion=False, moe_shared_expert_overlap=False, moe_enable_deepep=False)  # fmt: skip


def read_shape(model: str) -> tuple[ModelShape | None, list[Problem]]:
    """Read the shape of a model from a checkpoint directory, a config.json, or a Hub name that was downloaded before.

    Downloads nothing.

    Returns:
        (shape, problems). (None, []) if no model is given, or if a Hub name is not on this machine.
    """
    file = find_config(model)
    if file is None:
        configs = [
            {"architectures": [architecture]}
            for name, architecture in NOT_YET_BY_NAME.items()
            if re.match(name, model) and not Path(model).exists()
        ]
        return _shape(configs[0]) if configs else (None, [])
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [problem_with("model", f"model: {file} is not valid JSON: {error}.")]
    if not isinstance(config, dict):
        return None, [problem_with("model", f"model: {file} is not a model configuration.")]
    return _shape(_with_architecture(config))


def _shape(config: dict[str, Any]) -> tuple[ModelShape | None, list[Problem]]:
    try:
        return ModelShape.from_hf(config), []
    except ConfigError as error:
        return None, list(error.problems)


def find_config(model: str) -> Path | None:
    """Return the path of the config.json of `model`, or None."""
    if not model:
        return None
    path = Path(model)
    if path.is_dir():
        return path / "config.json" if (path / "config.json").is_file() else None
    if path.is_file():
        return path if path.suffix == ".json" else None  # loading the model rejects any other file
    hf_home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or hf_home / "hub")
    snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return snapshots[-1] if snapshots else None


def find_model(name: str, *, flag: str = "model", with_code: bool = False) -> Path:
    """Return the directory of a Hugging Face checkpoint. A Hub name is downloaded first.

    Args:
        with_code: Whether to download Python files as well. Nothing is executed.

    Raises:
        ConfigError: If there is no such directory and no such model on the Hub.
    """
    if not name:
        raise config_error("model", "model is missing. Use a Hugging Face checkpoint directory or a Hub name.")
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    if is_path(name):
        fault = "is a file" if path.is_file() else "does not exist"
        models = sorted(config.parent.name for config in path.parent.glob("*/config.json"))[:8]
        nearby = f" In {path.parent}: {', '.join(models)}." if models else ""
        message = f"{flag} ({name}) {fault}. Use a directory with config.json, tokenizer files and *.safetensors, or a Hub name.{nearby}"
        raise config_error(flag, message)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_FETCHED, *(["*.py"] if with_code else [])]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        message = (
            f"{flag} ({name}) is neither a local directory nor a model that can be downloaded from the Hub: {one_line(error, first_line)}"
        )
        raise config_error(flag, message) from error


def _with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """Add the architecture to a config.json that only has a `model_type`, for example one written by hand for `plan`.

    `qwen3_moe` becomes Qwen3MoeForCausalLM.
    """
    words = str(config.get("model_type", "")).removesuffix("_text").split("_")
    architecture = f"{''.join(map(str.capitalize, words))}ForCausalLM"
    return config if config.get("architectures") or architecture not in FAMILIES else {**config, "architectures": [architecture]}


def make_model_divisors(shape: ModelShape) -> ModelDivisors:
    """Return what the layout rules need to know about a model."""

    def misfits(tp: int, ep: int, etp: int) -> Sequence[tuple[str, str]]:
        if shape.moe is None:  # expert parallelism applies to the other model, or to none
            ep = etp = 1
        # The suggested values in these sentences consider the model alone; the caller's consider the whole configuration.
        return [
            (problem.flags[0], problem.message.partition(" Use ")[0].rstrip("."))
            for problem in layout_problems(shape, tp=tp, ep=ep, etp=etp)
        ]

    return ModelDivisors(num_layers=shape.num_layers, num_experts=shape.moe.num_experts if shape.moe else 0, misfits=misfits)


# ---- a teacher ---------------------------------------------------------------------------------------------------------------------------


def read_teacher(cfg: Config) -> tuple[ModelShape | None, list[Problem]]:
    """Read the teacher's shape, as `read_shape` does."""
    shape, problems = read_shape(cfg.grpo.teacher_model or "")
    return shape, [as_teacher_problem(problem) for problem in problems]


def config_of_teacher(cfg: Config, teacher: ModelShape, student: ModelShape | None) -> Config:
    """Return the configuration that the teacher is computed with.

    It has the run's layout and dtype, but no settings for training, adapters or the shape of the policy. A manual split of layers over
    pipeline stages holds for the policy's depth; a teacher of another depth is split evenly.

    Args:
        teacher: Shape of the teacher.
        student: Shape of the policy's model; None if unknown.
    """
    teacher_cfg = cfg.with_values(
        dict(model=cfg.grpo.teacher_model, tuner_type="full", adapters=None, ref_adapters=None, beta=0.0, ref_model=None,
             recompute_granularity=None, fp8_format=None, router_replay_mode="disabled")
    )  # fmt: skip
    if student is None or teacher.num_layers != student.num_layers:
        teacher_cfg = teacher_cfg.with_values(_ANY_DEPTH)
    if teacher.moe is None:
        teacher_cfg = teacher_cfg.with_values(_WITHOUT_EXPERTS)
    elif not teacher.moe.shared_ffn_hidden_size:
        teacher_cfg = teacher_cfg.with_values({"moe_shared_expert_overlap": False})
    if validation.sharing_problems(teacher_cfg, teacher):
        teacher_cfg = teacher_cfg.with_values({"share_prefix": "auto"})
    return teacher_cfg


def teacher_problems(cfg: Config, student: ModelShape | None, teacher: ModelShape, longest: int) -> Iterator[Problem]:
    """Yield the problems of this teacher in this run, except divisibility (`run.config.rules.sizes`).

    Args:
        student: Shape of the policy's model; None if unknown.
        teacher: Shape of the teacher.
        longest: Maximum sequence length in tokens.
    """
    name, teacher_cfg = cfg.grpo.teacher_model, config_of_teacher(cfg, teacher, student)
    if student is not None and teacher.vocab_size < student.vocab_size:
        message = (
            f"teacher_model ({name}) has {teacher.vocab_size} token IDs, fewer than the policy ({student.vocab_size}). Use a teacher with "
            "the policy's vocabulary."
        )
        yield problem_with((FLAG, "model"), message)
    reported = {problem.message for problem in _against(cfg, student)} if student is not None else set()
    for problem in [*length_problems(teacher, longest), *_against(teacher_cfg, teacher)]:
        if problem.message not in reported:
            yield as_teacher_problem(problem)


def _against(cfg: Config, shape: ModelShape) -> list[Problem]:
    return [*validation.problems(cfg, shape), *find_parity_problems(cfg, shape)]


def as_teacher_problem(problem: Problem) -> Problem:
    """Rewrite a problem of a model as a problem of the teacher."""
    flags = dict.fromkeys((FLAG, *(flag for flag in problem.flags if flag != "model")))
    return replace(problem, flags=tuple(flags), message=f"teacher_model: {problem.message.removeprefix('model: ')}")


def read_image_spec(cfg: DataConfig, model_path: str | Path) -> images.ImageProcessorSpec | None:
    """Return the image settings of a run's model. Bounds come from the run's settings, else from the environment, else from the model.

    Returns:
        The settings; None for a text model.

    Raises:
        ConfigError: If the model's files or the bounds are invalid.
    """
    bounds = {name: getattr(cfg, name) or _read_variable(variable) for name, variable in images.VARIABLES.items()}
    return images.ImageProcessorSpec.from_pretrained(model_path, min_pixels=bounds["min_pixels"], max_pixels=bounds["max_pixels"])


def bound_notes(cfg: DataConfig) -> list[str]:
    """Return a sentence for each image size bound in the environment that differs from the setting, saying which one applies."""
    notes = []
    for name, variable in images.VARIABLES.items():
        configured, from_environment = getattr(cfg, name), os.environ.get(variable)
        if from_environment is None or str(configured) == from_environment:
            continue
        source = f"the environment variable {variable} ({from_environment})"
        notes.append(f"{name} ({configured}) overrides {source}." if configured else f"{name} is not set; {source} applies.")
    return notes


def _read_variable(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        name = next(name for name, env_name in images.VARIABLES.items() if env_name == variable)
        raise config_error(name, f"Environment variable {variable} ({text!r}) is not a positive number of pixels. Unset it, or set {name}.")
    return int(text)


def find_parity_problems(cfg: Config, shape: ModelShape | None) -> list[Problem]:
    """Return the settings that conflict with `bitwise_parity`, whose rules are imported only with it; an empty list if it is off.

    Args:
        shape: The model's dimensions; None if unknown.
    """
    if not cfg.rollout.bitwise_parity:
        return []
    from megatron_grpo.run.config.rules import bitwise_parity

    return bitwise_parity.problems(cfg, shape)
