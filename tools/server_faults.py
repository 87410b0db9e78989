"""Inject faults into rollout servers and their trainer at random times, and count lost, duplicated and wrong completions.

    python tools/server_faults.py --minutes 30 --seed 0 [--servers 3] [--every 12]

The test runs servers with a tiny model and two trainer ranks, which repeatedly sync new weights and request completions of sixty prompts.
Faults: a server is killed, its engine is killed, a server is stopped for up to 40 s or terminated with SIGTERM, or the trainer is killed.
Processes that died are started again. In each round every group must arrive exactly once, sampled with the weights of that round: its
tokens must equal those of the same request without faults. The tool prints a table; the exit code is 1 if a group is lost, duplicated or
wrong, or if a process is left at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, only its own folder is on the path

from tests.distributed.test_rollout_servers import PROMPTS_OF_FAULTS, ask_rounds  # noqa: E402
from tests.ranks import RanksFailed, run_ranks  # noqa: E402
from tests.servers import ASKS, Server  # noqa: E402
from tests.tiny_models import write_tiny  # noqa: E402

LONGEST_STANDSTILL = 40.0  # seconds


class ServerPool:
    """Rollout servers; a server that has died is replaced.

    Args:
        folder: Folder of the servers' files.
        model: Checkpoint that they start with.
        count: Number of servers.
    """

    def __init__(self, folder: Path, model: Path, count: int):
        self.folder, self.model, self.names = folder, model, folder / "names"
        self.names.mkdir()
        self.starts = 0
        self.servers = [self._start() for _ in range(count)]
        self.dead: list[Server] = []

    def _start(self) -> Server:
        self.starts += 1
        server = Server(self.folder / f"server_{self.starts}", self.model)
        threading.Thread(target=self._publish_address, args=(server,), daemon=True).start()
        return server

    def _publish_address(self, server: Server) -> None:
        """Copy the server's address file into a shared directory while the server accepts calls, as one --address_file per server would."""
        name = self.names / server.log.parent.name
        while server.process.poll() is None and not server.address_file.exists():
            time.sleep(0.1)
        if server.address_file.exists():
            shutil.copy(server.address_file, name.with_name(f".{name.name}"))
            name.with_name(f".{name.name}").rename(name)
        server.process.wait()
        name.unlink(missing_ok=True)

    def list_running(self) -> list[Server]:
        """Return the servers that accept calls."""
        return [server for server in self.servers if server.process.poll() is None and server.address_file.exists()]

    def restart_dead(self) -> None:
        """Replace the servers that have died."""
        for index, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.dead.append(server)
                self.servers[index] = self._start()

    def stop(self) -> list[str]:
        """Terminate all servers and return the command lines of processes that are left."""
        for server in self.servers:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        left = [line for server in [*self.dead, *self.servers] if not server.has_left_nothing(60.0) for line in server.processes()]
        for server in [*self.dead, *self.servers]:
            server.close()
        return left


class Trainer:
    """Two trainer ranks that request completions until they are stopped; they are started again after a kill.

    Args:
        folder: Folder of their files.
        models: Checkpoints whose weights they sync in turn.
        names: Directory with the servers' address files.
    """

    def __init__(self, folder: Path, models: list[Path], names: Path):
        self.folder, self.models, self.names = folder, models, names
        self.stop_file, self.rounds_file = folder / "stop", folder / "rounds.jsonl"
        self.failure: str | None = None
        self.kills = 0
        self._is_killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stop_file.exists() and self.failure is None:
            try:
                run_ranks(ask_rounds, 2, self.models, f"@{self.names}", self.folder / "run", self.folder, env=ASKS, timeout=36000.0)
            except RanksFailed as failed:
                if not self._is_killed:
                    self.failure = str(failed)
                self._is_killed = False

    def read_rounds(self) -> list[dict]:
        """Return the results of each round so far."""
        return [json.loads(line) for line in self.rounds_file.read_text().splitlines()] if self.rounds_file.exists() else []

    def kill(self) -> None:
        """Kill both ranks."""
        pids = [int(path.read_text()) for path in self.folder.glob("pid_*")]
        self.kills, self._is_killed = self.kills + 1, True
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def finish(self, seconds: float) -> None:
        """Let the ranks finish the current round, within a number of seconds."""
        self.stop_file.touch()
        self._thread.join(seconds)
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"the trainer did not finish a round within {seconds:.0f} s"


