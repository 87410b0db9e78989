"""Trainer and sampler side by side, operation by operation, for one sequence: what each makes of the same inputs.

One sequence goes through vLLM, and the output of every operation is kept. The same tokens go through the trainer, where every operation is
given what the sampler made of those before it. So a difference does not travel: what is found at an operation is its own doing, and the
first one that differs by more than rounding is where the two part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_grpo.analysis import traced, vllm_traced
from megatron_grpo.parallel import collectives
from megatron_grpo.policy.model import PolicyModel
from megatron_grpo.policy.passes import ModelScorer
from megatron_grpo.rollout.colocated import ColocatedEngine
from megatron_grpo.types import Sequence as Scored

# Root mean square of an operation's own difference, relative to that of its output. Correct ones stay below: 1e-6 by another order of sums,
# 5e-3 by other roundings to bfloat16 (docs/mismatch.md).
LIMITS = {"float32": 2e-6, "bfloat16": 8e-3}

ATTENTION = ("norm 1", "qkv", "q norm", "k norm", "rope q", "rope k", "attention", "o proj", "residual 1", "norm 2")
BLOCK = ("router", "experts", "gate up", "act", "down", "residual 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation's own difference, over the ranks of both sides. cause: why, of the first that is over; empty where it is not known.

    difference: root mean square, relative to that of the sampler's output (of `log-prob`: of the logits, or its own).
    largest: of one number, absolute. equal: share of numbers that are the same bits. ranks: tensor-parallel ranks whose shard differs by
    more than the limit.
    """

    name: str
    difference: float
    largest: float
    equal: float
    ranks: tuple[int, ...] = ()
    cause: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.ranks)

    @property
    def in_words(self) -> str:
        """ "layer 2, q norm"."""
        layer, _, operation = self.name.partition(" ")
        return f"layer {layer[1:]}, {operation}" if layer[:1] == "L" and layer[1:].isdecimal() else self.name


def order(num_layers: int) -> list[str]:
    """Names of all operations there may be, in the order of computation."""
    layers = [f"L{layer} {name}" for layer in range(num_layers) for name in (*ATTENTION, *BLOCK)]
    return ["embedding", *layers, "final norm", "logits", "log-prob"]


def sequence_of(tokens: Sequence[int], opening: int) -> Scored:
    """All tokens behind the opening are scored."""
    token_ids = np.asarray(tokens, dtype=np.int64)
    return Scored(token_ids=token_ids, mask=np.arange(len(token_ids)) >= opening)


Score = Callable[[Sequence[Scored]], list[np.ndarray]]  # log-probs of the masked tokens, at the sampling temperature

