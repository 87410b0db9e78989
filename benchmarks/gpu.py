"""Measure performance and accuracy on a GPU; prints one JSON object as the last line (table in docs/gpu.md).

    python benchmarks/gpu.py t8                    training steps compared with TRL's GRPOTrainer on the same tokens, Qwen3-0.6B sizes
    python benchmarks/gpu.py layers --model MoE    every kind of layer in bfloat16 compared with float32 on the CPU, on the same inputs

`--dry` runs the same code on the CPU with tiny sizes, to test the code; its figures have no meaning.

Protocol of t8: both trainers run in this process and alternate on each batch, so that both steps of a pair have the same conditions. Times
are measured by CUDA events; the first pair is discarded; figures are [median, minimum, maximum]. The rate of a matrix product of the
model's sizes is measured before each pair. `of_gemm_limit` is the time of a step's necessary matrix products at that rate divided by the
time of the step. All gradients of the first step are compared before times are reported.

`layers` excludes tokens that rounding routes to other experts from the errors of a layer, and reports their share.

Limits of `layers`: bfloat16 has 8 significant bits, so the relative error of one rounding is at most 2^-9, and 2^-9 / sqrt(3) in the root
mean square if the last bits are uniform. Sums are in float32 and contribute much less. The errors of r independent roundings in sequence
add up to sqrt(r) times that. A factor of 4 covers amplification by softmax and gates. A transposed head, a missing bias or a wrong scale
gives an error of 0.3 and more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

# Qwen3-0.6B; prompts of 512 tokens, 16 completions of each, lognormal with a mean of 1,000.
T8 = SimpleNamespace(prompt=512, completion=1000, varies=True, prompts=4, vocab=151936, group=16, longest=4096)
QWEN3_06B = dict(tied=True, vocab=151936, hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, max_positions=8192)
TINY_T8 = SimpleNamespace(prompt=16, completion=24, varies=True, prompts=2, vocab=128, group=4, longest=64)
TINY = dict(tied=True, vocab=128, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=128, max_positions=256)

# Number of roundings between the input of a layer and the output of each of its modules; "": the whole layer.
ROUNDINGS = {"self_attention": 8, "mlp": 14, "final_layernorm": 2, "": 15}  # norm, q k v, their norms, rope, scores, sum, out; norm, ...
HALF_ULP, STRETCH = 2.0**-9 / math.sqrt(3), 4.0
MOST_MOVED = 0.1  # largest share of tokens for which rounding changes the experts; they are excluded from the other errors


# ---- t8 ----------------------------------------------------------------------------------------------------------------------------------


def make_timer(torch, on_gpu: bool):
    """Return a clock in seconds: synchronized CUDA events, or the wall clock without a GPU."""
    if not on_gpu:
        return time.perf_counter
    base = torch.cuda.Event(enable_timing=True)
    base.record()

    def now() -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return base.elapsed_time(event) / 1e3

    return now


def measure_gemm_rate(torch, now, sizes: SimpleNamespace, device, dtype) -> float:
    """Return the GFLOP/s of a matrix product with the sizes of the model's MLP, median of five."""
    x, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((sizes.tokens, sizes.hidden), (sizes.hidden, sizes.ffn)))
    found = []
    for _ in range(6):
        begun = now()
        for _ in range(10):
            torch.mm(x, w)
        found.append((now() - begun) / 10)
    return 2e-9 * sizes.tokens * sizes.hidden * sizes.ffn / sorted(found[1:])[2]


