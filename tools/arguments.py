"""Print the arguments of another system and their equivalents here as a Markdown page; `tools/docs.py` writes it to the site.

    python tools/arguments.py trl

The lists of arguments are `tools/theirs/*.tsv`, which `tools/their_arguments.py` writes. The equivalents come from the tables of
`megatron_grpo/commands/compat/`, which `plan` and `train` read too, so that pages and messages agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.commands.compat.foreign_args import NOTHING, OFF, FrameworkArg, SourceFramework
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.table import names, table

ROOT = Path(__file__).parent.parent
# Dialect -> (name of its list in tools/theirs, title).
SYSTEMS = {
    "swift-megatron": ("swift", "Megatron-SWIFT"),
    "trl": ("trl", "TRL"),
    "verl": ("verl", "verl"),
    "skyrl": ("skyrl", "SkyRL"),
    "slime": ("slime", "slime"),
}


def read_arguments(system: str) -> tuple[str, dict[str, str]]:
    """Return (source of the list, default by argument) of a system."""
    head, *lines = (ROOT / "tools" / "theirs" / f"{system}.tsv").read_text(encoding="utf-8").splitlines()
    return head.removeprefix("# "), dict(line.split("\t") for line in lines)


def find_setting(dialect: SourceFramework, name: str) -> str:
    """Return the setting that an argument translates to without other arguments; empty if there is none."""
    row = dialect.row(name)[1]
    if row is not None:
        return row.native
    setting = names().get(name)
    return setting.name if setting and setting.name not in dialect.hides and dialect.size(name) is None else ""


def describe(row: FrameworkArg) -> str:
    """Return a phrase on what an argument of a table is here."""
    words = ", ".join(f"`{foreign}` is `{native}`" for foreign, native in row.values.items())
    if row.native:
        return f"`{row.native}`" + (f"; {words}" if words else "")
    if row.read is not None:
        return f"read: {row.hint}"
    if row.lacks:
        exceptions = [f"`{word}`" for word in row.off if word not in OFF] + [f"`{way}` is given" for way in row.instead]
        unless = f" (unless {' or '.join(exceptions)})" if exceptions else ""
        return f"refused{unless}: {row.lacks}"
    return f"ignored: {row.why or NOTHING}"


def describe_argument(dialect: SourceFramework, name: str) -> str:
    """Return a phrase with the equivalent of an argument; empty if no table has it."""
    size = dialect.size(name)
    row = dialect.row(name)[1]
    if size is not None:
        said = []
        for ours, (unit, _) in dialect.products.items():
            flags, of = dialect.makes(ours), " x gradient_accumulation_steps" if unit == "micro-steps" else ""
            said += [f"`{ours}{of}`" + (f" = {' x '.join(flags)}" if len(flags) > 1 else "")] if size in flags else []
        return f"a size: {'; '.join(said)}"
    if row is not None:
        return describe(row)
    native = find_setting(dialect, name)
    return f"`{native}`" if native else ""


def iterate_arguments(system: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, default there, equivalent here, default here) of each argument of a system."""
    dialect = DIALECTS[system]
    for name, default in read_arguments(SYSTEMS[system][0])[1].items():
        native = find_setting(dialect, name)
        size = dialect.size(name)
        ours = format_value(table()[native].default) if native else format_value(dialect.settings[size].default) if size else ""
        yield name, default, describe_argument(dialect, name), ours


def escape_cell(text: str) -> str:
    """Return text escaped for a cell of a Markdown table; "-" if it is empty."""
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def format_defaults(theirs: str, ours: str) -> str:
    """Return both defaults as one cell: a single value if they are equal or there is no setting here."""
    return f"`{escape_cell(theirs)}`" if ours in ("", theirs) else f"`{escape_cell(theirs)}`; here `{escape_cell(ours)}`"


def count_kinds(system: str) -> tuple[int, int, int]:
    """Return the numbers of arguments that are translated, ignored and refused."""
    kinds = [what.partition(":")[0].split(" (")[0] for _, _, what, _ in iterate_arguments(system)]
    refused, aside = kinds.count("refused"), kinds.count("ignored")
    return len(kinds) - refused - aside, aside, refused


def make_page(system: str) -> str:
    """Return a Markdown page with the arguments of one system.

    Args:
        system: Name of the dialect.
    """
    file, title = SYSTEMS[system]
    translated, aside, refused = count_kinds(system)
    lines = [
        f"# Arguments of {title}",
        "",
        f"{translated + aside + refused} arguments of {read_arguments(file)[0]}: {translated} are translated, {aside} are ignored, "
        f"{refused} are refused. Use them with `--dialect {system}`, on the command line or in a file.",
    ]
    section = None
    for name, default, what, ours in sorted(iterate_arguments(system), key=lambda row: find_section(row[0])):
        if section != find_section(name):
            section = find_section(name)
            lines += ["", *([f"## `{section}`", ""] if section else []), "| Argument | Default | Here |", "|---|---|---|"]
        lines.append(f"| `{name.removeprefix(f'{section}.')}` | {format_defaults(default, ours)} | {escape_cell(what)} |")
    return "\n".join([*lines, ""])


def find_section(name: str) -> str:
    """Return the section of a dotted name, such as `actor_rollout_ref.actor.megatron`: at most its first three words."""
    return ".".join(name.split(".")[:-1][:3])


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in SYSTEMS:
        print(make_page(sys.argv[1]), end="")
    else:
        sys.exit(f"usage: python tools/arguments.py {{{','.join(SYSTEMS)}}}")
