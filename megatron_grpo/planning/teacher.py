"""A teacher that the training ranks hold (`--teacher_model`): how it is computed, and what stands against that. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_grpo.base.errors import Problem
from megatron_grpo.batching import stages
from megatron_grpo.config.config import Config
from megatron_grpo.planning.model import read_shape
from megatron_grpo.policy import validation
from megatron_grpo.weights.fit import length_problems
from megatron_grpo.weights.shape import ModelShape

FLAG = "teacher_model"
_ANY_DEPTH = {name: None for name in stages.OF_ONE_DEPTH} | dict.fromkeys(stages.ACCOUNTS, False)
_WITHOUT_EXPERTS = dict(expert_model_parallel_size=1, expert_tensor_parallel_size=1, moe_token_dispatcher_type="alltoall",
                        moe_permute_fusion=False, moe_shared_expert_overlap=False, moe_enable_deepep=False)  # fmt: skip


def read_teacher(cfg: Config) -> tuple[ModelShape | None, list[Problem]]:
    """As `planning.model.read_shape`, of the teacher."""
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
        yield Problem(flags=(FLAG, "model"), message=message)
    said = {problem.message for problem in _against(cfg, student)} if student is not None else set()
    for problem in [*length_problems(teacher, longest), *_against(own, teacher)]:
        if problem.message not in said:
            yield of_teacher(problem)


def _against(cfg: Config, shape: ModelShape) -> list[Problem]:
    return [*validation.problems(cfg, shape), *validation.bits_problems(cfg, shape)]


def of_teacher(problem: Problem) -> Problem:
    """What was said of a model, said of the teacher."""
    flags = dict.fromkeys((FLAG, *(flag for flag in problem.flags if flag != "model")))
    return replace(problem, flags=tuple(flags), message=f"teacher_model: {problem.message.removeprefix('model: ')}")
