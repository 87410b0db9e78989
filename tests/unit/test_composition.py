"""docs/composition.md: what it says is refused with LoRA is refused, word for word; what it says works, `plan` takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_grpo.cli import main

PAGE = Path(__file__).parents[2] / "docs/composition.md"
REFUSED = re.findall(r"^\| `(--[^`]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
COMMON = dict(vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False, num_attention_heads=32, head_dim=128)
MODELS = {
    "Qwen3ForCausalLM": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8),
    "Qwen3MoeForCausalLM": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "DeepseekV3ForCausalLM": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_key_value_heads=32, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, n_shared_experts=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=24, q_lora_rank=40,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
    ),
}  # fmt: skip


@pytest.fixture
def ask(tmp_path, capsys):
    def ask(architecture: str, words: str) -> tuple[int, dict]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"architectures": [architecture], **COMMON, **MODELS[architecture]}))
        sizes = "--world_size 8 --micro_batch_size 2 --global_batch_size 64 --num_generations 4 --tuner_type lora --lr 1e-4"
        code = main(["plan", "--json", *sizes.split(), "--model", str(config), *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return ask


def test_the_page_has_its_refusals():
    assert len(REFUSED) >= 11 and any("sync_ref_model" in words for words, _ in REFUSED)


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_refused_is_refused_in_the_words_of_the_page(ask, words, sentence):
    architecture = "Qwen3MoeForCausalLM" if "expert" in sentence or "router" in words else "Qwen3ForCausalLM"
    code, found = ask(architecture, words)
    assert code == 2 and [error["message"] for error in found["errors"]] == [sentence]


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Qwen3ForCausalLM", "--tensor_model_parallel_size 2 --sequence_parallel true --pipeline_model_parallel_size 2"),
        ("Qwen3ForCausalLM", "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"),
        ("Qwen3ForCausalLM", "--context_parallel_size 2 --max_tokens_per_micro_batch 4096 --share_prompts true --transformer_impl local"),
        ("Qwen3ForCausalLM", "--beta 0.1 --kl_in_reward true --dynamic_sample true --oversample_ratio 2 --sleep_level 2"),
        ("Qwen3ForCausalLM", "--vllm_tensor_parallel_size 2 --lora_dropout 0.1 --recompute_granularity selective"),
        ("Qwen3MoeForCausalLM", "--expert_model_parallel_size 8 --tensor_model_parallel_size 2 --sequence_parallel true --sleep_level 1"),
    ],
)  # fmt: skip
def test_what_works_is_planned(ask, architecture, words):
    code, found = ask(architecture, words)
    assert code == 0, found
    assert found["cost"]["trainable_parameters"] < 0.05 * found["cost"]["parameters"]


def test_plan_says_what_peft_would_drop(ask):
    code, found = ask("DeepseekV3ForCausalLM", "")
    assert code == 0 and [said for said in found["warnings"] if "PEFT 0.21 loads this adapter without 6 of its" in said]
    code, found = ask("DeepseekV3ForCausalLM", "--target_modules o_proj q_a_proj")
    assert code == 0 and not [said for said in found["warnings"] if "PEFT" in said]
