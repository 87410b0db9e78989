"""Compare the log-probs of trainer and sampler in one process, and count those that are equal bit for bit.

Used by `tests/distributed/test_bitwise_parity.py` and `tools/bitwise_parity.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity_cases import CP, EP, ETP, PP, SP, TP, VPP, Case, build, join, make_batch, settings

VOCAB = 125
_COMMON = dict(layers=4, vocab=VOCAB, std=0.1)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(family="qwen3", hidden=128, **_COMMON),
    "qwen3 tied": dict(family="qwen3", hidden=128, tied=True, **_COMMON),
    "qwen2": dict(family="qwen2", **_COMMON),
    "llama": dict(family="llama", hidden=128, **_COMMON),
    "mistral": dict(family="mistral", hidden=128, **_COMMON),
    "qwen3_moe": dict(family="qwen3_moe", **_COMMON),
    "mixtral": dict(family="mixtral", **_COMMON),
    # Sums over 512 and 2,560 numbers: from there on matrix libraries cut them, and one row is another kernel than two.
    "wide": dict(family="qwen3", **_COMMON | dict(hidden=512, ffn=2560, layers=2)),
    "eight heads": dict(family="qwen3", hidden=128, heads=8, kv_heads=4, **_COMMON),  # for four tensor-parallel ranks
}
WITH_EXPERTS = ("qwen3_moe", "mixtral")
LAYOUTS = {
    "1": Case(1, {}), "DP2": Case(2, {}), "PP2": Case(2, {PP: 2}), "PP2 VPP2": Case(2, {PP: 2, VPP: 2}), "CP2": Case(2, {CP: 2}),
    "CP4": Case(4, {CP: 4}), "TP2": Case(2, {TP: 2}), "TP2 SP": Case(2, {TP: 2, SP: True}), "TP4": Case(4, {TP: 4}),
    "TP4 SP": Case(4, {TP: 4, SP: True}), "TP2 SP PP2": Case(4, {TP: 2, SP: True, PP: 2}),
    "TP2 SP CP2": Case(4, {TP: 2, SP: True, CP: 2}), "TP2 SP DP2": Case(4, {TP: 2, SP: True}),
    "EP2": Case(2, {EP: 2}, True), "TP2 ETP1": Case(2, {TP: 2, SP: True}, True), "TP2 ETP2": Case(2, {TP: 2, SP: True, ETP: 2}, True),
    "TP2 EP2 ETP1": Case(2, {TP: 2, SP: True, EP: 2}, True), "DP2 ETP2": Case(2, {ETP: 2}, True), "CP2 EP2": Case(2, {CP: 2, EP: 2}, True),
    "PP2 EP2": Case(4, {PP: 2, EP: 2}, True),
}  # fmt: skip


DTYPES = ("float32", "bfloat16")
COMPARED = ("packed", "alone", "prompts", "training")  # see `compare`


def is_supported(model: str, layout: str, dtype: str = "float32") -> bool:
    """Return whether a model can run in a layout.

    Models with experts need sequence parallelism under tensor parallelism; "eight heads" is for four ranks. bfloat16 is exact on one rank
    only, and a bias in bfloat16 is rejected.
    """
    case = LAYOUTS[layout]
    if dtype == "bfloat16" and (model == "qwen2" or layout != "1"):
        return False
    if case.settings.get(TP) == 4:
        return model == "eight heads"
    if model in WITH_EXPERTS:
        return TP not in case.settings or SP in case.settings
    return not case.needs_experts and (model != "eight heads" or layout == "1")


def write(path: Path, model: str, dtype: str = "float32") -> Path:
    from tests.tiny_models import write_tiny

    return write_tiny(path, dtype=dtype, **MODELS[model])


def read_cpu_features() -> str:
    """Return the instruction sets of this processor by which kernels of trainer and sampler are chosen."""
    import torch

    has = {"AVX2": torch.cpu._is_avx2_supported(), "AVX-512": torch.cpu._is_avx512_supported(),
           "AVX-512 BF16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}  # fmt: skip
    return ", ".join(name for name, is_there in has.items() if is_there) or "none of AVX2, AVX-512 and AMX"


@dataclasses.dataclass(frozen=True)
class EqualLogprobs:
    """Number of equal log-probs of all compared ones, and the largest difference of the others in nats."""

    equal: int = 0
    total: int = 0
    worst: float = 0.0

    @classmethod
    def from_logprobs(cls, ours, theirs) -> EqualLogprobs:
        one, other = (
            np.concatenate([np.asarray(row, dtype=np.float32) for row in rows] or [np.zeros(0, np.float32)]) for rows in (ours, theirs)
        )
        return cls(int((one.view(np.int32) == other.view(np.int32)).sum()), len(one), float(np.abs(one - other).max(initial=0.0)))

    def __add__(self, other: EqualLogprobs) -> EqualLogprobs:
        return EqualLogprobs(self.equal + other.equal, self.total + other.total, max(self.worst, other.worst))

    @property
    def is_exact(self) -> bool:
        return self.total > 0 and self.equal == self.total

    def __str__(self) -> str:
        return f"{self.equal} of {self.total}" + ("" if self.is_exact else f", worst {self.worst:.1e}")


def prompts(count: int = 8, *, longest: int = 60, vocab: int = VOCAB, seed: int = 0) -> list:
    from megatron_grpo.core.types import Prompt

    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [
        Prompt(number=i, row=i, raw="", token_ids=tuple(map(int, rng.integers(4, vocab, n))), columns={}) for i, n in enumerate(lengths)
    ]


@dataclasses.dataclass
class PolicyAndEngine:
    """A policy and an engine on the same ranks."""

    policy: Any
    engine: Any
    temperature: float

    @classmethod
    def build(cls, rank: int, world: int, path, *, max_model_len: int = 128, parallel=None, **chosen: Any) -> PolicyAndEngine:
        """Build both. Pass `parallel` of `join` if several pairs share a process."""
        from megatron_grpo.commands.analysis import vllm_bitwise_parity
        from megatron_grpo.core.rollout.colocated import ColocatedEngine

        base = dict(temperature=0.8, micro_batch_size=2, lr=3e-3, adam_eps=1e-8, bitwise_parity=True, vllm_kv_cache_memory_mb=16)
        cfg = settings(**base | dict(vllm_tensor_parallel_size=chosen.get(TP, 1)) | chosen)
        policy = build(path, cfg, world, parallel or join(cfg, world))
        engine = ColocatedEngine.build(cfg.rollout, model_path=path, dtype=cfg.model.torch_dtype, max_model_len=max_model_len, seed=0,
                                       rank=rank, world_size=world, patch=vllm_bitwise_parity.prepare)  # fmt: skip
        return cls(policy, engine, cfg.rollout.temperature)

    def sample(self, asked, length: int = 24, seed: int = 0) -> list:
        """Return one completion per prompt, in prompt order, on each rank."""
        from megatron_grpo.core.parallel import collectives
        from megatron_grpo.core.rollout.engine import SamplingSettings

        sampling = SamplingSettings(n=1, max_completion_length=length, temperature=self.temperature)
        mine = {group.prompt.number: group.completions[0] for group in self.engine.generate(asked, sampling, seed=seed)}
        found = {number: one for part in collectives.all_gather_object(mine) for number, one in part.items()}
        return [found[prompt.number] for prompt in asked]

    def agreement(self, completions) -> EqualLogprobs:
        """Compare the trainer's scores with the log-probs of sampled completions."""
        scores = self.policy.scorer.score([one.sequence for one in completions])
        return EqualLogprobs.from_logprobs(
            [score[one.sequence.mask] for score, one in zip(scores, completions, strict=True)],
            list(map(read_sampled_logprobs, completions)),
        )

    def step(self, completions, step: int) -> EqualLogprobs:
        """Take an optimizer step and sync the weights; compare the log-probs of its forward with the sampled ones."""
        rows = [_row(i, step, one) for i, one in enumerate(completions)]
        trained = self.policy.train_step(make_batch(self.policy, rows, step))
        assert trained.skipped is None and trained.metrics["grad_norm"] > 0
        keys = sorted(trained.logprobs)
        ours, theirs = [trained.logprobs[key] for key in keys], [read_sampled_logprobs(completions[row]) for _, row in keys]
        for update in self.policy.updates(step + 1, has_base=True):
            self.engine.load_weights(update)
        return EqualLogprobs.from_logprobs(ours, theirs)


