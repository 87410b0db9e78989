"""Whether the policy makes room for the sampler (`--offload_model`, `--offload_optimizer`), and what would make a run fit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.base.errors import ConfigError
from megatron_grpo.config.config import Config
from megatron_grpo.planning.check import Checked, check_parsed
from megatron_grpo.planning.parameters import Static

LINK = 50e9  # bytes a second between a GPU and its host, in each direction: PCIe 5.0 x16
UNCOUNTED = 6e9  # bytes that `auto` leaves for what no estimate counts: CUDA context, NCCL buffers, CUDA graphs, fragmentation
MOST_WAYS = 3  # that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What leaves the device while the sampler works. model: weights, gradients, the reference. optimizer: masters and moments."""

    model: bool
    optimizer: bool
    why: str = ""

    def copied(self, static: Static) -> int:
        """Bytes of a rank that go to the host and come back. Gradients do not: they come back as zeros."""
        model = static.weights_bytes + static.adapters_bytes + static.reference_bytes
        return model * self.model + static.optimizer_bytes * self.optimizer

    def freed(self, static: Static, *, during_push: bool = False) -> int:
        """Bytes of a rank that the sampler can have. during_push: the policy's weights stay, for they are pushed."""
        kept = (static.weights_bytes + static.adapters_bytes) * self.model if during_push else 0
        return self.copied(static) - kept + static.gradients_bytes * self.model


def decide(cfg: Config, peak: Callable[[Offload], int], gpu: int | None) -> Offload:
    """peak: bytes of the fullest rank in its fullest phase. gpu: bytes of a GPU, None where that is not known.

    `auto` is on where the run does not fit otherwise, UNCOUNTED included: the optimizer first, which no push needs.
    """
    model, optimizer = cfg.rollout.offload_model, cfg.rollout.offload_optimizer
    ways = [
        Offload(model=on_model, optimizer=on_optimizer)
        for on_model in (False, True)
        for on_optimizer in (False, True)
        if model in ("auto", _word(on_model)) and optimizer in ("auto", _word(on_optimizer))
    ]
    first = ways[0]
    if cfg.rollout.vllm_mode != "colocate":
        return Offload(model=False, optimizer=False, why="the sampler has memory of its own")
    if len(ways) == 1:
        return replace(first, why="as it is set")
    if gpu is None:
        return replace(first, why="auto asks the GPU how much memory it has; gpu_memory_gb says it here")
    peaks = {way: peak(way) for way in ways}
    chosen = next((way for way in ways if peaks[way] + UNCOUNTED <= gpu), None) or min(ways, key=lambda way: peaks[way])
    verdict = "" if peaks[chosen] + UNCOUNTED <= gpu else ", which do not fit whatever is given away"
    needed = (
        f"{peaks[first] / 1e9:.1f} GB" if chosen is first else f"{peaks[first] / 1e9:.1f} GB without it, {peaks[chosen] / 1e9:.1f} with it"
    )
    return replace(chosen, why=f"of {gpu / 1e9:g} GB: {needed}, and {UNCOUNTED / 1e9:g} that are not counted{verdict}")


def _word(value: Any) -> str:
    return str(value).lower()


# ---- what would fit --------------------------------------------------------------------------------------------------------------------

Estimate = Callable[[Checked], dict[str, Any]]  # the `memory` object of `plan --json`


def ways_to_fit(checked: Checked, estimate: Estimate) -> list[dict[str, Any]]:
    """A few changes of settings with which the run fits, the cheapest first: {"settings", "peak_bytes", "peak_phase"} of each."""
    found: list[dict[str, Any]] = []
    for changes in _changes(checked):
        # What contains a change that is enough says nothing new, and neither does another value of the same settings.
        if any(set(way["settings"]) <= set(changes) for way in found):
            continue
        try:
            changed = check_parsed(replace(checked.parsed, config=checked.parsed.config.with_values(changes)))
        except ConfigError:  # not a layout of this model, or not with these sizes
            continue
        memory = estimate(changed)
        if memory["fits"]:
            found.append({"settings": changes, "peak_bytes": memory["peak_bytes"], "peak_phase": memory["peak_phase"]})
        if len(found) == MOST_WAYS:
            break
    return found


def _changes(checked: Checked) -> Iterator[dict[str, Any]]:
    cfg, layout, shape = checked.config, checked.sizes.layout, checked.shape
    room: dict[str, Any] = {}
    away = {"offload_teacher_model": True} if cfg.grpo.teacher_model and not cfg.grpo.offload_teacher_model else {}
    others: list[dict[str, Any]] = []
    if cfg.rollout.vllm_mode == "colocate":
        room = {"sleep_level": 1} if cfg.rollout.sleep_level == 0 else {}
        room |= {name: "true" for name in ("offload_optimizer", "offload_model") if getattr(cfg.rollout, name) == "false"}
        share = round(cfg.rollout.vllm_gpu_memory_utilization * 10)  # a larger one where its KV cache is too small
        others = [{"vllm_gpu_memory_utilization": tenth / 10} for tenth in (*range(share - 1, 1, -1), share + 1) if tenth < 10]
    room |= away
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


def in_words(way: dict[str, Any]) -> str:
    said = ", ".join(f"{name} {_word(value)}" for name, value in way["settings"].items())
    return f"{said}: the peak would be {way['peak_bytes'] / 1e9:.1f} GB ({way['peak_phase'].replace('_', ' ')})"
