"""Mutations of the gated delta rule that raise no error: each changes log-probs or a gradient by more than rounding.

Those of shared prompts are in tests/unit/policy/test_gated_delta_net.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests import parity_cases as cases
from tests.distributed.test_families import compute_expected
from tests.mistakes import mistake
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

LAYER, STREAM, CONFIG = (f"megatron_grpo.core.policy.{name}" for name in ("gated_delta_net", "packed_batch", "model_config"))
MAPPING, SHAPE = (f"megatron_grpo.core.weights.{name}" for name in ("mapping", "shape"))
ATTENTION, SHARED_EXPERTS = (f"megatron.core.transformer.{name}" for name in ("attention", "moe.shared_experts"))
NORM = "F.rms_norm(out, weight.shape, weight, self.config.layernorm_epsilon)"
WEIGHT = "weight = copy_to_ranks(self.out_norm.weight, self.tp_group).float()"
DECAY = "decay = -a_log.exp() * F.softplus(decay.flatten(1) + dt_bias)"
PACK = "full = _PACK[entry.packing](tensors, self.shape)"
CHANNELS = "shape.head_dim, *tensors[0].shape[1:]"
BY_HEAD = f"tensors[0].reshape(shape.num_query_groups, -1, 2, {CHANNELS})"
GATE = "x = x * torch.sigmoid(gate.float())"

# name -> (module, what is right there, what stands there instead)
MISTAKES = {
    "convolution leaks over segments": (STREAM, "np.full(kernel - 1, total)", "np.arange(segment.start - kernel + 1, segment.start)"),
    "state leaks over segments": (LAYER, "state = key.new_zeros(", "state = key.new_ones("),
    "state forgotten between chunks": (LAYER, "torch.cat([carried * fade[rows] + ", "torch.cat([carried * 0 + 0 * "),
    "kernel reversed": (LAYER, "self.conv1d.weight.squeeze(1)", "self.conv1d.weight.squeeze(1).flip(1)"),
    "qkvz read section by section": (MAPPING, "is_grouped = delta.is_grouped and", "is_grouped = False and"),
    "values and gates swapped": (LAYER, "value, gate = (x.unflatten", "gate, value = (x.unflatten"),
    "strength and decay swapped": (LAYER, "qkv, gate, strength, decay = mixed", "qkv, gate, decay, strength = mixed"),
    "key heads tiled, not repeated": (LAYER, "l2norm(x).repeat_interleave(heads, dim=1)", "l2norm(x).repeat(1, heads, 1)"),
    "no SiLU behind the convolution": (LAYER, "qkv = F.silu(", "qkv = torch.clone("),
    "no l2norm": (LAYER, "+ L2NORM_EPSILON).rsqrt()", "+ L2NORM_EPSILON) ** 0"),
    "l2norm as F.normalize, whose epsilon is no term": (LAYER, "+ L2NORM_EPSILON).rsqrt()", ").sqrt().clamp_min(1e-6).reciprocal()"),
    "l2norm without its epsilon": (LAYER, "L2NORM_EPSILON = 1e-6", "L2NORM_EPSILON = 0.0"),
    "l2norm with 1e-5": (LAYER, "L2NORM_EPSILON = 1e-6", "L2NORM_EPSILON = 1e-5"),
    "gated norm with 1e-5": (LAYER, "weight, self.config.layernorm_epsilon)", "weight, 1e-5)"),
    "queries not scaled": (LAYER, "query * keys**-0.5", "query"),
    "queries scaled as those of attention": (LAYER, "query * keys**-0.5", "query * self.config.kv_channels**-0.5"),
    "sign of A_log": (LAYER, "-a_log.exp()", "-(-a_log).exp()"),
    "A_log taken for A": (LAYER, "-a_log.exp()", "-a_log.abs()"),
    "dt_bias outside of the softplus": (LAYER, DECAY, "decay = -a_log.exp() * (F.softplus(decay.flatten(1)) + dt_bias)"),
    "state fades after the write": (LAYER, "total = decay.cumsum(dim=2)", "total = decay.cumsum(dim=2) - decay"),
    "gate by a sigmoid": (LAYER, "* F.silu(gate)", "* gate.sigmoid()"),
    "gate before the norm": (LAYER, f"{NORM} * F.silu(gate)", NORM.replace("(out", "(out * F.silu(gate)")),
    "gated norm counts from 1": (LAYER, WEIGHT, WEIGHT.replace("copy", "1 + copy")),
    "gated norm over all heads": (LAYER, NORM, "F.rms_norm(out, out.shape[1:], eps=self.config.layernorm_epsilon) * weight"),
    "A_log in bfloat16": (LAYER, "-a_log.exp()", "-a_log.bfloat16().float().exp()"),
    "dt_bias in bfloat16": (LAYER, "+ dt_bias)", "+ dt_bias.bfloat16().float())"),
    "decay in bfloat16": (LAYER, DECAY, f"{DECAY}.bfloat16().float()".replace("-a_log", "(-a_log").replace("dt_bias)", "dt_bias))")),
    "state in bfloat16": (LAYER, "state[: end - begin]\n", "state[: end - begin].bfloat16().float()\n"),
    "inputs of the rule in bfloat16": (LAYER, "mixed = mixed.float()", "mixed = mixed.bfloat16().float()"),
    "other norms count from 0": (CONFIG, "norm = ZeroCenteredRMSNorm if shape.has_zero_centered_norms else Norm", "norm = Norm"),
    "queries and gates by halves": (MAPPING, BY_HEAD, f"{BY_HEAD}.reshape(shape.num_query_groups, 2, -1, {CHANNELS}).transpose(1, 2)"),
    "heads turn whole": (SHAPE, "dim = int(channels * partial)", "dim = channels"),
    "attention's gate left out": (ATTENTION, GATE, "x = x * 1"),
    "attention's gate by SiLU": (ATTENTION, GATE, "x = x * torch.nn.functional.silu(gate.float())"),
    "the shared expert's gate left out": (SHARED_EXPERTS, "output = output * gate_score", "output = output * 1"),
}  # fmt: skip
# Of tensor parallelism: the first leaves log-probs as they are.
OF_RANKS = {
    "gradient of the gated norm not summed over ranks": (LAYER, WEIGHT, "weight = self.out_norm.weight.float()"),
    "convolution cut as equal runs of its sections": (MAPPING, PACK, f"{PACK} if 'conv1d' not in name else tensors[0]"),
}  # fmt: skip
LAYERS = ["linear_attention", "linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("model"), "qwen3_next", layers=3, layer_types=LAYERS, vocab=125, std=0.06)
    rng = np.random.default_rng(0)
    return path, [rng.integers(0, 125, length + 1).tolist() for length in (1, 24, 5, 2)]


def test_hybrid_layer_mutation_changes_logprobs(made):
    path, sequences = made

    def body(rank, world):
        found, parallel = {}, cases.join(cases.settings(), world)
        for name, where in {"none": None, **MISTAKES}.items():
            with mistake(*where) if where else nullcontext():
                found[name] = cases.score_tokens(cases.build(path, cases.settings(), world, parallel), sequences)
        return found

    [found], right = run_ranks(body, 1), np.concatenate(compute_expected(path, sequences))
    apart = {name: float(np.abs(np.concatenate(logprobs) - right).max()) for name, logprobs in found.items()}
    assert apart.pop("none") < 5e-6
    assert {name: far for name, far in apart.items() if not far > 2e-5} == {}


def test_hybrid_parallel_mutation_changes_a_gradient(made):
    path, _ = made
    batches = cases.stored_rollout(path, vocab=125)
    right, layout = cases.reference(path, cases.settings(), batches), cases.LAYOUTS["TP2 SP"]

    def body(rank, world):
        found, parallel = {}, cases.join(cases.settings(**layout.settings), world)
        for name, where in {"none": None, **OF_RANKS}.items():
            with mistake(*where) if where else nullcontext():
                found[name] = cases.train(rank, world, path, cases.settings(**layout.settings), batches, parallel=parallel)
        return found

    found = {name: cases.distance(trained, right) for name, trained in run_ranks(body, 2)[0].items()}
    assert found.pop("none").within()
    assert {name: far.gradient for name, far in found.items() if not far.gradient > 0.1} == {}
