"""A Slurm cluster of two nodes on this machine: Debian's slurmctld and two slurmd if they are installed, else a stand-in.

Both accept a job file like `sbatch`, start `srun`'s tasks on each node, send a signal to all processes of a job's steps, and requeue a job
on `scontrol requeue`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NODES = ("node1", "node2")
DAEMONS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
SECONDS = 300.0  # for anything, on a machine that may be busy


def is_installed() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and all(shutil.which(name) for name in DAEMONS)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, what: str, seconds: float = SECONDS):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come about in {seconds:.0f} s"
        time.sleep(0.1)
    return found


class SlurmCluster:
    """A real Slurm without cgroups: processes are found by their parents."""

    def __init__(self, folder: Path):
        self.folder, host = folder, socket.gethostname().split(".")[0]
        folder.mkdir(mode=0o755)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        nodes = "".join(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2\n" for node in NODES)
        (folder / "slurm.conf").write_text(f"""\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
{nodes}PartitionName=all Nodes={",".join(NODES)} Default=YES State=UP
""")
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        files = [f"--{what}={folder}/munge.{what.split('-')[0]}" for what in ("key-file", "pid-file", "log-file", "seed-file")]
        self._daemons = [
            subprocess.Popen([name, *words], env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for name, *words in (
                ("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files),
                ("slurmctld", "-D", "-i"),
                *(("slurmd", "-D", "-N", node) for node in NODES),
            )
        ]
        wait_for(
            lambda: self._ask("sinfo", "-h", "-N", "-o", "%N %T", fails=True).split() == ["node1", "idle", "node2", "idle"], "two nodes"
        )

    def submit(self, job_file: Path, words: list[str], output: Path, environment: dict[str, str]) -> str:
        told = self._ask("sbatch", "--parsable", f"--output={output}", str(job_file), *words, environment=environment)
        return told.strip()

    def send(self, job: str, number: signal.Signals) -> None:
        """Send a signal to the processes of the job's steps, like `--signal`."""
        self._ask("scancel", f"--signal={number.name.removeprefix('SIG')}", job)

    def ended(self, job: str) -> str | None:
        """Return how the job has ended; None while it waits or runs."""
        state = re.search(r"JobState=(\w+)", self._ask("scontrol", "show", "job", job))[1]
        return None if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else state

    def close(self) -> None:
        for job in self._ask("squeue", "-h", "-o", "%A", fails=True).split():
            self._ask("scancel", "--full", "--signal=KILL", job, fails=True)
            self._ask("scancel", job, fails=True)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _ask(self, *words: str, fails: bool = False, environment: dict[str, str] | None = None) -> str:
        asked = subprocess.run(words, env=self.environment | (environment or {}), capture_output=True, text=True)
        assert fails or asked.returncode == 0, f"{words}: {asked.stderr}"
        return asked.stdout


SRUN = r"""#!{python}
import os, subprocess, sys
nodes = int(os.environ["SLURM_NNODES"])
tasks = []
for node in range(nodes):
    facts = {{"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_STEP_ID": "0", "SLURMD_NODENAME": f"node{{node + 1}}"}}
    tasks.append(subprocess.Popen(sys.argv[1:], env=os.environ | facts, start_new_session=True))
    with open("{folder}/steps." + os.environ["SLURM_JOB_ID"], "a") as steps:
        steps.write(f"{{tasks[-1].pid}}\n")
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = r"""#!/usr/bin/env bash
# As much of it as job files and the program ask for.
case "$1 $2" in
    "show hostnames") printf '%s\n' node1 node2 | head -n "$SLURM_NNODES" ;;
    "requeue $SLURM_JOB_ID") touch "{folder}/requeue.$2" ;;
    *) echo "scontrol: not known here: $*" >&2; exit 1 ;;
esac
"""


class SimulatedSlurm:
    """A stand-in for Slurm: `srun`, `scontrol`, and the environment variables of a job."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text.format(python=sys.executable, folder=folder))
            (folder / name).chmod(0o755)
        self._jobs: dict[str, dict] = {}

    def submit(self, job_file: Path, words: list[str], output: Path, environment: dict[str, str]) -> str:
        job, told = str(len(self._jobs) + 1), dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", job_file.read_text(), re.M))
        environment = {**os.environ, **environment, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]"}
        environment |= {"SLURM_NNODES": told["nodes"], "SLURM_NTASKS": told["nodes"], "PATH": f"{self.folder}:{environment['PATH']}"}
        self._jobs[job] = {"command": ["bash", str(job_file), *words], "output": output, "environment": environment, "restarts": 0}
        self._begin(self._jobs[job])
        return job

    def _begin(self, job: dict) -> None:
        times = {"SLURM_JOB_START_TIME": str(int(time.time())), "SLURM_JOB_END_TIME": str(int(time.time()) + 12 * 3600)}
        count = {"SLURM_RESTART_COUNT": str(job["restarts"])} if job["restarts"] else {}
        with job["output"].open("ab") as output:
            environment = job["environment"] | times | count
            job["process"] = subprocess.Popen(job["command"], env=environment, stdout=output, stderr=output, start_new_session=True)

    def send(self, job: str, number: signal.Signals) -> None:
        for pid in self._processes(job):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def ended(self, job: str) -> str | None:
        this = self._jobs[job]
        requeue = self.folder / f"requeue.{job}"
        if requeue.exists():  # whatever runs is ended
            self.send(job, signal.SIGTERM)
            self._end(job)
            requeue.unlink()
            this["restarts"] += 1
            self._begin(this)
        code = this["process"].poll()
        return None if code is None else "FAILED" if code else "COMPLETED"

    def _end(self, job: str) -> None:
        process, end = self._jobs[job]["process"], time.monotonic() + 30
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)  # between two looks
        self.send(job, signal.SIGKILL)
        process.kill()
        process.wait()
        (self.folder / f"steps.{job}").unlink(missing_ok=True)

    def _processes(self, job: str) -> list[int]:
        """Return the processes of all steps and their children, the oldest first."""
        steps = self.folder / f"steps.{job}"
        found = [int(pid) for pid in steps.read_text().split()] if steps.exists() else []
        for pid in found:  # it grows
            for children in Path("/proc").glob(f"{pid}/task/*/children"):
                found += [int(child) for child in children.read_text().split()]
        return found

    def close(self) -> None:
        for job in self._jobs:
            self.send(job, signal.SIGKILL)
            self._jobs[job]["process"].kill()
            self._jobs[job]["process"].wait()