# What one sequence alone cannot show, by name.
RECORDED = "log-probs as drawn"
CACHED = "prefix cache"
PACKED = "trainer beside others"
ASIDE = {  # the sentence about each
    RECORDED: "The sampler drew this row with other log-probs than it gives now: other weights, or what was sampled beside it.",
    CACHED: "The prefix cache: through it the sampler answers otherwise than without; it holds keys and values of other weights.",
    PACKED: "The trainer scores this row otherwise beside others than alone: rows of a micro-batch see each other.",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRow:
    """One completion, as it was drawn and as it was scored among others. T tokens; log-probs are 0 where nothing was drawn."""

    tokens: np.ndarray  # int64 [T]
    drawn: np.ndarray  # bool [T]
    sampler: np.ndarray  # float32 [T]
    trainer: np.ndarray  # float32 [T]

    @classmethod
    def unscored(cls, tokens: np.ndarray, logprobs: np.ndarray) -> ComparedRow:
        """logprobs: the sampler's, NaN where it drew nothing."""
        drawn, nothing = ~np.isnan(logprobs), np.zeros(len(tokens), dtype=np.float32)
        return cls(tokens=tokens, drawn=drawn, sampler=np.nan_to_num(logprobs), trainer=nothing)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: self.opening].tolist())

    @property
    def opening(self) -> int:
        """Tokens before the first that was drawn."""
        return int(np.argmax(self.drawn))

    @property
    def differences(self) -> np.ndarray:
        """Trainer less sampler, of the drawn tokens, in nats."""
        return self.trainer[self.drawn].astype(np.float64) - self.sampler[self.drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A sampler and a trainer that stand on the same ranks, with the same tensor parallelism. score: by the trainer."""

    engine: ColocatedEngine
    model: PolicyModel
    score: Score
    temperature: float
    limit: float


def alone(scorer: ModelScorer, temperature: float | None = None) -> Score:
    """Scores one sequence by itself. Where a micro-batch has several, a scorer fills it up with copies, which ranks then share."""
    cut = replace(scorer.cut, micro_batch_size=1, max_tokens=None)
    return partial(ModelScorer(scorer.model, scorer.parallel, cut, around=scorer.around).score, temperature=temperature)


def look_at(side: Side, row: ComparedRow) -> list[Operation]:
    """Every operation that both have, in the order of computation; then what one sequence alone cannot show. Collective.

    The prefix cache is used as it stands, so whatever filled it must have happened before.
    """
    tokens, opening = row.tokens.tolist(), row.opening
    cached = np.array(vllm_traced.force(side.engine, tokens, opening, temperature=side.temperature))
    (scored,) = side.score([sequence_of(tokens, opening)])
    operations, fresh, size = _compared(side, tokens, opening)
    drawn = row.drawn[opening:]
    aside = [
        (RECORDED, row.sampler[opening:][drawn], cached[drawn]),
        (CACHED, cached, fresh),
        (PACKED, row.trainer[opening:][drawn], scored[opening:][drawn]),
    ]
    return [*operations, *(_aside(name, a, b, size, side.limit) for name, a, b in aside)]


def _compared(side: Side, tokens: Sequence[int], opening: int) -> tuple[list[Operation], np.ndarray, float]:
    """(operations, the sampler's log-probs without a cache, root mean square of its logits, or of these if larger)."""
    model = side.model
    theirs = vllm_traced.trace(side.engine, tokens, opening, temperature=side.temperature)
    logits = theirs["logits"] = _logits_of_all(theirs.get("logits"), len(tokens) - opening)
    size = max(float(told.double().square().mean().sqrt()) for told in (logits, theirs["log-prob"]))  # both round; either may be near 0
    fresh = theirs["log-prob"][:, 0].numpy()
    scored: list[np.ndarray] = []
    forced = {name: rows for name, rows in theirs.items() if name not in ("logits", "log-prob")}
    ours = traced.trace(model, lambda: scored.extend(side.score([sequence_of(tokens, opening)])), forced=forced)
    ours["log-prob"] = traced.OwnRows(0, torch.from_numpy(scored[0][opening:])[:, None])
    start = model.output_layer.vocab_start
    theirs["logits"] = logits[:, start : start + ours["logits"].rows.shape[1]]
    names = [name for name in order(len(model.decoder.layers)) if name in ours and name in theirs]
    mine = {name: _part(ours[name], theirs[name], size if name == "log-prob" else None) for name in names}
    everyone: list[Mapping[str, np.ndarray]] = collectives.all_gather_object(mine)
    operations = [_joined(name, [part[name] for part in everyone], side.limit) for name in names]
    if (first := first_over(operations)) is not None:
        causes = collectives.all_gather_object(cause_of(first.name, side.engine, model))
        cause = next((causes[rank] for rank in first.ranks if causes[rank]), "")
        operations = [replace(one, cause=cause) if one is first else one for one in operations]
    return operations, fresh, size


def _aside(name: str, a: np.ndarray, b: np.ndarray, size: float, limit: float) -> Operation:
    """Log-probs of whole models, so the median counts, with ten times the room: a router may flip at a tie, and change a few of them."""
    differences = np.abs(a.astype(np.float64) - b)
    middle = collectives.all_reduce_max(float(np.median(differences)) / max(size, 1e-30))  # ranks may differ in the last bit
    ranks = () if middle <= 10 * limit else tuple(range(collectives.num_ranks()))
    return Operation(name=name, difference=middle, largest=float(differences.max()), equal=float((a == b).mean()), ranks=ranks)


def first_over(operations: Sequence[Operation]) -> Operation | None:
    """Where trainer and sampler part."""
    return next((one for one in operations if one.is_over), None)


def _part(own: traced.OwnRows, theirs: torch.Tensor, size: float | None) -> np.ndarray:
    """Of this rank: sums of squares of the differences and of the sampler's numbers, the largest difference, how many are equal, how many
    there are. size: of a number that the difference is measured by; None for the root mean square of the sampler's."""
    b = theirs[own.start : own.start + len(own.rows)]  # the sampler never computes the last token
    a = own.rows[: len(b), : b.shape[1]].to(b.dtype)  # a trainer's head may have rows that are no words
    difference, num = (a.double() - b.double()).abs(), b.numel()
    squares, whole = float(difference.square().sum()), float(b.double().square().sum()) if size is None else size**2 * num
    return np.array([squares, whole, float(difference.max()) if num else 0.0, int((a == b).sum()), num])


def _joined(name: str, parts: Sequence[np.ndarray], limit: float) -> Operation:
    squares, sizes, largest, equal, num = np.array(parts).T
    over = np.flatnonzero(~(_relative(squares, sizes) <= limit))  # NaN is over
    return Operation(
        name=name,
        difference=float(_relative(squares.sum(), sizes.sum())),
        largest=float(largest.max()),
        equal=float(equal.sum() / max(num.sum(), 1)),
        ranks=tuple(over.tolist()),
    )


def _relative(squares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Root mean square of a difference, by that of what it is measured by; where that is 0, by 1."""
    return np.sqrt(squares / np.where(sizes == 0, 1.0, sizes))


def _logits_of_all(mine: torch.Tensor | None, num: int) -> torch.Tensor:
    """vLLM may give them to the first rank of an engine alone."""
    found: list[Any] = collectives.all_gather_object(None if mine is None else mine[-num:].numpy())
    return torch.from_numpy(next(one for one in found if one is not None))


# ---- why an operation differs: other weights or settings for it, or another computation with the same ones -----------------------------

_ROWS = 1024  # of the identity at one time
_LINEAR = {"qkv": ("linear_qkv", "qkv_proj"), "o proj": ("linear_proj", "o_proj"), "gate up": ("linear_fc1", "gate_up_proj"),
           "down": ("linear_fc2", "down_proj"), "router": ("router", "gate")}  # fmt: skip
_NORMS = {"norm 1": ("input_layernorm", "input_layernorm"), "norm 2": ("pre_mlp_layernorm", "post_attention_layernorm"),
          "q norm": ("q_layernorm", "q_norm"), "k norm": ("k_layernorm", "k_norm")}  # fmt: skip
SAME = "its weights are the same, so what it does with them differs"


@torch.no_grad()
def cause_of(name: str, engine: ColocatedEngine, model: PolicyModel) -> str:
    """The end of a sentence about this rank's shard of an operation; empty where nothing is known."""
    sampler = vllm_traced.model_runner(engine).get_model()
    layer, _, kind = name.partition(" ")
    if name == "embedding":
        return _weights(model.embedding.word_embeddings.weight, sampler.model.embed_tokens.weight)
    if name == "logits":
        head = model.output_layer
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else head.weight
        return _weights(weight[: head.num_valid_rows], _read_by_kernel(sampler.lm_head, weight.shape[1])) or _of_logits(sampler)
    if name == "final norm":
        return _norm(model.decoder.final_layernorm, sampler.model.norm)
    if not layer[1:].isdecimal():
        return ""
    ours, theirs = model.decoder.layers[int(layer[1:])], sampler.model.layers[int(layer[1:])]
    if kind in _NORMS:
        mine, its = _NORMS[kind]
        inside = kind in ("q norm", "k norm")
        return _norm(getattr(ours.self_attention if inside else ours, mine), getattr(theirs.self_attn if inside else theirs, its))
    if kind in _LINEAR:
        (mine, its_name), of_attention = _LINEAR[kind], kind in ("qkv", "o proj")
        linear = getattr(ours.self_attention if of_attention else ours.mlp, mine)
        its = getattr(theirs.self_attn if of_attention else vllm_traced.block_of(theirs), its_name)
        weight = linear.merged() if hasattr(linear, "lora_a") else linear.weight
        bias = getattr(linear, "bias", None)
        if kind == "qkv":
            weight, bias = (_in_their_order(x, model) for x in (weight, bias))
        return _weights(weight, _read_by_kernel(its, weight.shape[1])) or _biases(bias, getattr(its, "bias", None)) or SAME
    if kind == "attention":
        return _of_attention(ours.self_attention.core_attention, theirs.self_attn.attn.impl)
    return ""


def _weights(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Whichever side has padding has it behind."""
    rows = min(len(ours), len(theirs))
    a, b = ours[:rows].double(), theirs[:rows].double()
    difference, size = float((a - b).square().mean().sqrt()), float(b.square().mean().sqrt())
    return f"its weights differ, by {difference / max(size, 1e-30):.2g} of their size" if difference else ""


def _biases(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else f"only the {'trainer' if theirs is None else 'sampler'} has a bias"
    return "its biases differ" if not torch.equal(ours, theirs.to(ours.dtype)) else ""


def _norm(ours: Any, theirs: Any) -> str:
    if found := _weights(ours.weight[None], theirs.weight[None]):
        return found
    mine, its = getattr(ours, "eps", None), getattr(theirs, "variance_epsilon", None)
    return f"its epsilon is {mine:g} in the trainer and {its:g} in the sampler" if None not in (mine, its) and mine != its else SAME


def _of_attention(ours: Any, theirs: Any) -> str:
    window = getattr(theirs, "sliding_window", None)
    if isinstance(window, tuple):
        window = window[0]
    if window is not None and window >= 0 and ours.window is None:
        return f"the sampler's sees the last {window} tokens alone"
    scale = ours.softmax_scale
    if scale is not None and abs(scale - theirs.scale) > 1e-6 * theirs.scale:
        return f"its scale is {scale:g} in the trainer and {theirs.scale:g} in the sampler"
    return ""


def _of_logits(sampler: Any) -> str:
    found = sampler.logits_processor
    if found.soft_cap is not None:
        return f"the sampler caps logits at {found.soft_cap:g}"
    return f"the sampler multiplies logits by {found.scale:g}" if found.scale != 1 else SAME


def _in_their_order(x: torch.Tensor | None, model: PolicyModel) -> torch.Tensor | None:
    """Rows of the fused projection, group by group -> all queries, all keys, all values."""
    if x is None:
        return None
    cfg, tp = model.config, model.pg_collection.tp.size()
    groups, each = cfg.num_query_groups // tp, cfg.num_attention_heads // cfg.num_query_groups
    q, k, v = x.view(groups, each + 2, cfg.kv_channels, *x.shape[1:]).split([each, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in (q, k, v)])


def _read_by_kernel(linear: Any, channels: int) -> torch.Tensor:
    """[rows, channels]: the weight that vLLM's kernel multiplies with, which may be a packed copy of the one that the module shows."""
    like = next(iter(linear.parameters()))
    found = []
    for first in range(0, channels, _ROWS):
        some = torch.eye(channels, dtype=like.dtype, device=like.device)[first : first + _ROWS]
        found.append(linear.quant_method.apply(linear, some, bias=None))
    return torch.cat(found).t()
