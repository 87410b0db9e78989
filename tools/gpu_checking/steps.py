"""The steps of the GPU check, in their order: the most telling first. Plain data; `run` runs them, and checks it without a GPU."""

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
GAP = 0.05  # nats: mean |log-prob of trainer - of sampler|; a peer states 0.011, and stale weights give 1 and more

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

    commands: run one after the other; all must end with `ends`. A command is a list of words, or flags of a run in a folder of its own
    (`of`). needs: packages without which the step is skipped. judge: what the step's folder must show besides, as a sentence that begins
    with "!" where it does not. kills: signal to the command once its run has written `after` metrics.
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
    """Words of a command. OUT stands for the check's folder."""

    words: tuple[str, ...]
    ends: int = 0


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A run. folder: its output_dir inside the check's. kills: a signal, once there are `after` lines of metrics. beside: flags of a server
    that runs meanwhile."""

    folder: str
    flags: Flags = field(default_factory=dict)
    ends: tuple[int, ...] = (0,)
    kills: str = ""
    after: int = 1
    beside: Flags = field(default_factory=dict)

    def make_words(self, out: Path) -> list[str]:
        return _make_words(TRAIN, BASE | {"output_dir": out / self.folder} | self.flags, out)

    def make_server_words(self, out: Path) -> list[str]:
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
    """The model, prompts and the reward of the steps, each made once."""
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


# ---- judges: what a folder must show -----------------------------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_gap(name: str, least: int = 1, bar: float = GAP) -> Callable[[Path, str], str]:
    """The mean difference of log-probs in every step of a run, and how flat it stays."""

    def judge(out: Path, log: str) -> str:
        name_of_mean = "sampling/sampling_logp_difference/mean"
        found = [line[name_of_mean] for line in read_metrics(out / name) if name_of_mean in line]
        if len(found) < least:
            return f"! {len(found)} of {least} steps say how far trainer and sampler are apart"
        said = f"mean log-prob difference {min(found):.4f} to {max(found):.4f}, first {found[0]:.4f}, last {found[-1]:.4f}"
        return said if max(found) < bar else f"! {said}; the bar is {bar}"

    return judge


def judge_reward_growth(name: str) -> Callable[[Path, str], str]:
    def judge(out: Path, log: str) -> str:
        found = [line["reward"] for line in read_metrics(out / name) if "reward" in line]
        if len(found) < 10:
            return f"! {len(found)} steps"
        first, last = sum(found[:5]) / 5, sum(found[-5:]) / 5
        return f"{'' if last > first else '! '}reward {first:.3f} -> {last:.3f}"

    return judge


def judge_equal_weights(one: str, other: str, bar: float) -> Callable[[Path, str], str]:
    """The exported weights of two runs. bar: the largest difference of any weight."""

    def judge(out: Path, log: str) -> str:
        from safetensors.torch import load_file

        a, b = (load_file(out / name / "hf" / "model.safetensors") for name in (one, other))
        worst = max(float((a[key].float() - b[key].float()).abs().max()) for key in a)
        return f"{'' if worst <= bar else '! '}largest difference of a weight {worst:.2e}, the bar is {bar:.0e}"

    return judge


def judge_replay(name: str) -> Callable[[Path, str], str]:
    """Every token of a run took the experts of the sampler, and some completions ended by a stop token."""

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
    def judge(out: Path, log: str) -> str:
        found = [one(out, log) for one in judges]
        return next((said for said in found if said.startswith("!")), "; ".join(found))

    return judge


def judge_threads(out: Path, log: str) -> str:
    found = json.loads(next(line for line in reversed(log.splitlines()) if line.startswith("{")))
    is_right = found["after"] == found["before"] > 1 and found["precision"] == "high" and found["same"]
    return f"{'' if is_right else '! '}{found}"


def judge_memory_error(out: Path, log: str) -> str:
    """Check that a GPU without free memory ends in a sentence that names flags, without a traceback."""
    if "Traceback" in log:
        return "! a traceback, where a sentence was to be"
    return "" if "vllm_gpu_memory_utilization" in log else "! the sentence names no flag that helps"


def judge_no_processes(out: Path, log: str) -> str:
    import subprocess

    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    left = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return f"! {len(left)} processes are left on the GPU" if left else judge_equal_weights("straight", "killed", 1e-2)(out, log)


def report_numbers(*names: str) -> Callable[[Path, str], str]:
    """The numbers of a benchmark's JSON."""

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
# An engine after another in one process, with sleep; without OMP_NUM_THREADS, as a run that no launcher starts.
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
STOP_TOKENS = tuple(range(10, 500, 20))  # a token in twenty: most completions end by one
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
    Step(name="steps_te", shows="the same on Transformer Engine's layers", seconds=180, needs=("transformer_engine",),
         commands=_make_pytest_command(ARITHMETIC, "-k", "transformer_engine")),
    Step(name="layers_local", shows="every kind of layer in bfloat16 against float32 on the CPU", seconds=150, commands=_make_layer_commands("local")),
    Step(name="layers_te", shows="the same of Transformer Engine's", seconds=120, needs=("transformer_engine",),
         commands=_make_layer_commands("transformer_engine")),
    Step(name="memory_offload", shows="offloaded memory is returned to the driver, and its contents come back bit for bit", seconds=180,
         commands=_make_pytest_command("tests/gpu/test_memory_offload.py")),
    Step(name="gap", shows="thirty rollouts: trainer and sampler", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="gap", flags={"max_steps": 30, "sleep_level": 0}),), judge=judge_gap("gap", 30)),
    Step(name="sleep1_graphs", shows="CUDA graphs read pushed weights; sleep 1", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="graphs", flags={"vllm_enforce_eager": "false"}),), judge=judge_gap("graphs", 3)),
    Step(name="sleep2_eval", shows="sleep 2, with an evaluation between two steps of one rollout", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="sleep2", flags={"sleep_level": 2, "num_iterations": 2, "max_steps": 4, "eval_dataset": "OUT/prompts.jsonl",
                                              "eval_steps": 1, "eval_num_prompts": 8}),), judge=judge_gap("sleep2", 2)),
    Step(name="t8", shows="training steps beside TRL's, Qwen3-0.6B sizes", seconds=300, needs=("trl", "datasets"),
         commands=_make_python_command("benchmarks/gpu.py", "t8"), judge=report_numbers("trl_over_ours", "ours_tokens_per_s", "of_gemm_limit")),
    Step(name="straight", shows="four steps, exported", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="straight", flags=SAVING | {"max_steps": 4, "export_hf": "true"}),), judge=judge_gap("straight", 4)),
    Step(name="killed", shows="SIGKILL after two steps leaves nothing on the GPU; the same command ends with the same weights", seconds=150,
         needs=("vllm",), judge=judge_no_processes,
         commands=(RunStep(folder="killed", flags=SAVING | {"max_steps": 4, "export_hf": "true"}, kills="SIGKILL", after=2, ends=(-9, 137)),
                   RunStep(folder="killed", flags=SAVING | {"max_steps": 4, "export_hf": "true"}))),
    Step(name="terminated", shows="SIGTERM saves and ends with 3; Transformer Engine's checkpoint goes on with local layers", seconds=150,
         needs=("vllm", "transformer_engine"), judge=judge_gap("terminated", 2),
         commands=(RunStep(folder="terminated", flags=TE | {"max_steps": 200}, kills="SIGTERM", ends=(3,)),
                   RunStep(folder="terminated", flags=LOCAL | {"max_steps": 200}, kills="SIGTERM", ends=(3,)),
                   RunStep(folder="terminated", flags=TE | {"max_steps": 200}, kills="SIGTERM", ends=(3,)))),
    Step(name="lora", shows="adapters are pushed, and the trial before proves that vLLM takes them", seconds=90, needs=("vllm",),
         commands=(RunStep(folder="lora", flags=LORA),), judge=judge_gap("lora", 3)),
    Step(name="r3_stop", shows="replayed experts, with completions that a stop token ends; sleep 1", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="r3", flags={"model": "OUT/experts", "router_replay_mode": "R3", "stop_token_ids": STOP_TOKENS}),),
         judge=judge_replay("r3")),
    Step(name="masks", shows="top-k, top-p and min-p with their masks, and a regular expression", seconds=150, needs=("vllm",),
         commands=(RunStep(folder="cut", flags={"top_k": 20, "top_p": 0.9, "min_p": 0.02}),
                   RunStep(folder="regex", flags={"top_k": 64, "vllm_structured_outputs_regex": "[0-9 ]{8,60}"})),
         judge=combine_judges(judge_gap("cut", 3), judge_gap("regex", 3))),
    Step(name="partial", shows="completions that go on over weight syncs", seconds=120, needs=("vllm",), judge=judge_gap("partial", 4),
         commands=(RunStep(folder="partial", flags=PARTIAL),)),
    Step(name="sleep2_graphs", shows="sleep 2 with CUDA graphs", seconds=120, needs=("vllm",), judge=judge_gap("sleep2_graphs", 3),
         commands=(RunStep(folder="sleep2_graphs", flags={"sleep_level": 2, "vllm_enforce_eager": "false"}),)),
    Step(name="lora_graphs", shows="adapters with CUDA graphs", seconds=120, needs=("vllm",), judge=judge_gap("lora_graphs", 3),
         commands=(RunStep(folder="lora_graphs", flags=LORA | {"vllm_enforce_eager": "false"}),)),
    Step(name="threads", shows="CPU threads of the trainer after a second engine", seconds=120, needs=("vllm",), judge=judge_threads,
         commands=_make_python_command("-c", THREADS, "OUT/model", '{"vllm_gpu_memory_utilization": 0.2, "vllm_enforce_eager": true}')),
    Step(name="resume", shows="a resumed step is that of the run that was not stopped, with the Adam that is installed", seconds=120,
         commands=_make_pytest_command("tests/gpu/test_resume.py")),
    Step(name="shared", shows="prompts computed once, in a run", seconds=60, needs=("vllm",),
         commands=(RunStep(folder="shared", flags={"share_prefix": "true"}),), judge=judge_gap("shared", 3)),
    Step(name="offload", shows="the optimizer on the host, saved and gone on with", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="offload", flags=SAVING | {"optimizer_cpu_offload": "true", "max_steps": 2}),
                   RunStep(folder="offload", flags=SAVING | {"optimizer_cpu_offload": "true", "max_steps": 3})), judge=judge_gap("offload", 3)),
    Step(name="few_bits", shows="gradients and optimizer state in fewer bits, saved and gone on with", seconds=120, needs=("vllm",),
         commands=(RunStep(folder="few_bits", flags=SAVING | FEW_BITS | {"max_steps": 2}),
                   RunStep(folder="few_bits", flags=SAVING | FEW_BITS | {"max_steps": 3})), judge=judge_gap("few_bits", 3)),
    Step(name="out_of_memory", shows="too little memory for vLLM ends in a sentence", seconds=60, needs=("vllm",), judge=judge_memory_error,
         commands=(RunStep(folder="oom", flags={"vllm_gpu_memory_utilization": 0.999, "max_steps": 1}, ends=(1, 2)),)),
    Step(name="runner_v1", shows="vLLM's older model runner", seconds=60, needs=("vllm",), env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
         commands=(RunStep(folder="v1"),), judge=judge_gap("v1", 3)),
    Step(name="server", shows="a rollout server on the same GPU, whose link then goes over the host", seconds=120,
         needs=("vllm",), judge=judge_gap("server", 3),
         commands=(RunStep(folder="server", flags=SERVER_FLAGS_OMITTED | {"vllm_mode": "server", "vllm_server_token_file": "OUT/token"},
                      beside={"address_file": "OUT/address", "token_file": "OUT/token", "port": 0, "vllm_gpu_memory_utilization": 0.3,
                              "vllm_enforce_eager": "true"}),)),
    Step(name="quickstart", shows="the quickstart learns", seconds=150, needs=("vllm",), judge=judge_reward_growth("quickstart"),
         commands=(*_make_python_command("examples/quickstart/make_data.py"), *_make_python_command("tools/make_tiny_model.py"),
                   RunStep(folder="quickstart", flags=QUICKSTART))),
    Step(name="gap_invariant", shows="thirty rollouts with vLLM's batch-invariant mode", seconds=150, needs=("vllm",),
         env={"VLLM_BATCH_INVARIANT": "1"}, commands=(RunStep(folder="invariant", flags={"max_steps": 30, "sleep_level": 0}),),
         judge=judge_gap("invariant", 30)),
    Step(name="fp8", shows="FP8 linear layers, by tensor", seconds=60, needs=("vllm", "transformer_engine"), judge=judge_gap("fp8", 3, bar=0.3),
         commands=(RunStep(folder="fp8", flags=TE | {"fp8_format": "hybrid"}),)),
)  # fmt: skip
