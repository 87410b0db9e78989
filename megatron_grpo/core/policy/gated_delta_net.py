"""Linear attention with the gated delta rule (Gated DeltaNet, arXiv:2412.06464) over the packed stream, as in Qwen3-Next and Qwen3.5.

Each value head has a state S that maps keys to values. A token first decays it, then moves the value of its key towards its own value:

    S <- exp(decay) S;   S <- S + strength * key (value - key S);   output = query S

State and convolution start from zero at each segment. A child starts from the state that the last token of its parent left, so a shared
prompt is computed once, and the gradient of its state is the sum over its children.

On a GPU flash-linear-attention's kernel computes the rule, if it is installed and a trial run gives what the plain lines give.

Megatron-Core 0.16's GatedDeltaNet has the same parameters. It needs flash-linear-attention, and supports neither packed sequences nor
context parallelism.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch.utils.checkpoint import checkpoint

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.autograd import copy_to_ranks
from megatron_grpo.core.policy.packed_batch import PackedBatch, RecurrenceOrder, packed_stream
from megatron_grpo.core.types import Segment
from megatron_grpo.core.weights.sizes import CHUNK, DeltaNetShape

logger = logging.getLogger(__name__)
L2NORM_EPSILON = 1e-6  # a constant of the models, whatever their rms_norm_eps is


class PackedGatedDeltaNet(MegatronModule):
    """Replacement for Megatron's attention in layers with the gated delta rule.

    Tensor parallelism distributes groups: a key head and the value heads that belong to it. A recurrence cannot run on the chunks of a
    segment that context parallelism leaves on a rank. An all-to-all gives each context-parallel rank all tokens of some of the groups, and
    another one returns the outputs.
    """

    def __init__(self, config, *, delta: DeltaNetShape, layer_number=1, pg_collection, **unused):
        super().__init__(config)
        self.delta, self.layer_number = delta, layer_number
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        self.num_groups, num_heads = delta.num_key_heads // ranks, delta.num_value_heads // ranks
        keys, _, values, *_ = delta.sections
        channels = (2 * keys + values) // ranks
        factory_kwargs = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
        # As in files and in vLLM, whatever the dtype of the model is: a rounded A_log changes every decay.
        float32_kwargs = factory_kwargs | {"dtype": torch.promote_types(config.params_dtype, torch.float32)}
        linear = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, sum(delta.sections), init_method=config.init_method, gather_output=False, skip_bias_add=False, **linear
        )
        self.conv1d = torch.nn.Conv1d(channels, channels, delta.conv_kernel_dim, groups=channels, bias=False, **factory_kwargs)
        self.dt_bias = torch.nn.Parameter(torch.ones(num_heads, **float32_kwargs))
        self.A_log = torch.nn.Parameter(torch.zeros(num_heads, **float32_kwargs))
        self.out_norm = torch.nn.RMSNorm(delta.value_head_dim, **float32_kwargs)  # of each head; the same on all ranks
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True, **linear
        )
        self.rule: Rule = gated_delta_rule
        if self.A_log.device.type == "cuda":
            self.rule = gpu_rule(config.params_dtype, delta.key_head_dim, delta.value_head_dim).rule

    def forward(self, hidden_states, attention_mask, *, packed_seq_params: PackedBatch, **unused):
        """Compute the layer.

        Args:
            hidden_states: [t, 1, H], or [t/tp, 1, H] under sequence parallelism.
            attention_mask: Not used.

        Returns:
            The output in the shape of `hidden_states`, and None.
        """
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.squeeze(1).unflatten(-1, (self.num_groups, -1))  # [t, groups, query + key + values + gates + strengths + decays]
        stream, ranks = packed_seq_params.recurrence(self.delta.conv_kernel_dim, CHUNK), self.cp_group.size()
        if ranks > 1:
            mixed = all_to_all(self.cp_group, torch.stack(mixed.chunk(ranks, dim=1))).flatten(0, 1)[stream.to_stream]
        # The intermediate values take ten times the memory of `mixed`, so the backward computes them again.
        out = checkpoint(self._mix, mixed, stream, use_reentrant=False, preserve_rng_state=False)
        if ranks > 1:
            out = all_to_all(self.cp_group, out[stream.to_ranks].unflatten(0, (ranks, -1))).transpose(0, 1).flatten(1, 2)
        return self.out_proj(out.flatten(1)[:, None])

    def _mix(self, mixed, stream: RecurrenceOrder):
        """Return the outputs [T, groups, heads * v] of all tokens of some groups, from [T, groups, channels]; in float32 inside."""
        delta, dtype = self.delta, mixed.dtype
        heads = delta.num_value_heads // delta.num_key_heads  # value heads in a group
        keys, values = delta.key_head_dim, heads * delta.value_head_dim
        mixed = mixed.float()
        qkv, gate, strength, decay = mixed.split([2 * keys + values, values, heads, heads], dim=-1)
        kernel, a_log, dt_bias = (
            self._select_rank_rows(parameter).float() for parameter in (self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)
        )
        qkv = F.silu(convolve(qkv.flatten(1), kernel, stream.previous)).view_as(qkv)
        query, key, value = qkv.split([keys, keys, values], dim=-1)
        query, key = (l2norm(x).repeat_interleave(heads, dim=1) for x in (query, key))
        value, gate = (x.unflatten(-1, (heads, -1)).flatten(1, 2) for x in (value, gate))
        decay = -a_log.exp() * F.softplus(decay.flatten(1) + dt_bias)
        out = self.rule(query * keys**-0.5, key, value, decay, strength.flatten(1).sigmoid(), stream)
        # Each rank's heads use the whole weight, so its gradient is the sum over ranks.
        weight = copy_to_ranks(self.out_norm.weight, self.tp_group).float()
        out = F.rms_norm(out, weight.shape, weight, self.config.layernorm_epsilon) * F.silu(gate)
        return out.to(dtype).unflatten(1, (-1, heads)).flatten(2)

    def _select_rank_rows(self, parameter):
        """Return the rows of a parameter that belong to the groups of this context-parallel rank."""
        by_group = parameter.unflatten(0, (self.num_groups, -1))
        return by_group.chunk(self.cp_group.size())[self.cp_group.rank()].flatten(0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Describe the layer for a checkpoint. Every cut is an equal run of whole groups, so any layout can load it.

        Args:
            sharded_offsets: Offsets of the axes in front, as in Megatron-Core.
        """
        cut = {"conv1d.weight": 0, "dt_bias": 0, "A_log": 0}
        local = {name: tensor for name, tensor in self.state_dict(keep_vars=True).items() if name in (*cut, "out_norm.weight")}
        groups = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        state = make_sharded_tensors_for_checkpoint(local, prefix, cut, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
        return state


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Divide each vector by its length. The epsilon is inside the root, unlike in `F.normalize`."""
    return x * (x.square().sum(dim=-1, keepdim=True) + L2NORM_EPSILON).rsqrt()


def convolve(x: torch.Tensor, kernel: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Return the causal depthwise convolution [T, channels] of a packed stream.

    Args:
        x: Inputs, [T, channels].
        kernel: [channels, kernel size]; the last column is multiplied with the token itself.
        previous: See `RecurrenceOrder`.
    """
    padded = F.pad(x, (0, 0, 0, 1))
    return sum((padded[index] * kernel[:, -2 - shift] for shift, index in enumerate(previous)), start=x * kernel[:, -1])


def gated_delta_rule(query, key, value, decay, strength, stream: RecurrenceOrder) -> torch.Tensor:
    """Return the outputs [T, heads, v] of the gated delta rule; 0 for padding.

    All tokens of a chunk are computed at once: the WY form of arXiv:2412.06464, section 3.3, a triangular system. The state passes from
    chunk to chunk, at once for all segments that have that many chunks.

    Args:
        query: Normalised and scaled queries, [T, heads, k].
        key: Normalised keys, [T, heads, k].
        value: Values, [T, heads, v].
        decay: Logarithm of the factor on the state, [T, heads].
        strength: Write strength between 0 and 1, [T, heads].
        stream: Order of the computation.
    """
    # [chunks, heads, tokens, ...]. Places without a token are zero and do not change the state.
    query, key, value = (F.pad(x, (0, 0, 0, 0, 0, 1))[stream.chunks].transpose(1, 2) for x in (query, key, value))
    decay, strength = (F.pad(x, (0, 0, 0, 1))[stream.chunks].transpose(1, 2)[..., None] for x in (decay, strength))
    total = decay.cumsum(dim=2)
    decay_between = (total - total.mT).tril().exp().tril()  # decay from one token of a chunk to a later one
    from_state, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    written = key * strength
    system = written @ key.mT * decay_between  # only the part below the diagonal is used
    new_values, read_keys = (
        torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True) for x in (value * strength, written * from_state)
    )
    scores, query, key, fade = query @ key.mT * decay_between, query * from_state, key * to_end, total[..., -1:, :].exp()

    outputs, last = [value[:0]], value.new_zeros(0)
    for wave in stream.waves:
        state = key.new_zeros(wave.num_segments, *key.shape[1::2], value.shape[-1]) if wave.parents is None else last[wave.parents]
        for begin, end in wave.steps:
            rows, carried = slice(begin, end), state[: end - begin]
            moved = new_values[rows] - read_keys[rows] @ carried
            outputs.append(query[rows] @ carried + scores[rows] @ moved)
            state = torch.cat([carried * fade[rows] + key[rows].mT @ moved, state[end - begin :]])
        last = state
    return F.pad(torch.cat(outputs).transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))[stream.places]