def measure_t8(arguments: argparse.Namespace) -> dict:
    """Compare training steps with TRL's and return the figures."""
    import numpy as np
    import torch

    from benchmarks import training_step as steps
    from tests.tiny_models import write_tiny

    on_gpu = torch.cuda.is_available() and not arguments.dry
    model, steps.BATCHES["T8"] = (TINY, TINY_T8) if arguments.dry else (QWEN3_06B, T8)
    dtype, device = ("bfloat16", "cuda") if on_gpu else ("float32", "cpu")
    path = write_tiny(tempfile.mkdtemp(), "qwen3", dtype=dtype, std=0.02, **model)
    how = argparse.Namespace(
        batch="T8", pairs=arguments.pairs, budget=arguments.budget, trl_micro_batch=arguments.trl_micro_batch, dtype=dtype, seed=0,
        share_prefix=arguments.share_prefix,
    )  # fmt: skip
    ours, pairs = steps.OurTrainer(path, how), []
    now = make_timer(torch, on_gpu)
    sizes = SimpleNamespace(tokens=min(arguments.budget, 16384), hidden=model["hidden"], ffn=model["ffn"])

    def read_peak() -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0

    def train_pair(tokens, trl_seconds: float) -> None:
        trl_peak = read_peak()
        batch = ours.make_batch(tokens)
        rate = measure_gemm_rate(torch, now, sizes, device, getattr(torch, dtype))
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = now()
        ours.policy.train_step(batch)
        our_seconds = now() - begun
        computed = sum(int((micro.num_references > 0).sum()) for micro in batch.micro_batches)
        pairs.append({
            "trl": trl_seconds, "ours": our_seconds, "tokens": sum(len(p) + len(c) for p, c, _ in tokens), "computed": computed,
            "gemm": rate, "least": steps.count_least_products(ours.policy, batch), "peak_trl": trl_peak,
            "peak_ours": read_peak(),
        })  # fmt: skip
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set by our trainer; with them, TRL would use DDP and be slower
        os.environ.pop(name, None)
    trainer = steps.make_trl_trainer(path, how, train_pair, seconds=now, use_cpu=not on_gpu, bf16=False)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    worst = steps.compare_gradients(ours.gradients, trainer.first_gradients, bar=0.1 if dtype == "bfloat16" else 1e-4)
    kept = pairs[1:]

    def summarize(values) -> list[float]:
        """Return [median, minimum, maximum]."""
        return [round(float(one), 4) for one in (np.median(values), min(values), max(values))]

    memory = {
        "peak_gb_trl_and_our_model": summarize([one["peak_trl"] for one in kept]),
        "peak_gb_ours_and_trl_model": summarize([one["peak_ours"] for one in kept]),
    }
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu (dry: figures have no meaning)",
        "pairs": len(kept),
        "worst_gradient": worst,
        "trl_tokens_per_s": summarize([one["tokens"] / one["trl"] for one in kept]),
        "ours_tokens_per_s": summarize([one["tokens"] / one["ours"] for one in kept]),
        "trl_over_ours": summarize([one["trl"] / one["ours"] for one in kept]),
        "gemm_tflops": summarize([one["gemm"] / 1e3 for one in kept]),
        "of_gemm_limit": summarize([one["least"] / one["gemm"] / one["ours"] for one in kept]),
        "computed_share": summarize([one["computed"] / one["tokens"] for one in kept]),
        **(memory if on_gpu else {}),
    }


# ---- layers ------------------------------------------------------------------------------------------------------------------------------


def record_layer_outputs(job: dict, given: list | None) -> list:
    """Return inputs and outputs of the decoder layers and their parts, and log-probs. Runs in a separate process.

    Args:
        job: Path of the model, sequences and settings.
        given: Inputs of the layers from another process; None: this process's own inputs, rounded to bfloat16.
    """
    import torch

    from tests import parity_cases as cases

    cfg = cases.settings(torch_dtype=job["dtype"], transformer_impl=job["impl"], share_prefix="false", **job["settings"])
    policy = cases.build(job["path"], cfg, 1)
    found: list = []

    def make_hook(name: str):
        def hook(module, inputs, output):
            out = output[0] if isinstance(output, tuple) else output
            found.append((name, cases._numpy(out.detach().float())))

        return hook

    def replace_input(module, args, kwargs):
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if given is None:
            forced = hidden.to(torch.bfloat16)
            found.append(("input", cases._numpy(forced)))
        else:
            forced = torch.from_numpy(given[sum(name == "input" for name, _ in found)])
            found.append(("input", None))
        forced = forced.to(hidden.device, hidden.dtype)
        return (args, kwargs | {"hidden_states": forced}) if "hidden_states" in kwargs else ((forced, *args[1:]), kwargs)

    for layer in policy.chunks[0].decoder.layers:
        layer.register_forward_pre_hook(replace_input, with_kwargs=True)
        layer.self_attention.register_forward_hook(make_hook("self_attention"))
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(make_hook("router"))  # weights [tokens, experts], 0 for experts not chosen
        layer.mlp.register_forward_hook(make_hook("mlp"))
        layer.register_forward_hook(make_hook(""))
    policy.chunks[0].decoder.final_layernorm.register_forward_pre_hook(replace_input, with_kwargs=True)
    policy.chunks[0].decoder.final_layernorm.register_forward_hook(make_hook("final_layernorm"))
    scored = cases.score_tokens(policy, job["sequences"])
    return [*found, *(("log-probs", one) for one in scored)]


