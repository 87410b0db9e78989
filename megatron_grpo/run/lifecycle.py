"""The life of one training process: it joins the job, takes the output_dir, trains, and leaves without hiding why."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from megatron_grpo import train
from megatron_grpo.base import activity, launcher
from megatron_grpo.base.cleanup import CleanUp
from megatron_grpo.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError, RunError, RunInterruptedError
from megatron_grpo.checkpoint.written import still_there
from megatron_grpo.config.config import Config
from megatron_grpo.metrics.card import Card
from megatron_grpo.parallel import collectives, state
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.planning.command import Plan
from megatron_grpo.planning.report import print_report
from megatron_grpo.rewards.loading import close_rewards
from megatron_grpo.run.build import Parts
from megatron_grpo.run.build.output import start_parallel
from megatron_grpo.run.build.run import build_run
from megatron_grpo.run.export import export_model, merged_folder, open_repositories, push_to_hub
from megatron_grpo.run.failures import PREFIX, tell
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.run.limits import age_of, limits_of, requeue
from megatron_grpo.run.lock import OutputLock
from megatron_grpo.run.opened import load_weights
from megatron_grpo.run.peers import Peers, Process
from megatron_grpo.run.signals import StopSignal
from megatron_grpo.run.supervisor import launcher_pid
from megatron_grpo.run.watchdog import Watchdog

_WHERE_TO_LOOK = "Look at completions/, and try the reward functions with `megatron-grpo rehearse`."


def run_training(made: Plan, inputs: ValidatedInputs, parts: Parts) -> int:
    """`megatron-grpo train`, on this rank, with settings and inputs that have been checked. Returns the exit code."""
    cfg = made.checked.config
    limits = limits_of(cfg, launched_at())
    with CleanUp(partial(close_rewards, inputs.rewards)) as clean_up:
        # As typed: sizes that follow from others would be further differences. Paths as they are on this machine.
        typed = made.checked.parsed.config.with_values({"output_dir": cfg.run.output_dir, "resume": cfg.run.resume})
        parallel = start_parallel(cfg, made.checked.sizes.layout, typed=typed, content=inputs.resume.origin.content)
        peers = Peers(collectives.store("peers"), rank=parallel.rank, processes=collectives.all_gather_object(Process.mine()))
        signal = StopSignal(
            partial(leave_if_doomed, peers), patience=cfg.run.stop_drain_seconds, limits=limits, others=peers,
            leaves_unasked=parallel.device.type == "cuda",
        )  # fmt: skip
        clean_up.add(signal.restore)
        watchdog = watched(cfg, parallel, peers, clean_up)
        try:
            with CleanUp() as opened, reported(peers, watchdog):
                take_output_dir(cfg, parallel, opened)
                repositories = open_repositories(cfg, exports(cfg))
                train_and_export(made, inputs, parallel, signal, opened, parts, watchdog)
        except RunInterruptedError as stopped:
            stopped.is_final = signal.is_final
            leave_together(cfg, parallel, peers, signal)
            raise
    if parallel.is_main:
        print(f"Done: {Path(cfg.run.output_dir).resolve()}" + (_where(cfg)), flush=True)
    state.stop()
    if parallel.is_main:  # the others need not wait for it
        push_to_hub(repositories)
    return EXIT_DONE


@contextmanager
def reported(peers: Peers, watchdog: Watchdog | None) -> Iterator[None]:
    """Around the run: the other ranks hear how it ends here before anything is cleaned up, for they may wait in a collective."""
    try:
        yield
    except RunInterruptedError:  # all ranks alike, and none of them failed
        raise
    except BaseException as error:
        if watchdog is not None:
            watchdog.hold_if_alarmed()
        lost = peers.explain(error, watchdog.who_is_silent) if watchdog is not None else peers.explain(error)
        peers.report_failure()
        if lost:
            raise RunError(lost) from error
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # rich makes SystemExit of it
            raise RunError("whoever read the output of this command has gone (a closed pipe).") from error
        raise
    peers.report_done()


def leave_together(cfg: Config, parallel: ParallelState, peers: Peers, signal: StopSignal) -> None:
    """Once all is saved and closed: the launcher ends the other ranks as soon as one leaves, and the main rank may have more to do."""
    if cfg.run.requeue and parallel.is_main and signal.asked is not None and signal.asked.is_time:
        tell(f"{PREFIX}{requeue()}")
    with suppress(RuntimeError):  # somebody was quicker, or was killed: nothing is left to do anyway
        peers.report_done()
        collectives.wait_for_all()


def launched_at() -> float:
    """Of time.monotonic: when torchrun began, which its restarts do not change; without it, this process."""
    return time.monotonic() - age_of(launcher_pid() if launcher.read().by_torchrun else os.getpid())


def train_and_export(
    made: Plan,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    signal: StopSignal,
    clean_up: CleanUp,
    parts: Parts,
    watchdog: Watchdog | None,
) -> None:
    """The run itself. Collective. clean_up: gets what this opens."""
    cfg = made.checked.config
    if parallel.is_main:
        print_report(made, is_short=True)
    run = build_run(made, inputs, parallel, signal, parts)
    clean_up.add(run.engine.close)
    if watchdog is not None:
        watchdog.leaves_behind = run.witness.dump_on_hang
    try:
        progress = train.train(run)
        best = best_of(run)
        if cfg.run.export_hf:
            policy = run.policy
            with policy.resident("weights"), activity.phase("exporting"):
                if best is not None and cfg.run.load_best_model_at_end:
                    policy.tensors()  # nothing of the last step is on its way
                    load_weights(policy.chunks, best)
                card = Card(cfg=cfg, source=inputs.model_path, run=Path(cfg.run.output_dir))
                export_model(policy, exports(cfg)[0], cfg=cfg, source=inputs.model_path, card=card)
        if parallel.is_main:
            still_there(Path(cfg.run.output_dir))
        if nothing := collectives.broadcast_object(run.journal.metrics.learnt.nothing(progress.step)):
            raise RunError(f"{nothing} {_WHERE_TO_LOOK} All else that a run writes is in {Path(cfg.run.output_dir).resolve()}.")
    except RunInterruptedError:
        clean_up.add(run.journal.close)
        raise
    except BaseException:
        clean_up.add(partial(run.journal.close, summary=False))  # a run that failed shows no before and after
        raise
    clean_up.add(run.journal.close)


def best_of(run: train.Run) -> Path | None:
    """The best checkpoint, which is said; None where nothing says which it is, or none has a number. Collective."""
    best, found = run.checkpoints.best, None
    if best is not None and collectives.rank() == 0:
        run.journal.metrics.say(best.words() or "No checkpoint has a number to be best by.")
        found = best.folder.directory(best.step) if best.step is not None else None
    return collectives.broadcast_object(found)


def watched(cfg: Config, parallel: ParallelState, peers: Peers, clean_up: CleanUp) -> Watchdog | None:
    """The watch over this rank and its neighbour, until the end of the clean-up. Collective."""
    if not cfg.parallel.rank_heartbeat_timeout:
        return None
    watchdog = Watchdog(
        collectives.store("watchdog"), rank=parallel.rank, processes=peers.processes, timeout=cfg.parallel.rank_heartbeat_timeout,
        output_dir=Path(cfg.run.output_dir), wait_for_all=collectives.wait_for_all, leaves=peers.report_failure,
    )  # fmt: skip
    clean_up.add(watchdog.close)
    return watchdog


def exports(cfg: Config) -> list[Path]:
    """Folders that the end of a run writes: the model or the adapter, and the model that an adapter makes."""
    out = Path(cfg.run.output_dir) / "hf"
    return [out, merged_folder(out)] if cfg.tuner.tuner_type == "lora" and cfg.tuner.merge_lora else [out]


def take_output_dir(cfg: Config, parallel: ParallelState, clean_up: CleanUp) -> None:
    """Before anything is written there: the main rank locks it, and all ranks learn whether it could. Collective."""
    refusal = None
    if parallel.is_main:
        try:
            clean_up.add(OutputLock.take(cfg.run.output_dir).release)
        except ConfigError as error:
            refusal = error
    refusal = collectives.broadcast_object(refusal)
    if refusal is not None:
        raise refusal


def _where(cfg: Config) -> str:
    if not cfg.run.export_hf:
        return ""
    if cfg.tuner.tuner_type != "lora":
        return " (model in hf/)"
    return " (adapter in hf/, the merged model in hf_merged/)" if cfg.tuner.merge_lora else " (adapter in hf/)"


def leave_if_doomed(peers: Peers) -> None:
    """The launcher ends this process because another has failed: the step that it is in can never finish, so it goes at once."""
    why = peers.why_doomed()
    if why is None:
        return
    if why:
        tell(f"{PREFIX}{why}")
    os._exit(EXIT_CRASH)
