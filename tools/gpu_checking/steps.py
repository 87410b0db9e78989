"""Steps of the GPU check, the most informative first. `run` executes them, and without a GPU checks that they could start."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = sys.executable
TRAIN, SERVE = "train", "serve"
# A small Qwen3 with random weights, in bfloat16: heads of 64 channels, which all kernels take.
MODEL = dict(family="qwen3", hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab=512, max_positions=1024, std=0.05)
GAP = 0.05  # mean |log-prob of trainer - log-prob of sampler| in nats; stale weights give 1 and more

Flags = dict[str, object]
BASE: Flags = {
    "torch_dtype": "bfloat16", "num_generations": 8, "global_batch_size": 32, "micro_batch_size": 8, "max_completion_length": 64,
    "max_steps": 3, "lr": 1e-5, "vllm_gpu_memory_utilization": 0.3, "vllm_enforce_eager": "true", "export_hf": "false", "seed": 1,
    "sleep_level": 1,
}  # fmt: skip
SAVING = {"save_steps": 1, "save_total_limit": 9}
ARITHMETIC = "tests/gpu/test_steps.py"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of the check.

    Args:
        name: Name.
        shows: What the step verifies.
        seconds: Limit of its duration.
        commands: Commands, executed in order; each must end with one of its expected exit codes.
        needs: Packages without which the step is skipped.
        env: Additional environment variables.
        judge: Function that returns a note on the results, given the check's folder and the log; the note of a failure begins with "!".
    """

    name: str
    shows: str
    seconds: int
    commands: tuple[CommandStep | RunStep, ...]
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    judge: Callable[[Path, str], str] = lambda folder, log: ""


@dataclass(frozen=True, kw_only=True)
class CommandStep:
    """Command line of a program.

    Args:
        words: Words of the command; OUT stands for the check's folder.
        ends: Expected exit code.
    """

    words: tuple[str, ...]
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """Training run as a command of a step.

    Args:
        folder: Name of its output_dir in the check's folder.
        flags: Settings.
        ends: Expected exit codes.
        kills: Signal sent to the run; empty: none.
        after: Lines of metrics after which the signal is sent.
        beside: Flags of a rollout server that runs meanwhile; empty: none.
    """

    folder: str
    flags: Flags = field(default_factory=dict)
    ends: tuple[int, ...] = (0,)
    kills: str = ""
    after: int = 1
    beside: Flags = field(default_factory=dict)

    def make_words(self, out: Path) -> list[str]:
        """Return the command line of the run."""
        return _make_words(TRAIN, BASE | {"output_dir": out / self.folder} | self.flags, out)

    def make_server_words(self, out: Path) -> list[str]:
        """Return the command line of the rollout server."""
        return _make_words(SERVE, self.beside, out)


def _make_words(command: str, flags: Flags, out: Path) -> list[str]:
    given: Flags = {"model": out / "model"}
    if command == TRAIN:
        given |= {"dataset": out / "prompts.jsonl", "reward_funcs": f"{out / 'reward.py'}:even"}
    given |= flags
    words = [PYTHON, "-m", "megatron_grpo", command]
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [] if value is None else [f"--{name}", *(str(one).replace("OUT", str(out)) for one in values)]
    return words


