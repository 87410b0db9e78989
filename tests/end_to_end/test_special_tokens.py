"""A complete run with vLLM of a base model whose template ends turns with a token that is not end of text, and whose tags are special."""

from __future__ import annotations

import json

import pyarrow.parquet
import pytest
import yaml

from tests.chat_models import chat_tokenizer, write_chat
from tests.end_to_end.runs import train
from tests.ranks import run_ranks
from tools.make_tiny_chat_model import END, PAD

END_ID, TAG, TAG_ID = 2, "</think>", 259
REWARD = """
def tagged(completions, completion_ids, **columns):
    assert all(("</think>" in c[0]["content"]) == (259 in ids) for c, ids in zip(completions, completion_ids)), "rewards read the tag"
    return [len(ids) / 100 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model like Qwen's base models: its end-of-text token differs from the token that ends a turn."""
    path = write_chat(tmp_path_factory.mktemp("base") / "model", layers=1)
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"eos_token": PAD, "additional_special_tokens": [TAG]})
    assert tokenizer.convert_tokens_to_ids([END, TAG]) == [END_ID, TAG_ID]
    tokenizer.save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        if (path / name).exists():
            (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | {"eos_token_id": 0}))
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(4)]
    (path.parent / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path.parent / "reward.py").write_text(REWARD)
    return path


def read_sampled_ids(out):
    [path, *_] = sorted((out / "completions").rglob("*.parquet"))
    table = pyarrow.parquet.read_table(path).to_pydict()
    rows = zip(table["token_ids"], table["sampler_logprobs"], strict=True)
    return [[token for token, logprob in zip(ids, logprobs, strict=True) if logprob == logprob] for ids, logprobs in rows]


def test_special_token_as_stop_string_stops_and_reaches_rewards(base_model, tmp_path):
    folder = base_model.parent
    flags = ["--model", base_model, "--dataset", folder / "data.jsonl", "--eval_dataset", folder / "data.jsonl", "--eval_steps", "1"]
    flags += ["--reward_funcs", f"{folder}/reward.py:tagged", "--num_generations", "8", "--generation_batch_size", "32", "--max_steps", "1"]
    flags += ["--global_batch_size", "32", "--max_completion_length", "150", "--output_dir", tmp_path / "out", "--torch_dtype", "float32"]
    assert run_ranks(train, 1, [*map(str, flags), "--stop", END, "--vllm_kv_cache_memory_mb", "64", "--log_completions_steps", "1"]) == [0]
    tokens = read_sampled_ids(tmp_path / "out")
    ended = [ids for ids in tokens if END_ID in ids]
    assert len(ended) > 16 and all(ids.index(END_ID) == len(ids) - 1 for ids in ended)
    assert any(TAG_ID in ids for ids in tokens)
    recorded = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert recorded["rollout"]["stop"] == [END], "the record says what was typed"
