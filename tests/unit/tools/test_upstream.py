"""`tools/upstream.py`: upstream names that the code uses exist in the installed versions, and missing ones are reported."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import pytest

from tools import upstream

SITE = Path(sysconfig.get_paths()["purelib"])
OURS = upstream.ROOT / "megatron_grpo"


def test_upstream_names_exist_in_installed_vllm_and_megatron():
    checked, findings = upstream.check(SITE, [OURS])
    assert findings == []
    assert checked > 200


def test_upstream_table_methods_equal_called_methods():
    text = "\n".join(path.read_text(encoding="utf-8") for path in OURS.rglob("*.py"))
    for dotted, keywords in upstream.THROUGH_OBJECTS.items():
        name = dotted.rpartition(".")[2]
        assert re.search(rf"\b(Async)?{name}\b", text), dotted
        assert [keyword for keyword in keywords if not re.search(rf"\b{keyword}\b", text)] == [], dotted


# A wheel: a package that says its names lazily, a re-export, a dataclass with a base, a function and a class.
WHEEL = {
    "vllm/__init__.py": 'MODULE_ATTRS = {"LLM": ".entry.llm:LLM"}\ndef __getattr__(name): ...\n',
    "vllm/entry/__init__.py": "",
    "vllm/entry/llm.py": (
        "class Base:\n    def sleep(self, level=1): ...\nclass LLM(Base):\n    def __init__(self, model, *, seed=0, **more): ...\n"
    ),
    "vllm/config.py": "from .parts import Old as New\n",
    "vllm/parts.py": (
        "from dataclasses import dataclass\nimport numpy\n@dataclass\nclass Small:\n    a: int = 0\n@dataclass\nclass Old(Small):\n"
        "    b: int = 0\ndef load(model, *, strict): ...\nclass Made:\n    @classmethod\n    def of(cls, x): ...\n"
    ),
}
CALLER = """
from vllm import LLM
from vllm.config import New
import vllm.parts as parts
try:
    from vllm.newer import thing
except ImportError:
    from vllm.parts import load as thing
LLM("m", seed=1, whatever=2)
kind, more = New, {}
options = dict(a=1)
kind(b=2, **options)
parts.load(1, strict=True)
parts.Made.of(1)
parts.load = lambda *x: None
"""


@pytest.fixture
def files(tmp_path):
    for name, text in WHEEL.items():
        (tmp_path / "wheel" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "wheel" / name).write_text(text)
    (tmp_path / "caller.py").write_text(CALLER)
    return tmp_path


def find_missing(files):
    return [finding.what for finding in upstream.check(files / "wheel", [files / "caller.py"], through_objects=False)[1]]


def test_upstream_reports_nothing_if_all_names_exist(files):
    assert find_missing(files) == []


@pytest.mark.parametrize(("file", "old", "new", "said"), [
    ("vllm/__init__.py", "LLM", "Gone", "there is no vllm.LLM"),
    ("vllm/config.py", "New", "Newer", "there is no vllm.config.New"),
    ("vllm/parts.py", "b: int", "c: int", "vllm.config.New takes no b"),
    ("vllm/parts.py", "a: int", "c: int", "vllm.config.New takes no a"),
    ("vllm/parts.py", "strict", "exact", "vllm.parts.load takes no strict"),
    ("vllm/parts.py", "def load(model, *", "def load(model, path, *", "vllm.parts.load also requires model, path"),
    ("vllm/parts.py", "def load(model, *", "def load(*", "vllm.parts.load takes 0 positional arguments, not 1"),
    ("vllm/parts.py", "def load(", "def fetch(", "load is in none of the modules that it is imported from"),
    ("vllm/parts.py", "class Made", "class Other", "there is no vllm.parts.Made"),
])  # fmt: skip
def test_upstream_reports_names_missing_in_newer_wheel(files, file, old, new, said):
    path = files / "wheel" / file
    path.write_text(path.read_text().replace(old, new))
    assert said in find_missing(files)


def test_upstream_looks_up_methods_in_base_classes(files, monkeypatch):
    monkeypatch.setattr(upstream, "THROUGH_OBJECTS", {"vllm.LLM.sleep": ("level",)})

    def of():
        return [finding.what for finding in upstream.check(files / "wheel", [])[1]]

    assert of() == []
    path = files / "wheel/vllm/entry/llm.py"
    path.write_text(path.read_text().replace("level", "depth"))
    assert of() == ["vllm.LLM.sleep takes no level"]
    path.write_text(path.read_text().replace("sleep", "rest"))
    assert of() == ["there is no vllm.LLM.sleep"]
