"""Combinations of features: rejected with the messages of tests/refusals.yaml, or planned with LoRA, servers or router replay.

The table of docs/composition.md asks the same rules (tools/compatibility.py); tests/unit/tools/test_docs.py holds it.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import yaml

from megatron_grpo.cli import main
from megatron_grpo.run import inputs
from megatron_grpo.run.config import resolve
from megatron_grpo.run.data import checks
from tools import compatibility

REFUSALS = yaml.safe_load((Path(__file__).parents[1] / "refusals.yaml").read_text(encoding="utf-8"))
OWN_TESTS = ("lora", "evaluation_and_rollout_functions", "images", "vision")
WITH_LORA = [tuple(row.values()) for row in REFUSALS["lora"]]
WITH_OTHERS = [tuple(row.values()) for name, rows in REFUSALS.items() if name not in OWN_TESTS for row in rows]
WITH_PICTURES = [tuple(row.values()) for row in REFUSALS["images"]]
TOOL = '''def f(x: int) -> int:
    """
    Doubles.

    Args:
        x: a number
    """
    return 2 * x
'''
AGENT = "def solve(row, endpoint): pass\n\n\ndef verdict(row, folder, output, messages): pass\n"
ENVIRONMENT = """
from megatron_grpo.plugins.environments.protocol import Environment
class E(Environment):
    def step(self, turn):
        return [], 1.0, True
