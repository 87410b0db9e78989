"""The architecture pages against the package: layers, the training step, packages, the reading order and the glossary."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import megatron_grpo
from tests.end_to_end import outside_parts
from tools import docs

HERE = Path(__file__).parents[2]
PACKAGE = HERE / "megatron_grpo"
PAGE = (HERE / "docs/architecture.md").read_text()
GLOSSARY = (HERE / "docs/glossary.md").read_text()


def read_section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def read_block(title: str) -> list[str]:
    """The lines of a section's first picture."""
    return read_section(title).split("```")[1].strip("\n").splitlines()


def read_cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if set("".join(line)) <= set("-|: ")}
    return [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]


def list_layers() -> list[str]:
    contracts = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract["id"] == "wings"]
    return [re.sub("[()]", "", layer) for layer in contract["layers"]]


def test_architecture_page_layers_equal_import_linter_layers():
    assert read_block("Package layers") == list_layers()


def test_architecture_page_describes_every_package_in_one_sentence():
    packages = [name for layer in list_layers() for name in layer.split(" | ")]
    found = {name.strip("`"): sentence for name, sentence in read_cells(read_section("Package layers"))}
    assert list(found) == packages
    assert [name for name, sentence in found.items() if len(re.findall(r"\.(?: |$)", sentence)) != 1] == []
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert set(packages) == there - {"__init__", "__main__"}


def test_architecture_page_step_diagram_equals_training_loop():
    from megatron_grpo.core import train

    [function] = ast.parse(inspect.getsource(train.train)).body
    [loop] = [node for node in function.body if isinstance(node, ast.For)]
    calls = [node for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func).removeprefix("run.") for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
    drawn = [re.findall(r"([\w.]+)\(", line) for line in read_block("Training step")]
    assert [name for line in drawn for name in line] == [name for name in names if name != "timers"]
    words = [line.split()[0] for line in read_block("Training step") if not line.startswith(" ")]
    assert words == re.findall(r"# ([A-Z]{4,}) ", inspect.getsource(train.train))