Rule = Callable[..., torch.Tensor]  # with the arguments of `gated_delta_rule`


class DeltaRuleChoice(NamedTuple):
    """An implementation of the rule, and why it is not flash-linear-attention's kernel; None if it is."""

    rule: Rule
    lacks: str | None


@functools.cache
def gpu_rule(dtype: torch.dtype, key_channels: int, value_channels: int) -> DeltaRuleChoice:
    """Return the implementation for this process's GPU. The choice is made once, by a trial run; the main rank logs it.

    Args:
        dtype: Dtype of the model.
    """
    chosen = DeltaRuleChoice(gated_delta_rule, _kernel_obstacle(dtype))
    if chosen.lacks is None:
        rule = functools.partial(rule_by_kernel, dtype=dtype)
        lacks = fault_of_rule(rule, dtype, key_channels, value_channels, torch.device("cuda"))
        chosen = DeltaRuleChoice(rule, None) if lacks is None else DeltaRuleChoice(gated_delta_rule, lacks)
    if collectives.rank() == 0:
        kernel_text = "flash-linear-attention's kernel" if chosen.lacks is None else f"plain matrix products: {chosen.lacks}"
        logger.warning("The gated delta rule is computed with %s.", kernel_text)
    return chosen


def _kernel_obstacle(dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"flash-linear-attention is used in bfloat16 and float16, not {name}, which it multiplies as TF32"
    return None if find_spec("fla") else "flash-linear-attention is not installed (the extra `fla`)"


def _kernel(*args, **kwargs):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*args, **kwargs)


