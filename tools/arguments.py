"""Write docs/arguments.md: every argument of five other systems, and what it is here. `python tools/arguments.py`.

The lists of theirs are `tools/theirs/*.tsv` (made by `tools/their_arguments.py`); what each is here is read from the tables of
`megatron_grpo/compat/`, which `plan` and `train` read too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.compat import DIALECTS
from megatron_grpo.compat.foreign_args import Dialect
from megatron_grpo.config.read import shown
from megatron_grpo.config.table import names, table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "arguments.md"
# dialect -> (file of their list, heading)
SYSTEMS = {
    "swift-megatron": ("swift", "Megatron-SWIFT"),
    "trl": ("trl", "TRL's GRPOConfig"),
    "verl": ("verl", "verl"),
    "skyrl": ("skyrl", "SkyRL"),
    "slime": ("slime", "slime"),
}


def theirs(system: str) -> tuple[str, dict[str, str]]:
    """(where the list is from, their default by name)."""
    head, *lines = (ROOT / "tools" / "theirs" / f"{system}.tsv").read_text(encoding="utf-8").splitlines()
    return head.removeprefix("# "), dict(line.split("\t") for line in lines)


def native_of(dialect: Dialect, name: str) -> str:
    """The setting that a name means, where it means one by itself."""
    row = dialect.row(name)[1]
    if row is not None:
        return row.native
    setting = names().get(name)
    return setting.name if setting and setting.name not in dialect.hides and dialect.size(name) is None else ""


def here(dialect: Dialect, name: str) -> str:
    """What a name of theirs is here, in words; empty where no table knows it."""
    size = dialect.size(name)
    row = dialect.row(name)[1]
    if size is not None:
        said = []
        for ours, (unit, _) in dialect.products.items():
            flags, of = dialect.makes(ours), " x gradient_accumulation_steps" if unit == "micro-steps" else ""
            said += [f"`{ours}{of}`" + (f" = {' x '.join(flags)}" if len(flags) > 1 else "")] if size in flags else []
        return f"a size: {'; '.join(said)}"
    if row is not None:
        return row.says
    native = native_of(dialect, name)
    return f"`{native}`" if native else ""


def rows(system: str) -> Iterator[tuple[str, str, str, str]]:
    """(name, default there, what it is here, default here) of each argument of theirs."""
    dialect = DIALECTS[system]
    for name, default in theirs(SYSTEMS[system][0])[1].items():
        native = native_of(dialect, name)
        size = dialect.size(name)
        ours = shown(table()[native].default) if native else shown(dialect.settings[size].default) if size else ""
        yield name, default, here(dialect, name), ours


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def page() -> str:
    """The whole of docs/arguments.md."""
    text = [HEAD]
    for system, (file, title) in SYSTEMS.items():
        source, found = theirs(file)
        kinds = [what.partition(":")[0].split(" (")[0] for _, _, what, _ in rows(system)]
        refused, aside = kinds.count("refused"), kinds.count("set aside")
        text.append(f"\n## {title}\n\n{source}. {len(found)} arguments: {len(found) - refused - aside} have a meaning here, ")
        text.append(f"{aside} change nothing, {refused} are refused. `--dialect {system}`.\n\n")
        text.append("| theirs | default there | here | default here |\n|---|---|---|---|\n")
        text += [f"| `{name}` | {cell(default)} | {cell(what)} | {cell(ours)} |\n" for name, default, what, ours in rows(system)]
    return "".join(text)


HEAD = """# Argument mapping: Megatron-SWIFT, TRL, verl, SkyRL, slime

Made by `python tools/arguments.py` from the tables that `plan` and `train` read (`megatron_grpo/compat/`), so that a message
and this page cannot disagree. A row says what an argument is here with `--dialect`:

* a setting in backticks: the same under that name; a word of theirs that is spelt otherwise stands behind it. "read: ..." is what it
  becomes, alone or with others.
* **refused**: the sentence that `plan` and `train` print, unless its value asks for nothing (`none`, `false`, empty) or is one of
  those that are named.
* **set aside**: neither what is sampled nor what is trained depends on it here; the reason follows. `plan` and `train` list such names.
* "default here" is the setting's own. Where theirs differs and nobody types it, theirs is used in a dialect, and shown by `plan`.

What is in no list of theirs and no setting here is refused too, for it may change what is trained. How sizes are made of theirs is in
[batching.md](batching.md), how to come from each system in [coming_from.md](coming_from.md).
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
