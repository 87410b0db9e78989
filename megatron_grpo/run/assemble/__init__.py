"""Build the objects of a run from its configuration.

These modules alone choose between implementations, and they alone may import inside a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_grpo.core.images import ImageProcessorSpec
    from megatron_grpo.core.policy.gradient_check import GradientCheck
    from megatron_grpo.run.assemble.engines import MakeEngine
    from megatron_grpo.run.assemble.policy import MakeReference
    from megatron_grpo.run.data.prompts import PromptDataset
    from megatron_grpo.run.schedule import ScheduledRun


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


class RunPlan(Protocol):
    """A plan that rank 0 of a run prints and saves."""

    def save(self, path: Path, *, versions: Mapping[str, str]) -> None:
        """Write plan.json, atomically.

        Args:
            path: File to write.
            versions: Versions by name.
        """


class Planner(Protocol):
    """Functions of the command `plan` that rank 0 calls. `cli` provides them, because no rank imports `commands` itself."""

    def make_plan(self, run: ScheduledRun, *, rows: PromptDataset | None, image_spec: ImageProcessorSpec | None) -> RunPlan:
        """Make the plan of a run.

        Args:
            run: Every rank's part of it: settings, sizes and schedule.
            rows: Prompts of the run; None if they are streamed.
            image_spec: The image processor; None for a text model.
        """

    def print_report(self, plan: Any, *, is_short: bool) -> None:
        """Print a plan.

        Args:
            plan: From `make_plan`.
            is_short: Whether to print what a run prints before it starts, instead of all that the command `plan` does.
        """

    def choose_offload(self, run: ScheduledRun) -> dict[str, Any]:
        """Decide what leaves the device while the sampler works, by the estimate of memory.

        Args:
            run: Every rank's part of the plan.

        Returns:
            The `offload` object of the plan's memory.
        """

    def describe_offload(self, offload: dict[str, Any]) -> str:
        """Return a sentence that says what is offloaded, and why.

        Args:
            offload: From `choose_offload`.
        """


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
        planner: Functions of the command `plan` that the run calls.
        engine: Factory of the sampling engine. It replaces the one that `vllm_mode` names.
        listener: Called on rank 0 with the metrics of every optimizer step and evaluation.
    """

    analysis: AnalysisHooks
    planner: Planner
    engine: MakeEngine | None = None
    listener: Listener | None = None
