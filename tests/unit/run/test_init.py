"""`megatron-grpo init`: questions in a real terminal, defaults without one, and files that `plan` and `dry-run` accept."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import yaml

from megatron_grpo.cli import main
from megatron_grpo.commands.start import init
from megatron_grpo.commands.start.init import InitAnswers
from tests.chat_models import write_chat
from tests.terminal import Terminal

INIT = [sys.executable, "-m", "megatron_grpo", "init"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without an nvidia-smi of another directory


@pytest.fixture
def with_project(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))


def test_init_answers_become_files_accepted_by_plan_and_dry_run(tmp_path, monkeypatch, capsys, with_project):
    model = write_chat(tmp_path / "model")
    terminal = Terminal([*INIT, "my run"], tmp_path)
    try:
        terminal.say("", r"Model, .* \[Qwen/Qwen3-0.6B\]: ")
        terminal.say(f"{model}\n", r"Data, .* \[data.jsonl\]: ")
        terminal.say("\n", r"Reward, .* \[reward.py:correct\]: ")
        terminal.say("\n", r"Number of GPUs \[\d+\]: ")
        terminal.say("half\n", r"'half' is not a whole number above 0.\s+Number of GPUs \[\d+\]: ")
        terminal.say("3\n", r"Memory of one GPU in GB \[\d+\]: ")
        told = rf"Wrote config.yaml, reward.py, run.sh, data.jsonl in {tmp_path}/my run\. "
        terminal.say("24\n", rf"{told}(?s:.*) fits in 24.00 GB(?s:.*)Next: `cd 'my run'; megatron-grpo dry-run --config config.yaml`")
    finally:
        terminal.close()
    run = tmp_path / "my run"
    written = {path.name for path in run.iterdir()} - {"__pycache__"}  # Python's, of the reward that the plan imports
    assert written == {"config.yaml", "reward.py", "run.sh", "data.jsonl"}
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["model"]["model"] == str(model) and settings["batch"]["global_batch_size"] == 144
    script = (run / "run.sh").read_text()
    assert "--world_size 3 --gpu_memory_gb 24" in script and "--nproc_per_node 3" in script
    assert subprocess.run(["bash", "-n", run / "run.sh"]).returncode == 0
    monkeypatch.chdir(run)
    assert main(["plan", "--config", "config.yaml", "--world_size", "3", "--gpu_memory_gb", "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] is not None
    assert main(["dry-run", "--config", "config.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_init_without_terminal_uses_and_reports_defaults(tmp_path, with_project):
    ended = subprocess.run(INIT, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Without a terminal, the defaults are used: model Qwen/Qwen3-0.6B, data data.jsonl, reward reward.py:correct" in ended.stdout
    assert "16  optimizer steps" in ended.stdout and "Next: `megatron-grpo dry-run --config config.yaml`" in ended.stdout
    again = subprocess.run(INIT, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "init does not overwrite config.yaml, reward.py, run.sh" in again.stderr


def test_init_with_invalid_run_writes_files_and_reports_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(init, "_defaults", lambda: InitAnswers(data="missing.jsonl"))
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["init", str(tmp_path / "run")]) == 2
    problem, following = capsys.readouterr().err.splitlines()[-2:]
    assert "missing.jsonl" in problem and following.endswith(
        f"The files are written, but this run cannot start. Correct config.yaml, then `cd {tmp_path}/run; megatron-grpo plan --config "
        "config.yaml --world_size 1 --gpu_memory_gb 80`."
    )
    assert (tmp_path / "run/config.yaml").is_file()


def test_init_reward_compares_last_number_of_text_or_chat(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(InitAnswers().files()["reward.py"])
    spec = importlib.util.spec_from_file_location("init_reward", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chat = [[{"role": "assistant", "content": text}] for text in ("11 + 13 = 24.", "24 or 25", "none", "1,024")]
    assert module.correct(chat, [24, 24, 24, 1024]) == [1.0, 0.0, 0.0, 1.0]
    assert module.correct(["-3.5", "3.5"], ["-3.5", -3.5]) == [1.0, 0.0]


def test_init_with_own_data_and_rewards_does_not_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = InitAnswers(model="a: b", data="mine.parquet", reward="math", gpus=5).files()
    assert [*files] == ["config.yaml", "run.sh"]
    settings = yaml.safe_load(files["config.yaml"])
    assert settings["model"]["model"] == "a: b" and settings["rewards"]["reward_funcs"] == ["math"]
    assert settings["batch"]["global_batch_size"] == 160  # a multiple of 8 per prompt, and of 4 on each of 5 GPUs
    (tmp_path / "data.jsonl").touch()
    assert "data.jsonl" not in InitAnswers().files()


def test_init_reads_gpus_and_memory_from_nvidia_smi(tmp_path, monkeypatch):
    assert init._gpus_here() in [(1, 80.0)] or subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '81559\\n81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert init._gpus_here() == (2, 85.0)


@pytest.mark.parametrize("words", [["--model", "x"], ["a", "b"]])
def test_init_with_settings_is_rejected(words, capsys):
    assert main(["init", *words]) == 2
    assert "init takes one directory and no settings" in capsys.readouterr().err
