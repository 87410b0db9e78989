"""Several data sets, samples of one, renamed columns and held-out rows, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.evaluation import SPLIT, eval_sampling, find_set_flag, list_sets
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config, DataConfig
from megatron_grpo.run.data.files import read_rows
from megatron_grpo.run.data.prompts import load_rows
from tests.checked import check


@pytest.fixture
def sets(tmp_path):
    for name, count in (("a", 10), ("b", 4), ("c", 3)):
        rows = [{"prompt": f"{name}{i}", "answer": i} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda *names: [str(tmp_path / name) for name in names]


def load_prompts(names, *, flag="dataset", seed=1, **settings) -> list[str]:
    cfg = DataConfig(dataset=names[0], further_datasets=names[1:], **settings)
    rows = load_rows(cfg, flag=flag, seed=seed)
    return [rows.raw(index) for index in range(len(rows))]


def test_several_datasets_are_concatenated_with_row_names_of_their_files(sets):
    names = sets("b.jsonl", "c.jsonl")
    assert load_prompts(names) == ["b0", "b1", "b2", "b3", "c0", "c1", "c2"]
    rows = load_rows(DataConfig(dataset=names[0], further_datasets=names[1:]))
    assert rows.rows.place(5) == read_rows(names[1]).place(1) == "c.jsonl line 2"


def test_dataset_sample_suffix_draws_rows_without_replacement(sets):
    whole = load_prompts(sets("a.jsonl"))
    drawn = load_prompts(sets("a.jsonl#4"))
    assert len(set(drawn)) == 4 and set(drawn) < set(whole) and drawn == load_prompts(sets("a.jsonl#4"))
    assert len({tuple(load_prompts(sets("a.jsonl#4"), seed=seed)) for seed in range(5)}) > 1
    assert load_prompts(sets("a.jsonl#4"), dataset_shuffle=False) == whole[:4]
    more = load_prompts(sets("a.jsonl#23"))
    assert len(more) == 23 and sorted({more.count(one) for one in whole}) == [2, 3]
    with pytest.raises(ConfigError, match="requests 0 of 10 rows"):
        load_prompts(sets("a.jsonl#0"))


def test_dataset_file_name_ending_like_sample_suffix_is_read_as_file(sets, tmp_path):
    (tmp_path / "d#2").mkdir()
    (tmp_path / "d#2" / "rows.jsonl").write_text('{"prompt": "d"}\n' * 3)
    assert load_prompts(sets("d#2")) == ["d"] * 3


def test_interleave_prob_holds_in_every_prefix_of_the_mixture(sets):
    mixed = load_prompts(sets("a.jsonl", "b.jsonl"), interleave_prob=[3.0, 1.0])
    assert len(mixed) == 13, "a has 10 rows, and is used up when b has given 10 / 3 of its 4"
    for place in range(1, len(mixed) + 1):
        assert abs(sum(one.startswith("a") for one in mixed[:place]) - 0.75 * place) <= 1
    assert [one for one in mixed if one.startswith("a")] == [f"a{i}" for i in range(10)]
    every = load_prompts(sets("a.jsonl", "b.jsonl"), interleave_prob=[0.75, 0.25], stopping_strategy="all_exhausted")
    assert len(every) == 16 and [one for one in every if one.startswith("b")] == ["b0", "b1", "b2", "b3"]
    assert [every.count(f"a{i}") for i in range(10)] == [2, 2] + [1] * 8


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("weights", [[0.0, 1.0], [1.0], [1.0, 1.0, 1.0]])
def test_interleave_prob_of_wrong_length_does_not_fail_in_load_rows(sets, weights, streaming):
    rows = load_prompts(sets("b.jsonl", "c.jsonl"), interleave_prob=weights, streaming=streaming)
    assert rows == ["b0", "b1", "b2", "b3", "c0", "c1", "c2"]


def test_columns_setting_renames_columns_and_rejects_unknown_names(sets):
    rows = load_rows(DataConfig(dataset=sets("b.jsonl")[0], columns={"answer": "solution"}))
    assert rows.columns(1) == {"solution": 1}
    with pytest.raises(ConfigError, match="columns: the first row of dataset has no anser; it has prompt, answer"):
        load_prompts(sets("b.jsonl"), columns={"anser": "solution"})
    with pytest.raises(ConfigError, match="already has a column prompt"):
        load_prompts(sets("b.jsonl"), columns={"answer": "prompt"})


def test_split_dataset_ratio_rows_are_excluded_from_training(sets):
    names = sets("a.jsonl", "b.jsonl")
    trained, held = load_prompts(names, split_dataset_ratio=0.2), load_prompts(names, split_dataset_ratio=0.2, flag=SPLIT)
    assert len(held) == 3 and sorted(trained + held) == sorted(load_prompts(names)) and load_prompts(names, flag="eval_dataset")[0] == "a0"
    cfg = Config().with_values({"dataset": names[0], "split_dataset_ratio": 0.2})
    assert list_sets(cfg) == {"eval": names[0]} and find_set_flag("eval", cfg) == SPLIT and eval_sampling(cfg).n == 1
    with pytest.raises(ConfigError, match="would hold out 4 of 4 rows"):
        load_prompts(sets("b.jsonl"), split_dataset_ratio=0.95)


def test_dataset_flag_with_several_values_sets_further_datasets(sets):
    cfg = check(["--dataset", "a.jsonl", "b.jsonl#3", "--interleave_prob", "0.5", "0.5"]).config
    assert (cfg.data.dataset, cfg.data.further_datasets) == ("a.jsonl", ["b.jsonl#3"])
    file = Path(sets("run.yaml")[0])
    file.write_text("dataset: [a.jsonl, b.jsonl]\n")
    assert check(["--config", str(file)]).config.data.further_datasets == ["b.jsonl"]
    other = check(["--config", str(file), "--dataset", "c.jsonl"]).config.data
    assert (other.dataset, other.further_datasets) == ("c.jsonl", []), "what a file names is not behind what is typed"
    assert check(["--dialect", "swift", "--dataset", "a.jsonl", "b.jsonl#3"]).config.data.further_datasets == ["b.jsonl#3"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"interleave_prob": [0.5, 0.5]}, "has 2 weights for 1 data sets"),
        ({"interleave_prob": [1.0], "dataset": "a"}, "and dataset has one. Omit it"),
        ({"stopping_strategy": "all_exhausted"}, "requires interleave_prob, which is not set"),
        ({"columns": {"a": "prompt", "b": "prompt"}}, "cannot have the same new name"),
        ({"split_dataset_ratio": 0.1, "eval_dataset": "y"}, "both define the held-out set"),
    ],
)
def test_mixing_incompatible_settings_give_one_problem(values, sentence):
    [problem] = validate(Config().with_values({"dataset": "x", **values}))
    assert sentence in problem.message
