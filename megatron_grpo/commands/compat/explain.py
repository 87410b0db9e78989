"""Notes for users of another system: what is the same under the native names, and what differs. `explain.yaml` has the sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_grpo.commands.compat.tables import contents

if TYPE_CHECKING:
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.run.config.settings import Config, RunConfig


def explain(dialect: str, foreign: Mapping[str, int], sizes: BatchSizes, max_steps: int | None = None) -> Iterator[str]:
    """Yield notes on what is the same under the native names and what differs.

    Args:
        max_steps: Optimizer steps; None if not given.
    """
    steps, passes, rollout = sizes.steps_per_generation, sizes.num_iterations, sizes.generation_batch_size
    per_rollout, mini = steps * passes, foreign.get("policy_mini_batch_size", foreign.get("ppo_mini_batch_size", 1))
    plural, in_passes = "" if steps == passes == 1 else "s", f" ({passes} passes of {steps:g})" if passes > 1 else ""
    statement = f"Your old setup took {per_rollout:g} optimizer step{plural}{in_passes} per rollout of {rollout} completions"
    facts: dict[str, Any] = {
        "title": {"trl": "TRL"}.get(dialect, dialect), "statement": f"{statement}; so does this configuration", "sizes": sizes,
        "steps": steps, "micro_steps": sizes.micro_steps_per_rollout, "accumulation": sizes.gradient_accumulation_steps,
        "rest": sizes.micro_steps_per_rollout % sizes.gradient_accumulation_steps, "mini": mini,
        "mini_completions": mini * sizes.num_generations, "steps_of_mini": rollout / mini,
        "steps_of_mini_completions": rollout / (mini * sizes.num_generations),
        "max_steps": max_steps, "counts_steps": max_steps is not None and per_rollout != 1, "steps_per_rollout": per_rollout,
        "rollouts": (max_steps or 0) / per_rollout, "steps_of_rollouts": (max_steps or 0) * per_rollout,
    }  # fmt: skip
    for row in contents("explain")[dialect]:
        if isinstance(row, str) or facts[row["if"]]:
            yield (row if isinstance(row, str) else row["say"]).format_map(facts)


def length_there(dialect: str, cfg: Config, sizes: BatchSizes, rows: int | None) -> tuple[int | None, list[str]]:
    """Return the length of a run in the other system.

    Args:
        rows: Rows of the data set, if known.

    Returns:
        (optimizer steps, or None if they are counted as here; notes on differences).
    """
    are_whole_epochs = dialect in ("verl", "skyrl", "skyrl-doc") and cfg.data.dataset_drop_last
    difference = "What differs: prompts that dynamic_sample samples in addition shorten an epoch there, but not here."
    notes = [difference] if are_whole_epochs and cfg.grpo.dynamic_sample else []
    return None if rows is None else _steps_there(dialect, cfg.run, sizes, rows, are_whole_epochs), notes


def _steps_there(dialect: str, run: RunConfig, sizes: BatchSizes, rows: int, are_whole_epochs: bool) -> int | None:
    """Return the number of optimizer steps in the other system.

    Sources: RayPPOTrainer of verl and SkyRL, `get_num_rollout_per_epoch` of slime, `init_iters` and `cyclic_iter` of Megatron-SWIFT.
    `are_whole_epochs`: a run ends with its epochs even if max_steps is larger.
    """
    rollout, steps = sizes.num_rollout_prompts, int(sizes.steps_per_generation * sizes.num_iterations)
    epochs = run.num_train_epochs or 1
    if are_whole_epochs and run.max_steps is not None:
        return min(run.max_steps, int(epochs * (rows // rollout)) * steps)
    if dialect == "slime" and run.max_steps is None:
        return int(epochs * (rows // rollout)) * steps
    if dialect == "swift-megatron" and run.max_steps is None:
        unit = sizes.completions_per_micro_step  # prompts per unit of its sampler
        prompts = int(epochs * (rows // unit * unit))
        return min(prompts * sizes.num_generations // sizes.global_batch_size, prompts // rollout * steps + 1)
    return None
