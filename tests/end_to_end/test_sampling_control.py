"""Dynamic sampling and over-sampling in complete runs: which prompts are trained, which are sampled again, and resume.

Also the error of a reward that fails. Completions are scripted.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

STEPS, GROUPS, ROWS = 4, 4, 31
# Two of three prompts teach nothing: all their completions get the same reward.
REWARD = """
def picky(completion_ids, dead, **columns):
    return [1.0 if is_zero_std else sum(ids) / 1000 for ids, is_zero_std in zip(completion_ids, dead)]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    flags = write_inputs(folder, rows=ROWS)
    lines = [{**line, "dead": row % 3 != 0} for row, line in enumerate(read_jsonl(folder / "data.jsonl"))]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    return [*flags, *("--reward_funcs", f"{folder}/reward.py:picky"), *("--max_steps", str(STEPS)), *("--micro_batch_size", "2"),
            *("--save_steps", "1"), *("--save_total_limit", "none")]  # fmt: skip


MODES = {
    "dynamic": ["--dynamic_sample", "true", "--max_resample_times", "8", "--oversample_ratio", "2.5"],
    "over-sampled": ["--oversample_ratio", "1.5"],
}


@pytest.fixture(scope="module", params=MODES)
def run(inputs, tmp_path_factory, request):
    """(mode, output_dir, flags) of a run of two data-parallel ranks."""
    out, flags = tmp_path_factory.mktemp("run"), [*inputs, *MODES[request.param]]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(out)]) == [0, 0]
    return request.param, out, flags


def read_trained(out: Path) -> list[dict[int, list[float]]]:
    """Return prompt number -> rewards of each rollout."""
    import pyarrow.parquet

    rollouts = []
    for path in sorted((out / "completions").iterdir()):
        table, rewards = pyarrow.parquet.read_table(path).to_pydict(), {}
        for number, reward in zip(table["prompt_number"], table["reward"], strict=True):
            rewards.setdefault(number, []).append(reward)
        rollouts.append(rewards)
    return rollouts


def is_live(rewards: list[float]) -> bool:
    return len(set(rewards)) > 1


def read_used(out: Path, step: int) -> int:
    ours = out / "checkpoints" / f"iter_{step:07d}" / "grpo"
    progress, prompts = (json.loads((ours / name).read_text()) for name in ("progress.json", "prompts.json"))
    assert progress["num_prompts"] == prompts["taken"]
    return prompts["taken"]


def find_varying_prompts(flags: list[str], count: int) -> list[bool]:
    """Return whether the prompts of the run's stream have varying rewards."""
    from megatron_grpo.run.config.parse import resolve
    from megatron_grpo.run.data.chat import load_tokenizer
    from megatron_grpo.run.data.prompts import open_stream

    cfg = resolve(flags, launcher_world_size=2)
    stream = open_stream(cfg.data, load_tokenizer(cfg.model.model), seed=cfg.run.seed)
    return [not prompt.columns["dead"] for prompt in stream.take(count)]


def test_dynamic_sampling_trains_each_prompt_with_a_signal_once(run):
    mode, out, flags = run
    rollouts = read_trained(out)
    assert [len(rollout) for rollout in rollouts] == [GROUPS] * STEPS
    alive = find_varying_prompts(flags, read_used(out, STEPS))
    numbers = [number for rollout in rollouts for number, rewards in rollout.items() if is_live(rewards)]
    assert numbers == [number for number, is_alive in enumerate(alive) if is_alive]
    dead = sum(not is_live(rewards) for rollout in rollouts for rewards in rollout.values())
    assert (dead > 0) == (mode == "over-sampled")  # one round is not enough there
    assert all(step["frac_reward_zero_std"] == 0 for step in read_jsonl(out / "metrics.jsonl")) == (mode != "over-sampled")


def test_dynamic_sampling_metrics_count_sampled_prompts(run):
    mode, out, _ = run
    before = 0
    for step in read_jsonl(out / "metrics.jsonl"):
        after = read_used(out, step["step"])
        assert step["dynamic_sample/groups_sampled"] == after - before + step["dynamic_sample/prompts_given_back"]
        assert step["dynamic_sample/zero_std_groups_replaced"] == after - before - GROUPS
        before = after
    rounds = max(step["dynamic_sample/rounds"] for step in read_jsonl(out / "metrics.jsonl"))
    given_back = max(step["dynamic_sample/prompts_given_back"] for step in read_jsonl(out / "metrics.jsonl"))
    assert (rounds > 1, given_back > 0) == (mode == "dynamic", mode == "dynamic"), (rounds, given_back)


@pytest.mark.parametrize("layout", [[], ["--tensor_model_parallel_size", "2", "--micro_batch_size", "4"]], ids=["dp2", "tp2"])
def test_dynamic_sampling_resume_continues_with_the_next_prompts(run, tmp_path, layout):
    _, out, flags = run
    at = str(out / "checkpoints" / "iter_0000002")
    assert run_ranks(scripted.train, 2, [*flags, *layout, "--output_dir", str(tmp_path), "--resume", at]) == [0, 0]
    assert read_trained(tmp_path) == read_trained(out)[2:]
    tolerance = 1e-4 if layout else 0.0
    for one, other in zip(read_jsonl(out / "metrics.jsonl")[2:], read_jsonl(tmp_path / "metrics.jsonl"), strict=True):
        assert (other["loss"], other["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=tolerance, abs=tolerance)
        assert {name: value for name, value in one.items() if name.startswith("dynamic_sample/")}.items() <= other.items()


# ---- what a run says -------------------------------------------------------------------------------------------------------------------


def train_and_listen(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    import sys

    code = scripted.train(rank, world_size, flags)
    sys.stdout.flush()
    return code, Path("/proc/self/fd/1").read_text() + Path("/proc/self/fd/2").read_text() * (not _same_file())


def _same_file() -> bool:
    return Path("/proc/self/fd/1").resolve() == Path("/proc/self/fd/2").resolve()


def test_failing_reward_ends_the_run_with_its_error(inputs, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        'calls = []\n\n\ndef late(completion_ids, **columns):\n    calls.append(1)\n    if len(calls) > 1:\n'
        '        raise KeyError("no such column")\n    return [float(len(ids)) for ids in completion_ids]\n'
    )  # fmt: skip
    flags = [*inputs, "--output_dir", str(tmp_path / "out"), "--reward_funcs", f"{reward}:late"]
    (first, said), (second, echo) = run_ranks(train_and_listen, 2, flags)
    assert (first, second) == (1, 1)
    assert said.count("a reward function failed") == 1 and "late" in said and "no such column" in said
    assert "Traceback" not in said and "a reward function failed" not in echo
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) == 1
