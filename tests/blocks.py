"""The Python blocks of the pages, run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: str, section: str | None = None) -> list[str]:
    """The blocks of a page, or of one of its sections, in order."""
    text = (ROOT / page).read_text()
    if section is not None:
        level = r"^##+ "
        found = re.findall(
            rf"{level}{re.escape(section)}$(.*?)(?={level}|\Z)", text, re.MULTILINE | re.DOTALL
        )
        (text,) = found
    return [re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in _BLOCK.findall(text)]


def run(page: str, section: str | None = None) -> dict[str, Any]:
    """Runs the blocks one after the other and gives the names that they leave; a page is one program."""
    names: dict[str, Any] = {"__name__": "page"}
    for i, code in enumerate(blocks(page, section)):
        exec(compile(code, f"{page}, block {i + 1}", "exec", dont_inherit=True), names)
    return names
