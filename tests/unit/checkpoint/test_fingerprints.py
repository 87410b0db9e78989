"""Fingerprints of model, vocabulary, data set and rewards: they change with the content and not with the name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from megatron_grpo.run.checkpoint.fingerprints import SAMPLE_BYTES, SAMPLES, compute_fingerprints, model_fingerprint
from megatron_grpo.run.config.settings import Config, DataConfig, RewardConfig
from megatron_grpo.run.data.prompts import load_rows

LARGE = SAMPLES * SAMPLE_BYTES * 3


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8, "torch_dtype": "float32"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(LARGE))
    return path


def flip_bit(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("change", [
    lambda path: flip_bit(path / "model.safetensors", 0),
    lambda path: flip_bit(path / "model.safetensors", LARGE - 1),
    lambda path: (path / "model.safetensors").write_bytes(bytes(LARGE + 1)),
    lambda path: (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 9})),
], ids=["first byte", "last byte", "size", "config"])  # fmt: skip
def test_another_model_under_the_same_name_has_another_fingerprint(model, change):
    before = model_fingerprint(model)
    change(model)
    assert model_fingerprint(model) != before


def test_a_copy_of_a_model_has_the_same_fingerprint(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    config = json.loads((model / "config.json").read_text()) | {"_name_or_path": "elsewhere", "transformers_version": "9"}
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "model-00001-of-00001.safetensors")
    assert model_fingerprint(tmp_path / "copy") == model_fingerprint(model)


def test_run_fingerprint_changes_with_vocabulary_template_and_reward_files(model, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def f(): ...\n")
    cfg = Config(rewards=RewardConfig(reward_funcs=[f"{reward}:f", "format", "json.decoder:JSONDecoder", "no.such.module:f"]))
    before = compute_fingerprints(cfg, model_path=model)
    assert before.keys() == {
        "model",
        "vocabulary",
        "chat template and special tokens",
        "reward reward.py:f",
        "reward json.decoder:JSONDecoder",
    }
    for path, name in (
        (model / "tokenizer.json", "vocabulary"),
        (model / "chat_template.jinja", "chat template and special tokens"),
        (reward, "reward reward.py:f"),
    ):
        path.write_text("other")
        after = compute_fingerprints(cfg, model_path=model)
        assert {name for name in before if before[name] != after[name]} == {name}
        before = after


ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(40)]


def fingerprint(tmp_path, rows):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataConfig(dataset=str(tmp_path / "data.jsonl"))).fingerprint()


@pytest.mark.parametrize("change", [
    lambda rows: rows[13].update(answer="another"),  # no prompt, and not one of 16 rows spread evenly
    lambda rows: rows[14].update(prompt="another"),
    lambda rows: rows[13].update(hint="more"),
    lambda rows: rows.reverse(),
    lambda rows: rows.pop(),
], ids=["column", "prompt", "new column", "order", "fewer"])  # fmt: skip
def test_dataset_fingerprint_covers_every_row_and_column(tmp_path, change):
    rows = [dict(row) for row in ROWS]
    before = fingerprint(tmp_path, rows)
    change(rows)
    assert fingerprint(tmp_path, rows) != before


def test_the_same_rows_have_the_same_fingerprint_in_another_file_format_and_process(tmp_path):
    before = fingerprint(tmp_path, ROWS)
    (tmp_path / "data.json").write_text(json.dumps([dict(reversed(row.items())) for row in ROWS], indent=2))
    code = "import sys; from megatron_grpo.run.data.prompts import *; from megatron_grpo.run.config.settings import DataConfig;"
    code += "print(load_rows(DataConfig(dataset=sys.argv[1])).fingerprint())"
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path / "data.json")], capture_output=True, text=True, env=dict(os.environ))
    assert told.stdout.strip() == before