def compare_layers(arguments: argparse.Namespace) -> dict:
    """Compare the outputs of all layers with float32 on the CPU and return the errors and their limits."""
    import numpy as np

    from tests import parity_cases as cases
    from tests.tiny_models import write_tiny

    folder = Path(tempfile.mkdtemp())
    sizes = {} if arguments.dry else dict(hidden=512, ffn=1024, head_dim=64)
    if arguments.model == "MLA":
        sizes = {}
    path = write_tiny(folder / "model", **cases.MODELS[arguments.model] | dict(dtype="bfloat16", std=0.05) | sizes)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(4, 120, length).tolist() for length in (96, 33, 17, 64)]
    job = {"path": str(path), "sequences": sequences, "settings": cases.MODEL_SETTINGS.get(arguments.model, {})}
    (folder / "cpu.pkl").write_bytes(pickle.dumps((job | {"dtype": "float32", "impl": "local"}, None)))
    reference = _run_apart(folder / "cpu.pkl", folder / "cpu.out", hides_gpu=True)
    given = [values for name, values in reference if name == "input"]
    impl = "local" if arguments.dry else arguments.impl
    (folder / "gpu.pkl").write_bytes(pickle.dumps((job | {"dtype": "bfloat16", "impl": impl}, given)))
    mine = _run_apart(folder / "gpu.pkl", folder / "gpu.out", hides_gpu=arguments.dry)
    errors: dict[str, float] = {}
    moved: list[np.ndarray] = []  # per layer with experts: whether bfloat16 routes each token to other experts
    assert [name for name, _ in mine] == [name for name, _ in reference]
    for (name, a), (_, b) in zip(mine, reference, strict=True):
        if name == "input":
            alike = slice(None)
            continue
        if name == "router":
            moved.append(((a > 0) != (b > 0)).any(axis=-1))
            alike = ~moved[-1]
            continue
        if name == "log-probs":
            errors[name] = max(errors.get(name, 0.0), float(np.abs(a - b).mean()))
        else:
            errors[name] = max(errors.get(name, 0.0), float(np.linalg.norm((a - b)[alike]) / np.linalg.norm(b[alike])))
    if moved:
        errors["other experts"] = float(np.mean(moved))
    bars = {name: STRETCH * HALF_ULP * math.sqrt(count) for name, count in ROUNDINGS.items()}
    # With bfloat16 inputs, a logit of size s has an error of about 2 s roundings; logits here have a size of about 4.
    bars["log-probs"] = STRETCH * HALF_ULP * math.sqrt(2) * 4
    bars["other experts"] = MOST_MOVED
    shown = {name or "layer": {"error": errors[name], "bar": bars[name]} for name in errors}
    return {"model": arguments.model, "impl": impl, "errors": shown, "passed": all(errors[name] < bars[name] for name in errors)}


def _run_apart(job: Path, out: Path, *, hides_gpu: bool) -> list:
    """Run `record_layer_outputs` in a separate process and return its result."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"CUDA_VISIBLE_DEVICES": ""} if hides_gpu else {})
    ran = subprocess.run(
        [sys.executable, __file__, "_outputs", "--job", str(job), "--out", str(out)], env=env, cwd=ROOT, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-4000:])
    return pickle.loads(out.read_bytes())


def _write_outputs(arguments: argparse.Namespace) -> dict:
    """Write the result of `record_layer_outputs` for a job file."""
    arguments.out.write_bytes(pickle.dumps(record_layer_outputs(*pickle.loads(arguments.job.read_bytes()))))
    return {}


def parse_arguments(argv=None) -> argparse.Namespace:
    """Parse the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("command", choices=("t8", "layers", "_outputs"))
    parser.add_argument("--dry", action="store_true", help="run with tiny sizes on the CPU, to test the code")
    parser.add_argument("--pairs", type=int, default=5, help="t8: steps of each trainer")
    parser.add_argument("--budget", type=int, default=16384, help="t8: max_tokens_per_micro_batch of our trainer")
    parser.add_argument("--trl_micro_batch", type=int, default=4, help="t8: per_device_train_batch_size of TRL")
    parser.add_argument("--share_prefix", default="auto", help="t8: share_prefix of our trainer")
    parser.add_argument("--model", choices=("dense", "biases", "MoE", "MLA"), default="dense", help="layers: kind of model")
    parser.add_argument("--impl", choices=("local", "transformer_engine"), default="local", help="layers: transformer_impl")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run the selected measurement, print its JSON and return the exit code."""
    arguments = parse_arguments()
    found = {"t8": measure_t8, "layers": compare_layers, "_outputs": _write_outputs}[arguments.command](arguments)
    print(json.dumps(found))
    return 0 if found.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main())
