"""Says whether a run on pictures did what it promises, and draws held-out pictures with the answers before and after. Exit code 0: yes.

python examples/images/verdict.py output/images examples/images/model examples/images/data
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

# Held-out accuracy, greedy, of each kind of question. Who guesses among the answers that a question may have is right so often.
CHANCE = {"color": 1 / 4, "count": 1 / 3, "side": 1 / 2}
MAX_BEFORE, MIN_AFTER = 0.5, 0.85
MAX_LOGPROB_DIFFERENCE = 1e-4  # nats between the sampler's and the trainer's log-probs, float32
FILES = ("config.yaml", "metrics.jsonl", "completions", "plots/reward.png", "hf/config.json", "hf/preprocessor_config.json")
NUM_IMAGES, MAX_ANSWER_TOKENS = 12, 4  # pictures; tokens of an answer


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def find_problems(run: Path) -> tuple[list[str], str]:
    """What is wrong with the run, a sentence each; and the sentence that sums it up."""
    problems = [f"{name} is missing" for name in FILES if not (run / name).exists()]
    if not (run / "metrics.jsonl").exists() or not (run / "evaluations.jsonl").exists():
        return [*problems, "there is nothing to judge"], "no run"
    steps, evaluations = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "evaluations.jsonl")
    seconds = sum(step["time/step"] for step in steps)
    difference = max(step.get("sampling/sampling_logp_difference/max", 0.0) for step in steps)  # none where all rewards are equal
    told = []
    for kind, chance in CHANCE.items():
        accuracy = [evaluation["correct"] for evaluation in evaluations if evaluation["name"] == kind]
        if not accuracy:
            problems.append(f"no question of the kind {kind} was asked")
            continue
        told.append(f"{kind} {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
        if accuracy[0] > MAX_BEFORE:
            problems.append(f"{kind}: accuracy before training is {accuracy[0]:.3f}, more than {MAX_BEFORE}: little was left to learn")
        if accuracy[-1] < MIN_AFTER:
            problems.append(f"{kind}: accuracy after training is {accuracy[-1]:.3f}, less than {MIN_AFTER} (chance: {chance:.2f})")
    if difference > MAX_LOGPROB_DIFFERENCE:
        problems.append(f"sampler and trainer differ by up to {difference:.1e} nats, more than {MAX_LOGPROB_DIFFERENCE}")
    return problems, f"held-out accuracy: {', '.join(told)}, in {len(steps)} steps, {seconds:.0f} s of training"


def generate_answers(model_path: Path, rows: list[dict[str, Any]], data: Path) -> list[str]:
    """What transformers reads out of a checkpoint: the likeliest answer to each row."""
    import torch
    from make_tiny_vlm import encoded_row
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from megatron_grpo import ImageProcessorSpec

    words, image_spec = AutoTokenizer.from_pretrained(model_path), ImageProcessorSpec.from_pretrained(model_path)
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="float32").eval()
    found = []
    for row in rows:
        seen = encoded_row(row, data, words, image_spec)
        patches, grid, ids = torch.from_numpy(seen["patches"]), torch.tensor([seen["grid"]]), list(seen["ids"])
        for _ in range(MAX_ANSWER_TOKENS):
            tokens = torch.tensor([ids])
            types = (tokens == image_spec.image_token).int()
            with torch.no_grad():
                logits = model(input_ids=tokens, pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=types, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == words.eos_token_id:
                break
        found.append(words.decode(ids[len(seen["ids"]) :], skip_special_tokens=True))
    return found


def draw_answers(path: Path, rows: list[dict[str, Any]], data: Path, before: list[str], after: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(3, NUM_IMAGES // 3, figsize=(11, 9.5))
    for axis, row, old, new in zip(axes.T.flat, rows, before, after, strict=True):
        with Image.open(data / row["images"][0]) as picture:
            axis.imshow(picture)
        axis.set_axis_off()
        question = row["messages"][0]["content"].removeprefix("<image>")
        axis.set_title(f"{question}\nbefore: {old}", fontsize=9)
        axis.text(0.5, -0.08, f"after: {new}", transform=axis.transAxes, ha="center", va="top", fontsize=10,
                  color="green" if new == row["answer"] else "red")  # fmt: skip
    figure.tight_layout(h_pad=4)  # the answers stand below
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    run, model, data = (Path(word) for word in (sys.argv[1:] or ("output/images", "examples/images/model", "examples/images/data")))
    problems, summary = find_problems(run)
    rows = read_jsonl(data / "test.jsonl")[:NUM_IMAGES]
    if (run / "hf/config.json").exists():
        before, after = (generate_answers(path, rows, data) for path in (model, run / "hf"))
        draw_answers(run / "before_and_after.png", rows, data, before, after)
        right = [sum(one == row["answer"] for one, row in zip(found, rows, strict=True)) for found in (before, after)]
        print(f"[verdict] of {NUM_IMAGES} held-out pictures {right[0]} were answered rightly before, {right[1]} after: "
              f"{run / 'before_and_after.png'}")  # fmt: skip
        if right[1] <= right[0]:
            problems.append("transformers, on the exported model, answers no more of them rightly than before")
    for problem in problems:
        print(f"[verdict] {problem}")
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary} (see {run})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
