"""Objects of a Python program, under the names that settings use for them."""

from __future__ import annotations

import functools

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run import python_objects
from megatron_grpo.run.checkpoint.fingerprints import compute_fingerprints
from megatron_grpo.run.config import resolve
from megatron_grpo.run.data.files import is_path, open_source, read_rows
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.validate import user_code


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(python_objects, "_objects", {})
    monkeypatch.setattr(python_objects, "_fingerprints", {})


def make_closure(right):
    def equal(completions, **columns):
        return [float(text == right) for text in completions]

    return equal


def resolve_settings(*words):
    return resolve(["--model", "m", *words])


def test_rewards_are_found_under_their_names():
    python_objects.provide({"equal": make_closure("b")})
    [reward] = load_rewards(resolve_settings("--reward_funcs", "python:equal"))
    assert reward.name == "equal" and reward.function(completions=["a", "b"]) == [0.0, 1.0]


def test_python_rows_are_read_whole_and_streamed():
    python_objects.provide({"rows": [{"prompt": "a"}, {"prompt": "b"}], "none": []})
    rows = read_rows("python:rows")
    assert [*rows] == [{"prompt": "a"}, {"prompt": "b"}] and rows.place(1) == "rows row 1"
    assert [one.row for one in open_source("python:rows", "train", "dataset")(1)] == [{"prompt": "b"}]
    with pytest.raises(ConfigError, match="has no rows"):
        read_rows("python:none")


@pytest.mark.parametrize(
    "read", [lambda: read_rows("python:gone"), lambda: load_rewards(resolve_settings("--reward_funcs", "python:gone"))]
)
def test_python_object_of_another_program_raises_config_error(read):
    with pytest.raises(ConfigError, match="python:gone is an object of a Python program. Start that program again, or name a file."):
        read()


def test_python_object_that_is_not_callable_is_rejected():
    python_objects.provide({"number": 3})
    with pytest.raises(ConfigError, match="python:number is the int 3, which cannot be called"):
        load_rewards(resolve_settings("--reward_funcs", "python:number"))


def test_python_object_names_are_paths_and_not_user_files():
    assert is_path("python:rows")
    assert all(map(is_path, ("data.csv", "data.TSV#5", "owner/rows.arrow", "part.jsonl.gz", "./x", "a/b/c")))
    assert not any(map(is_path, ("owner/set", "gsm8k", "owner/set-v1.5", "owner/set:main", "Qwen/Qwen3-0.6B", "owner/big.model#7")))
    assert user_code(resolve_settings("--reward_funcs", "python:equal", "a.py:b")) == [("reward", "reward_funcs", "a.py:b")]


def test_function_fingerprint_covers_code_and_closure_values():
    one = python_objects.compute_fingerprint(make_closure("a"))
    assert one == python_objects.compute_fingerprint(make_closure("a"))
    others = [
        make_closure("b"),
        make_closure,
        functools.partial(make_closure("a"), x=1),
        functools.partial(make_closure("a"), x=2),
        python_objects,
    ]
    assert len({one, *map(python_objects.compute_fingerprint, others)}) == 6


def test_function_fingerprint_without_source():
    def made(text):
        space = {}
        exec(f"def reward(completions): return [{text} for _ in completions]", space)
        return python_objects.compute_fingerprint(space["reward"])

    assert made("1.0") == made("1.0") != made("2.0")


def test_object_fingerprint_includes_attributes():
    class Reward:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, completions):
            return [self.weight for _ in completions]

    assert (
        python_objects.compute_fingerprint(Reward(1.0))
        == python_objects.compute_fingerprint(Reward(1.0))
        != python_objects.compute_fingerprint(Reward(2.0))
    )


def test_a_resumed_run_compares_the_fingerprint():
    cfg = resolve_settings("--reward_funcs", "python:equal")
    found = []
    for right in "aab":
        python_objects.provide({"equal": make_closure(right)})
        found.append(compute_fingerprints(cfg)["reward python:equal"])
    assert found[0] == found[1] != found[2]
