"""One optimizer step from a stored rollout: the package on real ranks, against transformers in float64 in one process.

Used by `tests/distributed/test_*parity*.py`, `tests/gpu` and `tools/parity.py`. A stored rollout is numpy arrays drawn from a seed: tokens,
old log-probs near the model's own, advantages. Nothing here reads the clock or samples.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.core.settings import OptimizerConfig
from megatron_grpo.core.types import Sample
from megatron_grpo.core.weights.trainable_parameters import parameter_trains, trains
from megatron_grpo.core.weights.vision_towers import find_part
from megatron_grpo.run.config.settings import Config

# Groups as a rollout has them: (tokens of the prompt, tokens of each completion of it). Completions of 1 and 2 tokens, a prompt of 1, and
# lengths that no layout divides. The completions of a group share the context of their first token, so its entropy too.
Groups = Sequence[tuple[int, Sequence[int]]]
GROUPS: Groups = ((3, (5, 1)), (1, (2, 12)), (7, (2, 9)), (11, (1, 3)))
NUM_ROWS = 8
CHUNK = 4  # tokens that the gated delta rule computes at once: the rows above have up to four chunks


TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP, SP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, or another way to run the same step: number of ranks and settings."""

    world_size: int
    settings: dict[str, Any]
    needs_experts: bool = False


# For models of four layers. The names are the rows of docs/parity.md.
LAYOUTS = {
    "1": Case(1, {}),
    "TP2": Case(2, {TP: 2}),
    "TP2 SP": Case(2, {TP: 2, SP: True}),
    "PP2": Case(2, {PP: 2}),
    "PP2 uneven": Case(2, {PP: 2, FIRST: 1, LAST: 3}),
    "PP2 VPP2": Case(2, {PP: 2, VPP: 2}),
    "CP2": Case(2, {CP: 2}),
    "CP3": Case(3, {CP: 3}),
    "DP2": Case(2, {}),
    "TP4 SP": Case(4, {TP: 4, SP: True}),
    "PP4": Case(4, {PP: 4}),
    "CP4": Case(4, {CP: 4}),
    "DP4": Case(4, {}),
    "TP2 SP PP2": Case(4, {TP: 2, SP: True, PP: 2}),
    "TP2 SP PP2 VPP2": Case(4, {TP: 2, SP: True, PP: 2, VPP: 2}),
    "TP2 CP2": Case(4, {TP: 2, CP: 2}),
    "TP2 SP CP2": Case(4, {TP: 2, SP: True, CP: 2}),
    "TP2 SP DP2": Case(4, {TP: 2, SP: True}),
    "PP2 CP2": Case(4, {PP: 2, CP: 2}),
    "PP2 VPP2 CP2": Case(4, {PP: 2, VPP: 2, CP: 2}),
    "PP2 DP2": Case(4, {PP: 2}),
    "PP2 VPP2 DP2": Case(4, {PP: 2, VPP: 2}),
    "CP2 DP2": Case(4, {CP: 2}),
    "TP2 ETP1": Case(2, {TP: 2, SP: True}, True),
    "TP2 ETP2": Case(2, {TP: 2, SP: True, ETP: 2}, True),
    "DP2 ETP2": Case(2, {ETP: 2}, True),
    "EP2": Case(2, {EP: 2}, True),
    "TP2 EP2 ETP1": Case(2, {TP: 2, SP: True, EP: 2}, True),
    "CP2 EP2": Case(2, {CP: 2, EP: 2}, True),
    "EP4": Case(4, {EP: 4}, True),
    "EP2 DP4": Case(4, {EP: 2}, True),
    "TP2 EP2 ETP2": Case(4, {TP: 2, SP: True, EP: 2, ETP: 2}, True),
    "TP2 EP2 ETP1 DP2": Case(4, {TP: 2, SP: True, EP: 2}, True),
    "PP2 EP2": Case(4, {PP: 2, EP: 2}, True),
    "PP2 VPP2 EP2": Case(4, {PP: 2, VPP: 2, EP: 2}, True),
}


