"""Low-precision gradients and optimizer state in real Megatron-Core on ranks: dtypes, and errors of the steps against float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests import replica_check_cases as checks
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

OWN = dict(torch_dtype="bfloat16", use_precision_aware_optimizer=True)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
FEW = "fp8 and fp16 moments"
BITS = {
    "bf16 moments": dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    FEW: dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16"),
    "fp16 weights": dict(main_params_dtype="fp16"),
}
LAYOUTS = {
    "DP2, overlapped": ("dense", 2, OVERLAP),
    "TP2 SP": ("dense", 2, {cases.TP: 2, cases.SP: True}),
    "PP2": ("dense", 2, {cases.PP: 2}),
    "EP2": ("MoE", 2, {cases.EP: 2}),
}
LR = 2e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny(folder / name, **cases.MODELS[name] | {"layers": 2}) for name in ("dense", "MoE")}


@pytest.fixture(scope="module")
def batches(models):
    return {name: cases.stored_rollout(path, vocab=125, num_steps=3, stale=0) for name, path in models.items()}


def read_optimizer_state(policy) -> dict[str, torch.Tensor]:
    """Return the optimizer's state on this rank in float32, by (index of the weight, name)."""
    from megatron_grpo.core.policy.sharded_state import iterate_runs

    runs = enumerate(iterate_runs(policy.optimizer))
    return {f"{place} {name}": value.detach().float().clone() for place, (*_, states) in runs for name, value in states.items()
            if name != "step"}  # fmt: skip


def take_steps(policy, batches, first=0):
    """Return (gradient norm, optimizer state) of each step, and the final weights."""
    found = []
    for index, rows in enumerate(batches, first):
        metrics = policy.train_step(cases.make_batch(policy, rows, index)).metrics
        found.append((metrics["grad_norm"], read_optimizer_state(policy)))
    return found, {name: tensor.float().numpy().copy() for name, tensor in policy.named_weights()}


def assert_equal(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", LAYOUTS)
def test_precision_aware_steps_equal_ordinary_optimizer_within_rounding(models, batches, name):
    model, world, layout = LAYOUTS[name]

    def body(rank, world):
        common = dict(torch_dtype="bfloat16", lr=LR, **layout, **cases.MODEL_SETTINGS.get(model, {}))
        parallel, found = cases.join(cases.settings(**common), world), {}
        bits = BITS if name.startswith("DP2") else {FEW: BITS[FEW]}
        for what, more in {"ordinary": {}, "float32": OWN, **{key: OWN | bits[key] for key in bits}}.items():
            policy = cases.build(models[model], cases.settings(**common | more), world, parallel)
            found[what] = take_steps(policy, batches[model][:2])
        right, weights = found.pop("ordinary")
        told = {}
        for what, (mine, its) in found.items():
            # A first step begins without moments, so that only what is kept of it is rounded; the next ones begin from that.
            apart = [max(float((mine[i][1][key] - right[i][1][key]).abs().max()) for key in right[i][1] if key.endswith("param"))
                     for i in range(2)]  # fmt: skip
            told[what] = (
                assert_equal(its, weights) and [norm for norm, _ in mine] == [norm for norm, _ in right],
                mine[0][0] == right[0][0],
                apart,
            )
        return told

    for told in run_ranks(body, world, timeout=120):
        assert told["float32"][0] and told["float32"][2] == [0.0] * 2
        for what in told.keys() & {FEW, "bf16 moments"}:
            _, is_same_norm, (first, *later) = told[what]
            assert is_same_norm and first == 0.0 and 0.0 < max(later) < 2 * LR, (what, later)
        assert "fp16 weights" not in told or 0 < told["fp16 weights"][2][0] < 2.0**-11 * 2  # of weights of up to 2


def test_precision_aware_state_has_the_set_dtypes(models, batches):
    asked = dict(main_grads_dtype="bf16", main_params_dtype="fp16", exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16")

    def body(rank, world):
        policy = cases.build(models["dense"], cases.settings(**OWN, **asked), world)
        policy.train_step(cases.make_batch(policy, batches["dense"][0], 0))
        inner = policy.optimizer.chained_optimizers[0].optimizer
        dtypes = {(name, value.dtype) for state in inner.state.values() for name, value in state.items()}
        bytes_ = sum(value.nbytes for state in inner.state.values() for value in state.values())
        buffers = [buffer for chunk in policy.wrapped for buffer in chunk.buffers]
        return dtypes, bytes_ / sum(map(torch.numel, inner.state)), {(b.grad_data.dtype, b.grad_data.nbytes / b.numel) for b in buffers}

    for dtypes, bytes_, gradients in run_ranks(body, 2):
        assert dtypes == {("master_param", torch.float16), ("exp_avg", torch.float8_e4m3fn), ("exp_avg_sq", torch.bfloat16)}
        assert bytes_ == 5 and gradients == {(torch.bfloat16, 2)}


@pytest.mark.parametrize("name", ["DP2, overlapped", "TP2 SP", "EP2", "CP2"])
def test_bfloat16_gradients_equal_float32_within_rounding(models, batches, name):
    model, world, layout = LAYOUTS.get(name, ("dense", 2, {cases.CP: 2}))

    def body(rank, world):
        common = dict(lr=LR, **layout, **cases.MODEL_SETTINGS.get(model, {}), **OWN)
        parallel = cases.join(cases.settings(**common), world)
        both = [cases.settings(**common, main_grads_dtype=dtype) for dtype in ("fp32", "bf16")]
        return [cases.train(rank, world, models[model], cfg, batches[model][:1], parallel=parallel) for cfg in both]

    for right, found in run_ranks(body, world, timeout=120):
        errors = [cases.relative_error(found.gradients[key], right.gradients[key]) for key in right.gradients]
        assert 1e-4 < max(errors) < 3e-2, errors  # a sum of some micro-batches and ranks, each rounded to 2**-9
        assert abs(found.grad_norms[0] / right.grad_norms[0] - 1) < 3e-3
        norm = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in found.gradients.values()))
        assert abs(norm / found.grad_norms[0] - 1) < 1e-5 or name == "CP2"