def sum_counts_over_ranks(found: Sequence[Mapping[str, EqualLogprobs]]) -> dict[str, EqualLogprobs]:
    return {name: sum((one[name] for one in found), EqualLogprobs()) for name in COMPARED}


def read_sampled_logprobs(completion) -> np.ndarray:
    return completion.logprobs[completion.sequence.mask]


def _row(place: int, step: int, completion):
    from megatron_grpo.core.types import Sample

    mask = completion.sequence.mask
    advantage = float(np.mean(completion.sequence.token_ids[mask] % 2) - 0.4)
    return Sample(
        row=place, rollout=step, prompt_number=place, version=step, on_policy_version=step,
        token_ids=completion.sequence.token_ids, mask=mask,
        sampler_logprobs=np.where(mask, completion.logprobs, 0).astype(np.float32), advantage=advantage,
        is_zero_std=False, is_truncated=False,
    )  # fmt: skip


def compare(
    rank: int, world: int, path, *, steps: int = 1, count: int = 8, length: int = 24, longest: int = 60, vocab: int = VOCAB,
    **chosen: Any,
) -> Mapping[str, EqualLogprobs]:  # fmt: skip
    """Return all comparisons on this rank over `steps` optimizer steps, with a weight sync after each.

    packed: the trainer's scores of sampled tokens against the sampler's log-probs. alone: the same for three sequences, scored one at a
    time. prompts: scores of all tokens at temperature 1, trainer against sampler. training: log-probs of the training forward against the
    sampler's, on ranks of the last stage. `chosen` are settings.
    """
    from megatron_grpo.core.rollout.probes import make_sequence

    pair = PolicyAndEngine.build(rank, world, path, max_model_len=longest + length, **chosen)
    asked, found = prompts(count, longest=longest, vocab=vocab), dict.fromkeys(COMPARED, EqualLogprobs())
    for step in range(steps):
        completions = pair.sample(asked, length, seed=step)
        found["packed"] += pair.agreement(completions)
        for one in completions[:3]:
            found["alone"] += pair.agreement([one])
        texts = [make_sequence(one.sequence.token_ids) for one in completions]
        ours, theirs = pair.policy.scorer.score(texts, temperature=1.0), pair.engine.score(texts)
        found["prompts"] += EqualLogprobs.from_logprobs([row[1:] for row in ours], theirs)
        found["training"] += pair.step(completions, step)
    pair.engine.close()
    return found
