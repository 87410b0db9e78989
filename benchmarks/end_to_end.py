"""Compare complete runs with TRL's GRPOTrainer: CPU seconds of all processes until a reward is reached and until the end.

    python benchmarks/end_to_end.py                                       three cases, one and two processes, three seeds
    python benchmarks/end_to_end.py --cases quickstart --ranks 1 --seeds 1
    python benchmarks/end_to_end.py --report output/end_to_end/runs.jsonl --png docs/end_to_end.png

Both trainers read one configuration file (YAML with the settings of megatron_grpo) and use the same model, data, reward, batch size, loss,
optimizer and learning rates; neither evaluates. Their runs alternate. The CPU seconds of the run's process tree, launcher included, are
read at each logged step, so start-up is everything until the first logged step. megatron_grpo writes its default outputs: metrics,
completions, a checkpoint, an export and plots. TRL saves the model. Each finished run is a line of `runs.jsonl`; a second call continues
the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the models of the tests

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
               "PYTHONPATH": str(ROOT)}  # fmt: skip
QUICKSTART, LORA = ROOT / "examples/quickstart/config.yaml", ROOT / "examples/lora/config.yaml"
# reward: mean over `window` steps that a run must reach. micro: TRL's per_device_train_batch_size, the fastest of those tested.
CASES = {
    "quickstart": SimpleNamespace(reward=0.9, window=5, micro=128),
    "longer": SimpleNamespace(reward=0.7, window=5, micro=16),
    "lora": SimpleNamespace(reward=0.9, window=5, micro=128),
}
RECORDED = {"reward": "reward", "completions/mean_length": "length", "frac_reward_zero_std": "dead"}  # metric -> name in runs.jsonl
# Words of the longer case. A prompt ends with a question; a completion is an answer, a number, and a countdown from that number.
ANSWERS, LEARNABLE, UNLEARNABLE, FILLERS = range(4, 6), range(6, 10), range(10, 14), range(14, 32)
MEAN, SIGMA, LONGEST = 96, 0.9, 512  # tokens of its completions: mean and sigma of the lognormal, limit
QUICK, SLOW = 24.0, 0.25  # gains of the channels of answers and of lengths: answers are learned, lengths are not
COUNTDOWN = range(32, 32 + LONGEST)  # word 32 + n is followed by n more
LONGER = dict(
    torch_dtype="float32", num_generations=8, global_batch_size=64, max_tokens_per_micro_batch=4096, max_completion_length=LONGEST,
    temperature=1.0, loss_type="dapo", beta=0.0, lr=3e-4, lr_warmup_iters=0, lr_decay_style="constant", clip_grad=1.0, max_steps=18,
    dataset_shuffle=False, log_completions_steps=10, overwrite_output_dir=True,
)  # fmt: skip


# ---- inputs ------------------------------------------------------------------------------------------------------------------------------


def first_word_is_answer(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return rewards of the longer case: 1 if the first word is the answer, else 0."""
    return [float(completion.split()[:1] == [right]) for completion, right in zip(completions, answer, strict=True)]


def make_longer_head(words: Any) -> Any:
    """Return the output layer of the longer case: random answers, lognormal lengths and a deterministic countdown.

    A countdown has only one possible continuation, so its gradients are zero.

    Args:
        words: Final hidden state of the model for each word, [words, hidden].
    """
    import torch

    from tests.tiny_models import EOS

    head = torch.zeros_like(words)
    head[[EOS, *COUNTDOWN[:-1]]] = 0.3 / SLOW**2 * words[list(COUNTDOWN)]
    count = torch.arange(1, LONGEST + 1)
    chosen = torch.full((len(words), len(UNLEARNABLE) + len(LEARNABLE) + len(ANSWERS)), -12.0)
    chosen[ANSWERS.start : ANSWERS.stop, len(ANSWERS) :] = 0.0
    density = -(((count + 2).log() - math.log(MEAN) + SIGMA**2 / 2) ** 2) / (2 * SIGMA**2) - (count + 2).log()
    chosen[COUNTDOWN.start : COUNTDOWN.stop, : len(ANSWERS)] = density[:, None] + 4
    choosing = words[ANSWERS.start : UNLEARNABLE.stop].T  # [hidden, words that are followed by a choice]
    return head + (chosen - head @ choosing) @ torch.linalg.pinv(choosing)


