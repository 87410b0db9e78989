"""Streaming data sets: order, resume positions, and errors in rows that are read late."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError, RowsError, RunError
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data import streamed
from megatron_grpo.run.data.prompts import load_rows, open_stream
from megatron_grpo.run.data.streamed import REMEMBERED, StreamedPrompts, open_sets
from tests.unit.data.test_images import EYES, SmallTokenizer

ROWS = [{"prompt": chr(97 + n % 26) * (1 + n % 5), "answer": n} for n in range(23)]


class LetterTokenizer:
    """A tokenizer with one token per letter."""

    chat_template = None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def write(path: Path, rows=ROWS) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(dataset: str, block: int = 4, **settings) -> DataConfig:
    return DataConfig(**{"dataset": dataset, "streaming": True, "shuffle_buffer_size": block, "max_prompt_length": 5} | settings)


def open_streamed(dataset: str, block: int = 4, *, seed: int = 7, **settings) -> StreamedPrompts:
    stream = open_stream(make_config(dataset, block, **settings), LetterTokenizer(), seed=seed)
    assert isinstance(stream, StreamedPrompts)
    return stream


def list_answers(prompts) -> list[int]:
    return [prompt.columns["answer"] for prompt in prompts]


# ---- order


@pytest.mark.parametrize("shuffles", [True, False])
def test_streaming_with_one_block_equals_no_streaming(tmp_path, shuffles):
    path = write(tmp_path / "a.jsonl")
    whole = open_stream(DataConfig(dataset=path, dataset_shuffle=shuffles), LetterTokenizer(), seed=7)
    assert open_streamed(path, block=50, dataset_shuffle=shuffles).take(70) == whole.take(70)
    assert open_streamed(path, block=23, dataset_shuffle=shuffles).take(70) == open_stream(
        DataConfig(dataset=path, dataset_shuffle=shuffles), LetterTokenizer(), seed=7
    ).take(70), "also where the file ends with the block"


def test_streaming_permutes_each_block_and_each_epoch(tmp_path):
    found = open_streamed(write(tmp_path / "a.jsonl")).take(46)
    assert [prompt.number for prompt in found] == list(range(46)) and [prompt.row for prompt in found] == list_answers(found)
    first, second = list_answers(found)[:23], list_answers(found)[23:]
    for epoch in (first, second):
        blocks = [epoch[begin : begin + 4] for begin in range(0, 23, 4)]
        assert [sorted(block) for block in blocks] == [list(range(begin, min(begin + 4, 23))) for begin in range(0, 23, 4)]
        assert len({tuple(one - block[0] for one in block) for block in blocks[:5]}) > 1, "blocks do not share one order"
    assert first != second
    assert list_answers(open_streamed(write(tmp_path / "a.jsonl"), dataset_shuffle=False).take(46)) == [*range(23), *range(23)]


@pytest.fixture
def kinds(tmp_path):
    """The same rows in every form that is read."""
    import datasets

    (tmp_path / "several").mkdir()
    write(tmp_path / "several" / "train-0.jsonl", ROWS[:9])
    write(tmp_path / "several" / "train-1.parquet", ROWS[9:])
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    found = {name: write(tmp_path / f"a.{name}") for name in ("jsonl", "json", "parquet")}
    return {**found, "several": str(tmp_path / "several"), "saved": str(tmp_path / "saved")}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "several", "saved"])
def test_streaming_resumes_at_every_row_of_every_format(kinds, kind):
    source = open_sets(make_config(kinds[kind]), [kinds[kind]], "dataset")
    read = list(source(None))
    assert [one.row for one in read] == ROWS
    for place in range(len(read)):
        behind = json.loads(json.dumps(read[place].after))
        assert list(source(behind)) == read[place + 1 :]


def test_streaming_resumes_hub_dataset_at_every_row(kinds, monkeypatch):
    import datasets

    from megatron_grpo.run.data import hub

    def from_hub(dataset, split, flag, *, streaming):
        assert (dataset, split, flag, streaming) == ("owner/name", "train", "dataset", True)
        return datasets.load_dataset("parquet", data_files=kinds["parquet"], split="train", streaming=True)

    monkeypatch.setattr(hub, "from_hub", from_hub)
    source = open_sets(make_config("owner/name"), ["owner/name"], "dataset")
    read = list(source(None))
    assert [one.row for one in read] == ROWS and read[6].stands == "owner/name row 6"
    for place in (0, 4, 11, 22):
        behind = source(json.loads(json.dumps(read[place].after)))
        assert [one[1:] for one in behind] == [one[1:] for one in read[place + 1 :]]


def test_streaming_supports_dataset_sample_and_columns(tmp_path):
    path = write(tmp_path / "a.jsonl")
    found = open_streamed(f"{path}#30", dataset_shuffle=False, columns={"answer": "solution"}).take(40)
    assert [prompt.columns["solution"] for prompt in found] == [*range(23), *range(7), *range(10)]
    assert list_answers(open_streamed(f"{path}#6", dataset_shuffle=False).take(13)) == [*range(6), *range(6), 0]
    with pytest.raises(ConfigError, match="the first row of dataset has no solution"):
        open_streamed(path, columns={"solution": "x"})


def make_mixture(tmp_path: Path, **settings) -> DataConfig:
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", [{"prompt": "b", "answer": 100 + n} for n in range(7)])
    return make_config(a, further_datasets=[b], **settings)


@pytest.mark.parametrize("weights", [[], [3.0, 1.0], [1.0, 1.0]])
@pytest.mark.parametrize("ends", ["first_exhausted", "all_exhausted"])
def test_streaming_mixes_datasets_as_without_streaming(tmp_path, weights, ends):
    cfg = make_mixture(tmp_path, interleave_prob=weights, stopping_strategy=ends, dataset_shuffle=False)
    whole = open_stream(replace(cfg, streaming=False), LetterTokenizer(), seed=0)
    source = open_sets(cfg, [cfg.dataset, *cfg.further_datasets], "dataset")
    read = list(source(None))
    assert abs(len(read) - len(whole)) <= (1 if weights else 0)
    both = min(len(read), len(whole))
    assert [one.row["answer"] for one in read][:both] == list_answers(whole.take(both))
    for place in range(len(read)):
        assert list(source(json.loads(json.dumps(read[place].after)))) == read[place + 1 :]


# ---- going on


def test_streaming_resume_continues_with_remaining_prompts(tmp_path):
    path = write(tmp_path / "a.jsonl")
    whole = open_streamed(path).take(80)
    for taken in (0, 1, 3, 4, 5, 22, 23, 24, 46, 50):
        before = open_streamed(path)
        before.take(taken + 9)
        before.give_back(9)
        state = json.loads(json.dumps(before.state()))
        assert before.take(30) == whole[taken : taken + 30], "given back across blocks"
        after = open_streamed(path)
        after.restore(state)
        assert after.take(30) == whole[taken : taken + 30]
        assert [after.find_row(number) for number in range(80 if taken > 40 else 30)] == [one.row for one in whole][
            : 80 if taken > 40 else 30
        ]


def test_streaming_resume_does_not_reread_trained_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS * 40)
    before = open_streamed(path)
    whole = before.take(800)
    cfg, begun = make_config(path), []
    source = open_sets(cfg, [path], "dataset")
    after = StreamedPrompts(lambda at: begun.append(at) or source(at), open_streamed(path)._check, cfg=cfg, seed=7)
    before.give_back(10)
    after.restore(before.state())
    assert after.take(10) == whole[790:]
    assert begun == [None, [0, [0, [788, begun[1][1][1][1]]]]], "the first block, and the one with prompt 790"


def test_streaming_finds_rows_older_than_saved_marks(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": n} for n in range(60)])
    before = open_streamed(path, block=1)
    rows = [prompt.row for prompt in before.take(50)]
    state = before.state()
    assert len(state["marks"]) == REMEMBERED + 1
    after = open_streamed(path, block=1)
    after.restore(state)
    assert [after.find_row(number) for number in range(50)] == rows


def test_streaming_limits_marks_and_finds_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed, "MOST_MARKS", 10)
    stream = open_streamed(write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": n} for n in range(40)]), block=1)
    stream.take(30)
    assert len(stream._marks) == 12
    assert [stream.find_row(number) for number in range(30)] == [*range(30)]


def test_streaming_reads_and_buffers_no_more_than_needed(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS * 20)
    stream = open_streamed(path)
    for _ in range(60):
        stream.take(7)
        assert len(stream._held) <= 4, "those of seven prompts, and the one before"
    assert stream._marks[-1].end < stream.taken + 4


def test_streaming_resume_with_other_order_is_rejected(tmp_path):
    path = write(tmp_path / "a.jsonl")
    state = open_streamed(path).state()
    whole = open_stream(DataConfig(dataset=path), LetterTokenizer(), seed=7)
    for other, flag in ((open_streamed(path, seed=8), "seed"), (open_streamed(path, dataset_shuffle=False), "dataset_shuffle"),
                        (open_streamed(path, block=5), "shuffle_buffer_size"), (whole, "streaming")):  # fmt: skip
        assert [problem.flags for problem in other.problems_with(state)] == [(flag,)]
    assert [problem.flags for problem in open_streamed(path).problems_with(whole.state())] == [("streaming",)]


def test_streaming_resume_accepts_changes_after_current_block_only(tmp_path):
    path = write(tmp_path / "a.jsonl", [*ROWS[:10], {"no": "prompt"}])
    before = open_streamed(path)
    before.take(6)
    state = before.state()
    write(tmp_path / "a.jsonl")
    after = open_streamed(path)
    after.restore(state)
    assert sorted(list_answers(after.take(17))) == sorted({*range(23)} - set(list_answers(open_streamed(path).take(6))))
    write(tmp_path / "a.jsonl", [*ROWS[:5], {"prompt": "x", "answer": 5}, *ROWS[6:]])
    [problem] = open_streamed(path).problems_with(state)
    assert "Rows 4 to 7 of the data set have changed since this run read them" in problem.message
    with pytest.raises(ConfigError, match="Rows 4 to 7"):
        open_streamed(path).restore(state)


def test_streaming_rows_changed_during_run_raise(tmp_path):
    path = write(tmp_path / "a.jsonl")
    stream = open_streamed(path)
    for _ in range(5):
        stream.take(4)
    write(tmp_path / "a.jsonl", [{"prompt": "x", "answer": 5}] * 23)
    with pytest.raises(RunError, match="Rows 0 to 3 of the data set have changed since this run read them"):
        stream.find_row(0)


@pytest.mark.parametrize("settings", [{}, {"interleave_prob": [1.0, 1.0], "stopping_strategy": "all_exhausted"}])
def test_streaming_dataset_that_shrinks_raises_and_is_rejected_on_resume(tmp_path, settings):
    cfg = make_mixture(tmp_path, **settings) if settings else make_config(f"{write(tmp_path / 'b.jsonl', ROWS[:7])}#50")
    stream = open_stream(cfg, LetterTokenizer(), seed=7)
    stream.take(9)
    state = json.loads(json.dumps(stream.state()))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(RowsError, match="has fewer rows than when this run last read it.*Fix these rows"):
        stream.take(30)
    write(tmp_path / "b.jsonl", ROWS[:7])
    after = open_stream(cfg, LetterTokenizer(), seed=7)
    (tmp_path / "b.jsonl").write_text("")
    [problem] = after.problems_with(state)
    assert "has fewer rows than when this run last read it" in problem.message


def test_streaming_resume_with_missing_file_raises_config_error(tmp_path):
    path = write(tmp_path / "a.jsonl")
    before, after = open_streamed(path), open_streamed(path)
    before.take(10)
    Path(path).unlink()
    [problem] = after.problems_with(before.state())
    assert problem.flags == ("dataset",) and "can no longer be read: [Errno 2] No such file" in problem.message
    before._held.clear()
    with pytest.raises(RunError, match="No such file"):
        before.find_row(0)


# ---- what is wrong


def test_streaming_invalid_row_raises_with_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl")
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([*lines[:9], "", "{oops", "[1]", *lines[11:]]))
    stream = open_streamed(path)
    assert len(stream.take(8)) == 8
    with pytest.raises(RowsError) as error:
        stream.take(1)
    said = str(error.value)
    assert "dataset, rows 8 to 11, which streaming reads together: 2 line(s) are not JSON objects: a.jsonl line 11: Expecting" in said
    assert "a.jsonl line 12: expected an object with named columns, got list" in said and stream.taken == 8
    write(tmp_path / "b.jsonl", [*ROWS[:9], {"question": "?"}])
    with pytest.raises(RowsError, match=r"rows 8 to 9, .* 1 of 2 rows have neither `prompt` nor `messages`.*: b.jsonl line 10"):
        open_streamed(str(tmp_path / "b.jsonl")).take(9)
    with pytest.raises(RowsError, match=r"1 of 4 rows have a prompt longer than max_prompt_length \(4\) tokens.*: a.jsonl line 5"):
        open_streamed(write(tmp_path / "a.jsonl"), max_prompt_length=4, block=4).take(5)
    shows = write(tmp_path / "a.jsonl", [*ROWS[:5], {"prompt": "<image>x", "images": ["a.png"]}])
    with pytest.raises(RowsError, match="have values in `images`, which would not be passed to the model.*: a.jsonl line 6"):
        open_streamed(shows).take(5)
    chat = [{"role": "user", "content": "no"}]
    shows = write(tmp_path / "a.jsonl", [{"prompt": chat}] * 5 + [{"prompt": [chat[0] | {"content": "<image>x"}], "images": ["a.png"]}])
    with pytest.raises(RowsError, match="1 of 2 rows have images, but streaming supports text only.*: a.jsonl line 6"):
        open_stream(make_config(shows), SmallTokenizer(), seed=7, image_spec=EYES).take(5)
    with pytest.raises(ConfigError, match="1 of 6 rows have images, but streaming supports text only"):
        load_rows(make_config(shows, 9), image_spec=EYES, is_blind=False)


def test_streaming_errors_in_first_block_are_reported_before_the_run(tmp_path):
    path = write(tmp_path / "a.jsonl", [*ROWS[:2], {"prompt": ""}])
    with pytest.raises(ConfigError, match="rows 0 to 2, .* have an empty `prompt`: a.jsonl line 3"):
        open_streamed(path)
    with pytest.raises(ConfigError, match="rows 0 to 2, .* have an empty `prompt`: a.jsonl line 3"):
        load_rows(make_config(path))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    with pytest.raises(ConfigError, match="b.json is a JSON array, which cannot be streamed"):
        open_streamed(str(tmp_path / "b.json"))
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="c.jsonl' has no rows"):
        open_streamed(str(tmp_path / "c.jsonl"))


def test_streaming_read_error_on_one_rank_raises_on_all(tmp_path):
    stream = open_streamed(write(tmp_path / "a.jsonl"))
    asked = []
    stream.agree_by(lambda told: asked.append(told) or [told, ("", told[1]) if stream.taken < 8 else ("disk: gone.", 0)])
    stream.take(8)
    assert [fault for fault, _ in asked] == ["", ""], "one question a block that is read"
    with pytest.raises(RowsError, match="disk: gone. Fix these rows"):
        stream.take(1)
    stream = open_streamed(str(tmp_path / "a.jsonl"))
    with pytest.raises(RowsError, match="dataset: rows 0 to 3 differ between ranks"):
        stream.agree_by(lambda told: [told, ("", told[1] + 1)])
    stream = open_streamed(write(tmp_path / "a.jsonl"), block=4)
    stream._reader_ahead = None  # as after a resume
    Path(tmp_path / "a.jsonl").unlink()
    with pytest.raises(RowsError, match="No such file"):
        stream.take(5)


def test_rows_that_are_left_out_for_their_length_are_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl")  # lengths 1 2 3 4 5 1 2 ...
    stream = open_streamed(path, max_prompt_length=2, truncation_strategy="delete", block=5)
    with caplog.at_level(logging.WARNING):
        found = stream.take(12)
    short = [n for n in range(23) if n % 5 < 2]
    assert sorted(list_answers(found)[:10]) == short and [prompt.row for prompt in found] == list_answers(found)
    assert "3 of rows 0 to 4 are longer than max_prompt_length" in caplog.text and "3 so far" in caplog.text
    assert "3 of rows 5 to 9 are longer than max_prompt_length" in caplog.text and "6 so far" in caplog.text
    assert stream.state()["marks"][-1]["left_out"] == 16, "13 of the first epoch, 3 of the second one's first block"
    whole = open_stream(DataConfig(dataset=path, max_prompt_length=2, truncation_strategy="delete"), LetterTokenizer(), seed=7)
    assert open_streamed(path, max_prompt_length=2, truncation_strategy="delete", block=23).take(30) == whole.take(30)
    late = write(tmp_path / "b.jsonl", [{"prompt": "long", "answer": n} for n in range(9)] + [{"prompt": "a", "answer": 9}])
    assert list_answers(open_streamed(late, max_prompt_length=2, truncation_strategy="delete", block=3).take(3)) == [9, 9, 9]
    with pytest.raises(ConfigError, match="No row of the data set can be used: 9 are longer"):
        open_streamed(write(tmp_path / "b.jsonl", [{"prompt": "long"}] * 9), max_prompt_length=2, truncation_strategy="delete", block=3)


def test_streaming_truncates_prompts_as_without_streaming(tmp_path):
    cut = {"max_prompt_length": 2, "truncation_strategy": "left"}
    assert {len(prompt.token_ids) for prompt in open_streamed(write(tmp_path / "a.jsonl"), **cut).take(23)} == {1, 2}


def test_streaming_sample_rows_are_the_first_ones(tmp_path):
    path = write(tmp_path / "a.jsonl")
    rows = load_rows(make_config(path))
    assert len(rows) == 4 and rows.is_beginning and rows.described(4).startswith("first 4 rows, ")
    assert len(load_rows(make_config(path, streaming=False))) == 23
    stream = open_streamed(path)
    assert stream.rows.is_beginning and stream.longest_prompt == 5 and stream.rows.fingerprint() == rows.fingerprint()
    with pytest.raises(TypeError, match="the number of prompts of a streamed data set is unknown"):
        len(stream)