def test_precision_aware_checkpoint_resumes_in_another_layout_with_other_dtypes(models, batches, tmp_path):
    from megatron_grpo.run.checkpoint.distributed import read_sharded
    from tests.checkpoint_files import write_sharded

    few = dict(main_params_dtype="fp16", exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
    (tmp_path / "saved").mkdir()

    def save(rank, world):
        policy = cases.build(models["dense"], cases.settings(**OWN, **few), world)
        take_steps(policy, batches["dense"][:2])
        write_sharded(policy.sharded_state_dict(is_loading=False), tmp_path / "saved")
        return whole(policy), {name: tensor.float().numpy().copy() for name, tensor in policy.named_weights()}

    def whole(policy):
        """Return the optimizer's state like a checkpoint: float32, on the ranks of this process."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        leaves = nested_values(policy.sharded_state_dict(is_loading=False)["optimizer"])
        return {(leaf.key, tuple(leaf.global_offset), tuple(leaf.local_shape)): leaf.data.clone().numpy() for leaf in leaves
                if isinstance(leaf, ShardedTensor)}  # fmt: skip

    def load(rank, world, settings, with_optimizer):
        policy = cases.build(models["dense"], cases.settings(**OWN | settings), world)
        state = policy.sharded_state_dict(is_loading=True, with_optimizer=with_optimizer)
        policy.load_sharded_state_dict(read_sharded(state, tmp_path / "saved", partly=True), with_optimizer=with_optimizer)
        found = whole(policy), {name: tensor.float().numpy().copy() for name, tensor in policy.named_weights()}
        said = checks.ReplicaCheckObserver(policy, checks.ReplicaCheck(1))
        trained = policy.train_step(cases.make_batch(policy, batches["dense"][2], 2), said)
        return *found, trained.skipped, said.found and str(said.found)

    saved = run_ranks(save, 2)
    weights = saved[0][1]
    parts = {key: value for found, _ in saved for key, value in found.items()}

    def by_name(found):
        return {name: np.sort(np.concatenate([v.ravel() for (k, *_), v in found.items() if k == name])) for name in {k for k, *_ in found}}

    right = by_name(parts)
    for world, settings in (
        (2, few),
        (1, few),
        (2, {cases.TP: 2, cases.SP: True} | few),
        (2, {}),
        (1, dict(use_precision_aware_optimizer=False)),
    ):
        loaded = run_ranks(load, world, settings, True)
        for _, its, skipped, said in loaded:
            assert assert_equal(its, weights) and skipped is None and said is None
        mine = by_name({key: value for found, *_ in loaded for key, value in found.items()})
        for name in right:
            # Other runs of a weight have other scales: what is small beside the largest of a run is kept as that run can.
            least = np.abs(right[name]).max() * (2.0**-16 if "exp_avg." in name and "exp_avg_dtype" in settings else 2.0**-38)
            assert np.allclose(mine[name], right[name], rtol=0, atol=least), (settings, name)
            assert world != 2 or settings != few or np.array_equal(mine[name], right[name]), name
    for found, its, skipped, said in run_ranks(load, 2, few, False):  # weights alone: the optimizer begins from them
        assert assert_equal(its, weights) and skipped is None and said is None
        assert all(not value.any() for (name, *_), value in found.items() if ".exp_avg" in name)


def test_resume_of_float32_weights_in_fp16_rounds_equally_on_all_ranks(models, batches, tmp_path):
    from megatron_grpo.run.checkpoint.distributed import read_sharded
    from tests.checkpoint_files import write_sharded

    def body(rank, world):
        parallel = cases.join(cases.settings(**OWN), world)
        policy = cases.build(models["dense"], cases.settings(**OWN), world, parallel)
        _, before = take_steps(policy, batches["dense"][:2])
        write_sharded(policy.sharded_state_dict(is_loading=False), tmp_path)
        other = cases.build(models["dense"], cases.settings(**OWN, main_params_dtype="fp16"), world, parallel)
        other.load_sharded_state_dict(read_sharded(other.sharded_state_dict(is_loading=True), tmp_path))
        said = checks.ReplicaCheckObserver(other, checks.ReplicaCheck(1))
        moved = {name: tensor.float().numpy().copy() for name, tensor in other.named_weights()}
        other.train_step(cases.make_batch(other, batches["dense"][2], 2), said)
        return moved, assert_equal(moved, before), said.found and str(said.found)

    (one, is_same, said), (other, _, its) = run_ranks(body, 2)
    assert said is None and its is None and assert_equal(one, other) and not is_same


def test_replica_check_detects_a_weight_that_differs_from_its_master_copy(models):
    """Clean runs are checked in tests/end_to_end/test_precision_aware.py."""

    def body(rank, world):
        from megatron_grpo.commands.analysis.replica_check import _rounded
        from megatron_grpo.core.policy.sharded_state import iterate_runs

        policy = cases.build(models["dense"], cases.settings(**OWN, main_params_dtype="fp16"), world)
        before, (weight, start, *_) = len(_rounded(policy)), next(iterate_runs(policy.optimizer))
        weight.data.view(-1)[start] *= 1.5
        return before, len(_rounded(policy))

    assert run_ranks(body, 1) == [(0, 1)]
