"""Lock that allows one run at a time in an output directory.

The kernel holds the lock and frees it when its owner dies, however it dies.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.checkpoint.written import LOCK as NAME
from megatron_grpo.run.peers import Process

logger = logging.getLogger(__name__)
# Some network file systems have no locks. The note in the file replaces the lock there.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class OutputLock:
    """Lock on `output_dir`/run.lock, held until `release` or the end of this process.

    The file contains the owner's host, pid and start time. On a network file system with locks, runs on other hosts are detected too. The
    file stays after the lock is released: a lock on a file that another process may delete and recreate protects nothing.

    Args:
        path: The lock file.
        handle: Its open file descriptor.
    """

    def __init__(self, path: Path, handle: int):
        self.path, self._handle = path, handle
        # A forked child, for example of a reward function, would share the lock and hold it after this process has died.
        os.register_at_fork(after_in_child=self._in_child)

    @classmethod
    def take(cls, output_dir: str | Path) -> OutputLock:
        """Lock a directory, creating it if needed.

        Args:
            output_dir: Output directory of the run.

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
        raise _held(path, _owner(handle)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner, mine = _owner(handle), Process.mine()
        alive = Process(mine.host, mine.machine, owner.get("pid", 0), owner.get("started_ticks", "")).death() is None
        if owner.get("machine") == mine.machine and alive:
            raise _held(path, owner) from None
        logger.warning("%s: this file system has no locks (%s), so a second run in this directory cannot be detected", path, error.strerror)


def _held(path: Path, owner: dict[str, Any]) -> ConfigError:
    who = "another run, which has just started"
    if owner:
        who = f"another run: pid {owner['pid']} on {owner['host']}, since {owner['started']}"
    return _refusal(f"output_dir ({path.parent}) is in use by {who}. Wait for its end, stop it, or use another output_dir.")


def _refusal(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("output_dir",), message=message)])


def _note_of_this_process() -> dict[str, Any]:
    mine = Process.mine()
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return {"host": mine.host, "pid": mine.pid, "started": now, "machine": mine.machine, "started_ticks": mine.started}


def _owner(handle: int) -> dict[str, Any]:
    """Return the note of the lock's owner; {} if it is missing or incomplete."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"host", "pid", "started"} <= found.keys() else {}


def _write(handle: int, facts: dict[str, Any]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(facts).encode() + b"\n", 0)
