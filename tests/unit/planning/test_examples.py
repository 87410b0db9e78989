"""The examples at full size pass `plan`, and their pages show its estimates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_grpo.cli import main
from tests.unit.test_composition import COMMON, MODELS

EXAMPLES = Path(__file__).parents[3] / "examples"


def plan_example(folder: str, architecture: str, tmp_path, capsys) -> dict:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.json"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n' * 64)
    config.write_text(json.dumps({"architectures": [architecture], **COMMON, **MODELS[architecture]}))
    words = ["--config", EXAMPLES / folder / "config.yaml", "--model", config, "--dataset", rows, "--eval_dataset", rows]
    code = main(["plan", "--json", "--world_size", "8", "--gpu_memory_gb", "80", "--reward_funcs", "accuracy", *map(str, words)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    return found


def test_python_on_mathematics_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.json"
    rows.write_text('{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}\n' * 64)
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **COMMON, **MODELS["Qwen3ForCausalLM"]}))
    words = ["--config", EXAMPLES / "qwen3_8b_python_tool/config.yaml", "--model", config, "--dataset", rows]
    words += ["--eval_datasets", f"math500={rows}", "--world_size", "8", "--gpu_memory_gb", "80"]
    assert main(["plan", "--json", *map(str, words)]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fits"]


def test_mini_swe_agent_is_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.json"
    row = {"prompt": [{"role": "user", "content": "x"}], "module": "a.py", "files": {"a.py": ""}, "tests": ""}
    rows.write_text(f"{json.dumps(row)}\n" * 47)
    config.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **COMMON, **MODELS["Qwen3ForCausalLM"]}))
    words = ["--config", EXAMPLES / "agent_swe/config.yaml", "--model", config, "--dataset", rows]
    words += ["--eval_datasets", f"held_out={rows}", "--world_size", "8", "--gpu_memory_gb", "80"]
    code = main(["plan", "--json", *map(str, words)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["memory"]["fits"], found
    assert not [said for said in found["warnings"] if "max_agents" in said]


def format_figures(found: dict) -> dict[str, str]:
    """As the tables of the pages word them."""
    memory, cost = found["memory"], found["cost"]
    worst = {name: max(stage[name] for stage in memory["stages"]) for name in memory["stages"][0] if name.endswith("_bytes")}
    peak = {name: max(stage["phases"][name] for stage in memory["stages"]) for name in ("training", "rollout")}
    gb = {
        "weights and adapters": worst["weights_bytes"] + worst.get("adapters_bytes", 0),
        "gradients": worst["gradients_bytes"],
        "optimizer": worst["optimizer_bytes"],
        "activations": worst["activations_bytes"],
        "peak while training": peak["training"],
        "peak while sampling": peak["rollout"],
        "weight sync": cost["weight_push_bytes"],
        "checkpoint": cost["checkpoint_bytes"],
    }
    work = cost["flops_per_rollout"]["training"] / 1e12
    return {name: f"{number / 1e9:.2f} GB" for name, number in gb.items()} | {"training of a rollout, all GPUs": f"{work:,.0f} TFLOP"}


@pytest.mark.parametrize(
    ("folder", "architecture", "page", "column"),
    [
        ("qwen3_8b_gsm8k", "Qwen3ForCausalLM", "qwen3_8b_lora", 1),
        ("qwen3_8b_lora", "Qwen3ForCausalLM", "qwen3_8b_lora", 2),
        ("qwen3_30b_a3b_lora", "Qwen3MoeForCausalLM", "qwen3_30b_a3b_lora", 1),
    ],
)
def test_example_page_shows_estimates_of_plan(folder, architecture, page, column, tmp_path, capsys):
    found = plan_example(folder, architecture, tmp_path, capsys)
    assert found["memory"]["fits"] and not [said for said in found["warnings"] if "PEFT" in said or "merged" in said]
    text = (EXAMPLES / page / "README.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[column] for cells in (re.split(r" *\| *", line.strip("| \n")) for line in text.splitlines() if line.startswith("|"))
    }
    said = {name: rows[name].split(" (")[0] for name in format_figures(found) if name in rows}
    assert len(said) >= 7 and said == {name: format_figures(found)[name] for name in said}


def test_images_example_fits_and_plan_counts_its_images(tmp_path, capsys):
    from tests.seeing import as_bytes, picture

    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    text = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                num_key_value_heads=4, max_position_embeddings=128000, rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e6,
                rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})  # fmt: skip
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, spatial_merge_size=2,
                  temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31], out_hidden_size=3584)  # fmt: skip
    tokens = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **text,
        **tokens,
        "vision_config": vision,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}))
    (data / "a.png").write_bytes(as_bytes(picture(2160, 3840)))
    (data / "b.png").write_bytes(as_bytes(picture(448, 448)))
    row = {"prompt": [{"role": "user", "content": "<image>Find x."}], "answer": "2"}
    large, small = (json.dumps(row | {"images": [name]}) + "\n" for name in ("a.png", "b.png"))
    (data / "rows.jsonl").write_text(large + small * 15)
    (data / "held_out.jsonl").write_text(small)
    words = ["--config", EXAMPLES / "qwen2_5_vl_7b/config.yaml", "--model", model, "--dataset", data / "rows.jsonl"]
    words += ["--eval_dataset", data / "held_out.jsonl", "--reward_funcs", "accuracy", "--world_size", "8", "--gpu_memory_gb", "80"]
    code = main(["plan", "--json", *map(str, words)])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["memory"]["fits"], found
    assert found["images"]["tokens_per_image_max"] == 1222 and found["images"]["share_of_prompt_tokens"] > 0.9
    assert found["images"]["patches_bytes_of_micro_batch"] == 1222 * 4 * 1176 * 4
    assert main(["plan", "--json", *map(str, words), "--max_pixels", "12845056"]) == 0
    said = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert "The largest image has 10,549 tokens" in said and "--max_pixels 1003520 limits it to 1,280" in said
