"""RankProcesses started by a program: output, signals, failures and exit."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron_grpo.api import launch
from megatron_grpo.core.base.errors import ConfigError, RunError
from megatron_grpo.run import jobs
from tests.terminal import Terminal


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a function of (launch folder, rank) as the ranks of a job."""
    monkeypatch.setattr(launch, "RANK_MODULE", "tests.stub_rank")

    def start(act, number=2, *, listen=None, echo=True):
        with launch.launch_folder(tmp_path / "out") as folder:
            launch.write_launch(folder, "train", [], {"act": act}, listens=listen is not None)
            return launch.RankProcesses(folder, number, listen=listen, echo=echo).run()

    return start


def saves_on(number):
    """What a rank does that is asked to stop: it exits with 3."""

    def act(folder, rank):
        signal.signal(number, lambda *_: sys.exit(3))
        (folder / f"ready.{rank}").touch()
        while True:
            time.sleep(0.01)

    return act


def test_launched_ranks_have_rank_variables_and_sys_path(run):
    def act(folder, rank):
        (folder.parents[1] / f"rank{rank}").write_text(f"{os.environ['LOCAL_RANK']} of {os.environ['WORLD_SIZE']}")
        return 0

    assert run(act) == 0


def test_lines_are_printed_by_the_calling_thread_and_without_colors(run, monkeypatch):
    """Jupyter sets FORCE_COLOR, and shows what another thread prints below a later cell."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    written = []

    class Notebook:
        def write(self, text):
            written.append((text, threading.get_ident()))

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Notebook())

    def act(folder, rank):
        print(rank, os.environ.get("FORCE_COLOR"), os.environ.get("CLICOLOR_FORCE"), flush=True)
        return 0

    found = []
    thread = threading.Thread(target=lambda: found.append((run(act), threading.get_ident())))
    thread.start()
    thread.join()
    [(code, ident)] = found
    assert code == 0 and sorted(text for text, _ in written if text) == ["0 None None\n", "1 None None\n"]
    assert {number for _, number in written} == {ident}


def test_launched_rank_changes_only_its_copy_of_program_state(run):
    calls = []

    def act(folder, rank):
        calls.append(rank)
        return 0 if calls == [rank] else 1

    assert run(act) == 0 and calls == []


def test_launch_forwards_metrics_to_program_and_stop_request_to_ranks(run):
    heard = []

    def act(folder, rank):
        signal.signal(jobs.STOP_BY_CALLBACK, lambda *_: sys.exit(3))
        (folder / f"ready.{rank}").touch()
        if rank == 0:
            while not (folder / "ready.1").exists():  # it would be ended by the request, if that came before its handler
                time.sleep(0.01)
            first, second = (json.dumps({"step": step, "numbers": {"reward": step / 2}}) + "\n" for step in (1, 2))
            with (folder / "metrics.jsonl").open("a") as stream:
                for text in (first + second[:9], second[9:]):  # the program reads while a line is being written
                    stream.write(text)
                    stream.flush()
                    time.sleep(2 * launch.SECONDS_BETWEEN_LOOKS)
        while True:
            time.sleep(0.01)

    def listen(step, numbers):
        heard.append((step, numbers))
        return step == 2

    assert run(act, listen=listen) == 3 and heard == [(1, {"reward": 0.5}), (2, {"reward": 1.0})]


@pytest.fixture
def default_sigint():
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_lets_the_ranks_save_and_is_raised_in_the_program(run, tmp_path, default_sigint):
    def interrupt():
        while len([*tmp_path.glob("out/.started/*/ready.*")]) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match="exit codes of its ranks: 3, 3"):
        run(saves_on(signal.SIGINT))


def test_launch_second_ctrl_c_ends_saving_ranks(run, tmp_path, default_sigint):
    def saving(folder, rank):
        signal.signal(signal.SIGINT, lambda *_: (folder / f"saving.{rank}").touch())
        (folder / f"ready.{rank}").write_text(str(os.getpid()))
        time.sleep(600)

    ranks = []

    def interrupt_twice():
        for name in ("ready", "saving"):
            while len(found := [*tmp_path.glob(f"out/.started/*/{name}.*")]) < 2:
                time.sleep(0.01)
            if name == "ready":
                while not all(path.read_text() for path in found):
                    time.sleep(0.01)
                ranks.extend(psutil.Process(int(path.read_text())) for path in found)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_twice, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(saving)
    assert len(ranks) == 2 and not any(one.is_running() for one in ranks)


NOTEBOOK_CELL = """
import os, signal, sys, time
from pathlib import Path
from megatron_grpo.api import launch

launch.RANK_MODULE = "tests.stub_rank"

def act(folder, rank):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
    print("ready", flush=True)
    time.sleep(600)

with launch.launch_folder(Path(os.environ["OUT"])) as folder:
    launch.write_launch(folder, "train", [], {"act": act}, listens=False)
    launch.RankProcesses(folder, 1, listen=None, echo=True).run()
