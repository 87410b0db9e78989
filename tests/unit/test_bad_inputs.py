"""A part of tests/bad_inputs.py: inputs that once gave a traceback, a wrong run or two different answers, and a sample of the rest."""

from __future__ import annotations

import pytest

from tests import bad_inputs

CASES = {case.name: case for case in bad_inputs.make_all_cases()}
# Each was met badly once.
ONCE = [
    "yaml: itself", "yaml: itself, merged", "yaml: a bomb of 9 to the power of 9", "yaml: a bomb of merges", "yaml: 100,000 brackets",
    "yaml: 400 dashes", "yaml: a value without the form of its tag", "yaml: a day that no month has", "yaml: a known section in a section",
    "yaml: a key flat and in a section", "yaml: a key with a dash and a bar",
    "line optimizer.lr=two", "model without a value", "data: two files", "data: one image beside", "data: deep", "data: 150 levels",
    "data: data.jsonl#100", "model: a list for a config", "model: key heads that are a word", "model: key heads below zero",
    "model: a head size that is a word", "model: rope that is a word", "model: an epsilon that is a word",
    "model: positions that are a word",
    "model: a deep config.json", "model: an index that is deep", "model: a deep tokenizer",
    "model: a deep tokenizer_config", "adapter: a deep configuration",
    "model: architectures that is a word", "model: architectures of numbers", "model: an index with an empty map",
    "model: an index that names a number", "model: no tokenizer", "model: a tokenizer of another kind", "model: its weights",
    "world_size zero", "max_prompt_length out of range", "dialect misspelled",
    "model: a vision model", "trl: --loss_type vespo --delta 4",
    "adapter: a rank that is a word", "adapter: an alpha of none", "adapter: a tensor too few",
    "reward: KeyboardInterrupt", "reward: a BaseException", "reward: a positional column", "reward: no arguments", "reward: :f",
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return bad_inputs.write_good(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", [*ONCE, *list(CASES)[:: len(CASES) // 60]])
def test_bad_input_gives_equal_report_from_plan_and_train(good, tmp_path, name):
    faults, said = bad_inputs.find_problems(CASES[name], tmp_path / "case", good)
    assert not faults, f"{faults}\n{said}"


def test_valid_input_is_accepted_by_plan_and_train(good, tmp_path):
    """Without this, a corpus whose good flags were bad would pass whole."""
    words = [word for name, value in good.items() for word in (f"--{name}", value)]
    assert bad_inputs.run("plan", words, {}, tmp_path).code == 0
    assert bad_inputs.run("train", words, {}, tmp_path).code == bad_inputs.ACCEPTED


def test_repeated_flag_uses_last_value_with_note(good, tmp_path):
    """As a shell script that ends in "$@" needs it; in a file it is refused."""
    words = [word for name, value in good.items() for word in (f"--{name}", value)]
    told = bad_inputs.run("plan", [*words, "--lr", "1e-6", "--lr", "2e-6"], {}, tmp_path)
    assert told.code == 0 and "lr is set twice on the command line (1e-06, 2e-06): the last value is used." in " ".join(told.stdout.split())
