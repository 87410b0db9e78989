"""Runs with partial rollouts over weight syncs: what is trained, what is recorded, and kills at each point."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.rollout.engine import PartialCompletion
from megatron_grpo.run.checkpoint.samples import read_samples
from tests.end_to_end.runs import read_jsonl, stop_after_steps, train, write_inputs
from tests.end_to_end.test_many_steps import get_weights
from tests.mistakes import mistake
from tests.ranks import RanksFailed, run_ranks
from tests.servers import ASKS, Server

STEPS = 5
AHEAD = ["--async_rollout_depth", "1", "--rollout_importance_sampling_mode", "token_truncate"]
# A step waits for two of the engine's slots of six; the others go on with what comes next.
SIZES = ["--num_generations", "4", "--global_batch_size", "8", "--micro_batch_size", "2", "--max_completion_length", "40",
         "--vllm_max_num_seqs", "6", "--max_steps", str(STEPS), "--save_steps", "1", "--save_total_limit", "none"]  # fmt: skip
EXACT = ("loss", "reward", "grad_norm", "staleness/mean", "staleness/tokens/mean", "staleness/versions_per_row", "num_tokens",
         "rollout/partial_rows", "rollout/partial_tokens", "rollout/recomputed_tokens", "rollout/ahead_share",
         "sampling/version_error/max", "dynamic_sample/groups_sampled")  # fmt: skip


def make_flags(folder: Path, *more: str) -> list[str]:
    flags = write_inputs(folder)
    for name in ("--num_generations", "--global_batch_size", "--micro_batch_size", "--max_completion_length"):
        at = flags.index(name)
        del flags[at : at + 2]
    return [*flags, *SIZES, *AHEAD, *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of one rank with dynamic sampling that returns prompts."""
    folder = tmp_path_factory.mktemp("whole")
    flags = make_flags(folder / "inputs", "--oversample_ratio", "1.5")
    assert run_ranks(train, 1, [*flags, "--output_dir", str(folder / "out")], timeout=180) == [0]
    return folder / "out", flags


def read_rows(out: Path) -> dict[tuple[int, int, int], tuple]:
    """Return tokens, bits of log-probs and versions of each recorded completion, by (rollout, prompt, generation)."""
    found = {}
    for path in sorted((out / "completions").glob("step_*.parquet")):
        table = pyarrow.parquet.read_table(path).to_pydict()
        for at, key in enumerate(zip(table["rollout"], table["prompt_number"], table["generation"], strict=True)):
            logprobs = np.array(table["sampler_logprobs"][at], dtype=np.float32).tobytes()
            found[key] = (tuple(table["token_ids"][at]), logprobs, str(table["versions"][at]), table["finish_reason"][at])
    return found


def read_exact(step: dict) -> dict:
    return {name: step[name] for name in EXACT if name in step}


def assert_same(out: Path, whole: Path) -> None:
    """Compare metrics, completions and weights bit for bit."""
    assert list(map(read_exact, read_jsonl(out / "metrics.jsonl"))) == list(map(read_exact, read_jsonl(whole / "metrics.jsonl")))
    assert read_rows(out) == read_rows(whole)
    for name, wanted in get_weights(whole).items():
        assert np.array_equal(get_weights(out)[name], wanted), name


