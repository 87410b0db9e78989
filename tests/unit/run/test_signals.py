"""Stop requests, forced stops and the death of a launcher, with real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_grpo.run import signals
from megatron_grpo.run.jobs import STOP_BY_CALLBACK, StopReason, TimeLimit
from megatron_grpo.run.signals import StopSignal

ROOT = Path(__file__).resolve().parents[3]
LOOP = """
import sys, time
from megatron_grpo.run.signals import StopSignal
stop = StopSignal({argument})
print("ready", flush=True)
while not stop.is_requested(lambda flag: flag):
    time.sleep(0.02)
time.sleep({save_seconds})
print("saved,", stop.asked.why, flush=True)
sys.exit(3)
"""
BLOCKED = """
import os, threading
from megatron_grpo.run.signals import StopSignal
stop = StopSignal({argument})
print("ready", flush=True)
lock = threading.Lock(); lock.acquire(); lock.acquire()
"""


def start(script: str, **values: object) -> subprocess.Popen:
    """The script, once it says that it is ready."""
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup, which a run respects
    code = heard + script.format(**{"argument": "", "save_seconds": 0} | values)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def read_rest(process: subprocess.Popen, timeout: float = 10) -> tuple[str, int]:
    try:
        process.wait(timeout)
    finally:
        process.kill()
    return process.stdout.read(), process.returncode


SLOW = "import pathlib, time\npathlib.Path(__file__).with_name('ready').touch()\ntime.sleep(60)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_during_import_exits_as_during_training(tmp_path, number):
    (tmp_path / "reward.py").write_text(SLOW)
    command = [sys.executable, "-m", "megatron_grpo", "train", "--reward_funcs", f"{tmp_path}/reward.py:f"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    told = process.communicate(timeout=10)[1]
    assert (process.returncode, told) == (3, f"megatron-grpo: stopped by {number.name}; no step had been trained\n")


def is_alive(pid: int) -> bool:
    """Zombies are dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("number", "sender"),
    [(number, number.name) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    + [(STOP_BY_CALLBACK, "a callback")],
)
def test_stop_signal_finishes_step_and_saves(number, sender):
    process = start(LOOP)
    process.send_signal(number)
    assert read_rest(process) == (f"saved, {sender}\n", 3)