def prepare(out: Path) -> None:
    """Write the models, prompts and reward function of the steps, if they do not exist."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model" / "config.json").exists():
        from tests.tiny_models import write_tiny

        write_tiny(out / "model", dtype="bfloat16", **MODEL)
        write_tiny(out / "experts", dtype="bfloat16", **MODEL | {"family": "qwen3_moe", "experts": 8})
    rows = (json.dumps({"prompt": " ".join(str(4 + (7 * i + k) % 500) for k in range(24)), "answer": "4"}) for i in range(400))
    (out / "prompts.jsonl").write_text("".join(row + "\n" for row in rows))
    (out / "reward.py").write_text(
        "def even(completion_ids, **columns):\n    return [sum(t % 2 == 0 for t in ids) / max(len(ids), 1) for ids in completion_ids]\n"
    )


# ---- judges ------------------------------------------------------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_gap(name: str, least: int = 1, bar: float = GAP) -> Callable[[Path, str], str]:
    """Return a judge of the mean log-prob difference between trainer and sampler in each step.

    Args:
        name: Folder of the run.
        least: Number of steps that must have the metric.
        bar: Limit in nats.
    """

    def judge(out: Path, log: str) -> str:
        name_of_mean = "sampling/sampling_logp_difference/mean"
        found = [line[name_of_mean] for line in read_metrics(out / name) if name_of_mean in line]
        if len(found) < least:
            return f"! {len(found)} of {least} steps have {name_of_mean}"
        said = f"mean log-prob difference {min(found):.4f} to {max(found):.4f}, first {found[0]:.4f}, last {found[-1]:.4f}"
        return said if max(found) < bar else f"! {said}; the bar is {bar}"

    return judge


def judge_reward_growth(name: str) -> Callable[[Path, str], str]:
    """Return a judge that compares the mean rewards of the first and last five steps."""

    def judge(out: Path, log: str) -> str:
        found = [line["reward"] for line in read_metrics(out / name) if "reward" in line]
        if len(found) < 10:
            return f"! {len(found)} steps"
        first, last = sum(found[:5]) / 5, sum(found[-5:]) / 5
        return f"{'' if last > first else '! '}reward {first:.3f} -> {last:.3f}"

    return judge


def judge_equal_weights(one: str, other: str, bar: float) -> Callable[[Path, str], str]:
    """Return a judge that compares the exported weights of two runs.

    Args:
        one: Folder of a run.
        other: Folder of the other run.
        bar: Largest allowed difference of a weight.
    """

    def judge(out: Path, log: str) -> str:
        from safetensors.torch import load_file

        a, b = (load_file(out / name / "hf" / "model.safetensors") for name in (one, other))
        worst = max(float((a[key].float() - b[key].float()).abs().max()) for key in a)
        return f"{'' if worst <= bar else '! '}largest difference of a weight {worst:.2e}, the bar is {bar:.0e}"

    return judge


def judge_replay(name: str) -> Callable[[Path, str], str]:
    """Return a judge that checks that the sampler's experts were replayed, and that some completions ended with a stop token."""

    def judge(out: Path, log: str) -> str:
        lines = [line for line in read_metrics(out / name) if "routing/replayed" in line]
        if len(lines) < 3 or min(line["routing/replayed"] for line in lines) < 0.9:
            return "! experts were not replayed in three steps"
        if min(line["completions/clipped_ratio"] for line in lines) == 1:
            return "! no completion ended by a stop token"
        said = judge_gap(name, 3)(out, log)
        return f"{said}, routers agree {min(line['routing/agreement'] for line in lines):.3f}"

    return judge


def combine_judges(*judges: Callable[[Path, str], str]) -> Callable[[Path, str], str]:
    """Return a judge that fails if any of several judges fails."""

    def judge(out: Path, log: str) -> str:
        found = [one(out, log) for one in judges]
        return next((said for said in found if said.startswith("!")), "; ".join(found))

    return judge


def judge_threads(out: Path, log: str) -> str:
    """Check that a second engine changed neither the number of CPU threads, nor the matmul precision, nor the samples."""
    found = json.loads(next(line for line in reversed(log.splitlines()) if line.startswith("{")))
    is_right = found["after"] == found["before"] > 1 and found["precision"] == "high" and found["same"]
    return f"{'' if is_right else '! '}{found}"


def judge_memory_error(out: Path, log: str) -> str:
    """Check that a GPU without free memory ends in an error that names settings, without a traceback."""
    if "Traceback" in log:
        return "! the error is a traceback"
    return "" if "vllm_gpu_memory_utilization" in log else "! the error does not name vllm_gpu_memory_utilization"


def judge_no_processes(out: Path, log: str) -> str:
    """Check that no process is left on the GPU, and that the killed and resumed run has the weights of the uninterrupted one."""
    import subprocess

    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    left = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return f"! {len(left)} processes are left on the GPU" if left else judge_equal_weights("straight", "killed", 1e-2)(out, log)


