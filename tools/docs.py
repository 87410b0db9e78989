"""Gather the pages of the documentation, generate the reference pages, and check the links of the built site.

    python tools/docs.py gather     write build/docs/pages: docs/, the READMEs of the examples, and the generated pages
    python tools/docs.py check      narrow the search of build/docs/site, and follow every link
    python tools/docs.py write      write the generated tables of pages in docs/; a test compares them with their source
    python tools/docs.py notebooks  execute the notebooks on output/quickstart into output/notebooks; `gather` publishes their outputs

`tools/docs.sh` calls the first two. Only the notebooks need torch.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
from contextlib import redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES, SITE = ROOT / "build" / "docs" / "pages", ROOT / "build" / "docs" / "site"
LINK = re.compile(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)")
API = {
    "Trainer and scores": ["api.trainer", "api.score"],
    "Training loop": ["core.train"],
    "Data types": ["core.types", "core.metadata", "core.arrays"],
    "Loss and advantages": ["core.grpo.loss", "core.grpo.objectives", "core.grpo.advantages"],
    "Policy": ["core.policy.policy", "core.policy.reference", "core.policy.gradient_check"],
    "Rollout engine": ["core.rollout.engine"],
    "Environments": ["plugins.environments.protocol"],
    "Rewards": ["run.rewards.protocol"],
    "Tracking services": ["run.metrics.reporters"],
}


def find_sources() -> dict[Path, Path]:
    """Return the path below `PAGES` of every page that is written by hand."""
    found = {ROOT / name: Path(name.lower()) for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    found[ROOT / "README.md"] = Path("index.md")
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        site_path = page.relative_to(docs)
        if site_path != Path("README.md"):  # the site has its own navigation
            found[page] = site_path.with_name("index.md") if site_path.name == "README.md" else site_path
    for page in (ROOT / "examples").glob("*/README.md"):
        found[page] = Path("examples") / f"{page.parent.name}.md"
    for page in NOTEBOOKS.glob("*.py"):
        found[page] = Path("examples") / "notebooks" / f"{page.stem}.md"
    return found


def rewrite_links(text: str, page: Path, site_path: Path, site_paths: dict[Path, Path]) -> str:
    """Return the text of a page with the site's links. Links to files that are not pages become plain text; images are copied.

    Args:
        text: Text of the page.
        page: Its path in the repository.
        site_path: Its path below `PAGES`.
        site_paths: Path below `PAGES` of every page.
    """

    def replace_link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = Path(os.path.normpath(page.parent / path))
        if file == ROOT / "docs" / "README.md":
            file = ROOT / "README.md"
        where = site_paths.get(file) or site_paths.get(file / "README.md")
        if where is None and file.suffix in (".png", ".svg") and file.exists():
            where = Path("assets") / file.name
            (PAGES / where).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, PAGES / where)
        if where is None:
            return words if words.startswith("`") else f"{words} (`{os.path.relpath(file, ROOT)}`)"
        return f"{mark}[{words}]({os.path.relpath(where, site_path.parent)}{'#' + anchor if anchor else ''})"

    text = LINK.sub(replace_link, text)
    return re.sub(r'src="docs/(assets/[\w.]+)"', r'src="\1"', text)


def make_settings_page() -> str:
    """Return the page of all settings with type, default, unit, range and aliases, from the parser's table."""
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.config.table import table

    def escape(value: object) -> str:
        return str(value).replace("|", "\\|").replace("<", "&lt;")

    titles = {name: (type(section).__doc__ or name).strip() for name, section in Config().groups().items()}
    shown = [row for row in table().values() if not row.is_hidden]
    lines = ["# Settings", "", f"{len(shown)} settings. Each is a flag of the command line and a key of a configuration file.", ""]
    group = None
    for row in shown:
        if row.group != group:
            group = row.group
            lines += ["", f"## {titles[group]}", ""]
        kind = "list of " * row.is_list + "map of " * row.is_map + (" or ".join(f"`{choice}`" for choice in row.choices) or row.kind)
        bounds = [("at least", row.range.at_least), ("above", row.range.above), ("at most", row.range.at_most), ("below", row.range.below)]
        facts = {
            "Type": kind,
            "Default": f"`{escape(row.default)}`" if row.default not in ("", [], {}) else "empty",
            "Unit": row.unit,
            "Range": ", ".join(f"{word} {value}" for word, value in bounds if value is not None),
            "Aliases": ", ".join(f"`--{alias}`" for alias in row.aliases),
        }
        lines += [f"### `--{row.name}` {{ #{row.name} }}", "", escape(row.help[:1].upper() + row.help[1:]), ""]
        lines += [f"- {name}: {value}" for name, value in facts.items() if value]
        lines += [f"- Not accepted: `{value}`: {escape(why)}" for value, why in row.refused.items()] + [""]
    return "\n".join(lines)


