"""examples/lora/verdict.py on made-up runs: faults are reported, and PEFT really generates."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3] / "examples/lora/verdict.py"
spec = importlib.util.spec_from_file_location("lora_verdict", HERE)
verdict = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verdict)


def write_run(at: Path, correct: list[float], *, difference: float = 1e-6, trained: int = 100) -> Path:
    (at / "hf").mkdir(parents=True)
    (at / "checkpoints/iter_0000010/grpo").mkdir(parents=True)
    (at / "checkpoints/iter_0000010/grpo/state").write_bytes(b"x" * 1000)
    (at / "plan.json").write_text(json.dumps({"cost": {"trainable_parameters": trained, "weight_push_bytes": 4 * trained}}))
    (at / "metrics.jsonl").write_text(json.dumps({"sampling/sampling_logp_difference/max": difference}) + "\n")
    (at / "evaluations.jsonl").write_text("".join(json.dumps({"step": 10 * n, "correct": c}) + "\n" for n, c in enumerate(correct)))
    for name in verdict.ADAPTER:
        (at / name).write_text(json.dumps({"r": 8}))
    return at


@pytest.mark.parametrize(
    ("correct", "difference", "by_peft", "fault"),
    [
        ([0.3, 0.95], 1e-6, 380, None),
        ([0.3, 0.95], 1e-6, 379, None),  # a tie
        ([0.3, 0.95], 1e-6, 378, "PEFT gives 378 of 400 right answers with the adapter, and the run reported 380"),
        ([0.3, 0.95], 1e-6, 119, "PEFT gives 119 of 400"),  # the model without the adapter
        ([0.6, 0.95], 1e-6, 380, "accuracy before training is 0.600, more than 0.5"),
        ([0.3, 0.91], 1e-6, 364, "that of all weights is 0.980, more than 0.05 higher"),
        ([0.3, 0.95], 1e-2, 380, "sampler and trainer differ by up to 1.0e-02 nats"),
        ([0.3, 0.95], float("nan"), 380, "sampler and trainer differ by up to nan nats"),
    ],
)
def test_lora_verdict_find_faults_by_hand(tmp_path, correct, difference, by_peft, fault):
    lora, full = write_run(tmp_path / "lora", correct, difference=difference), write_run(tmp_path / "full", [0.3, 0.98])
    found = verdict.find_problems(lora, full, by_peft, 400)
    assert [fault in said for said in found] == ([True] if fault else [])


def test_lora_verdict_of_run_without_learning_has_two_faults(tmp_path):
    lora, full = write_run(tmp_path / "lora", [0.3, 0.3]), write_run(tmp_path / "full", [0.3, 0.98])
    assert len(verdict.find_problems(lora, full, 120, 400)) == 2


def test_lora_verdict_with_missing_files_fails_before_model_load(tmp_path, monkeypatch, capsys):
    lora, full = write_run(tmp_path / "lora", [0.3, 0.95]), write_run(tmp_path / "full", [0.3, 0.98])
    (lora / "hf/adapter_model.safetensors").unlink()
    (full / "evaluations.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", ["verdict.py", str(lora), str(full)])
    assert verdict.main() == 1
    said = capsys.readouterr().out
    assert (
        said.startswith("VERDICT: FAILED")
        and "adapter_model.safetensors is missing" in said
        and "full/evaluations.jsonl is missing" in said
    )


def test_lora_verdict_writes_table_and_plot(tmp_path):
    runs = {
        "LoRA": write_run(tmp_path / "lora", [0.3, 0.95], trained=100),
        "all weights": write_run(tmp_path / "full", [0.3, 0.98], trained=1200),
    }
    lines = verdict.format_table({name: verdict.summarize_run(run) for name, run in runs.items()})
    assert lines[1].split() == ["trained", "parameters", "100", "1,200", "12.00"]
    assert lines[2].split()[-3:] == ["400", "4,800", "12.00"] and lines[3].split()[-3:] == ["1,000", "1,000", "1.00"]
    assert lines[4].split()[-3:-1] == ["0.9500", "0.9800"]
    verdict.draw_plot({name: verdict.read_jsonl(run / "evaluations.jsonl") for name, run in runs.items()}, tmp_path / "plots/one.png")
    assert (tmp_path / "plots/one.png").read_bytes().startswith(b"\x89PNG")


def test_lora_verdict_peft_generates_with_adapter(tmp_path):
    """Right are the texts that a loop of our own gets from the same adapter; those of the model without it are others."""
    import torch
    from peft import PeftModel
    from transformers import AutoTokenizer

    from tests.lora_cases import write_random_adapter
    from tests.tiny_models import load_tiny, write_tiny

    model = write_tiny(tmp_path / "model")
    adapter = write_random_adapter(model, tmp_path / "adapter", std=1.0)
    tokenizer, prompts = AutoTokenizer.from_pretrained(model), ["5 6 7", "8 9", "10 11 12", "77 5 9", "100 4"]

    def greedy(network, prompt):
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        for _ in range(4):
            ids = [*ids, int(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == tokenizer.eos_token_id:
                break
        return tokenizer.decode(ids[start:], skip_special_tokens=True)

    with torch.no_grad():
        base = [greedy(load_tiny(model), prompt) for prompt in prompts]
        right = [greedy(PeftModel.from_pretrained(load_tiny(model), str(adapter)).eval(), prompt) for prompt in prompts]
    assert verdict.count_right_answers(adapter, prompts, right, max_tokens=4) == len(prompts)
    assert verdict.count_right_answers(adapter, prompts, base, max_tokens=4) == sum(map(str.__eq__, base, right)) < len(prompts)