def write_longer(folder: Path) -> Path:
    """Write model, prompts and configuration of the longer case, and return the configuration's path."""
    import numpy as np
    import torch
    import yaml
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import write_tiny

    model = write_tiny(folder / "model", vocab=COUNTDOWN.stop, hidden=128, layers=4, ffn=256, max_positions=1024, std=0.02)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        words = network.model.embed_tokens.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
        asked, half = slice(LEARNABLE.start, UNLEARNABLE.stop), words.shape[1] // 2
        words[: asked.start, :half] = words[asked.stop :, :half] = words[asked, half:] = 0
        network.model.norm.weight[:half], network.model.norm.weight[half:] = QUICK, SLOW
        network.lm_head.weight.copy_(make_longer_head(network.model.norm(words)))
    network.save_pretrained(model)
    rng, rows = np.random.default_rng(0), []
    for number in range(2000):
        question = int(rng.choice(LEARNABLE if number % 2 else UNLEARNABLE))
        answer = ANSWERS[question % 2] if number % 2 else rng.choice(ANSWERS)
        rows.append({"prompt": " ".join(map(str, [*rng.choice(FILLERS, 63), question])), "answer": str(answer)})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own = {"model": str(model), "dataset": str(folder / "train.jsonl"), "reward_funcs": [f"{__file__}:first_word_is_answer"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(LONGER | own), encoding="utf-8")
    return folder / "config.yaml"


def make_configuration(case: str, folder: Path) -> Path:
    """Return the configuration file of a case, after making missing inputs."""
    if case == "longer":
        return write_longer(folder / "longer")
    for maker in ("examples/quickstart/make_data.py", "tools/make_tiny_model.py"):  # existing files are kept
        subprocess.run([sys.executable, maker], cwd=ROOT, env=os.environ | ENVIRONMENT, check=True)
    return QUICKSTART if case == "quickstart" else LORA


def read_settings(config: Path) -> dict[str, Any]:
    """Return the settings of a configuration file as a flat dict."""
    import yaml

    read = yaml.safe_load(config.read_text(encoding="utf-8"))
    flat: dict[str, Any] = {}
    for name, value in read.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


# ---- TRL ---------------------------------------------------------------------------------------------------------------------------------


def train_with_trl(config: Path, output: Path, *, seed: int, ranks: int, steps: int | None, micro: int) -> None:
    """Train with TRL's GRPOTrainer and write a line of metrics for each step.

    Args:
        config: Configuration file with settings of megatron_grpo.
        output: Output folder.
        seed: Seed.
        ranks: Number of processes.
        steps: Optimizer steps; None: those of the configuration.
        micro: per_device_train_batch_size.
    """
    import importlib.util as loading

    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    given = read_settings(config)
    file, function = given["reward_funcs"][0].rsplit(":", 1)
    spec = loading.spec_from_file_location("reward", ROOT / file)
    assert spec and spec.loader
    module = loading.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [json.loads(line) for line in (ROOT / given["dataset"]).read_text(encoding="utf-8").splitlines()]
    micro = min(micro, given["global_batch_size"] // ranks)
    adapters = None
    if given.get("tuner_type") == "lora":
        from peft import LoraConfig

        adapters = LoraConfig(r=given["lora_rank"], lora_alpha=given["lora_alpha"], lora_dropout=0.0, target_modules="all-linear")

    class JsonlFile(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **unused):
            if state.is_world_process_zero and logs and "reward" in logs:
                line = {"step": state.global_step} | {name: logs[name] for name in RECORDED}
                with (output / "metrics.jsonl").open("a", encoding="utf-8") as records:
                    records.write(json.dumps(line) + "\n")

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(ROOT / given["model"], dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=getattr(module, function),
        args=GRPOConfig(
            output_dir=str(output), per_device_train_batch_size=micro,
            gradient_accumulation_steps=given["global_batch_size"] // micro // ranks,
            num_generations=given["num_generations"], max_completion_length=given["max_completion_length"],
            max_steps=steps or given["max_steps"], learning_rate=float(given["lr"]), warmup_steps=given["lr_warmup_iters"],
            lr_scheduler_type={"constant": "constant_with_warmup"}.get(given["lr_decay_style"], given["lr_decay_style"]),
            adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0, max_grad_norm=given["clip_grad"],  # our defaults
            beta=given["beta"], temperature=given["temperature"], loss_type=given["loss_type"], use_cpu=True, bf16=False,
            gradient_checkpointing=False, ddp_find_unused_parameters=False, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_steps=1, seed=seed, shuffle_dataset=given.get("dataset_shuffle", True),
        ),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(ROOT / given["model"]),
        callbacks=[JsonlFile()], peft_config=adapters,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(output / "hf"))


# ---- runs --------------------------------------------------------------------------------------------------------------------------------


def make_command(trainer: str, config: Path, output: Path, *, ranks: int, seed: int, steps: int | None, micro: int) -> list[str]:
    """Return the command line of a run.

    Args:
        trainer: "TRL" or "ours".
        config: Configuration file.
        output: Output folder.
        ranks: Number of processes.
        seed: Seed.
        steps: Optimizer steps; None: those of the configuration.
        micro: per_device_train_batch_size of TRL.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    if trainer == "TRL":
        own = dict(config=str(config), output=str(output), seed=seed, ranks=ranks, steps=steps, micro=micro)
        return [*launcher, __file__, "--trl", json.dumps(own)]
    more = ["--max_steps", str(steps)] if steps else []
    return [*launcher, "-m", "megatron_grpo", "train", "--config", str(config), "--output_dir", str(output), "--seed", str(seed),
            "--eval_dataset", "", "--eval_steps", "0", *more]  # fmt: skip


def read_tree_cpu_seconds(root: Any) -> float:
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    import psutil

    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])  # of the process, and of its children that have ended
        except psutil.NoSuchProcess:  # ended: its CPU seconds are counted in its parent at the next step
            pass
    return total


def measure(trainer: str, case: str, config: Path, output: Path, *, ranks: int, seed: int, steps: int | None) -> dict[str, Any]:
    """Execute a run and return its record: reward and CPU seconds until each step, and CPU seconds of the whole run."""
    import psutil

    output.mkdir(parents=True)
    records, seen, cpu = output / "metrics.jsonl", 0, []
    words = make_command(trainer, config, output, ranks=ranks, seed=seed, steps=steps, micro=CASES[case].micro)
    with (output.parent / f"{output.name}.log").open("wb") as log:
        begun = time.time()
        process = subprocess.Popen(words, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
        root = psutil.Process(process.pid)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if records.exists() and (size := records.stat().st_size) > seen:
                new = records.read_bytes()[seen:size].count(b"\n")
                seen = size
                cpu += [read_tree_cpu_seconds(root)] * new
            time.sleep(0.01)  # polling interval, a fraction of a step
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{trainer} ended with exit code {process.returncode}: {log.name}")
    lines = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    total = usage.ru_utime + usage.ru_stime
    cpu += [total] * (len(lines) - len(cpu))
    return dict(
        case=case, trainer=trainer, ranks=ranks, seed=seed, load=os.getloadavg()[0], wall=time.time() - begun, total=total, cpu=cpu,
        **{short: [line[name] for line in lines] for name, short in RECORDED.items()},
    )  # fmt: skip


# ---- figures -----------------------------------------------------------------------------------------------------------------------------


def smooth(values: list[float], window: int) -> list[float]:
    """Return the moving average over the last `window` values."""
    return [sum(some := values[max(0, n + 1 - window) : n + 1]) / len(some) for n in range(len(values))]


def compute_figures(run: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a run in CPU seconds; infinity for a reward that was not reached."""
    case, cpu = CASES[run["case"]], run["cpu"]
    means = smooth(run["reward"], case.window)
    reached = next((n for n in range(case.window - 1, len(means)) if means[n] >= case.reward), None)
    return {
        "first step": cpu[0],
        "a step": (cpu[-1] - cpu[0]) / max(1, len(cpu) - 1),
        "to the reward": math.inf if reached is None else cpu[reached],
        "end": run["total"] - cpu[-1],
        "whole run": run["total"],
        "steps to the reward": math.inf if reached is None else reached + 1,
    }


def iterate_pairs(runs: list[dict[str, Any]]) -> Iterator[tuple[str, int, list[tuple[dict, dict]]]]:
    """Yield (case, ranks, pairs of TRL's and our figures with the same seed)."""
    by_key = {(run["case"], run["ranks"], run["seed"], run["trainer"]): run for run in runs}
    for case in CASES:
        for ranks in sorted({run["ranks"] for run in runs}):
            seeds = sorted({run["seed"] for run in runs if (run["case"], run["ranks"]) == (case, ranks)})
            both = [(by_key.get((case, ranks, seed, "TRL")), by_key.get((case, ranks, seed, "ours"))) for seed in seeds]
            if pairs := [(compute_figures(theirs), compute_figures(mine)) for theirs, mine in both if theirs and mine]:
                yield case, ranks, pairs


def report(runs: list[dict[str, Any]], png: Path | None) -> None:
    """Print the tables of the runs and draw their rewards.

    Args:
        runs: Records of the runs.
        png: Image file; None: no image.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150)
    table = Table("run", "processes", "CPU s", "TRL: median (from, to)", "ours: median (from, to)", "TRL / ours, of pairs")

    def format_spread(values: list[float], digits: int = 1) -> str:
        return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    for case, ranks, pairs in iterate_pairs(runs):
        for name in pairs[0][0]:
            theirs, mine = [pair[0][name] for pair in pairs], [pair[1][name] for pair in pairs]
            digits = 2 if name == "a step" else 1
            ratios = [a / b for a, b in zip(theirs, mine)] if max(mine) < math.inf else [math.nan]
            table.add_row(case, str(ranks), name, format_spread(theirs, digits), format_spread(mine, digits), format_spread(ratios, 2))
        table.add_section()
    console.print(table)
    shown = ["run", "trainer", "processes", "seed", "reward: first, last steps", "frac_reward_zero_std: first third, rest", "mean length"]
    alone = Table(*shown, *compute_figures(runs[0]))
    for run in runs:
        third, few = max(1, len(run["dead"]) // 3), min(5, len(run["reward"]))
        parts = (run["reward"][:few], run["reward"][-few:], run["dead"][:third], run["dead"][third:], run["length"])
        first, last, before, after, length = [sum(part) / len(part) if part else math.nan for part in parts]
        cells = [
            run["trainer"],
            str(run["ranks"]),
            str(run["seed"]),
            f"{first:.2f}, {last:.2f}",
            f"{before:.2f}, {after:.2f}",
            f"{length:.1f}",
        ]
        alone.add_row(run["case"], *cells, *[f"{value:.2f}" for value in compute_figures(run).values()])
    console.print(alone)
    if png:
        draw(runs, png)


def draw(runs: list[dict[str, Any]], png: Path) -> None:
    """Draw the reward of each run over its CPU seconds."""
    from matplotlib.figure import Figure

    cases = [case for case in CASES if any(run["case"] == case for run in runs)]
    figure = Figure(figsize=(4.2 * len(cases), 3.4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for run in (run for run in runs if run["case"] == case):
            color, line = {"TRL": "tab:orange", "ours": "tab:blue"}[run["trainer"]], "-" if run["ranks"] == 1 else "--"
            label = f"{run['trainer']}, {run['ranks']} process{'es' * (run['ranks'] > 1)}"
            known = axes.get_legend_handles_labels()[1]
            means, label = smooth(run["reward"], CASES[case].window), None if label in known else label
            axes.plot(run["cpu"], means, label=label, color=color, linestyle=line, lw=1)
        axes.axhline(CASES[case].reward, color="gray", lw=0.8, ls=":")
        axes.set(title=case, xlabel="CPU seconds of all processes", ylabel=f"reward, mean of {CASES[case].window} steps", xlim=(0, None))
        axes.legend(fontsize=7)
    figure.savefig(png, dpi=110)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--trainers", nargs="+", choices=("TRL", "ours"), default=["TRL", "ours"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="processes of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps (default: those of the configuration)")
    parser.add_argument("--output", type=Path, default=ROOT / "output/end_to_end", help="folder of the runs and of runs.jsonl")
    parser.add_argument("--report", type=Path, help="print the tables of this runs.jsonl without any run")
    parser.add_argument("--png", type=Path, help="draw the rewards into this image file")
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Execute the runs that are missing in runs.jsonl, and print the report."""
    arguments = parse_arguments()
    if own := arguments.trl:
        return train_with_trl(Path(own.pop("config")), Path(own.pop("output")), **own)
    results = arguments.report or arguments.output / "runs.jsonl"
    runs = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
    if not arguments.report:
        trainers = [name for name in arguments.trainers if name != "TRL" or find_spec("trl")]
        if trainers != arguments.trainers:
            print("TRL is not installed (pip install 'megatron-grpo[dev]'): its runs are skipped.")
        configs = {case: make_configuration(case, arguments.output) for case in arguments.cases}
        for seed in range(arguments.seeds):
            for case in arguments.cases:
                for ranks in arguments.ranks:
                    for trainer in trainers if seed % 2 == 0 else trainers[::-1]:
                        name = f"{case}-{trainer}-{ranks}-{seed}"
                        if any((run["case"], run["trainer"], run["ranks"], run["seed"]) == (case, trainer, ranks, seed) for run in runs):
                            continue
                        folder = arguments.output / f"{name}-{time.time_ns()}"
                        runs.append(measure(trainer, case, configs[case], folder, ranks=ranks, seed=seed, steps=arguments.steps))
                        with results.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(runs[-1]) + "\n")
                        print(name, {key: round(value, 2) for key, value in compute_figures(runs[-1]).items()}, flush=True)
    report(runs, arguments.png)


if __name__ == "__main__":
    main()
