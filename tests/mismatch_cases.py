"""Faults in a trainer or its sampler, and the operation that `mismatch` must name for each.

`tests/distributed/test_mismatch.py` runs some, `tools/mismatch_faults.py` all. The sampler begins with other weights than the trainer and
receives the trainer's with the run's own weight sync, so faults of a sync are covered too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parity_cases import ETP, SP, TP

MODELS: dict[str, dict[str, Any]] = {  # arguments of `write_tiny`
    "dense": dict(family="qwen3", layers=4, vocab=125, hidden=128, std=0.1),
    "tied": dict(family="qwen3", layers=3, vocab=125, tied=True, std=0.1),
    "biases": dict(family="qwen2", layers=3, vocab=125, std=0.1),
    "flat": dict(family="llama", layers=1, vocab=125, hidden=32, std=0.003),  # logits are almost 0, and every log-prob is near -5
    "llama": dict(family="llama", layers=3, vocab=125, hidden=128, std=0.1),
    "hybrid": dict(family="qwen3_5_text", layers=4, vocab=125, hidden=128, std=0.1),
    "MoE": dict(family="qwen3_moe", layers=3, vocab=125, std=0.1),
    "hybrid MoE": dict(family="qwen3_next", layers=4, vocab=125, hidden=128, std=0.1, moe_intermediate_size=64),
    "mixtral": dict(family="mixtral", layers=3, vocab=125, std=0.1),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}), "TP2": (2, {TP: 2}), "TP2 SP": (2, {TP: 2, SP: True}), "TP2 SP ETP2": (2, {TP: 2, SP: True, ETP: 2}),
}  # fmt: skip
LENGTHS = (3, 20, 41, 70, 90, 100)  # tokens of the prompts; a block of the prefix cache has 32
DRAWN = 24


@dataclass(kw_only=True, eq=False)
class TrainerAndSampler:
    """The trainer and the sampler of one rank, to which a fault is applied."""

    policy: Any
    engine: Any
    rank: int
    temperature: float = 1.0  # of the trainer

    @property
    def ours(self) -> Any:
        return self.policy.chunks[0]

    @property
    def layers(self) -> Any:
        return self.ours.decoder.layers

    @property
    def theirs(self) -> Any:
        from megatron_grpo.commands.analysis.vllm_traced import model_runner

        return model_runner(self.engine).get_model()


Hurt = Callable[[TrainerAndSampler], object]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    named: beginning of the finding's name; "" for none. when: applied "before" the sync, "after" it, or once rows are "drawn"; "late": rows
    are drawn before the sync.
    """

    what: str
    named: str
    hurt: Hurt
    model: str = "dense"
    layout: str = "1"
    when: str = "after"


def _change_weight(weight: Any, size: float) -> None:
    """Change a weight by this fraction of its size, with a fixed seed."""
    import torch

    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data.mul_(1 + size * noise.to(weight.dtype))


def _change_norms(bench: TrainerAndSampler, epsilon: float) -> None:
    for module in bench.ours.modules():
        if type(module).__name__ == "Norm":
            module.eps = epsilon


def _swap_halves(weight: Any) -> None:
    import torch

    first, second = weight.data.chunk(2)
    weight.data.copy_(torch.cat([second, first]))


def _swap_experts(bench: TrainerAndSampler) -> None:
    first, second = bench.layers[1].mlp.experts.local_experts[:2]
    kept = first.linear_fc1.weight.data.clone()
    first.linear_fc1.weight.data.copy_(second.linear_fc1.weight.data)
    second.linear_fc1.weight.data.copy_(kept)


def _words(bench: TrainerAndSampler) -> None:
    words = bench.ours.embedding.word_embeddings.weight.data
    words[4:64] = words[64:124].clone()


def _drop_causal_mask(bench: TrainerAndSampler) -> None:
    """Remove the causal mask of the trainer's layer 2."""
    import dataclasses

    core = bench.layers[2].self_attention.core_attention

    def hook(module: Any, inputs: Any, named: Any) -> Any:
        packed = named["packed_seq_params"]
        causal = dataclasses.replace(packed.causal, is_causal=False)
        return inputs, {**named, "packed_seq_params": dataclasses.replace(packed, causal=causal)}

    core.register_forward_pre_hook(hook, with_kwargs=True)


