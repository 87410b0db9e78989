"""Table of the functions that a setting asks for, by dotted name; a run imports them when it needs them. No torch.

A new sampler, teacher or form of episodes is a row here; its rules have a row in `PLUG_INS` of run/config/rules, its settings a line in
core/settings.py or run/config/settings.py. The Protocols say how the functions are called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from megatron_grpo.core.base.activity import Timers
    from megatron_grpo.core.base.errors import Problem
    from megatron_grpo.core.parallel.state import ParallelState
    from megatron_grpo.core.policy.memory_offload import Role
    from megatron_grpo.core.policy.policy import Policy
    from megatron_grpo.core.rollout.engine import Engine, Sampler
    from megatron_grpo.core.rollout.turns import TurnEngine
    from megatron_grpo.core.train import StopRequest
    from megatron_grpo.core.trainer.rollouts import InterruptedSampling, Teacher
    from megatron_grpo.core.weights.lora import LoraSync
    from megatron_grpo.run.checkpoint.saving import Checkpoints
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.inputs import ValidatedInputs

Value = TypeVar("Value")


@dataclass(frozen=True)
class PlugIn(Generic[Value]):
    """A function, or another value of a module, that is imported when it is needed.

    Args:
        path: Its dotted name.
    """

    path: str

    def load(self) -> Value:
        """Import the module, and return the value."""
        module, _, name = self.path.rpartition(".")
        return cast(Value, getattr(importlib.import_module(module), name))


class ReadPart(Protocol):
    """Reads a part of the inputs of a run, before any model loads. It imports no torch."""

    def __call__(self, cfg: Config, inputs: ValidatedInputs) -> Iterable[Problem] | None:
        """Store the part in the inputs, and return or raise (ConfigError) its problems.

        Args:
            cfg: Settings of the run.
            inputs: Inputs read so far.
        """


class BuildEngine(Protocol):
    """Builds the sampling engine."""

    def __call__(
        self, cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, bitwise_parity: Callable[[], None],
        lora: LoraSync | None = None, runner: str | None = None,
    ) -> Engine:  # fmt: skip
        """Start the engine, or connect to it. Collective.

        Args:
            cfg: Settings of the run.
            inputs: Validated inputs.
            parallel: Process groups of this rank.
            bitwise_parity: Makes vLLM batch invariant; to be called before an engine is built if `bitwise_parity` is set.
            lora: How adapters are synced; None if merged or full weights are synced.
            runner: vLLM's model runner in the checkpoint that the run continues; None if it has none.
        """


class BuildSampler(Protocol):
    """Builds what samples completions with the turns of an engine."""

    def __call__(self, cfg: Config, inputs: ValidatedInputs, engine: TurnEngine) -> Sampler:
        """Build the sampler.

        Args:
            cfg: Settings of the run.
            inputs: Validated inputs: environment or rollout function, tokenizer, and the model's path and shape.
            engine: The engine.
        """


class BuildPartialRollouts(Protocol):
    """Builds the sampler whose completions continue over weight syncs."""

    def __call__(self, cfg: Config, policy: Policy, sampler: Engine) -> InterruptedSampling:
        """Build the sampler.

        Args:
            cfg: Settings of the run.
            policy: The policy, which checks the versions of interrupted completions.
            sampler: The engine.
        """


class BuildTeacher(Protocol):
    """Builds the teacher, which scores the rows of rollouts."""

    def __call__(
        self, cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, stop: StopRequest, checkpoints: Checkpoints,
        timers: Timers, offload: Collection[Role] = (),
    ) -> Teacher:  # fmt: skip
        """Connect to the teacher's servers, waiting until they answer, or load the teacher into the training ranks. Collective.

        Args:
            cfg: Settings of the run.
            inputs: Validated inputs: the policy's shape, the tokenizer, the prompts and the teacher's checkpoint.
            parallel: Process groups of this rank.
            stop: Tells when to give up waiting.
            checkpoints: Receives the fingerprint of a teacher that this package did not read from a file.
            timers: Timers of the run.
            offload: Roles of the policy that leave the device while the sampler works. If "reference" is among them, the teacher leaves
                too.
        """


PLUGINS = "megatron_grpo.plugins"
ENGINES: Mapping[str, PlugIn[BuildEngine]] = {  # by vllm_mode
    "colocate": PlugIn("megatron_grpo.run.assemble.engines.build_colocated"),
    "server": PlugIn(f"{PLUGINS}.servers.servers.build_servers"),
}
SAMPLERS: Mapping[str, PlugIn[BuildSampler]] = {  # by the setting that names who samples with the engine
    "environment": PlugIn(f"{PLUGINS}.environments.episode_runner.build_sampler"),
    "tools": PlugIn(f"{PLUGINS}.environments.episode_runner.build_sampler"),
    "agent": PlugIn(f"{PLUGINS}.environments.agents.build_sampler"),
    "agent_command": PlugIn(f"{PLUGINS}.environments.agents.build_sampler"),
    "rollout_func": PlugIn(f"{PLUGINS}.environments.rollout_func.build_sampler"),
}
PARTIAL_ROLLOUTS: PlugIn[BuildPartialRollouts] = PlugIn(f"{PLUGINS}.partial_rollouts.trainer.build_partial_rollouts")
TEACHERS: Mapping[str, PlugIn[BuildTeacher]] = {  # by the setting that names the teacher
    "teacher_model": PlugIn(f"{PLUGINS}.teacher.trainer.build_held_teacher"),
    "teacher_model_server": PlugIn(f"{PLUGINS}.teacher.trainer.build_served_teacher"),
}
READERS: Mapping[str, PlugIn[ReadPart]] = {  # by the part of the inputs
    "environment": PlugIn(f"{PLUGINS}.environments.loading.read_environment"),
    "the template": PlugIn(f"{PLUGINS}.environments.loading.read_template"),
    "rollout_func": PlugIn(f"{PLUGINS}.environments.loading.read_rollout_func"),
    "servers": PlugIn(f"{PLUGINS}.servers.server_group.check_servers"),
    "teacher": PlugIn(f"{PLUGINS}.teacher.servers.check_teacher"),
}
