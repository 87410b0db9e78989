"""Moments of a run, and the faults that interrupt it there: kills, errors and signals, also during asynchronous saves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

from tools.torturing.damages import find_largest_file, flip_bit
from tools.torturing.promises import RESUMES, SAVES, SENTENCE, UNMOVED
from tools.torturing.target import BrokenPromiseError, Fault, Target

TRAIN_STEP = "megatron_grpo.core.policy.policy:Policy.train_step"

# Moment -> (function, number of its call).
MOMENTS = {
    "reading the data set": ("megatron_grpo.run.data.prompts:open_stream", 1),
    "joining the other ranks": ("megatron_grpo.core.parallel.state:start", 1),
    "building the model": ("megatron_grpo.run.lifecycle:build_run", 1),
    "first weight sync": ("megatron_grpo.core.trainer.weight_sync:sync", 1),
    "weight sync between steps": ("megatron_grpo.core.trainer.weight_sync:sync", 3),
    "first rollout": ("tests.scripted_engine:ScriptedEngine.generate", 1),
    "sampling": ("tests.scripted_engine:ScriptedEngine.generate", 3),
    "scoring rewards": ("megatron_grpo.run.rewards.reward_manager:RewardManager.__call__", 3),
    "old log-probs": ("megatron_grpo.core.trainer.sample_buffer:SampleBuffer.with_old_logprobs", 4),
    "training, first step": (TRAIN_STEP, 1),
    "training": (TRAIN_STEP, 5),
    "after the optimizer": ("megatron_grpo.core.trainer.sample_buffer:SampleBuffer.after", 5),
    "writing metrics": ("megatron_grpo.run.metrics.metrics_logger:MetricsLogger.step", 5),
    "evaluating": ("megatron_grpo.run.evaluate:Evaluator.run", 2),
    "writing the first checkpoint": ("megatron_grpo.run.checkpoint.distributed:_write", 1),
    "writing a checkpoint": ("megatron_grpo.run.checkpoint.distributed:_write", 2),
    "describing a checkpoint": ("megatron_grpo.run.checkpoint.saving:Checkpoints._others", 2),
    "exporting": ("megatron_grpo.run.lifecycle:export_model", 1),
}  # fmt: skip


MOMENTS_OF_RANK_0 = {
    "beginning a checkpoint": ("megatron_grpo.run.checkpoint.manifest:CheckpointDirectory.begin", 2),
    "publishing the first checkpoint": ("megatron_grpo.run.checkpoint.manifest:CheckpointDirectory.commit", 1),
    "publishing a checkpoint": ("megatron_grpo.run.checkpoint.manifest:CheckpointDirectory.commit", 2),
    "removing an old checkpoint": ("megatron_grpo.run.checkpoint.manifest:CheckpointDirectory.retain", 3),
}  # fmt: skip

ASYNC = ("--async_save", "true")

# Moments in which the run handles stop signals.
STOPPABLE = [
    "building the model",
    "first rollout",
    "sampling",
    "scoring rewards",
    "old log-probs",
    "training",
    "evaluating",
    "writing a checkpoint",
]


def make_injection(moment: str, do: str, rank: int | None = 0) -> dict:
    """Return the description of an injected fault, as `rank.py` reads it.

    Args:
        moment: Key of MOMENTS or MOMENTS_OF_RANK_0.
        do: Fault, as in `rank.py`.
        rank: Rank that executes it; None: all ranks.
    """
    where, call = {**MOMENTS, **MOMENTS_OF_RANK_0}[moment]
    return dict(where=where, call=call, do=do, rank=rank)


def kill_at(moment: str, do: str, rank: int, *flags: str) -> Callable[[Target], None]:
    """Return a fault that sends a fatal signal to a rank at a moment; the run must resume."""

    def inject(target: Target) -> None:
        target.run(*flags, inject=make_injection(moment, do, rank)).require(None)
        target.resume(*flags)

    return inject


def raise_at(moment: str, what: str, *flags: str) -> Callable[[Target], None]:
    """Return a fault that raises an exception in rank 0 at a moment; the run must report it and resume."""

    def inject(target: Target) -> None:
        target.run(*flags, inject=make_injection(moment, f"raise {what}")).require(None, "made up by tools/torture.py|memory")
        target.resume(*flags)

    return inject


def stop_at(moment: str, do: str, *flags: str) -> Callable[[Target], None]:
    """Return a fault that sends a stop signal at a moment; the run must save the last trained step and exit with an error code."""

    def inject(target: Target) -> None:
        ended = target.run(*flags, inject=make_injection(moment, do))
        trained = max((line["step"] for line in target.read_log() if line["what"] == "trained"), default=0)
        saved = max(target.list_checkpoints(), default=0)
        if ended.code == 0 or saved < trained:
            raise BrokenPromiseError(
                f"exit code {ended.code}, last trained step {trained}, last saved step {saved}: {ended.output[-1000:]}"
            )
        target.resume(*flags)

    return inject


def stop_twice(target: Target) -> None:
    """Send SIGINT to the launcher twice, as a second Ctrl-C does."""
    process = target.begin()
    target.wait_for(process, lambda: target.read_log() and target.read_log()[-1]["what"] == "trained")
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
    target.end(process).require(None)
    target.resume()


def kill_repeatedly(target: Target) -> None:
    """Kill the run four times in a row."""
    for call in (2, 1, 3, 1):
        target.run(inject=dict(where=TRAIN_STEP, call=call, do="SIGKILL", rank=call % 2)).require(None)
    target.resume()


def kill_stop_and_damage(target: Target) -> None:
    """Kill the run, stop it, and damage its newest checkpoint.

    The run saves after steps 3 and 6. The second launch begins after step 3, so its second step is step 5.
    """
    target.run(inject=make_injection("writing a checkpoint", "SIGKILL", 1)).require(None)
    target.run(inject=dict(where=TRAIN_STEP, call=2, do="launcher SIGTERM")).require(None, r"saved after optimizer step 5")
    if target.list_checkpoints() != [3, 5]:
        raise BrokenPromiseError(f"checkpoints are {target.list_checkpoints()}, not [3, 5]")
    flip_bit(find_largest_file(target.out / "checkpoints" / "iter_0000005", "*.distcp"))
    target.resume(says=["iter_0000005", "WARNING", r"Resuming from \S+iter_0000003"])


def kill_launcher(target: Target) -> None:
    """Kill the launcher during training."""
    target.run(inject=make_injection("training", "launcher SIGKILL")).require(None)
    target.resume()


def kill_launcher_during_imports(target: Target) -> None:
    """Kill the launcher while its ranks import modules."""
    process = target.begin(cold=True)
    target.wait_for(process, lambda: len(target.find_processes(process)) >= 2)
    process.kill()
    target.end(process)
    target.resume()


def freeze_rank(target: Target) -> None:
    """Stop one rank with SIGSTOP for 5 seconds, as a debugger or a suspended machine does."""
    process = target.begin()
    target.wait_for(process, lambda: any(line["what"] == "trained" for line in target.read_log()))
    pid = target.find_processes(process)[-1]
    os.kill(pid, signal.SIGSTOP)
    subprocess.run(["sleep", "5"], check=True)
    os.kill(pid, signal.SIGCONT)
    target.end(process).require(0)
    target.check_results()


def list_kills_and_signals() -> Iterator[Fault]:
    """Yield the faults that kill processes or send signals."""
    for moment in MOMENTS:
        for rank in (0, 1):
            yield Fault(f"kill/rank {rank}, {moment}", RESUMES, kill_at(moment, "SIGKILL", rank))
    for moment in MOMENTS_OF_RANK_0:
        yield Fault(f"kill/rank 0, {moment}", RESUMES, kill_at(moment, "SIGKILL", 0))
    yield Fault("kill/launcher, training", RESUMES, kill_launcher)
    yield Fault("kill/launcher, ranks import", RESUMES, kill_launcher_during_imports)
    yield Fault("chain/killed, stopped, damaged", RESUMES, kill_stop_and_damage)
    yield Fault("kill/four times in a row", RESUMES, kill_repeatedly)
    yield Fault("kill/segmentation fault, training", RESUMES, kill_at("training", "SIGSEGV", 1))
    for moment in STOPPABLE:
        yield Fault(f"stop/SIGTERM, {moment}", SAVES, stop_at(moment, "launcher SIGTERM"))
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        for moment in ("sampling", "training", "evaluating"):
            to = "launcher " if name == "SIGINT" else ""
            yield Fault(f"stop/{name}, {moment}", SAVES, stop_at(moment, f"{to}{name}"))
    yield Fault("stop/Ctrl-C twice", RESUMES, stop_twice)
    yield Fault("stop/a rank is stopped for 5 s", UNMOVED, freeze_rank)


def list_async_save_faults() -> Iterator[Fault]:
    """Yield the faults during asynchronous saves, where the moments of writing are in a thread."""
    for moment in ("writing the first checkpoint", "writing a checkpoint", "describing a checkpoint", "training"):
        for rank in (0, 1):
            yield Fault(f"async/rank {rank}, {moment}", RESUMES, kill_at(moment, "SIGKILL", rank, *ASYNC))
    yield Fault("async/rank 0, publishing a checkpoint", RESUMES, kill_at("publishing a checkpoint", "SIGKILL", 0, *ASYNC))
    for moment in ("sampling", "writing a checkpoint"):
        yield Fault(f"async/SIGTERM, {moment}", SAVES, stop_at(moment, "launcher SIGTERM", *ASYNC))
    yield Fault("async/input or output error, writing a checkpoint", SENTENCE, raise_at("writing a checkpoint", "OSError", *ASYNC))
