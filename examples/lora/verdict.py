"""Check the result of a LoRA run against the run that trains all weights.

PEFT loads the exported adapter and answers the held-out prompts; its accuracy must be the one that the run reported. Exit with code 0 if
the run passes; else print the problems and exit with code 1.

python examples/lora/verdict.py output/lora output/quickstart
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MAX_BEFORE, MIN_AFTER = 0.5, 0.9  # greedy accuracy on held-out prompts
MAX_BELOW_FULL = 0.05  # accuracy of the full run less that of LoRA
# Difference in right answers between PEFT and the run: where two logits are almost equal, rounding determines the token.
MAX_ANSWER_DIFFERENCE = 1
MAX_LOGPROB_DIFFERENCE = 1e-4  # nats, between sampler and trainer in float32
ADAPTER = ("hf/adapter_config.json", "hf/adapter_model.safetensors", "hf/base_model.json")
FILES = ("plan.json", "metrics.jsonl", "evaluations.jsonl")
COLORS = {"LoRA": "#d1622b", "all weights": "#2563a8"}  # name of a run in table and plot -> color

Row = dict[str, object]


def read_jsonl(path: Path) -> list[dict]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_missing_files(lora: Path, full: Path) -> list[str]:
    """Return one sentence per missing file of the two runs."""
    return [
        f"{run / name} is missing"
        for run, names in ((lora, (*FILES, *ADAPTER)), (full, FILES))
        for name in names
        if not (run / name).exists()
    ]


def summarize_run(run: Path) -> Row:
    """Return the figures of a run: sizes from plan.json, the size of its last checkpoint on disk, and its accuracy."""
    cost = json.loads((run / "plan.json").read_text(encoding="utf-8"))["cost"]
    checkpoints = sorted((run / "checkpoints").glob("iter_*"))
    return {
        "trained parameters": cost["trainable_parameters"],
        "bytes synced per step": cost["weight_push_bytes"],
        "checkpoint bytes": sum(f.stat().st_size for f in checkpoints[-1].rglob("*") if f.is_file()) if checkpoints else 0,
        "held-out accuracy": read_jsonl(run / "evaluations.jsonl")[-1]["correct"],
    }


def find_problems(lora: Path, full: Path, by_peft: int, num_prompts: int) -> list[str]:
    """Return one sentence per problem of the LoRA run.

    Args:
        lora: output_dir of the LoRA run.
        full: output_dir of the run that trains all weights.
        by_peft: Number of right answers of PEFT with the adapter.
        num_prompts: Number of held-out prompts.
    """
    problems = []
    steps, evaluations = read_jsonl(lora / "metrics.jsonl"), read_jsonl(lora / "evaluations.jsonl")
    before, after = evaluations[0]["correct"], evaluations[-1]["correct"]
    full_after = read_jsonl(full / "evaluations.jsonl")[-1]["correct"]
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # absent if no step had a gradient
    if before > MAX_BEFORE:
        problems.append(f"accuracy before training is {before:.3f}, more than {MAX_BEFORE}")
    if after < MIN_AFTER:
        problems.append(f"accuracy after training is {after:.3f}, less than {MIN_AFTER}")
    if after < full_after - MAX_BELOW_FULL:
        problems.append(
            f"accuracy after training is {after:.3f}, and that of all weights is {full_after:.3f}, more than {MAX_BELOW_FULL} higher"
        )
    answer_difference = abs(by_peft - round(after * num_prompts))
    if answer_difference > MAX_ANSWER_DIFFERENCE:
        problems.append(
            f"PEFT gives {by_peft} of {num_prompts} right answers with the adapter, and the run reported {round(after * num_prompts)}: "
            "the exported adapter differs from the one that the run evaluated"
        )
    if not difference <= MAX_LOGPROB_DIFFERENCE:  # also true for NaN
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    return problems


def count_right_answers(adapter: Path, prompts: list[str], answers: list[str], max_tokens: int) -> int:
    """Return how many prompts transformers and PEFT answer correctly with the adapter: greedy, float32."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(str(adapter), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
    encoded = [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    right = 0
    for length in sorted(set(map(len, encoded))):  # no padding within one length
        rows = [row for row, ids in enumerate(encoded) if len(ids) == length]
        ids = torch.tensor([encoded[row] for row in rows])
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        texts = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        right += sum(text == answers[row] for text, row in zip(texts, rows, strict=True))
    return right


def draw_plot(curves: dict[str, list[dict]], path: Path) -> None:
    """Plot the held-out accuracy of each run by optimizer step."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, evaluations in curves.items():
        steps, correct = zip(*((e["step"], e["correct"]) for e in evaluations), strict=True)
        axes.plot(steps, correct, label=f"{name} ({correct[-1]:.3f} at the end)", color=COLORS[name], marker="o", markersize=3)
    axes.set(xlabel="optimizer step", ylabel="held-out accuracy, greedy", ylim=(0, 1.02), title="LoRA and the training of all weights")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def format_table(runs: dict[str, Row]) -> list[str]:
    """Return the lines of a table with one row per figure, one column per run, and the ratio of the second to the first."""
    columns = list(runs)
    lines = [f"{'':24}" + "".join(f"{name:>14}" for name in columns) + f"{'ratio':>9}"]
    for figure in runs[columns[0]]:
        first, second = (runs[name][figure] for name in columns)
        shown = "".join(f"{value:>14,}" if isinstance(value, int) else f"{value:>14.4f}" for value in (first, second))
        lines.append(f"{figure:24}{shown}" + (f"{second / first:>9.2f}" if first else ""))
    return lines


def main() -> int:
    """Print the comparison and the verdict, and plot both runs."""
    lora, full = (Path(argument) for argument in (sys.argv[1:] or ("output/lora", "output/quickstart")))
    if missing := find_missing_files(lora, full):
        print(f"VERDICT: FAILED: {'; '.join(missing)}")
        return 1
    config = json.loads((lora / "hf/adapter_config.json").read_text(encoding="utf-8"))
    held_out = read_jsonl(Path("examples/quickstart/data/test.jsonl"))
    right = count_right_answers(lora / "hf", [row["prompt"] for row in held_out], [row["answer"] for row in held_out], max_tokens=6)
    runs = dict(zip(COLORS, (summarize_run(lora), summarize_run(full)), strict=True))
    for line in format_table(runs):
        print(f"[verdict] {line}")
    evaluations = read_jsonl(lora / "evaluations.jsonl")
    reported = round(evaluations[-1]["correct"] * len(held_out))
    score = f"the run {reported}, PEFT with the exported adapter {right}, difference {abs(reported - right)}"
    print(f"[verdict] right answers of {len(held_out)}: {score}")
    draw_plot(
        {name: read_jsonl(run / "evaluations.jsonl") for name, run in zip(COLORS, (lora, full), strict=True)},
        lora / "plots/lora_and_full.png",
    )
    problems = find_problems(lora, full, right, len(held_out))
    for problem in problems:
        print(f"[verdict] {problem}")
    before, after = evaluations[0]["correct"], evaluations[-1]["correct"]
    verdict = "FAILED" if problems else "PASSED"
    print(
        f"VERDICT: {verdict}: held-out accuracy {before:.3f} -> {after:.3f} with adapters of rank {config['r']}, "
        f"{right / len(held_out):.3f} by PEFT (see {lora}, {lora / 'plots/lora_and_full.png'})"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