def test_partial_rollouts_tokens_are_at_most_one_rollout_old_and_counted(whole):
    out, _ = whole
    steps, rows = read_jsonl(out / "metrics.jsonl"), read_rows(out)
    versions = {key: eval(spans) for key, (_, _, spans, _) in rows.items()}
    assert len(rows) == 8 * STEPS and {rollout for rollout, *_ in rows} == set(range(STEPS))
    for (rollout, *_), spans in versions.items():  # of one step each: rollout r comes in at step r
        assert {version for version, *_ in spans} <= {max(0, rollout - 1), rollout}
    assert sum(len(spans) > 1 for spans in versions.values()) >= 4
    for step in steps[1:]:
        step_spans = [(key, spans) for key, spans in versions.items() if key[0] == step["step"] - 1]
        ages = Counter()
        for (rollout, *_), spans in step_spans:
            for version, begin, end in spans:
                ages[rollout - version] += end - begin
        assert step["staleness/max"] == step["staleness/tokens/max"] == 1
        assert step["staleness/tokens/mean"] == pytest.approx(ages[1] / ages.total(), abs=1e-12)
        assert step["staleness/versions_per_row"] == np.mean([len(spans) for _, spans in step_spans])
        rows_by_step = {line["step"]: line["tokens_by_version"] for line in read_jsonl(out / "schedule.jsonl")}
        assert rows_by_step[step["step"]] == [[[version, end - begin] for version, begin, end in spans] for _, spans in sorted(step_spans)]
        assert step["staleness/mean"] == np.mean([any(version < rollout for version, *_ in spans) for (rollout, *_), spans in step_spans])
    assert all(step["sampling/version_error/max"] < 1e-4 for step in steps)
    assert all(step["rollout/partial_rows"] > 0 and 0 < step["rollout/ahead_share"] < 1 for step in steps[:-1])
    assert steps[0]["rollout/recomputed_tokens"] == 0
    assert steps[-1]["rollout/partial_rows"] > 0  # what was given back; nothing is begun for a rollout behind the end
    assert all(step["rollout/recomputed_tokens"] > 0 for step in steps[1:])


# (module, class, method, call from which on the process is killed)
MOMENTS = {
    "while completions are sampled": ("core.rollout.turns", "EngineTurnSampler", "poll", 80),
    "when they are interrupted": ("plugins.partial_rollouts.engine", "PartialGeneration", "interrupt", 3),
    "when they are verified": ("plugins.partial_rollouts.trainer", "VersionCheck", "__call__", 2),
    "while a step is trained": ("core.policy.policy", "Policy", "train_step", 3),
    "while a checkpoint is written": ("run.checkpoint.distributed", "ShardedWriter", "gather_files", 3),
}


def train_until_kill(rank: int, world_size: int, flags: list[str], moment: str) -> int:
    module, kind, name, last = MOMENTS[moment]
    owner, calls = getattr(import_module(f"megatron_grpo.{module}"), kind), []
    method = getattr(owner, name)

    def counted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **kwargs)

    setattr(owner, name, counted)
    return train(rank, world_size, flags)


@pytest.mark.parametrize("moment", MOMENTS)
def test_partial_rollouts_killed_run_resumes_exactly(whole, tmp_path, moment):
    out, flags = whole
    flags = [*flags, "--output_dir", str(tmp_path)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train_until_kill, 1, flags, moment, timeout=180)
    assert run_ranks(train, 1, flags, timeout=180) == [0]
    assert_same(tmp_path, out)


def train_until_signal(rank: int, world_size: int, flags: list[str]) -> int:
    stop_after_steps(flags, 2)
    return train(rank, world_size, flags)


def test_partial_rollouts_signal_saves_without_draining(whole, tmp_path):
    out, flags = whole
    flags = [*flags, "--output_dir", str(tmp_path), "--save_steps", "100"]
    assert run_ranks(train_until_signal, 1, flags, timeout=180) == [3]
    assert run_ranks(train, 1, flags, timeout=180) == [0]
    assert_same(tmp_path, out)


def capture_output(rank: int, world_size: int, flags: list[str], output: str) -> int:
    with Path(output).open("w") as stream:
        sys.stdout, sys.stderr = stream, stream
        return train(rank, world_size, flags)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--async_rollout_depth", "0"], "of the checkpoint are dropped and sampled again: async_rollout_depth changed."),
        (["--top_k", "20"], "of the checkpoint are dropped and sampled again: top_k changed."),
    ],
    ids=["depth 0", "top_k"],
)
def test_partial_rollouts_resume_with_other_settings_drops_parts_with_log_line(whole, tmp_path, changes, sentence):
    out, flags = whole
    at = ["--output_dir", str(tmp_path), "--resume", str(out / "checkpoints" / "iter_0000002")]
    assert run_ranks(capture_output, 1, [*flags, *at, *changes], str(tmp_path / "said"), timeout=180) == [0]
    assert sentence in (tmp_path / "said").read_text()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == STEPS - 2


