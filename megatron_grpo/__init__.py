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
    from megatron_grpo.run.config.grpo_config import GRPOConfig as GRPOConfig

__version__ = "0.1.0"
# Module of each public name, imported when it is first used.
_API = {"GRPOConfig": "run.config.grpo_config", "GRPOTrainer": "api.trainer", "RunResult": "api.trainer", "plan": "api.trainer",
        "score": "api.score"}  # fmt: skip
__all__ = [*_API]


@cache
def installed_version(distribution: str) -> str | None:
    """Version of another distribution; None where it is not installed.

    Args:
        distribution: Name of the distribution on PyPI.
    """
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
