"""Check the result of the images example, and plot held-out images with the answers before and after the run.

Exit with code 0 if the run passes; else print the problems and exit with code 1.

python examples/images/verdict.py output/images examples/images/model examples/images/data
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

# Limits of the greedy held-out accuracy of each kind of question; CHANCE is the accuracy of random answers.
CHANCE = {"color": 1 / 4, "count": 1 / 3, "side": 1 / 2}
MAX_BEFORE, MIN_AFTER = 0.5, 0.85
MAX_LOGPROB_DIFFERENCE = 1e-4  # nats, between sampler and trainer in float32
FILES = ("config.yaml", "metrics.jsonl", "completions", "plots/reward.png", "hf/config.json", "hf/preprocessor_config.json")
NUM_IMAGES, MAX_ANSWER_TOKENS = 12, 4  # of the plot


def read_jsonl(path: Path) -> list[dict]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_problems(run: Path) -> tuple[list[str], str]:
    """Return one sentence per problem of the run, and a one-line summary."""
    problems = [f"{name} is missing" for name in FILES if not (run / name).exists()]
    if not (run / "metrics.jsonl").exists() or not (run / "evaluations.jsonl").exists():
        return [*problems, "metrics.jsonl or evaluations.jsonl is missing: there is no result to check"], "no run"
    steps, evaluations = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evaluations.jsonl")
    seconds = sum(step["time/step"] for step in steps)
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # absent if no step had a gradient
    scores = []
    for kind, chance in CHANCE.items():
        accuracy = [evaluation["correct"] for evaluation in evaluations if evaluation["name"] == kind]
        if not accuracy:
            problems.append(f"{kind}: no evaluation")
            continue
        scores.append(f"{kind} {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
        if accuracy[0] > MAX_BEFORE:
            problems.append(f"{kind}: accuracy before training is {accuracy[0]:.3f}, more than {MAX_BEFORE}")
        if accuracy[-1] < MIN_AFTER:
            problems.append(f"{kind}: accuracy after training is {accuracy[-1]:.3f}, less than {MIN_AFTER} (chance: {chance:.2f})")
    if difference > MAX_LOGPROB_DIFFERENCE:
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    return problems, f"held-out accuracy: {', '.join(scores)}, in {len(steps)} steps, {seconds:.0f} s of training"


def generate_answers(model_path: Path, rows: list[dict[str, Any]], data: Path) -> list[str]:
    """Return the greedy answer of a checkpoint to each row, generated with transformers."""
    import torch
    from make_tiny_vlm import encoded_row
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from megatron_grpo import ImageProcessorSpec

    tokenizer, image_spec = AutoTokenizer.from_pretrained(model_path), ImageProcessorSpec.from_pretrained(model_path)
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32").eval()
    found = []
    for row in rows:
        encoded = encoded_row(row, data, tokenizer, image_spec)
        patches, grid, ids = torch.from_numpy(encoded["patches"]), torch.tensor([encoded["grid"]]), list(encoded["ids"])
        for _ in range(MAX_ANSWER_TOKENS):
            tokens = torch.tensor([ids])
            types = (tokens == image_spec.image_token).int()
            with torch.no_grad():
                logits = model(input_ids=tokens, pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=types, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        found.append(tokenizer.decode(ids[len(encoded["ids"]) :], skip_special_tokens=True))
    return found


def draw_answers(path: Path, rows: list[dict[str, Any]], data: Path, before: list[str], after: list[str]) -> None:
    """Plot each row's image with its question and both answers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(3, NUM_IMAGES // 3, figsize=(11, 9.5))
    for axis, row, old, new in zip(axes.T.flat, rows, before, after, strict=True):
        with Image.open(data / row["images"][0]) as image:
            axis.imshow(image)
        axis.set_axis_off()
        question = row["messages"][0]["content"].removeprefix("<image>")
        axis.set_title(f"{question}\nbefore: {old}", fontsize=9)
        axis.text(0.5, -0.08, f"after: {new}", transform=axis.transAxes, ha="center", va="top", fontsize=10,
                  color="green" if new == row["answer"] else "red")  # fmt: skip
    figure.tight_layout(h_pad=4)  # room for the answers below the images
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    """Print the problems and the verdict of a run, and plot its answers."""
    run, model, data = (Path(argument) for argument in (sys.argv[1:] or ("output/images", "examples/images/model", "examples/images/data")))
    problems, summary = find_problems(run)
    rows = read_jsonl(data / "test.jsonl")[:NUM_IMAGES]
    if (run / "hf/config.json").exists():
        before, after = (generate_answers(path, rows, data) for path in (model, run / "hf"))
        draw_answers(run / "before_and_after.png", rows, data, before, after)
        right = [sum(one == row["answer"] for one, row in zip(found, rows, strict=True)) for found in (before, after)]
        print(f"[verdict] right answers on {NUM_IMAGES} held-out images: {right[0]} before, {right[1]} after; "
              f"{run / 'before_and_after.png'}")  # fmt: skip
        if right[1] <= right[0]:
            problems.append("the exported model does not give more right answers with transformers than the model before the run")
    for problem in problems:
        print(f"[verdict] {problem}")
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary} (see {run})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
