"""Compare trainer and sampler operation by operation on one sequence, each operation on the same inputs.

vLLM computes one sequence, and the output of every operation is recorded. The trainer computes the same tokens, and each of its operations
receives the sampler's outputs as inputs. Differences therefore do not propagate: the difference at an operation comes from that operation
alone, and the first one above rounding is where trainer and sampler diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_grpo.commands.analysis import traced, vllm_traced
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.model import PolicyModel
from megatron_grpo.core.policy.passes import ModelScorer
from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.types import TokenSequence

# Root mean square of an operation's difference, relative to that of its output. Correct operations stay below: 1e-6 by another order
# of summation, 5e-3 by other bfloat16 roundings (docs/mismatch.md).
LIMITS = {"float32": 2e-6, "bfloat16": 8e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Difference of one operation, over the ranks of both sides.

    Args:
        name: Name of the operation, as in `analysis.traced`.
        difference: Root mean square of the difference, relative to that of the sampler's output (for `log-prob`: of the logits, or of
            itself).
        largest: Maximum absolute difference of one number.
        equal: Fraction of numbers that are bitwise equal.
        ranks: Tensor-parallel ranks whose shard differs by more than the limit.
        cause: Reason, for the first operation above the limit; empty if unknown.
    """

    name: str
    difference: float
    largest: float
    equal: float
    ranks: tuple[int, ...] = ()
    cause: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the difference exceeds the limit on any rank."""
        return bool(self.ranks)

    @property
    def describe(self) -> str:
        """Name for people, for example "layer 2, q norm"."""
        layer, _, operation = self.name.partition(" ")
        return f"layer {layer[1:]}, {operation}" if layer[:1] == "L" and layer[1:].isdecimal() else self.name


def make_sequence(tokens: Sequence[int], opening: int) -> TokenSequence:
    """Return a sequence in which all tokens after the first `opening` ones are scored.

    Args:
        tokens: Token IDs.
        opening: Number of leading tokens that are not scored.
    """
    token_ids = np.asarray(tokens, dtype=np.int64)
    return TokenSequence(token_ids=token_ids, mask=np.arange(len(token_ids)) >= opening)


Score = Callable[[Sequence[TokenSequence]], list[np.ndarray]]  # returns log-probs of the masked tokens, at the sampling temperature

# Checks that need more than one sequence, by name.
RECORDED = "log-probs when sampled"
CACHED = "prefix cache"
PACKED = "trainer in a batch"
ASIDE = {  # message of each
    RECORDED: "The sampler's log-probs of this row were different when it sampled them: other weights, or other rows in the batch.",
    CACHED: "The prefix cache: log-probs differ with and without it; it holds keys and values of other weights.",
    PACKED: "The trainer's log-probs of this row depend on the other rows of its micro-batch: rows attend to each other.",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRow:
    """One completion with its log-probs when it was sampled, and when the trainer scored it among others.

    T is the number of tokens. Log-probs are 0 at tokens that were not sampled.

    Args:
        tokens: Token IDs of prompt and completion, int64 [T].
        is_sampled: Whether a token was sampled, bool [T].
        sampler: The sampler's log-probs, float32 [T].
        trainer: The trainer's log-probs, float32 [T].
    """

    tokens: np.ndarray
    is_sampled: np.ndarray
    sampler: np.ndarray
    trainer: np.ndarray

    @classmethod
    def unscored(cls, tokens: np.ndarray, logprobs: np.ndarray) -> ComparedRow:
        """Create a row that the trainer has not scored yet.

        Args:
            tokens: Token IDs, int64 [T].
            logprobs: The sampler's log-probs, float32 [T]; NaN at tokens that were not sampled.
        """
        is_sampled, zeros = ~np.isnan(logprobs), np.zeros(len(tokens), dtype=np.float32)
        return cls(tokens=tokens, is_sampled=is_sampled, sampler=np.nan_to_num(logprobs), trainer=zeros)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token IDs before the first sampled token."""
        return tuple(self.tokens[: self.opening].tolist())

    @property
    def opening(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(np.argmax(self.is_sampled))

    @property
    def differences(self) -> np.ndarray:
        """Trainer minus sampler log-probs of the sampled tokens in nats, float64."""
        return self.trainer[self.is_sampled].astype(np.float64) - self.sampler[self.is_sampled]


def one_per_micro_batch(scorer: ModelScorer, temperature: float | None = None) -> Score:
    """Return a function that scores each sequence in a micro-batch of one.

    Args:
        temperature: Temperature of the log-probs; None for that of the scorer.
    """
    cut = replace(scorer.cut, micro_batch_size=1, max_tokens=None)
    return partial(ModelScorer(scorer.model, scorer.parallel, cut, context=scorer.around).score, temperature=temperature)


def compare_operations(
    engine: ColocatedEngine, model: PolicyModel, score: Score, row: ComparedRow, *, temperature: float, limit: float
) -> list[Operation]:
    """Compare every operation that both sides have, then make the checks that need more than one sequence. Collective.

    Operations are in the order of computation. Sampler and trainer are on the same ranks, with the same tensor parallelism.

    The prefix cache is used in its current state, so the caller must have filled it before.

    Args:
        engine: The sampler.
        model: The trainer's model.
        score: Scores sequences with the trainer.
        temperature: Sampling temperature.
        limit: Limit of relative differences.
    """
    tokens, opening = row.tokens.tolist(), row.opening
    cached = np.array(vllm_traced.force(engine, tokens, opening, temperature=temperature))
    (scored,) = score([make_sequence(tokens, opening)])
    sampler = vllm_traced.trace(engine, tokens, opening, temperature=temperature)
    logits = sampler["logits"] = _logits_of_all(sampler.get("logits"), len(tokens) - opening)
    size = max(float(x.double().square().mean().sqrt()) for x in (logits, sampler["log-prob"]))  # both are rounded; one may be near 0
    forced_inputs = {name: rows for name, rows in sampler.items() if name not in ("logits", "log-prob")}
    forced: list[np.ndarray] = []
    trainer = traced.trace(model, lambda: forced.extend(score([make_sequence(tokens, opening)])), forced=forced_inputs)
    trainer["log-prob"] = traced.LocalOutputRows(0, torch.from_numpy(forced[0][opening:])[:, None])
    start = model.output_layer.vocab_start
    sampler["logits"] = logits[:, start : start + trainer["logits"].rows.shape[1]]
    names = [name for name in trainer if name in sampler]
    parts = {name: _part(trainer[name], sampler[name], size if name == "log-prob" else None) for name in names}
    parts_of_ranks: list[Mapping[str, np.ndarray]] = collectives.all_gather_object(parts)
    operations = [_join_parts(name, [part[name] for part in parts_of_ranks], limit) for name in names]
    if (first := first_difference(operations)) is not None:
        causes = collectives.all_gather_object(find_cause(first.name, engine, model))
        cause = next((causes[rank] for rank in first.ranks if causes[rank]), "")
        operations = [replace(op, cause=cause) if op is first else op for op in operations]
    is_sampled = row.is_sampled[opening:]
    comparisons = [
        (RECORDED, row.sampler[opening:][is_sampled], cached[is_sampled]),
        (CACHED, cached, sampler["log-prob"][:, 0].numpy()),
        (PACKED, row.trainer[opening:][is_sampled], scored[opening:][is_sampled]),
    ]
    return [*operations, *(_compare_logprobs(name, a, b, size, limit) for name, a, b in comparisons)]


def _compare_logprobs(name: str, a: np.ndarray, b: np.ndarray, size: float, limit: float) -> Operation:
    """Compare two lists of log-probs of the whole model.

    The median counts and its limit is ten times higher, because a router may choose otherwise at a tie and change a few log-probs.
    """
    differences = np.abs(a.astype(np.float64) - b)
    middle = collectives.all_reduce_max(float(np.median(differences)) / max(size, 1e-30))  # ranks may differ in the last bit
    ranks = () if middle <= 10 * limit else tuple(range(collectives.num_ranks()))
    return Operation(name=name, difference=middle, largest=float(differences.max()), equal=float((a == b).mean()), ranks=ranks)


def first_difference(operations: Sequence[Operation]) -> Operation | None:
    """Return the first operation at which trainer and sampler diverge; None if they do not.

    Args:
        operations: Operations in the order of computation.
    """
    return next((op for op in operations if op.is_over), None)


def _part(own_rows: traced.LocalOutputRows, sampler: torch.Tensor, size: float | None) -> np.ndarray:
    """Return the statistics of this rank's shard, float64 [5].

    They are the sum of squared differences, the sum of squares that they are relative to, the maximum difference, the count of equal
    numbers, and the count of numbers.

    Args:
        size: Root mean square that the difference is relative to; None for that of the sampler's output.
    """
    b = sampler[own_rows.start : own_rows.start + len(own_rows.rows)]  # the sampler does not compute the last token
    a = own_rows.rows[: len(b), : b.shape[1]].to(b.dtype)  # the trainer's head may have padding rows
    difference, num = (a.double() - b.double()).abs(), b.numel()
    squares, total = float(difference.square().sum()), float(b.double().square().sum()) if size is None else size**2 * num
    return np.array([squares, total, float(difference.max()) if num else 0.0, int((a == b).sum()), num])


def _join_parts(name: str, parts: Sequence[np.ndarray], limit: float) -> Operation:
    squares, sizes, largest, equal, num = np.array(parts).T
    exceeded = np.flatnonzero(~(_relative(squares, sizes) <= limit))  # NaN counts as over
    return Operation(
        name=name,
        difference=float(_relative(squares.sum(), sizes.sum())),
        largest=float(largest.max()),
        equal=float(equal.sum() / max(num.sum(), 1)),
        ranks=tuple(exceeded.tolist()),
    )


def _relative(squares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Divide the root mean square of a difference by that of its reference; by 1 where the reference is 0."""
    return np.sqrt(squares / np.where(sizes == 0, 1.0, sizes))


def _logits_of_all(logits: torch.Tensor | None, num: int) -> torch.Tensor:
    """Return the logits on every rank. vLLM may compute them on the first rank of an engine only."""
    gathered: list[Any] = collectives.all_gather_object(None if logits is None else logits[-num:].numpy())
    return torch.from_numpy(next(part for part in gathered if part is not None))


# ---- why an operation differs: other weights, other settings, or another computation with the same ones --------------------------------

_ROWS = 1024  # rows of the identity matrix per product
_LINEAR = ("qkv", "o proj", "gate up", "down", "router")
_NORMS = ("norm 1", "norm 2", "q norm", "k norm")
SAME = "its weights are equal, so its arithmetic differs"


@torch.no_grad()
def find_cause(name: str, engine: ColocatedEngine, model: PolicyModel) -> str:
    """Return the reason why this rank's shard of an operation differs, as the end of a sentence; empty if unknown."""
    sampler = vllm_traced.model_runner(engine).get_model()
    layer, _, kind = name.partition(" ")
    if name == "embedding":
        return _weights(model.embedding.word_embeddings.weight, sampler.model.embed_tokens.weight)
    if name == "logits":
        head = model.output_layer
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else head.weight
        return _weights(weight[: head.num_valid_rows], _read_by_kernel(sampler.lm_head, weight.shape[1])) or _describe_logits(sampler)
    if name == "final norm":
        return _norm(model.decoder.final_layernorm, sampler.model.norm)
    if not layer[1:].isdecimal():
        return ""
    number = int(layer[1:])
    trainer_modules = traced.find_modules(model.decoder.layers[number])
    sampler_modules = vllm_traced.find_modules(sampler.model.layers[number])
    if kind in _NORMS:
        return _norm(trainer_modules[kind], sampler_modules[kind])
    if kind in _LINEAR:
        return _linear(trainer_modules[kind], sampler_modules[kind], model if kind == "qkv" else None)
    return _describe_attention(trainer_modules[kind], sampler_modules[kind].impl) if kind == "attention" else ""


def _linear(trainer: Any, sampler: Any, fused: PolicyModel | None = None) -> str:
    """Compare weights and biases. `fused`: the model, if this is the fused projection of queries, keys and values."""
    weight, bias = trainer.merged() if hasattr(trainer, "lora_a") else trainer.weight, getattr(trainer, "bias", None)
    if fused is not None:
        weight, bias = (_in_their_order(x, fused) for x in (weight, bias))
    return _weights(weight, _read_by_kernel(sampler, weight.shape[1])) or _biases(bias, getattr(sampler, "bias", None)) or SAME


def _weights(trainer: torch.Tensor, sampler: torch.Tensor) -> str:
    """Compare weights on the rows that both sides have. Padding rows are at the end."""
    rows = min(len(trainer), len(sampler))
    a, b = trainer[:rows].double(), sampler[:rows].double()
    difference, size = float((a - b).square().mean().sqrt()), float(b.square().mean().sqrt())
    return f"its weights differ, by {difference / max(size, 1e-30):.2g} of their size" if difference else ""


def _biases(trainer: torch.Tensor | None, sampler: torch.Tensor | None) -> str:
    if trainer is None or sampler is None:
        return "" if trainer is sampler else f"only the {'trainer' if sampler is None else 'sampler'} has a bias"
    return "its biases differ" if not torch.equal(trainer, sampler.to(trainer.dtype)) else ""


def _norm(trainer: Any, sampler: Any) -> str:
    if difference := _weights(trainer.weight[None], sampler.weight[None]):
        return difference
    eps, sampler_eps = getattr(trainer, "eps", None), getattr(sampler, "variance_epsilon", None)
    if None in (eps, sampler_eps) or eps == sampler_eps:
        return SAME
    return f"its epsilon is {eps:g} in the trainer and {sampler_eps:g} in the sampler"


def _describe_attention(trainer: Any, sampler: Any) -> str:
    window = getattr(sampler, "sliding_window", None)
    if isinstance(window, tuple):
        window = window[0]
    if window is not None and window >= 0 and trainer.window is None:
        return f"the sampler's attends to the last {window} tokens only"
    scale = trainer.softmax_scale
    if scale is not None and abs(scale - sampler.scale) > 1e-6 * sampler.scale:
        return f"its scale is {scale:g} in the trainer and {sampler.scale:g} in the sampler"
    return ""


def _describe_logits(sampler: Any) -> str:
    processor = sampler.logits_processor
    if processor.soft_cap is not None:
        return f"the sampler caps logits at {processor.soft_cap:g}"
    return f"the sampler multiplies logits by {processor.scale:g}" if processor.scale != 1 else SAME


def _in_their_order(x: torch.Tensor | None, model: PolicyModel) -> torch.Tensor | None:
    """Reorder the rows of the fused projection from Megatron's groups to vLLM's order: all queries, all keys, all values."""
    if x is None:
        return None
    groups = model.config.num_query_groups // model.pg_collection.tp.size()
    return torch.cat([part.flatten(0, -x.dim()) for part in traced.by_kind(x.unflatten(0, (groups, -1)), model.config, dim=1)])


def _read_by_kernel(linear: Any, channels: int) -> torch.Tensor:
    """Return the weight that vLLM's kernel multiplies with, [rows, channels]; it may be a packed copy of the module's parameter."""
    parameter = next(iter(linear.parameters()))
    unit_rows = torch.eye(channels, dtype=parameter.dtype, device=parameter.device)
    return torch.cat([linear.quant_method.apply(linear, rows, bias=None) for rows in unit_rows.split(_ROWS)]).t()