print("the next line")
"""


def test_launch_interrupt_in_notebook_ends_cell_after_save(tmp_path, monkeypatch):
    manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed (pip install 'megatron-grpo[dev]')")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'megatron-grpo[dev]')")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    printed = []

    def heard(message):
        printed.append(message["content"].get("text", ""))
        if "ready" in printed[-1]:
            kernel.interrupt_kernel()

    try:
        ended = client.execute_interactive(NOTEBOOK_CELL, timeout=120, output_hook=heard)
        assert (ended["content"]["status"], ended["content"]["ename"]) == ("error", "KeyboardInterrupt")
        assert ended["content"]["evalue"].endswith("exit codes of its ranks: 3") and "the next line" not in "".join(printed)
        assert client.execute_interactive("1 + 1", timeout=60, output_hook=heard)["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


IN_A_TERMINAL = """
import os, sys
from pathlib import Path
from megatron_grpo.api import launch

launch.RANK_MODULE = "tests.stub_rank"

def act(folder, rank):
    print("terminal" if sys.stdout.isatty() else "file", os.environ.get("FORCE_COLOR"), flush=True)

with launch.launch_folder(Path("out")) as folder:
    launch.write_launch(folder, "train", [], {"act": act}, listens=False)
    launch.RankProcesses(folder, 1, listen=None, echo=True).run()
"""


def test_launched_ranks_write_directly_to_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Terminal([sys.executable, "-c", IN_A_TERMINAL], tmp_path)
    try:
        terminal.say("", r"terminal 1\r\n")
    finally:
        terminal.close()
    ended = subprocess.run([sys.executable, "-c", IN_A_TERMINAL], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "file None\n", ended.stderr


def test_launch_raises_error_of_first_failed_rank_and_ends_the_others(run, monkeypatch):
    monkeypatch.setattr(launch, "SECONDS_TO_END", 0.1)

    def act(folder, rank):
        if rank == 1:
            (folder / "error.1.pkl").write_bytes(pickle.dumps(ConfigError("lr is wrong.")))
            return 2
        time.sleep(600)

    with pytest.raises(ConfigError, match="lr is wrong."):
        run(act)
    with pytest.raises(RunError, match="rank 1 ended with exit code 9 without a reason"):
        run(lambda folder, rank: 9 if rank else time.sleep(600))

    def dies(folder, rank):
        print("what it said", flush=True)
        return 9

    with pytest.raises(RunError, match="exit code 9 without a reason. Its last lines:\\n(.*\\n)*what it said$"):
        run(dies, 1, echo=False)


def test_launch_with_unpicklable_object_names_it_and_leaves_no_files(run, tmp_path):
    lock = threading.Lock()

    def act(folder, rank):
        with lock:
            return 0

    with pytest.raises(ConfigError, match="act cannot be sent to the ranks \\(TypeError: cannot pickle '_thread.lock' object\\). Create"):
        run(act)
    assert not [*tmp_path.iterdir()]


def test_launch_preserves_state_shared_by_two_objects(tmp_path):
    calls = []
    with launch.launch_folder(tmp_path) as folder:
        launch.write_launch(folder, "train", [], {"one": lambda: calls.append(1), "other": lambda: len(calls)}, listens=False)
        with (folder / "objects.pkl").open("rb") as stream:
            objects = pickle.Unpickler(stream)
            one, other = objects.load(), objects.load()
    one()
    assert other() == 1 and calls == []


def test_a_function_of_a_module_beside_the_script_is_found(run, tmp_path, monkeypatch):
    (tmp_path / "beside_the_script.py").write_text("def act(folder, rank):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch, "RANK_MODULE", "megatron_grpo.api.rank")
    from beside_the_script import act

    with pytest.raises(ConfigError, match="'none' is not a command"), launch.launch_folder(tmp_path / "out") as folder:
        launch.write_launch(folder, "none", [], {"act": act}, listens=False)
        launch.RankProcesses(folder, 1, listen=None, echo=False).run()


PROGRAM = """
import sys, time
from pathlib import Path
from megatron_grpo.api import launch

class Slow:
    def __reduce__(self):
        return time.sleep, (600,)

with launch.launch_folder(Path(sys.argv[1])) as folder:
    launch.write_launch(folder, "train", [], {"slow": Slow()}, listens=False)
    launch.RankProcesses(folder, 2, listen=None, echo=True).run()
"""


def test_launched_ranks_end_with_killed_program_and_next_launch_removes_its_folder(tmp_path):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    parent = psutil.Process(program.pid)
    while len(ranks := parent.children(recursive=True)) < 4:  # two ranks, each with its supervisor
        assert program.poll() is None
        time.sleep(0.05)
    program.kill()
    program.wait()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert [*tmp_path.glob(".started/*")]
    with launch.launch_folder(tmp_path) as folder:
        assert [*tmp_path.glob(".started/*")] == [folder]
    assert not [*tmp_path.iterdir()]
