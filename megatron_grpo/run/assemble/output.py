"""Join the job, lock the output directory, and build what a run writes to it: checkpoints and metrics.

The lock allows one run at a time in an output directory. The kernel holds it and frees it when its owner dies, however it dies.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import platform
import re
import shlex
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.checkpoint.fingerprints import values_equal_on_ranks
from megatron_grpo.run.checkpoint.output_files import LOCK as NAME
from megatron_grpo.run.checkpoint.output_files import BestCheckpoint, check_output_dir, claim, remove_run
from megatron_grpo.run.checkpoint.saving import Checkpoints
from megatron_grpo.run.config.evaluation import find_best_metric, is_greater_better
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.write import write_config
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.run.metrics import model_card
from megatron_grpo.run.metrics.display import Display
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.metrics.rollout import Completions
from megatron_grpo.run.metrics.summary import LogpDifferenceMonitor
from megatron_grpo.run.peers import Process
from megatron_grpo.run.rewards.reward_manager import RewardManager

if TYPE_CHECKING:
    from megatron_grpo.run.assemble import RunPlan
    from megatron_grpo.run.metrics.reporters import TrackingServices
    from megatron_grpo.run.schedule import ScheduledRun

logger = logging.getLogger(__name__)
# Some network file systems have no locks. The note in the file replaces the lock there.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class OutputLock:
    """Lock on `output_dir`/run.lock, held until `release` or the end of this process.

    The file contains the owner's host, pid and start time. On a network file system with locks, runs on other hosts are detected too. The
    file stays after the lock is released: a lock on a file that another process may delete and recreate protects nothing.
    """

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle
        # A forked child, for example of a reward function, would share the lock and hold it after this process has died.
        os.register_at_fork(after_in_child=self._in_child)

    @classmethod
    def take(cls, output_dir: str | Path) -> OutputLock:
        """Lock a directory, creating it if needed.

        Raises:
            ConfigError: If another run holds the lock, or if the directory cannot be written.
        """
        path = Path(output_dir) / NAME
        if (out := path.parent).is_symlink() and not out.exists():
            raise _refusal(
                f"output_dir ({out}) is a link to {os.readlink(out)}, which does not exist. Remove the link, or create its target."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileExistsError:
            raise _refusal(f"output_dir ({output_dir}) is a file. Use a directory, or a path that does not exist yet.") from None
        except OSError as error:
            raise _refusal(f"output_dir ({output_dir}) cannot be written: {error.strerror}. Use another directory.") from error
        try:
            _lock(handle, path)
            owner = _owner(handle)
            if owner.get("host") not in (None, socket.gethostname()):
                logger.warning("%s was left by a run on %s (pid %s), which has ended", path, owner["host"], owner.get("pid"))
            _write(handle, _note_of_this_process())
        except ConfigError:
            os.close(handle)
            raise
        except OSError as error:
            os.close(handle)
            raise _refusal(f"output_dir ({output_dir}) cannot be written: {error.strerror}. Use another directory.") from error
        return cls(path, handle)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._handle >= 0:
            try:
                os.ftruncate(self._handle, 0)
            finally:
                os.close(self._handle)
                self._handle = -1

    def _in_child(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use_error(path, _owner(handle)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner, process = _owner(handle), Process.mine()
        alive = Process(process.host, process.machine, owner.get("pid", 0), owner.get("started_ticks", "")).death() is None
        if owner.get("machine") == process.machine and alive:
            raise _in_use_error(path, owner) from None
        logger.warning("%s: this file system has no locks (%s), so a second run in this directory cannot be detected", path, error.strerror)


def _in_use_error(path: Path, owner: dict[str, Any]) -> ConfigError:
    holder = "another run, which has just started"
    if owner:
        holder = f"another run: pid {owner['pid']} on {owner['host']}, since {owner['started']}"
    return _refusal(f"output_dir ({path.parent}) is in use by {holder}. Wait for its end, stop it, or use another output_dir.")


def _refusal(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("output_dir",), message=message)])


def _note_of_this_process() -> dict[str, Any]:
    process = Process.mine()
    time_text = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"host": process.host, "pid": process.pid, "started": time_text, "machine": process.machine, "started_ticks": process.started}


def _owner(handle: int) -> dict[str, Any]:
    """Return the note of the lock's owner; {} if it is missing or incomplete."""
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and {"host", "pid", "started"} <= owner.keys() else {}


def _write(handle: int, facts: dict[str, Any]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(facts).encode() + b"\n", 0)


def start_parallel(
    cfg: Config, layout: Layout, *, typed_cfg: Config | None = None, content: Mapping[str, str] | None = None
) -> ParallelState:
    """Join the job on the grid that the plan describes. Collective.

    Args:
        typed_cfg: The settings without derived values; `cfg` if omitted. The ranks compare these.

    Raises:
        ConfigError: On all ranks, if settings, versions or files differ between ranks.
    """
    facts, p = values_equal_on_ranks(typed_cfg or cfg, content or {}), cfg.parallel
    minutes = p.distributed_timeout_minutes
    return state.start(layout, sequence_parallel=p.sequence_parallel, seed=cfg.run.seed, timeout_minutes=minutes, facts=facts)