def make_commands_page() -> str:
    """Return the page of all commands: `--help` of each without its settings."""
    from megatron_grpo.commands.start.show import COMMANDS, print_help, print_overview

    os.environ["COLUMNS"] = "84"
    lines = ["# Command line", ""]
    for command in ("", *COMMANDS):
        shown = io.StringIO()
        with redirect_stdout(shown):
            print_help(command) if command else print_overview()
        lines += [f"## `{' '.join(['megatron-grpo', *command.split()])}`", ""]
        lines += ["```text", re.split(r"\n(Names may be written|  --config)", shown.getvalue())[0].strip(), "```", ""]
    lines += [
        "Commands that take settings read names with `-` or `_`. The command line wins over files, and a later file over an earlier one."
    ]
    return "\n".join([*lines, ""])


def make_metrics_tables() -> str:
    """Return the tables of docs/metrics.md, from the registry of metrics."""
    from megatron_grpo.run.metrics import registry

    def format_meaning(metric: registry.Metric) -> str:
        unit = f" Unit: {metric.unit}." if metric.unit not in metric.meaning else ""
        page = f" See [{metric.page.removesuffix('.md').replace('_', ' ')}]({metric.page})." if metric.page else ""
        return metric.meaning + unit + page

    lines = []
    for title, metrics in registry.groups().items():
        if title == registry.EVALUATIONS:
            lines += ["### Evaluations", "", "| Number in evaluations.jsonl | Meaning | Written with |", "|---|---|---|"]
            lines += [f"| `{metric.name}` | {format_meaning(metric)} | {metric.when or 'every evaluation'} |" for metric in metrics]
            continue
        lines += [f"### {title}", "", "| Metric | Meaning | Logged with | Also in |", "|---|---|---|---|"]
        for metric in metrics:
            lines.append(f"| `{metric.name}` | {format_meaning(metric)} | {metric.when or 'every step'} | {metric.elsewhere or '-'} |")
        lines.append("")
    return "\n".join(lines)


def make_compatibility_tables() -> str:
    """Return the tables of docs/composition.md. Checking all pairs takes some seconds."""
    from tools.compatibility import make_tables

    return make_tables()


def make_models_table() -> str:
    """Return the table of docs/models.md."""
    from tools.models_table import make_table

    return make_table()


def make_models_summary() -> str:
    """Return the table of README.md."""
    from tools.models_table import make_summary

    return make_summary()


# Page below docs/ -> function that makes its generated part, which is between two comments.
TABLES = {
    "metrics.md": make_metrics_tables,
    "composition.md": make_compatibility_tables,
    "models.md": make_models_table,
    "../README.md": make_models_summary,
}
BEGIN, END = "<!-- Generated by `python tools/docs.py write`. -->", "<!-- End of the generated part. -->"


def replace_tables(text: str, tables: str) -> str:
    """Return the text of a page with its generated part replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{rest.partition(END)[2]}"


def write() -> None:
    """Write the generated parts of pages in docs/."""
    for name, tables in TABLES.items():
        page = ROOT / "docs" / name
        page.write_text(replace_tables(page.read_text(encoding="utf-8"), tables()), encoding="utf-8")


def make_argument_pages() -> dict[str, str]:
    """Return the pages with the arguments of other systems, by path."""
    from tools.arguments import SYSTEMS, make_page

    return {f"arguments/{system}": make_page(system) for system in SYSTEMS}


NOTEBOOKS, EXECUTED = ROOT / "examples" / "notebooks", ROOT / "output" / "notebooks"


def execute_notebooks() -> None:
    """Execute every notebook on the quickstart's run, with its outputs in `EXECUTED`. They are published and not committed."""
    import jupytext
    from nbclient import NotebookClient

    EXECUTED.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for path in sorted(NOTEBOOKS.glob("*.py")):
        notebook = jupytext.read(path)
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
        jupytext.write(notebook, EXECUTED / f"{path.stem}.ipynb")
        print(f"[docs] executed {path.relative_to(ROOT)}")