# Normalisations and objectives: the columns of docs/parity.md.
LOSSES = {
    "grpo": {},
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, overlong_filter=True),
    "dr_grpo": dict(loss_type="dr_grpo", beta=0.1),
    "GSPO": dict(importance_sampling_level="sequence", epsilon=0.02, rollout_importance_sampling_mode="sequence_truncate",
                 rollout_is_geometric=True),
    "cispo": dict(loss_type="cispo", entropy_coef=0.01, beta=0.05, rollout_importance_sampling_mode="token_truncate"),
    # In the first step the lowest entropy that trains is that of a group's first token: its completions tie.
    "top entropy": dict(loss_type="dapo", top_entropy_quantile=0.8),
}  # fmt: skip
# Where rows are left out (tools/parity.py --only zero_gradient): advantage 0; that and truncated rows; advantage 0 at the level of
# sequences; truncated rows alone, because a KL and an entropy bonus look at advantage 0.
ZERO_GRADIENT_LOSSES = {
    "grpo": {},
    "dapo": dict(loss_type="dapo", epsilon_high=0.28, overlong_filter=True),
    "GSPO": LOSSES["GSPO"],
    "cispo, KL, entropy": LOSSES["cispo"] | dict(overlong_filter=True),
}
ZERO_GRADIENT_LAYOUTS = ("1", "TP2", "PP2", "PP2 VPP2", "CP2", "DP2", "EP2")
# Those that look at whole sequences or groups: `tools/parity.py --only sequences` takes them through every layout.
SEQUENCE_LOSSES = {
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", epsilon=0.02),
    "vespo": dict(loss_type="vespo", beta=0.05, rollout_importance_sampling_mode="token_truncate"),
    "fipo": dict(loss_type="fipo", epsilon_high=0.28, delta=4.0, fipo_decay_rate=4.0, fipo_clip_high_only=False),
    "real": dict(loss_type="real", beta=0.05),
}
# Each prompt once in each micro-batch, however little a group saves. Groups of 8 and 2; completions of 1 to 20 tokens; a prompt of one
# token, and one beyond the budget of 32; two groups of one prompt (`shared_rollout`).
SHARED = dict(share_prefix="true")
SHARED_GROUPS: Groups = ((3, (5, 1, 4, 8, 5, 2, 7, 9)), (40, (20, 1)), (1, (2, 12)), (7, (2, 9)), (7, (5, 3)))
SHARED_ROWS = 16
SHARED_CUTS = {
    "packed, 32": dict(max_tokens_per_micro_batch=32),
    "packed, 96": dict(max_tokens_per_micro_batch=96),
    "4 each": dict(micro_batch_size=4),
}
# How a global batch of eight completions becomes micro-batches.
CUTS = {
    "1 each": dict(micro_batch_size=1),
    "2 each": dict(micro_batch_size=2),
    "4 each": dict(micro_batch_size=4),
    "packed": dict(max_tokens_per_micro_batch=24),
}
# std: wide enough that distributions are not flat, narrow enough that float32 itself stays within 1e-5 of float64.
MODELS = {
    "dense": dict(family="qwen3", tied=True, layers=4, vocab=125, std=0.1),
    "biases": dict(family="qwen2", layers=4, vocab=125, heads=4, head_dim=16, std=0.1),
    "MoE": dict(family="qwen3_moe", layers=4, vocab=125, std=0.1),
    "MLA": dict(family="deepseek_v3", layers=4, vocab=125, std=0.1),
}
# Other families, for `tools/parity.py --models`; a few layouts of each are in tests/distributed/test_families.py.
FAMILIES = {
    "GLM": dict(family="glm4_moe", layers=4, vocab=125, std=0.1, attention_bias=True, use_qk_norm=True, head_dim=20),
    "GLM-4.7-Flash": dict(family="glm4_moe_lite", layers=4, vocab=125, std=0.1),
    "MiniMax-M2": dict(family="minimax_m2", layers=4, vocab=125, std=0.1),
    "Qwen2-MoE": dict(family="qwen2_moe", layers=4, vocab=125, std=0.1),
    "gpt-oss": dict(
        family="gpt_oss", layers=4, vocab=125, heads=8, kv_heads=4, head_dim=10, ffn=36, std=0.1, sliding_window=7, swiglu_limit=0.6
    ),
    "OLMo 2": dict(family="olmo2", layers=4, vocab=125, heads=12, kv_heads=4, head_dim=10, ffn=68, std=0.1, attention_bias=True),
    "OLMo": dict(family="olmo3", layers=4, vocab=125, heads=12, kv_heads=4, head_dim=10, ffn=68, std=0.1, sliding_window=7),
    "Qwen3-Next": dict(family="qwen3_next", layers=4, vocab=125, std=0.06),
    "Qwen3.5": dict(family="qwen3_5_text", layers=4, vocab=125, std=0.06),
    "Qwen3.5-MoE": dict(family="qwen3_5_moe_text", layers=4, vocab=125, std=0.06),
    "Gemma": dict(family="gemma3_text", layers=4, vocab=125, tied=True, head_dim=20, ffn=68, std=0.1, sliding_window=7),
}
WITH_EXPERTS = ("MoE", "MLA", "GLM", "GLM-4.7-Flash", "MiniMax-M2", "Qwen2-MoE", "gpt-oss", "Qwen3-Next", "Qwen3.5-MoE")
MODEL_SETTINGS = {"MoE": dict(moe_z_loss_coeff=0.02)}
# Other ways to run the same step, each on one layout.
WAYS = {
    "recompute full, uniform": ("TP2 SP", dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)),
    "recompute full, block": ("PP2 VPP2", dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)),
    "recompute selective": ("CP2", dict(recompute_granularity="selective")),
    "recompute selective, mlp": ("TP2 SP", dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])),
    "recompute selective, moe": ("EP2", dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])),
    "overlapped gradient reduction": ("DP2", dict(overlap_grad_reduce=True)),
    "overlapped gradients and parameters": ("PP2 VPP2 DP2", dict(overlap_grad_reduce=True, overlap_param_gather=True)),
    "overlapped gradients and parameters, experts": ("EP2", dict(overlap_grad_reduce=True, overlap_param_gather=True)),
    "optimizer not distributed": ("DP2", dict(use_distributed_optimizer=False)),
    "optimizer not distributed, experts": ("EP2", dict(use_distributed_optimizer=False)),
    "all-gather dispatcher, EP2": ("EP2", dict(moe_token_dispatcher_type="allgather")),
    "all-gather dispatcher, TP2 EP2": ("TP2 EP2 ETP1", dict(moe_token_dispatcher_type="allgather")),
}


