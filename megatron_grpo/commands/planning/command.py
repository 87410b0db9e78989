"""Build the plan of a valid configuration, and serialize it as the JSON object of `plan --json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.commands.planning.summary import bubble_fraction, native_flags, plan_object
from megatron_grpo.commands.planning.warnings import list_warnings
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.base.files import atomic_write_text
from megatron_grpo.run.check import CheckedConfig, check_parsed
from megatron_grpo.run.config import ParsedConfig, remote_code
from megatron_grpo.run.schedule import ScheduledRun
from megatron_grpo.run.sharing import Lengths, PrefixSharing, decide, read_lengths
from megatron_grpo.run.validate import validate_run

if TYPE_CHECKING:
    from megatron_grpo.commands.planning.parameters import TrainableSpec
    from megatron_grpo.core.images import ImageProcessorSpec
    from megatron_grpo.run.data.prompts import PromptDataset

MOST_WAYS = 3  # sets of changes with which a run would fit that are reported
MOST_SAVED = 20_000  # maximum micro-steps in the plan.json of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ScheduledRun):
    """Everything that `plan` shows.

    Args:
        memory: `memory` object of `plan --json`; None without a model shape.
        cost: `cost` object of `plan --json`; None without a model shape and without a file of lengths.
        sharing: Whether each prompt is computed once per group.
        warnings: Sentences about settings that are valid but probably not intended.
        not_checked: Checks that only `train` makes.
        images: `images` object of `plan --json`; None if the data set has none.
    """

    memory: dict[str, Any] | None
    cost: dict[str, Any] | None
    sharing: PrefixSharing
    warnings: list[str]
    not_checked: tuple[str, ...] = ()
    images: dict[str, Any] | None = None

    @property
    def servers(self) -> dict[str, Any] | None:
        """Return the `servers` object of `plan --json`; None without rollout servers."""
        rollout = self.checked.config.rollout
        if rollout.vllm_mode != "server":
            return None
        from megatron_grpo.plugins.servers.plan import plan_servers

        return plan_servers(rollout, self.checked.sizes)

    @property
    def bubble(self) -> float:
        """Fraction of an optimizer step that a pipeline stage is idle.

        With a token budget, it follows from the resulting number of micro-batches, if that is known.
        """
        return self.cost["sharing"]["bubble_shared"] if self.cost else bubble_fraction(self.checked.sizes)

    def rest(self) -> dict[str, Any]:
        """Return the part of the JSON object that follows the training schedule."""
        sizes, cfg = self.checked.sizes, self.checked.config
        servers = {"servers": self.servers} if self.servers else {}
        images = {"images": self.images} if self.images else {}
        return {
            "pipeline": {"bubble_fraction": self.bubble},
            **servers,
            **images,
            "memory": self.memory,
            "cost": self.cost,
            "native_flags": native_flags(cfg, sizes),
            "warnings": [
                *self.warnings,
                *(
                    f"{row.name} defaults to {row.ours} here and to {row.theirs} there; {row.used} is used."
                    for row in self.checked.parsed.defaults
                ),
            ],
        }

    def _repr_html_(self) -> str:
        """Return a small table for notebooks; `plan` in a terminal prints everything."""
        from megatron_grpo.commands.html import table

        sizes = self.checked.sizes
        rows: dict[str, Any] = {
            "optimizer steps": "unknown" if self.schedule.num_steps is None else self.schedule.num_steps,
            "prompts": "unknown" if self.num_prompts is None else self.num_prompts,
            "ranks": sizes.layout.world_size,
            "completions per micro-step, optimizer step, rollout": f"{sizes.micro_batch_size * sizes.layout.dp_size}, "
            f"{sizes.global_batch_size}, {sizes.generation_batch_size}",
        }
        rows |= {"not checked": "; ".join(self.not_checked)} if self.not_checked else {}
        return table("Plan", rows | {f"warning {number}": warning for number, warning in enumerate(self.warnings, 1)})

    def as_json(self) -> str:
        """Return the complete JSON object in compact form, with a final newline."""
        content = plan_object(self.schedule, self.checked.config.plan.plan_rollouts)
        return json.dumps(content | self.rest(), separators=(",", ":")) + "\n"

    def save(self, path: Path, *, versions: Mapping[str, str]) -> None:
        """Write the JSON object of the whole run to a file, atomically, with its number of steps and its versions.

        A run of more than MOST_SAVED micro-steps is cut to the rollouts that contain the first MOST_SAVED of them.
        """
        sizes, steps = self.checked.sizes, self.schedule.num_steps
        per_rollout = sizes.micro_steps_per_rollout * sizes.num_iterations
        micro_steps = MOST_SAVED if steps is None else min(self.schedule.find_first_micro_step(steps), MOST_SAVED)
        num_rollouts = max(1, -(-micro_steps // per_rollout))
        content = plan_object(self.schedule, num_rollouts) | self.rest() | {"num_steps": steps, "versions": dict(versions)}
        atomic_write_text(path, json.dumps(content, separators=(",", ":")) + "\n")


def make_plan(run: ScheduledRun, *, rows: PromptDataset | None = None, image_spec: ImageProcessorSpec | None = None) -> Plan:
    """Return the plan of a run whose schedule is settled.

    Args:
        rows: Rows of its data set, of which the images are counted; None if they have not been read.
        image_spec: How images are processed; None if the model does not see.

    Raises:
        ConfigError: If the file of lengths cannot be read.
    """
    checked = run.checked
    sharing = decide(checked.config, checked.shape)
    memory, cost, tuning = _estimates(checked, sharing)
    images = None
    warnings = [*list_warnings(checked, run.schedule, memory, cost, tuning.adapter_sync if tuning else None), *run.notes]
    if rows is not None and image_spec is not None:
        from megatron_grpo.commands.planning.images import list_image_warnings, measure_images, tower_without_images

        images = measure_images(rows, checked.sizes)
        warnings += list_image_warnings(images) if images else ()
        if not rows.max_images and checked.shape is not None:
            warnings += tower_without_images(checked.config, checked.shape)
    return Plan(
        checked=checked, schedule=run.schedule, num_prompts=run.num_prompts, notes=run.notes, memory=memory, cost=cost, sharing=sharing,
        images=images, warnings=warnings,
    )  # fmt: skip


def plan_run(parsed: ParsedConfig) -> Plan:
    """Return the plan of a run for the `plan` command, including what was not checked.

    Raises:
        ConfigError: With all problems that `train` would report about what was checked.
    """
    run, inputs, not_checked = validate_run(parsed)
    plan = make_plan(run, rows=inputs.rows, image_spec=inputs.image_spec)
    warnings = plan.warnings
    # What `train` logs during the run.
    if inputs.model_path and run.checked.config.model.trust_remote_code and (text := remote_code.make_code_warning(inputs.model_path)):
        warnings = [*warnings, text]
    warnings = [*warnings, *(f"Note: {note}" for note in inputs.notes)]
    if plan.checked.shape is None and (model := parsed.config.model.model):
        note = f"{model} is not on this machine and was not checked; train reports whether its architecture is supported."
        warnings = [note, *warnings]
    return replace(plan, warnings=warnings, not_checked=not_checked)


def choose_offload(run: ScheduledRun) -> dict[str, Any]:
    """Return the `offload` object of the plan's memory: what leaves the GPU while vLLM samples."""
    memory, _, _ = _estimates(run.checked, decide(run.checked.config, run.checked.shape))
    assert memory is not None  # the model's shape is known
    return memory["offload"]


