"""The token cache: a data set is tokenized once per machine, and again after any change."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data import prompts, tokens
from megatron_grpo.run.data.chat import PromptEncoder, find_clock, load_tokenizer
from megatron_grpo.run.data.prompts import open_stream
from megatron_grpo.run.data.tokens import TokenLists, cache_directory, cached_table, compute_cache_key, read, write
from tests.tiny_models import write_tiny


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "FEW", 2)
    return tmp_path / "cache" / "prompts"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + {n} =", "answer": 2 * n}) + "\n" for n in range(20)))
    return path


class CountingTokenizer:
    """A tokenizer that counts how often a row is tokenized."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, *args, **kwargs):
        self.calls += "=" in args[0]
        return self.tokenizer(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def open_and_count(data, model, **settings):
    """(prompts of an epoch, how often the tokenizer was asked)"""
    tokenizer = CountingTokenizer(load_tokenizer(str(model)))
    stream = open_stream(DataConfig(dataset=str(data), **settings), tokenizer, seed=1, shuffle=False)
    return stream.take(20), tokenizer.calls


TABLE = TokenLists.from_rows([(1, 2, 3), (4,), (), (5, 6)])


def test_token_table_round_trips_through_a_file(tmp_path):
    write(tmp_path / "a.tokens", TABLE)
    found = read(tmp_path / "a.tokens")
    for table in (TABLE, found):
        assert [table[row] for row in range(4)] == [(1, 2, 3), (4,), (), (5, 6)] and table.lengths.tolist() == [3, 1, 0, 2]
    assert isinstance(found.tokens.base, (np.memmap, np.ndarray)) and not found.tokens.flags.writeable
    assert (tmp_path / "a.tokens").stat().st_mode & 0o077 == 0o044


def test_token_cache_second_open_tokenizes_nothing(cache, data, model):
    first, second, without = (
        open_and_count(data, model),
        open_and_count(data, model),
        open_and_count(data, model, load_from_cache_file=False),
    )
    assert (first[1], second[1], without[1]) == (20, 0, 20) and first[0] == second[0] == without[0]
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


def test_token_cache_is_not_written_for_few_rows(cache, data, model, monkeypatch):
    monkeypatch.setattr(prompts, "FEW", 20)
    assert open_and_count(data, model)[1] == 20 and not cache.exists()


def test_token_cache_key_changes_with_everything_that_changes_tokens(cache, data, model, tmp_path):
    def name(tokenizer, rows="rows", **settings):
        return compute_cache_key(rows, PromptEncoder(tokenizer, **settings))

    tokenizer = load_tokenizer(str(model))
    names = [name(tokenizer), name(tokenizer, rows="others"), name(tokenizer, system="Be brief."),
             name(tokenizer, options={"enable_thinking": True}), name(tokenizer, options={"enable_thinking": False}),
             name(tokenizer, keep_last=3)]  # fmt: skip
    tokenizer.chat_template = "{{ messages[0].content }}"
    names.append(name(tokenizer))
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["= "])
    names.append(name(tokenizer))
    other = write_tiny(tmp_path / "other", layers=1)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"made_up": 1}))
    names.append(name(load_tokenizer(str(other))))
    assert len(set(names)) == len(names)
    assert name(load_tokenizer(str(model))) == names[0]


def test_token_cache_key_includes_date_for_templates_that_print_it(model):
    def key(day):
        tokenizer = load_tokenizer(str(model))
        tokenizer.chat_template = "{{ strftime_now('%d') }}"
        find_clock(tokenizer).day = day
        return compute_cache_key("rows", PromptEncoder(tokenizer))

    assert key("2026-01-01") == key("2026-01-01") != key("2026-01-02")


@pytest.mark.parametrize("damage", ["short", "one bit", "empty", "no table", "a row too many"])
def test_token_cache_damaged_file_is_rebuilt(cache, data, model, damage):
    before, _ = open_and_count(data, model)
    [path] = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "one bit":
        content[-5] ^= 1
    if damage == "a row too many":
        content[56] += 1
    path.write_bytes({"short": content[:-4], "empty": b"", "no table": b"hello" * 100}.get(damage, bytes(content)))
    after, calls = open_and_count(data, model)
    assert calls == 20 and after == before and open_and_count(data, model)[1] == 0


def test_token_cache_ignores_files_of_other_users(cache, data, model, monkeypatch):
    open_and_count(data, model)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert open_and_count(data, model)[1] == (20 if os.geteuid() else 0)  # root's files are


def test_token_cache_without_write_access_still_tokenizes(data, model, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRON_GRPO_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(prompts, "FEW", 2)
    assert open_and_count(data, model)[1] == 20
    assert "every rank tokenizes the whole data set" in caplog.text and "Not a directory" in caplog.text


def test_token_cache_on_full_disk_leaves_no_partial_file(cache, data, model, monkeypatch, caplog):
    monkeypatch.setattr(os, "replace", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    found, calls = open_and_count(data, model)
    assert calls == 20 and len(found) == 20 and list(cache.iterdir()) == []
    assert "No space left on device" in caplog.text


def _open_and_note(number, notes, key):
    def make():
        with open(notes, "a") as stream:
            stream.write(f"{number}\n")
        time.sleep(0.5)
        return TABLE

    found = cached_table(key, make)
    assert found[0] == (1, 2, 3) and found[3] == (5, 6)
    os._exit(0)


def test_token_cache_is_built_by_one_process_and_survives_its_kill(cache, tmp_path):
    fork, notes = multiprocessing.get_context("fork"), tmp_path / "notes"
    notes.touch()
    processes = [fork.Process(target=_open_and_note, args=(number, notes, "key")) for number in range(4)]
    for process in processes:
        process.start()
    while not (begun := notes.read_text().split()):
        time.sleep(0.01)
    os.kill(processes[int(begun[0])].pid, signal.SIGKILL)
    for process in processes:
        process.join(60)
    assert sorted(process.exitcode for process in processes) == [-9, 0, 0, 0]
    assert len(notes.read_text().split()) == 2  # the killed one, and one more
    assert [path.name for path in cache.iterdir()] == ["key.tokens"]


def test_token_cache_wait_timeout_makes_rank_tokenize_itself(cache, monkeypatch):
    monkeypatch.setattr(tokens, "PATIENCE", 0.3)
    cache.mkdir(parents=True)
    with (cache / "key.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cached_table("key", lambda: TABLE) is TABLE
    assert not (cache / "key.tokens").exists()


def test_token_cache_removes_files_unused_for_long(cache):
    cached_table("old", lambda: TABLE)
    os.utime(cache / "old.tokens", (1, 1))
    cached_table("new", lambda: TABLE)
    assert [path.name for path in cache.iterdir()] == ["new.tokens"]


def test_token_cache_directory_follows_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_GRPO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "megatron-grpo" / "prompts"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "megatron-grpo" / "prompts"