def test_partial_rollouts_resume_with_smaller_depth_drops_older_parts(tmp_path):
    flags = [*make_flags(tmp_path / "inputs"), "--vllm_max_num_seqs", "24"]
    at = flags.index("--async_rollout_depth")
    deep = [*flags[: at + 1], "3", *flags[at + 2 :]]
    assert run_ranks(train, 1, [*deep, "--output_dir", str(tmp_path / "deep")], timeout=180) == [0]
    assert max(step["staleness/max"] for step in read_jsonl(tmp_path / "deep" / "metrics.jsonl")) == 3
    flags += ["--output_dir", str(tmp_path / "out"), "--resume", str(tmp_path / "deep" / "checkpoints" / "iter_0000003")]
    flags += ["--logprob_diff_warn", "1e-9"]
    assert run_ranks(capture_output, 1, flags, str(tmp_path / "said"), timeout=180) == [0]
    text = " ".join((tmp_path / "said").read_text().split())
    assert "partial completions are dropped and sampled again: they have tokens that would be older" in text
    assert "nats on a token (sampling/version_error/max; bound 1e-09)" in text  # of these weights' own tokens
    assert all(step["staleness/max"] <= 1 for step in read_jsonl(tmp_path / "out" / "metrics.jsonl"))


def train_with_mutation(rank: int, world_size: int, flags: list[str], output: str, right: str, wrong: str) -> int:
    import megatron_grpo.plugins.partial_rollouts.engine  # noqa: F401 - what is changed must have been imported

    with mistake("megatron_grpo.plugins.partial_rollouts.engine", right, wrong):
        return capture_output(rank, world_size, flags, output)


def test_partial_rollouts_join_mutation_ends_the_run(whole, tmp_path):
    _, flags = whole
    right, wrong = "np.concatenate([partial.token_ids, tokens])", "np.concatenate([tokens, partial.token_ids])"
    flags = [*flags, "--output_dir", str(tmp_path)]
    assert run_ranks(train_with_mutation, 1, flags, str(tmp_path / "said"), right, wrong, timeout=180) == [1]
    text = " ".join((tmp_path / "said").read_text().split())
    assert "Interrupted completions do not come from the weights of version" in text and "verify_versions 0" in text
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) <= 2


def test_partial_rollouts_two_ranks_are_deterministic(tmp_path):
    flags = [*make_flags(tmp_path / "inputs", "--tensor_model_parallel_size", "2", "--vllm_max_num_seqs", "3"), "--max_steps", "3"]
    for name in ("one", "other"):
        assert run_ranks(train, 2, [*flags, "--output_dir", str(tmp_path / name)], timeout=180) == [0, 0]
    assert_same(tmp_path / "one", tmp_path / "other")
    assert any(len(eval(spans)) > 1 for _, _, spans, _ in read_rows(tmp_path / "one").values())


# ---- rollout servers: they continue while the trainer trains ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(whole, tmp_path_factory):
    """(flags of a run on a server with six slots, two rollouts ahead)."""
    _, flags = whole
    folder = tmp_path_factory.mktemp("served")
    flags, model = [*flags], Path(flags[flags.index("--model") + 1])
    for name in ("--vllm_max_num_seqs", "--vllm_kv_cache_memory_mb", "--oversample_ratio"):
        at = flags.index(name)
        del flags[at : at + 2]
    server = Server(folder / "server", model, "--vllm_max_num_seqs", "6", "--vllm_max_model_len", "256")
    try:
        server.wait()
        yield [
            *flags,
            "--max_completion_length",
            "200",
            "--async_rollout_depth",
            "2",
            "--vllm_mode",
            "server",
            "--vllm_server_host",
            f"@{server.address_file}",
        ]
    finally:
        server.close()


def train_on_servers_until_kill(rank: int, world_size: int, flags: list[str], moment: str = "") -> int:
    """Run without vLLM in the process, and kill it at a point."""
    sys.modules["vllm"] = None
    if not moment:
        return train(rank, world_size, flags)
    MOMENTS.update(SERVED)
    return train_until_kill(rank, world_size, flags, moment)


SERVED = {
    "before the interruption": ("plugins.partial_rollouts.trainer", "PartialRollouts", "interrupt", 4),
    "while servers are interrupted": ("plugins.servers.server_parts", "ServerPartialRollouts", "_interrupted", 3),
    "between interruption and push": ("plugins.servers.servers", "ServerEngine", "load_weights", 3),
    "when it begins to wait for completions": ("plugins.servers.server_parts", "ServerGeneration", "groups", 3),
    "while it trains and servers sample": ("core.policy.policy", "Policy", "train_step", 3),
    "while a checkpoint is written and servers sample": ("run.checkpoint.distributed", "ShardedWriter", "gather_files", 3),
}


