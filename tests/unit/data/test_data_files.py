"""Data set formats on disk, and errors for files that cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.data.files import read_rows

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(7)]


def write_jsonl(path, rows=ROWS):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_parquet(path, rows=ROWS):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_json(path, rows=ROWS):
    path.write_text(json.dumps(rows, indent=1))
    return str(path)


FORMATS = [("a.jsonl", write_jsonl), ("a.json", write_json), ("b.json", write_jsonl), ("a.parquet", write_parquet)]


@pytest.mark.parametrize(("name", "write"), FORMATS)
def test_read_rows_gives_equal_rows_for_every_format(tmp_path, name, write):
    dataset = write(tmp_path / name)
    assert list(read_rows(dataset)) == ROWS


def test_read_rows_of_directory_reads_files_by_name(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[3:])
    write_parquet(tmp_path / "a.parquet", ROWS[:3])
    rows = read_rows(str(tmp_path))
    assert list(rows) == ROWS
    assert (rows.place(2), rows.place(3)) == ("a.parquet row 2", "b.jsonl line 1")


def test_read_rows_of_directory_with_splits_reads_chosen_split(tmp_path):
    write_jsonl(tmp_path / "train-0.jsonl", ROWS[:4])
    write_jsonl(tmp_path / "test-0.jsonl", ROWS[4:])
    assert list(read_rows(str(tmp_path))) == ROWS[:4]
    assert list(read_rows(str(tmp_path), split="test")) == ROWS[4:]


def test_a_data_set_saved_by_the_datasets_library_can_be_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert list(read_rows(str(tmp_path / "saved"))) == ROWS


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    rows = read_rows(str(tmp_path / "a.jsonl"))
    assert len(rows) == 2
    assert rows.place(1) == "a.jsonl line 3"


def test_every_line_that_is_not_json_is_counted_and_the_first_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n[1]\n' + "nonsense\n" * 5)
    with pytest.raises(ConfigError) as error:
        read_rows(str(tmp_path / "a.jsonl"))
    assert "a.jsonl has 7 line(s) that are not JSON objects: line 2: Expecting value at column 12; line 3: expected" in str(error.value)
    assert str(error.value).endswith("...")
    assert error.value.problems[0].flags == ("dataset",)


def test_read_rows_truncated_json_array_is_rejected_with_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "a"},\n{"prompt": ')
    with pytest.raises(ConfigError, match="a.json line 2 column 12 is not JSON"):
        read_rows(str(tmp_path / "a.json"))


def test_read_rows_invalid_utf8_is_rejected_with_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match="a.jsonl has 1 line.*line 2"):
        read_rows(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [("", "eval_dataset is missing"), ("missing.jsonl", "does not exist. Data files in its directory: empty.jsonl, here.jsonl"),
     ("no/such/dir/a.jsonl", "and neither does its directory"),
     ("empty.jsonl", "has no rows"), ("a.csv", "'.csv'"), ("hollow", "is a directory without")],
)  # fmt: skip
def test_read_rows_unreadable_path_is_rejected_with_supported_formats(tmp_path, monkeypatch, dataset, message):
    write_jsonl(tmp_path / "here.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.csv").write_text("prompt\n")
    (tmp_path / "hollow").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_rows(dataset, flag="eval_dataset")


def test_a_truncated_parquet_file_is_a_config_error(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="a.parquet cannot be read as parquet"):
        read_rows(str(path))


def test_a_hub_name_that_cannot_be_reached_is_a_config_error(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a local path, and loading it from the Hub failed: "):  # the test environment is offline
        read_rows("someone/some-prompts")


def test_read_rows_imports_no_torch_and_no_transformers(tmp_path):
    dataset = write_jsonl(tmp_path / "a.jsonl")
    program = (
        "import sys\n"
        "from megatron_grpo.run.data.prompts import load_rows\n"
        "from megatron_grpo.run.rewards.loading import load_rewards\n"
        f"from megatron_grpo.run.config.settings import DataConfig\nassert len(load_rows(DataConfig(dataset={dataset!r}))) == 7\n"
        "heavy = [name for name in ('torch', 'transformers', 'datasets', 'pyarrow', 'sympy') if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
