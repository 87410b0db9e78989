"""The examples at real size pass `plan`, and their pages say what it estimates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_grpo.cli import main
from tests.unit.test_composition import COMMON, MODELS

EXAMPLES = Path(__file__).parents[3] / "examples"


def planned(folder: str, architecture: str, tmp_path, capsys) -> dict:
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


def figures(found: dict) -> dict[str, str]:
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
        "weight push": cost["weight_push_bytes"],
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
def test_page_says_what_plan_estimates(folder, architecture, page, column, tmp_path, capsys):
    found = planned(folder, architecture, tmp_path, capsys)
    assert found["memory"]["fits"] and not [said for said in found["warnings"] if "PEFT" in said or "merged" in said]
    text = (EXAMPLES / page / "README.md").read_text(encoding="utf-8")
    rows = {
        cells[0]: cells[column] for cells in (re.split(r" *\| *", line.strip("| \n")) for line in text.splitlines() if line.startswith("|"))
    }
    said = {name: rows[name].split(" (")[0] for name in figures(found) if name in rows}
    assert len(said) >= 7 and said == {name: figures(found)[name] for name in said}
