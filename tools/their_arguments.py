"""Write the lists of other systems' arguments into `tools/theirs/`, from their sources.

    python tools/their_arguments.py swift ~/ms-swift          # a git directory, bare or not
    python tools/their_arguments.py trl                       # the installed trl

There is one file per system: a line `# repository, version, commit`, then a line `name TAB default` for each argument. Only trl is
imported.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

THEIRS = Path(__file__).parent / "theirs"
SWIFT = [
    *(f"swift/arguments/base_args/{name}_args.py" for name in ("base", "generation", "quant", "data", "template", "model")),
    *("swift/megatron/arguments/megatron_args.py", "swift/megatron/arguments/megatron_base_args.py"),
    *("swift/megatron/arguments/sft_args.py", "swift/megatron/arguments/rlhf_args.py"),
]
# Sections of verl that no GRPO run uses, and profilers.
VERL_LEFT_OUT = ("critic.", "reward_model.model.", "reward_model.megatron.", "reward_model.rollout.", "reward_model.profiler.")
VERL_NOISE = ("._target_", ".profiler.", "global_profiler.", "npu_profile.")


def run_git(directory: str, *words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", "-C", directory, *words], check=True, capture_output=True, text=True).stdout


def read_file(directory: str, path: str) -> str:
    """Return the content of a file in the last commit."""
    return run_git(directory, "show", f"HEAD:{path}")


def format_default(node: ast.expr | None) -> str:
    """Return a default as one would enter it; for a factory, its expression."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        words = {word.arg: word.value for word in node.keywords}
        node = words.get("default", words.get("default_factory"))
    if isinstance(node, ast.Lambda):
        node = node.body
    if node is None:
        return "required"
    text = ast.unparse(node)
    return {"None": "none", "True": "true", "False": "false", "list": "[]", "dict": "{}"}.get(text, text).strip("'\"")


def format_value(value: object) -> str:
    """Return a value as one would enter it."""
    return {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def iterate_fields(source: str) -> Iterator[tuple[str, str, str, ast.expr | None]]:
    """Yield (class, name, type, default) of every annotated name in a class body."""
    for found in ast.parse(source).body:
        if isinstance(found, ast.ClassDef):
            for line in found.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield found.name, line.target.id, ast.unparse(line.annotation), line.value


def read_swift(directory: str) -> tuple[str, dict[str, str]]:
    """Return (title, default by argument) of Megatron-SWIFT."""
    found: dict[str, str] = {}
    for path in SWIFT:
        found |= {
            name: format_default(value) for _, name, _, value in iterate_fields(read_file(directory, path)) if not name.startswith("_")
        }
    version = re.search(r"'(.+)'", read_file(directory, "swift/version.py").split("__version__")[-1])
    return f"modelscope/ms-swift {version[1] if version else ''}", found


def read_trl(_: str) -> tuple[str, dict[str, str]]:
    """Return (title, default by argument) of the installed TRL."""
    import trl as installed

    found = {}
    for field in dataclasses.fields(installed.GRPOConfig):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = "required" if value is dataclasses.MISSING else format_value(getattr(value, "value", value))
    return f"huggingface/trl {installed.__version__}, installed", found


def read_verl(directory: str) -> tuple[str, dict[str, str]]:
    """Return (title, default by argument) of verl."""
    import yaml

    found: dict[str, str] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif not any(word in f"{name}." for word in VERL_NOISE) and not name.startswith(VERL_LEFT_OUT):
            found.setdefault(name, format_value(value))

    for kind in ("megatron_trainer", "trainer"):  # the defaults of the Megatron trainer have precedence
        walk(yaml.safe_load(read_file(directory, f"verl/trainer/config/_generated_ppo_{kind}.yaml")), "")
    return f"volcengine/verl {read_file(directory, 'verl/version/version').strip()}", found


def read_skyrl(directory: str) -> tuple[str, dict[str, str]]:
    """Return (title, default by argument) of SkyRL."""
    classes: dict[str, list[tuple[str, str, ast.expr | None]]] = {}
    for owner, name, kind, value in iterate_fields(read_file(directory, "skyrl/train/config/config.py")):
        classes.setdefault(owner, []).append((name, kind, value))
    found: dict[str, str] = {}

    def walk(owner: str, prefix: str) -> None:
        for name, kind, value in classes[owner]:
            inner = next((other for other in classes if re.search(rf"\b{other}\b", kind)), None)
            if inner and not prefix.startswith("trainer.critic."):
                walk(inner, f"{prefix}{name}.")
            elif not inner:
                found[f"{prefix}{name}"] = format_default(value)

    walk("SkyRLTrainConfig", "")
    found = {name: value for name, value in found.items() if not re.search(r"\.torch_profiler_config\.|\.delta_weight_sync\.", name)}
    return "NovaSky-AI/SkyRL", found


def read_slime(directory: str) -> tuple[str, dict[str, str]]:
    """Return (title, default by argument) of slime."""
    found = {}
    for call in ast.walk(ast.parse(read_file(directory, "slime/utils/arguments.py"))):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) in ("add_argument", "reset_arg"):
            words = {word.arg: word.value for word in call.keywords}
            flags = [word.value for word in call.args if isinstance(format_value, ast.Constant)]
            action = ast.unparse(words["action"]).strip("'") if "action" in words else ""
            off = "false" if "store" in action else "none"
            if flags:
                has_default = "default" in words and action != "store_false"
                found[str(flags[0]).lstrip("-").replace("-", "_")] = format_default(words["default"]) if has_default else off
    return "THUDM/slime", found


def main() -> int:
    """Write the list of one system."""
    name, directory = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    title, found = {"swift": read_swift, "trl": read_trl, "verl": read_verl, "skyrl": read_skyrl, "slime": read_slime}[name](directory)
    commit = f", commit {run_git(directory, 'rev-parse', 'HEAD').strip()}" if directory else ""
    text = f"# {title}{commit}\n" + "".join(f"{key}\t{value}\n" for key, value in sorted(found.items()))
    (THEIRS / f"{name}.tsv").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
