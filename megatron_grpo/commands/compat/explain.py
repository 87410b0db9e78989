"""Notes for users of another system: what is the same under the native names, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.run.config.settings import Config, RunConfig

_SWIFT_ARGS = (
    "It rounds a run of epochs down to optimizer steps, and ends it with the first step of a rollout that they do not fill: this is done \
here if the number of rows is known (num_prompts). What differs: rows of an epoch that do not fill micro_batch_size x dp_size are dropped \
there, and used here."
)

_STEPS_RULE = (
    "Its guide requires steps_per_generation ({w}) to be a multiple of gradient_accumulation_steps ({a}). Neither its code nor this \
package does: rollouts straddle optimizer steps, and rows that are stale get a forward-only pass."
)


def explain(dialect: str, foreign: Mapping[str, int], sizes: BatchSizes, max_steps: int | None = None) -> Iterator[str]:
    """Yield notes on what is the same under the native names and what differs.

    Args:
        max_steps: Optimizer steps; None if not given.
    """
    steps, a = sizes.steps_per_generation, sizes.gradient_accumulation_steps
    times = (
        f"{steps:g} optimizer step{'' if steps == 1 else 's'}"
        if sizes.num_iterations == 1
        else f"{steps * sizes.num_iterations:g} optimizer steps ({sizes.num_iterations} passes of {steps:g})"
    )
    statement = f"Your old setup took {times} per rollout of {sizes.generation_batch_size} completions; so does this configuration"
    if dialect in ("trl", "ms-swift"):
        w, title = sizes.micro_steps_per_rollout, {"trl": "TRL"}.get(dialect, dialect)
        yield (
            f"{statement}. {title} counts steps_per_generation in micro-steps: {w} micro-steps / gradient_accumulation_steps {a} = "
            f"{steps:g}, "
            "which is steps_per_generation here."
        )
        if dialect == "ms-swift" and w % a:
            yield _STEPS_RULE.format(w=w, a=a)
        yield (
            f"What differs from {title}: it shuffles samples after generation, so the group of a prompt is spread over several steps; here "
            "groups stay together."
        )
    elif dialect in ("skyrl", "skyrl-doc"):
        mini, n, rollout = foreign["policy_mini_batch_size"], sizes.num_generations, sizes.generation_batch_size
        readings = {"skyrl": ("prompts, as SkyRL's code does", mini * n), "skyrl-doc": ("completions, as SkyRL's guide says", mini)}
        unit, size = readings[dialect]
        other_how, other_size = readings["skyrl-doc" if dialect == "skyrl" else "skyrl"]
        yield (
            f"{statement}. policy_mini_batch_size ({mini}) is read in {unit}: {size} completions an optimizer step, with "
            f"gradient_accumulation_steps {a}. Read in {other_how}, it would be {other_size} completions and {rollout / other_size:g} "
            "optimizer steps "
            "per rollout."
        )
    elif dialect == "verl":
        mini, n = foreign["ppo_mini_batch_size"], sizes.num_generations
        yield (
            f"{statement}. verl counts ppo_mini_batch_size ({mini}) in prompts, and its workers multiply it by rollout.n: {mini} x {n} = "
            f"{sizes.global_batch_size} completions an optimizer step, with gradient_accumulation_steps {a}. One step of its trainer is "
            "one rollout."
        )
        yield (
            "What differs from verl: it computes old log-probs of every rollout in a separate pass; here only of rows that are stale when "
            "they are first trained."
        )
    elif dialect == "slime":
        yield (
            f"{statement}. slime counts global_batch_size in samples, as here, and rollout_batch_size in prompts: "
            f"{sizes.num_rollout_prompts} x "
            f"{sizes.num_generations} = {sizes.generation_batch_size} completions. One step of num_rollout is one rollout; an epoch has as "
            "many rollouts as its rows fill, here too if their number is known (num_prompts)."
        )
    elif dialect == "swift-megatron":
        yield f"{statement}: names and meanings of the sizes are Megatron-SWIFT's. {_SWIFT_ARGS}"
    elif dialect == "cs336":
        yield f"{statement}. train_batch_size is global_batch_size, and n_grpo_steps is max_steps, counted in optimizer steps."
        per_rollout = steps * sizes.num_iterations
        if max_steps is not None and per_rollout != 1:
            yield (
                f"n_grpo_steps ({max_steps}) counts optimizer steps here. With {per_rollout:g} optimizer steps per rollout this is "
                f"{max_steps / per_rollout:g} rollouts; for {max_steps} rollouts use max_steps {max_steps * per_rollout:g}."
            )


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
