"""megatron_grpo: GRPO on Megatron-Core, sampled by vLLM. Start reading at train.py."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_grpo.api.score import score as score
    from megatron_grpo.api.trainer import GRPOTrainer as GRPOTrainer
    from megatron_grpo.api.trainer import RunResult as RunResult
    from megatron_grpo.api.trainer import plan as plan
    from megatron_grpo.core.images import ImageProcessorSpec as ImageProcessorSpec
    from megatron_grpo.core.policy.gradient_check import GradientCheck as GradientCheck
    from megatron_grpo.core.policy.reference import Reference as Reference
    from megatron_grpo.core.rollout.engine import BackgroundSampler as BackgroundSampler
    from megatron_grpo.core.rollout.engine import Engine as Engine
    from megatron_grpo.core.rollout.engine import Sampler as Sampler
    from megatron_grpo.core.rollout.engine import WeightReceiver as WeightReceiver
    from megatron_grpo.core.types import Completion as Completion
    from megatron_grpo.core.types import Group as Group
    from megatron_grpo.core.types import Prompt as Prompt
    from megatron_grpo.plugins.environments.protocol import Environment as Environment
    from megatron_grpo.plugins.environments.protocol import StepOutput as StepOutput
    from megatron_grpo.plugins.environments.protocol import Turn as Turn
    from megatron_grpo.plugins.rewards.sandbox import run_program as run_program
    from megatron_grpo.run.config.grpo_config import GRPOConfig as GRPOConfig
    from megatron_grpo.run.config.settings import DataConfig as DataConfig
    from megatron_grpo.run.data.chat import load_tokenizer as load_tokenizer
    from megatron_grpo.run.data.prompts import open_stream as open_stream
    from megatron_grpo.run.rewards.protocol import RowFailure as RowFailure
    from megatron_grpo.run.rewards.protocol import Score as Score

__version__ = "0.1.0"
# Public names by their module, which is imported when one of them is first used. What users write names no other path.
_PUBLIC = {
    "api.score": "score",
    "api.trainer": "GRPOTrainer RunResult plan",
    "core.images": "ImageProcessorSpec",
    "core.policy.gradient_check": "GradientCheck",
    "core.policy.reference": "Reference",
    "core.rollout.engine": "BackgroundSampler Engine Sampler WeightReceiver",
    "core.types": "Completion Group Prompt",
    "plugins.environments.protocol": "Environment StepOutput Turn",
    "plugins.rewards.sandbox": "run_program",
    "run.config.grpo_config": "GRPOConfig",
    "run.config.settings": "DataConfig",
    "run.data.chat": "load_tokenizer",
    "run.data.prompts": "open_stream",
    "run.rewards.protocol": "RowFailure Score",
}
_API = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = [*_API]


@cache
def installed_version(distribution: str) -> str | None:
    """Version of another distribution; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def name_adam() -> str:
    """Return the name of the Adam that Megatron-Core takes on this machine. It prefers a fused one, whatever `transformer_impl` is."""
    fused = {"transformer_engine": "Transformer Engine's FusedAdam", "apex": "Apex's FusedAdam"}
    return next((name for module, name in fused.items() if find_spec(module)), "torch's AdamW (no Transformer Engine, no Apex)")


def __getattr__(name: str) -> object:
    if name in _API:
        return getattr(import_module(f"megatron_grpo.{_API[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