def suits(layout: Case, model: str) -> bool:
    """Return whether a model can run in a layout: Megatron-Core trains experts under tensor parallelism only with sequence parallelism."""
    if model not in WITH_EXPERTS:
        return not layout.needs_experts
    return layout.settings.get(TP, 1) == 1 or SP in layout.settings


def is_legal(layout: Case, cut: Mapping[str, int], num_rows: int = NUM_ROWS) -> bool:
    """Return whether these sizes give whole micro-batches, equally many on each rank."""
    s = layout.settings
    dp = layout.world_size // (s.get(TP, 1) * s.get(PP, 1) * s.get(CP, 1))
    return num_rows % (cut.get("micro_batch_size", 1) * dp * (s[PP] if VPP in s else 1)) == 0


def compare(model: str, path: str | Path, layout: Case, runs: Mapping[Any, Mapping[str, Any]], batches, references) -> dict[Any, Distance]:
    """Run all settings on the same ranks, and return the worst rank's `Distance` of each from its reference.

    runs: settings by key. references: expected results by the same key.
    """
    from tests.ranks import run_ranks

    base = MODEL_SETTINGS.get(model, {}) | layout.settings

    def all_runs(rank, world):
        parallel = join(settings(**base), world)
        return {key: train(rank, world, path, settings(**base | run), batches, parallel=parallel) for key, run in runs.items()}

    by_rank = run_ranks(all_runs, layout.world_size, timeout=60 + 30 * len(runs))
    return {key: merge_worst([distance(found[key], references[key]) for found in by_rank]) for key in runs}


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of training.

    losses, grad_norms: one per optimizer step. gradients: of the first step, before clipping. weights: after the last step. Tensors are
    complete, under Hugging Face names.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def settings(**changes: Any) -> Config:
    """Return a float32 configuration with `changes` of any settings."""
    # Clipping always bites, so that a wrong norm shows. Adam divides a gradient by its own size: without an epsilon, elements whose
    # gradient is rounding noise would move as far as any other, in a random direction.
    base = dict(torch_dtype="float32", padded_vocab_multiple=4, lr=2e-3, weight_decay=0.1, clip_grad=0.5, adam_eps=1e-5, temperature=0.9,
                max_completion_length=16)  # fmt: skip
    return Config().with_values(base | changes)


def stored_rollout(
    path: str | Path,
    *,
    num_steps: int = 1,
    seed: int = 0,
    groups: Groups = GROUPS,
    vocab: int = 128,
    temperature: float = 0.9,
    stale: float = 0.5,
) -> list[list[Sample]]:
    """Return samples of `num_steps` global batches.

    `stale` is the fraction of rows with old log-probs; the others are on-policy. A third of the advantages is negative and smaller, because
    a loss whose terms cancel has a large relative error.
    """
    from tests.tiny_models import load_tiny

    model, rng = load_tiny(path), np.random.default_rng(seed)
    steps = []
    for step in range(num_steps):
        samples: list[Sample] = []
        for number, (length, completions) in enumerate(groups):
            prompt, first = rng.integers(0, vocab, length), len(samples)
            for completion in completions:
                is_stale, place = rng.random() < stale, (step, len(samples), number)
                samples.append(_sample(rng, model, place, prompt, rng.integers(0, vocab, completion), temperature, is_stale))
            samples[first:] = with_prefix(samples[first:])
        steps.append(samples)
    return steps


