"""The shapes of the models that a run names, the policy's and that of a teacher in the training ranks (`--teacher_model`), from their
config.json, wherever it lies on this machine; how the teacher is computed, and what stands against it. Read as plain JSON: transformers
would cost a second. No torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem, problem_with
from megatron_grpo.batching import stages
from megatron_grpo.batching.sizes import Model
from megatron_grpo.config.config import Config
from megatron_grpo.policy import same_bits_validation, validation
from megatron_grpo.weights.families import FAMILIES, NOT_YET_BY_NAME
from megatron_grpo.weights.layout_validation import layout_problems, length_problems
from megatron_grpo.weights.shape import ModelShape

FLAG = "teacher_model"
_ANY_DEPTH = {name: None for name in stages.OF_ONE_DEPTH} | dict.fromkeys(stages.ACCOUNTS, False)
_WITHOUT_EXPERTS = dict(expert_model_parallel_size=1, expert_tensor_parallel_size=1, moe_token_dispatcher_type="alltoall",
                        moe_permute_fusion=False, moe_shared_expert_overlap=False, moe_enable_deepep=False)  # fmt: skip


def read_shape(model: str) -> tuple[ModelShape | None, list[Problem]]:
    """(shape, problems) of a checkpoint directory, a config.json, or a Hub name that has been downloaded before.

    (None, []) where there is nothing to read: no model is given, or a Hub name that is not on this machine. Nothing is downloaded.
    """
    file = find_config(model)
    if file is None:
        named = [
            {"architectures": [found]} for name, found in NOT_YET_BY_NAME.items() if re.match(name, model) and not Path(model).exists()
        ]
        return _shape(named[0]) if named else (None, [])
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [problem_with("model", f"model: {file} is not valid JSON: {error}.")]
    if not isinstance(config, dict):
        return None, [problem_with("model", f"model: {file} does not hold a model's configuration.")]
    return _shape(_with_architecture(config))


def _shape(config: dict[str, Any]) -> tuple[ModelShape | None, list[Problem]]:
    try:
        return ModelShape.from_hf(config), []
    except ConfigError as error:
        return None, list(error.problems)


def find_config(model: str) -> Path | None:
    """The config.json of `model`, or None."""
    if not model:
        return None
    path = Path(model)
    if path.is_dir():
        return path / "config.json" if (path / "config.json").is_file() else None
    if path.is_file():
        return path if path.suffix == ".json" else None  # any other file is refused where the model is looked for
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return snapshots[-1] if snapshots else None


def _with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json that names its type only, as one written by hand for `plan` may: `qwen3_moe` is Qwen3MoeForCausalLM."""
    words = str(config.get("model_type", "")).removesuffix("_text").split("_")
    architecture = f"{''.join(map(str.capitalize, words))}ForCausalLM"
    return config if config.get("architectures") or architecture not in FAMILIES else {**config, "architectures": [architecture]}


def rules_of(shape: ModelShape) -> Model:
    """What the rules of the layout need to know of it."""

    def misfits(tp: int, ep: int, etp: int) -> Sequence[tuple[str, str]]:
        if shape.moe is None:  # experts are dealt out for the other model, or not at all
            ep = etp = 1
        # The nearest values that stand in these sentences are about the model alone; ours are about the whole configuration.
        return [
            (problem.flags[0], problem.message.partition(" Use ")[0].rstrip("."))
            for problem in layout_problems(shape, tp=tp, ep=ep, etp=etp)
        ]

    return Model(num_layers=shape.num_layers, num_experts=shape.moe.num_experts if shape.moe else 0, misfits=misfits)


# ---- a teacher ---------------------------------------------------------------------------------------------------------------------------


def read_teacher(cfg: Config) -> tuple[ModelShape | None, list[Problem]]:
    """As `read_shape`, of the teacher."""
    shape, problems = read_shape(cfg.grpo.teacher_model or "")
    return shape, [of_teacher(problem) for problem in problems]


def config_of_teacher(cfg: Config, teacher: ModelShape, student: ModelShape | None) -> Config:
    """What it is computed with: the run's layout and dtype, without what is about training, adapters or the policy's own shape.

    Layers that are dealt out by hand are so for the policy's depth; a teacher of another depth has them dealt out evenly.
    """
    own = cfg.with_values(
        dict(model=cfg.grpo.teacher_model, tuner_type="full", adapters=None, ref_adapters=None, beta=0.0, ref_model=None,
             recompute_granularity=None, fp8_format=None, router_replay_mode="disabled")
    )  # fmt: skip
    if student is None or teacher.num_layers != student.num_layers:
        own = own.with_values(_ANY_DEPTH)
    if teacher.moe is None:
        own = own.with_values(_WITHOUT_EXPERTS)
    elif not teacher.moe.shared_ffn_hidden_size:
        own = own.with_values({"moe_shared_expert_overlap": False})
    if validation.sharing_problems(own, teacher):
        own = own.with_values({"share_prompts": "auto"})
    return own


def teacher_problems(cfg: Config, student: ModelShape | None, teacher: ModelShape, longest: int) -> Iterator[Problem]:
    """What stands between this teacher and this run, besides divisions (`batching.rules`). longest: tokens of a sequence."""
    name, own = cfg.grpo.teacher_model, config_of_teacher(cfg, teacher, student)
    if student is not None and teacher.vocab_size < student.vocab_size:
        message = (
            f"teacher_model ({name}) knows {teacher.vocab_size} token ids, and the policy draws from {student.vocab_size}: it has no "
            "log-prob for the last ones. A teacher is of the policy's family, with the same vocabulary."
        )
        yield problem_with((FLAG, "model"), message)
    said = {problem.message for problem in _against(cfg, student)} if student is not None else set()
    for problem in [*length_problems(teacher, longest), *_against(own, teacher)]:
        if problem.message not in said:
            yield of_teacher(problem)


def _against(cfg: Config, shape: ModelShape) -> list[Problem]:
    return [*validation.problems(cfg, shape), *same_bits_validation.problems(cfg, shape)]


def of_teacher(problem: Problem) -> Problem:
    """What was said of a model, said of the teacher."""
    flags = dict.fromkeys((FLAG, *(flag for flag in problem.flags if flag != "model")))
    return replace(problem, flags=tuple(flags), message=f"teacher_model: {problem.message.removeprefix('model: ')}")