def _merge_rows(bench: TrainerAndSampler) -> None:
    """Make the trainer's layers treat all rows of a micro-batch as one."""
    import dataclasses

    from megatron_grpo.core.policy.packed_batch import EqualLengthRuns

    def hook(module: Any, inputs: Any, named: Any) -> Any:
        packed = named["packed_seq_params"]
        total = sum(run.num * run.num_queries for run in packed.causal.runs)
        causal = dataclasses.replace(packed.causal, runs=(EqualLengthRuns(1, total, total),))
        return inputs, {**named, "packed_seq_params": dataclasses.replace(packed, causal=causal)}

    for layer in bench.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(hook, with_kwargs=True)


def _narrow_window(bench: TrainerAndSampler) -> None:
    """Limit the sampler's layer 1 to the last 16 tokens."""
    bench.theirs.model.layers[1].self_attn.attn.impl.sliding_window = 16


def _keep_kernel_copy(place: Callable[[TrainerAndSampler], Any]) -> Hurt:
    """Make a sync keep the old copy that the kernel of this layer reads."""

    def hurt(bench: TrainerAndSampler) -> None:
        take, layer = bench.engine.load_weights, place(bench)
        before = layer.cpu_linear

        def take_but_one(update: Any) -> None:
            take(update)
            layer.cpu_linear = before

        bench.engine.load_weights = take_but_one

    return hurt


def _loses_a_tensor(bench: TrainerAndSampler) -> None:
    """Make a sync leave out one tensor without an error."""
    load = bench.engine._weights.load
    lost = "model.layers.1.post_attention_layernorm.weight"

    def without(worker: Any, named: Any, **more: Any) -> list[str]:
        return [name for name in load(worker, ((name, x) for name, x in named if name != lost), **more) if name != lost]

    bench.engine._weights.load = without


def _change_key_scale(bench: TrainerAndSampler) -> None:
    bench.theirs.model.layers[0].self_attn.attn.impl.scale *= 1.05


def _interleave_rotary(bench: TrainerAndSampler) -> None:
    for layer in bench.theirs.model.layers:
        layer.self_attn.rotary_emb.is_neox_style = False


def _use_gelu(bench: TrainerAndSampler) -> None:
    import torch
    import torch.nn.functional as F

    def gelu(x: Any, *rest: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate) * up

    block = bench.theirs.model.layers[1].mlp
    block.act_fn._forward_method = gelu
    assert torch.is_tensor(block.act_fn(torch.ones(2, 4)))


def _apply_on_rank_1(hurt: Hurt) -> Hurt:
    """Apply a fault on rank 1 only."""
    return lambda bench: hurt(bench) if bench.rank == 1 else None


def fault(what: str, named: str, hurt: Hurt, **more: str) -> Fault:
    return Fault(what=what, named=named, hurt=hurt, **more)


