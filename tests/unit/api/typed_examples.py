"""Examples of the Python API that `mypy` checks (pyproject.toml); an ignored line without a type error is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo import GRPOConfig, GRPOTrainer, RunResult, plan, score


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer)]


class Progress:
    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        control.should_training_stop = logs["reward"] > 0.9


def accepted() -> None:
    args = GRPOConfig(output_dir="out", lr=1e-6, num_generations=8, loss_type="dr_grpo", reward_weights=[1.0], stop=["\n"], max_steps=None)
    rows = [{"prompt": "1 + 1 =", "answer": "2"}]
    trainer = GRPOTrainer("Qwen/Qwen3-0.6B", correct, replace(args, seed=3), rows, {"held out": rows}, callbacks=[Progress()])
    result: RunResult = trainer.train()
    model: Path = result.model
    scores: list[dict[str, Any]] = trainer.evaluate(resume="") + result.history
    GRPOTrainer(Path("model"), [correct, "accuracy"], {"lr": 1e-6}, "train.jsonl", tools=[print], nproc_per_node=2, echo=False)
    steps = plan(args, model="Qwen/Qwen3-0.6B").schedule.num_steps
    first: float | None = score(correct, [{"completion": "2", "answer": "2"}])[0]["reward"]
    print(model, scores, steps, first, trainer.save_model("copy"))


def refused() -> None:
    GRPOConfig().learning_rate = 1e-5  # type: ignore[misc]  # it works; a checker calls the fields read-only, and takes `replace`
    GRPOConfig(lr="x")  # type: ignore[arg-type]
    GRPOConfig(learning_rate="x")  # type: ignore[arg-type]
    GRPOConfig(loss_type="ppo")  # type: ignore[arg-type]
    GRPOConfig(num_generation=8)  # type: ignore[call-arg]
    print(GRPOConfig().num_generation)  # type: ignore[attr-defined]
    GRPOTrainer("model", 3)  # type: ignore[arg-type]
    GRPOTrainer("model", correct, nproc_per_node="2")  # type: ignore[arg-type]
    print(GRPOTrainer("model", correct).train().rewards)  # type: ignore[attr-defined]
