"""`--async_rollout_depth`: required settings, and its names in other frameworks."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.cli import main

SIZES = "--world_size 2 --micro_batch_size 2 --global_batch_size 16 --num_generations 4 --max_steps 40"
SERVERS = "--vllm_mode server --vllm_server_host h"
CORRECTED = f"{SERVERS} --rollout_importance_sampling_mode token_truncate"


@pytest.fixture
def plan(capsys):
    def plan(words: str) -> tuple[int, dict]:
        code = main(["plan", "--json", *SIZES.split(), *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize(
    "words",
    [
        f"--async_rollout_depth 1 {CORRECTED}",
        f"--async_rollout_depth 1 {SERVERS} --old_logprobs rollout",
        "--async_rollout_depth 0",
        "--async_rollout_depth 1 --old_logprobs rollout",
        "--async_rollout_depth 3 --rollout_importance_sampling_mode token_mask",
        f"--async_rollout_depth 3 {CORRECTED} --stop END",
    ],
)
def test_async_rollout_with_off_policy_correction_is_accepted(plan, words):
    assert plan(words)[0] == 0


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (f"--async_rollout_depth 3 {CORRECTED} --top_k 9 --vllm_structured_outputs_regex a+", {"async_rollout_depth": [0, 1]}),
        ("--async_rollout_depth 2", {"rollout_importance_sampling_mode": ["token_truncate"], "old_logprobs": ["rollout"]}),
        ("--async_rollout_depth 2 --old_logprobs rollout --top_k 9 --vllm_structured_outputs_regex a+", {"async_rollout_depth": [0]}),
        (f"--async_rollout_depth 1 {SERVERS}", {"rollout_importance_sampling_mode": ["token_truncate"], "old_logprobs": ["rollout"]}),
    ],
)
def test_async_rollout_rejections_name_valid_values(plan, words, nearest):
    """The messages are those of tests/refusals.yaml, which a test holds."""
    code, found = plan(words)
    assert code == 2 and [error["nearest"] for error in found["errors"]] == [nearest]
    for flag, values in nearest.items():
        for value in values:
            assert plan(f"{words} --{flag} {value}")[0] == 0


@pytest.mark.parametrize("dialect", ["", "--dialect swift-megatron --beta 0.04"])
def test_async_generate_of_frameworks_sets_async_rollout_depth(plan, dialect):
    code, found = plan(f"--async_generate true {CORRECTED} {dialect}")
    assert code == 0
    versions = [(row["rollout"], row["sampled_by_version"]) for row in found["timetable"]]
    assert dict(versions) == {0: 0, 1: 0}
    code, found = plan(f"--async_generate true --async_rollout_depth 0 {CORRECTED} {dialect}")
    message = "async_generate (true) means async_rollout_depth 1, but async_rollout_depth is 0. Use one of them."
    assert code == 2 and message in found["errors"][0]["message"]


@pytest.mark.parametrize(
    ("sizes", "mean", "most"),
    [
        ("--steps_per_generation 2", 2.5, 3), ("--num_iterations 2", 2.5, 3), ("--steps_per_generation 4", 5.5, 7),
        ("--steps_per_generation 2 --num_iterations 2", 5.5, 7),
    ],
)  # fmt: skip
def test_plan_reports_staleness_of_async_rollouts(plan, sizes, mean, most):
    code, found = plan(f"--async_rollout_depth 1 {CORRECTED} {sizes}")
    [said] = [warning for warning in found["warnings"] if warning.startswith("With async_rollout_depth 1, rows")]
    assert code == 0 and f"up to {most} optimizer steps stale when they are trained ({mean:g} on average)" in said
    assert max(row["staleness"] for row in found["timetable"]) == most


@pytest.mark.parametrize(
    ("sizes", "depth", "mean", "most"),
    [
        ("", 1, 1, 1), ("", 2, 2, 2), ("", 3, 3, 3), ("--steps_per_generation 2", 1, 2.5, 3), ("--steps_per_generation 2", 2, 4.5, 5),
        ("--num_iterations 2", 3, 6.5, 7), ("--steps_per_generation 4", 2, 9.5, 11), ("--steps_per_generation 4", 3, 13.5, 15),
        ("--generation_batch_size 12 --allow_unaligned_generation true", 2, 2.25, 3),
        ("--generation_batch_size 12 --allow_unaligned_generation true", 3, 3.25, 4),
    ],
)  # fmt: skip
def test_plan_reports_versions_and_oldest_token_of_partial_rollouts(sizes, depth, mean, most):
    """The bound: a rollout begins at most so many sampling steps before its own, and is sampled by the versions between."""
    from megatron_grpo.commands.planning.summary import schedule_rows, staleness
    from megatron_grpo.core.batching.schedule import TrainingSchedule
    from megatron_grpo.run.config import resolve
    from megatron_grpo.run.config.rules.batch_sizes import checked_sizes

    cfg = resolve([*SIZES.split(), *sizes.split(), "--async_rollout_depth", str(depth), "--old_logprobs", "rollout"])
    found = checked_sizes(cfg)
    assert found.partial_rollouts and staleness(found) == (mean, most)
    schedule = TrainingSchedule(found)
    arrivals = sorted({schedule.find_version(rollout) for rollout in range(40)})
    for row in schedule_rows(schedule, 12):
        at = arrivals.index(row["newest_version"])
        assert row["sampled_by_version"] == arrivals[max(0, at - depth)] and row["newest_version"] == schedule.find_version(row["rollout"])
    for step in (schedule.step(k) for k in range(12)):
        due = arrivals.index(step.index) if step.index in arrivals else None
        wanted = [] if due is None else [r for r in range(40) if schedule.find_version(r) in arrivals[due + 1 : due + 1 + depth]]
        assert (
            list(step.ahead) == wanted and not step.launches and not step.arriving and step.evaluates == range(step.index, step.index + 1)
        )


def test_plan_figure_shows_versions_of_async_rollouts(capsys):
    for words, said in (("--old_logprobs rollout", "rollout 3 by v1 to v3"), (f"{SERVERS} --old_logprobs rollout", "rollout 3 by v2\n")):
        depth = "2" if SERVERS not in words else "1"
        assert main(["plan", *SIZES.split(), "--plan_rollouts", "4", "--async_rollout_depth", depth, *words.split()]) == 0
        lines = capsys.readouterr().out
        assert said.strip() in "\n".join(line.rstrip() for line in lines.splitlines())
        assert ("partial rollouts" in lines) == (SERVERS not in words)


def test_async_rollout_of_one_step_is_one_step_stale_without_warning(plan):
    code, found = plan(f"--async_rollout_depth 1 {CORRECTED}")
    assert code == 0 and [row["staleness"] for row in found["timetable"]] == [0] * 4 + [1] * 4
    assert not [warning for warning in found["warnings"] if "stale" in warning]
