"""Generated parts of pages equal their source, and every page is in the site's navigation."""

from __future__ import annotations

import json

import pytest

from tools import compatibility, docs


@pytest.mark.parametrize("name", docs.TABLES)
def test_generated_tables_equal_their_source(name):
    """After a change of the source: `python tools/docs.py write`."""
    text = (docs.ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text.count(docs.BEGIN) == text.count(docs.END) == 1
    assert text == docs.replace_tables(text, docs.TABLES[name]())


def test_every_generated_page_of_other_systems_is_in_the_navigation():
    navigation = (docs.ROOT / "docs" / "mkdocs.yml").read_text()
    assert [name for name in docs.make_argument_pages() if f": reference/{name}.md\n" not in navigation] == []


def test_composition_table_features_work_alone():
    found = compatibility.find_refusals()
    rows = compatibility.read_features()
    assert {rows[i].name: messages for (i, j), messages in found.items() if i == j and messages} == {}
    assert any(messages for messages in found.values()) and any(messages == [] for (i, j), messages in found.items() if i != j)
    assert all((docs.ROOT / "docs" / row.page).is_file() for row in rows)


def test_notebook_pages_contain_outputs(tmp_path, monkeypatch):
    source = "# ---\n# jupyter:\n# ---\n\n# %% [markdown]\n# # A title\n# Words.\n\n# %%\nprint(1)\nshow()\n"
    for name in ("here", "changed", "never"):
        (tmp_path / f"{name}.py").write_text(source)
    outputs = [
        {"output_type": "stream", "text": ["1\n"]}, {"output_type": "stream", "text": ["2\n"]},
        {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": ["<Axes>"]}},
        {"output_type": "execute_result", "data": {"text/html": ["<table>\n", "\n", "</table>"], "text/plain": ["table"]}},
    ]  # fmt: skip
    for name, code in (("here", "print(1)\nshow()"), ("changed", "print(0)")):
        cells = [{"cell_type": "markdown", "source": ["# A title"]}, {"cell_type": "code", "source": [code], "outputs": outputs}]
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(docs, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(docs, "EXECUTED", tmp_path)
    pages = docs.make_notebook_pages()
    code = "# A title\nWords.\n\n```python\nprint(1)\nshow()\n```\n"
    assert pages["examples/notebooks/never"] == pages["examples/notebooks/changed"] == code
    image = '<img alt="Output of the cell" src="data:image/png;base64,AAAA">'
    assert pages["examples/notebooks/here"] == f"{code}\n```text\n1\n2\n```\n\n{image}\n\n<table>\n</table>\n"


def test_every_notebook_is_in_the_navigation():
    navigation = (docs.ROOT / "docs" / "mkdocs.yml").read_text()
    assert [name for name in docs.make_notebook_pages() if f"- {name}.md\n" not in navigation] == []
