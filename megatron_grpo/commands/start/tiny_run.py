"""Tiny training run for `doctor`.

`python -m megatron_grpo.commands.start.tiny_run FOLDER` creates a tiny model and replaces itself with `torchrun ... train` on it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 128


def command(folder: Path) -> list[str]:
    """Create model, data and reward in `folder`, and return the command that trains one step on them.

    It uses two ranks, or one if there is a single GPU.
    """
    devices = torch.cuda.device_count()
    dtype = "bfloat16" if devices else "float32"
    make_model(folder / "model", dtype)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{4 + i} 5 6"}) + "\n" for i in range(8)))
    (folder / "reward.py").write_text("def even(completion_ids, **columns):\n    return [ids[0] % 2 for ids in completion_ids]\n")
    flags = {
        "model": folder / "model", "dataset": folder / "data.jsonl", "reward_funcs": f"{folder}/reward.py:even", "torch_dtype": dtype,
        "num_generations": 4, "global_batch_size": 8, "micro_batch_size": 4, "max_completion_length": 4, "max_steps": 1,
        "output_dir": folder / "output", "export_hf": "false", "transformer_impl": "local",
    } | ({} if devices else {"vllm_kv_cache_memory_mb": 64})  # fmt: skip
    launch = f"-m torch.distributed.run --standalone --nproc_per_node {1 if devices == 1 else 2} -m megatron_grpo train"
    return [sys.executable, *launch.split(), *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def make_model(path: Path, dtype: str) -> None:
    """Save a Qwen3 with two layers and random weights, and a tokenizer whose tokens are numbers.

    Args:
        dtype: Name of a torch dtype.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(path)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = {name: number for number, name in enumerate([*names.values(), *map(str, range(len(names), VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=names["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)


if __name__ == "__main__":
    words = command(Path(sys.argv[1]))
    os.execv(words[0], words)
