"""The Chinese pages have the code, tables of numbers and links of the English ones."""

from __future__ import annotations

import re

import blocks
import pytest

PAGES = {"README.md": "README.zh.md", "docs/start.md": "docs/start.zh.md"}


def read(page: str) -> str:
    return (blocks.ROOT / page).read_text()


def fenced(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_code_is_the_same(page):
    english = fenced(read(page))
    assert english and english == fenced(read(PAGES[page]))


def test_the_tables_of_speed_are_the_same():
    rows = [
        re.findall(r"^\| .*\d\.\d\d.*\|$", read(page), re.MULTILINE) for page in ("README.md", "README.zh.md")
    ]
    assert len(rows[0]) == 6 and rows[0] == rows[1]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_the_same_pages(page):
    """Apart from those to a page that is translated too, and to each other."""
    targets = [re.findall(r"\]\(([^)]+)\)", read(name)) for name in (page, PAGES[page])]
    for links in targets:
        missing = [link for link in links if not link.startswith("https:")]
        missing = [
            link for link in missing if not (blocks.ROOT / page).parent.joinpath(link.split("#")[0]).exists()
        ]
        assert not missing
    english, chinese = ({link.replace(".zh.md", ".md") for link in links} for links in targets)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES)
def test_linked_near_the_title(page):
    assert PAGES[page].rpartition("/")[2] in "".join(read(page).splitlines()[:3])
