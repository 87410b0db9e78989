"""Machine failures during a run end it with an error message and an exit code; failures of optional files do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import call_after_steps, read_jsonl, write_inputs
from tests.ranks import run_ranks


@contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def train_and_write_down(rank: int, world_size: int, flags: list[str], log: str, then: Callable[[Path], None] | None) -> int:
    """Run `train`. then: called in the first steps."""
    if then is not None:
        call_after_steps(flags, 2, lambda: then(Path(flags[flags.index("--output_dir") + 1])))
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    return scripted.train(rank, world_size, flags, draws=True)


def run(folder: Path, out: Path, *more: str, then: Callable[[Path], None] | None = None) -> tuple[int, str]:
    """Return the exit code and the output."""
    flags = [*write_inputs(folder), *("--output_dir", str(out)), *("--max_steps", "40"), *more]
    [code] = run_ranks(train_and_write_down, 1, flags, str(folder / "log"), then, timeout=120)
    return code, (folder / "log").read_text()


@pytest.mark.parametrize(
    "size, said",
    [
        ("60k", r"megatron-grpo: no space is left on the disk for \S+\.jsonl \(0 MiB, 0\.0 MiB of them free\)"),
        # Before it a step dump of step 11, whose log-probs lie apart: without one a run goes on.
        (
            "160k",
            r"(?s)WARNING: the step dump \S+step_000011_logp_gap could not be written.*"
            r"megatron-grpo: The checkpoint of step 40 failed and was removed[^\n]*No space left on device",
        ),
    ],
)
def test_full_disk_is_an_error_message(tmp_path, size, said):
    with small_disk(tmp_path / "disk", size) as disk:
        code, told = run(tmp_path, disk / "out", "--log_completions_steps", "0")
    assert code == 1
    assert re.search(said, told), told[-3000:]
    assert "Traceback" not in told and "Done" not in told and "reward while training" not in told


def test_unwritable_tables_and_plots_do_not_end_a_run(tmp_path):
    """During the run, files are created at the paths of the folders."""

    def in_the_way(out):
        shutil.rmtree(out / "completions")
        for name in ("completions", "plots"):
            (out / name).write_text("in the way")

    out = tmp_path / "out"
    code, told = run(tmp_path, out, "--max_steps", "20", then=in_the_way)
    assert code == 0
    assert len(read_jsonl(out / "metrics.jsonl")) == 20
    assert "the table of completions in" in told and "plots failed, and the run continues without it" in told


@pytest.mark.parametrize("is_made_again", [False, True])
def test_removed_output_dir_ends_the_run_with_an_error_message(tmp_path, is_made_again):
    def removed(out):
        out.rename(tmp_path / "gone")  # at one moment: the run would write into what is being removed
        if is_made_again:
            out.mkdir()

    code, told = run(tmp_path, tmp_path / "out", "--max_steps", "40", then=removed)
    assert code == 1 and "Done" not in told and "Traceback" not in told
    assert f"output_dir ({tmp_path}/out) was removed or emptied while the run wrote to it" in told


def test_records_of_a_finished_run_without_checkpoints_are_kept(tmp_path):
    out = tmp_path / "out"
    assert run(tmp_path, out, "--max_steps", "2")[0] == 0
    before = {path: path.read_bytes() for path in out.glob("*.*")}
    (out / "checkpoints").rename(tmp_path / "scratch")
    code, told = run(tmp_path, out, "--max_steps", "2")
    assert code == 2 and f"contains the records of a run that saved step 2, but {out}/checkpoints has no checkpoint" in told
    (out / "checkpoints").symlink_to(tmp_path / "not-mounted")
    code, told = run(tmp_path, out, "--max_steps", "2")
    assert code == 2 and "is a link to" in told
    assert {path: path.read_bytes() for path in out.glob("*.*")} == before


def test_output_dir_that_is_a_file_exits_with_code_2(tmp_path):
    (tmp_path / "out").write_text("mine")
    code, told = run(tmp_path, tmp_path / "out")
    assert code == 2
    assert "is a file" in told and (tmp_path / "out").read_text() == "mine"