def shared_rollout(path: str | Path, *, num_steps: int = 1) -> list[list[Sample]]:
    """Return SHARED_GROUPS with two completions that begin alike, two equal ones, and two groups of one prompt."""
    steps = stored_rollout(path, num_steps=num_steps, vocab=125, groups=SHARED_GROUPS)
    for samples in steps:
        for longer, shorter in ((7, 3), (4, 0)):
            length = min(len(samples[longer].token_ids), len(samples[shorter].token_ids))
            samples[longer].token_ids[:length] = samples[shorter].token_ids[:length]
        for row in (14, 15):
            samples[row].token_ids[:7] = samples[12].token_ids[:7]
    return steps


def with_zero_std(steps: Sequence[Sequence[Sample]], *prompts: int) -> list[list[Sample]]:
    """Return the steps with equal rewards in the groups of these prompts."""
    return [
        [dataclasses.replace(one, advantage=0.0, is_zero_std=True) if one.prompt_number in prompts else one for one in step]
        for step in steps
    ]


def with_prefix(group: Sequence[Sample]) -> list[Sample]:
    """Return a group whose rows have their common prefix, like those of a rollout."""
    from megatron_grpo.core.batching.prefix_groups import common_prefix, list_contexts

    prefix = common_prefix(group, list_contexts(group))
    return [dataclasses.replace(sample, prefix=prefix) for sample in group]


def _sample(rng, model, place: tuple[int, int, int], prompt, completion, temperature: float, is_stale: bool) -> Sample:
    """Return one sample; `place` is (step, row, prompt number)."""
    from tests.tiny_models import hf_logprobs

    step, row, prompt_number = place
    tokens = np.concatenate([prompt, completion])
    prompt, completion = len(prompt), len(completion)
    mask = np.arange(len(tokens)) >= prompt
    if completion > 4:
        mask[prompt + 2] = False  # a token of a tool's answer
    near = np.zeros(len(tokens), dtype=np.float32)
    near[1:] = hf_logprobs(model, tokens.tolist(), temperature).numpy()
    near = np.where(mask, near, 0).astype(np.float32)

    def noise(scale):
        return np.where(mask, rng.normal(0, scale, len(tokens)), 0).astype(np.float32)

    advantage = float(rng.uniform(0.5, 1.5) * (-0.4 if row % 3 == 0 else 1.0))
    sample = Sample(
        row=row, rollout=step, prompt_number=prompt_number, version=step - is_stale, on_policy_version=step - is_stale,
        token_ids=tokens, mask=mask,
        sampler_logprobs=near + noise(0.1), advantage=advantage, is_zero_std=False, is_truncated=row == 3,
    )  # fmt: skip
    return sample.with_old_logprobs(near + noise(0.3), "recompute") if is_stale else sample


# ---- the package -------------------------------------------------------------------------------------------------------------------


def join(cfg: Config, world: int):
    """Initialize the process groups of `cfg`'s layout. Once per process."""
    from megatron_grpo.core.parallel.layout import Layout
    from megatron_grpo.core.parallel.state import start

    p = cfg.parallel
    sizes = {name: getattr(p, flag) for name, flag in dict(tp=TP, pp=PP, vpp=VPP, cp=CP, ep=EP, etp=ETP).items()}
    return start(Layout(world_size=world, **sizes), sequence_parallel=p.sequence_parallel)


def build(path: str | Path, cfg: Config, world: int, parallel=None):
    """Build the policy in `cfg`'s layout. Pass `parallel` of `join` if several policies share a process."""
    from megatron_grpo.core.policy import gated_delta_net
    from megatron_grpo.run.assemble.policy import build_policy

    gated_delta_net.CHUNK = CHUNK
    if cfg.rollout.bitwise_parity:
        from megatron_grpo.commands.analysis.bitwise_parity import switch_on

        switch_on()
    return build_policy(cfg, parallel or join(cfg, world), model_path=path, num_steps=100)


def find_step(samples: Sequence[Sample], index: int, rows_per_slice: int):
    """Return the schedule's step for one global batch of these samples, in order."""
    slices = [(first, first + rows_per_slice) for first in range(0, len(samples), rows_per_slice)]
    micro_steps = [SimpleNamespace(rollout=samples[first].rollout, rows=(first, end), on_policy_version=index) for first, end in slices]
    return SimpleNamespace(index=index, micro_steps=micro_steps, last_use=())


