"""The steps of `tests/distributed/test_parity.py` over NCCL, in float32 and bfloat16, with local layers and Transformer Engine's.

Runs on any number of GPUs; layouts that need more are skipped. `pytest -s` prints the errors.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parity_cases as cases
from tests.lora_cases import write_random_adapter
from tests.tiny_models import write_tiny

ROOT = Path(__file__).resolve().parents[2]


def count_gpus() -> int:
    """Return the number of GPUs by the driver: test processes hide them from torch (see tests/ranks.py)."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


GPUS = count_gpus()
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU here")]
needs_te = pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
# On the layouts below; attention kernels of Transformer Engine take heads of 32 channels and more, in half precision.
DENSE = ["1", "TP2", "TP2 SP", "PP2", "PP2 VPP2", "CP2", "DP2", "TP2 SP CP2", "TP2 SP PP2", "PP2 VPP2 DP2"]
EXPERTS = ["1", "TP2 SP", "TP2 ETP2", "CP2", "EP2", "TP2 EP2 ETP1", "PP2 VPP2 EP2"]
RUNS = {"grpo": dict(micro_batch_size=1), "dapo": dict(loss_type="dapo", max_tokens_per_micro_batch=24)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    made, folder = {}, tmp_path_factory.mktemp("models")

    def get(model: str, adapters: bool):
        """Return (model directory, global batches, settings, expected results of each run)."""
        if (model, adapters) not in made:
            path = folder / f"{model} {adapters}"
            write_tiny(path, **cases.MODELS[model] | {"std": 0.05})
            batches = cases.stored_rollout(path, num_steps=3, vocab=125)
            own = cases.MODEL_SETTINGS.get(model, {})
            if adapters:
                own = own | dict(tuner_type="lora", adapters=str(write_random_adapter(path, folder / f"{model} adapter")))
            right = {key: cases.reference(path, cases.settings(**own | run), batches) for key, run in RUNS.items()}
            made[model, adapters] = path, batches, own, right
        return made[model, adapters]

    return get


# bfloat16 has 8 bits: 1/256 for each rounding. A mistake of the layout (half a gradient, a lost shard) is 0.3 and more.
BF16 = dict(loss=5e-3, gradient=0.1, weight=4e-2)
SHARED = {"apart": dict(share_prefix="false"), "shared": dict(share_prefix="true")}


@pytest.mark.parametrize("name", ["1", "CP2", "TP2 SP", "PP2 VPP2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_prefix_steps_are_as_near_float64_as_others(tmp_path, name, dtype):
    path = write_tiny(tmp_path / "model", **cases.MODELS["dense"] | {"std": 0.05})
    batches, run = cases.shared_rollout(path, num_steps=2), dict(beta=0.05, max_tokens_per_micro_batch=96)
    right = cases.reference(path, cases.settings(**run), batches)
    runs = {key: run | share | dict(transformer_impl="local", torch_dtype=dtype) for key, share in SHARED.items()}
    limits = BF16 if dtype == "bfloat16" else dict(loss=1e-6, gradient=1e-5, weight=1e-5)
    for distance in run_measured(path, batches, runs, dict.fromkeys(runs, right), tmp_path, name).values():
        assert distance.within(**limits), distance


def measure_distances(model: str, stored, tmp_path, name: str, *, adapters: bool = False, **more) -> dict[str, cases.Distance]:
    path, batches, own, references = stored(model, adapters)
    return run_measured(path, batches, {key: own | run | more for key, run in RUNS.items()}, references, tmp_path, name)


def run_measured(path, batches, runs, references, tmp_path, name: str) -> dict[str, cases.Distance]:
    layout = cases.LAYOUTS[name]
    if layout.world_size > GPUS:
        pytest.skip(f"{name} needs {layout.world_size} GPUs, there are {GPUS}")
    runs = {key: run | layout.settings for key, run in runs.items()}
    job = tmp_path / "job.pkl"
    job.write_bytes(pickle.dumps({"path": str(path), "runs": runs, "batches": batches}))
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    # Interleaved kernels of several groups need an order; Megatron-Core asks for it under tensor parallelism.
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(ROOT)}
    env.pop("GLOO_SOCKET_IFNAME", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(layout.world_size),
               "-m", "tests.gpu.one_step", str(job), str(tmp_path)]  # fmt: skip
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    ranks = [pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes()) for rank in range(layout.world_size)]
    found = {key: cases.merge_worst([cases.distance(rank["found"][key], references[key]) for rank in ranks]) for key in runs}
    print(f"\n{ranks[0]['device']}, {name}, {next(iter(runs.values()))}: {found}")
    return found


@pytest.mark.parametrize("name", DENSE)
def test_float32_steps_equal_float64(stored, tmp_path, name):
    for distance in measure_distances("dense", stored, tmp_path, name, transformer_impl="local").values():
        assert distance.within(loss=1e-6, gradient=1e-5, weight=1e-5), distance


@pytest.mark.parametrize("name", EXPERTS)
def test_float32_steps_with_experts_equal_float64(stored, tmp_path, name):
    for distance in measure_distances("MoE", stored, tmp_path, name, transformer_impl="local").values():
        assert distance.within(loss=1e-6, gradient=1e-5, weight=1e-5), distance


@pytest.mark.parametrize(("model", "name"), [*(("dense", name) for name in DENSE), *(("MoE", name) for name in EXPERTS)])
def test_float32_steps_of_adapters_equal_float64(stored, tmp_path, model, name):
    for distance in measure_distances(model, stored, tmp_path, name, adapters=True, transformer_impl="local").values():
        assert distance.within(loss=1e-6, gradient=1e-5, weight=1e-5), distance


@pytest.mark.parametrize("name", DENSE)
def test_bfloat16_steps_are_near_float64(stored, tmp_path, name):
    for distance in measure_distances("dense", stored, tmp_path, name, transformer_impl="local", torch_dtype="bfloat16").values():
        assert distance.within(**BF16), distance


@needs_te
@pytest.mark.parametrize("name", DENSE)
def test_transformer_engine_steps_are_near_float64(stored, tmp_path, name):
    for distance in measure_distances(
        "dense", stored, tmp_path, name, transformer_impl="transformer_engine", torch_dtype="bfloat16"
    ).values():
        assert distance.within(**BF16), distance


@needs_te
@pytest.mark.parametrize("name", EXPERTS)
def test_transformer_engine_steps_with_experts_are_near_float64(stored, tmp_path, name):
    for distance in measure_distances(
        "MoE", stored, tmp_path, name, transformer_impl="transformer_engine", torch_dtype="bfloat16"
    ).values():
        assert distance.within(**BF16), distance


@needs_te
@pytest.mark.parametrize(("model", "name"), [*(("dense", name) for name in DENSE), *(("MoE", name) for name in EXPERTS)])
def test_transformer_engine_steps_of_adapters_are_near_float64(stored, tmp_path, model, name):
    settings = dict(transformer_impl="transformer_engine", torch_dtype="bfloat16")
    for distance in measure_distances(model, stored, tmp_path, name, adapters=True, **settings).values():
        assert distance.within(**BF16), distance


@pytest.mark.parametrize("impl", ["local", pytest.param("transformer_engine", marks=needs_te)])
def test_steps_with_gradients_and_optimizer_state_in_fewer_bits_are_near_float64(stored, tmp_path, impl):
    few = dict(use_precision_aware_optimizer=True, main_grads_dtype="bf16", exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
    name = "1" if GPUS == 1 else "DP2"
    for distance in measure_distances("dense", stored, tmp_path, name, transformer_impl=impl, torch_dtype="bfloat16", **few).values():
        assert distance.within(**BF16), distance


@pytest.mark.parametrize("settings", [
    dict(optimizer_cpu_offload=True), dict(use_precision_aware_optimizer=True), dict(overlap_grad_reduce=True, overlap_param_gather=True),
    dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2), dict(recompute_granularity="selective"),
], ids=lambda settings: next(iter(settings)) + "=" + str(next(iter(settings.values()))))  # fmt: skip
def test_other_ways_to_run_a_step_equal_float64(stored, tmp_path, settings):
    for distance in measure_distances(
        "dense", stored, tmp_path, "1" if GPUS == 1 else "DP2", transformer_impl="local", **settings
    ).values():
        assert distance.within(loss=1e-6, gradient=1e-5, weight=1e-5), distance
