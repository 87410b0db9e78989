"""The model card beside an export: its content, and what it must not contain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from megatron_grpo import __version__
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table
from megatron_grpo.run.export import describe
from megatron_grpo.run.metrics.model_card import ModelCard, base_name, read_license, without_local_paths, write_card

KEY = "sk-" + "x" * 30


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "secret place" / "run"
    (folder / "hf").mkdir(parents=True)
    lines = [{"step": step, "num_tokens": 100 * step, "reward": step / 10, "completions/mean_length": 9.0} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_config(**values):
    return Config().with_values({"model": "Qwen/Qwen3-0.6B", "dataset": "openai/gsm8k:main", "reward_funcs": ["accuracy"]} | values)


def write_and_read_card(run, tmp_path, kind="model", step=None, **values):
    write_card(run / "hf", ModelCard(kind=kind, cfg=make_config(**values), source=tmp_path, run=run, step=step))
    text = (run / "hf" / "README.md").read_text()
    return yaml.safe_load(text.split("---")[1]), text


def test_model_card_describes_model_and_training(run, tmp_path):
    front, text = write_and_read_card(run, tmp_path, lr=3e-6, num_generations=4)
    assert front == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["openai/gsm8k"], "tags": ["grpo", "megatron-grpo"],
    }  # fmt: skip
    rows = (f"| megatron_grpo | {__version__} |", "| torch | ", "| optimizer steps | 3 |", "| tokens trained | 300 |")
    loading = 'AutoModelForCausalLM.from_pretrained("hf")'
    for part in ("lr: 3.0e-06", "num_generations: 4", *rows, "| reward, first and last | 0.1, 0.3 |", loading):
        assert part in text, part
    assert "micro_batch_size" not in text, "what is the default"


def test_model_card_curves_end_at_the_exported_step(run, tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    _, text = write_and_read_card(run, tmp_path, step=2)
    assert "![reward, KL and length" in text and "| optimizer steps | 2 |" in text and "0.1, 0.2 |" in text
    assert Image.open(run / "hf" / "training.png").width > 1000  # reward and length side by side; nobody measured a KL


def test_model_card_without_run_has_no_curves(tmp_path):
    write_card(tmp_path, ModelCard(cfg=make_config(), source=tmp_path))
    assert "![" not in (tmp_path / "README.md").read_text() and not (tmp_path / "training.png").exists()


def test_model_card_of_adapter_names_peft_and_base_model(run, tmp_path):
    front, text = write_and_read_card(run, tmp_path, kind="adapter", tuner_type="lora")
    assert (front["library_name"], front["tags"]) == ("peft", ["grpo", "megatron-grpo", "lora"])
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), "hf")' in text


def test_model_card_license_is_that_of_the_base_model(run, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen\n")
    assert write_and_read_card(run, tmp_path)[0]["license"] == "apache-2.0"
    for text in ("# no front matter", "---\nlicense: [a, b]\n---\n", "---\n- a\n---\n", "---\n: : :\n---", "---", ""):
        (tmp_path / "README.md").write_text(text)
        assert read_license(tmp_path) is None


def test_model_card_contains_no_local_path_and_no_secret(run, tmp_path):
    """Every setting that can hold a text holds one that must not be told."""
    place = str(run / "there")
    texts = {setting.name: place for setting in table().values() if setting.kind == "str" and not setting.choices}
    lists = {setting.name: [place] for setting in table().values() if setting.kind == "str" and setting.is_list and not setting.choices}
    values = texts | lists | {"llm_judge_url": f"https://user:{KEY}@judge/v1", "llm_judge_model": KEY, "llm_judge_api_key_env": "MY_KEY",
                              "reward_funcs": [f"{place}/mine.py:right"], "vllm_server_base_url": ["http://node17:8000"]}  # fmt: skip
    _, text = write_and_read_card(run, tmp_path, **values)
    for secret in (KEY, "secret place", str(tmp_path), "node17", "MY_KEY", os.path.expanduser("~") + "/"):
        assert secret not in text, secret
    assert "mine.py:right" in text


@pytest.mark.parametrize(
    ("value", "told"),
    [("/home/me/data.jsonl", "data.jsonl"), ("./a/b.parquet", "b.parquet"), ("owner/name", "owner/name"), ("a/b/c.py:f", "c.py:f"),
     ("https://a/b", "https://a/b"), (["~/x/y"], ["y"]), ({"a": "/b/c"}, {"a": "c"}), ("accuracy", "accuracy"), (3, 3), (None, None)],
)  # fmt: skip
def test_model_card_shows_last_part_of_local_paths(value, told):
    assert without_local_paths(value) == told


def test_model_card_base_from_hub_cache_has_hub_name():
    cached = Path("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/abc")
    assert base_name(str(cached), cached) == "Qwen/Qwen3-0.6B"
    assert base_name("/models/mine/", Path("/models/mine")) == "mine"


def test_model_card_that_cannot_be_written_gives_a_warning(run, tmp_path, caplog):
    describe(run / "nowhere", ModelCard(cfg=make_config(), source=tmp_path))
    assert "the model card in" in caplog.text and "the run continues without it" in caplog.text
