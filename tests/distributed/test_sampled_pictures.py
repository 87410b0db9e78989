"""vLLM inside the trainer's process, on models that see: it samples from what the trainer sees, before and after pushes of either part."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.ranks import run_ranks
from tests.seeing import as_bytes, hf_logprobs, picture, write_seeing

SIZES = ([(60, 90)], [(40, 150), (64, 64)], [], [(200, 333)])  # (height, width) of the pictures of each row
MOST = 1e-5  # nats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("seeing")
    write_seeing(at / "model")
    rows = []
    for number, sizes in enumerate(SIZES):
        names = [f"{number}.{i}.png" for i in range(len(sizes))]
        for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
            (at / name).write_bytes(as_bytes(picture(*size, seed=10 * number + i)))
        rows.append({"messages": [{"role": "user", "content": "<image>" * len(sizes) + "How many shapes?"}], "images": names})
    (at / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def opened(folder, **settings):
    from megatron_grpo.data.chat import load_tokenizer
    from megatron_grpo.data.eyes import eyes_of
    from megatron_grpo.data.prompts import open_stream
    from megatron_grpo.settings.config import DataConfig

    cfg = DataConfig(dataset=str(folder / "rows.jsonl"), dataset_shuffle=False, **settings)
    eyes = eyes_of(cfg, folder / "model")
    return open_stream(cfg, load_tokenizer(str(folder / "model")), seed=0, eyes=eyes), eyes


def started(folder, eyes):
    from megatron_grpo.rollout.colocated import ColocatedEngine
    from megatron_grpo.settings.config import RolloutConfig

    cfg = RolloutConfig(vllm_max_num_seqs=16, vllm_kv_cache_memory_mb=32)
    return ColocatedEngine.build(cfg, model_path=folder / "model", dtype="float32", max_model_len=192, seed=0, rank=0, world_size=1,
                                 eyes=eyes, most_pictures=2)  # fmt: skip


def load(folder):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder / "model", dtype="float32").eval()


def worst(model, engine, prompts, *, seed=0):
    """Largest |vLLM - transformers| over the drawn tokens, and over all tokens of the probes that show a picture."""
    from megatron_grpo.rollout.engine import SamplingSettings

    groups = engine.generate(prompts, SamplingSettings(n=3, max_completion_length=8, temperature=0.9), seed=seed)
    drawn = [one for group in groups for one in group.completions]
    at_tokens = max(np.abs((hf_logprobs(model, one.sequence, 0.9) - one.logprobs[1:])[one.sequence.mask[1:]]).max() for one in drawn)
    probes = engine.probes()
    found = [np.abs(hf_logprobs(model, probe) - scores).max() for probe, scores in zip(probes, engine.score(probes), strict=True)]
    return (
        at_tokens,
        max(one for one, probe in zip(found, probes, strict=True) if probe.shown),
        max(one for one, probe in zip(found, probes, strict=True) if not probe.shown),
    )


def test_engine(folder):
    def body(rank, world_size):
        import torch
        from safetensors.torch import load_file

        from megatron_grpo.weights.update import WeightUpdate

        stream, eyes = opened(folder)
        prompts = stream.take(4)
        engine, model = started(folder, eyes), load(folder)
        told = {"as loaded": worst(model, engine, prompts), "warm": worst(model, engine, prompts, seed=1)}
        named = load_file(folder / "model" / "model.safetensors")
        torch.manual_seed(1)
        moved = {n: t + 0.05 * (t.std() if t.dim() > 1 else 1) * torch.randn_like(t) for n, t in named.items()}

        def push(tensors, version, tower):
            engine.take(WeightUpdate(kind="weights", version=version, tensors=iter(tensors.items()), moves_tower=tower))
            with torch.no_grad():
                mine = model.state_dict()
                names = {
                    n: next(k for k in mine if k.replace("model.language_model.", "model.").replace("model.visual", "visual") == n)
                    for n in tensors
                }
                for n, t in tensors.items():
                    mine[names[n]].copy_(t)

        text = {n: t for n, t in moved.items() if not n.startswith("visual.")}
        push(text, 1, False)
        told["text alone"] = worst(model, engine, prompts, seed=2)
        push(named, 2, True)
        told["all"] = worst(model, engine, prompts, seed=3)
        push(moved, 3, True)
        told["all by the table"] = worst(model, engine, prompts, seed=4)
        engine._forget_pictures = lambda: None
        push(named, 4, True)
        told["stale"] = worst(model, engine, prompts, seed=5)
        return told

    [told] = run_ranks(body, 1)
    for k, v in told.items():
        print(k, v)
    assert 0