def split_cells(text: str) -> list[tuple[bool, str]]:
    """Return (is_code, text) of each cell of a notebook in percent format."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        kind, _, body = part.partition("\n")
        is_code = "[markdown]" not in kind
        cells.append((is_code, (body if is_code else re.sub(r"^# ?", "", body, flags=re.MULTILINE)).strip()))
    return cells


def make_notebook_page(text: str, outputs: list[list[dict]]) -> str:
    """Return a notebook as a Markdown page.

    Args:
        text: The notebook in percent format.
        outputs: Outputs of each code cell; empty if the notebook was not executed.
    """
    lines, left = [], iter(outputs)
    for is_code, body in split_cells(text):
        lines += ["```python", body, "```", ""] if is_code else [body, ""]
        outputs_of_cell = list(next(left, [])) if is_code else []
        printed = "".join("".join(output["text"]) for output in outputs_of_cell if output["output_type"] == "stream")
        lines += ["```text", printed.strip(), "```", ""] if printed else []
        for data in (output["data"] for output in outputs_of_cell if "data" in output):
            if "image/png" in data:
                lines += [f'<img alt="Output of the cell" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">', ""]
            elif "text/html" in data:  # in Markdown, a blank line would end the element
                html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
                lines += [re.sub(r"\n\s*(?=\n)", "", html).strip(), ""]
            else:
                lines += ["```text", "".join(data["text/plain"]), "```", ""]
    return "\n".join(lines)


def make_notebook_pages() -> dict[str, str]:
    """Return the notebooks as pages, by path. Outputs are included if the executed notebook has the same code."""
    pages = {}
    for path in sorted(NOTEBOOKS.glob("*.py")):
        text, outputs, executed = path.read_text(encoding="utf-8"), [], EXECUTED / f"{path.stem}.ipynb"
        if executed.exists():
            cells = [cell for cell in json.loads(executed.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
            if ["".join(cell["source"]).strip() for cell in cells] == [body for is_code, body in split_cells(text) if is_code]:
                outputs = [cell["outputs"] for cell in cells]
        pages[f"examples/notebooks/{path.stem}"] = make_notebook_page(text, outputs)
    return pages


def gather() -> None:
    """Write all pages and mkdocs.yml into build/docs."""
    shutil.rmtree(PAGES.parent, ignore_errors=True)
    site_paths = find_sources()
    for page, site_path in site_paths.items():
        if page.suffix != ".md":
            continue
        (PAGES / site_path).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / site_path).write_text(rewrite_links(page.read_text(encoding="utf-8"), page, site_path, site_paths), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "assets", PAGES / "assets", dirs_exist_ok=True)
    made = {"settings": make_settings_page(), "command_line": make_commands_page()} | make_argument_pages()
    for title, modules in API.items():
        made[f"api/{title.lower().replace(' ', '_')}"] = "\n\n".join([f"# {title}", *(f"::: megatron_grpo.{name}" for name in modules), ""])
    for name, text in [*((f"reference/{name}", text) for name, text in made.items()), *make_notebook_pages().items()]:
        path = PAGES / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "docs" / "mkdocs.yml", PAGES.parent / "mkdocs.yml")
    print(f"[docs] {len(site_paths)} pages gathered, {len(made)} generated")


def narrow_search() -> None:
    """Remove class members and the tables of the parity matrix from the search index, where they would hide explaining pages."""
    index = SITE / "search.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    deep = {"reference/api/": 4, "parity/": 3}  # pages -> first level of headings that is removed
    found["items"] = [
        item for item in found["items"] if all(item["level"] < level for pages, level in deep.items() if item["location"].startswith(pages))
    ]
    index.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


class Page(HTMLParser):
    """Links and anchors of one HTML page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and ((tag == "a" and name == "href") or (tag == "img" and name == "src")):
                self.links.append(value)


def check_links() -> int:
    """Print each broken link and return their number."""
    pages = {path: Page(path) for path in SITE.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {""}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.relative_to(SITE)}: {link}")
    links = sum(len(page.links) for page in pages.values())
    print(f"[docs] {len(pages)} pages, {links} links, {len(broken)} broken", *broken, sep="\n  ")
    return len(broken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gather", "check", "write", "notebooks"])
    what = parser.parse_args().what
    if what == "check":
        narrow_search()
        sys.exit(1 if check_links() else 0)
    sys.path.insert(0, str(ROOT))
    {"gather": gather, "write": write, "notebooks": execute_notebooks}[what]()
