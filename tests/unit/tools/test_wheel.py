"""The wheel, built from a copy of the checkout, installed into an empty environment and used outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_grpo
from tests.unit.run.test_without_the_stack import MODEL, link_distributions, list_requirements

pytest.importorskip("build", reason="build is not installed (pip install 'megatron-grpo[dev]')")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What the wheel is built of. A build writes beside its sources, and so takes a copy."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("megatron_grpo", "referee"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def build(source):
    """Through the source distribution, as `python -m build` goes by default: what that lacks, the wheel lacks."""
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", str(source)], check=True, capture_output=True, text=True)
    [wheel] = (source / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source):
    return build(source)


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """Runs the installed `megatron-grpo` in an environment that has what pip installs where there is no Linux, and jinja2."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    [site] = (folder / "venv/lib").glob("python*/site-packages")
    python = str(folder / "venv/bin/python")
    install = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    link_distributions(site, list_requirements("darwin") | {"jinja2"})  # torch brings jinja2

    def run(*words, cwd=folder):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] = f"{folder}/venv/bin:/usr/bin:/bin"
        return subprocess.run(["megatron-grpo", *words], env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    run.folder = folder
    return run


def test_every_file_of_the_package_is_in_the_wheel(source, wheel):
    files = {str(path.relative_to(source)) for path in (source / "megatron_grpo").rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in files} > {".py", ".yaml", ".j2", ".js", ".css"}
    assert files == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("megatron_grpo/")}


def test_wheel_plan_and_framework_readers_run(command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "data.jsonl").write_text(8 * (json.dumps({"prompt": "4 5", "answer": "x"}) + "\n"))
    flags = ["--model", str(tmp_path), "--dataset", str(tmp_path / "data.jsonl"), "--reward_funcs", "accuracy"]
    ended = command("plan", *flags, "--max_completion_length", "16", "--global_batch_size", "16")
    assert ended.returncode == 0, ended.stderr
    assert "4  optimizer steps" in ended.stdout
    of_verl = command("plan", "--dialect", "verl", "actor_rollout_ref.actor.policy_loss.loss_mode=x")
    assert of_verl.returncode == 2 and "loss_mode" in of_verl.stderr and "cispo" in of_verl.stderr


def list_required_by_extra(metadata):
    """What the extra `referee` of a METADATA or PKG-INFO asks for."""
    asked = [Requirement(line.partition(": ")[2]) for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    return [one.url or f"{one.name}{one.specifier}" for one in asked if one.marker and 'extra == "referee"' in str(one.marker)]


def test_referee_extra_is_folder_in_checkout_and_version_in_wheel(source, wheel):
    with zipfile.ZipFile(wheel) as file:
        [metadata] = (file.read(name).decode() for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    with tarfile.open(next((source / "dist").glob("*.tar.gz"))) as file:
        [info] = (file.extractfile(one).read().decode() for one in file if one.name.count("/") == 1 and one.name.endswith("/PKG-INFO"))
        assert not [one.name for one in file if "referee" in one.name]
    assert list_required_by_extra(metadata) == list_required_by_extra(info) == [f"megatron-grpo-referee=={megatron_grpo.__version__}"]
    subprocess.run([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=source, check=True, capture_output=True)
    assert list_required_by_extra((source / "megatron_grpo.egg-info/PKG-INFO").read_text()) == [(source / "referee").as_uri()]


def test_referee_wheel_has_same_version_and_requires_autograd(source, command, tmp_path):
    project = tomllib.loads((ROOT / "referee/pyproject.toml").read_text())["project"]
    assert project["version"] == megatron_grpo.__version__ and f"megatron-grpo=={project['version']}" in project["dependencies"]
    assert "autograd" in {Requirement(text).name for text in project["dependencies"]} - list_requirements("linux")
    wheel = build(source / "referee")
    files = {str(path.relative_to(source / "referee")) for path in (source / "referee/megatron_grpo_referee").rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in files} == {".py", ".yaml"}
    names = zipfile.ZipFile(wheel).namelist()
    assert files == {name for name in names if name.startswith("megatron_grpo_referee/")}
    assert [name for name in names if name.endswith("/LICENSE")]

    ended = command("referee", "dump", "--of", "trl")
    assert ended.returncode == 2 and "this command needs megatron_grpo_referee, which is not installed" in ended.stderr
    [site] = command.folder.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    ended = command("referee", "dump", "--of", "trl")
    assert ended.returncode == 2 and "this command needs autograd, which is not installed. pip install" in ended.stderr
    link_distributions(site, {"autograd"})
    ended = command("referee", "dump", "--of", "trl", cwd=tmp_path)
    assert ended.returncode == 2 and "referee: dump does not exist." in ended.stderr


def test_wheel_doctor_reports_missing_packages(command):
    ended = command("doctor", "--json")
    assert ended.returncode == 1, ended.stderr
    found = {check["name"]: check["status"] for check in json.loads(ended.stdout)["checks"]}
    assert found["rich"] == "ok" and found["torch"] == "fails" and found["megatron-core"] == "fails"


def test_wheel_report_writes_page(command, tmp_path):
    lines = [{"step": step, "num_tokens": 100 * step, "reward": step / 8, "time/step": 1.0} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ended = command("report", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "uPlot" in (tmp_path / "report.html").read_text()


def test_wheel_init_writes_and_plans_files(command, tmp_path):
    ended = command("init", "first", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert {"config.yaml", "reward.py", "run.sh", "data.jsonl"} <= {path.name for path in (tmp_path / "first").iterdir()}
    assert "optimizer steps" in ended.stdout
