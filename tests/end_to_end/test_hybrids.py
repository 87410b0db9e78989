"""Complete runs of a tiny hybrid model (gated delta rule): sampled in float32, resumed in another layout, with servers, with adapters."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.ranks import run_ranks
from tests.servers import ASKS, Server

MOST = 5e-5  # nats between the sampler's log-probs and the trainer's
TP2 = ["--tensor_model_parallel_size", "2", "--sequence_parallel", "true"]
BOTH_KINDS = ["linear_attention", "full_attention"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    flags = write_inputs(tmp_path_factory.mktemp("hybrid"), family="qwen3_5_text", layer_types=BOTH_KINDS)
    return [*flags, "--lr", "1e-2", "--log_completions_steps", "0"]


def read_differences(out) -> list[float]:
    return [step["sampling/sampling_logp_difference/max"] for step in read_jsonl(out / "metrics.jsonl")]


def test_hybrid_run_resumes_on_two_ranks_and_export_loads(flags, tmp_path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    run = [*flags, "--output_dir", str(out), "--save_steps", "3"]
    assert run_ranks(train, 1, [*run, "--max_steps", "3"]) == [0]
    assert run_ranks(train, 2, [*run, *TP2, "--max_steps", "5"]) == [0, 0]
    assert len(read_differences(out)) == 5 and max(read_differences(out)) < MOST
    _, info = AutoModelForCausalLM.from_pretrained(out / "hf", output_loading_info=True)
    assert not any(info.values())


def test_hybrid_bfloat16_run_keeps_float32_weights_of_the_checkpoint(tmp_path):
    """Samples with vLLM's kernels of the rule, which need bfloat16 and heads of 128 channels."""
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128)
    flags = write_inputs(tmp_path, family="qwen3_5_text", layer_types=BOTH_KINDS, dtype="bfloat16", **heads)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    for name in (name for name in tensors if name.endswith((".A_log", ".linear_attn.norm.weight"))):
        tensors[name] = tensors[name].float() * (1 + 2**-14)
    save_file(tensors, file, metadata={"format": "pt"})
    run = [*flags, "--torch_dtype", "bfloat16", "--output_dir", str(tmp_path / "out"), "--max_steps", "3"]
    assert run_ranks(train, 1, run) == [0]
    steps = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert len(steps) == 3 and max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.05
    exported = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in exported.items()} == {name: tensor.dtype for name, tensor in tensors.items()}
    assert any(not torch.equal(exported[name], exported[name].bfloat16().float()) for name in exported if name.endswith(".A_log"))


def test_hybrid_adapters_on_all_linear_layers_train_and_sample(flags, tmp_path):
    run = [*flags, "--output_dir", str(tmp_path), "--tuner_type", "lora", "--lora_rank", "4", "--max_steps", "3"]
    assert run_ranks(train, 1, run) == [0]
    assert len(read_differences(tmp_path)) == 3 and max(read_differences(tmp_path)) < MOST


def train_with_token(rank: int, world_size: int, flags: list[str]) -> int:
    os.environ.update(ASKS)
    return train(rank, world_size, flags)


def test_hybrid_servers_sample_like_colocated_engine(flags, tmp_path):
    """Weights are synced over a link to an engine with two worker processes."""
    model = flags[flags.index("--model") + 1]
    server = Server(tmp_path / "server", model, "--vllm_tensor_parallel_size", "2")
    try:
        run_flags = flags[: flags.index("--vllm_kv_cache_memory_mb")] + flags[flags.index("--vllm_kv_cache_memory_mb") + 2 :]
        host = ["--vllm_mode", "server", "--vllm_server_host", f"@{server.wait().address_file}"]
        assert run_ranks(train_with_token, 1, [*run_flags, *host, "--max_steps", "3", "--output_dir", str(tmp_path / "out")]) == [0]
    finally:
        server.close()
    assert len(read_differences(tmp_path / "out")) == 3 and max(read_differences(tmp_path / "out")) < MOST