def train(rank: int, world: int, path: str | Path, cfg: Config, batches: Sequence[Sequence[Sample]], tamper=None, parallel=None) -> Trained:
    """Train with the package: split, train_step, named_weights. `tamper(policy)` applies a mutation first."""
    policy = build(path, cfg, world, parallel)
    if tamper is not None:
        tamper(policy)
    gradients: dict[str, np.ndarray] = {}
    take_step = policy.optimizer.step

    def remember_gradients():
        if not gradients:
            gradients.update(full_gradients(policy))
        return take_step()

    policy.optimizer.step = remember_gradients

    losses, norms = [], []
    for index, samples in enumerate(batches):
        metrics = policy.train_step(make_batch(policy, samples, index)).metrics
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
    named = policy.named_adapters() if policy.adapters else policy.named_weights()
    return Trained(losses, norms, gradients, {name: _numpy(tensor) for name, tensor in named})


def make_batch(policy, samples: Sequence[Sample], index: int):
    """Return this rank's part of one global batch of these samples, split like in the training loop."""
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

    pending = SampleBuffer(parallel=policy.parallel, cut=policy.cut, zero_gradient=policy.loss.zero_gradient)
    pending = pending.restored(samples if policy.parallel.is_rank_zero else [])
    step = find_step(samples, index, policy.cut.rows_per_slice)
    return pending.batch(step, token_weight_fn=policy.loss.token_weights)[1]