"""
LORA = "--tuner_type lora --lr 1e-4"
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
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
    ),
}  # fmt: skip


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(TOOL)
    (tmp_path / "e.py").write_text(ENVIRONMENT + AGENT)

    def ask(architecture: str, words: str, tuner: str = LORA) -> tuple[int, dict]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"architectures": [architecture], **COMMON, **MODELS[architecture]}))
        sizes = "--world_size 8 --micro_batch_size 2 --global_batch_size 64 --num_generations 4"
        code = main(["plan", "--json", *sizes.split(), *tuner.split(), "--model", str(config), *words.split()])
        return code, json.loads(capsys.readouterr().out)

    return ask


def test_composition_rejections_of_rows_equal_messages_of_row_checks():
    said = [inspect.getsource(checks.check_for_episodes), checks.BLIND]
    said += [
        why
        for typed in ("--rollout_func a.py:f", "--async_rollout_depth 1", "--teacher_model a", "--teacher_model_server http://t:1")
        for why in inputs._blind(resolve(typed.split()))
    ]
    names = [row.name for row in compatibility.read_features()]
    for name, reason in compatibility.read_refused_with_images().items():
        assert names.index(name) > names.index("Vision tower trained") and any(reason in one for one in said), reason


@pytest.mark.parametrize(("words", "sentence"), WITH_OTHERS, ids=[words for words, _ in WITH_OTHERS])
def test_composition_rejected_without_adapters_gives_its_message(ask, words, sentence):
    code, found = ask("Qwen3ForCausalLM" if "MoE model" in sentence else "Qwen3MoeForCausalLM", words, tuner="")
    assert code == 2 and [error["message"] for error in found["errors"]] == [sentence]


def test_composition_turns_with_compatible_settings_are_planned(ask):
    words = "--max_turns 4 --context_parallel_size 2 --share_prefix true --transformer_impl local --dynamic_sample true"
    for who in ("--tools t.py:f", "--environment e.py:E --reward_funcs environment", "--environment e.py:E --tools t.py:f"):
        assert ask("Qwen3ForCausalLM", f"{who} {words}")[0] == 0
    assert ask("Qwen3MoeForCausalLM", "--tools t.py:f --router_replay_mode R2 --steps_per_generation 2", tuner="")[0] == 0


def test_composition_router_replay_is_planned_and_r2_without_stale_rows_warns(ask):
    words = "--expert_model_parallel_size 8 --steps_per_generation 2 --max_prompt_length 100 --max_completion_length 28"
    for mode, tuner in (("R2", LORA), ("R3", "")):
        code, found = ask("Qwen3MoeForCausalLM", f"--router_replay_mode {mode} {words}", tuner=tuner)
        row = 2 * 48 * 8 * 128
        assert code == 0 and found["cost"]["experts"] == {
            "bytes_of_token": 768, "bytes_of_row": row, "bytes_of_rollout": 128 * row, "checkpoint_bytes": 64 * row,
        }  # fmt: skip
        assert not any("changes nothing" in said for said in found["warnings"])
    code, found = ask("Qwen3MoeForCausalLM", "--router_replay_mode R2", tuner="")
    assert code == 0 and any("router_replay_mode R2 has no effect" in said for said in found["warnings"])
    assert "experts" not in ask("Qwen3MoeForCausalLM", "", tuner="")[1]["cost"]


def test_composition_sampling_mask_is_planned_with_bytes(ask):
    code, found = ask("Qwen3ForCausalLM", "--top_k 50 --top_p 0.9 --steps_per_generation 2 --max_completion_length 100")
    row = 100 * (8 + 4 * 50)
    assert code == 0 and found["cost"]["kept"] == {
        "bytes_of_token": 208, "bytes_of_row": row, "bytes_of_rollout": 128 * row, "checkpoint_bytes": 64 * row,
    }  # fmt: skip
    assert "kept" not in ask("Qwen3ForCausalLM", "")[1]["cost"]
    bound = "--top_k 50 --vllm_structured_outputs_regex [0-9]{1,4} --tools t.py:f"
    assert ask("Qwen3ForCausalLM", bound)[1]["cost"]["kept"]["bytes_of_token"] == 208


def test_composition_rejected_with_images_gives_its_message(tmp_path):
    from megatron_grpo.core.base.errors import ConfigError
    from megatron_grpo.run.config.settings import DataConfig
    from megatron_grpo.run.data.prompts import load_rows
    from tests.unit.data.test_images import EYES

    two = {"prompt": "<image><image>", "images": ["a.png", "b.png"]}
    cases = {
        "rows with pictures, a model of text": (two, None, {}),
        "rows with videos": ({"prompt": "a", "videos": ["a.mp4"]}, EYES, {}),
        "truncation_strategy left": (two, EYES, {"truncation_strategy": "left"}),
        "limit_images 1, a row with two": (two, EYES, {"limit_images": 1}),
    }
    assert {what for what, _ in WITH_PICTURES} == cases.keys()
    for what, sentence in WITH_PICTURES:
        row, image_spec, settings = cases[what]
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ConfigError) as caught:
            load_rows(DataConfig(dataset=str(tmp_path / "rows.jsonl"), **settings), image_spec=image_spec)
        assert [problem.message for problem in caught.value.problems] == [sentence]


@pytest.mark.parametrize(("words", "sentence"), WITH_LORA, ids=[words for words, _ in WITH_LORA])
def test_composition_rejected_gives_its_message(ask, words, sentence):
    architecture = "Qwen3MoeForCausalLM" if "expert" in sentence or "router" in words else "Qwen3ForCausalLM"
    code, found = ask(architecture, words)
    assert code == 2 and [error["message"] for error in found["errors"]] == [sentence]


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Qwen3ForCausalLM", "--tensor_model_parallel_size 2 --sequence_parallel true --pipeline_model_parallel_size 2"),
        ("Qwen3ForCausalLM", "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1"),
        ("Qwen3ForCausalLM", "--context_parallel_size 2 --max_tokens_per_micro_batch 4096 --share_prefix true --transformer_impl local"),
        ("Qwen3ForCausalLM", "--beta 0.1 --kl_in_reward true --dynamic_sample true --oversample_ratio 2 --sleep_level 2"),
        ("Qwen3ForCausalLM", "--offload_model true --offload_optimizer true --beta 0.1 --pipeline_model_parallel_size 2"),
        ("Qwen3ForCausalLM", "--vllm_tensor_parallel_size 2 --lora_dropout 0.1 --recompute_granularity selective"),
        ("Qwen3MoeForCausalLM", "--expert_model_parallel_size 8 --tensor_model_parallel_size 2 --sequence_parallel true --sleep_level 1"),
    ],
)  # fmt: skip
def test_composition_supported_is_planned(ask, architecture, words):
    code, found = ask(architecture, words)
    assert code == 0, found
    assert found["cost"]["trainable_parameters"] < 0.05 * found["cost"]["parameters"]


OF_EVALUATION = [tuple(row.values()) for row in REFUSALS["evaluation_and_rollout_functions"]]


@pytest.mark.parametrize(("words", "sentence"), OF_EVALUATION, ids=[words for words, _ in OF_EVALUATION])
def test_composition_rejected_with_evaluation_and_rollout_func_gives_its_message(ask, tmp_path, monkeypatch, words, sentence):
    """Functions and rows are there, and right."""
    monkeypatch.chdir(tmp_path)
    tool = 'def g(a: int):\n    """Adds.\n\n    Args:\n        a: a number\n    """\n'
    (tmp_path / "mine.py").write_text(f"def f(prompts, sampler): pass\n{tool}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    code, found = ask("Qwen3MoeForCausalLM", words, tuner="")
    assert code == 2 and [error["message"] for error in found["errors"]] == [sentence] and len(OF_EVALUATION) == 8


SERVERS = "--vllm_mode server --vllm_server_host a b"


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (
            "Qwen3ForCausalLM",
            "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --share_prefix true --transformer_impl local",
        ),
        ("Qwen3ForCausalLM", "--vllm_enable_lora false --dynamic_sample true --beta 0.1 --kl_in_reward true"),
        ("Qwen3MoeForCausalLM", "--expert_model_parallel_size 8 --router_replay_mode R2 --steps_per_generation 2"),
    ],
)
def test_composition_servers_leave_ranks_without_engine_and_sync_from_rank_0(ask, architecture, words):
    (_, inside), (code, found) = ask(architecture, words), ask(architecture, f"{SERVERS} {words}")
    assert code == 0, found
    assert not any(found["memory"]["sampler"].values()) and inside["memory"]["sampler"]["weights_bytes"] > 10**9
    assert all(
        one["phases"]["rollout"] < other["phases"]["rollout"] for one, other in zip(found["memory"]["stages"], inside["memory"]["stages"])
    )
    assert found["servers"]["addresses"] == ["http://a:8000", "http://b:8000"] and found["servers"]["pushed_by"] == "rank 0"
    assert found["cost"]["weight_push_collectives"] == 0 and found["cost"]["weight_push_bytes"] == inside["cost"]["weight_push_bytes"]
    assert not [said for said in found["warnings"] if "idle while sampling" in said]
    assert [said for said in found["warnings"] if "are sent unencrypted to http://a:8000, http://b:8000" in said]


def test_plan_warns_of_too_few_agents_and_unencrypted_endpoint(ask):
    agents = "--agent e.py:solve --vllm_max_model_len 4096 --num_generations 8 --global_batch_size 64 --max_agents"
    _, few = ask("Qwen3ForCausalLM", f"{agents} 4 --agent_host 10.0.0.1")
    _, many = ask("Qwen3ForCausalLM", f"{agents} 64 --agent_host 127.0.0.2")
    told, silent = ([said for said in found["warnings"] if "agent" in said] for found in (few, many))
    assert not silent and len(told) == 2
    assert told[0].startswith("agent_host (10.0.0.1): requests and keys of agents are sent unencrypted.")
    assert "max_agents (4) leaves the engine partly empty: a rank could sample" in told[1]


def test_composition_servers_disable_offload(ask):
    code, found = ask("Qwen3ForCausalLM", f"{SERVERS} --offload_model true")
    assert code == 0 and [
        said for said in found["warnings"] if said.startswith("offload_model true has no effect: no sampler shares these GPUs")
    ]


def test_plan_warns_of_adapter_modules_unsupported_by_peft(ask):
    code, found = ask("DeepseekV3ForCausalLM", "")
    assert code == 0 and [said for said in found["warnings"] if "PEFT 0.21 loads this adapter without 6 of its" in said]
    code, found = ask("DeepseekV3ForCausalLM", "--target_modules o_proj q_a_proj")
    assert code == 0 and not [said for said in found["warnings"] if "PEFT" in said]