def assert_is_whole(out: Path, whole: Path) -> None:
    """Check that the prompts of each rollout are complete, and that all tokens have versions within the limit."""
    rows = read_rows(out)
    prompts = {(rollout, prompt) for rollout, prompt, _ in read_rows(whole)}
    assert {(rollout, prompt) for rollout, prompt, _ in rows} == prompts and len(rows) == 8 * STEPS
    for (rollout, *_), (tokens, _, spans, _) in rows.items():
        spans = eval(spans)
        assert {version for version, *_ in spans} <= set(range(max(0, rollout - 2), rollout + 1))
        assert sum(end - begin for _, begin, end in spans) <= len(tokens)


def test_server_partial_rollouts_continue_over_syncs_with_token_versions(served, whole, tmp_path):
    flags = [*served, "--output_dir", str(tmp_path)]
    assert run_ranks(train_on_servers_until_kill, 1, flags, env=ASKS, timeout=240) == [0]
    assert_is_whole(tmp_path, whole[0])
    steps = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(steps) == STEPS and all(step["sampling/version_error/max"] < 1e-4 for step in steps if "sampling/version_error/max" in step)
    assert any("sampling/version_error/max" in step for step in steps)
    assert any(step["rollout/ahead_share"] > 0 for step in steps) and any(step["rollout/partial_rows"] > 0 for step in steps[1:])
    assert 1 <= max(step["staleness/tokens/max"] for step in steps) <= 2


@pytest.mark.parametrize("moment", SERVED)
def test_server_partial_rollouts_killed_run_resumes(served, whole, tmp_path, moment):
    flags = [*served, "--output_dir", str(tmp_path)]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(train_on_servers_until_kill, 1, flags, moment, env=ASKS, timeout=240)
    assert not (tmp_path / "metrics.jsonl").exists() or len(read_jsonl(tmp_path / "metrics.jsonl")) < STEPS
    assert run_ranks(train_on_servers_until_kill, 1, flags, env=ASKS, timeout=240) == [0]
    assert_is_whole(tmp_path, whole[0])
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == STEPS


def train_on_servers_until_signal(rank: int, world_size: int, flags: list[str]) -> int:
    """Run until a signal a second after the sync of version 1, which cancels the wait for completions."""
    from megatron_grpo.plugins.servers.server_parts import ServerGeneration

    groups = ServerGeneration.groups

    def wait(self, prompts):
        if self.version == 0:
            return groups(self, prompts)
        time.sleep(1.0)  # the servers sample meanwhile: these tokens must be in the checkpoint
        os.kill(os.getpid(), signal.SIGTERM)
        raise CancelledError

    ServerGeneration.groups = wait
    return train_on_servers_until_kill(rank, world_size, flags)


def test_server_partial_rollouts_signal_keeps_sampled_parts(served, whole, tmp_path):
    flags = [*served, "--output_dir", str(tmp_path), "--save_steps", "100"]
    assert run_ranks(train_on_servers_until_signal, 1, flags, env=ASKS, timeout=240) == [3]
    [file] = list((tmp_path / "checkpoints").glob("iter_*/grpo/partial/rank_00000.npz"))
    kept = read_samples(file, PartialCompletion)
    assert kept and all(len(one.token_ids) and one.text == "" for one in kept if not one.finish_reason)
    assert file.parts[-4] == "iter_0000001" and max(one.versions[-1] for one in kept) == 1  # with what was sampled since the sync
    assert run_ranks(
        train_on_servers_until_kill, 1, [*flags, "--verify_versions", "3", "--vllm_server_timeout", "500"], env=ASKS, timeout=240
    ) == [0]
    assert_is_whole(tmp_path, whole[0])
    rows = read_rows(tmp_path)
    for one in kept:  # every token of it is trained
        _, logprobs, *_ = rows[next(key for key in rows if key[1:] == one.key)]
        assert one.logprobs.tobytes() in logprobs
