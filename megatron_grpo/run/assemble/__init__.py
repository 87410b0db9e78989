"""Build the objects of a run from its configuration.

These modules alone choose between implementations, and they alone may import inside a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_grpo.commands.planning.command import Plan
    from megatron_grpo.commands.planning.images import ImageStats
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.core.policy.gradient_check import GradientCheck
    from megatron_grpo.core.settings import Config
    from megatron_grpo.core.weights.shape import ModelShape
    from megatron_grpo.run.assemble.engines import MakeEngine
    from megatron_grpo.run.assemble.policy import MakeReference
    from megatron_grpo.run.check import CheckedConfig
    from megatron_grpo.run.data.prompts import PromptRows


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


class Planner(Protocol):
    """Functions of the command `plan` that a run calls. `cli` provides them, because no rank imports `commands` itself."""

    def image_stats(self, rows: PromptRows, sizes: BatchSizes) -> ImageStats | None:
        """As `commands.planning.images.ImageStats.of`."""

    def tower_without_images(self, cfg: Config, shape: ModelShape) -> Iterable[str]:
        """As `commands.planning.images.tower_without_images`."""

    def make_plan(self, checked: CheckedConfig, *, num_prompts: int | None = None, images: ImageStats | None = None) -> Plan:
        """As `commands.planning.command.make_plan`."""

    def print_report(self, plan: Plan, *, is_short: bool) -> None:
        """As `commands.planning.report.print_report`."""

    def describe_offload(self, offload: dict[str, Any]) -> str:
        """As `commands.planning.report.describe_offload`."""


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
