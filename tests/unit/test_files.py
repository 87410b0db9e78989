"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_grpo.files import directory_whole, write_whole, written_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, durable):
    write_whole(tmp_path / "file", "old", durable=durable)
    with pytest.raises(ZeroDivisionError), written_whole(tmp_path / "file", durable=durable) as stream:
        stream.write(b"half of the n")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_killed_in_the_middle_leaves_the_old_file(tmp_path):
    write_whole(tmp_path / "file", "old")
    child = os.fork()
    if child == 0:
        with written_whole(tmp_path / "file") as stream:
            stream.write(b"new")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "file").read_text() == "old"
    write_whole(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_directory_have_the_modes_that_the_umask_leaves(tmp_path, mask, mode):
    """safetensors makes its files for their owner alone."""
    before = os.umask(mask)
    try:
        with directory_whole(tmp_path / "out", marker="file") as partial:
            os.close(os.open(partial / "file", os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "file").stat().st_mode & 0o777 == mode


def test_what_stops_the_writing_is_what_is_heard(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "file", "text")
    with pytest.raises(FileNotFoundError, match="absent"):
        write_whole(tmp_path / "absent" / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