def inject_fault(rng: random.Random, server_group: ServerPool, trainer: Trainer) -> str | None:
    """Inject one random fault and return its name; None if it was not possible."""
    running = server_group.list_running()
    server_faults = ["kill a server", "kill an engine", "stand still", "stop kindly"]
    kind = rng.choice([*server_faults, *server_faults, "kill the trainer"])
    if kind == "kill the trainer":
        trainer.kill()
        return kind
    if not running:
        return None
    server = rng.choice(running)
    if kind == "kill a server":
        server.process.kill()
    elif kind == "kill an engine":
        try:
            os.kill(server.find_pid("EngineCore"), signal.SIGKILL)
        except (StopIteration, ProcessLookupError):
            return None
    elif kind == "stop kindly":
        server.process.send_signal(signal.SIGTERM)
    else:
        os.killpg(server.process.pid, signal.SIGSTOP)
        seconds = rng.uniform(0.5, LONGEST_STANDSTILL)
        threading.Timer(seconds, _thaw, (server.process.pid,)).start()
    return kind


def _thaw(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def main() -> int:
    """Run the servers and the trainer with faults and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the test")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--servers", type=int, default=3, help="number of servers")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between two faults, on average")
    asked = parser.parse_args()
    rng, folder = random.Random(asked.seed), Path(tempfile.mkdtemp(prefix="server_faults_"))
    models = [write_tiny(folder / f"model_{seed}", tied=False, seed=seed) for seed in range(3)]
    server_group = ServerPool(folder, models[0], asked.servers)
    trainer, faults = Trainer(folder, models, server_group.names), Counter[str]()
    while (
        len(trainer.read_rounds()) < len(models) and trainer.failure is None
    ):  # answers without faults, which later answers are compared with
        time.sleep(0.5)
    until = time.monotonic() + 60 * asked.minutes
    while time.monotonic() < until and trainer.failure is None:
        time.sleep(rng.expovariate(1 / asked.every))
        if kind := inject_fault(rng, server_group, trainer):
            faults[kind] += 1
            print(f"{time.strftime('%H:%M:%S')}  {kind}; {len(trainer.read_rounds())} rounds", flush=True)
        server_group.restart_dead()
    time.sleep(LONGEST_STANDSTILL)  # until all stopped servers have continued
    server_group.restart_dead()
    trainer.finish(300.0)
    return report(folder, faults, trainer, server_group.stop(), server_group.starts)


def report(folder: Path, faults: Counter[str], trainer: Trainer, left: list[str], starts: int) -> int:
    """Print the table of faults and results and return the exit code."""
    rounds = trainer.read_rounds()
    totals = {name: sum(one[name] for one in rounds) for name in ("lost", "twice", "wrong", "restored")}
    print(f"\n{'fault':<24}{'times':>8}")
    for kind, count in faults.most_common():
        print(f"{kind:<24}{count:>8}")
    print(f"{'servers started':<24}{starts:>8}\n")
    print(f"{'rounds':<24}{len(rounds):>8}   of {PROMPTS_OF_FAULTS} groups")
    for name, value in totals.items():
        print(f"{name:<24}{value:>8}")
    print(f"{'longest round':<24}{max((one['seconds'] for one in rounds), default=0.0):>8.1f} s")
    print(f"{'processes left':<24}{len(left):>8}")
    for line in [*left, *([trainer.failure] if trainer.failure else [])]:
        print(line)
    is_good = not (totals["lost"] or totals["twice"] or totals["wrong"] or left or trainer.failure) and bool(rounds)
    print("PASSED" if is_good else f"FAILED; logs are in {folder}")
    if is_good:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
