"""Record the output of every operation of vLLM's model on one sequence, while it samples given tokens. Written for vLLM 0.32.

Operations are named as in `analysis.traced`: `embedding`, `L<i> <operation>`, `final norm`, `logits`, `log-prob`. Rows are tokens: those of
the prompt come from one forward, every further one from a separate forward, as in a run. The last token is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.rollout.vllm_requests import sampled_logprobs

RowsByOperation = dict[str, torch.Tensor]  # by operation: [tokens, channels of this rank]

_DENSE, _SPARSE = ("gate_up_proj", "act_fn", "down_proj"), ("gate", "experts")


def model_runner(engine: ColocatedEngine) -> Any:
    """Return vLLM's model runner of this rank."""
    (runner,) = engine._llm.collective_rpc(lambda worker: worker.model_runner)
    return runner


def not_traced(engine: ColocatedEngine) -> str | None:
    """Return why the operations of this model cannot be recorded, as the end of a sentence about the model; None if they can."""
    model = model_runner(engine).get_model()
    name = type(model).__name__
    inner = getattr(model, "model", None)
    if inner is None or not all(hasattr(inner, part) for part in ("embed_tokens", "layers", "norm")):
        return f"({name}) differs in vLLM from Llama and Qwen, which have: embed_tokens, layers, norm"
    for number, layer in enumerate(inner.layers):
        try:
            find_modules(layer)
        except AttributeError as error:
            return f"({name}) has other layers in vLLM than Llama and Qwen: layer {number} has no {error.name}"
    return None


def force(engine: ColocatedEngine, tokens: Sequence[int], opening: int, *, temperature: float) -> list[float]:
    """Return the log-probs of `tokens[opening:]` as if vLLM had sampled them. Collective over the ranks of the engine.

    The prefix cache is used in its current state.

    Args:
        tokens: Token IDs of prompt and completion.
        opening: Length of the prompt in tokens.

    Raises:
        RuntimeError: If vLLM does not return the given tokens.
    """
    from vllm import SamplingParams

    forced_tokens = tokens[opening:]
    params = SamplingParams(
        temperature=temperature, seed=0, max_tokens=len(forced_tokens), ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True,
    )  # fmt: skip
    with _drawing(model_runner(engine).sampler, forced_tokens):
        (answer,) = engine._run([(tuple(tokens[:opening]), (), params)])
    output = answer.outputs[0]
    if list(output.token_ids) != list(forced_tokens):
        raise RuntimeError("vLLM did not sample the tokens that were requested")
    return sampled_logprobs(output)


def trace(engine: ColocatedEngine, tokens: Sequence[int], opening: int, *, temperature: float) -> RowsByOperation:
    """Record the output of every operation while `tokens[opening:]` are sampled, without the prefix cache. Collective, as `force`.

    Args:
        tokens: Token IDs of prompt and completion.
        opening: Length of the prompt in tokens.

    Returns:
        The output by operation. With tensor parallelism, each rank has its shard of sharded outputs, and all logits.
    """
    recorded: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, rows: torch.Tensor) -> None:
        recorded.setdefault(name, []).append(rows.detach().flatten(1).to("cpu", copy=True))

    engine._llm.reset_prefix_cache()
    with _watched(model_runner(engine).get_model(), keep):
        logprobs = force(engine, tokens, opening, temperature=temperature)
    rows = {name: torch.cat(parts) for name, parts in recorded.items()}
    return rows | {"log-prob": torch.tensor(logprobs)[:, None]}


@contextmanager
def _drawing(sampler: Any, tokens: Sequence[int]) -> Iterator[None]:
    """Make vLLM's sampler return the given tokens one after the other, with their log-probs, for a single request."""
    sample, remaining = sampler.sample, iter(tokens)

    def sample_forced(*args: Any, **kwargs: Any) -> Any:
        chosen, logprobs = sample(*args, **kwargs)
        return torch.full_like(chosen, next(remaining)), logprobs

    sampler.sample = sample_forced
    try:
        yield
    finally:
        del sampler.sample  # the class has it


@contextmanager
def _watched(model: Any, keep: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call keep(name, rows) with the output of every operation of every layer, inside the context."""
    with CleanUp() as hooks:

        def on(module: Any, hook: Callable[[Any], None]) -> None:
            hooks.add(module.register_forward_hook(lambda _, inputs, output: hook(output)).remove)

        def record(name: str, residual: str, output: Any) -> None:
            """Keep a module's output. A norm with a residual returns (normed, sum); the first one of the model has no residual."""
            value, *sums = output if isinstance(output, tuple) else (output,)
            if residual and sums:
                keep(residual, sums[0])
            keep(name, value)

        inner = model.model
        on(inner.embed_tokens, partial(record, "embedding", ""))
        for i, layer in enumerate(inner.layers):
            modules, residuals = find_modules(layer), {"norm 1": f"L{i - 1} residual 2", "norm 2": f"L{i} residual 1"}
            for name, module in modules.items():
                on(module, partial(record, f"L{i} {name}", residuals.get(name, "")))
            if "attention" in modules:
                hooks.add(modules["attention"].register_forward_pre_hook(partial(_keep_rotated, keep, f"L{i}")).remove)
            else:
                hook = modules["o proj"].register_forward_pre_hook(lambda _, inputs, i=i: keep(f"L{i} delta rule", inputs[0]))
                hooks.add(hook.remove)
        on(inner.norm, partial(record, "final norm", f"L{len(inner.layers) - 1} residual 2"))
        on(model.logits_processor, lambda output: None if output is None else keep("logits", output.float()))
        yield


def _keep_rotated(keep: Callable[[str, torch.Tensor], None], layer: str, module: Any, inputs: Any) -> None:
    """Keep queries and keys at the input of attention, because all layers share one rotary module. A forward pre-hook."""
    keep(f"{layer} rope q", inputs[0])
    keep(f"{layer} rope k", inputs[1])


def find_modules(layer: Any) -> dict[str, Any]:
    """Return the modules of a layer whose outputs are operations, by the operation.

    Raises:
        AttributeError: If the layer has no such module.
    """
    modules = {"norm 1": layer.input_layernorm, "norm 2": layer.post_attention_layernorm}
    if (attention := getattr(layer, "self_attn", None)) is None:
        modules["o proj"] = layer.linear_attn.out_proj
    else:
        modules |= {"qkv": attention.qkv_proj, "attention": attention.attn, "o proj": attention.o_proj}
        if hasattr(attention, "q_norm"):
            modules |= {"q norm": attention.q_norm, "k norm": attention.k_norm}
    block = find_block(layer)
    if hasattr(block, "experts"):
        return modules | {"router": block.gate, "experts": block}
    return modules | {"gate up": block.gate_up_proj, "act": block.act_fn, "down": block.down_proj}


def find_block(layer: Any) -> Any:
    """Return the dense or MoE block after the second norm.

    Raises:
        AttributeError: If its structure is unknown.
    """
    for name in ("mlp", "block_sparse_moe"):
        block = getattr(layer, name, None)
        if any(all(hasattr(block, part) for part in parts) for parts in (_DENSE, _SPARSE)):
            return block
    raise AttributeError(name=" or ".join(map(", ".join, (_DENSE, _SPARSE))))