def report_numbers(*names: str) -> Callable[[Path, str], str]:
    """Return a judge that reports numbers of a benchmark's JSON output.

    Args:
        names: Names to report; all if empty.
    """

    def judge(out: Path, log: str) -> str:
        found = json.loads(next(line for line in reversed(log.splitlines()) if line.startswith("{")))
        return ", ".join(f"{name} {found[name]}" for name in (names or found))

    return judge


# ---- steps -------------------------------------------------------------------------------------------------------------------------------


def _make_python_command(*words: str) -> tuple[CommandStep]:
    return (CommandStep(words=(PYTHON, *words)),)


def _make_pytest_command(*words: str) -> tuple[CommandStep]:
    return _make_python_command("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


def _make_layer_commands(impl: str) -> tuple[CommandStep, ...]:
    models = ("dense", "biases", "MoE", "MLA") if impl == "local" else ("dense", "biases", "MoE")
    return tuple(_make_python_command("benchmarks/gpu.py", "layers", "--impl", impl, "--model", model)[0] for model in models)


VERSIONS = """
import importlib.metadata as m, json, torch
names = ("torch", "megatron-core", "vllm", "transformer-engine", "apex", "trl", "transformers", "flash-attn", "triton")
found = {n: next((m.version(n) for _ in [0] if n in {d.metadata["Name"] for d in m.distributions()}), None) for n in names}
print(json.dumps(found | {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}))
assert torch.cuda.is_bf16_supported()
"""
# Two engines, one after the other, in one process with sleep; OMP_NUM_THREADS is unset, as in a run without a launcher.
THREADS = """
import os, sys
os.environ.pop("OMP_NUM_THREADS", None)
import json, torch
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import start, stop
from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.types import Prompt
start(Layout(world_size=1))
torch.set_float32_matmul_precision("high")
before, drawn = torch.get_num_threads(), []
cfg = RolloutConfig(sleep_level=1, **json.loads(sys.argv[2]))
for _ in range(2):
    engine = ColocatedEngine.build(cfg, model_path=sys.argv[1], dtype="bfloat16", max_model_len=96, seed=0, rank=0, world_size=1)
    with engine.wake_up():
        prompt = Prompt(number=0, row=0, raw="", token_ids=(5, 6, 7), columns={})
        (group,) = engine.generate([prompt], SamplingSettings(n=2, max_completion_length=8), seed=1)
        drawn.append([one.sequence.token_ids.tolist() for one in group.completions])
    engine.close()
found = {"before": before, "after": torch.get_num_threads(), "precision": torch.get_float32_matmul_precision()}
found["same"] = drawn[0] == drawn[1]
print(json.dumps(found), flush=True)
stop()
"""
QUICKSTART = {
    "model": "examples/quickstart/model", "dataset": "examples/quickstart/data/train.jsonl",
    "reward_funcs": "examples/quickstart/reward.py:correct", "global_batch_size": 256, "micro_batch_size": 64,
    "max_completion_length": 6, "lr": 3e-4, "max_steps": 40, "sleep_level": 0, "lr_warmup_iters": 5,
}  # fmt: skip
LORA = {"tuner_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": "all-linear"}
FEW_BITS = {"use_precision_aware_optimizer": "true", "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
PARTIAL = {"async_rollout_depth": 1, "max_steps": 4, "rollout_importance_sampling_mode": "token_truncate"}
STOP_TOKENS = tuple(range(10, 500, 20))  # one token in twenty, so that most completions end with a stop token
SERVER_FLAGS_OMITTED = dict.fromkeys(("vllm_gpu_memory_utilization", "vllm_enforce_eager", "sleep_level"))
TE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}

STEPS: tuple[Step, ...] = (
    Step(name="versions", shows="what is installed", seconds=30, commands=_make_python_command("-c", VERSIONS), judge=report_numbers()),
    Step(name="attention", shows="attention with parents by flash attention, against float32", seconds=90,
         commands=_make_pytest_command("tests/gpu/test_attention.py")),
    Step(name="delta_rule", shows="the gated delta rule by flash-linear-attention, against float32", seconds=240, needs=("fla",),
         commands=_make_pytest_command("tests/gpu/test_delta_rule.py")),
    Step(name="steps_local", shows="an optimizer step on local layers against float64: dense, experts, adapters, shared prompts, host",
         seconds=300, commands=_make_pytest_command(ARITHMETIC, "-k", "not transformer_engine")),
    Step(name="steps_te", shows="an optimizer step on Transformer Engine layers against float64", seconds=180,
         needs=("transformer_engine",), commands=_make_pytest_command(ARITHMETIC, "-k", "transformer_engine")),
    Step(name="layers_local", shows="every kind of layer in bfloat16 against float32 on the CPU", seconds=150,
         commands=_make_layer_commands("local")),
    Step(name="layers_te", shows="every kind of Transformer Engine layer in bfloat16 against float32 on the CPU", seconds=120,
         needs=("transformer_engine",),
         commands=_make_layer_commands("transformer_engine")),
    Step(name="memory_offload", shows="offloaded memory is returned to the driver, and its contents are restored bit for bit", seconds=180,
         commands=_make_pytest_command("tests/gpu/test_memory_offload.py")),
    Step(name="gap", shows="log-prob difference between trainer and sampler in thirty rollouts", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="gap", flags={"max_steps": 30, "sleep_level": 0}),), judge=judge_gap("gap", 30)),
    Step(name="sleep1_graphs", shows="CUDA graphs use synced weights; sleep 1", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="graphs", flags={"vllm_enforce_eager": "false"}),), judge=judge_gap("graphs", 3)),
    Step(name="sleep2_eval", shows="sleep 2, with an evaluation between two steps of one rollout", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="sleep2", flags={"sleep_level": 2, "num_iterations": 2, "max_steps": 4, "eval_steps": 1,
                                                   "eval_dataset": "OUT/prompts.jsonl", "eval_num_prompts": 8}),),
         judge=judge_gap("sleep2", 2)),
    Step(name="t8", shows="training steps beside TRL's, Qwen3-0.6B sizes", seconds=300, needs=("trl", "datasets"),
         commands=_make_python_command("benchmarks/gpu.py", "t8"),
         judge=report_numbers("trl_over_ours", "ours_tokens_per_s", "of_gemm_limit")),
    Step(name="straight", shows="four steps, exported", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="straight", flags=SAVING | {"max_steps": 4, "export_hf": "true"}),), judge=judge_gap("straight", 4)),
    Step(name="killed", shows="SIGKILL after two steps leaves no process on the GPU; the same command then gives the same weights",
         seconds=150, needs=("vllm",), judge=judge_no_processes,
         commands=(RunStep(folder="killed", flags=SAVING | {"max_steps": 4, "export_hf": "true"}, kills="SIGKILL", after=2, ends=(-9, 137)),
                   RunStep(folder="killed", flags=SAVING | {"max_steps": 4, "export_hf": "true"}))),
    Step(name="terminated", shows="SIGTERM saves and exits with 3; a Transformer Engine checkpoint resumes with local layers", seconds=150,
         needs=("vllm", "transformer_engine"), judge=judge_gap("terminated", 2),
         commands=(RunStep(folder="terminated", flags=TE | {"max_steps": 200}, kills="SIGTERM", ends=(3,)),
                   RunStep(folder="terminated", flags=LOCAL | {"max_steps": 200}, kills="SIGTERM", ends=(3,)),
                   RunStep(folder="terminated", flags=TE | {"max_steps": 200}, kills="SIGTERM", ends=(3,)))),
    Step(name="lora", shows="adapters are synced, and the check before the run verifies that vLLM uses them", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="lora", flags=LORA),), judge=judge_gap("lora", 3)),
    Step(name="r3_stop", shows="replayed experts, with completions that end with a stop token; sleep 1", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="r3", flags={"model": "OUT/experts", "router_replay_mode": "R3", "stop_token_ids": STOP_TOKENS}),),
         judge=judge_replay("r3")),
    Step(name="masks", shows="top-k, top-p and min-p with their masks, and a regular expression", seconds=150, needs=("vllm",),
         commands=(RunStep(folder="cut", flags={"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
                   RunStep(folder="regex", flags={"top_k": 64, "vllm_structured_outputs_regex": "[0-9 ]{8,60}"})),
         judge=combine_judges(judge_gap("cut", 3), judge_gap("regex", 3))),
    Step(name="partial", shows="completions that continue after weight syncs", seconds=120, needs=("vllm",), judge=judge_gap("partial", 4),
         commands=(RunStep(folder="partial", flags=PARTIAL),)),
    Step(name="sleep2_graphs", shows="sleep 2 with CUDA graphs", seconds=120, needs=("vllm",), judge=judge_gap("sleep2_graphs", 3),
         commands=(RunStep(folder="sleep2_graphs", flags={"sleep_level": 2, "vllm_enforce_eager": "false"}),)),
    Step(name="lora_graphs", shows="adapters with CUDA graphs", seconds=120, needs=("vllm",), judge=judge_gap("lora_graphs", 3),
         commands=(RunStep(folder="lora_graphs", flags=LORA | {"vllm_enforce_eager": "false"}),)),
    Step(name="threads", shows="CPU threads of the trainer after a second engine", seconds=120, needs=("vllm",), judge=judge_threads,
         commands=_make_python_command("-c", THREADS, "OUT/model", '{"vllm_gpu_memory_utilization": 0.2, "vllm_enforce_eager": true}')),
    Step(name="resume", shows="a resumed step equals that of an uninterrupted run, with the installed Adam", seconds=120,
         commands=_make_pytest_command("tests/gpu/test_resume.py")),
    Step(name="shared", shows="a run with shared prompts", seconds=60, needs=("vllm",),
         commands=(RunStep(folder="shared", flags={"share_prefix": "true"}),), judge=judge_gap("shared", 3)),
    Step(name="offload", shows="the optimizer on the host, saved and resumed", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="offload", flags=SAVING | {"optimizer_cpu_offload": "true", "max_steps": 2}),
                   RunStep(folder="offload", flags=SAVING | {"optimizer_cpu_offload": "true", "max_steps": 3})),
         judge=judge_gap("offload", 3)),
    Step(name="few_bits", shows="gradients and optimizer state in fewer bits, saved and resumed", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="few_bits", flags=SAVING | FEW_BITS | {"max_steps": 2}),
                   RunStep(folder="few_bits", flags=SAVING | FEW_BITS | {"max_steps": 3})), judge=judge_gap("few_bits", 3)),
    Step(name="out_of_memory", shows="too little memory for vLLM ends in an error that names settings", seconds=60, needs=("vllm",),
         judge=judge_memory_error,
         commands=(RunStep(folder="oom", flags={"vllm_gpu_memory_utilization": 0.999, "max_steps": 1}, ends=(1, 2)),)),
    Step(name="runner_v1", shows="vLLM's older model runner", seconds=60, needs=("vllm",), env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
         commands=(RunStep(folder="v1"),), judge=judge_gap("v1", 3)),
    Step(name="server", shows="a rollout server on the same GPU, with weight sync over the host", seconds=120,
         needs=("vllm",), judge=judge_gap("server", 3),
         commands=(RunStep(folder="server", flags=SERVER_FLAGS_OMITTED | {"vllm_mode": "server", "vllm_server_token_file": "OUT/token"},
                      beside={"address_file": "OUT/address", "token_file": "OUT/token", "port": 0, "vllm_gpu_memory_utilization": 0.3,
                              "vllm_enforce_eager": "true"}),)),
    Step(name="quickstart", shows="the reward of the quickstart rises", seconds=150, needs=("vllm",),
         judge=judge_reward_growth("quickstart"),
         commands=(*_make_python_command("examples/quickstart/make_data.py"), *_make_python_command("tools/make_tiny_model.py"),
                   RunStep(folder="quickstart", flags=QUICKSTART))),
    Step(name="gap_invariant", shows="thirty rollouts with vLLM's batch-invariant mode", seconds=150, needs=("vllm",),
         env={"VLLM_BATCH_INVARIANT": "1"}, commands=(RunStep(folder="invariant", flags={"max_steps": 30, "sleep_level": 0}),),
         judge=judge_gap("invariant", 30)),
    Step(name="fp8", shows="FP8 linear layers, by tensor", seconds=60, needs=("vllm", "transformer_engine"),
         judge=judge_gap("fp8", 3, bar=0.3), commands=(RunStep(folder="fp8", flags=TE | {"fp8_format": "hybrid"}),)),
)  # fmt: skip
