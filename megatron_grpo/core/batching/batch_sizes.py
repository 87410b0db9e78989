"""Validated batch sizes: how a rollout divides into optimizer steps, micro-steps and DP ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_grpo.core.batching.sizes import (
    CP,
    EP,
    ETP,
    PP,
    SIZES,
    STEPS,
    TP,
    VPP,
    WORLD,
    SizeInputs,
    SizeModel,
    derive,
    inputs_of,
)
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.settings import Config

# Tokens per stream that a pass without a backward packs up to, if training's micro-batches are smaller. On a CPU 64 rows of 71 tokens
# took 0.56 s one at a time, 0.16 s in streams of 2,048, and no less in longer ones.
SCORED_TOKENS = 2048


def exact_quotient(top: int, bottom: int) -> int | float:
    """Return top / bottom, as an int if it is an integer.

    Args:
        top: Numerator.
        bottom: Denominator, at least 1.
    """
    return top // bottom if top % bottom == 0 else top / bottom


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Every size of docs/batching.md section 1. Counted in completions unless a name says prompts, steps or ranks.

    Args:
        old_logprobs: Source of old log-probs, as in the settings; or "always": every slice that will be trained stale gets a forward-only
            pass.
        async_rollout_depth: Sampling steps that sampling runs ahead.
        partial_rollouts: Whether completions are interrupted at weight syncs and continue with the new weights.
        has_servers: Whether partial rollouts are sampled while the trainer trains.
    """

    layout: Layout
    micro_batch_size: int = 1
    global_batch_size: int
    generation_batch_size: int
    num_generations: int
    num_iterations: int = 1
    old_logprobs: str = "auto"
    async_rollout_depth: int = 0
    partial_rollouts: bool = False
    has_servers: bool = False

    @classmethod
    def from_config(cls, cfg: Config, model: SizeModel) -> BatchSizes:
        """Derive the sizes of a configuration that violates no rule: `run.config.rules.batch_sizes.checked_sizes` checks them.

        Args:
            cfg: The configuration.
            model: All that is known of the model.
        """
        # R2 replays the routing of the old log-prob pass.
        old_logprobs = "always" if cfg.grpo.router_replay_mode == "R2" else cfg.batch.old_logprobs
        inputs = inputs_of(cfg, model)
        sizes = cls.of(inputs, old_logprobs=old_logprobs, async_rollout_depth=cfg.rollout.async_rollout_depth)
        return replace(sizes, partial_rollouts=cfg.rollout.partial_rollouts, has_servers=cfg.rollout.vllm_mode == "server")

    @classmethod
    def of(cls, inputs: SizeInputs, *, old_logprobs: str = "auto", async_rollout_depth: int = 0) -> BatchSizes:
        """Derive the sizes from inputs that violate no rule.

        Args:
            inputs: The typed sizes.
            old_logprobs: As in `BatchSizes`.
            async_rollout_depth: Sampling steps that sampling runs ahead.
        """
        v, d = inputs.values, derive(inputs)
        return cls(
            layout=Layout(world_size=v[WORLD], tp=v[TP], pp=v[PP], vpp=v.get(VPP), cp=v[CP], ep=v[EP], etp=v[ETP]),
            micro_batch_size=d.micro.as_int(),
            global_batch_size=d.global_batch.as_int(),
            generation_batch_size=d.generation.as_int(),
            num_generations=d.group,
            num_iterations=d.passes,
            old_logprobs=old_logprobs,
            async_rollout_depth=async_rollout_depth,
        )

    @cached_property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.layout.dp_size

    @cached_property
    def completions_per_micro_step(self) -> int:
        """Completions of one micro-step, over all DP ranks."""
        return self.micro_batch_size * self.dp_size

    @cached_property
    def gradient_accumulation_steps(self) -> int:
        """A: micro-steps in one optimizer step."""
        return self.global_batch_size // self.completions_per_micro_step

    @cached_property
    def micro_steps_per_rollout(self) -> int:
        """W: micro-steps in one pass over a rollout, which are also its slices."""
        return self.generation_batch_size // self.completions_per_micro_step

    @property
    def steps_per_generation(self) -> int | float:
        """Global batches in one rollout; a fraction only with allow_unaligned_generation."""
        return exact_quotient(self.generation_batch_size, self.global_batch_size)

    @property
    def num_rollout_prompts(self) -> int:
        """Prompts in one rollout."""
        return self.generation_batch_size // self.num_generations

    @property
    def num_train_prompts(self) -> int | float:
        """Prompts in one optimizer step; may be a fraction, since a group may straddle optimizer steps."""
        return exact_quotient(self.global_batch_size, self.num_generations)

    @property
    def num_prompts_per_dp_group(self) -> int | float:
        """Prompts in one optimizer step per DP rank; may be a fraction."""
        return exact_quotient(self.global_batch_size, self.num_generations * self.dp_size)

    @property
    def stream_sizes(self) -> dict[str, int | str]:
        """Sizes that decide which rows an optimizer step trains and where their old log-probs come from. Independent of the layout."""
        names = ("generation_batch_size", "global_batch_size", "num_generations", "num_iterations", "old_logprobs")
        return {name: getattr(self, name) for name in names}


def with_derived_sizes(cfg: Config, sizes: BatchSizes) -> Config:
    """Return the configuration with the derived sizes filled in, so that what a run records is complete and in native names.

    Args:
        cfg: The configuration.
        sizes: The sizes derived from it.
    """
    values = {name: getattr(sizes, name) for name in SIZES}
    if not isinstance(sizes.steps_per_generation, int):  # a fraction follows from the other sizes and could not be typed
        del values[STEPS]
    sources = {}
    for name, value in values.items():
        if name in cfg.origins and cfg.origins[name].text:
            sources[name] = f"derived from {cfg.origins[name].text}"
        elif cfg.origins or getattr(cfg.batch, name) != value:
            sources[name] = "derived from the other sizes"
    return cfg.with_values(values, sources=sources)


# ---- the nearest valid values ----
