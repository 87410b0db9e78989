"""The moments of a run, and the faults that strike at one: kills, stops, signals, also with checkpoints beside the steps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

from tools.torturing.damages import flip, one_of
from tools.torturing.promises import RESUMES, SAVES, SENTENCE, UNMOVED
from tools.torturing.target import Broken, Fault, Victim

TRAIN_STEP = "megatron_grpo.core.policy.policy:Policy.train_step"

# Moments of a run: where, and which call of it.
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

# Moments from which a stop can be heard.
POLITE = [
    "building the model",
    "first rollout",
    "sampling",
    "scoring rewards",
    "old log-probs",
    "training",
    "evaluating",
    "writing a checkpoint",
]


def at(moment: str, do: str, rank: int | None = 0) -> dict:
    where, call = {**MOMENTS, **MOMENTS_OF_RANK_0}[moment]
    return dict(where=where, call=call, do=do, rank=rank)


def killed(moment: str, do: str, rank: int, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(*flags, inject=at(moment, do, rank)).must(None)
        victim.continues(*flags)

    return hurt


def raised(moment: str, what: str, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(*flags, inject=at(moment, f"raise {what}")).must(None, "made up by tools/torture.py|memory")
        victim.continues(*flags)

    return hurt


def stopped(moment: str, do: str, *flags: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        ended = victim.run(*flags, inject=at(moment, do))
        trained = max((line["step"] for line in victim.lines() if line["what"] == "trained"), default=0)
        saved = max(victim.checkpoints(), default=0)
        if ended.code == 0 or saved < trained:
            raise Broken(f"exit code {ended.code}, step {trained} was trained, and {saved} is saved: {ended.said[-1000:]}")
        victim.continues(*flags)

    return hurt


def twice_stopped(victim: Victim) -> None:
    process = victim.begin()
    victim.until(process, lambda: victim.lines() and victim.lines()[-1]["what"] == "trained")
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
    victim.end(process).must(None)
    victim.continues()


def killed_again_and_again(victim: Victim) -> None:
    for call in (2, 1, 3, 1):
        victim.run(inject=dict(where=TRAIN_STEP, call=call, do="SIGKILL", rank=call % 2)).must(None)
    victim.continues()


def killed_stopped_and_damaged(victim: Victim) -> None:
    """Saves after steps 3 and 6; the second launch begins after step 3, so its second step is the fifth."""
    victim.run(inject=at("writing a checkpoint", "SIGKILL", 1)).must(None)
    victim.run(inject=dict(where=TRAIN_STEP, call=2, do="launcher SIGTERM")).must(None, r"saved after optimizer step 5")
    if victim.checkpoints() != [3, 5]:
        raise Broken(f"checkpoints {victim.checkpoints()} are left, not 3 and 5")
    flip(one_of(victim.out / "checkpoints" / "iter_0000005", "*.distcp"))
    victim.continues(says=["iter_0000005", "WARNING", r"Resuming from \S+iter_0000003"])


def launcher_killed(victim: Victim) -> None:
    victim.run(inject=at("training", "launcher SIGKILL")).must(None)
    victim.continues()


def launcher_killed_while_ranks_import(victim: Victim) -> None:
    process = victim.begin(cold=True)
    victim.until(process, lambda: len(victim.left(process)) >= 2)
    process.kill()
    victim.end(process)
    victim.continues()


def frozen_for_a_while(victim: Victim) -> None:
    """A machine that sleeps, or a debugger: 5 s in which one rank stands still."""
    process = victim.begin()
    victim.until(process, lambda: any(line["what"] == "trained" for line in victim.lines()))
    pid = victim.left(process)[-1]
    os.kill(pid, signal.SIGSTOP)
    subprocess.run(["sleep", "5"], check=True)
    os.kill(pid, signal.SIGCONT)
    victim.end(process).must(0)
    victim.is_whole()


def kills_and_signals() -> Iterator[Fault]:
    for moment in MOMENTS:
        for rank in (0, 1):
            yield Fault(f"kill/rank {rank}, {moment}", RESUMES, killed(moment, "SIGKILL", rank))
    for moment in MOMENTS_OF_RANK_0:
        yield Fault(f"kill/rank 0, {moment}", RESUMES, killed(moment, "SIGKILL", 0))
    yield Fault("kill/launcher, training", RESUMES, launcher_killed)
    yield Fault("kill/launcher, ranks import", RESUMES, launcher_killed_while_ranks_import)
    yield Fault("chain/killed, stopped, damaged", RESUMES, killed_stopped_and_damaged)
    yield Fault("kill/four times in a row", RESUMES, killed_again_and_again)
    yield Fault("kill/segmentation fault, training", RESUMES, killed("training", "SIGSEGV", 1))
    for moment in POLITE:
        yield Fault(f"stop/SIGTERM, {moment}", SAVES, stopped(moment, "launcher SIGTERM"))
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        for moment in ("sampling", "training", "evaluating"):
            to = "launcher " if name == "SIGINT" else ""
            yield Fault(f"stop/{name}, {moment}", SAVES, stopped(moment, f"{to}{name}"))
    yield Fault("stop/Ctrl-C twice", RESUMES, twice_stopped)
    yield Fault("stop/a rank is stopped for 5 s", UNMOVED, frozen_for_a_while)


def beside_the_steps() -> Iterator[Fault]:
    """With --async_save the writing moments are those of a thread."""
    for moment in ("writing the first checkpoint", "writing a checkpoint", "describing a checkpoint", "training"):
        for rank in (0, 1):
            yield Fault(f"async/rank {rank}, {moment}", RESUMES, killed(moment, "SIGKILL", rank, *ASYNC))
    yield Fault("async/rank 0, publishing a checkpoint", RESUMES, killed("publishing a checkpoint", "SIGKILL", 0, *ASYNC))
    for moment in ("sampling", "writing a checkpoint"):
        yield Fault(f"async/SIGTERM, {moment}", SAVES, stopped(moment, "launcher SIGTERM", *ASYNC))
    yield Fault("async/input or output error, writing a checkpoint", SENTENCE, raised("writing a checkpoint", "OSError", *ASYNC))
