"""The prompt stream: order, epochs, resume, and checks of every row before anything loads."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.checks import check_lengths
from megatron_grpo.run.data.prompts import PromptStream, load_rows, permutation


def write_and_load_rows(tmp_path, rows, name="data.jsonl", **settings):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataConfig(dataset=str(path), **settings))


def encode(raw):
    return [ord(letter) for letter in raw]


@pytest.fixture
def ten(tmp_path):
    return write_and_load_rows(tmp_path, [{"prompt": chr(97 + n), "answer": n, "note": None} for n in range(10)])


def make_stream(rows, **options):
    return PromptStream(rows if rows.tokens else check_lengths(rows, encode, DataConfig()), **{"seed": 7, **options})


def test_every_epoch_is_a_permutation_without_replacement(ten):
    prompts = make_stream(ten).take(50)
    epochs = [[prompt.row for prompt in prompts[start : start + 10]] for start in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5  # each epoch has an order of its own


def test_the_next_epoch_fills_a_rollout_that_straddles_the_end(ten):
    source = make_stream(ten)
    rollouts = [source.take(4) for _ in range(5)]
    assert [prompt.number for rollout in rollouts for prompt in rollout] == list(range(20))
    assert Counter(prompt.row for rollout in rollouts for prompt in rollout) == Counter({row: 2 for row in range(10)})


def test_stream_returns_given_back_prompts_next_across_epochs(ten):
    source = make_stream(ten)
    source.take(6)
    first = source.take(8)
    source.give_back(5)
    assert source.state()["taken"] == 9
    assert [(prompt.number, prompt.row) for prompt in source.take(5)] == [(prompt.number, prompt.row) for prompt in first[3:]]


def test_stream_order_depends_only_on_seed_and_epoch(ten):
    whole = [prompt.row for prompt in make_stream(ten).take(30)]
    source = make_stream(ten)
    assert [prompt.row for size in (1, 6, 13, 10) for prompt in source.take(size)] == whole
    assert [prompt.row for prompt in make_stream(ten, seed=8).take(30)] != whole


def test_permutation_is_the_same_on_every_machine():
    # These very numbers: a resumed run may meet another version of numpy.
    assert permutation(8, 42, 0).tolist() == [7, 1, 6, 4, 3, 5, 0, 2]
    assert permutation(8, 42, 1).tolist() == [4, 5, 3, 0, 2, 7, 1, 6]
    assert sorted(permutation(1000, -3, 5).tolist()) == list(range(1000))


def test_permutation_first_element_is_uniform():
    firsts = Counter(int(permutation(5, seed, 0)[0]) for seed in range(2000))
    assert all(abs(firsts[row] - 400) < 80 for row in range(5))  # more than four standard deviations


def test_stream_without_shuffle_has_file_order(ten):
    assert [prompt.row for prompt in make_stream(ten, shuffle=False).take(12)] == [*range(10), 0, 1]


@pytest.mark.parametrize("stop", [0, 3, 10, 17])
def test_stream_after_restore_continues_identically(ten, stop):
    uninterrupted, first, second = make_stream(ten), make_stream(ten), make_stream(ten)
    expected = uninterrupted.take(25)[stop:]
    first.take(stop)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.take(25 - stop) == expected


def test_stream_state_size_is_bounded(ten):
    source = make_stream(ten)
    source.take(1000)
    assert len(json.dumps(source.state())) < 200


@pytest.mark.parametrize(
    ("change", "flag", "message"),
    [({"seed": 8}, "seed", "seed 7, but this run has 8"), ({"shuffle": False}, "dataset_shuffle", "True, but this run has False")],
)
def test_restoring_under_another_order_is_refused(ten, change, flag, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_stream(ten, **change).restore(make_stream(ten).state())
    assert error.value.problems[0].flags == (flag,)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_with_drop_last_omits_incomplete_rollout_and_resumes_anywhere(ten, shuffle):
    """Rollouts of 4 of 10 prompts: the first 8 of each permutation."""
    source = make_stream(ten, shuffle=shuffle)
    source.epoch_multiple = 4
    rows = [prompt.row for prompt in source.take(24)]
    orders = [permutation(10, 7, epoch).tolist() if shuffle else list(range(10)) for epoch in range(3)]
    assert rows == [row for order in orders for row in order[:8]] and source.find_row(8) == orders[1][0]
    source.give_back(11)  # 13 are taken: the last of them is in the second epoch
    again = make_stream(ten, shuffle=shuffle)
    again.epoch_multiple = 4
    again.restore(source.state())
    assert [prompt.row for prompt in again.take(11)] == rows[13:]


def test_restoring_with_other_ends_of_epochs_is_refused_and_with_the_same_ones_is_not(ten):
    whole, halves, fours = make_stream(ten), make_stream(ten), make_stream(ten)
    halves.epoch_multiple, fours.epoch_multiple = 5, 4
    whole.restore(halves.state())  # nothing is left out by either
    for one, other, said in (
        (whole, fours, "dataset_drop_last False, but this run has true \\(8 prompts per epoch\\)"),
        (fours, halves, "dataset_drop_last true \\(8 prompts per epoch\\), but this run has False"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            other.restore(one.state())
        assert error.value.problems[0].flags == ("dataset_drop_last",)


def test_restoring_on_another_data_set_is_refused(ten, tmp_path):
    fewer = write_and_load_rows(tmp_path, [{"prompt": "a"}] * 9, "fewer.jsonl")
    other = write_and_load_rows(tmp_path, [{"prompt": chr(65 + n)} for n in range(10)], "other.jsonl")
    with pytest.raises(ConfigError, match="10 rows, but this run has 9 rows"):
        make_stream(fewer).restore(make_stream(ten).state())
    with pytest.raises(ConfigError, match="but their content differs"):
        make_stream(other).restore(make_stream(ten).state())


def test_prompts_carry_tokens_and_every_other_column(ten):
    prompt = make_stream(ten, shuffle=False).take(1)[0]
    assert (prompt.raw, prompt.token_ids, dict(prompt.columns)) == ("a", (97,), {"answer": 0, "note": None})


def test_messages_prompt_omits_final_assistant_answer(tmp_path):
    question = [{"role": "user", "content": "1+1?"}]
    rows = write_and_load_rows(
        tmp_path, [{"messages": [*question, {"role": "assistant", "content": "2"}], "solution": "2"}, {"messages": question}]
    )
    assert [rows.raw(0), rows.raw(1)] == [question, question]
    assert rows.columns(0) == {"solution": "2"}


def test_rows_without_a_prompt_are_counted_and_named_by_line(tmp_path):
    rows = [{"prompt": "fine"}] + [{"question": "?"}] * 7 + [{"prompt": 3}, {"prompt": ""}, {"prompt": []}, {"prompt": [{"role": "user"}]}]
    with pytest.raises(ConfigError) as error:
        write_and_load_rows(tmp_path, rows)
    messages = [problem.message for problem in error.value.problems]
    assert messages[0] == (
        "7 of 12 rows have neither `prompt` nor `messages`; the first has columns 'question'. Use --columns question=prompt: data.jsonl "
        "line 2, data.jsonl line 3, data.jsonl line 4, data.jsonl line 5, data.jsonl line 6, ...."
    )
    assert [message.rpartition(": ")[2] for message in messages[1:]] == [f"data.jsonl line {line}." for line in (9, 10, 11, 12)]


def test_check_lengths_rejects_long_prompts_with_length_that_fits(tmp_path):
    rows = write_and_load_rows(tmp_path, [{"prompt": "a" * size} for size in (3, 9, 4, 7)])
    with pytest.raises(ConfigError) as error:
        check_lengths(rows, encode, DataConfig(max_prompt_length=4))
    problem = error.value.problems[0]
    assert "2 of 4 rows have a prompt longer than max_prompt_length (4) tokens; the longest has 9" in problem.message
    assert ": data.jsonl line 2, data.jsonl line 4. Use max_prompt_length 9, or" in problem.message
    assert problem.nearest["max_prompt_length"] == [9]
    assert check_lengths(rows, encode, DataConfig(max_prompt_length=9)).longest_prompt == 9


def test_check_lengths_with_truncation_delete_skips_long_prompts(tmp_path):
    rows = write_and_load_rows(tmp_path, [{"prompt": "a" * size} for size in (3, 9, 4, 7)])
    kept = check_lengths(rows, encode, DataConfig(max_prompt_length=4, truncation_strategy="delete"))
    assert (len(kept), kept.longest_prompt, kept.keep.tolist()) == (2, 4, [0, 2])
    assert sorted(prompt.row for prompt in make_stream(kept).take(2)) == [0, 2]  # rows keep the number they have in the file
    with pytest.raises(ConfigError, match="leaves no rows: all 4 prompts are longer than max_prompt_length \\(2\\); the shortest has 3"):
        check_lengths(rows, encode, DataConfig(max_prompt_length=2, truncation_strategy="delete"))


def test_a_prompt_of_no_tokens_is_refused(ten):
    with pytest.raises(ConfigError, match="10 of 10 rows have a prompt without tokens"):
        check_lengths(ten, lambda raw: [], DataConfig())


def test_kept_row_indices_are_an_array(ten):
    assert ten.keep.dtype == np.int64


IMAGE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": IMAGE}, "with a part of type image, which would not be passed to the model: training uses text only"),
        ({"messages": IMAGE}, "a message in `messages` with a part of type image"),
        ({"prompt": "What is this?", "images": ["cat.png"]}, "have values in `images`, which would not be passed to the model"),
        ({"prompt": "What is this?", "videos": ["cat.mp4"]}, "have values in `videos`"),
        ({"prompt": [{"role": "user", "content": None}]}, "whose `content` is of type NoneType"),
        ({"prompt": [{"role": "user", "content": 7}]}, "whose `content` is of type int; expected a string or a list of text parts"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "with a text part without `text`"),
        ({"prompt": [{"role": "user", "content": ["bare"]}]}, "with a part of type str"),
    ],
)
def test_rows_with_content_unsupported_by_text_models_are_rejected(tmp_path, row, fault):
    with pytest.raises(ConfigError, match="1 of 2 rows have ") as error:
        write_and_load_rows(tmp_path, [{"prompt": "fine"}, row])
    assert fault in str(error.value) and str(error.value).endswith("data.jsonl line 2.")


def test_rows_with_empty_images_or_tool_call_messages_are_accepted(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = [{"role": "user", "content": "f?"}, call, {"role": "tool", "content": "1"}]
    assert len(write_and_load_rows(tmp_path, [{"prompt": "a", "images": []}, {"prompt": "b", "images": None}, {"prompt": chat}])) == 3


def test_check_lengths_reports_prompts_rejected_by_chat_template(tmp_path):
    def encode(raw):
        if raw == "odd":
            raise ValueError("roles must alternate")
        return [1]

    with pytest.raises(
        ConfigError, match=r"2 of 3 rows raise an error in .*ValueError: roles must alternate\): data.jsonl line 1, .* line 3."
    ):
        check_lengths(write_and_load_rows(tmp_path, [{"prompt": "odd"}, {"prompt": "even"}, {"prompt": "odd"}]), encode, DataConfig())
