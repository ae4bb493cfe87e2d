"""The reference has every public name, once, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import public

ROOT = Path(__file__).parents[2]


def described() -> list[str]:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def test_every_public_name_is_described():
    names, pages = public.names(), described()
    described_ids = {id(names[name]) for name in pages if name in names}
    missing = [name for name, value in names.items() if id(value) not in described_ids]
    assert not missing, f"docs/reference lacks {missing}"


def test_classes_that_public_classes_refer_to_are_public():
    """Such as `Layer`, which has the fields that its subclasses do not explain again."""
    names = public.names()
    known = {name.rpartition(".")[2] for name in names}
    for name, value in names.items():
        text = (value.__doc__ or "").partition("Example:")[0] if inspect.isclass(value) else ""
        missing = set(re.findall(r"(?<!`)`([A-Z]\w*)`(?!`)", text)) - known
        assert not missing, f"{name} refers to {missing}, which docs/reference does not describe"


def test_nothing_else_is_described_and_nothing_twice():
    pages = described()
    assert len(pages) == len(set(pages))
    assert not [name for name in pages if name not in public.names()]


def test_every_page_is_in_the_navigation():
    """mkdocs warns only when the site is built."""
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/.]+\.(?:md|ipynb)", text.partition("\nnav:")[2]))
    paths = [path for kind in ("md", "ipynb") for path in ROOT.glob(f"docs/**/*.{kind}")]
    pages = {str(path.relative_to(ROOT / "docs")) for path in paths}
    assert named - {"changelog.md"} == pages
