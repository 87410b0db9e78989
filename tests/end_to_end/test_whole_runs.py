"""benchmarks/end_to_end.py: its figures on made-up runs, the model of its longer run, and a real run of each trainer."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks/end_to_end.py"
spec = importlib.util.spec_from_file_location("end_to_end_benchmark", HERE)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def record(trainer: str, *, reward: list[float], step: float, ranks: int = 1, seed: int = 0) -> dict:
    cpu = [10 + step * number for number in range(len(reward))]
    fixed = dict(case="quickstart", ranks=ranks, seed=seed, total=cpu[-1] + 3)
    return fixed | dict(trainer=trainer, cpu=cpu, reward=reward, length=[4.0] * len(cpu), dead=[0.0] * len(cpu))


def test_benchmark_counts_cpu_seconds_to_the_first_window_above_target():
    found = benchmark.compute_figures(record("ours", reward=[0.0] * 5 + [1.0] * 5, step=2.0))
    assert found == {
        "first step": 10.0, "a step": 2.0, "to the reward": 28.0, "end": 3.0, "whole run": 31.0, "steps to the reward": 10,
    }  # fmt: skip  # 0.9 in the mean of five steps: all five are 1


def test_benchmark_unreached_reward_has_no_ratio(capsys, tmp_path):
    runs = [record(trainer, reward=[0.5] * 6, step=step) for trainer, step in (("TRL", 3.0), ("ours", 2.0))]
    assert math.isinf(benchmark.compute_figures(runs[0])["to the reward"])
    benchmark.report(runs, tmp_path / "runs.png")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ quickstart")]
    assert "nan" in lines[2] and "1.50 (1.50 to 1.50)" in lines[1]
    assert (tmp_path / "runs.png").stat().st_size > 10_000


def test_benchmark_ratios_compare_equal_seeds_and_processes():
    runs = [record("TRL", reward=[1.0] * 6, step=4.0, seed=seed) for seed in (0, 1)] + [record("ours", reward=[1.0] * 6, step=2.0, seed=1)]
    ((case, ranks, pairs),) = benchmark.iterate_pairs([*runs, record("ours", reward=[1.0] * 6, step=2.0, ranks=2)])
    assert (case, ranks, len(pairs)) == ("quickstart", 1, 1)


def test_benchmark_model_has_even_answers_and_lognormal_lengths(tmp_path):
    import torch

    from tests.tiny_models import EOS, load_tiny

    benchmark.write_longer(tmp_path)
    prompt = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["prompt"]
    words, first = [*map(int, prompt.split())], benchmark.COUNTDOWN.start
    with torch.no_grad():
        found = load_tiny(tmp_path / "model")(torch.tensor([[*words, benchmark.ANSWERS[0], first + 1, first]])).logits[0].softmax(-1)
    answer, length, one, none = found[len(words) - 1 :]
    assert all(abs(answer[word] - 0.5) < 0.15 for word in benchmark.ANSWERS)
    assert one[first] > 0.99 and none[EOS] > 0.99
    probabilities = length[first : benchmark.COUNTDOWN.stop]
    logs = torch.log(torch.arange(len(probabilities)) + 3.0)  # tokens: the answer, the count and what it counts, the end
    mean = float((probabilities * logs).sum())
    assert probabilities.sum() > 0.99
    assert abs(math.exp(mean) - 62) < 10  # the median, less what is above the limit
    assert abs(float((probabilities * (logs - mean) ** 2).sum()) ** 0.5 - benchmark.SIGMA) < 0.1


@pytest.mark.parametrize("trainer", ["ours", "TRL"])
def test_benchmark_measures_each_step_and_writes_report(trainer, tmp_path, monkeypatch, capsys):
    if trainer == "TRL":
        pytest.importorskip("trl", reason="TRL is not installed (pip install 'megatron-grpo[dev]')")
    monkeypatch.setattr(benchmark, "LONGER", benchmark.LONGER | {"max_completion_length": 8, "global_batch_size": 16})
    words = f"--cases longer --trainers {trainer} --ranks 1 --seeds 1 --steps 2 --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *words.split()])
    benchmark.main()
    (run,) = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert 1 < run["cpu"][0] <= run["cpu"][1] < run["total"] and len(run["reward"]) == 2  # equal where both lines were seen at once
    assert f"longer-{trainer}-1-0" in capsys.readouterr().out
    benchmark.main()  # continues the file: there is nothing left to run
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
