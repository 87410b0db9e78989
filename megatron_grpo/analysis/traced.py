"""What the trainer's model computes for one sequence: the output of every operation, and each of them on inputs that are given.

With `forced`, every operation is fed the rows that another program made of the operations before it. What then differs is the operation's
own doing: differences do not travel. Names and the order of channels are vLLM's (`rollout.vllm_traced`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel

from megatron_grpo.base.cleanup import CleanUp
from megatron_grpo.policy.kernels import Norm, rotate
from megatron_grpo.policy.layers import AddNormed, PackedAttention, WholeNorm
from megatron_grpo.policy.model import PolicyModel

# What sequence parallelism cuts by tokens.
BY_TOKENS = ("embedding", "norm 1", "o proj", "residual 1", "norm 2", "router", "experts", "down", "residual 2", "final norm")


class OwnRows(NamedTuple):
    """Rows [tokens, channels] of this rank; `start` is the token of the first one."""

    start: int
    rows: torch.Tensor


def not_traced(model: PolicyModel) -> str | None:
    """Why the operations of this model cannot be watched, as the end of a sentence whose subject is the model; None if they can."""
    if model.config.multi_latent_attention:
        return "has latent attention (MLA), whose operations are not laid out alike in trainer and sampler"
    if model.vision is not None:
        return "sees pictures, and its layers of text are not watched yet"
    if model.embedding_scale != 1 or any(isinstance(module, AddNormed) for module in model.modules()):
        return "norms what its layers add, or scales its embeddings, and is not watched yet"
    if not all(isinstance(layer.self_attention.core_attention, PackedAttention) for layer in model.decoder.layers):
        return "is built of Transformer Engine's layers, which hold several operations in one: --transformer_impl local"
    return None


@torch.no_grad()
def trace(model: PolicyModel, score: Callable[[], Any], *, forced: Mapping[str, torch.Tensor]) -> dict[str, OwnRows]:
    """score: makes the model score one sequence, which it has whole (no pipeline, no context parallelism). Collective over TP.

    forced: by operation, rows [tokens, channels of this rank] from token 0; empty for a pass of the model's own. `log-prob` is not here:
    it is what `score` gives.
    """
    tracer = _Tracer(model, forced)
    with tracer.watching():
        score()
    return tracer.found


class _Tracer:
    def __init__(self, model: PolicyModel, forced: Mapping[str, torch.Tensor]):
        self.model, self.forced = model, forced
        self.found: dict[str, OwnRows] = {}
        self.rank = model.pg_collection.tp.rank()
        cfg, tp = model.config, model.pg_collection.tp.size()
        self.groups, self.heads, self.channels = cfg.num_query_groups // tp, cfg.num_attention_heads // tp, cfg.kv_channels

    def instead(self, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """Remembers `own`, whose first dimension is tokens; gives what is to stand in its place, or None."""
        rows = own.detach().reshape(len(own), -1).clone()  # what is forced is often written over it
        cut = self.model.config.sequence_parallel and name.split(" ", name.startswith("L"))[-1] in BY_TOKENS
        start = self.rank * len(rows) if cut else 0
        self.found[name] = OwnRows(start, rows.cpu())
        if name not in self.forced:
            return None
        theirs = self.forced[name][start : start + len(rows)]
        kept = rows.clone()
        kept[: len(theirs)] = theirs.to(kept)
        return kept.view_as(own)

    @contextmanager
    def watching(self) -> Iterator[None]:
        model = self.model
        with CleanUp() as held:

            def on(module: Any, hook: Callable[..., Any]) -> None:
                held.add(module.register_forward_hook(hook).remove)

            def before(module: Any, hook: Callable[..., Any]) -> None:
                held.add(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            on(model.embedding, self.output("embedding"))
            for i, layer in enumerate(model.decoder.layers):
                attention, block = layer.self_attention, layer.mlp
                on(layer.input_layernorm, self.output(f"L{i} norm 1"))
                on(attention.linear_qkv, self.mixed(f"L{i} qkv"))
                if isinstance(attention.q_layernorm, (Norm, WholeNorm)):
                    on(attention.q_layernorm, self.output(f"L{i} q norm"))
                    on(attention.k_layernorm, self.output(f"L{i} k norm"))
                before(attention.core_attention, self.rotated(f"L{i}"))
                on(attention.core_attention, self.output(f"L{i} attention"))
                on(attention.linear_proj, self.output(f"L{i} o proj"))
                before(layer.pre_mlp_layernorm, self.in_place(f"L{i} residual 1"))
                on(layer.pre_mlp_layernorm, self.output(f"L{i} norm 2"))
                if hasattr(block, "router"):
                    held.add(self.gate(f"L{i} router", block.router))
                    on(block, self.output(f"L{i} experts"))
                else:
                    on(block.linear_fc1, self.output(f"L{i} gate up"))
                    before(block.linear_fc2, self.in_place(f"L{i} act"))
                    on(block.linear_fc2, self.output(f"L{i} down"))
                on(layer, self.output(f"L{i} residual 2"))
            on(model.decoder.final_layernorm, self.output("final norm"))
            before(model.output_layer, self.logits)
            yield

    def output(self, name: str) -> Callable[..., Any]:
        """Of a module that gives [tokens, 1, ...], perhaps with a bias that it leaves to others, or with things that are no rows."""

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            x, *rest = output if isinstance(output, tuple) else (output,)
            leaves_bias = hasattr(module, "skip_bias_add") and rest and rest[0] is not None
            new = self.instead(name, x + rest[0] if leaves_bias else x)
            if new is None:
                return None
            return (new, *(rest if not leaves_bias else (None,))) if isinstance(output, tuple) else new

        return hook

    def mixed(self, name: str) -> Callable[..., Any]:
        """Megatron has queries, keys and values group by group; vLLM all queries, then all keys, then all values."""
        groups, each, channels = self.groups, self.heads // self.groups, self.channels

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            x, bias = output
            q, k, v = x.view(len(x), groups, each + 2, channels).split([each, 1, 1], dim=2)
            new = self.instead(name, torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1))
            if new is None:
                return None
            q, k, v = new.split([groups * each * channels, groups * channels, groups * channels], dim=1)
            apart = [part.view(len(x), groups, -1, channels) for part in (q, k, v)]
            return torch.cat(apart, dim=2).view_as(x), bias

        return hook

    def rotated(self, layer: str) -> Callable[..., Any]:
        """`PackedAttention` rotates by itself: here it is given what is rotated already."""

        def hook(module: Any, inputs: Any, named: Any) -> Any:
            q, k, *rest = inputs
            packed = named["packed_seq_params"]
            rotation = packed.rotations[module.rope]
            q, k = (rotate(x.squeeze(1), rotation).unsqueeze(1) for x in (q, k))
            new_q, new_k = self.instead(f"{layer} rope q", q), self.instead(f"{layer} rope k", k)
            q, k = q if new_q is None else new_q, k if new_k is None else new_k
            return (q, k, *rest), {**named, "packed_seq_params": dataclasses.replace(packed, rotations=())}

        return hook

    def in_place(self, name: str) -> Callable[..., None]:
        """Of a module's input, which others hold too."""

        def hook(module: Any, inputs: Any, named: Any) -> None:
            new = self.instead(name, inputs[0])
            if new is not None:
                inputs[0].copy_(new)

        return hook

    def gate(self, name: str, router: Any) -> Callable[[], None]:
        """The router's logits are no module's output. Returns what undoes it."""
        gating = router.gating

        def watched(x: torch.Tensor) -> torch.Tensor:
            logits = gating(x)
            new = self.instead(name, logits)
            return logits if new is None else new

        router.gating = watched
        return lambda: delattr(router, "gating")

    def logits(self, head: Any, inputs: Any, named: Any) -> None:
        """At temperature 1, of the places whose next token is scored. The head itself never has all of them at one time."""
        hidden, weight, batch = inputs
        if head.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=head.tp_group)
        words = (head.weight if weight is None else weight)[: head.num_valid_rows]
        hidden, words = (x.float() if head.in_float32 else x for x in (hidden.squeeze(1)[batch.predict_at], words))
        self.found["logits"] = OwnRows(0, (hidden @ words.t()).float().cpu())
