"""The Dockerfile against setup.py and the rules of hadolint: packages are pinned, allowed, and ordered so that slow layers stay cached."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "Dockerfile").read_text()


def read_instructions(text: str = TEXT) -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = re.findall(r"^([A-Z]+) (.*)$", lines.replace("\\\n", " "), re.MULTILINE)
    return [(name, " ".join(rest.split())) for name, rest in found]


def read_setup(name: str):
    """A list or table at the top of setup.py."""
    assigned = [node for node in ast.parse((ROOT / "setup.py").read_text()).body if isinstance(node, ast.Assign)]
    return ast.literal_eval(next(node.value for node in assigned if ast.unparse(node.targets[0]) == name))


def list_asked() -> dict[str, list[Requirement]]:
    """What setup.py says, by name; without the stack for CPUs and what tests need."""
    extras = [texts for name, texts in read_setup("EXTRAS").items() if name not in ("cpu", "dev")]
    found: dict[str, list[Requirement]] = {}
    for text in [*read_setup("REQUIRED"), *(text for texts in extras for text in texts)]:
        found.setdefault(Requirement(text).name, []).append(Requirement(text))
    return found


def list_installed(text: str = TEXT) -> list[Requirement]:
    lines = [rest.split("pip install", 1)[1] for name, rest in read_instructions(text) if name == "RUN" and "pip install" in rest]
    return [Requirement(word) for line in lines for word in re.findall(r'"([^"$]+)"', line) if not word.startswith(".")]


def find_faults(text: str = TEXT) -> list[str]:
    found, steps = [], read_instructions(text)
    for one in list_installed(text):
        pins = [part.version for part in one.specifier if part.operator == "=="]
        if not pins:
            found.append(f"{one.name} is not pinned")
        for asked in list_asked().get(one.name, []):
            least = pins[0].replace(".*", ".999") if pins else "0"
            if pins and not asked.specifier.contains(least):
                found.append(f"{one.name} {pins[0]} is not {asked.specifier}, which setup.py asks for")
            if not asked.extras <= one.extras:
                found.append(f"{one.name} lacks {asked.extras - one.extras}")
    if any(name == "FROM" and (":latest" in rest or (":" not in rest and rest.split()[0] not in ("base",))) for name, rest in steps):
        found.append("an image without a version")
    if re.search(r"APEX_REF=(master|main|HEAD)", text):
        found.append("Apex is not pinned")
    stages = {rest.split(" AS ")[1] for name, rest in steps if name == "FROM"}
    if "apex" not in stages or "from=apex" not in text:
        found.append("no stage builds Apex, or nothing takes it")
    copies = [place for place, (name, _) in enumerate(steps) if name == "COPY"]
    slow = [place for place, (name, rest) in enumerate(steps) if name == "RUN" and ("==" in rest or "git clone" in rest)]
    if not copies or max(slow) > min(copies):
        found.append("a slow layer comes behind the code")
    if any("pip install apex" in rest or '"apex' in rest for _, rest in steps):
        found.append("the apex of PyPI is another program")
    last = next(rest for name, rest in reversed(steps) if name == "RUN")
    if extras := set(re.search(r"\.\[([\w,]+)\]", last)[1].split(",")) - set(read_setup("EXTRAS")):
        found.append(f"setup.py has no extras {extras}")
    return found


def test_dockerfile_installs_pinned_packages_in_order():
    assert find_faults() == []
    assert {one.name for one in list_installed()} >= {"vllm", "megatron-core", "transformer-engine"}


@pytest.mark.parametrize(("old", "new", "said"), [
    ('"vllm==0.33.0"', '"vllm==0.35.0"', "vllm 0.35.0 is not"),
    ('"vllm==0.33.0"', '"vllm"', "vllm is not pinned"),
    ("[core_cu13,pytorch]==", "[pytorch]==", "transformer-engine lacks {'core_cu13'}"),
    ("APEX_REF=25.09", "APEX_REF=master", "Apex is not pinned"),
    ("FROM base AS apex", "FROM base AS extras", "no stage builds Apex"),
    ("FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04", "FROM nvidia/cuda:latest", "an image without a version"),
    ("FROM base AS run", "FROM base AS run\nCOPY . .", "a slow layer comes behind the code"),
    (".[vllm,te,", ".[vllm,te,gpus,", "setup.py has no extras {'gpus'}"),
])  # fmt: skip
def test_dockerfile_check_reports_broken_rules(old, new, said):
    assert old in TEXT
    assert any(said in fault for fault in find_faults(TEXT.replace(old, new))), find_faults(TEXT.replace(old, new))
