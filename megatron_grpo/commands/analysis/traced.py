"""Record the output of every operation of the trainer's model on one sequence, optionally with replaced inputs.

With `forced`, every operation receives outputs of another program for the operations before it. Differences then do not propagate: what
differs at an operation comes from that operation. Names and channel order are vLLM's (`analysis.vllm_traced`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel

from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.policy.gated_delta_net import PackedGatedDeltaNet
from megatron_grpo.core.policy.kernels import Norm, rotate
from megatron_grpo.core.policy.layers import FullWidthNorm, PackedAttention, PostNormResidual
from megatron_grpo.core.policy.model import PolicyModel

# Operations that sequence parallelism shards by tokens.
BY_TOKENS = ("embedding", "norm 1", "o proj", "residual 1", "norm 2", "router", "experts", "down", "residual 2", "final norm")


class LocalOutputRows(NamedTuple):
    """Rows of an operation's output on this rank.

    Args:
        start: Token index of the first row.
        rows: Output, [tokens, channels].
    """

    start: int
    rows: torch.Tensor


def not_traced(model: PolicyModel) -> str | None:
    """Return why the operations of this model cannot be recorded, as the end of a sentence about the model; None if they can."""
    if model.config.multi_latent_attention:
        return "has latent attention (MLA), whose operations differ between trainer and sampler"
    if model.vision is not None:
        return "is a vision-language model, whose text layers cannot be compared yet"
    if model.embedding_scale != 1 or any(isinstance(module, PostNormResidual) for module in model.modules()):
        return "normalises the outputs of its layers or scales its embeddings, which cannot be compared yet"
    mixers = [layer.self_attention for layer in model.decoder.layers if not isinstance(layer.self_attention, PackedGatedDeltaNet)]
    if not all(isinstance(attention.core_attention, PackedAttention) for attention in mixers):
        return "uses Transformer Engine's layers, which fuse several operations: use --transformer_impl local"
    return None


def find_modules(layer: Any) -> dict[str, Any]:
    """Return the modules of a layer whose outputs are operations, by the operation."""
    attention, block = layer.self_attention, layer.mlp
    modules = {"norm 1": layer.input_layernorm, "norm 2": layer.pre_mlp_layernorm}
    if isinstance(attention, PackedGatedDeltaNet):
        modules["o proj"] = attention.out_proj
    else:
        modules |= {"qkv": attention.linear_qkv, "attention": attention.core_attention, "o proj": attention.linear_proj}
        if isinstance(attention.q_layernorm, (Norm, FullWidthNorm)):
            modules |= {"q norm": attention.q_layernorm, "k norm": attention.k_layernorm}
    is_sparse = hasattr(block, "router")
    return modules | ({"router": block.router, "experts": block} if is_sparse else {"gate up": block.linear_fc1, "down": block.linear_fc2})


def by_kind(x: torch.Tensor, config: Any, *, dim: int) -> list[torch.Tensor]:
    """Split the fused projection of query groups into queries, keys and values.

    Args:
        x: Projection whose dimension `dim` has the channels of a group, as Megatron orders them.

    Returns:
        Queries [..., heads of a group, channels, ...], or with an output gate [..., heads of a group, 2, channels, ...], where vLLM has
        the gate of a head behind its query; then keys and values [..., 1, channels, ...].
    """
    each, kinds = config.num_attention_heads // config.num_query_groups, 1 + bool(config.attention_output_gate)
    queries, key, value = x.unflatten(dim, (-1, config.kv_channels)).split([kinds * each, 1, 1], dim=dim)
    return [queries.unflatten(dim, (kinds, each)).transpose(dim, dim + 1) if kinds > 1 else queries, key, value]


@torch.no_grad()
def trace(model: PolicyModel, score: Callable[[], Any], *, forced: Mapping[str, torch.Tensor]) -> dict[str, LocalOutputRows]:
    """Record the operations of the model while it scores a sequence. Collective over TP.

    Args:
        model: Trainer's model, without pipeline or context parallelism.
        forced: Outputs that replace those of operations, by name: [tokens, channels of this rank] from token 0. Empty for an unmodified
            pass.

    Returns:
        The output by operation in the order of computation, except `log-prob`, which `score` returns.
    """
    tracer = _Tracer(model, forced)
    with tracer.watching():
        score()
    return tracer.recorded


class _Tracer:
    def __init__(self, model: PolicyModel, forced: Mapping[str, torch.Tensor]):
        self.model, self.forced = model, forced
        self.recorded: dict[str, LocalOutputRows] = {}
        self.rank = model.pg_collection.tp.rank()
        self.groups = model.config.num_query_groups // model.pg_collection.tp.size()

    def instead(self, name: str, output: torch.Tensor) -> torch.Tensor:
        """Record `output`, whose first dimension is tokens, and return its replacement, or itself without one."""
        rows = output.detach().reshape(len(output), -1).clone()  # a replacement is often written over it
        cut = self.model.config.sequence_parallel and name.split(" ", name.startswith("L"))[-1] in BY_TOKENS
        start = self.rank * len(rows) if cut else 0
        self.recorded[name] = LocalOutputRows(start, rows.cpu())
        if name not in self.forced:
            return output
        sampler_rows = self.forced[name][start : start + len(rows)]
        replaced = rows.clone()
        replaced[: len(sampler_rows)] = sampler_rows.to(replaced)
        return replaced.view_as(output)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the operations of the model inside the context."""
        model = self.model
        with CleanUp() as hooks:

            def on(module: Any, hook: Callable[..., Any]) -> None:
                hooks.add(module.register_forward_hook(hook).remove)

            def before(module: Any, hook: Callable[..., Any]) -> None:
                hooks.add(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            on(model.embedding, partial(self.output, "embedding"))
            for i, layer in enumerate(model.decoder.layers):
                modules = find_modules(layer)
                for name, module in modules.items():
                    if name == "router":
                        hooks.add(self.gate(f"L{i} router", module))
                    else:
                        on(module, partial(self.mixed if name == "qkv" else self.output, f"L{i} {name}"))
                if "attention" in modules:
                    before(modules["attention"], partial(self.rotated, f"L{i}"))
                else:
                    before(modules["o proj"], partial(self.in_place, f"L{i} delta rule"))
                before(modules["norm 2"], partial(self.in_place, f"L{i} residual 1"))
                if "down" in modules:
                    before(modules["down"], partial(self.in_place, f"L{i} act"))
                on(layer, partial(self.output, f"L{i} residual 2"))
            on(model.decoder.final_layernorm, partial(self.output, "final norm"))
            before(model.output_layer, self.logits)
            yield

    def output(self, name: str, module: Any, inputs: Any, output: Any) -> Any:
        """Watch a module with output [tokens, 1, ...], possibly with a bias that others add, or with further outputs. A forward hook."""
        if not isinstance(output, tuple):
            return self.instead(name, output)
        x, *rest = output
        if hasattr(module, "skip_bias_add") and rest and rest[0] is not None:
            x, rest = x + rest[0], [None]
        return self.instead(name, x), *rest

    def mixed(self, name: str, module: Any, inputs: Any, output: Any) -> Any:
        """Watch the fused projection. A forward hook.

        Megatron orders queries, keys and values by group; vLLM has all queries, then all keys, then all values.
        """
        x, bias = output
        parts = by_kind(x.view(len(x), self.groups, -1), self.model.config, dim=2)
        new = self.instead(name, torch.cat([part.flatten(1) for part in parts], dim=1)).split([part[0].numel() for part in parts], dim=1)
        q, k, v = (tensor.reshape(part.shape) for tensor, part in zip(new, parts, strict=True))
        if q.dim() == 5:  # a gate beside each query
            q = q.transpose(2, 3)
        return torch.cat([part.flatten(2) for part in (q, k, v)], dim=2).view_as(x), bias

    def rotated(self, layer: str, module: Any, inputs: Any, kwargs: Any) -> Any:
        """Rotate queries and keys before `PackedAttention`, which then receives no rotation to apply. A forward pre-hook."""
        q, k, *rest = inputs
        packed = kwargs["packed_seq_params"]
        q, k = (rotate(x.squeeze(1), packed.rotations[module.rope]).unsqueeze(1) for x in (q, k))
        q, k = self.instead(f"{layer} rope q", q), self.instead(f"{layer} rope k", k)
        return (q, k, *rest), {**kwargs, "packed_seq_params": dataclasses.replace(packed, rotations=())}

    def in_place(self, name: str, module: Any, inputs: Any, kwargs: Any) -> None:
        """Overwrite a module's input in place, because others hold the same tensor. A forward pre-hook."""
        inputs[0].copy_(self.instead(name, inputs[0]))

    def gate(self, name: str, router: Any) -> Callable[[], None]:
        """Watch the router's logits, which no module outputs. Returns a function that undoes it."""
        gating = router.gating
        router.gating = lambda x: self.instead(name, gating(x))
        return lambda: delattr(router, "gating")

    def logits(self, head: Any, inputs: Any, kwargs: Any) -> None:
        """Record logits at temperature 1 at the positions whose next token is scored. The output layer never computes them all at once."""
        hidden, weight, batch = inputs
        if head.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=head.tp_group)
        words = (head.weight if weight is None else weight)[: head.num_valid_rows]
        hidden, words = (x.float() if head.in_float32 else x for x in (hidden.squeeze(1)[batch.logit_positions], words))
        self.recorded["logits"] = LocalOutputRows(0, (hidden @ words.t()).float().cpu())
