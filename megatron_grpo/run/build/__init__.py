"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_grpo.policy.guard import GradientCheck
    from megatron_grpo.run.build.engines import MakeEngine
    from megatron_grpo.run.build.policy import MakeReference


class AnalysisHooks(Protocol):
    """What the room above does for a run. `cli` has it; each imports what it needs when it is called."""

    def audit(self, every: int) -> Any:
        """`analysis.audit.Audit`."""

    def capsules(self, **facts: Any) -> Any:
        """`analysis.step_dump.StepDumps`."""

    def same_bits(self) -> None:
        """The forward passes of this process have the sampler's bits from now on."""

    def same_bits_of_vllm(self) -> None:
        """Before an engine is built: vLLM's answers depend on their inputs alone."""


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """Parts of a policy that were written elsewhere, instead of those that the settings name."""

    reference: MakeReference | None = None
    guard: GradientCheck | None = None


@dataclass(frozen=True, kw_only=True)
class Parts(PolicyParts):
    """What is handed to a run. engine: written elsewhere, instead of the one that the settings name."""

    analysis: AnalysisHooks
    engine: MakeEngine | None = None
