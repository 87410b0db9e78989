"""AdamW with states in chosen dtypes, against float64, against torch, and after a save and load."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_grpo.commands.planning.warnings import lost_update_warnings
from megatron_grpo.core.policy import adamw
from megatron_grpo.core.policy.adamw import DTYPES, AdamW
from megatron_grpo.core.policy.requirements import BYTES
from megatron_grpo.core.settings import OptimizerConfig

GROUP = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
FP32 = dict(main_params_dtype="fp32", exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")
# What rounding to nearest may change of a number, relative to it.
ROUNDS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(adamw, "BLOCK", 64)


def make_optimizer(weights, **dtypes) -> tuple[torch.Tensor, AdamW]:
    parameter = weights.clone()
    return parameter, AdamW([GROUP | {"params": [parameter]}], **FP32 | dtypes)


def run_steps(parameter, optimizer, gradients):
    for gradient in gradients:
        parameter.decoupled_grad = gradient
        optimizer.step()
    return parameter


def make_gradients(number=5, size=150):
    """Of 12 orders of magnitude, a few of them zero."""
    torch.manual_seed(1)
    found = torch.randn(number, size) * 10.0 ** torch.linspace(-10, 2, size)
    found[:, ::17] = 0
    return found


def test_adamw_in_float32_equals_torch_exactly():
    torch.manual_seed(0)
    weights, gradients = torch.randn(150), make_gradients()
    parameter, optimizer = make_optimizer(weights)
    right = torch.nn.Parameter(weights.clone())
    other = torch.optim.AdamW([GROUP | {"params": [right]}])
    for gradient in gradients:
        right.grad = gradient.clone()
        other.step()
    assert torch.equal(run_steps(parameter, optimizer, gradients), right)
    state = other.state[right]
    assert all(torch.equal(optimizer.get_unscaled_state(parameter, name), state[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert optimizer.param_groups[0]["step"] == 5 and torch.equal(optimizer.get_unscaled_state(parameter, "master_param"), right)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(DTYPES, DTYPES)))
def test_adamw_step_equals_float64_from_stored_state_rounded_once(first, second):
    torch.manual_seed(0)
    weights, (*before, last) = torch.randn(150).bfloat16(), make_gradients()
    parameter, optimizer = make_optimizer(weights, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    run_steps(parameter, optimizer, before)
    w, m, v = (optimizer.get_unscaled_state(parameter, name).double() for name in ("master_param", "exp_avg", "exp_avg_sq"))
    run_steps(parameter, optimizer, [last])
    g, (b1, b2), lr, t = last.double(), GROUP["betas"], GROUP["lr"], len(before) + 1
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    w = w * (1 - lr * GROUP["weight_decay"]) - lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + GROUP["eps"])
    found = {name: optimizer.get_unscaled_state(parameter, name).double() for name in ("master_param", "exp_avg", "exp_avg_sq")}
    assert torch.allclose(found["master_param"], w, rtol=1e-5, atol=1e-6)
    assert torch.equal(parameter, found["master_param"].bfloat16())
    for name, right, dtype in (("exp_avg", m, first), ("exp_avg_sq", v, second)):
        assert optimizer.state[parameter][name].dtype is DTYPES[dtype]
        assert optimizer.state[parameter][name].element_size() == BYTES[dtype]
        for part in (slice(0, 64), slice(64, 128), slice(128, 150)):  # each block has a scale, and what is small beside its largest is lost
            least = right[part].abs().max() * {"fp16": 2.0**-38, "fp8": 2.0**-16}.get(dtype, 0.0)
            assert torch.allclose(found[name][part], right[part], rtol=ROUNDS[dtype] + 1e-5, atol=float(least)), (name, dtype)


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_adamw_positive_second_moment_stays_positive(dtype):
    """Its root divides: of a weight whose gradients ended a step would have no bound."""
    gradient = torch.tensor([1e3, 1e-6])
    parameter, optimizer = make_optimizer(torch.zeros(2).bfloat16(), exp_avg_dtype="fp32", exp_avg_sq_dtype=dtype)
    run_steps(parameter, optimizer, [gradient])
    assert optimizer.get_unscaled_state(parameter, "exp_avg_sq")[1] >= 0.05 * 1e-12
    before = parameter.clone()
    run_steps(parameter, optimizer, [torch.zeros(2)])
    assert (parameter - before).abs().max() < 3 * GROUP["lr"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_state_round_trip_is_exact(dtype):
    torch.manual_seed(0)
    main = dtype if dtype in ("fp32", "fp16") else "fp32"
    kinds = dict(main_params_dtype=main, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    parameter, optimizer = make_optimizer(torch.ones(2), **kinds)
    for values in ([447.99, 2.0**-9], [32767.9, 2.0**-24], [224.1, 3 * 2.0**-10]):  # the largest is rounded to where a scale ends or begins
        for _ in range(2):
            before = optimizer.get_unscaled_state(parameter, "exp_avg").clone()
            optimizer.set_scaled_state(parameter, "exp_avg", torch.tensor(values))
            values = optimizer.get_unscaled_state(parameter, "exp_avg").tolist()
        assert optimizer.get_unscaled_state(parameter, "exp_avg").equal(before)
    for _ in range(20):
        weights, gradients = torch.randn(150).bfloat16(), make_gradients() * 10.0 ** torch.randint(-6, 6, (150,))
        parameter, optimizer = make_optimizer(weights, **kinds)
        run_steps(parameter, optimizer, gradients[:3])
        again, other = make_optimizer(parameter, **kinds)
        other.param_groups[0]["step"] = 3
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            other.lend(again, name).copy_(optimizer.get_unscaled_state(parameter, name))
        other.take_back()
        assert torch.equal(again, parameter) and not other._lent
        for one in (run_steps(parameter, optimizer, gradients[3:]), run_steps(again, other, gradients[3:])):
            assert torch.isfinite(one).all() and torch.equal(one, parameter)
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            assert torch.equal(optimizer.get_unscaled_state(parameter, name), other.get_unscaled_state(again, name)), name


def test_adamw_accepts_bfloat16_gradient_and_skips_missing_one():
    weights, gradient = torch.ones(3).bfloat16(), torch.tensor([1.0, -2.0, 0.5])
    (a, one), (b, other), (c, idle) = make_optimizer(weights), make_optimizer(weights), make_optimizer(weights)
    assert torch.equal(run_steps(a, one, [gradient.bfloat16()]), run_steps(b, other, [gradient]))
    idle.step()
    assert torch.equal(c, weights) and not torch.equal(a, weights)


def test_adamw_scale_is_power_of_two_and_nan_is_preserved():
    for values in ([0.0], [3.0, -7.0], [448.0], [449.0], [1e-42], [2.0**-100 * 448], [65504.0], [1e38]):
        scale = float(adamw._compute_scale(torch.tensor(values), 448.0))
        assert torch.frexp(torch.tensor(scale))[0] == 0.5 and max(map(abs, values)) / scale <= 448.0, values
    parameter, optimizer = make_optimizer(torch.ones(2).bfloat16(), exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
    run_steps(parameter, optimizer, [torch.tensor([float("nan"), 1.0])])
    assert optimizer.get_unscaled_state(parameter, "exp_avg").isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.98, 0.99, 0.995, 0.997, 0.999, 0.9999])
def test_plan_warns_if_a_moment_would_never_change(dtype, beta2):
    """Without gradients a second moment falls; the one that a step cannot move is what is warned of."""
    parameter = torch.zeros(64)
    optimizer = AdamW([GROUP | {"params": [parameter], "betas": (0.9, beta2)}], **FP32 | dict(exp_avg_sq_dtype=dtype))
    optimizer.set_scaled_state(parameter, "exp_avg_sq", torch.linspace(1, 2, 64))
    run_steps(parameter, optimizer, [torch.zeros(64)] * 40)
    before = optimizer.get_unscaled_state(parameter, "exp_avg_sq").clone()
    run_steps(parameter, optimizer, [torch.zeros(64)])
    stays = bool((optimizer.get_unscaled_state(parameter, "exp_avg_sq") == before).any())
    said = list(lost_update_warnings(OptimizerConfig(use_precision_aware_optimizer=True, exp_avg_sq_dtype=dtype, adam_beta2=beta2)))
    assert bool(said) == stays, (said, stays)


def test_plan_warns_of_weights_unchanged_by_fp16_update():
    (said,) = lost_update_warnings(OptimizerConfig(use_precision_aware_optimizer=True, main_params_dtype="fp16", lr=1e-5))
    assert "weights above 0.0205 mostly do not change" in said
    parameter = torch.tensor([0.01, 0.1]).bfloat16()
    optimizer = AdamW([GROUP | {"params": [parameter], "lr": 1e-5, "weight_decay": 0.0}], **FP32 | dict(main_params_dtype="fp16"))
    kept = optimizer.get_unscaled_state(parameter, "master_param").clone()
    run_steps(parameter, optimizer, [torch.ones(2)])
    assert (optimizer.get_unscaled_state(parameter, "master_param") != kept).tolist() == [True, False]