def _estimates(checked: CheckedConfig, sharing: PrefixSharing) -> tuple[dict[str, Any] | None, dict[str, Any] | None, TrainableSpec | None]:
    """Return (memory, cost, what trains); each is None if neither a model shape nor a file of lengths is available."""
    cfg, shape = checked.config, checked.shape
    if shape is None and not cfg.plan.lengths:
        return None, None, None
    from megatron_grpo.commands.planning.cost import estimate_cost
    from megatron_grpo.commands.planning.memory import estimate_memory
    from megatron_grpo.commands.planning.parameters import TrainableSpec
    from megatron_grpo.commands.planning.token_counts import StepTokens, suggest_budget

    lengths = read_lengths(cfg.plan.lengths) if cfg.plan.lengths else None
    memory = tuning = None
    if shape is not None:
        tuning = TrainableSpec.from_config(cfg, shape)
        memory = estimate_memory(checked, tuning, lengths, shares=sharing.min_saving_ratio is not None)
        if memory["fits"] is False:
            memory["would_fit"] = ways_to_fit(checked, lengths)
    step = StepTokens.from_lengths(sharing.min_saving_ratio, checked.sizes, cfg, lengths)
    cost = estimate_cost(checked, tuning, lengths, sharing, step)
    cost["sharing"]["budget"] = suggest_budget(cfg, shape, sharing, step, memory)
    return memory, cost, tuning


