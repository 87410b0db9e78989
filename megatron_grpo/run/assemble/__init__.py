"""Build the objects of a run from its configuration.

These modules alone choose between implementations, and they alone may import inside a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_grpo.core.policy.gradient_check import GradientCheck
    from megatron_grpo.run.assemble.engines import MakeEngine
    from megatron_grpo.run.assemble.policy import MakeReference


class AnalysisHooks(Protocol):
    """Functions of the `analysis` package that a run calls.

    `cli` provides them, because `run` may not import `analysis`. Each imports what it needs when it is called.
    """

    def replica_check(self, interval: int) -> Any:
        """Return an `analysis.replica_check.ReplicaCheck`.

        Args:
            interval: Optimizer steps between two checks of the replicas.
        """

    def step_dumps(self, **facts: Any) -> Any:
        """Return an `analysis.step_dump.StepDumps`.

        Args:
            **facts: Its constructor's arguments.
        """

    def bitwise_parity(self) -> None:
        """Patch the forward passes of this process so that they compute bitwise what the sampler computes."""

    def vllm_bitwise_parity(self) -> None:
        """Make vLLM's outputs depend on its inputs alone (batch invariance). Call it before an engine is built."""


# (optimizer step, metrics by name) -> whether the run is to save and stop.
Listener = Callable[[int, Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """Custom parts of a policy, which replace those that the settings name.

    Args:
        reference: Factory of the reference model.
        gradient_check: Check that decides whether a gradient may be used.
    """

    reference: MakeReference | None = None
    gradient_check: GradientCheck | None = None


@dataclass(frozen=True, kw_only=True)
class RunParts(PolicyParts):
    """Custom parts of a run, and the hooks into `analysis`.

    Args:
        analysis: Functions of the `analysis` package that the run calls.
        engine: Factory of the sampling engine. It replaces the one that `vllm_mode` names.
        listener: Called on rank 0 with the metrics of every optimizer step and evaluation.
    """

    analysis: AnalysisHooks
    engine: MakeEngine | None = None
    listener: Listener | None = None
