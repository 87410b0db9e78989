"""Outputs of a run: records across kills and resumes, completions, plots, the live line and trackers."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import re
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.grpo.advantages import Advantages
from megatron_grpo.core.metadata import GroupMetadata, Progress
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.trainer.scored_rollout import DynamicSamplingResult, ScoredRollout
from megatron_grpo.core.types import Group, Prompt, ScoredGroup
from megatron_grpo.run.metrics import display
from megatron_grpo.run.metrics.display import describe_phase
from megatron_grpo.run.metrics.reporters import report_to_problems
from megatron_grpo.run.metrics.rollout import Completions, rollout_stats
from megatron_grpo.run.metrics.summary import TimeSummary
from tests.evaluated import evaluated
from tests.loggers import logger_in
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def runs_that_ended():
    """Most tests stop in the middle of a run."""
    yield
    logging.getLogger("megatron_grpo").handlers.clear()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make_logger(folder, **settings):
    return logger_in(folder, **{"console": Console(file=io.StringIO(), width=100)} | settings)


def read_console(metrics):
    return metrics._display.console.file.getvalue()


def log_steps(metrics, first, last, **stats):
    progress = Progress(step=first - 1, num_tokens=100 * (first - 1))
    if not metrics._started:
        metrics.start(progress)
    for _ in range(first, last + 1):
        progress = replace(progress, step=progress.step + 1, num_tokens=progress.num_tokens + 100)
        metrics.log(progress, {"reward": progress.step / 10, "loss": 0.5, "time/step": 0.25} | stats)
    return progress


def read_records(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_metrics_have_one_line_per_optimizer_step(tmp_path):
    log_steps(make_logger(tmp_path), 1, 3)
    told = [(record["step"], record["num_tokens"], record["reward"]) for record in read_records(tmp_path)]
    assert told == [(1, 100, 0.1), (2, 200, 0.2), (3, 300, 0.3)]
    assert [record["tokens_per_second"] for record in read_records(tmp_path)] == [400.0] * 3
    assert {path.name for path in tmp_path.iterdir()} - {display.NOW} == {"metrics.jsonl"}, (
        "plots are drawn where they are asked for, and at the end"
    )


def test_metrics_after_resume_drop_records_of_repeated_steps(tmp_path):
    log_steps(make_logger(tmp_path), 1, 5, kl=1.0)
    log_steps(make_logger(tmp_path), 4, 6, kl=2.0)
    assert [(record["step"], record["kl"]) for record in read_records(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]


def test_metrics_partial_last_line_is_dropped(tmp_path):
    log_steps(make_logger(tmp_path), 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "rew')
    log_steps(make_logger(tmp_path), 3, 3)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]


def test_metrics_write_nan_as_null_and_numpy_numbers_as_json(tmp_path):
    metrics = make_logger(tmp_path)
    metrics.log(
        Progress(step=1),
        {"kl": float("nan"), "loss": float("inf"), "entropy": np.float32(0.5), "skipped_iterations": np.int64(7), "time/step": 1.0},
    )
    [record] = read_records(tmp_path)
    assert (record["kl"], record["loss"], record["entropy"], record["skipped_iterations"]) == (None, None, 0.5, 7)


def test_metrics_of_other_ranks_are_not_written_or_printed(tmp_path):
    metrics = make_logger(tmp_path, rank=1, config={"save_steps": 1})
    metrics.open()
    metrics.start(Progress())
    metrics.skipped_step(Progress(step=1), {"why": "its gradient is not finite"}, ["rank 1, micro-batch 0: row 3"])
    metrics.evaluation(Progress(step=1), [evaluated(1.0)])
    metrics.print_line("WARNING: a line")
    metrics.close()
    assert list(tmp_path.iterdir()) == [] and read_console(metrics) == ""


def test_the_table_at_the_end_compares_the_first_and_the_last_evaluation_also_after_a_resume(tmp_path):
    first = make_logger(tmp_path)
    first.start(Progress())
    first.evaluation(Progress(), [evaluated(0.25, mean_length=9.0)])
    progress = log_steps(first, 1, 2)
    first.evaluation(progress, [evaluated(0.5, mean_length=8.0)])
    second = make_logger(tmp_path)
    progress = log_steps(second, 3, 4)
    second.evaluation(progress, [evaluated(0.75, mean_length=7.0)])
    second.close()
    assert re.search(r"step 0 .*step 4 .*change", read_console(second))
    assert re.search(r"mean@1 .*0\.25.*0\.75.*\+0\.5", read_console(second))
    assert [record["step"] for record in read_records(tmp_path, "evaluations.jsonl")] == [0, 2, 4]


def test_an_evaluation_repeated_at_the_same_step_replaces_the_first(tmp_path):
    metrics = make_logger(tmp_path)
    metrics.start(Progress(step=3))
    for accuracy in (0.1, 0.2):
        metrics.evaluation(Progress(step=3), [evaluated(accuracy)])
    [record] = read_records(tmp_path, "evaluations.jsonl")
    assert (record["step"], record["mean@1"]) == (3, 0.2)
    assert "Evaluation at step 3 (greedy)" in read_console(metrics)


def test_metrics_after_resume_keep_records_of_earlier_steps(tmp_path):
    for number, seconds in ((1, 1.0), (2, 1.0), (3, 1.0), (3, 2.0)):
        metrics = make_logger(tmp_path)
        metrics.start(Progress(step=number - 1))
        metrics.log(Progress(step=number), {"time/step": seconds})
    assert [(record["step"], record["time/step"]) for record in read_records(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


def test_evaluations_after_resume_drop_later_steps(tmp_path):
    for step in (2, 5, 3):
        metrics = make_logger(tmp_path)
        metrics.start(Progress(step=step))
        metrics.evaluation(Progress(step=step), [evaluated(step / 10)])
    assert [record["step"] for record in read_records(tmp_path, "evaluations.jsonl")] == [2, 3]


def test_evaluation_score_is_in_records_and_plots_after_resume(tmp_path, monkeypatch):
    from megatron_grpo.run.metrics import plots as plots

    drawn = []
    monkeypatch.setattr(plots, "refresh", lambda folder, history: drawn.append(dict(history)))
    first = make_logger(tmp_path, total_steps=1)
    first.start(Progress())
    first.evaluation(Progress(), [evaluated(0.25, mean_length=9.0)])
    log_steps(first, 1, 1)
    assert "step 1/1  eval 0.25  reward 0.1" in read_console(first)
    second = make_logger(tmp_path)
    second.start(Progress(step=1))
    second.evaluation(Progress(step=1), [evaluated(0.5, mean_length=8.0)])
    second.refresh_plots()
    assert drawn[-1]["eval"] == [(0, 0.25), (1, 0.5)] and drawn[-1]["reward"] == [(1, 0.1)]


@pytest.mark.parametrize(
    ("steps", "row"),
    [(1, None), (2, "0.1 0.2 +0.1"), (3, "0.1 0.3 +0.2"), (5, "0.15 0.45 +0.3"), (24, "0.55 1.95 +1.4")],
)
def test_the_table_at_the_end_compares_means_over_the_first_and_the_last_rollouts(tmp_path, steps, row):
    """Rewards of 0.1, 0.2, ...: half of them at either end, and ten at most."""
    metrics = make_logger(tmp_path)
    log_steps(metrics, 1, steps)
    metrics.close()
    rows = [line.split() for line in read_console(metrics).splitlines() if "reward while training" in line]
    assert [" ".join(word for word in words if word[-1].isdigit()) for words in rows] == ([row] if row else [])


def test_final_table_omits_metrics_without_first_or_last_value(tmp_path):
    metrics = make_logger(tmp_path)
    metrics.start(Progress())
    for step, right in ((0, float("nan")), (1, 0.5)):
        metrics.evaluation(Progress(step=step), [evaluated(0.25, right=right)])
    metrics.close()
    table = read_console(metrics).partition("Held-out prompts")[2]
    assert "mean@1" in table and "right" not in table and not re.search(r"^\W*step\s+0\s+1\s", table, re.MULTILINE)


def test_reporter_init_has_first_step_and_settings(tmp_path, monkeypatch):
    from megatron_grpo.run.metrics import reporters

    begun, config = queue.Queue(), {"report_to": ["tensorboard"], "lr": 1.0}
    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", begun.put)
    make_logger(tmp_path, config=config).start(Progress(step=6))
    assert begun.get(timeout=60) == reporters.ReporterInit(output_dir=tmp_path, config=config, first_step=7)


def test_repeated_evaluation_replaces_only_its_own_step(tmp_path, monkeypatch):
    from megatron_grpo.run.metrics import plots as plots

    drawn = []
    monkeypatch.setattr(plots, "refresh", lambda folder, history: drawn.append(dict(history)))
    metrics = make_logger(tmp_path)
    metrics.start(Progress(step=2))
    for step, length in ((2, 9.0), (3, 8.0), (3, 7.0)):
        metrics.evaluation(Progress(step=step), [evaluated(length)])
    metrics.refresh_plots()
    assert drawn == [{"eval": [(2, 9.0), (3, 7.0)]}]
    assert [(line["step"], line["mean@1"]) for line in read_records(tmp_path, "evaluations.jsonl")] == [(2, 9.0), (3, 7.0)]


def test_jsonl_file_creates_its_folder(tmp_path):
    from megatron_grpo.run.metrics.records import JsonlFile

    for step in (1, 2):
        JsonlFile(tmp_path / "a" / "b" / "metrics.jsonl").append({"step": step})
    assert read_records(tmp_path / "a" / "b") == [{"step": 1}, {"step": 2}]


def test_pipe_output_has_periodic_plain_lines_and_the_last_step(tmp_path):
    metrics = make_logger(tmp_path, total_steps=50)
    log_steps(metrics, 1, 50)
    lines = [line for line in read_console(metrics).splitlines() if line.startswith("step")]
    assert len(lines) == 2 and lines[0].startswith("step 1/50  reward 0.1") and lines[1].startswith("step 50/50  reward 5")
    assert "\x1b" not in read_console(metrics)


def test_terminal_shows_one_redrawn_line_with_warnings_above(tmp_path):
    console = Console(file=Terminal(), width=120, force_terminal=True, _environ={})
    metrics = make_logger(tmp_path, total_steps=4, console=console)
    log_steps(metrics, 1, 2)
    logging.getLogger("megatron_grpo.somewhere").warning("that is [odd]")
    metrics.close()
    told = read_console(metrics)
    assert "2/4" in told and "s/step" in told and "left" in told
    assert "\x1b[2K" in told and "that is [odd]" in told
    assert logging.getLogger("megatron_grpo").handlers == []


def test_plots_are_drawn_from_logged_metrics(tmp_path):
    from PIL import Image

    metrics = make_logger(tmp_path, config={"save_steps": 30})
    metrics.start(Progress())
    metrics.evaluation(Progress(), [evaluated(0.2)])
    log_steps(metrics, 1, 30, entropy=0.5, **{"completions/mean_length": 3.0, "time/rollout": 0.1, "time/train": 0.2, "kl": float("nan")})
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["entropy.png", "length.png", "reward.png", "step_time.png"]
    for path in (tmp_path / "plots").iterdir():
        colors = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
        assert len(np.unique(colors, axis=0)) > 20, path.name


def test_missing_matplotlib_gives_one_warning(tmp_path, monkeypatch, caplog):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest))
    metrics = make_logger(tmp_path, config={"save_steps": 1})
    log_steps(metrics, 1, 3)
    [warning] = caplog.records
    assert "matplotlib is not installed (pip install 'megatron-grpo[plot]')" in warning.message


def test_reporter_that_is_not_installed_is_rejected_with_its_extra(tmp_path, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'megatron-grpo[wandb]'")):
        make_logger(tmp_path, config={"report_to": ["wandb"]})


def test_an_unknown_service_is_an_error_that_suggests_the_nearest():
    [problem] = report_to_problems(["tensorbord", "none"])
    assert "did you mean tensorboard" in problem.message and problem.nearest == {"report_to": ["tensorboard"]}


def test_tensorboard_gets_the_finite_numbers_of_every_step(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = make_logger(tmp_path, config={"report_to": ["tensorboard"]})
    progress = log_steps(metrics, 1, 3, kl=float("nan"))
    metrics.evaluation(progress, [evaluated(0.5)])
    metrics.close()
    events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("reward")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    tags = events.Tags()["scalars"]
    assert "eval/mean@1" in tags and "kl" not in tags and "step" not in tags


def test_timers_sum_blocks_of_one_name_and_reset():
    timers = Timers()
    for _ in range(2):
        with timers("rollout"):
            time.sleep(0.02)
    with pytest.raises(ValueError), timers("train"):
        raise ValueError
    taken = timers.take()
    assert taken["time/rollout"] >= 0.04 and "time/train" in taken
    assert timers.take().keys() == {"time/other", "time/step"}


def test_timers_assign_untimed_rest_to_other_and_sum_to_step():
    timers = Timers()
    timers.take()
    for _ in range(2):
        time.sleep(0.02)
        with timers("train"):
            time.sleep(0.01)
        time.sleep(0.01)
        taken = timers.take()
        assert taken["time/other"] >= 0.03 and taken["time/train"] >= 0.01
        assert taken.pop("time/step") == sum(taken.values())


def test_timers_nested_block_is_subtracted_from_outer_block():
    before = time.perf_counter()
    timers = Timers()
    with timers("train"):
        time.sleep(0.01)
        with timers("ref_logprobs"):
            time.sleep(0.02)
        time.sleep(0.01)
    taken = timers.take()
    assert taken["time/ref_logprobs"] >= 0.02 and taken["time/train"] >= 0.02
    assert taken.pop("time/step") == sum(taken.values()) <= time.perf_counter() - before


def make_rollout(version=4, number=0):
    """Two prompts, two completions each, two reward functions, one of which does not apply to the last completion."""

    def group(number, raw, lengths, rewards):
        completions = tuple(
            make_completion((1, 2, 3), range(n), (0.0,) * n, text="x" * n, finish_reason=why, version=version) for n, why in lengths
        )
        prompt = Prompt(number=number, row=number + 10, raw=raw, token_ids=(1, 2, 3), columns={})
        return ScoredGroup(group=Group(prompt=prompt, completions=completions), rewards=rewards)

    scored = [
        group(0, "one?", [(2, "stop"), (4, "length")], ((1.0, 0.0), (0.0, 1.0))),
        group(1, [{"role": "user", "content": "zwei?"}], [(1, "stop"), (3, "stop")], ((1.0, 0.5), (1.0, None))),
    ]
    nan = float("nan")
    found = Advantages(
        advantages=np.array([[1.0, -1.0], [0.5, -0.5]]),
        rewards=np.array([[1.0, 1.0], [1.5, 1.0]]),
        rewards_per_func=np.array([[[1, 0], [0, 1]], [[1, 0.5], [1, nan]]]),
        is_zero_std=np.array([True, False]),
    )
    metas = [GroupMetadata.from_group(one) for one in scored]
    reaped = DynamicSamplingResult(kept=metas, sampled=metas, num_rounds=1, num_zero_std_dropped=0, num_given_back=0)
    return ScoredRollout(number=number, result=reaped, advantages=found, penalty=None, local_groups=dict(enumerate(scored)))


def test_step_stats_cover_all_completions_of_all_rollouts():
    from dataclasses import replace

    one = make_rollout()
    other = replace(one, advantages=replace(one.advantages, rewards=one.advantages.rewards + 10), penalty=np.full((2, 2), 0.5))
    stats = rollout_stats([one, other], ["right", "short"])
    rewards = np.array([1.0, 1.0, 1.5, 1.0, 11.0, 11.0, 11.5, 11.0])
    assert (stats["reward"], stats["reward_std"]) == pytest.approx((rewards.mean(), rewards.std(ddof=1)))
    assert stats["completions/mean_length"] == 2.5 and stats["kl_in_reward"] == 0.5


def test_rollout_stats_by_hand():
    stats = rollout_stats([make_rollout()], ["right", "short"])
    assert stats == pytest.approx({
        "reward": 4.5 / 4, "reward_std": 0.25, "rewards/right/mean": 0.75, "rewards/right/std": 0.5,
        "rewards/short/mean": 0.5, "rewards/short/std": 0.5, "frac_reward_zero_std": 0.5, "completions/mean_length": 2.5,
        "completions/min_length": 1, "completions/max_length": 4, "completions/clipped_ratio": 0.25,
        "sampling/refused_completions": 0})  # fmt: skip


def test_completions_table_has_one_row_per_completion(tmp_path):
    import pyarrow.parquet

    told = []
    writer = Completions(tmp_path, reward_names=["right", "short"], write_table=lambda version, table: told.append(table))
    path = writer.write(make_rollout(version=4, number=9))
    assert path == tmp_path / "completions" / "step_000004.parquet"
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == 4
    tokens, logprobs = (np.array(rows[1].pop(name)) for name in ("token_ids", "sampler_logprobs"))
    assert len(tokens) == 7 and np.isnan(logprobs).tolist() == [True] * 3 + [False] * 4  # 3 tokens of the prompt
    assert list(told[0]) == list(rows[1])  # services are not sent what nobody reads
    assert rows[1] == {
        "rollout": 9, "version": 4, "prompt_number": 0, "dataset_row": 10, "generation": 1, "prompt": "one?", "completion": "xxxx",
        "reward": 1.0, "rewards/right": 0.0, "rewards/short": 1.0, "advantage": -1.0, "num_prompt_tokens": 3, "num_completion_tokens": 4,
        "finish_reason": "length"}  # fmt: skip
    assert rows[3]["rewards/short"] is None and json.loads(rows[3]["prompt"]) == [{"role": "user", "content": "zwei?"}]


def test_completions_of_rollouts_with_equal_version_are_separate_files(tmp_path):
    writer = Completions(tmp_path, reward_names=["right", "short"])
    names = ["step_000000.parquet", "step_000001.parquet", "step_000001_1.parquet", "step_000002.parquet"]
    assert [writer.write(make_rollout(version, rollout)).name for rollout, version in enumerate((0, 1, 1, 2))] == names
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == names
    writer.start(Progress(step=1))
    assert [path.name for path in (tmp_path / "completions").iterdir()] == names[:1]


def test_completions_table_of_one_group(tmp_path):
    import pyarrow.parquet

    both = make_rollout()
    path = Completions(tmp_path, reward_names=["right", "short"]).write(replace(both, local_groups={0: both.local_groups[0]}))
    assert [row["completion"] for row in pyarrow.parquet.read_table(path).to_pylist()] == ["xx", "xxxx"]


def test_completions_are_written_once_per_node(tmp_path):
    """Two nodes of two ranks: text is handed to the first rank of the node alone."""

    def body(rank, world, folder):
        from megatron_grpo.core.metadata import Progress
        from megatron_grpo.core.parallel import collectives

        told, both = [], make_rollout()
        where = collectives.node(f"machine {rank // 2}")
        writer = Completions(folder, reward_names=["right", "short"], rank=rank, node=where, write_table=lambda *given: told.append(given))
        writer.start(Progress())
        group = replace(both.local_groups[0].group, prompt=replace(both.local_groups[0].group.prompt, number=rank))
        path = writer.write(replace(both, local_groups={0: replace(both.local_groups[0], group=group)}))
        return where.number, path and str(path.relative_to(folder)), [(version, table["prompt_number"]) for version, table in told]

    found = run_ranks(body, 4, tmp_path)
    files = ["completions/step_000004/node_00000.parquet", None, "completions/step_000004/node_00001.parquet", None]
    assert found == [(rank // 2, files[rank], [(4, [0, 0, 1, 1])] if rank == 0 else []) for rank in range(4)]
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "completions" / "step_000004").to_pydict()
    assert sorted(table["prompt_number"]) == [0, 0, 1, 1, 2, 2, 3, 3] and len(table["completion"]) == 8


def test_completions_nodes_above_limit_alternate(tmp_path):
    from megatron_grpo.core.parallel.collectives import Node

    wrote = {}
    for number in range(5):
        writer = Completions(tmp_path, reward_names=["right", "short"], interval=2, node=Node(number=number, count=5), most_nodes=2)
        wrote[number] = [rollout for rollout in range(0, 12, 2) if writer.write(make_rollout(rollout, rollout))]
    assert [sorted(node for node in wrote if rollout in wrote[node]) for rollout in range(0, 12, 2)] == [
        [0, 1], [2, 3], [0, 4], [1, 2], [3, 4], [0, 1]
    ]  # fmt: skip


def test_completions_after_resume_remove_node_files_and_keep_user_files(tmp_path):
    from megatron_grpo.core.parallel.collectives import Node

    for version in (1, 2, 3):
        Completions(tmp_path, reward_names=["right", "short"], node=Node(number=7, count=9)).write(make_rollout(version, version))
    folder = tmp_path / "completions"
    (folder / "step_000003" / "notes.txt").write_text("mine")
    Completions(tmp_path, reward_names=["right", "short"]).start(Progress(step=2))
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert left == ["step_000001/node_00007.parquet", "step_000003/notes.txt"] and not (folder / "step_000002").exists()


def test_jsonl_file_is_truncated_by_streaming_and_unchanged_if_valid(tmp_path):
    from megatron_grpo.run.metrics import records

    file = records.JsonlFile(tmp_path / "schedule.jsonl")
    rows = list(range(records.LONG // 4))
    for step in (1, 2, 3, 4):
        file.append({"step": step, "rows": rows})
    before = file.path.stat().st_ino
    with file.path.open("a") as stream:
        stream.write('{"step": 5, "rows": [' + "1, " * records.LONG)  # a kill
    tracemalloc.start()
    file.cut(3)
    assert tracemalloc.get_traced_memory()[1] < 10 * records.LONG
    tracemalloc.stop()
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 2, 3] and file.path.stat().st_ino == before
    with file.path.open("a") as stream:
        stream.write("no record\n" + json.dumps({"step": 2, "late": True}) + "\n")
    assert file.cut(2) == [record["step"] for record in file.all()] == [1, 2, 2]


@pytest.mark.parametrize(
    ("steps", "has_checkpoint", "lacking"),
    [([1, 2, 3, 4, 5], True, 0), ([1, 2], True, 3), ([1, 3, 3, 4, 5, 9], True, 1), ([], True, 5), ([], False, 0), ([4, 5], True, 0)],
    ids=["whole", "cut", "a hole", "removed", "begun elsewhere", "begun elsewhere and resumed here"],
)
def test_jsonl_file_with_missing_steps_is_reported(tmp_path, caplog, steps, has_checkpoint, lacking):
    from megatron_grpo.run.metrics import records

    if has_checkpoint:
        (tmp_path / "checkpoints" / "iter_0000005").mkdir(parents=True)
    file = records.JsonlFile(tmp_path / "schedule.jsonl")
    for step in steps:
        file.append({"step": step})
    file.begin(5)
    said = f"{file.path} has no line of {lacking} of the 5 optimizer steps done so far"
    assert (said in caplog.text) == bool(lacking) == bool(caplog.text)


def test_completions_are_written_at_the_interval(tmp_path):
    for every, expected in ((0, []), (2, [0, 2])):
        writer = Completions(tmp_path / str(every), reward_names=["right", "short"], interval=every)
        assert [rollout for rollout in range(4) if writer.write(make_rollout(rollout, rollout))] == expected


# ---- what goes on just now --------------------------------------------------------------------------------------------------------------


def wait_until(is_so) -> None:
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about")


@pytest.fixture
def hours(monkeypatch):
    """Turns the clock that phases and estimates go by."""
    now = [1000.0]
    monkeypatch.setattr("megatron_grpo.core.base.activity.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_phase_description_shows_count_and_estimate(hours):
    with activity.phase("rollout"), activity.phase("sampling", total=1024, unit="completions"):
        assert describe_phase() == "sampling 0 of 1,024 completions"
        activity.advance(256)
        hours(30)
        assert describe_phase() == "sampling 256 of 1,024 completions, 1:30 left"
        activity.advance(768)
        assert describe_phase() == "sampling 1,024 of 1,024 completions, 30 s"
    with activity.phase("starting vLLM"):
        hours(75)
        assert describe_phase() == "starting vLLM, 1:15"
    with activity.phase("eval"), activity.phase("sampling", total=3, unit="completions"):
        assert describe_phase() == "evaluating: sampling 0 of 3 completions"
    assert describe_phase() == "" and activity.current() == ()


def test_phase_that_raises_is_left_without_changing_outer_count():
    with activity.phase("eval", total=5) as outer:
        with pytest.raises(ValueError), activity.phase("sampling", total=3):
            activity.advance(2)
            raise ValueError
        assert activity.current() == (outer,) and outer.done == 0
    before = activity.moves
    activity.advance(0)
    assert activity.moves == before + 1, "whatever is done is a sign of life"


def test_timers_block_is_also_a_phase():
    with Timers()("weight_sync"):
        assert describe_phase() == "syncing weights"


def test_pipe_output_reports_long_phases_periodically(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_SIGNS", 0.05)
    monkeypatch.setattr(display, "SECONDS_BETWEEN_DRAWINGS", 0.01)
    metrics = make_logger(tmp_path, total_steps=9)
    metrics.open()
    with activity.phase("loading weights", total=8, unit="tensors"):
        wait_until(lambda: read_console(metrics).count("loading weights 0 of 8 tensors") >= 2)
    metrics.start(Progress(step=3))
    with activity.phase("reward"):
        wait_until(lambda: "step 3/9  scoring rewards" in read_console(metrics))
    metrics.close()
    told = read_console(metrics)
    time.sleep(0.2)  # in which it would have told four times
    assert read_console(metrics) == told, "nothing is told after the end"


def test_terminal_truncates_long_phase_text(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_DRAWINGS", 0.01)
    console = Console(file=Terminal(), width=80, force_terminal=True, _environ={})
    metrics = make_logger(tmp_path, total_steps=4, console=console)
    log_steps(metrics, 1, 2)
    with activity.phase("sampling", total=1000, unit="completions " + "and so on " * 5 + "of a rather long kind"):
        wait_until(lambda: "sampl" in read_console(metrics))
    metrics.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read_console(metrics))
    assert "rather long" not in plain and "s/step" in plain


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_terminal_of_any_usual_width_shows_step_time_left_reward_phase_count_and_estimate(width, monkeypatch):
    console = Console(file=Terminal(), width=width, force_terminal=True, _environ={})
    shown = display.Display(console, total=1000)
    now = time.monotonic()
    shown._marks.extend([(117, now - 20 * 214.7), (137, now)])
    shown._step, shown._seconds = 137, 214.7
    shown._shown = {"eval gsm8k": 0.7312, "eval math": 0.2144, "reward": 0.5312}
    with activity.phase("rollout", total=4096, unit="completions") as phase:
        activity.advance(312)
        phase.began -= 61
        with console.capture() as captured:
            console.print(shown._line())
    first, second = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert re.match(r"step 137/1000 \S+ +214.7 s/step  51:28:0\d left  reward 0.5312", first)
    assert re.search(r"sampling 312 of 4,096 completions, 12:2\d left", second)
    assert ("eval math 0.2144" in first) == (width > 100)


def test_the_time_left_follows_the_last_20_steps_and_is_not_shown_after_the_last(monkeypatch):
    now = 0.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    shown = display.Display(Console(file=io.StringIO()), total=100)
    shown._marks.append((0, now))
    for step in range(1, 51):
        now += 1.0 if step <= 30 else 10.0
        shown._marks.append((step, now))
    assert shown._seconds_left(50) == 10.0 * 50
    now += 4.0
    assert shown._seconds_left(50) == 10.0 * 50 - 4.0
    now += 100.0
    assert shown._seconds_left(50) == 10.0 * 49, "a step that takes longer than usual"
    assert shown._seconds_left(100) is None


def test_status_file_is_updated_while_running_and_removed_at_end(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_DRAWINGS", 0.01)
    metrics = make_logger(tmp_path, total_steps=4)
    log_steps(metrics, 1, 2)
    with activity.phase("rollout", total=8, unit="completions"):
        metrics._display._wrote_now = float("-inf")
        wait_until(lambda: (tmp_path / display.NOW).exists() and "sampling 0 of 8" in (tmp_path / display.NOW).read_text())
    now = json.loads((tmp_path / display.NOW).read_text())
    assert now["step"] == 2 and re.fullmatch(r"\S+ s/step  .+ left", now["speed"])
    metrics.close()
    assert not (tmp_path / display.NOW).exists()


def test_forced_colors_do_not_redraw_line_in_a_file(tmp_path):
    metrics = make_logger(tmp_path, total_steps=4, console=Console(file=io.StringIO(), width=100, _environ={"FORCE_COLOR": "1"}))
    log_steps(metrics, 1, 2)
    metrics.close()
    assert "\x1b[2K" not in read_console(metrics) and "step 1/4" in read_console(metrics)


def test_fork_in_reward_during_drawing_does_not_deadlock(tmp_path):
    metrics = make_logger(tmp_path, console=Console(file=Terminal(), width=100, force_terminal=True, _environ={}))
    metrics.open()
    for _ in range(20):
        child = os.fork()
        if not child:
            os._exit(0 if metrics._display._lock.acquire(timeout=5) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    metrics.close()


def test_final_summary_shows_time_per_phase():
    spent = TimeSummary()
    spent.before(30.0, step=40)
    for skipped in (False, True):
        spent.add({"time/rollout": 5.0, "time/train": 10.0, "time/step": 15.0, "time/rollout_overlapped": 2.5})
        spent.step(is_skipped=skipped)
    assert spent.rows() == [
        ("loading and restoring", "30.0", "50.0%"),
        ("training", "20.0", "33.3%"),
        ("sampling", "10.0", "16.7%"),
        ("all", "60.0", "100%"),
    ]
    assert spent.describe().startswith("2 optimizer steps (1 skipped); ")
    [cpu] = re.findall(r"; ([\d,]+) s of CPU time on rank 0", spent.describe())
    assert abs(int(cpu.replace(",", "")) - sum(os.times()[:4])) < 5
    assert "; resumed after step 40; 5.0 s of sampling at the same time as other work, not in the table" in spent.describe()


def test_final_summary_is_printed_for_successful_run_only(tmp_path):
    for summary in (True, False):
        metrics = make_logger(tmp_path)
        log_steps(metrics, 1, 1)
        metrics.close(summary=summary)
        assert ("Where the time went" in read_console(metrics)) == summary


@pytest.mark.parametrize(
    "reads", [lambda file: file.all(), lambda file: file.cut(9) and file.all()], ids=["a reader", "a run that goes on"]
)
def test_jsonl_file_reports_unreadable_line_but_not_partial_last_line(tmp_path, caplog, reads):
    from megatron_grpo.run.metrics.records import JsonlFile

    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\x00\x00p": 2}\n{"step": 3}\n{"step"')
    assert reads(JsonlFile(tmp_path / "m.jsonl")) == [{"step": 1}, {"step": 3}]
    assert caplog.messages == [f"{tmp_path}/m.jsonl: line 2 cannot be read and is skipped"]


def test_the_plot_of_the_reward_shows_the_sum_and_each_of_several_rewards():
    from megatron_grpo.run.metrics.plots import PLOTS, _curves
    from megatron_grpo.run.metrics.records import remember

    record = {"step": 1, "reward": 1.5, "rewards/format/mean": 1.0, "rewards/task/mean": 0.25, "rewards/task/std": 0.1, "loss": 0.0}
    history = {"eval": [(0, 0.5)]}
    remember(history, record)
    assert "loss" not in history and "rewards/task/std" not in history
    assert [label for _, label, _ in _curves(PLOTS[0], history)] == [
        "training (weighted sum, mean of a rollout)",
        "format",
        "task",
        "held out",
    ]
    del history["rewards/format/mean"]
    assert [name for name, _, _ in _curves(PLOTS[0], history)] == ["reward", "eval"], "of one reward it is the same curve"


def test_events_record_warnings_resumes_and_skipped_steps_across_resume(tmp_path):
    activity.report_step(0)
    first = make_logger(tmp_path)
    first.open()
    logging.getLogger("megatron_grpo.somewhere").warning("%d rows are %s", 3, "lost")
    first.print_line("WARNING: rewards are all alike")
    first.print_line("a line that is no warning")
    first.close()
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"step": 3, "ki')  # a kill
    second = make_logger(tmp_path)
    second.open()
    activity.report_step(2)
    second.start(Progress(step=2))
    second.record_event("skipped", "Optimizer step 3 was skipped: why.")
    second.close()
    logging.getLogger("megatron_grpo.somewhere").warning("after the run")
    told = [(record["step"], record["kind"], record["text"]) for record in read_records(tmp_path, "events.jsonl")]
    assert told == [
        (0, "warning", "3 rows are lost"),
        (0, "warning", "rewards are all alike"),
        (2, "resumed", "The run resumed after optimizer step 2."),
        (2, "skipped", "Optimizer step 3 was skipped: why."),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"]) for record in read_records(tmp_path, "events.jsonl"))


def test_events_file_that_cannot_be_written_gives_one_warning(tmp_path, caplog):
    (tmp_path / "events.jsonl").mkdir()
    metrics = make_logger(tmp_path)
    metrics.open()
    for _ in range(3):
        metrics.print_line("WARNING: something")
    metrics.close()
    assert read_console(metrics).count("events.jsonl failed") == 1 and "WARNING: something" in read_console(metrics)
