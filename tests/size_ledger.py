"""The size ledger: how large the package is, and who paid for its growth. `python -m tests.size_ledger [--write]` checks it.

`size.toml` beside pyproject.toml has the figures and the grants. The ledger begins with the first commit that gives a figure for `core`;
from there every commit that touches the file is checked, along first parents (a merge is one step, with the messages of what it brings):

1. The package is as large as `total`, `core` and `files` say. What it is at most: `plain_run_files`, `step_files`, `docstring_lines`.
2. A figure falls freely: a commit that makes something smaller writes the new one (`--write` does).
3. `total` and `core` rise only by lines of the message of the commit that raises them:
     grant: critic +40                    of `total` (`grant: critic core +15` of `core`), and never more than the figure rises
     paid by: 1a2b3c4d -40                lines of code that an earlier commit of the ledger removed, of the package or of core
     paid by: megatron_grpo/a.py -40      lines that this commit removed from a file or folder
   A line that is gone pays once. What a commit removes is already subtracted from its own rise, so a figure that rises for something else
   than a grant must have fallen before: it is never above the first figure and the spent grants.
4. The other figures rise with a reason in the message: `files +2: the critic is two modules`.
5. Grants are those of the commit that brought the file in; nobody spends more.

Without a history (a source archive, a shallow clone) the figures are checked, and a note says what is not.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, CORE, FILE = "megatron_grpo", "megatron_grpo/core", "size.toml"
CODE = {"total": PACKAGE, "core": CORE}  # figures that are paid for
EXACT = ("total", "core", "files")
FIGURES = (*EXACT, "plain_run_files", "step_files", "docstring_lines")
GRANT = re.compile(r"^grant: (\S+)(?: (\S+))? \+(\d+) *$", re.MULTILINE)
PAID = re.compile(r"^paid by: (\S+) -(\d+) *$", re.MULTILINE)
MAIN = ("origin/HEAD", "origin/main", "main", "origin/master", "master")


# ---- counting ----------------------------------------------------------------------------------------------------------------------------


def docstring_lines(source: str) -> set[int]:
    """Numbers of the lines of docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            found |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def code_lines(source: str) -> int:
    """Number of lines with a token that is no comment and no docstring."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {line for token in tokens if token.type not in silent for line in range(token.start[0], token.end[0] + 1)}
    return len(found - docstring_lines(source))


def measure(root: Path) -> dict[str, int]:
    """The figures that files alone give; no `core` before there is that folder."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))}
    code = {path: code_lines(source) for path, source in sources.items()}
    figures = {"total": sum(code.values()), "files": len(sources),
               "docstring_lines": sum(len(docstring_lines(source)) for source in sources.values())}  # fmt: skip
    if (root / CORE).is_dir():
        figures["core"] = sum(lines for path, lines in code.items() if path.is_relative_to(root / CORE))
    return figures


def read(root: Path = ROOT) -> dict[str, Any]:
    """The ledger as it is in the folder."""
    return tomllib.loads((root / FILE).read_text(encoding="utf-8"))


# ---- the repository ----------------------------------------------------------------------------------------------------------------------


class NoHistoryError(Exception):
    """There is no repository whose top is this folder, or no git."""


