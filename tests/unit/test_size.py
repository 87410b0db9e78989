"""The size ledger: size.toml equals the package, and planted commits in small repositories are rejected."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import size_ledger

GRANTS = "granted.critic = {total = 20, core = 10}\ngranted.people = {total = 5, core = 0}\n"
CORE, RUN = "megatron_grpo/core/step.py", "megatron_grpo/run.py"


def test_size_ledger_of_this_repository_has_no_problems():
    problems, notes = size_ledger.check()
    print("\n".join(notes))
    assert problems == [], "\n".join([*problems, *notes])


def test_code_line_count_excludes_comments_docstrings_and_blanks():
    source = '"""A\n\nmodule."""\n\n# why\ndef f(\n    a,\n):\n    """One."""\n    return """two\nlines"""\n'
    assert size_ledger.code_lines(source) == 5
    assert size_ledger.docstring_lines(source) == {1, 2, 3, 9}


class ToyRepository:
    """A repository with a package of two files and a ledger that each commit updates."""

    def __init__(self, root: Path):
        self.root = root
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null")
        return subprocess.run(["git", "-C", self.root, *identity, *words], capture_output=True, text=True, check=True).stdout.strip()

    def write(self, sizes: dict[str, int], grants: str = GRANTS, figures: bool = True) -> None:
        for name, lines in sizes.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text("".join(f"x{i} = 1\n" for i in range(lines)))
        if figures:
            found = {"plain_run_files": 9, "step_files": 9, **size_ledger.measure(self.root)}
            (self.root / "size.toml").write_text(grants + "".join(f"{name} = {size}\n" for name, size in found.items()))

    def commit(self, message: str, sizes: dict[str, int], **options) -> str:
        self.write(sizes, **options)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def problems(self) -> list[str]:
        return size_ledger.check(self.root)[0]


@pytest.fixture
def toy(tmp_path):
    toy = ToyRepository(tmp_path)
    toy.commit("all: begin", {CORE: 100, RUN: 200})
    return toy


def test_size_ledger_rejects_unpaid_rise_and_accepts_fall(toy):
    toy.commit("run: cut", {RUN: 190})
    assert toy.problems() == []
    toy.commit("run: grow", {RUN: 195})
    assert [p.partition(" ")[2] for p in toy.problems()] == ["(run: grow) raises total by 5 and its message covers 0 lines of it."]


def test_size_ledger_accepts_rise_paid_by_earlier_removal(toy):
    cut = toy.commit("core: cut", {CORE: 80})
    toy.commit(f"core: grow\n\npaid by: {cut[:8]} -15", {CORE: 95})
    assert toy.problems() == []


@pytest.mark.parametrize(
    ("message", "sizes", "sentence"),
    [
        ("", {RUN: 190}, "raises total by 5 and its message covers 0 lines of it"),
        ("paid by: {cut} -30", {RUN: 210}, "is paid by 30 lines of {cut}: 20 are gone, and 0 of them have paid already"),
        ("paid by: {add} -5", {RUN: 190}, "is paid by 5 lines of {add}: 0 are gone, and 0 of them have paid already"),
        ("paid by: {begin} -5", {RUN: 190}, "is paid by {begin}, which is older than the ledger"),
        ("paid by: 0123456789 -5", {RUN: 190}, "is paid by 0123456789, which is no earlier commit"),
        ("paid by: megatron_grpo/none.py -5", {RUN: 190}, "is paid by 5 lines of megatron_grpo/none.py: 0 are gone"),
        ("paid by: {cut} -10", {CORE: 110, RUN: 175}, "raises core by 10 and its message covers 0 lines of it"),
        ("grant: critic core +11\ngrant: critic +11", {CORE: 111}, "spends 11 lines of core of the grant critic: 11 of 10 in all"),
        ("grant: people +1", {RUN: 186}, "spends 1 lines of total of the grant people: 6 of 5 in all"),
        ("grant: critic +5", {}, "spends a grant and does not change size.toml"),
        ("grant: critic +5", {RUN: 180}, "spends 5 lines of grants for total, which rises by 0"),
        ("grant: critic +9", {RUN: 190}, "spends 9 lines of grants for total, which rises by 5"),
        ("grant: nobody +5", {RUN: 190}, "spends a grant that is not there: nobody total"),
        ("grant: critic +5", {CORE: 105}, "raises core by 5 and its message covers 0 lines of it"),
    ],
)
def test_size_ledger_reports_invalid_payments(toy, message, sizes, sentence):
    begin = toy.git("rev-parse", "HEAD")
    add = toy.commit("run: grow\n\ngrant: people +5", {RUN: 205})
    cut = toy.commit("run: cut", {RUN: 185})
    assert toy.problems() == []
    names = {"cut": cut[:10], "add": add[:10], "begin": begin[:10]}
    toy.commit("plant: it\n\n" + message.format(**names), sizes)
    problems = toy.problems()
    assert any(f"(plant: it) {sentence.format(**names)}" in problem for problem in problems), problems


def test_size_ledger_rejects_second_payment_by_same_removal(toy):
    cut = toy.commit("run: cut", {RUN: 180})
    toy.commit("run: cut more", {RUN: 160})
    toy.commit(f"run: grow\n\npaid by: {cut} -15", {RUN: 175})
    assert toy.problems() == []
    toy.commit(f"core: grow\n\npaid by: {cut} -15\ngrant: critic core +10", {CORE: 110})
    assert f"is paid by 15 lines of {cut}: 20 are gone, and 15 of them have paid already" in toy.problems()[0]


def test_size_ledger_removed_lines_do_not_pay_for_same_commit(toy):
    """30 more in one file and 20 fewer in another are 10 more; a file that moved has removed nothing."""
    toy.write({"megatron_grpo/new.py": 30})
    toy.commit("run: move\n\npaid by: megatron_grpo/run.py -20\nfiles +1: a file of its own", {RUN: 180})
    assert any("already subtracted" in problem for problem in toy.problems())


def test_size_ledger_paths_of_same_commit_pay_from_earlier_fall(toy):
    toy.commit("run: cut", {RUN: 180})
    toy.commit("core: grow\n\npaid by: megatron_grpo/run.py -10\ngrant: critic core +10", {RUN: 170, CORE: 110})
    assert toy.problems() == []
    toy.commit("run: split\n\npaid by: megatron_grpo/run.py -10\nfiles +1: half of it", {RUN: 160, "megatron_grpo/half.py": 20})
    assert toy.problems() == []


def test_size_ledger_growth_between_ledger_commits_is_paid_once(toy):
    """The figure is the same before and after: the fall was used, though no message says so."""
    cut = toy.commit("run: cut", {RUN: 150}, figures=False)
    toy.commit("run: grow", {RUN: 200})
    toy.commit(f"run: grow again\n\npaid by: {cut} -50", {RUN: 250})
    assert any("has fallen by 0 lines that nobody has used" in problem for problem in toy.problems())


def test_size_ledger_grants_are_spent_up_to_their_amount(toy):
    toy.commit("core: grow\n\ngrant: critic +8\ngrant: critic core +8", {CORE: 108})
    toy.commit("core: grow\n\ngrant: critic +12\ngrant: critic core +2", {CORE: 110, RUN: 210})
    assert toy.problems() == []
    toy.commit("run: grow\n\ngrant: critic +1", {RUN: 211})
    assert "spends 1 lines of total of the grant critic: 21 of 20 in all" in toy.problems()[0]


@pytest.mark.parametrize("put_back", [False, True])
def test_size_ledger_rejects_edited_grants(toy, put_back):
    toy.commit("size: give", {}, grants=GRANTS.replace("20", "30"))
    if put_back:
        toy.commit("size: take", {})
    assert "(size: give) edits the grants." in toy.problems()[0]


def test_size_ledger_removed_and_restored_keeps_history(toy):
    text = (toy.root / "size.toml").read_text()
    (toy.root / "size.toml").write_text(text.replace("core = 100\n", ""))
    toy.commit("size: drop core", {}, figures=False)
    assert any("removes the figure core" in problem for problem in toy.problems())
    (toy.root / "size.toml").unlink()
    toy.commit("size: drop all", {}, figures=False)
    toy.commit("size: bring back", {RUN: 900})
    problems = toy.problems()
    assert any("removes size.toml" in problem for problem in problems)
    assert any("(size: bring back) raises total by 700" in problem for problem in problems)


def test_size_ledger_rejects_code_that_differs_from_figure(toy):
    toy.commit("run: grow in silence", {RUN: 203}, figures=False)
    assert toy.problems() == ["total is 303, and size.toml has 300: 3 too many."]
    toy.commit("run: cut in silence", {RUN: 190}, figures=False)
    [problem] = toy.problems()
    assert problem.startswith("total is 290, less than the 300 of size.toml: write the new figure")
    size_ledger.write_figures(toy.root)
    assert toy.problems() == [] and size_ledger.read(toy.root)["total"] == 290


def test_size_ledger_other_figures_rise_with_reason(toy):
    text = (toy.root / "size.toml").read_text()
    for message, problems in (("run: plot", 1), ("run: plot\n\nplain_run_files +2: plots are drawn in the run", 0)):
        (toy.root / "size.toml").write_text(text.replace("plain_run_files = 9", "plain_run_files = 11"))
        toy.commit(message, {}, figures=False)
        assert len(toy.problems()) == problems
        toy.git("reset", "-q", "--hard", "HEAD^")


def test_size_ledger_without_core_checks_figures_only(tmp_path):
    toy = ToyRepository(tmp_path)
    toy.commit("all: begin", {RUN: 200})
    toy.commit("run: grow", {RUN: 250})
    problems, notes = size_ledger.check(tmp_path)
    assert problems == [] and "The history is not checked: the ledger begins with" in notes[1]
    toy.commit("core: move", {RUN: 150, CORE: 110})
    assert toy.problems() == []  # it begins here
    toy.commit("core: grow", {CORE: 111})
    assert len(toy.problems()) == 2  # total and core


@pytest.mark.parametrize("paid", [True, False])
def test_size_ledger_merge_counts_messages_of_merged_commits(toy, paid):
    toy.git("checkout", "-q", "-b", "branch")
    toy.commit("run: grow" + "\n\ngrant: people +4" * paid, {RUN: 204})
    toy.git("checkout", "-q", "main")
    toy.commit("docs: add", {"docs.py": 3}, figures=False)
    toy.git("merge", "-q", "--no-ff", "-m", "merge: branch", "branch")
    assert len(toy.problems()) == (0 if paid else 1)


def clone_repository(toy: ToyRepository, at: Path, *words: str) -> None:
    toy.git("clone", "-q", *words, f"file://{toy.root}", str(at))


def archive_repository(toy: ToyRepository, at: Path) -> None:
    at.mkdir()
    toy.git("archive", "--output", f"{at}.tar", "HEAD")
    subprocess.run(["tar", "-C", at, "-xf", f"{at}.tar"], check=True)


@pytest.mark.parametrize(
    "copy", [lambda toy, at: clone_repository(toy, at, "--depth", "1"), archive_repository], ids=["shallow clone", "archive"]
)
def test_size_ledger_without_history_checks_figures_with_note(toy, tmp_path_factory, copy):
    toy.commit("run: grow", {RUN: 210})
    at = tmp_path_factory.mktemp("copies") / "copy"
    copy(toy, at)
    problems, notes = size_ledger.check(at)
    assert problems == [] and "history is" in notes[1]
    (at / RUN).write_text("x = 1\n" * 300)
    assert size_ledger.check(at)[0] == ["total is 400, and size.toml has 310: 90 too many."]


def test_size_ledger_of_clone_equals_repository(toy, tmp_path_factory):
    toy.commit("run: grow", {RUN: 210})
    at = tmp_path_factory.mktemp("copies") / "copy"
    clone_repository(toy, at)
    subprocess.run(["git", "-C", at, "checkout", "-q", "--detach"], check=True)
    subprocess.run(["git", "-C", at, "remote", "remove", "origin"], check=True)
    assert size_ledger.check(at)[0] == toy.problems() != []


def test_size_ledger_names_three_largest_growths_without_moves(toy):
    base = toy.git("rev-parse", "HEAD")
    toy.git("checkout", "-q", "-b", "branch")
    toy.git("mv", RUN, "megatron_grpo/moved.py")
    toy.commit("all: grow", {f"megatron_grpo/{name}.py": lines for name, lines in (("a", 5), ("b", 7), ("c", 1), ("d", 9))})
    (toy.root / CORE).write_text("x = 1\n" * 106)
    assert size_ledger.describe_growths(toy.root) == (
        f"Largest growths since {base[:10]}: megatron_grpo/d.py +9, megatron_grpo/b.py +7, {CORE} +6."
    )