FAULTS = (
    # what the trainer computes
    fault("rope: frequencies 3 % lower", "L0 rope", lambda b: b.ours.inverse_frequencies[0].mul_(0.97)),
    fault("rope: a factor of 2 ignored", "L0 rope", lambda b: b.ours.inverse_frequencies[0].div_(2)),
    fault("rope: channels in pairs, not in halves (sampler)", "L0 rope", _interleave_rotary),
    fault("epsilon of all norms 1e-3", "L0 norm 1", lambda b: _change_norms(b, 1e-3)),
    fault("epsilon of all norms 1e-5 for 1e-6", "L0 norm 1", lambda b: _change_norms(b, 1e-5)),
    fault("q norm of layer 2 without its weight", "L2 q norm", lambda b: b.layers[2].self_attention.q_layernorm.weight.data.fill_(1)),
    fault("softmax scale of layer 1", "L1 attention", lambda b: setattr(b.layers[1].self_attention.core_attention, "softmax_scale", 0.125)),
    fault("softmax scale of layer 0, 5 % (sampler)", "L0 attention", _change_key_scale),
    fault("wrong mask: layer 2 sees what follows", "L2 attention", _drop_causal_mask),
    fault("wrong mask: rows of a micro-batch see each other", "trainer in a batch", _merge_rows, when="drawn"),
    fault("sliding window of 16 in layer 1 (sampler)", "L1 attention", _narrow_window),
    fault("gelu in place of silu in layer 1 (sampler)", "L1 act", _use_gelu),
    fault("softcap of 30 on the logits (sampler)", "logits", lambda b: setattr(b.theirs.logits_processor, "soft_cap", 30.0)),
    fault("temperature 0.9 on one side", "log-prob", lambda b: setattr(b, "temperature", 0.9)),
    fault("padding of the vocabulary in the softmax", "log-prob", lambda b: setattr(b.ours.output_layer, "num_valid_rows", 128)),
    # weights
    fault("60 embeddings exchanged", "embedding", _words),
    fault("kv groups of layer 0 exchanged", "L0 qkv", lambda b: _swap_halves(b.layers[0].self_attention.linear_qkv.weight)),
    fault("gate and up of layer 1 exchanged", "L1 gate up", lambda b: _swap_halves(b.layers[1].mlp.linear_fc1.weight)),
    fault("down of layer 3 stale by 2 %", "L3 down", lambda b: _change_weight(b.layers[3].mlp.linear_fc2.weight, 0.02)),
    fault("o of layer 1 stale by 0.01 %", "L1 o proj", lambda b: _change_weight(b.layers[1].self_attention.linear_proj.weight, 1e-4)),
    fault(
        "norm of layer 1, 5 % (sampler)", "L1 norm 2", lambda b: b.theirs.model.layers[1].post_attention_layernorm.weight.data.mul_(1.05)
    ),
    fault("head stale by 2 %", "logits", lambda b: _change_weight(b.ours.output_layer.weight, 0.02)),
    fault("biases of q, k, v of layer 1 lost", "L1 qkv", lambda b: b.layers[1].self_attention.linear_qkv.bias.data.zero_(), model="biases"),
    # pushes and caches
    fault("stale prefix cache after a push", "prefix cache", lambda b: setattr(b.engine, "_forget_prefixes", lambda: None), when="before"),
    fault(
        "packed copy of layer 2's down kept by a push",
        "L2 down",
        _keep_kernel_copy(lambda b: b.theirs.model.layers[2].mlp.down_proj),
        when="before",
    ),
    fault(
        "packed copy of a tied head kept by a push", "logits", _keep_kernel_copy(lambda b: b.theirs.lm_head), when="before", model="tied"
    ),
    fault("norm of layer 1 left out of a push", "L1 norm 2", _loses_a_tensor, when="before"),
    fault("rows drawn by the weights before", "log-probs when sampled", lambda b: None, when="late"),
    # experts
    fault("rows of layer 1's router exchanged", "L1 router", lambda b: _swap_halves(b.layers[1].mlp.router.weight), model="MoE"),
    fault("two experts of layer 1 exchanged", "L1 experts", _swap_experts, model="MoE"),
    fault("one expert in place of two in layer 0", "L0 experts", lambda b: setattr(b.layers[0].mlp.router, "topk", 1), model="MoE"),
    fault(
        "an expert of layer 2 stale by 2 %",
        "L2 experts",
        lambda b: _change_weight(b.layers[2].mlp.experts.local_experts[0].linear_fc2.weight, 0.02),
        model="mixtral",
    ),
    # the gated delta rule
    fault("decay of layer 1, 1 %", "L1 delta rule", lambda b: b.layers[1].self_attention.A_log.data.mul_(1.01), model="hybrid"),
    fault(
        "out of layer 2 stale by 1 %",
        "L2 o proj",
        lambda b: _change_weight(b.layers[2].self_attention.out_proj.weight, 0.01),
        model="hybrid",
    ),
    fault(
        "TP2 SP: in of layer 1 stale on rank 1",
        "L1 delta rule",
        lambda b: _change_weight(b.layers[1].self_attention.in_proj.weight, 0.05) if b.rank == 1 else None,
        model="hybrid",
        layout="TP2 SP",
    ),
    fault("decay of layer 2, 1 %", "L2 delta rule", lambda b: b.layers[2].self_attention.A_log.data.mul_(1.01), model="hybrid MoE"),
    fault("gates of layer 3", "L3 qkv", lambda b: _swap_halves(b.layers[3].self_attention.linear_qkv.weight), model="hybrid"),
    # tensor parallelism
    fault(
        "TP2: o of layer 1 stale on rank 1",
        "L1 o proj",
        _apply_on_rank_1(lambda b: _change_weight(b.layers[1].self_attention.linear_proj.weight, 0.02)),
        layout="TP2",
    ),
    fault(
        "TP2 SP: qkv of layer 2 stale on rank 1",
        "L2 qkv",
        _apply_on_rank_1(lambda b: _change_weight(b.layers[2].self_attention.linear_qkv.weight, 0.02)),
        layout="TP2 SP",
    ),
    fault(
        "TP2: down of layer 0 is not summed (sampler)",
        "L0 down",
        lambda b: setattr(b.theirs.model.layers[0].mlp.down_proj, "reduce_results", False),
        layout="TP2",
    ),
    fault(
        "TP2 SP: router of layer 1 apart on rank 1",
        "L1 router",
        _apply_on_rank_1(lambda b: _change_weight(b.layers[1].mlp.router.weight, 0.02)),
        model="MoE",
        layout="TP2 SP ETP2",
    ),
)

