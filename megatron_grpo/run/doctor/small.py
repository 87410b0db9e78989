"""The tries themselves, each in a process of its own: `python -m megatron_grpo.run.doctor.small sum|answer|step FOLDER`."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.run.quiet import quiet_libraries

VOCABULARY = 128


def add() -> str:
    from megatron_grpo.parallel import state

    state.start(Layout(world_size=2), timeout_minutes=2.0)
    found = collectives.from_all(collectives.rank() + 1)
    largest = collectives.largest(float(collectives.rank()))
    assert found == [1, 2] and largest == 1.0, found
    state.stop()
    return "added"


def answer(folder: Path) -> str:
    import torch

    from megatron_grpo.config.config import RolloutConfig
    from megatron_grpo.rollout.colocated import ColocatedEngine
    from megatron_grpo.rollout.engine import SamplingSettings
    from megatron_grpo.types import Prompt

    cfg = RolloutConfig(max_completion_length=4)
    if not torch.cuda.is_available():
        cfg = replace(cfg, vllm_kv_cache_memory_mb=64)
    engine = ColocatedEngine.build(cfg, model_path=tiny_model(folder), dtype=_dtype(), max_model_len=32, seed=0, rank=0, world_size=1)
    prompt = Prompt(number=0, row=0, raw="4 5 6", token_ids=(4, 5, 6), columns={})
    [group] = engine.generate([prompt], SamplingSettings.of(cfg, num_generations=2), seed=0)
    engine.close()
    return f"vLLM has drawn {sum(one.num_drawn for one in group.completions)} tokens from a tiny model"


def step(folder: Path) -> str:
    """`megatron-grpo train` for one step, on answers from a table: it needs no vLLM."""
    import numpy as np

    from megatron_grpo.config import parse
    from megatron_grpo.rollout.scripted import ScriptedEngine
    from megatron_grpo.run.build import Parts
    from megatron_grpo.run.inputs import read_everything
    from megatron_grpo.run.life import run_training
    from megatron_grpo.types import answered

    def drawn(prompt, place, version):
        tokens = np.random.default_rng([prompt.number, place]).integers(4, VOCABULARY, 4).tolist()
        return answered(
            prompt.token_ids, tokens, [-math.log(VOCABULARY)] * 4, text=" ".join(map(str, tokens)), ended="stop", version=version
        )

    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{4 + i} 5 6"}) + "\n" for i in range(8)))
    (folder / "reward.py").write_text("def even(completion_ids, **columns):\n    return [float(ids[0] % 2) for ids in completion_ids]\n")
    flags = {
        "model": tiny_model(folder), "dataset": folder / "data.jsonl", "reward_funcs": f"{folder}/reward.py:even", "torch_dtype": _dtype(),
        "num_generations": 4, "global_batch_size": 8, "micro_batch_size": 4, "max_completion_length": 4, "max_steps": 1,
        "output_dir": folder / "output", "verify_weight_push": "false", "export_hf": "false", "transformer_impl": "local",
    }  # fmt: skip
    parsed = parse([word for name, value in flags.items() for word in (f"--{name}", str(value))])
    with redirect_stdout(io.StringIO()):
        made, inputs = read_everything(parsed, has_sampler=True)
        run_training(made, inputs, Parts(analysis=_Nothing(), engine=lambda cfg, inputs, parallel: ScriptedEngine(drawn)))
    [record] = [json.loads(line) for line in (folder / "output/metrics.jsonl").read_text().splitlines()]
    return f"one step of a tiny model is trained (gradient norm {record['grad_norm']:.3g}, {record['time/step']:.1f} s)"


class _Nothing:
    """In place of `analysis`: nobody looks into this step."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **facts: self


def tiny_model(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights, and a tokenizer whose words are numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path = folder / "model"
    if path.exists():
        return path
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(getattr(torch, _dtype())).save_pretrained(path)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {str(number): number for number in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


def _dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def main(which: str, folder: str) -> None:
    quiet_libraries()
    print({"sum": add, "answer": lambda: answer(Path(folder)), "step": lambda: step(Path(folder))}[which]())


if __name__ == "__main__":
    main(*sys.argv[1:])
