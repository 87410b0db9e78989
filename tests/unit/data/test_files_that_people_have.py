"""Data sets in layouts that other tools write: read as intended, or rejected with a command that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.evaluation import SPLIT, choose_data_config
from megatron_grpo.run.config.settings import Config, DataConfig
from megatron_grpo.run.data.checks import check_for_episodes, find_notes, find_shared
from megatron_grpo.run.data.prompts import load_rows, open_stream

CHAT = [{"role": "user", "content": "5"}]
ROWS = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3)]


def write(path, content) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def format_lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load_dataset_rows(name: str, **settings):
    return load_rows(DataConfig(dataset=name, **settings))


def load_held_out(name: str, **settings):
    cfg = Config().with_values({"dataset": name, "eval_dataset": name, **settings})
    rows = load_rows(choose_data_config(cfg, "eval_dataset"), dataset=name, flag="eval_dataset")
    return [rows.raw(index) for index in range(len(rows))]


# ---- one file


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "5", "name": None, "tool_calls": None}]},
        {"prompt": json.dumps(CHAT)},
        {"messages": json.dumps([*CHAT, {"role": "assistant", "content": "6"}])},
        {"messages": [{"role": "human", "content": "5"}, {"role": "gpt", "content": "6"}]},
        {"messages": [{"role": "Human", "content": "5"}]},
        {"conversations": [{"from": "human", "value": "5"}, {"from": "gpt", "value": "6"}]},
        {"conversations": json.dumps([{"from": "human", "value": "5", "weight": None}])},
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_load_rows_converts_other_chat_forms(tmp_path, row, streaming):
    cfg = DataConfig(dataset=write(tmp_path / "a.jsonl", format_lines(row)), streaming=streaming, max_prompt_length=9)
    assert load_rows(cfg).raw(0) == CHAT


def test_keys_that_parquet_fills_with_null_are_left_out_at_every_depth_but_not_the_content_of_a_tool_call(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}, "id": None}]}
    rows = load_dataset_rows(write(tmp_path / "a.jsonl", format_lines({"prompt": [*CHAT, call, {"role": "tool", "content": "1"}]})))
    assert rows.raw(0)[1] == {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '{"a": 1}', '[{"a": 1}] is a list', "[broken"])
def test_load_rows_keeps_json_text_that_is_not_a_chat(tmp_path, text):
    assert load_dataset_rows(write(tmp_path / "a.jsonl", format_lines({"prompt": text}))).raw(0) == text


@pytest.mark.parametrize("columns", [{"answer": "reward_model.ground_truth"}, {"reward_model.ground_truth": "answer"}])
def test_columns_setting_selects_nested_value(tmp_path, columns):
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "3"}}, {"prompt": "b", "reward_model": None}]
    name = write(tmp_path / "a.jsonl", format_lines(*rows))
    assert load_dataset_rows(name, columns=columns).columns(0) == {"answer": "3", "reward_model": {"ground_truth": "3"}}
    assert load_dataset_rows(name, columns=columns).columns(1)["answer"] is None
    with pytest.raises(ConfigError, match=r"columns: the first row of dataset has no reward_model.gt; it has prompt, reward_model"):
        load_dataset_rows(name, columns={"answer": "reward_model.gt"})
    with pytest.raises(ConfigError, match="already has a column prompt"):
        load_dataset_rows(name, columns={"prompt": "reward_model.ground_truth"})
    literal = write(tmp_path / "b.jsonl", format_lines({"prompt": "a", "reward_model.ground_truth": "4"}))
    assert load_dataset_rows(literal, columns=columns).columns(0) == {"answer": "4"}


@pytest.mark.parametrize("indent", [None, 1])
def test_load_rows_reads_json_array_with_any_suffix(tmp_path, indent):
    rows = load_dataset_rows(write(tmp_path / "a.jsonl", json.dumps(ROWS, indent=indent)))
    assert [rows.raw(index) for index in range(3)] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", format_lines(*ROWS).encode("utf-16"), "a.jsonl is UTF-16. Use iconv -f UTF-16 -t UTF-8 a.jsonl > utf8-a.jsonl."),
        ("a.json", json.dumps(ROWS[0]).encode("utf-16-le"), "is UTF-16. Use iconv"),
        (
            "a.json",
            "".join(json.dumps(row, indent=1) + "\n" for row in ROWS),
            "has an object over several lines .prompt, answer., not one per line. Use jq -c . a.json",
        ),
        ("a.json", json.dumps({"data": ROWS}, indent=1), r"has one object, whose data is a list of rows. Use jq -c '.data\[\]' a.json"),
        ("a.json", json.dumps({"data": ROWS}), r"If `data` is the list of rows: jq -c '.data\[\]'"),
        ("a.json", json.dumps({"prompt": CHAT}, indent=1), "has an object over several lines .prompt."),
        ("a.jsonl", "\n".join(map(str, ROWS)), "has rows in the notation of Python"),
        (
            "a.jsonl",
            format_lines(CHAT, CHAT),
            "has a list on each line, not an object. Use jq -c '{messages: .}' a.jsonl|is a JSON array, which cannot be streamed",
        ),
        ("a.jsonl", b"\x1f\x8b\x08\x00", "is compressed. Use gunzip"),
        ("a.json", b"PAR1....", "is Parquet"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS, not the data. Use git lfs pull"),
        ("a.jsonl", "<!DOCTYPE html>", "is HTML"),
        (
            "a.jsonl",
            format_lines({"question": "5", "answer": 6}),
            "the first has columns 'question', 'answer'. Use --columns question=prompt: ",
        ),
        ("a.jsonl", format_lines({"data": {"prompt": "5"}}), "Use --columns data.prompt=prompt"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_load_rows_of_unsupported_layout_gives_one_problem_with_remedy(tmp_path, name, content, sentence, streaming):
    cfg = DataConfig(dataset=write(tmp_path / name, content), streaming=streaming, max_prompt_length=9)
    with pytest.raises(ConfigError, match=sentence) as error:
        load_rows(cfg)
    assert len(error.value.problems) == 1 and "line(s) that are not" not in str(error.value)


def test_nan_is_read_as_null_and_counted_in_a_note(tmp_path):
    cfg = DataConfig(dataset=write(tmp_path / "a.jsonl", '{"prompt": "a", "answer": NaN}\n{"prompt": "b", "answer": 1.5}\n'))
    rows = load_rows(cfg)
    assert [rows.columns(index)["answer"] for index in range(2)] == [None, 1.5]
    assert list(find_notes(rows, cfg, "dataset")) == ["dataset: NaN in `answer` is read as null (1 of 2 rows)."]
    assert rows.uses()["answer"] == "1 of 2 rows: passed to the reward functions"


# ---- splits and configurations


def write_folder(path, **files) -> str:
    for name, prompt in files.items():
        write(path / name.replace("__", "/").replace("_jsonl", ".jsonl"), format_lines({"prompt": prompt}))
    return str(path)


def test_eval_dataset_is_read_from_its_own_split(tmp_path):
    both = write_folder(tmp_path / "both", train_jsonl="a", test_jsonl="b")
    assert load_dataset_rows(both).raw(0) == "a" and load_held_out(both) == ["b"] and load_held_out(both, dataset_split="train") == ["b"]
    assert load_held_out(both, eval_dataset_split="train") == ["a"]
    assert load_held_out(write_folder(tmp_path / "plain", x_jsonl="p")) == ["p"], "the only split there is"
    dev = write_folder(tmp_path / "dev", train_jsonl="a", dev_jsonl="d")
    with pytest.raises(ConfigError, match="has no split test; it has train, validation. Use eval_dataset_split validation"):
        load_held_out(dev)
    assert load_held_out(dev, eval_dataset_split="validation") == load_held_out(dev, eval_dataset_split="val") == ["d"]
    with pytest.raises(ConfigError, match="has no split train; it has test. Use dataset_split test"):
        load_dataset_rows(write_folder(tmp_path / "tests", test_jsonl="b"))
    with pytest.raises(ConfigError, match="dataset_split .test. has no effect: .*x.jsonl has no splits. Omit it"):
        load_dataset_rows(str(tmp_path / "plain" / "x.jsonl"), dataset_split="test")


def test_dataset_split_is_matched_as_a_word_in_file_names(tmp_path):
    named = write_folder(tmp_path / "a", gsm_train_jsonl="a", gsm_test_jsonl="b", data__Validation__0_jsonl="v", trainer_state_jsonl="t")
    write(tmp_path / "a" / "dataset_info.json", '{\n "features": 1}')
    write(tmp_path / "a" / ".cache" / "x.json", "5")
    assert [load_dataset_rows(named, dataset_split=split).raw(0) for split in ("train", "test", "validation")] == ["a", "b", "v"]
    rest = write_folder(tmp_path / "b", math_jsonl="a", math_test_jsonl="b")
    assert len(load_dataset_rows(rest)) == 1 and load_dataset_rows(rest).raw(0) == "a" and load_held_out(rest) == ["b"]


def test_configurations_of_a_folder_are_not_mixed(tmp_path):
    files = {f"{name}__{split}_jsonl": name + split for name in ("main", "socratic") for split in ("train", "test")}
    two = write_folder(tmp_path / "two", **files)
    for read in (load_dataset_rows, load_held_out):
        with pytest.raises(ConfigError, match=r"has several configurations \(main, socratic\), whose rows would be mixed. Use .*socratic"):
            read(two)
    assert load_dataset_rows(f"{two}/main").raw(0) == "maintrain" and load_held_out(f"{two}/socratic") == ["socratictest"]
    assert len(load_dataset_rows(write_folder(tmp_path / "parts", train__a__0_jsonl="a", train__b__0_jsonl="b"))) == 2, (
        "directories below a split"
    )
    assert len(load_dataset_rows(write_folder(tmp_path / "shards", a__0_jsonl="a", b__0_jsonl="b"))) == 2


def test_a_dictionary_of_splits_saved_by_datasets_is_read_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "dict"))
    assert load_dataset_rows(str(tmp_path / "dict")).raw(0) == "train" and load_held_out(str(tmp_path / "dict")) == ["test"]
    with pytest.raises(ConfigError, match="has no split dev; it has train, test. Use dataset_split train"):
        load_dataset_rows(str(tmp_path / "dict"), dataset_split="dev")


def test_saved_dataset_with_missing_or_damaged_files_is_rejected(tmp_path):
    pytest.importorskip("datasets")
    without_folder = write(tmp_path / "a" / "dataset_dict.json", '{"splits": ["train"]}')
    damaged = write(tmp_path / "b" / "dataset_dict.json", "nonsense")
    without_rows = write(tmp_path / "c" / "state.json", '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write(tmp_path / "c" / "dataset_info.json", "{}")
    for file in (without_folder, damaged, without_rows):
        with pytest.raises(ConfigError, match="cannot be read as saved by `save_to_disk`: .*Save it again"):
            load_dataset_rows(str(Path(file).parent))


def test_eval_dataset_settings_default_to_those_of_training():
    cfg = Config().with_values({"eval_dataset": "x", "columns": {"q": "prompt"}, "truncation_strategy": "delete", "dataset_split": "a"})
    assert (
        choose_data_config(cfg, "eval_dataset").columns == {"q": "prompt"}
        and choose_data_config(cfg, "eval_dataset").truncation_strategy == "delete"
    )
    own = cfg.with_values({"eval_columns": {"problem": "prompt"}, "eval_truncation_strategy": "raise"})
    data = choose_data_config(own, "eval_dataset")
    assert (data.columns, data.truncation_strategy, data.dataset_split) == ({"problem": "prompt"}, "raise", "")
    part = choose_data_config(own, SPLIT)
    assert (part.columns, part.truncation_strategy, part.dataset_split) == ({"q": "prompt"}, "raise", "a"), "rows of the training set"


def test_find_shared_counts_held_out_prompts_in_training_set(tmp_path):
    trained = load_dataset_rows(write(tmp_path / "a.jsonl", format_lines(*ROWS)))
    held = load_dataset_rows(
        write(tmp_path / "b.jsonl", format_lines(ROWS[1], {"prompt": "new"}, {"prompt": ROWS[1]["prompt"], "answer": 0}))
    )
    [note] = find_shared(trained, held, "eval_dataset")
    assert note.startswith("eval_dataset: 2 of 3 held-out prompts are in the training set too.")
    assert not list(find_shared(trained, load_dataset_rows(write(tmp_path / "c.jsonl", format_lines({"prompt": "new"}))), "eval_dataset"))
    twice = DataConfig(dataset=write(tmp_path / "d.jsonl", format_lines(*ROWS[:2] * 10)), split_dataset_ratio=0.5)
    assert list(find_shared(load_rows(twice), load_rows(twice, flag=SPLIT), SPLIT)), "duplicates on both sides of the split"


def test_the_hubs_data_sets_are_read_by_the_same_rule(tmp_path):
    pytest.importorskip("datasets")
    from megatron_grpo.run.data.hub import from_hub

    both = write_folder(tmp_path / "both", train_jsonl="a", test_jsonl="b")
    assert list(from_hub(both, "", "eval_dataset")) == [{"prompt": "b"}] and list(from_hub(both, "train", "dataset")) == [{"prompt": "a"}]
    assert list(from_hub(write_folder(tmp_path / "one", train_jsonl="a"), "", "eval_dataset")) == [{"prompt": "a"}], "the only split"


# ---- columns and settings of prompts


class TemplateTokenizer:
    """A tokenizer whose tokens are the bytes of the rendered template."""

    chat_template = "{{ tools }} {{ enable_thinking }}"

    def __call__(self, text):
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages, *, tools, tokenize, return_dict, add_generation_prompt, continue_final_message, **options):
        return {"input_ids": list(json.dumps([messages, tools, options]).encode())}


def render_prompts(tmp_path, *rows, **settings):
    stream = open_stream(
        DataConfig(dataset=write(tmp_path / "a.jsonl", format_lines(*rows)), **settings), TemplateTokenizer(), seed=0, shuffle=False
    )
    return [json.loads(bytes(prompt.token_ids)) for prompt in stream.take(len(rows))], stream


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [{**TOOLS[0], "strict": None}]])
def test_row_tools_system_and_template_kwargs_apply_to_that_row_only(tmp_path, tools):
    own = {"prompt": CHAT, "tools": tools, "system": "Add.", "chat_template_kwargs": {"enable_thinking": False}}
    (first, second), stream = render_prompts(tmp_path, own, {"prompt": CHAT, "tools": None}, enable_thinking=True, system="Think.")
    assert first == [[{"role": "system", "content": "Add."}, *CHAT], TOOLS, {"enable_thinking": False}]
    assert second == [[{"role": "system", "content": "Think."}, *CHAT], None, {"enable_thinking": True}]
    assert stream.rows.raw(0)[0] == {"role": "system", "content": "Add."}, "rewards see the prompt that the model sees"


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ({"chat_template_kwargs": {"color": 1}}, "have `color`, of which the model's chat template has no variable: a.jsonl line 2"),
        ({"tools": "add"}, "have a `tools` of type str; for chats expected a list of JSON schemas. Rename it"),
        ({"prompt": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "have a `system` that is not the system message of their"),
        ({"system": 5}, "have a `system` of type int; for chats expected a string"),
    ],
)
def test_row_column_unsupported_by_chat_template_is_rejected(tmp_path, column, sentence):
    with pytest.raises(ConfigError, match=f"1 of 2 rows {sentence}"):
        render_prompts(tmp_path, {"prompt": CHAT}, {"prompt": CHAT, **column})


def test_check_for_episodes_rejects_row_tools_and_accepts_row_system(tmp_path):
    rows = load_dataset_rows(write(tmp_path / "a.jsonl", format_lines({"prompt": CHAT, "system": "s"}, {"prompt": CHAT, "tools": TOOLS})))
    with pytest.raises(ConfigError, match="1 of 2 rows have `tools` or `chat_template_kwargs`, but episodes are .*: a.jsonl line 2"):
        check_for_episodes(rows, "dataset")


def test_find_notes_lists_columns_without_effect_on_the_prompt(tmp_path):
    beside = {"prompt": "5", "messages": CHAT, "tools": TOOLS, "history": [["a", "b"]], "answer": 1}
    cfg = DataConfig(dataset=write(tmp_path / "a.jsonl", format_lines(beside, {"prompt": "6"})), system="s", enable_thinking=False)
    rows = load_rows(cfg)
    assert list(find_notes(rows, cfg, "dataset")) == [
        "dataset: `messages` is not used in 1 of 2 rows, which have a `prompt`.",
        "dataset: `tools` does not change the prompt: 2 of 2 prompts are strings, and the chat template renders chats alone.",
        "dataset: `history` does not change the prompt: earlier turns belong into `messages`.",
        "system has no effect on dataset: all prompts are strings, or begin with a system message.",
        "enable_thinking has no effect on dataset: all prompts are strings, which the chat template does not render.",
    ]
    assert list(rows.uses()) == ["prompt", "messages", "tools", "history", "answer"]
    assert not list(find_notes(load_dataset_rows(write(tmp_path / "b.jsonl", format_lines({"prompt": CHAT}))), cfg, "dataset"))