CLEAN = tuple(
    Fault(what=f"nothing: {model}, {layout}", named="", hurt=lambda b: None, model=model, layout=layout)
    for model in MODELS
    for layout in LAYOUTS
    if (layout == "1") or (layout == "TP2 SP ETP2") == (model in ("MoE", "hybrid MoE", "mixtral"))
)


def make_bench(paths: Sequence[str | Path], layout: str, rank: int, *, dtype: str = "float32", parallel: Any = None) -> TrainerAndSampler:
    """Build trainer and sampler.

    paths: models of the sampler's start and of the trainer. parallel: from `parity_cases.join`. Collective.
    """
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.settings import RolloutConfig
    from tests.parity_cases import build, settings

    world, sizes = LAYOUTS[layout]
    cfg = settings(temperature=1.0, micro_batch_size=len(LENGTHS), torch_dtype=dtype, **sizes)
    policy = build(paths[1], cfg, world, parallel)
    rollout = RolloutConfig(vllm_kv_cache_memory_mb=64, vllm_tensor_parallel_size=world)
    engine = ColocatedEngine.build(rollout, model_path=paths[0], dtype=dtype, max_model_len=256, seed=0, rank=rank, world_size=world)
    return TrainerAndSampler(policy=policy, engine=engine, rank=rank)


def find_worst_row(bench: TrainerAndSampler, fault: Fault, *, seed: int = 0, dtype: str = "float32") -> Any:
    """Return (the worst row, its finding). Collective."""
    import random

    import numpy as np

    from megatron_grpo.commands.analysis.operations import (
        LIMITS,
        ComparedRow,
        compare_operations,
        make_sequence,
        one_per_micro_batch,
    )
    from megatron_grpo.core.parallel import collectives
    from megatron_grpo.core.rollout.engine import SamplingSettings
    from megatron_grpo.core.trainer.weight_sync import WeightSyncManager
    from megatron_grpo.core.types import Prompt

    engine, policy, draw = bench.engine, bench.policy, random.Random(seed)
    asked = [
        Prompt(number=i, row=i, raw="", token_ids=tuple(draw.randrange(4, 125) for _ in range(length)), columns={})
        for i, length in enumerate(LENGTHS)
    ]

    def drawn(length: int) -> list[Any]:
        groups = engine.generate(asked, SamplingSettings(n=1, max_completion_length=length), seed=seed)
        return [found for part in collectives.all_gather_object(groups) for found in part]

    def push() -> None:
        WeightSyncManager(policy, engine, verify=False, starts_as_checkpoint=False).sync_weights(1)

    drawn(1)  # fills the prefix cache
    if fault.when == "before":
        fault.hurt(bench)
    groups = drawn(DRAWN) if fault.when == "late" else None
    push()
    if fault.when == "after":
        fault.hurt(bench)
    groups = groups or drawn(DRAWN)
    if fault.when == "drawn":
        fault.hurt(bench)

    def score(sequences: Any) -> list[np.ndarray]:
        return policy.scorer.score(sequences, temperature=bench.temperature)

    completions = [group.completions[0] for group in sorted(groups, key=lambda group: group.prompt.number)]
    scored = score([make_sequence(one.sequence.token_ids, int(np.argmax(one.sequence.mask))) for one in completions])
    rows = [
        ComparedRow(tokens=one.sequence.token_ids, is_sampled=one.sequence.mask, sampler=one.logprobs, trainer=trainer)
        for one, trainer in zip(completions, scored, strict=True)
    ]
    worst = max(rows, key=lambda row: float(np.abs(row.differences).max()))
    by_itself = one_per_micro_batch(policy.scorer, bench.temperature)
    return worst, compare_operations(engine, bench.ours, by_itself, worst, temperature=1.0, limit=LIMITS[dtype])