def rule_by_kernel(query, key, value, decay, strength, stream: RecurrenceOrder, *, dtype: torch.dtype, kernel: Callable = _kernel):
    """Compute `gated_delta_rule` with flash-linear-attention's kernel, in one call per wave.

    Args:
        query: Normalised and scaled queries, [T, heads, k].
        key: Normalised keys, [T, heads, k].
        value: Values, [T, heads, v].
        decay: Logarithm of the factor on the state, [T, heads].
        strength: Write strength between 0 and 1, [T, heads].
        stream: Order of the computation.
        dtype: Dtype of queries, keys and values in the kernel. Its states are float32.
        kernel: A function with the arguments of `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, by default that one.

    Returns:
        The outputs, [T, heads, v]; 0 for padding.
    """
    inputs, out, states = (query.to(dtype), key.to(dtype), value.to(dtype), decay, strength), torch.zeros_like(value), value.new_zeros(0)
    for wave in stream.waves:
        initial_state = None if wave.parents is None else states[wave.parents]
        # The batch size is 1; heads are behind the tokens.
        outputs, states = kernel(
            *(x[wave.tokens][None] for x in inputs),
            scale=1.0,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=wave.cu_seqlens,
        )
        out = out.index_copy(0, wave.tokens, outputs[0].to(out.dtype))
    return out


def fault_of_rule(rule: Rule, dtype: torch.dtype, key_channels: int, value_channels: int, device: torch.device) -> str | None:
    """Compare an implementation with `gated_delta_rule` on a small stream of parents and children, longer than two chunks.

    Args:
        dtype: Dtype of the model, which determines the rounding.

    Returns:
        How the implementation fails, or where it differs by more than rounding, as a phrase; None if it does not.
    """
    sizes = ((131, 130, -1), (64, 64, -1), (70, 70, 0), (1, 1, 0), (9, 7, 1), (24, 24, -1))  # with padding, without it, parent
    segments = list[Segment]()
    for size, length, parent in sizes:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start=start, end=start + size, length=length, parent=parent))
    stream = packed_stream(segments, 1, 0, lambda array: torch.from_numpy(array).to(device)).recurrence(4, CHUNK)
    draw, total, heads = torch.Generator().manual_seed(0), segments[-1].end, 2
    query, key, value, grad, decay, strength = (
        torch.randn(total, heads, *channels, generator=draw)
        for channels in ((key_channels,), (key_channels,), (value_channels,), (value_channels,), (), ())
    )
    rounded = [x.to(device, dtype).float() for x in (l2norm(query) * key_channels**-0.5, l2norm(key), value)]
    random_inputs, results = [*rounded, -F.softplus(decay).to(device), strength.sigmoid().to(device)], []
    with torch.enable_grad():
        implementations: tuple[Rule, ...] = (gated_delta_rule, rule)
        for implementation in implementations:
            inputs = [x.detach().requires_grad_() for x in random_inputs]
            try:
                out = implementation(*inputs, stream)
                results.append((out.detach(), *torch.autograd.grad(out, inputs, grad.to(device))))
            except Exception as error:  # noqa: BLE001 - a kernel that is compiled at its first call fails in many ways
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                return f"flash-linear-attention's kernel does not run on this GPU ({reason})"
    rounding = 4 * torch.finfo(dtype).eps
    names = ("its output", *(f"the gradient of {name}" for name in ("queries", "keys", "values", "decays", "strengths")))
    for name, expected, actual in zip(names, *results, strict=True):
        difference = float((expected - actual).norm() / expected.norm())
        if not difference < rounding:
            return f"flash-linear-attention's kernel differs on this GPU: {name} by {difference:.1e}, more than rounding ({rounding:.1e})"
    return None