def ways_to_fit(checked: CheckedConfig, lengths: Lengths | None) -> list[dict[str, Any]]:
    """Find up to MOST_WAYS sets of setting changes with which the run fits in GPU memory, the cheapest first.

    Args:
        checked: Validated configuration that does not fit.

    Returns:
        For each set of changes: {"settings", "peak_bytes", "peak_phase"}.
    """
    from megatron_grpo.commands.planning.memory import estimate_memory
    from megatron_grpo.commands.planning.parameters import TrainableSpec

    ways: list[dict[str, Any]] = []
    for changes in _changes(checked):
        # A superset of a sufficient change adds no information; neither does another value of the same settings.
        if any(set(way["settings"]) <= set(changes) for way in ways):
            continue
        try:
            changed = check_parsed(replace(checked.parsed, config=checked.parsed.config.with_values(changes)))
        except ConfigError:  # the layout does not suit the model or the batch sizes
            continue
        assert changed.shape is not None
        shares = decide(changed.config, changed.shape).min_saving_ratio is not None
        memory = estimate_memory(changed, TrainableSpec.from_config(changed.config, changed.shape), lengths, shares=shares)
        if memory["fits"]:
            ways.append({"settings": changes, "peak_bytes": memory["peak_bytes"], "peak_phase": memory["peak_phase"]})
        if len(ways) == MOST_WAYS:
            break
    return ways


def _changes(checked: CheckedConfig) -> Iterator[dict[str, Any]]:
    """Yield candidate setting changes in the order in which they are tried: offloading first, then other single changes, then both."""
    cfg, layout, shape = checked.config, checked.sizes.layout, checked.shape
    offloads: dict[str, Any] = {}
    changes: list[dict[str, Any]] = []
    if cfg.rollout.vllm_mode == "colocate":
        offloads = {"sleep_level": 1} if cfg.rollout.sleep_level == 0 else {}
        offloads |= {name: "true" for name in ("offload_optimizer", "offload_model") if getattr(cfg.rollout, name) == "false"}
        share = round(cfg.rollout.vllm_gpu_memory_utilization * 10)  # a larger fraction helps if the KV cache is too small
        changes = [{"vllm_gpu_memory_utilization": tenth / 10} for tenth in (*range(share - 1, 1, -1), share + 1) if tenth < 10]
    if cfg.grpo.teacher_model and not cfg.grpo.offload_teacher_model:
        offloads |= {"offload_teacher_model": True}
    if cfg.model.recompute_granularity != "full":
        changes.append({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
    axes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    if shape and shape.moe:
        axes = {"expert_model_parallel_size": layout.ep} | axes
    for name, size in axes.items():
        also = {"sequence_parallel": True} if shape and shape.moe and name.startswith("tensor") else {}
        changes += [{name: size * factor} | also for factor in (2, 4) if size * factor <= layout.world_size]
    yield from ({name: value} for name, value in offloads.items())
    yield from changes
    if offloads:
        yield offloads
        yield from (offloads | change for change in changes)
