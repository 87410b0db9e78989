"""The plan of a configuration that passes, and the JSON object that says all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.errors import ConfigError
from megatron_grpo.base.files import write_whole
from megatron_grpo.batching.schedule import TrainingSchedule
from megatron_grpo.config.servers import CALLS, FROM_FILE, addresses_of, chunk_size
from megatron_grpo.planning.check import Checked, check_parsed
from megatron_grpo.planning.sharing import Sharing, decide, suggest_budget
from megatron_grpo.planning.summary import as_long_as_there, bubble_fraction, epoch_problems, native_flags, plan_object
from megatron_grpo.planning.warnings import defaults_of, warnings_of

if TYPE_CHECKING:
    from megatron_grpo.planning.images import PictureFacts
    from megatron_grpo.planning.parameters import Tuning
    from megatron_grpo.planning.token_counts import Lengths

MOST_WAYS = 3  # in which a run would fit, that are named
MOST_SAVED = 20_000  # micro-steps in the plan.json of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `plan` shows."""

    checked: Checked
    timetable: TrainingSchedule  # as long as the run, where that is known
    num_prompts: int | None  # of the data set
    memory: dict[str, Any] | None
    cost: dict[str, Any] | None
    sharing: Sharing
    warnings: list[str]
    not_checked: tuple[str, ...] = ()  # what `train` would look at besides
    pictures: PictureFacts | None = None  # of the data set, where it has some

    @property
    def servers(self) -> dict[str, Any] | None:
        """The `servers` object of `plan --json`; None where no servers sample.

        num_servers: those that are named; files may name others by and by. prompts_per_call: of a server that holds vllm_max_num_seqs
        sequences as it does by default, which is not known before it answers.
        """
        rollout, sizes = self.checked.config.rollout, self.checked.sizes
        if rollout.vllm_mode != "server":
            return None
        addresses = [str(address) for address in addresses_of(rollout)]
        prompts, n = sizes.num_rollout_prompts, sizes.num_generations
        return {
            "addresses": addresses,
            "files": [host.removeprefix(FROM_FILE) for host in rollout.vllm_server_host if host.startswith(FROM_FILE)],
            "num_servers": len(addresses),
            "calls_per_server": CALLS,
            "max_num_seqs": rollout.vllm_max_num_seqs,
            "prompts_per_call": chunk_size(prompts, n=n, num_servers=max(1, len(addresses)), max_num_seqs=rollout.vllm_max_num_seqs),
            "pushed_by": "rank 0",
        }

    @property
    def bubble(self) -> float:
        """Share of an optimizer step that a pipeline stage waits: with a token budget, by the micro-batches that it makes, if known."""
        return self.cost["sharing"]["bubble_shared"] if self.cost else bubble_fraction(self.checked.sizes)

    def rest(self) -> dict[str, Any]:
        """The part of the JSON object after the timetable."""
        sizes, cfg = self.checked.sizes, self.checked.config
        servers = {"servers": self.servers} if self.servers else {}
        pictures = {"pictures": self.pictures.as_json()} if self.pictures else {}
        return {
            "pipeline": {"bubble_fraction": self.bubble},
            **servers,
            **pictures,
            "memory": self.memory,
            "cost": self.cost,
            "native_flags": native_flags(cfg, sizes),
            "warnings": [*self.warnings, *defaults_of(self.checked)],
        }

    def as_json(self, num_rollouts: int | None = None) -> str:
        """The whole object, compact; by default with as many rollouts as the settings ask for."""
        found = plan_object(self.timetable, num_rollouts or self.checked.config.plan.plan_rollouts)
        return json.dumps(found | self.rest(), separators=(",", ":")) + "\n"

    def save(self, path: Path) -> None:
        """The JSON object of the whole run, or of its first MOST_SAVED micro-steps' rollouts where it is longer; whole or not at all."""
        sizes, steps = self.checked.sizes, self.timetable.num_steps
        per_rollout = sizes.micro_steps_per_rollout * sizes.num_iterations
        micro_steps = MOST_SAVED if steps is None else min(self.timetable.first_of(steps), MOST_SAVED)
        write_whole(path, self.as_json(max(1, -(-micro_steps // per_rollout))))


def make_plan(checked: Checked, *, num_prompts: int | None = None, pictures: PictureFacts | None = None) -> Plan:
    """The plan of a configuration that passes. num_prompts, pictures: of the data set where the caller knows it.

    Raises ConfigError where the file of lengths cannot be read, and where an epoch does not come out.
    """
    if num_prompts is None:
        num_prompts = checked.config.plan.num_prompts
    checked, notes = as_long_as_there(checked, num_prompts)
    cfg = checked.config
    timetable = TrainingSchedule.of_length(
        checked.sizes, max_steps=cfg.run.max_steps, num_train_epochs=cfg.run.num_train_epochs, num_prompts=num_prompts,
        drops_last=cfg.data.dataset_drop_last,
    )  # fmt: skip
    if problems := epoch_problems(checked, timetable):
        raise ConfigError(problems)
    sharing = decide(cfg, checked.shape)
    memory, cost, tuning = _estimates(checked, sharing)
    warnings = [*warnings_of(checked, timetable, memory, cost, tuning.push if tuning else None), *notes]
    return Plan(
        checked=checked, timetable=timetable, num_prompts=num_prompts, memory=memory, cost=cost, sharing=sharing, pictures=pictures,
        warnings=[*warnings, *(pictures.warnings() if pictures else ())],
    )  # fmt: skip


def _estimates(checked: Checked, sharing: Sharing) -> tuple[dict[str, Any] | None, dict[str, Any] | None, Tuning | None]:
    """(memory, cost, what trains), each None where neither a model nor lengths tell."""
    cfg, shape = checked.config, checked.shape
    if shape is None and not cfg.plan.lengths:
        return None, None, None
    from megatron_grpo.planning.cost import estimate_cost
    from megatron_grpo.planning.memory import estimate_memory
    from megatron_grpo.planning.parameters import Tuning
    from megatron_grpo.planning.token_counts import StepTokens, read_lengths

    lengths = read_lengths(cfg.plan.lengths) if cfg.plan.lengths else None
    memory = tuning = None
    if shape is not None:
        tuning = Tuning.of(cfg, shape)
        memory = estimate_memory(checked, tuning, lengths, shares=sharing.min_saving_ratio is not None)
        if memory["fits"] is False:
            memory["would_fit"] = ways_to_fit(checked, lengths)
    step = StepTokens.of(sharing.min_saving_ratio, checked.sizes, cfg, lengths)
    cost = estimate_cost(checked, tuning, lengths, sharing, step)
    cost["sharing"]["budget"] = suggest_budget(cfg, shape, sharing, step, memory)
    return memory, cost, tuning


def ways_to_fit(checked: Checked, lengths: Lengths | None) -> list[dict[str, Any]]:
    """A few changes of settings with which the run fits, the cheapest first: {"settings", "peak_bytes", "peak_phase"} of each."""
    from megatron_grpo.planning.memory import estimate_memory
    from megatron_grpo.planning.parameters import Tuning

    found: list[dict[str, Any]] = []
    for changes in _changes(checked):
        # What contains a change that is enough says nothing new, and neither does another value of the same settings.
        if any(set(way["settings"]) <= set(changes) for way in found):
            continue
        try:
            changed = check_parsed(replace(checked.parsed, config=checked.parsed.config.with_values(changes)))
        except ConfigError:  # not a layout of this model, or not with these sizes
            continue
        assert changed.shape is not None
        shares = decide(changed.config, changed.shape).min_saving_ratio is not None
        memory = estimate_memory(changed, Tuning.of(changed.config, changed.shape), lengths, shares=shares)
        if memory["fits"]:
            found.append({"settings": changes, "peak_bytes": memory["peak_bytes"], "peak_phase": memory["peak_phase"]})
        if len(found) == MOST_WAYS:
            break
    return found


def _changes(checked: Checked) -> Iterator[dict[str, Any]]:
    cfg, layout, shape = checked.config, checked.sizes.layout, checked.shape
    room: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    if cfg.rollout.vllm_mode == "colocate":
        room = {"sleep_level": 1} if cfg.rollout.sleep_level == 0 else {}
        room |= {name: "true" for name in ("offload_optimizer", "offload_model") if getattr(cfg.rollout, name) == "false"}
        share = round(cfg.rollout.vllm_gpu_memory_utilization * 10)  # a larger one where its KV cache is too small
        others = [{"vllm_gpu_memory_utilization": tenth / 10} for tenth in (*range(share - 1, 1, -1), share + 1) if tenth < 10]
    if cfg.grpo.teacher_model and not cfg.grpo.offload_teacher_model:
        room |= {"offload_teacher_model": True}
    if cfg.model.recompute_granularity != "full":
        others.append({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
    axes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    if shape and shape.moe:
        axes = {"expert_model_parallel_size": layout.ep} | axes
    for name, size in axes.items():
        beside = {"sequence_parallel": True} if shape and shape.moe and name.startswith("tensor") else {}
        others += [{name: size * factor} | beside for factor in (2, 4) if size * factor <= layout.world_size]
    yield from ({name: value} for name, value in room.items())
    yield from others
    if room:
        yield room
        yield from (room | change for change in others)