@dataclass(frozen=True)
class Repository:
    root: Path

    def __post_init__(self) -> None:
        try:
            top = Path(self("rev-parse", "--show-toplevel").strip())
        except OSError as error:
            raise NoHistoryError("there is no git") from error
        except subprocess.CalledProcessError as error:
            raise NoHistoryError(f"git refuses ({error.stderr.decode(errors='replace').strip().partition(chr(10))[0]})") from error
        if top.resolve() != self.root.resolve():
            raise NoHistoryError(f"the repository here is that of {top}")

    def __call__(self, *words: str) -> str:
        ended = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, check=True)
        return ended.stdout.decode("utf-8", errors="replace")

    def get(self, *words: str) -> str | None:
        """As a call; None if git refuses."""
        try:
            return self(*words)
        except subprocess.CalledProcessError:
            return None

    def source(self, commit: str, name: str) -> str:
        """A file at a commit; empty if it is not there."""
        return self.get("show", f"{commit}:{name}") or ""

    def ledger(self, commit: str) -> dict[str, Any] | None:
        text = self.get("show", f"{commit}:{FILE}")
        return None if text is None else tomllib.loads(text)

    def steps(self) -> list[str]:
        """Commits that touch the ledger, the oldest first: of a merge what it did to its first parent."""
        return self("log", "--first-parent", "--reverse", "--format=%H", "--", FILE).split()

    def messages(self, commit: str) -> str:
        """Messages of a commit, and of all that a merge brings in."""
        parents = self("rev-list", "--parents", "-1", commit).split()[1:]
        return self("log", "--format=%B", f"{parents[0]}..{commit}" if len(parents) > 1 else "-1", *([] if len(parents) > 1 else [commit]))

    def removed(self, commit: str, path: str) -> int:
        """Lines of code that a commit took from a file or folder, less those that it added there."""
        parent = self.get("rev-parse", "--verify", "--quiet", f"{commit}^1")
        if parent is None:
            return 0
        names = self("diff", "--name-only", "--no-renames", "-z", parent.strip(), commit, "--", path).split("\0")
        python = [name for name in names if name.endswith(".py")]
        return sum(code_lines(self.source(f"{commit}^1", name)) - code_lines(self.source(commit, name)) for name in python)