def open_output(
    cfg: Config, plan: RunPlan | None, inputs: ValidatedInputs, parallel: ParallelState, *, print_line: Callable[[str], None]
) -> Checkpoints:
    """Prepare `output_dir` for the run and choose the checkpoint to resume from. Collective.

    The main rank clears the previous run's files if the run starts afresh, and writes config.yaml and plan.json.

    Args:
        plan: Plan of the run; None on ranks above 0.
        inputs: Validated inputs: how the run begins.
    """
    out = Path(cfg.run.output_dir)
    checkpoints = Checkpoints(inputs.resume, cfg.run, replicas=parallel.dp_cp_group, print_line=print_line)
    if metric := find_best_metric(cfg):
        checkpoints.best = BestCheckpoint(out / "checkpoints", metric, greater=is_greater_better(cfg), print_line=print_line)
    checkpoints.choose()  # before anything in output_dir is overwritten
    if parallel.is_rank_zero:
        if inputs.resume.wipes:
            remove_run(out)
        claim(out)
        write_config(cfg, out / "config.yaml")
        assert plan is not None
        plan.save(out / "plan.json", versions=versions_on(parallel.device))
    collectives.wait_for_all()
    return checkpoints


def versions_on(device: torch.device) -> dict[str, str]:
    """Return the versions of the program, its libraries and the GPU driver, and the name of the device, by name."""
    if device.type != "cuda":
        return {**model_card.versions(), "device": f"CPU ({platform.machine()}, {os.cpu_count()} cores)"}
    versions = {**model_card.versions(), "device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", read_if_exists(Path("/proc/driver/nvidia/version")))
    return {**versions, "driver": driver[1]} if driver else versions


def read_if_exists(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""


def build_metrics_logger(
    run: ScheduledRun,
    reward_manager: RewardManager,
    parallel: ParallelState,
    timers: Timers,
    *,
    on_metrics: Callable[[int, Mapping[str, Any]], None] | None,
) -> MetricsLogger:
    """Build the logger of metrics and completions.

    Args:
        reward_manager: Reward manager: names and weights of the rewards.
        on_metrics: Also called with each record: (optimizer step, metrics).
    """
    cfg, out, run_cfg = run.checked.config, Path(run.checked.config.run.output_dir), run.checked.config.run
    config = {name: value for section in cfg.groups().values() for name, value in vars(section).items()}
    services: TrackingServices | None = None
    if not set(run_cfg.report_to) <= {"none"}:
        from megatron_grpo.run.metrics.reporters import TrackingServices

        services = TrackingServices(out, config)
    completions = Completions(
        out,
        reward_names=reward_manager.names,
        interval=run_cfg.log_completions_steps,
        rank=parallel.rank,
        node=collectives.node(),
        most_nodes=run_cfg.log_completions_nodes,
        write_table=services.keep_completions if services else None,
    )
    gap = version_check(cfg, run.checked.shape)
    selects = cfg.grpo.dynamic_sample or cfg.grpo.oversample_ratio > 1
    return MetricsLogger(
        completions,
        Display(total=run.schedule.num_steps, folder=out),
        timers=timers,
        config=config,
        services=services,
        selection_weights=reward_manager.reward_weights if selects else None,
        watches=[lambda progress, values: gap(values), lambda *_: check_output_dir(out)],
        on_metrics=on_metrics,
    )


def version_check(cfg: Config, shape: ModelShape | None = None) -> Callable[[Mapping[str, float]], str | None]:
    """Return the check of the difference between the log-probs of trainer and sampler.

    With `async_rollout_depth` the difference contains what training has changed since the tokens were sampled, and with `lora_dropout` the
    noise of the training forward pass. No default bound applies then, and the check warns only if `logprob_diff_warn` is set. With partial
    rollouts it looks at tokens that the current weights sampled (`plugins.partial_rollouts.trainer.VersionCheck`), scored without dropout.

    Returns:
        A function from metrics to a warning, or to None if the difference is within bounds.
    """
    partial = cfg.rollout.partial_rollouts
    has_dropout = cfg.tuner.tuner_type == "lora" and cfg.tuner.lora_dropout > 0
    if cfg.rollout.logprob_diff_warn is None and (cfg.rollout.async_rollout_depth or has_dropout) and not partial:
        return lambda metrics: None
    bound = 0.0 if cfg.rollout.bitwise_parity else cfg.rollout.logprob_diff_warn
    metric = "sampling/version_error/max" if partial else "sampling/sampling_logp_difference/max"
    return LogpDifferenceMonitor(bound=bound, dtype=cfg.model.torch_dtype, hint=mismatch_hint(cfg, shape), metric=metric).warning


def mismatch_hint(cfg: Config, shape: ModelShape | None = None) -> str:
    """Return the hint that names the `mismatch` command, for warnings about differing log-probs."""
    if shape is not None and shape.vision is not None:
        return "megatron-grpo mismatch, which finds the operation where text models diverge, does not support models with images."
    return f"To find the operation where they diverge: megatron-grpo mismatch {shlex.quote(cfg.run.output_dir)}"