def test_repeated_signal_of_launcher_does_not_interrupt_the_save():
    process = start(LOOP, save_seconds=0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert read_rest(process) == ("saved, SIGINT\n", 3)


def test_second_signal_ends_a_blocked_process():
    process = start(BLOCKED)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert read_rest(process, timeout=20)[1] == 128 + signal.SIGTERM


def test_stop_signal_after_failure_of_another_rank_exits_immediately():
    process = start(BLOCKED, argument="lambda: os._exit(1)")
    process.send_signal(signal.SIGTERM)
    assert read_rest(process, timeout=20)[1] == 1


def test_early_notice_signal_is_not_counted_as_first_stop_signal():
    """Slurm: SIGUSR1 a while before the end, SIGTERM at the end, SIGKILL half a minute later, in which the save may come to its end."""
    process = start(LOOP, save_seconds=3)
    process.send_signal(signal.SIGUSR1)
    time.sleep(2.2)
    process.send_signal(signal.SIGTERM)
    assert read_rest(process) == ("saved, SIGUSR1\n", 3)


def test_ignored_sighup_stays_ignored():
    script = """
import os, signal, time
from megatron_grpo.run.signals import StopSignal
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
stop = StopSignal()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGHUP)
time.sleep(0.3)
print(stop.asked)
"""
    assert read_rest(start(script)) == ("None\n", 0)


class JobPeers:
    """The ranks of a job, each of which asks the others."""

    seconds_between_looks = 0.01

    def __init__(self):
        self.wish = None

    def pass_on(self, asked):
        self.wish = asked

    def asked(self):
        return self.wish


@pytest.fixture
def two_ranks():
    """Their signals, in one process: only the last one hears those of the process."""
    job, made = JobPeers(), []

    def make(**settings):
        made.extend(StopSignal(peers=job, **settings) for _ in range(2))
        return made

    yield make
    for one in reversed(made):
        one.restore()


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_signal_to_one_rank_reaches_the_others_without_a_collective(two_ranks):
    other, heard = two_ranks()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(other.should_cancel)
    assert heard.should_cancel() and heard.is_final and not other.is_final
    assert other.asked == heard.asked == StopReason("SIGUSR1", is_time=True)


def test_time_limit_requests_stop_like_a_signal(two_ranks):
    ours, _ = two_ranks(limits=[TimeLimit(time.monotonic() + 1.0, "stop_after_minutes (1)")])
    assert not ours.should_cancel()
    wait_until(ours.should_cancel)
    assert ours.asked == StopReason("stop_after_minutes (1)", is_time=True) and ours.is_requested(lambda flag: flag)
    assert ours.why(lambda asked: [None, asked]) == "stop_after_minutes (1)"


def test_stop_patience_starts_at_first_wait(two_ranks):
    _, heard = two_ranks(patience=0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: heard.asked)
    time.sleep(0.4)  # an optimizer step, which nobody can cut short
    began = time.monotonic()
    assert not heard.should_cancel()
    wait_until(heard.should_cancel)
    assert time.monotonic() - began >= 0.3


def test_forked_child_signal_does_not_stop_the_parent():
    script = """
import os, signal, time
from megatron_grpo.run.signals import StopSignal
stop = StopSignal()
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
time.sleep(0.2)
print("ready", flush=True)
print(os.waitstatus_to_exitcode(status), stop.received)
"""
    assert read_rest(start(script)) == ("-15 None\n", 0)


def test_stop_signal_restore_reinstates_handlers():
    script = """
import os, signal, threading, time
from megatron_grpo.run.signals import StopSignal
before = threading.active_count()
StopSignal().restore()
time.sleep(0.1)
print("ready", flush=True)
print(threading.active_count() - before, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(5)
"""
    assert read_rest(start(script)) == ("0\n", -signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_worker_ends_with_killed_launcher():
    script = """
import subprocess, sys, time
worker = "from megatron_grpo.core.base.cleanup import die_with_parent as die; import time; die(); print('up', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
process.stdout.readline()
print("ready", flush=True)
print(process.pid, flush=True)
time.sleep(60)
"""
    launcher = start(script)
    worker = int(launcher.stdout.readline())
    assert is_alive(worker)
    launcher.kill()
    launcher.wait()
    assert is_gone_within(worker, 2)


# -- under torchrun -----------------------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, threading, time
import torch.distributed as dist
from functools import partial
from megatron_grpo.run.lifecycle import leave_if_doomed
from megatron_grpo.run.peers import Peers, Process
from megatron_grpo.core.base.cleanup import die_with_parent
from megatron_grpo.run.signals import StopSignal
die_with_parent()
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
processes = [None, None]
dist.all_gather_object(processes, Process.mine())
peers = Peers(dist.distributed_c10d._get_default_store(), rank=rank, processes=processes)
stop = StopSignal(partial(leave_if_doomed, peers))
open(f"{folder}/{rank}", "w").write(str(os.getpid()))
if sys.argv[2] == "fail" and rank == 1:
    while len(os.listdir(folder)) < 3: time.sleep(0.01)
    peers.report_failure()
    sys.exit(1)
lock = threading.Lock(); lock.acquire(); lock.acquire()  # a collective that the failed rank never joins
"""


def start_torchrun(folder: Path, what: str) -> tuple[subprocess.Popen, list[int]]:
    """torchrun with two workers, once both have joined; and their process ids."""
    (folder / "worker.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    # Its grace is far longer than this test waits.
    command += ["--shutdown-timeout", "600", "worker.py", str(folder), what]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    files = [folder / "0", folder / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)  # between two looks
    return process, [int(file.read_text()) for file in files]


def test_ranks_end_with_killed_torchrun(tmp_path):
    launcher, workers = start_torchrun(tmp_path, "wait")
    assert all(map(is_alive, workers))
    launcher.kill()
    launcher.wait()
    assert all(is_gone_within(worker, 20) for worker in workers)


def test_rank_waiting_for_failed_rank_exits_within_seconds(tmp_path):
    launcher, workers = start_torchrun(tmp_path, "fail")
    assert launcher.wait(timeout=60) != 0
    assert not any(map(is_alive, workers))


class DyingPeers:
    """Peers of which one dies at a given moment."""

    seconds_between_looks = 0.02
    told: str | None = None

    def pass_on(self, asked): ...

    def asked(self):
        return None

    def why_doomed(self):
        return self.told


@pytest.mark.parametrize("leaves_unasked", [True, False])
def test_nccl_rank_exits_when_another_rank_died(monkeypatch, leaves_unasked):
    monkeypatch.setattr(signals, "SECONDS_TO_REPORT", 0.3)
    others, left = DyingPeers(), threading.Event()
    stop = StopSignal(left.set, peers=others, leaves_unasked=leaves_unasked)
    try:
        assert not left.wait(0.5)
        others.told, begun = "rank 1 died", time.monotonic()
        assert left.wait(5.0 if leaves_unasked else 1.0) == leaves_unasked
        assert time.monotonic() - begun >= 0.3, "who failed has time to say why"
    finally:
        stop.restore()
