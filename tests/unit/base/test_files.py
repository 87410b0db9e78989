"""Atomic writes of files and directories, and parsing of JSON and YAML of other programs."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

import megatron_grpo
import megatron_grpo_referee
from megatron_grpo.core.base.files import (
    MARK,
    MOST_LEVELS,
    atomic_directory,
    atomic_write,
    atomic_write_text,
    parse_json,
    parse_yaml,
    plot_obstacle,
    write_mark,
)


@pytest.mark.parametrize("durable", [False, True])
def test_atomic_write_that_fails_keeps_old_file_and_removes_temporary(tmp_path, durable):
    atomic_write_text(tmp_path / "file", "old", durable=durable)
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "file", durable=durable) as stream:
        stream.write(b"half of the n")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_killed_in_the_middle_leaves_the_old_file(tmp_path):
    atomic_write_text(tmp_path / "file", "old")
    child = os.fork()
    if child == 0:
        with atomic_write(tmp_path / "file") as stream:
            stream.write(b"new")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "file").read_text() == "old"
    atomic_write_text(tmp_path / "file", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_directory_have_the_modes_that_the_umask_leaves(tmp_path, mask, mode):
    """safetensors makes its files for their owner alone."""
    before = os.umask(mask)
    try:
        with atomic_directory(tmp_path / "out") as partial:
            os.close(os.open(partial / "file", os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "file").stat().st_mode & 0o777 == mode


def test_atomic_write_raises_the_original_error(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_write_text(tmp_path / "file", "text")
    with pytest.raises(FileNotFoundError, match="absent"):
        atomic_write_text(tmp_path / "absent" / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def write_directory(out, *names):
    with atomic_directory(out) as partial:
        for name in names:
            (partial / name).write_text("new")


@pytest.mark.parametrize("is_run", [False, True], ids=["a model", "a run"])
def test_atomic_directory_write_rejects_directory_of_another_program(tmp_path, is_run):
    """The base model, say: it has a config.json, as every model; and a run's own folder has a mark, of a run."""
    (tmp_path / "config.json").write_text("mine")
    if is_run:
        write_mark(tmp_path, "train", saved=3)
    with pytest.raises(FileExistsError, match="holds config.json, which is not from an export of this program; it is not overwritten"):
        write_directory(tmp_path, "config.json")
    assert (tmp_path / "config.json").read_text() == "mine"


def test_atomic_directory_write_keeps_files_added_by_the_user(tmp_path):
    write_directory(tmp_path / "out", "a", "b")
    (tmp_path / "out" / "model.gguf").write_text("mine")
    write_directory(tmp_path / "out", "b", "c")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b", "c", MARK, "model.gguf"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_atomic_directory_write_follows_a_symlink(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch")
    for _ in range(2):
        write_directory(tmp_path / "out", "a")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "scratch" / "a").is_file()


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_replaces_only_a_plot_of_this_program(tmp_path, suffix):
    from matplotlib.figure import Figure

    from megatron_grpo.commands.planning.command import make_plan
    from megatron_grpo.commands.planning.figure import draw_png
    from megatron_grpo.run.check import check_parsed
    from megatron_grpo.run.config import parse
    from megatron_grpo.run.schedule import schedule_run

    theirs, ours = tmp_path / f"theirs.{suffix}", tmp_path / f"ours.{suffix}"
    Figure().savefig(theirs)
    draw_png(make_plan(schedule_run(check_parsed(parse(["--max_steps", "2"])))).schedule, 2, str(ours))
    assert "was not drawn by this program" in (plot_obstacle(theirs) or "") and plot_obstacle(ours) is None
    [problem] = parse_problems(["--png", str(theirs)])
    assert "theirs" in problem and "not overwritten" in problem


def parse_problems(words) -> list[str]:
    from megatron_grpo.core.base.errors import ConfigError
    from megatron_grpo.run.check import check_parsed
    from megatron_grpo.run.config import parse

    with pytest.raises(ConfigError) as error:
        check_parsed(parse(["--max_steps", "2", *words]))
    return [problem.message for problem in error.value.problems]


@pytest.mark.parametrize("encode", [str, str.encode])
def test_parse_json_limits_depth_to_100_levels(encode):
    for levels in (1, MOST_LEVELS):
        assert json.dumps(parse_json(encode('{"a":' * levels + "1" + "}" * levels))).count("a") == levels
    for text in (
        "[" * 100_000,
        "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1),
        '{"a":' * 300 + "1" + "}" * 300,
        '[{"a":' * 60 + "1" + "}]" * 60,
    ):
        with pytest.raises(ValueError, match="more than 100 levels"):
            parse_json(encode(text))
    wide = [[number, {"text": "[{" * 99}] for number in range(200)]
    assert parse_json(encode(json.dumps(wide))) == wide
    with pytest.raises(json.JSONDecodeError, match="line 2 column 1"):
        parse_json(encode("[\n"))


def test_parse_yaml_limits_depth_to_100_levels_with_aliases_expanded():
    assert str(parse_yaml("[" * MOST_LEVELS + "1" + "]" * MOST_LEVELS)[0]).count("[") == MOST_LEVELS
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]")[0]["c"] == [{"x": 1}] * 2 and parse_yaml("") == (None, None)
    for text, says in (
        ("a: " + "[" * 100_000, "more than 100 levels"),
        ("a:\n" + "".join(" " * depth + "a:\n" for depth in range(1, 200)), "more than 100 levels"),
        ("a: &a [" + "1," * 999 + "]\nb: &b [" + "*a," * 98 + "]\nc: [*b, *b]", "100,000 values.* line 3"),
        ("a: &a {b: [*a]}", "100,000 values.* line 1"),
        ("a: b: c", "mapping values are not allowed here, line 1"),
        ("a: !!int ''", "index"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_yaml(text)


def test_external_json_and_yaml_are_parsed_in_one_module():
    """Each module below reads what this program wrote a moment ago, or a table of its own."""
    own = {
        "files": "the place", "engine_kwargs": "its table", "registry": "its table", "families": "its table", "tables": "its tables",
        "dump": "its table", "shape": "a copy", "manifest": "a copy", "protocol": "a copy", "agents": "its own text of tools",
        "agent_forms": "arguments that were read already", "sampling_mask": "xgrammar's answer", "math": "its child", "jail": "its parent",
        "sandbox": "its child", "launch": "its ranks", "watchdog": "the ranks' store", "weight_transfer": "rank 0", "doctor": "its run",
        "output": "a lock's note", "cli": "its table", "show": "the table of cli",
    }  # fmt: skip
    reads = re.compile(r"\bjson\.loads?\(|yaml\.(safe_)?load\(")
    folders = [Path(package.__file__).parent for package in (megatron_grpo, megatron_grpo_referee)]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = {path.stem for path in files if reads.search(path.read_text(encoding="utf-8"))}
    assert found == set(own)