def score_tokens(policy, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return teacher-forced log-probs at temperature 1 of all tokens but the first."""
    from megatron_grpo.core.rollout.probes import make_sequence

    return [scored[1:] for scored in policy.scorer.score([make_sequence(tokens) for tokens in sequences], temperature=1.0)]


def full_gradients(policy) -> dict[str, np.ndarray]:
    """Return all gradients after the reductions of a step, under Hugging Face or PEFT names. Collective."""
    for chunk in policy.wrapped:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            if buffer.ddp_config.use_distributed_optimizer:
                _complete(buffer)
    parameters = (policy.adapters.exchange if policy.adapters else policy.exchange).tensors(policy.chunks)
    grads = {name: tensor.main_grad for name, tensor in parameters.items() if getattr(tensor, "main_grad", None) is not None}
    named = policy.adapters.trimmed(grads, "gradients") if policy.adapters else policy.exchange.stream(grads, "gradients")
    return {name: _numpy(tensor) for name, tensor in named}


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to("cpu", torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype, copy=True).numpy()


def _complete(buffer) -> None:
    """Gather each bucket's shards in place: a reduce-scatter leaves each rank only its own shard."""
    group = buffer.data_parallel_group
    size = dist.get_world_size(group)
    for bucket in buffer.buckets if size > 1 else []:
        shards = [shard.clone() for shard in bucket.grad_data.chunk(size)]
        dist.all_gather(shards, shards[dist.get_rank(group)].clone(), group=group)
        bucket.grad_data.copy_(torch.cat(shards))


def with_part_learning_rate(name: str, o: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer settings of a parameter, by its name: those of tower and aligner may have another learning rate."""
    given = {"vit": o.vit_lr, "aligner": o.aligner_lr}.get(find_part(name))
    return o if given is None else dataclasses.replace(o, lr=given, min_lr=min(o.min_lr, given))


def learning_rate(o: OptimizerConfig, step: int, num_steps: int | None) -> float:
    """Return the learning rate of an optimizer step: linear warm-up from 0, then constant, or linear or cosine decay to min_lr."""
    warmup = o.lr_warmup_iters if o.lr_warmup_fraction is None else round(o.lr_warmup_fraction * num_steps)
    if step < warmup:
        return o.lr * step / warmup
    if o.lr_decay_style == "constant":
        return o.lr
    passed = (step - warmup) / (num_steps - warmup)
    return o.min_lr + (o.lr - o.min_lr) * {"linear": 1 - passed, "cosine": (1 + math.cos(math.pi * passed)) / 2}[o.lr_decay_style]


# ---- transformers, in float64 ------------------------------------------------------------------------------------------------------


def reference(path: str | Path, cfg: Config, batches: Sequence[Sequence[Sample]] | Callable) -> Trained:
    """Train with transformers' model and the formulas in float64, one sequence at a time, with a hand-written AdamW.

    batches: the samples of each step, or a function of model and KL reference that yields them.
    """
    from tests.tiny_models import load_tiny

    if cfg.tuner.tuner_type == "lora":
        from tests.lora_cases import load_peft_model, write_initial_adapter

        model, named = load_peft_model(path, write_initial_adapter(cfg))
    else:
        model = load_tiny(path, "float64").train()
        named = dict(model.named_parameters())
    frozen = copy.deepcopy(model).requires_grad_(False) if cfg.grpo.beta else None
    if cfg.tuner.tuner_type == "full":
        rule = trains(cfg.tuner)
        for name, p in model.named_parameters():
            p.requires_grad_(parameter_trains(in_export_names({name: p.detach().numpy()}, path), rule))
    kept = {name: p for name, p in named.items() if not p.requires_grad}
    named = {name: p for name, p in named.items() if p.requires_grad}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in named.items()}
    o, losses, norms, first = cfg.optimizer, [], [], None
    for index, samples in enumerate(batches(model, frozen) if callable(batches) else batches):
        for p in named.values():
            p.grad = None
        with float32_means_float64(), _router_losses(model) as per_sequence:
            loss = _reference_loss(model, frozen, cfg, samples, index)
            z_loss = (cfg.model.moe_z_loss_coeff or 0.0) * sum(per_sequence) / sum(len(sample.token_ids) - 1 for sample in samples)
            (loss + z_loss).backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
        first = first or {name: grad.numpy().copy() for name, grad in grads.items()}
        norm = float(torch.sqrt(sum((g * g).sum() for g in grads.values())))
        t = index + 1
        scale = min(1.0, o.clip_grad / (norm + 1e-6)) if o.clip_grad else 1.0
        with torch.no_grad():
            for name, p in named.items():
                g, (m, v) = grads[name] * scale, moments[name]
                m.lerp_(g, 1 - o.adam_beta1)
                v.lerp_(g * g, 1 - o.adam_beta2)
                lr = learning_rate(with_part_learning_rate(name, o), index, cfg.run.max_steps)
                p.mul_(1 - lr * (o.weight_decay if p.dim() > 1 and not name.endswith("bias") else 0.0))
                p.sub_(lr * (m / (1 - o.adam_beta1**t)) / ((v / (1 - o.adam_beta2**t)).sqrt() + o.adam_eps))
            if cfg.grpo.sync_ref_model and t % cfg.grpo.ref_model_sync_steps == 0:
                for old, new in zip(frozen.parameters(), model.parameters(), strict=True):
                    old.copy_(cfg.grpo.ref_model_mixup_alpha * new + (1 - cfg.grpo.ref_model_mixup_alpha) * old)
        losses.append(loss.item())
        norms.append(norm)
    if cfg.tuner.tuner_type == "full":  # exported, not trained
        kept |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    weights = {name: tensor.detach().numpy() for name, tensor in (named | kept).items()}
    return Trained(losses, norms, in_export_names(first, path), in_export_names(weights, path))


class float32_means_float64:
    """Context in which transformers' explicit float32 casts (norms, softmax, routing, states) keep float64."""

    def __enter__(self):
        self.sampling_mask = torch.float32, torch.float
        torch.float32 = torch.float = torch.float64
        self.to_float, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double

    def __exit__(self, *error):
        torch.float32, torch.float = self.sampling_mask
        torch.Tensor.float = self.to_float


@contextlib.contextmanager
def _router_losses(model):
    """Return one entry per sequence and layer: the sum over its tokens, except the last, of logsumexp(router logits)^2."""
    found = []

    def remember(router, inputs, output):
        logits = torch.nn.functional.linear(inputs[0].reshape(-1, router.weight.shape[1]), router.weight)
        found.append(torch.logsumexp(logits[:-1], dim=-1).square().sum())

    hooks = [module.register_forward_hook(remember) for name, module in model.named_modules() if name.endswith("mlp.gate")]
    yield found
    for hook in hooks:
        hook.remove()


@contextlib.contextmanager
def forced_routes(model, experts: np.ndarray | None):
    """Route tokens of one sequence to these experts [T, MoE layers, k], weighted by the router's logits; -1: the router's own choice."""
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")] if experts is not None else []

    def route(gate, place: int, free):
        def forward(hidden):
            logits, _, own = free(hidden)
            given = torch.from_numpy(experts[:, place].astype(np.int64))
            chosen = torch.where(given[:, :1] < 0, own, given)
            config = model.config
            if hasattr(gate, "e_score_correction_bias"):
                weights, scale = logits.sigmoid().gather(1, chosen), config.routed_scaling_factor
            else:
                weights, scale = logits.softmax(dim=-1).gather(1, chosen), 1.0
            if getattr(config, "norm_topk_prob", True):
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights * scale, chosen

        return forward

    kept = [gate.forward for gate in gates]
    for place, gate in enumerate(gates):
        gate.forward = route(gate, place, gate.forward)
    try:
        yield
    finally:
        for gate, forward in zip(gates, kept, strict=True):
            gate.forward = forward


def with_routes(samples: Sequence[Sample], layers: int, *, experts: int = 4, k: int = 2, seed: int = 0, free: float = 0.1) -> list[Sample]:
    """Return the samples with random experts for each token and layer, or none (`free`: of 1). A group's common prefix has equal ones."""
    rng, found = np.random.default_rng(seed), []
    prompts: dict[int, np.ndarray] = {}
    for sample in samples:
        length = len(sample.token_ids)
        routes = rng.random((length, layers, experts)).argsort(axis=-1)[..., :k].astype(np.int16)
        routes[rng.random(length) < free] = -1
        routes[-1] = -1
        shared = prompts.setdefault(sample.prompt_number, routes[: sample.prefix])
        routes[: sample.prefix] = shared
        found.append(dataclasses.replace(sample, experts=routes))
    return found


def mask_logits(logits: torch.Tensor, sample: Sample, at: np.ndarray) -> torch.Tensor:
    """Return the logits [n, vocabulary] that predict the tokens `at`, with tokens outside the sampling mask far below all others."""
    if sample.mask_offsets is None:
        return logits
    left_out, places = torch.zeros(logits.shape, dtype=torch.bool), {token: place for place, token in enumerate(at.tolist())}
    for number, token in enumerate(np.flatnonzero(sample.mask)):
        if len(words := sample.mask_ids[sample.mask_offsets[number] : sample.mask_offsets[number + 1]]):
            left_out[places[token]] = True
            left_out[places[token], torch.from_numpy(words.astype(np.int64))] = False
    return logits.masked_fill(left_out, -1e9)


def with_kept(path: str | Path, samples: Sequence[Sample], *, vocab: int, temperature: float = 0.9, seed: int = 0) -> list[Sample]:
    """Return samples with a sampling mask of 1 to 12 random tokens including the sampled one, or of all tokens.

    The log-probs of the sampler and the old ones differ from the model's own as much as before.
    """
    from tests.tiny_models import load_tiny

    model, rng, found = load_tiny(path), np.random.default_rng(seed), []
    for sample in samples:
        at = np.flatnonzero(sample.mask)
        words = [
            np.unique([token, *rng.integers(0, vocab, rng.integers(0, 12))]) if rng.random() > 0.15 else np.zeros(0)
            for token in sample.token_ids[at]
        ]
        counts = [len(ids) for ids in words]
        sample = dataclasses.replace(
            sample, mask_offsets=np.cumsum([0, *counts]), mask_ids=np.concatenate([*words, []]).astype(np.int32)
        )  # fmt: skip
        with torch.no_grad():
            scaled = _logits(model, sample)[at - 1].double() / temperature
            change = (scaled.logsumexp(-1) - mask_logits(scaled, sample, at).logsumexp(-1)).numpy()
        shift = sample.scatter(change)
        own = {name: getattr(sample, name) + shift for name in ("sampler_logprobs", "old_logprobs") if hasattr(sample, name)}
        found.append(dataclasses.replace(sample, **own))
    return found


def _reference_loss(model, frozen, cfg: Config, samples: Sequence[Sample], index: int) -> torch.Tensor:
    from megatron_grpo_referee.reference import ReferenceCompletion, grpo_loss, token_logprobs

    completions = []
    for s in samples:
        first = np.isin(np.arange(len(s.token_ids)), s.starts)  # of a context: nothing predicts it
        at = np.flatnonzero((np.arange(len(s.token_ids)) >= np.argmax(s.mask)) & ~first)
        targets = torch.from_numpy(s.token_ids[at])
        with forced_routes(model, s.experts):
            logp, entropy = token_logprobs(mask_logits(_logits(model, s)[at - 1], s, at), targets, cfg.rollout.temperature)
        ref = torch.zeros_like(logp)
        if frozen is not None:
            with torch.no_grad():
                ref, _ = token_logprobs(mask_logits(_logits(frozen, s)[at - 1], s, at), targets, cfg.rollout.temperature)

        def double(array, at=at):
            return torch.from_numpy(array[at].astype(np.float64))

        completions.append(ReferenceCompletion(
            mask=double(s.mask), logp=logp, entropy=entropy, sampler_logp=double(s.sampler_logprobs), ref_logp=ref,
            old_logp=None if s.version == index else double(s.old_logprobs), advantage=s.advantage, is_truncated=s.is_truncated,
            is_zero_std=s.is_zero_std, group=s.prompt_number,
        ))  # fmt: skip
    return grpo_loss(completions, cfg.grpo, cfg.rollout.max_completion_length)


def _logits(model, sample: Sample) -> torch.Tensor:
    """Return logits [T, vocabulary]; each context is computed separately."""
    if hasattr(model.config, "vision_config"):
        from tests.vision_cases import compute_logits

        return compute_logits(model.get_base_model() if hasattr(model, "get_base_model") else model, sample)
    ids = torch.from_numpy(sample.token_ids)[None]
    return torch.cat([model(ids[:, begin:end], use_cache=False).logits[0] for begin, end in sample.contexts])


def in_export_names(tensors: Mapping[str, np.ndarray], path: str | Path) -> dict[str, np.ndarray]:
    """Return tensors under the names of files: transformers 5 holds a layer's experts in one tensor, the Hub one tensor per expert."""
    found, tower = {}, _family(path).tower
    for name, value in tensors.items():
        name = tower.on_the_hub(name) if tower else name
        if layout := _family(path).fused_experts:  # transposed in files; in memory too if they are interleaved
            found[name] = value.swapaxes(1, 2) if layout == "concatenated" and ".mlp.experts." in name else value
        elif name.endswith("mlp.experts.gate_up_proj"):
            gate, up, _ = _expert_names(path)
            for e, both in enumerate(value):
                found[_expert(name, path, e, gate)], found[_expert(name, path, e, up)] = np.split(both, 2)
        elif name.endswith("mlp.experts.down_proj"):
            for e, one in enumerate(value):
                found[_expert(name, path, e, _expert_names(path)[2])] = one
        elif name.endswith(("mlp.gate.weight", "mlp.e_score_correction_bias")):
            found[name.replace(".mlp.", f".{_block(path)}.")] = value
        else:
            found[name] = value
    return found


def _family(path):
    from megatron_grpo.core.weights.families import find_family
    from megatron_grpo.core.weights.shape import read_config

    return find_family(read_config(path))


def _expert_names(path):
    return _family(path).expert_names


def _block(path):
    return _family(path).moe_block


def _expert(name: str, path, number: int, part: str) -> str:
    return name.split(".mlp.")[0] + f".{_block(path)}.experts.{number}.{part}.weight"


# ---- the comparison ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Distance:
    """Worst relative errors of the loss, the gradient norm, any gradient tensor and any weight, each with its name."""

    loss: float
    grad_norm: float
    gradient: float
    weight: float
    worst_gradient: str
    worst_weight: str

    @classmethod
    def failed(cls) -> Distance:
        """Return the distance of a run that failed."""
        return cls(math.inf, math.inf, math.inf, math.inf, "", "")

    def within(self, loss: float = 1e-6, gradient: float = 1e-5, weight: float = 1e-5) -> bool:
        return self.loss <= loss and self.grad_norm <= gradient and self.gradient <= gradient and self.weight <= weight


def distance(found: Trained, right: Trained) -> Distance:
    """Return the errors of a run; of a tensor the norm of the difference over its norm. Raises if a tensor is missing."""
    gradient, worst_gradient = _worst(found.gradients, right.gradients)
    weight, worst_weight = _worst(found.weights, right.weights)
    loss = relative_error(found.losses[:1], right.losses[:1])
    grad_norm = relative_error(found.grad_norms[:1], right.grad_norms[:1])
    return Distance(loss, grad_norm, gradient, weight, worst_gradient, worst_weight)


def merge_worst(distances: Sequence[Distance]) -> Distance:
    gradient, weight = max(distances, key=lambda d: d.gradient), max(distances, key=lambda d: d.weight)
    loss, grad_norm = max(d.loss for d in distances), max(d.grad_norm for d in distances)
    return Distance(loss, grad_norm, gradient.gradient, weight.weight, gradient.worst_gradient, weight.worst_weight)


def relative_error(found, right) -> float:
    """Return the relative error of a vector or tensor by its norm; absolute if it should be 0."""
    found, right = np.asarray(found, dtype=np.float64), np.asarray(right, dtype=np.float64)
    size = np.linalg.norm(right)
    return float(np.linalg.norm(found - right) / size) if size else float(np.linalg.norm(found))


def _worst(found: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> tuple[float, str]:
    if set(found) != set(right):
        raise AssertionError(f"missing: {sorted(set(right) - set(found))[:4]}; too many: {sorted(set(found) - set(right))[:4]}")
    return max((relative_error(found[name], right[name]), name) for name in right)