def test_core_imports_nothing_outside_itself_for_type_checking_either():
    """The contract `core` of `lint-imports` does not look at imports under TYPE_CHECKING."""
    nodes = [(path, node) for path in (PACKAGE / "core").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    named = [(path, node.module) for path, node in nodes if isinstance(node, ast.ImportFrom)]
    named += [(path, alias.name) for path, node in nodes if isinstance(node, ast.Import) for alias in node.names]
    ours = [(path.name, name) for path, name in named if name is None or name.split(".")[0].startswith("megatron_grpo")]
    assert len(ours) > 200 and [(path, name) for path, name in ours if not f"{name}.".startswith("megatron_grpo.core.")] == []


def test_architecture_page_names_every_core_file_once():
    walked = re.findall(r"^\| `core/([\w/]+\.py)` \|", read_section("Files of core"), re.M)
    there = [str(path.relative_to(PACKAGE / "core")) for path in (PACKAGE / "core").rglob("*.py") if path.name != "__init__.py"]
    assert sorted(walked) == sorted(there)


def test_architecture_page_paths_and_functions_exist():
    """Folders and files, and the functions that `What happens when` names with them."""
    places = re.findall(
        r"`((?:core|run|plugins|commands)/[\w/.]*)`", read_section("Where do I put a new part") + read_section("What happens when")
    )
    assert len(places) > 40 and [place for place in places if not (PACKAGE / place).exists()] == []
    for path, text in re.findall(r"^\d\. `([\w/]+\.py)`(.*)", read_section("What happens when"), re.M):
        for name in re.findall(r"`([a-z]+_[a-z_]+|[A-Z]\w+)`", text):
            assert name in (PACKAGE / path).read_text(), (path, name)


def split_output(path: str) -> int:
    return len((PACKAGE / path).read_text().splitlines())


def test_architecture_reading_order_line_counts_are_correct():
    said = {name.strip("`"): int(lines) for name, lines, *_ in read_cells(read_section("Reading order"))}
    for name, lines in said.items():
        assert split_output(name) == pytest.approx(lines, rel=0.1, abs=10), name
    total = int(re.search(r"they are ([\d,]+) lines", read_section("Reading order"))[1].replace(",", ""))
    assert sum(map(split_output, said)) == pytest.approx(total, rel=0.1) and sum(said.values()) == total


def test_readme_is_within_its_length_limit():
    """At most 150 lines, and no map of modules: that is on the page of the architecture."""
    readme = (HERE / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    assert re.findall(r"`([\w/]+/\w+\.py)`", readme) == ["megatron_grpo/core/train.py"]


def test_docs_pages_are_all_in_the_index():
    index = (HERE / "docs" / "README.md").read_text()
    for page in HERE.glob("docs/*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_docs_pages_are_all_in_site_navigation():
    navigation = (HERE / "docs" / "mkdocs.yml").read_text()
    missing = [str(place) for place in docs.find_sources().values() if not re.search(rf"(: |- ){re.escape(str(place))}\n", navigation)]
    assert missing == []


def test_architecture_page_counts_files_of_completion_path():
    way = re.findall(r"^\d+\. `(.*?)`", read_section("Path of a completion"), re.M)
    assert all((PACKAGE / path).is_file() for path in way)
    assert f"That is {len(way)} files" in PAGE


def test_extension_points_name_existing_files_and_tables():
    for row in read_cells(read_section("Extension points")):
        for name in re.findall(r"`((?:megatron_grpo|tests)/[\w/.]+)`", " ".join(row)):
            assert (HERE / name).exists(), name
        for table, path in re.findall(r"`([A-Z_]{4,})`(?: or `[A-Z]+`)? (?:in|of) `([\w/]+\.py)`", row[2]):
            module = importlib.import_module("megatron_grpo." + path.removesuffix(".py").replace("/", "."))
            assert hasattr(module, table), table


@pytest.mark.parametrize("part", [outside_parts.Uniform, outside_parts.NotTheSecond, outside_parts.train], ids=lambda part: part.__name__)
def test_architecture_page_contains_source_of_shown_parts(part):
    assert inspect.getsource(part) in PAGE


def test_glossary_class_names_exist():
    nouns = re.findall(r"^\| `(\w+)` \|", GLOSSARY, re.M)
    classes = {
        node.name for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    }
    assert len(nouns) > 5 and set(nouns) <= classes


def test_glossary_words_are_unique_with_one_sentence():
    """At most 40 words: what is called as in TRL, vLLM and Megatron needs no explanation."""
    rows = read_cells(GLOSSARY)
    assert len(rows) <= 40
    words = [word for word, _ in rows]
    assert len(words) == len(set(words))
    assert [word for word, sentence in rows if len(re.findall(r"\.(?: |$)", sentence)) != 1] == []


@pytest.mark.parametrize(
    "page", sorted([*HERE.glob("docs/**/*.md"), *HERE.glob("*.md"), *HERE.glob("examples/**/*.md")]), ids=lambda path: path.name
)
def test_files_and_links_that_pages_name_exist(page):
    if page.name == "CHANGELOG.md":  # tells of what was
        return
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*\.(?:py|sh|md|yaml))`", text):
        near = (HERE / name, PACKAGE / name, page.parent / name)
        assert any(path.exists() for path in near), name


def test_link_check_detects_broken_link(tmp_path, monkeypatch):
    monkeypatch.setattr(docs, "SITE", tmp_path)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text('<a href="../other/#here">a link</a>')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h2 id="here">A heading</h2>')
    assert docs.check_links() == 0
    (tmp_path / "other" / "index.html").write_text("<h2>A heading</h2>")
    assert docs.check_links() == 1


@pytest.mark.parametrize("name", megatron_grpo.__all__)
def test_a_public_name_is_imported_from_the_package(name):
    assert getattr(megatron_grpo, name) is not None and name in dir(megatron_grpo)


def test_examples_and_pages_import_only_public_names():
    """Two pages are about files of the package itself: how it is arranged, and how a family of models is added to it."""
    about_files = {"architecture.md", "adding-a-model.md"}
    pages = [page for page in (*(HERE / "docs").rglob("*.md"), HERE / "README.md") if page.name not in about_files]
    files = [
        *pages,
        *(file for file in (HERE / "examples").rglob("*") if file.suffix in (".py", ".md", ".sh", ".yaml", ".ipynb", ".slurm")),
    ]
    assert len(files) > 100
    path_of_a_wing = re.compile(r"megatron_grpo\.(api|core|run|plugins|commands)\b")
    assert {str(file.relative_to(HERE)) for file in files if path_of_a_wing.search(file.read_text(encoding="utf-8"))} == set()
