"""Generated parts of pages are what their source says, and every page is in the site's navigation."""

from __future__ import annotations

import pytest

from tools import compatibility, docs


@pytest.mark.parametrize("name", docs.TABLES)
def test_a_generated_table_is_what_its_source_says(name):
    """After a change of the source: `python tools/docs.py write`."""
    text = (docs.ROOT / "docs" / name).read_text(encoding="utf-8")
    assert text.count(docs.BEGIN) == text.count(docs.END) == 1
    assert text == docs.with_tables(text, docs.TABLES[name]())


def test_every_generated_page_of_other_systems_is_in_the_navigation():
    navigation = (docs.ROOT / "docs" / "mkdocs.yml").read_text()
    assert [name for name in docs.argument_pages() if f": reference/{name}.md\n" not in navigation] == []


def test_every_feature_of_the_table_works_alone():
    found = compatibility.refusals()
    rows = compatibility.features()
    assert {rows[i].name: messages for (i, j), messages in found.items() if i == j and messages} == {}
    assert any(messages for messages in found.values()) and any(messages == [] for (i, j), messages in found.items() if i != j)
    assert all((docs.ROOT / "docs" / row.page).is_file() for row in rows)
