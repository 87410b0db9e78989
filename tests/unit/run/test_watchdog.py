"""The watchdog: when it reports, which rank and in which words, as arithmetic and with real processes that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.core.base.activity import Phase
from megatron_grpo.run import watchdog
from megatron_grpo.run.watchdog import HangDetector, Heartbeat, RankReport, TimeSinceChange, suspect_ranks, verdict
from tests.ranks import run_ranks


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_hang_detector_does_not_count_suspended_time():
    clock = ManualClock()
    age = TimeSinceChange(5.0, clock)
    age.update("x")
    clock.now += 3.0
    assert age.update("x") == 3.0
    clock.now += 3600.0  # stopped by its user, or a laptop that was closed
    assert age.update("x") == 8.0
    assert age.update("y") == 0.0


def phases(is_alone: bool, pause: float) -> tuple[Phase, ...]:
    """What a rank is in: a phase within another."""
    return Phase("outer", pause=pause / 2), Phase("inner", pause=pause / 2, is_alone=is_alone)


@pytest.fixture
def job():
    """(alarms of a rank with a timeout of 100 s and periods of 10, what turns its clock by a period and looks)."""
    clock = ManualClock()
    alarms = HangDetector(100.0, 10.0, clock)

    def period(*, moves=0, moving=0, is_alone=False, pause=0.0, neighbour=None):
        clock.now += 10.0
        alarms.is_moving(moves, phases(is_alone, pause))
        return alarms.reason(moving=moving, neighbour=neighbour)

    return alarms, period


def periods_until(period, most=60, **what):
    """(how many periods it took, the reason); `what` gives values, or functions of the period."""
    for number in range(1, most):
        found = period(**{name: value(number) if callable(value) else value for name, value in what.items()})
        if found:
            return number, found
    return None


def test_hang_detector_reports_silent_neighbor_but_not_finished_one(job):
    _, period = job
    assert periods_until(period, moves=int, moving=int, neighbour=Heartbeat(beat=3)) == (12, "silent")
    assert periods_until(period, moves=int, moving=int, neighbour=Heartbeat(beat=4, has_left=True)) is None
    assert periods_until(period, moves=int, moving=int, neighbour=lambda number: Heartbeat(beat=5 + number)) is None


def test_hang_detector_extends_neighbor_limit_by_reward_timeout(job):
    _, period = job
    assert periods_until(period, moves=int, moving=int, neighbour=Heartbeat(beat=3, pause=200.0)) == (32, "silent")


def test_hang_detector_reports_stuck_rank_outside_collectives(job):
    _, period = job
    assert periods_until(period, moves=0, moving=int, is_alone=True) == (12, "stuck")
    assert periods_until(period, moves=1, moving=int, is_alone=True, pause=60.0) == (18, "stuck")


def test_hang_detector_ignores_waiting_rank_while_another_moves(job):
    _, period = job
    assert periods_until(period, moves=0, moving=int) is None
    assert periods_until(period, moves=0, moving=99) == (12, "standstill")


def test_hang_detector_ignores_slow_moving_rank(job):
    _, period = job
    assert periods_until(period, moves=lambda number: number // 9, moving=lambda number: number // 9, is_alone=True) is None


def test_hang_detector_heartbeat_continues_while_moving_or_paused():
    clock = ManualClock()
    alarms = HangDetector(100.0, 10.0, clock)
    said = []
    for moves, pause in [(1, 0), (2, 0), (2, 0), (2, 25), (2, 25), (3, 0)]:
        said.append(alarms.is_moving(moves, phases(False, pause)))
        clock.now += 10.0
    assert said == [True, True, False, True, False, True]


def make_report(**facts):
    return RankReport(**({"words": "training 3 of 8 micro-batches", "step": 4, "age": 100.0, "waits": "all_reduce"} | facts))


WAITS = make_report()


@pytest.mark.parametrize(
    ("accounts", "named"),
    [
        ([WAITS, make_report(is_silent=True, step=9), make_report(is_stuck=True, waits="")], [1]),
        ([WAITS, make_report(is_stuck=True, waits=""), make_report(waits="")], [1]),
        ([WAITS, WAITS, make_report(waits="")], [2]),
        ([make_report(waits="", step=5), make_report(waits=""), make_report(waits="", step=5)], [1]),
        ([WAITS, make_report(step=3), WAITS], [1]),
        ([WAITS, make_report(waits="all_gather_object"), WAITS], []),
    ],
    ids=["silent", "stuck", "waits for nobody", "behind", "behind in a collective", "nobody"],
)
def test_watchdog_verdict_blames_rank_that_others_wait_for(accounts, named):
    assert suspect_ranks(dict(enumerate(accounts))) == named


def test_watchdog_verdict_names_rank_host_step_phase_and_line():
    stopped = "it is stopped (SIGSTOP or SIGTSTP)"
    silent = make_report(is_silent=True, waits="", state=stopped, where="reward.py line 3, f", words="scoring rewards")
    text = verdict({0: WAITS, 1: silent, 2: WAITS}, {0: "a", 1: "b", 2: "b"}, 300.0)
    assert text.splitlines() == [
        "rank 1 on b hangs in optimizer step 5, scoring rewards, at reward.py line 3, f: it is stopped (SIGSTOP or SIGTSTP).",
        "  The others wait for it (2 training 3 of 8 micro-batches, in all_reduce).",
        "  That has lasted for rank_heartbeat_timeout (300 s), so the run ends.",
    ]


def test_watchdog_verdict_names_few_of_16384_ranks():
    accounts = {rank: make_report(is_silent=True, waits="", state="no rank on its machine responds") for rank in range(16384)}
    text = verdict(accounts, dict.fromkeys(range(16384), "host"), 300.0)
    assert len(text) < 2000 and "So do 16376 more ranks: 8, 9," in text


def test_watchdog_innermost_frame_of_stopped_process():
    lines = ["from megatron_grpo.run import watchdog", "import time", "watchdog.register()"]
    program = "\n".join([*lines, "def here():", "    print('x', flush=True)", "    time.sleep(600)", "here()"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as child:
        try:
            child.stdout.readline()
            os.kill(child.pid, signal.SIGSTOP)
            while watchdog.read_process_state(child.pid) != watchdog.STATES["T"]:
                pass
            told = watchdog.stacks_of_process(child.pid)
        finally:
            child.kill()
    assert watchdog.innermost(told).endswith(", here"), told


# ---- real processes ---------------------------------------------------------------------------------------------------------------------

SECONDS = 5.0  # rank_heartbeat_timeout


def hang_in_c() -> None:
    """Holds the interpreter lock: no thread of the process runs any more."""
    import ctypes

    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever() -> None:
    import time

    while True:
        time.sleep(600)


# name: (which of the two ranks, the phase it is in, whether it is alone there, what it does)
HANGS = {
    "stopped while judging": (1, "reward", True, stop_myself),
    "stopped while sampling": (1, "rollout", False, stop_myself),
    "stopped while training": (1, "train", False, stop_myself),
    "stopped, with the store": (0, "train", False, stop_myself),
    "in C while judging": (1, "reward", True, hang_in_c),
    "in C, with the store": (0, "weight_sync", False, hang_in_c),
    "sleeps while judging": (1, "reward", True, sleep_for_ever),
    "sleeps while saving": (0, "train", False, sleep_for_ever),
}
SLOW = {
    "a slow reward": (1, "reward", True, 2.5 * SECONDS),
    "slow sampling": (0, "rollout", False, 0.0),
}


def live(name: str, rank: int, folder: Path) -> None:
    """One rank of a job of two, in a process of its own: it hangs, or is slow, or waits in a collective for the other."""
    import contextlib
    import time
    from datetime import timedelta

    import torch.distributed as dist

    from megatron_grpo.core.base import activity
    from megatron_grpo.core.parallel import collectives
    from megatron_grpo.run.peers import Peers, Process
    from megatron_grpo.run.watchdog import Watchdog

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.FileStore(str(folder / "meet"), 2)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(server.port))
    else:
        server = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("job", server), rank=rank, world_size=2, timeout=timedelta(minutes=5))
    peers = Peers(collectives.store("peers"), rank=rank, processes=collectives.all_gather_object(Process.mine()))
    watchdog = Watchdog(
        collectives.store("watchdog"), rank=rank, processes=peers.processes, timeout=SECONDS, output_dir=folder,
        wait_for_all=collectives.wait_for_all, leaves=peers.report_failure,
    )  # fmt: skip
    activity.report_step(3)
    which, phase, is_alone, what = (HANGS | SLOW)[name]
    if rank == which:
        pause = 10 * SECONDS if name in SLOW and is_alone else 0.0
        with activity.phase(phase, total=8, unit="things", is_alone=is_alone, pause=pause):
            if callable(what):
                what()
            elif what:
                time.sleep(what)
            else:
                for _ in range(25):
                    time.sleep(0.1 * SECONDS)
                    activity.advance()
    with activity.phase("train"), contextlib.suppress(RuntimeError):
        collectives.all_reduce_max(1.0)
        collectives.wait_for_all()
        watchdog.close()
        time.sleep(1.0)  # the store lives as long as rank 0
        os._exit(0)
    watchdog.hold_if_alarmed()
    os._exit(9)


def all_at_once(rank: int, world_size: int, folder: str) -> dict[str, list[int]]:
    """Exit codes of the ranks of all jobs, which mostly wait, so that they may do it together."""
    import time

    import torch.distributed as dist

    dist.destroy_process_group()
    children = {}
    for name in [*HANGS, *SLOW]:
        (place := Path(folder) / name).mkdir()
        for member in (0, 1):
            children[name, member] = child = os.fork()
            if not child:
                log = os.open(place / f"log_{member}", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                try:
                    live(name, member, place)
                finally:
                    import traceback

                    traceback.print_exc()
                    os._exit(8)
    codes: dict[str, list[int]] = {}
    end = time.monotonic() + 120
    for (name, _), child in children.items():
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGABRT)
            time.sleep(0.05)  # between two looks
        codes.setdefault(name, []).append(os.waitstatus_to_exitcode(ended[1]))
    return codes


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    [codes] = run_ranks(all_at_once, 1, str(folder), timeout=180)
    return codes, folder


@pytest.mark.parametrize("name", list(HANGS))
def test_watchdog_names_hanging_rank_and_ends_job(ends, name):
    codes, folder = ends
    which, phase, _, what = HANGS[name]
    logs = [(folder / name / f"log_{rank}").read_text() for rank in (0, 1)]
    assert codes[name][1 - which] == 1, logs
    assert codes[name][which] == (1 if what is sleep_for_ever else -signal.SIGKILL)
    report = (folder / name / "watchdog/report.txt").read_text()
    assert report.startswith(f"megatron-grpo: rank {which} on ")
    state = {stop_myself: "it is stopped (SIGSTOP", hang_in_c: "lets no other thread run", sleep_for_ever: "no progress for"}[what]
    assert state in report.splitlines()[0] and f"in {what.__name__}" in report.splitlines()[0].replace(", ", " in ")
    assert "There is no checkpoint yet" in report
    for rank in (0, 1):
        assert what.__name__ in (folder / name / f"watchdog/rank_{which:05d}.txt").read_text()
        assert "File " in (folder / name / f"watchdog/rank_{rank:05d}.txt").read_text()
    assert sum(log.count("hangs in optimizer step 4") for log in logs) == 1, logs
    phases = {"reward": "scoring rewards", "rollout": "sampling", "train": "training", "weight_sync": "syncing weights"}
    assert f"in optimizer step 4, {phases[phase]} 0 of 8 things, at " in report.splitlines()[0]
    if which == 1:
        assert "The others wait for it (1 training, in " in report


@pytest.mark.parametrize("name", list(SLOW))
def test_watchdog_ignores_slow_rank(ends, name):
    codes, folder = ends
    assert codes[name] == [0, 0], [(folder / name / f"log_{rank}").read_text() for rank in (0, 1)]
    assert not (folder / name / "watchdog").exists()
