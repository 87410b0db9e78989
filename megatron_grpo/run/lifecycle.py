"""The life of one training process: join the job, lock `output_dir`, train, and exit with a reported reason."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megatron_grpo.core import train
from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError, RunError, RunInterruptedError, one_line
from megatron_grpo.core.base.files import MARK
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.run.assemble import RunParts
from megatron_grpo.run.assemble.output import OutputLock, start_parallel
from megatron_grpo.run.assemble.run import build_run
from megatron_grpo.run.checkpoint.output_files import check_output_dir
from megatron_grpo.run.checkpoint.saving import Checkpoints
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.export import export_model, merged_directory, open_repositories, push_to_hub
from megatron_grpo.run.failures import PREFIX, print_error
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.run.jobs import list_time_limits, requeue
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.metrics.model_card import ModelCard
from megatron_grpo.run.metrics.records import EVENTS, EventsWriter
from megatron_grpo.run.peers import Peers, Process, read_process_age
from megatron_grpo.run.rewards.loading import close_rewards
from megatron_grpo.run.signals import StopSignal
from megatron_grpo.run.supervisor import launcher_pid
from megatron_grpo.run.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_grpo.run.schedule import ScheduledRun

_WHERE_TO_LOOK = "Look at completions/, and try the reward functions with `megatron-grpo dry-run`."


def run_training(run: ScheduledRun, inputs: ValidatedInputs, parts: RunParts) -> int:
    """Run `megatron-grpo train` on this rank.

    Returns:
        The exit code.

    Raises:
        RunInterruptedError: If the run was asked to stop; its state is saved.
        RunError: If the run failed for a reason that a user can act on.
    """
    cfg = run.checked.config
    limits = list_time_limits(cfg, launch_time())
    with CleanUp(partial(close_rewards, inputs.rewards)) as clean_up:
        # Settings as typed: derived sizes would be reported as further differences. Paths are those of this machine.
        typed_cfg = run.checked.parsed.config.with_values({"output_dir": cfg.run.output_dir, "resume": cfg.run.resume})
        parallel = start_parallel(cfg, run.checked.sizes.layout, typed_cfg=typed_cfg, content=inputs.resume.origin.content)
        peers = Peers(collectives.store("peers"), rank=parallel.rank, processes=collectives.all_gather_object(Process.mine()))
        signal = StopSignal(
            partial(leave_if_doomed, peers), patience=cfg.run.stop_drain_seconds, limits=limits, peers=peers,
            leaves_unasked=parallel.device.type == "cuda",
        )  # fmt: skip
        clean_up.add(signal.restore)
        watchdog = watched(cfg, parallel, peers, clean_up)
        try:
            with CleanUp() as exit_stack, record_end(cfg, parallel), report_end(peers, watchdog):
                take_output_dir(cfg, exit_stack)
                repositories = open_repositories(cfg, exports(cfg))
                train_and_export(run, inputs, parallel, signal, exit_stack, parts, watchdog)
        except RunInterruptedError as stopped:
            stopped.is_final = signal.is_final
            wait_for_ranks(cfg, parallel, peers, signal)
            raise
    if parallel.is_rank_zero:
        print(f"Done: {Path(cfg.run.output_dir).resolve()}" + (_export_hint(cfg)), flush=True)
    state.stop()
    if parallel.is_rank_zero:  # the other ranks need not wait for the upload
        push_to_hub(repositories)
    return EXIT_DONE


@contextmanager
def report_end(peers: Peers, watchdog: Watchdog | None) -> Iterator[None]:
    """Report to the other ranks how the run ended here, before anything is cleaned up.

    The others may be waiting in a collective that this rank never joins.

    Args:
        watchdog: The watchdog of this rank; None if it is switched off.

    Raises:
        RunError: In place of an error that only reflects the failure of another rank, or a closed output pipe.
    """
    try:
        yield
    except RunInterruptedError:  # the same on all ranks, and none of them failed
        raise
    except BaseException as error:
        if watchdog is not None:
            watchdog.hold_if_alarmed()
        death = peers.explain(error, watchdog.who_is_silent) if watchdog is not None else peers.explain(error)
        peers.report_failure()
        if death:
            raise RunError(death) from error
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # rich converts it to SystemExit
            raise RunError("the reader of this command's output closed the pipe.") from error
        raise
    peers.report_done()


@contextmanager
def record_end(cfg: Config, parallel: ParallelState) -> Iterator[None]:
    """Record in events.jsonl that the run was stopped or failed."""
    try:
        yield
    except BaseException as error:
        out = Path(cfg.run.output_dir)
        if parallel.is_rank_zero and not isinstance(error, ConfigError) and (out / MARK).exists():
            kind = "stopped" if isinstance(error, RunInterruptedError) else "failed"
            text = f"The run was {error}." if kind == "stopped" else f"The run failed: {type(error).__name__}: {one_line(error)}"
            EventsWriter(out / EVENTS).add(kind, text)
        raise


def wait_for_ranks(cfg: Config, parallel: ParallelState, peers: Peers, signal: StopSignal) -> None:
    """Wait until all ranks have saved and closed their files. Requeue the Slurm job if `requeue` is set and its time is up.

    A launcher kills the remaining ranks as soon as one exits, and the main rank may have more to do than the others.
    """
    if cfg.run.requeue and parallel.is_rank_zero and signal.asked is not None and signal.asked.is_time:
        print_error(f"{PREFIX}{requeue()}")
    with suppress(RuntimeError):  # another rank has left already, or was killed: nothing is left to do
        peers.report_done()
        collectives.wait_for_all()


def launch_time() -> float:
    """Return when the job was launched, in seconds of time.monotonic.

    Under torchrun this is the start of torchrun, which its restarts do not change; otherwise the start of this process.
    """
    return time.monotonic() - read_process_age(launcher_pid() if launcher.read().by_torchrun else os.getpid())


def train_and_export(
    scheduled: ScheduledRun,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    signal: StopSignal,
    clean_up: CleanUp,
    parts: RunParts,
    watchdog: Watchdog | None,
) -> None:
    """Train, then export the model. Collective.

    Args:
        signal: Tells whether the run is to stop.
        watchdog: Dumps the current step when ranks hang; None if it is switched off.

    Raises:
        RunInterruptedError: If the run was asked to stop.
        RunError: If no gradient changed the weights.
    """
    cfg, plan = scheduled.checked.config, None
    if parallel.is_rank_zero:
        plan = parts.planner.make_plan(scheduled, rows=inputs.rows, image_spec=inputs.image_spec)
        parts.planner.print_report(plan, is_short=True)
    run = build_run(scheduled, plan, inputs, parallel, signal, parts)
    logger, checkpoints = cast(MetricsLogger, run.logger), cast(Checkpoints, run.checkpoints)
    clean_up.add(run.engine.close)
    if watchdog is not None:
        watchdog.leaves_behind = run.step_callback.dump_on_hang
    try:
        progress = train.train(run)
        best = find_best_checkpoint(checkpoints, logger)
        if cfg.run.export_hf:
            policy = run.policy
            with policy.on_device("weights"), activity.phase("exporting"):
                if best is not None and cfg.run.load_best_model_at_end:
                    from megatron_grpo.run.open_checkpoint import load_weights

                    policy.tensors()  # wait for what the last step still transfers
                    load_weights(policy.chunks, best)
                card = ModelCard(cfg=cfg, source=inputs.model_path, run=Path(cfg.run.output_dir))
                export_model(policy, exports(cfg)[0], cfg=cfg, source=inputs.model_path, card=card)
        if parallel.is_rank_zero:
            check_output_dir(Path(cfg.run.output_dir))
        if not_learnt := collectives.broadcast_object(logger.learnt.nothing(progress.step)):
            raise RunError(f"{not_learnt} {_WHERE_TO_LOOK} Other files of the run are in {Path(cfg.run.output_dir).resolve()}.")
    except BaseException as error:  # a failed run prints no summary
        clean_up.add(partial(logger.close, summary=isinstance(error, RunInterruptedError)))
        raise
    clean_up.add(logger.close)


def find_best_checkpoint(checkpoints: Checkpoints, logger: MetricsLogger) -> Path | None:
    """Return the best checkpoint and log it; None without a metric to compare, or without a value of it. Collective."""
    best, path = checkpoints.best, None
    if best is not None and collectives.rank() == 0:
        logger.print_line(best.describe() or "No checkpoint has a value of metric_for_best_model.")
        path = best.folder.directory(best.step) if best.step is not None else None
    return collectives.broadcast_object(path)


def watched(cfg: Config, parallel: ParallelState, peers: Peers, clean_up: CleanUp) -> Watchdog | None:
    """Start the watchdog of this rank, which runs until the end of the clean-up. Collective.

    Returns:
        The watchdog; None if `rank_heartbeat_timeout` is 0.
    """
    if not cfg.parallel.rank_heartbeat_timeout:
        return None
    watchdog = Watchdog(
        collectives.store("watchdog"), rank=parallel.rank, processes=peers.processes, timeout=cfg.parallel.rank_heartbeat_timeout,
        output_dir=Path(cfg.run.output_dir), wait_for_all=collectives.wait_for_all, leaves=peers.report_failure,
    )  # fmt: skip
    clean_up.add(watchdog.close)
    return watchdog


def exports(cfg: Config) -> list[Path]:
    """Return the folders that a run exports to: the model or the adapter, and with `merge_lora` the merged model."""
    out = Path(cfg.run.output_dir) / "hf"
    return [out, merged_directory(out)] if cfg.tuner.tuner_type == "lora" and cfg.tuner.merge_lora else [out]


def take_output_dir(cfg: Config, clean_up: CleanUp) -> None:
    """Lock `output_dir` on the main rank, before anything is written there. Collective.

    Raises:
        ConfigError: On all ranks, if another run holds the lock or the folder cannot be written.
    """

    def take() -> None:
        clean_up.add(OutputLock.take(cfg.run.output_dir).release)

    collectives.run_on_rank_zero(take, (ConfigError,))


def _export_hint(cfg: Config) -> str:
    if not cfg.run.export_hf:
        return ""
    if cfg.tuner.tuner_type != "lora":
        return " (model in hf/)"
    return " (adapter in hf/, the merged model in hf_merged/)" if cfg.tuner.merge_lora else " (adapter in hf/)"


def leave_if_doomed(peers: Peers) -> None:
    """Exit at once if the launcher ends this process because another rank has failed.

    The step in progress can never finish then.
    """
    reason = peers.why_doomed()
    if reason is None:
        return
    if reason:
        print_error(f"{PREFIX}{reason}")
    os._exit(EXIT_CRASH)
