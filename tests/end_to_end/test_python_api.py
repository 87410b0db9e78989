"""A run of the Python API equals the run of the command line."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megatron_grpo import GRPOConfig, GRPOTrainer
from tests.end_to_end.runs import read_jsonl, train, without_plots, write_inputs
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SIZES = {"torch_dtype": "float32", "num_generations": 4, "global_batch_size": 16, "micro_batch_size": 4, "max_completion_length": 8,
         "lr": 1e-3, "vllm_kv_cache_memory_mb": 64, "max_steps": 2}  # fmt: skip


class Steps:
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, logs["reward"]))


def without_times(path):
    return [
        {name: value for name, value in line.items() if "time/" not in name and name != "tokens_per_second"} for line in read_jsonl(path)
    ]


def test_python_api_metrics_equal_command_line(tmp_path):
    flags = write_inputs(tmp_path)
    run_ranks(train, 2, [*flags, "--max_steps", "2", "--output_dir", str(tmp_path / "command")], timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]

    def even(completion_ids, **columns):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    steps = Steps()
    args = GRPOConfig(output_dir=str(tmp_path / "program"), **SIZES)
    result = GRPOTrainer(tmp_path / "model", even, args, rows, callbacks=[steps], nproc_per_node=2).train()
    assert without_times(tmp_path / "program/metrics.jsonl") == without_times(tmp_path / "command/metrics.jsonl")
    assert result.finished and result.step == 2 and (result.model / "model.safetensors").is_file()
    assert steps.seen == [(line["step"], line["reward"]) for line in result.history]


def test_python_api_ctrl_c_saves_and_train_resumes(tmp_path):
    write_inputs(tmp_path)

    class Interrupt(Steps):
        def on_log(self, args, state, control, **kwargs):
            if not self.seen:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_log(args, state, control, **kwargs)

    def odd(completion_ids, **columns):
        time.sleep(0.4)  # on a busy machine the run would end before the program reads its first step
        return [float(ids[0] % 2) for ids in completion_ids]

    def trainer(callback):
        args = GRPOConfig(output_dir=str(tmp_path / "out"), **SIZES | {"max_steps": 12})
        return GRPOTrainer(tmp_path / "model", odd, args, tmp_path / "data.jsonl", callbacks=[callback], nproc_per_node=2)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores SIGINT
    try:
        with pytest.raises(KeyboardInterrupt, match="exit codes of its ranks: 3, 3"):
            trainer(Interrupt()).train()
    finally:
        signal.signal(signal.SIGINT, before)
    done = len(read_jsonl(tmp_path / "out/metrics.jsonl"))
    [saved] = (tmp_path / "out/checkpoints").glob("iter_*")
    assert 1 <= done < 12 and saved.name == f"iter_{done:07d}" and (saved / "manifest.json").is_file()

    steps = Steps()
    result = trainer(steps).train()
    assert result.finished and [line["step"] for line in result.history] == [*range(1, 13)]
    assert [step for step, _ in steps.seen] == [*range(done + 1, 13)]


def test_python_api_consecutive_trainers_under_torchrun_are_independent(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (pip install 'megatron-grpo[data]')")
    write_inputs(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]

    def one_after_another(rank, world_size):
        without_plots()
        torch.distributed.destroy_process_group()  # of the tests; a trainer joins the job, as torchrun's store has it
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

        def even(completion_ids, **columns):
            return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

        def trainer(name, data, **settings):
            steps = Steps()
            args = GRPOConfig(output_dir=str(tmp_path / name), **SIZES, tensor_model_parallel_size=2, **settings)
            return steps, GRPOTrainer(tmp_path / "model", even, args, data, {"held": rows[:4]}, callbacks=[steps], echo=False)

        _, first = trainer("first", rows)
        first.train()
        steps, second = trainer("second", datasets.Dataset.from_list(rows))
        result = second.train()
        return result.step, [reward for _, reward in steps.seen], second.evaluate(num_generations_eval=2)

    (step, seen, [evaluation]), (same_step, silent, _) = run_ranks(one_after_another, 2, timeout=300)
    assert without_times(tmp_path / "first/metrics.jsonl") == without_times(tmp_path / "second/metrics.jsonl")
    assert step == same_step == len(seen) == 2 and silent == [], "callbacks are called on rank 0"
    assert (evaluation["step"], evaluation["n"]) == (2, 2)


def test_training_notebook_trains_and_plots(tmp_path, monkeypatch):
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (pip install 'megatron-grpo[dev]')")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'megatron-grpo[dev]')")
    write_inputs(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("train", "test"):
        (tmp_path / "data" / f"{name}.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    for variable, value in {"QUICKSTART": tmp_path, "OUTPUT_DIR": tmp_path / "out", "STEPS": "2", "PYTHONPATH": ROOT}.items():
        monkeypatch.setenv(variable, str(value))
    source = (ROOT / "examples/notebooks/training.py").read_text()
    assert "float(text == right)" in source  # a model that was never trained is never right, and equal rewards train nothing
    notebook = jupytext.reads(source.replace("float(text == right)", "float(len(text))"), fmt="py:percent")
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "step 2, reward" in json.dumps(notebook.cells), "the callback's figure"
    assert [line["step"] for line in read_jsonl(tmp_path / "out/metrics.jsonl")] == [1, 2]
