"""Two runs in one output_dir, with real processes, locks and file systems."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.assemble.output import NAME, OutputLock

ROOT = Path(__file__).resolve().parents[3]
HOLDER = r"""
import os, sys, time
from megatron_grpo.run.assemble.output import OutputLock
lock = OutputLock.take(sys.argv[1])
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, b"%d\n" % os.getpid())  # in one piece, whoever else writes
    time.sleep(60)
os.write(1, b"held\n")
time.sleep(60)
"""


@contextmanager
def hold_lock(out: Path, *words: str, lines: int = 1):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(out), *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process, [process.stdout.readline().strip() for _ in range(lines)]
    finally:
        process.kill()
        process.wait()


@contextmanager
def mount_tmpfs(folder: Path, options: str):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_output_lock_held_by_another_run_is_rejected_with_its_owner(tmp_path):
    with hold_lock(tmp_path) as (first, _):
        before = (tmp_path / NAME).read_bytes()
        with pytest.raises(ConfigError) as caught:
            OutputLock.take(tmp_path)
        assert (tmp_path / NAME).read_bytes() == before
    facts = json.loads(before)
    assert facts["pid"] == first.pid
    for part in (f"pid {first.pid} on {facts['host']}", facts["started"], str(tmp_path)):
        assert part in str(caught.value)


def test_output_lock_of_killed_run_is_released(tmp_path):
    with hold_lock(tmp_path) as (first, _):
        first.kill()
        first.wait()
        OutputLock.take(tmp_path).release()


def test_output_lock_is_not_inherited_by_child_processes(tmp_path):
    with hold_lock(tmp_path, "fork", lines=2) as (first, said):
        child = int(next(line for line in said if line.isdigit()))
        try:
            first.kill()
            first.wait()
            os.kill(child, 0)
            OutputLock.take(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_output_lock_note_is_cleared_at_end_of_run(tmp_path):
    OutputLock.take(tmp_path / "new").release()
    assert (tmp_path / "new" / NAME).read_bytes() == b""
    OutputLock.take(tmp_path / "new").release()


def test_output_lock_note_of_other_host_is_taken_over_with_warning(tmp_path, caplog):
    (tmp_path / NAME).write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "2026-01-01"}))
    OutputLock.take(tmp_path).release()
    assert "elsewhere (pid 7)" in caplog.text


def test_an_output_dir_that_is_a_link_to_nothing_is_refused_and_stays(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere" / "it")
    with pytest.raises(ConfigError, match=r"out\) is a link to \S+/nowhere/it, which does not exist\. Remove the link"):
        OutputLock.take(tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_an_output_dir_that_is_a_file_is_refused(tmp_path, where):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file|Not a directory"):
        OutputLock.take(tmp_path / where)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("options, said", [("ro", "Read-only file system"), ("size=4k", "No space left on device")])
def test_an_output_dir_that_cannot_be_written_is_refused(tmp_path, options, said):
    with mount_tmpfs(tmp_path / "disk", options) as disk:
        if "size" in options:
            (disk / "full").write_bytes(b"x" * 4096)
        with pytest.raises(ConfigError, match=f"cannot be written: {said}"):
            OutputLock.take(disk)


def test_output_lock_without_file_locks_uses_note_of_live_process(tmp_path, monkeypatch, caplog):
    import errno

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with hold_lock(tmp_path) as (first, _):
        monkeypatch.setattr("fcntl.flock", no_locks)
        with pytest.raises(ConfigError, match=f"pid {first.pid} "):
            OutputLock.take(tmp_path)
        first.kill()
        first.wait()
        OutputLock.take(tmp_path).release()
    assert "has no locks" in caplog.text
