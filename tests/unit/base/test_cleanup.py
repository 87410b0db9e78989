"""Clean-up after success and failure: it runs to its end and keeps the first error."""

from __future__ import annotations

import gc
import weakref

import pytest

from megatron_grpo.core.base.cleanup import CleanUp, _adopts, without_gc


def make_failing_step(name):
    def step():
        raise ValueError(name)

    return step


def test_clean_up_keeps_first_error_and_adds_later_ones_as_notes():
    done = []
    with pytest.raises(RuntimeError, match="the rollout failed") as caught:
        with CleanUp(lambda: done.append("last"), make_failing_step("sleep")) as clean_up:
            clean_up.add(lambda: done.append("first"))
            raise RuntimeError("the rollout failed")
    assert done == ["first", "last"]
    assert caught.value.__notes__ == ["Cleaning up after this failed too: ValueError: sleep"]


def test_clean_up_failure_after_successful_block_raises():
    done = []
    with pytest.raises(ValueError, match="close"):
        with CleanUp(lambda: done.append("last"), make_failing_step("close")):
            pass
    assert done == ["last"]


def test_clean_up_of_engine_that_cannot_sleep_reports_the_original_failure(monkeypatch):
    from megatron_grpo.core.rollout.colocated import ColocatedEngine

    class Broken:
        def sleep(self, level):
            raise RuntimeError("cannot sleep")

    engine = ColocatedEngine(Broken(), rank=0, world_size=1, tensor_parallel_size=1, max_model_len=8, sleep_level=1)
    with pytest.raises(ValueError, match="no such token"):
        with engine.wake_up():
            raise ValueError("no such token")


@pytest.mark.parametrize(
    ("pid", "name", "command", "adopts"),
    [
        (1, "systemd", "/sbin/init", True),
        (1, "tini", "/usr/bin/tini\0--\0torchrun\0train.py", True),
        (1, "pt_elastic", "/usr/bin/python3.11\0/usr/bin/torchrun\0train.py", False),  # the first process of a container
        (900, "systemd", "/lib/systemd/systemd\0--user", True),
        (900, "bash", "bash\0-c\0torchrun train.py", False),
    ],
)
def test_launcher_check_rejects_processes_that_adopt_orphans(tmp_path, pid, name, command, adopts):
    (tmp_path / str(pid)).mkdir()
    (tmp_path / str(pid) / "comm").write_text(name + "\n")
    (tmp_path / str(pid) / "cmdline").write_text(command)
    assert _adopts(pid, tmp_path) == adopts and not _adopts(7, tmp_path)


def test_gc_after_pause_skips_only_objects_made_during_the_pause():
    class Cycle:
        def __init__(self):
            self.me = self

    garbage = weakref.ref(Cycle())
    try:
        with without_gc():
            assert garbage() is None and not gc.isenabled()  # what was garbage before is not kept for good
            made = weakref.ref(Cycle())
        later = weakref.ref(Cycle())
        assert gc.isenabled()
        gc.collect()
        assert made() is not None and later() is None
    finally:
        gc.unfreeze()


def test_gc_stays_disabled_after_a_nested_pause():
    try:
        with without_gc():
            with without_gc():
                pass
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.unfreeze()