# ---- the rules ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """Walks the ledger from its first commit. After `run`, `problems` has what breaks it.

    Args:
        git: The repository.
        grants: Grants of the commit that brought the ledger in.
        start: First commit of the ledger, which gives a figure for `core`.
        room: For `total` and `core`, the lines by which the figure has fallen and that nobody has used.
    """

    git: Repository
    grants: Mapping[str, Mapping[str, int]]
    start: str
    problems: list[str] = field(default_factory=list)
    spent: Counter[tuple[str, str]] = field(default_factory=Counter)  # (grant, figure)
    used: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (commit, path, figure)
    room: Counter[str] = field(default_factory=Counter)

    def run(self, steps: list[str]) -> list[str]:
        previous = self.git.ledger(steps[0]) or {}
        for commit in steps[1:]:
            ledger = self.git.ledger(commit)
            if ledger is None:
                self.problem(commit, f"removes {FILE}")
                continue
            for name in FIGURES:
                if name in previous and not isinstance(ledger.get(name), int):
                    self.problem(commit, f"removes the figure {name}")
                    ledger[name] = previous[name]
            self.step(commit, previous, ledger)
            previous = ledger
        for entry in self.git("log", "--first-parent", "--format=%H%x00%B%x01", f"{self.start}..HEAD").split("\1"):
            commit, _, message = entry.strip().partition("\0")
            if commit not in steps and GRANT.search(message):
                self.problem(commit, f"spends a grant and does not change {FILE}")
        return self.problems

    def problem(self, commit: str, sentence: str) -> None:
        line = f"{commit[:10]} ({self.git('log', '-1', '--format=%s', commit).strip()}) {sentence}."
        if line not in self.problems:  # the same for total and core
            self.problems.append(line)

    def step(self, commit: str, previous: Mapping[str, Any], ledger: Mapping[str, Any]) -> None:
        if ledger.get("granted") != previous.get("granted"):
            self.problem(commit, "edits the grants")
        message = self.git.messages(commit)
        for name in FIGURES:
            rise = ledger.get(name, 0) - previous.get(name, ledger.get(name, 0))
            if name in CODE:
                self.pay(commit, name, rise, message)
            elif rise > 0:
                reasons = re.findall(rf"^{name} \+(\d+): *\S", message, re.MULTILINE)
                if sum(map(int, reasons)) < rise:
                    self.problem(commit, f"raises {name} by {rise}, and its message gives no reason: `{name} +{rise}: why`")

    def pay(self, commit: str, name: str, rise: int, message: str) -> None:
        granted = self.spend(commit, name, rise, message)
        paid = self.find_paid(commit, name, message) if rise > 0 else 0
        if rise <= 0:
            self.room[name] -= rise
            return
        if granted + paid < rise:
            self.problem(commit, f"raises {name} by {rise} and its message covers {granted + paid} lines of it")
        elif rise - granted > self.room[name]:
            self.problem(commit, f"raises {name} by {rise} with {granted} of a grant, and {name} has fallen by {self.room[name]} lines "
                         "that nobody has used: what a commit removes is already subtracted from its own rise")  # fmt: skip
        self.room[name] = max(0, self.room[name] - max(0, rise - granted))

    def spend(self, commit: str, name: str, rise: int, message: str) -> int:
        """Return the lines that the grants of a message cover."""
        total = 0
        for grant, which, number in GRANT.findall(message):
            if (which or "total") not in CODE or grant not in self.grants:
                if name == "total":
                    self.problem(commit, f"spends a grant that is not there: {grant} {which or 'total'}")
            elif (which or "total") == name:
                total += int(number)
                self.spent[grant, name] += int(number)
                limit = self.grants[grant].get(name, 0)
                if self.spent[grant, name] > limit:
                    self.problem(
                        commit, f"spends {number} lines of {name} of the grant {grant}: {self.spent[grant, name]} of {limit} in all"
                    )
        if total > max(rise, 0):
            self.problem(commit, f"spends {total} lines of grants for {name}, which rises by {max(rise, 0)}")
        return total

    def find_paid(self, commit: str, name: str, message: str) -> int:
        """Return the lines that `paid by` of a message covers."""
        return sum(self.paid(commit, name, *found) for found in PAID.findall(message))

    def paid(self, commit: str, name: str, source: str, number: str) -> int:
        lines, folder = int(number), CODE[name]
        if source.split("/")[0] == PACKAGE:
            if not f"{source.rstrip('/')}/".startswith(f"{folder}/"):
                return 0  # outside of core: pays for the total alone
            payer, path = commit, source.rstrip("/")
        else:
            full = self.git.get("rev-parse", "--verify", "--quiet", f"{source}^{{commit}}")
            payer, path = (full or "").strip(), folder
            if not payer or payer == commit or self.git.get("merge-base", "--is-ancestor", payer, commit) is None:
                self.problem(commit, f"is paid by {source}, which is no earlier commit")
                return 0
            if self.git.get("merge-base", "--is-ancestor", payer, self.start) is not None:
                self.problem(commit, f"is paid by {source}, which is older than the ledger")
                return 0
        gone = max(0, self.git.removed(payer, path))
        before = sum(used for (by, at, figure), used in self.used.items()
                     if (by, figure) == (payer, name) and (f"{path}/".startswith(f"{at}/") or f"{at}/".startswith(f"{path}/")))  # fmt: skip
        if lines > gone - before:
            if name == "total":  # of core it covers what is gone there
                self.problem(commit, f"is paid by {lines} lines of {source}: {gone} are gone, and {before} of them have paid already")
            lines = max(0, gone - before)
        self.used[payer, path, name] += lines
        return lines


def check_history(root: Path) -> tuple[list[str], list[str]]:
    """Return what breaks the ledger in the commits, and notes of what was not checked."""
    try:
        git = Repository(root)
    except NoHistoryError as error:
        return [], [f"The history is not checked: {error}."]
    notes = []
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        notes.append("The history is checked as far as this shallow clone has it (git fetch --unshallow).")
    if git.get("diff", "--quiet", "HEAD", "--", FILE) is None:
        notes.append(f"{FILE} has changes that are not committed: they are checked with their commit.")
    steps = git.steps() if git.get("rev-parse", "--verify", "--quiet", "HEAD") else []
    ledgers = {commit: git.ledger(commit) for commit in steps}
    begun = [commit for commit in steps if "core" in (ledgers[commit] or {})]
    if not begun:
        return [], [*notes, "The history is not checked: the ledger begins with the first commit that gives a figure for core."]
    grants = (ledgers[steps[0]] or {}).get("granted", {})
    problems = [] if (ledgers[begun[0]] or {}).get("granted", {}) == grants else [f"{begun[0][:10]} edits the grants."]
    return problems + Walk(git, grants, begun[0]).run(steps[steps.index(begun[0]) :]), notes


def check_figures(root: Path) -> list[str]:
    """Return where the package is not as the ledger says."""
    ledger, found = read(root), measure(root)
    problems = []
    for name in FIGURES:
        limit, size = ledger.get(name), found.get(name)
        if not isinstance(limit, int) and name != "core":
            problems.append(f"{FILE} has no figure {name}" + (f"; it is {size}." if size is not None else "."))
        elif size is not None and isinstance(limit, int) and size > limit:
            problems.append(f"{name} is {size}, and {FILE} has {limit}: {size - limit} too many.")
        elif size is not None and isinstance(limit, int) and size < limit and name in EXACT:
            problems.append(
                f"{name} is {size}, less than the {limit} of {FILE}: write the new figure (python -m tests.size_ledger --write)."
            )
    if unknown := sorted(ledger.keys() - {*FIGURES, "granted"}):
        problems.append(f"{FILE} has names that mean nothing: {', '.join(unknown)}.")
    return problems


def find_growths(root: Path) -> tuple[str, list[tuple[int, str]]]:
    """Return the base, and by how many lines of code files have grown since, the largest first; a file that moved is one file.

    The base is the merge base with the main branch; on that branch itself, the commit before the newest one of the ledger.
    """
    git = Repository(root)
    head = git("rev-parse", "HEAD").strip()
    bases = [base.strip() for name in MAIN if (base := git.get("merge-base", "HEAD", name)) and base.strip() != head]
    steps = git.steps()
    newest = steps[-1] if steps else head
    base = bases[0] if bases else (git.get("rev-parse", "--verify", "--quiet", f"{newest}^1") or head).strip()
    pairs = list(changed_files(git("diff", "--name-status", "-M", "-z", base, "--", PACKAGE)))
    pairs += [("", name) for name in git("ls-files", "--others", "--exclude-standard", "-z", "--", PACKAGE).split("\0") if name]
    growths = []
    for old, new in pairs:
        if (new or old).endswith(".py"):
            text = (root / new).read_text(encoding="utf-8") if new else ""
            growths.append((code_lines(text) - (code_lines(git.source(base, old)) if old else 0), new or old))
    return base[:10], sorted((growth for growth in growths if growth[0] > 0), key=lambda growth: (-growth[0], growth[1]))


def changed_files(text: str) -> Iterator[tuple[str, str]]:
    """(old name, new name) of `git diff --name-status -z`; empty where there is none."""
    words = iter(text.split("\0"))
    for status in words:
        if status[:1] in ("R", "C"):
            yield next(words), next(words)
        elif status:
            name = next(words)
            yield "" if status == "A" else name, "" if status == "D" else name


def describe_growths(root: Path) -> str:
    """The three largest growths since the base, as a sentence."""
    try:
        base, growths = find_growths(root)
    except (NoHistoryError, subprocess.CalledProcessError) as error:
        return f"Growths are not known: {error}."
    largest = ", ".join(f"{name} +{lines}" for lines, name in growths[:3])
    return f"Largest growths since {base}: {largest}." if growths else f"No file has grown since {base}."


def write_figures(root: Path) -> None:
    """Write the figures that have fallen into the ledger."""
    text, found = (root / FILE).read_text(encoding="utf-8"), measure(root)
    for name, size in found.items():
        text = re.sub(rf"^{name} = (\d+)", lambda old: f"{name} = {min(size, int(old[1]))}", text, count=1, flags=re.MULTILINE)  # noqa: B023
    (root / FILE).write_text(text, encoding="utf-8")


def check(root: Path = ROOT) -> tuple[list[str], list[str]]:
    """Return what breaks the ledger, and what is worth knowing beside it: growths, and what could not be checked."""
    problems, notes = check_history(root)
    return [*check_figures(root), *problems], [describe_growths(root), *notes]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the size ledger.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--write", action="store_true", help="first write the figures that have fallen")
    args = parser.parse_args()
    if args.write:
        write_figures(args.root)
    problems, notes = check(args.root)
    print("\n".join([*problems, *notes, *([] if problems else ["The size ledger holds."])]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