def find_mismatches(
    rank: int, world: int, paths: Sequence[str | Path], places: Sequence[int], dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Return the findings of these of FAULTS + CLEAN, which share model and layout. For `run_ranks`."""
    from megatron_grpo.commands.analysis.operations import first_difference
    from tests.parity_cases import join, settings

    found, parallel = [], None
    for one in [(FAULTS + CLEAN)[place] for place in places]:
        parallel = parallel or join(settings(**LAYOUTS[one.layout][1]), world)
        bench = make_bench(paths, one.layout, rank, dtype=dtype, parallel=parallel)
        row, operations = find_worst_row(bench, one, dtype=dtype)
        bench.engine.close()
        over = [operation.name for operation in operations if operation.is_over]
        first = first_difference(operations)
        found.append({
            "named": over[0] if over else "", "over": over, "difference": first.difference if first else 0.0,
            "ranks": first.ranks if first else (), "cause": first.cause if first else "", "nats": float(abs(row.differences).max()),
            "largest": max((operation.difference, operation.name) for operation in operations if not operation.is_over),
        })  # fmt: skip
    return found


def is_right(one: Fault, found: dict[str, Any]) -> bool:
    return found["named"].startswith(one.named) if one.named else not found["named"]


def random_model(seed: int) -> dict[str, Any]:
    """Return random arguments of `write_tiny`: a family, sizes and the spread of the weights."""
    import random

    draw = random.Random(seed)
    family = draw.choice(("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral"))
    kv_heads, per_group = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    hidden = draw.choice((96, 192) if per_group == 3 else (64, 96, 128, 256))  # transformers wants a multiple of the heads
    return dict(
        family=family, layers=draw.randint(1, 4), vocab=125, hidden=hidden, kv_heads=kv_heads,
        heads=kv_heads * per_group, head_dim=draw.choice((32, 64)), ffn=draw.choice((64, 128, 192)),
        tied=draw.random() < 0.3, std=draw.choice((0.02, 0.05, 0.1, 0.2)), seed=seed,
    )  # fmt: skip


def find_random_mismatches(rank: int, world: int, paths: Sequence[str | Path], seed: int, dtype: str) -> list[dict[str, Any]]:
    """Return the findings of random models without a fault, in one process. For `run_ranks`."""
    from tests.parity_cases import join, settings

    parallel, found = join(settings(), world), []
    nothing = Fault(what="nothing", named="", hurt=lambda bench: None)
    for number, path in enumerate(paths):
        bench = make_bench([path, path], "1", rank, dtype=dtype, parallel=parallel)
        row, operations = find_worst_row(bench, nothing, seed=seed + number, dtype=dtype)
        bench.engine.close()
        over = [operation.name for operation in operations if operation.is_over]
        largest = max((operation.difference, operation.name) for operation in operations)
        found.append({"over": over, "largest": largest, "nats": float(abs(row.differences).max())})
    return found
