"""The Python blocks of the pages, run as they are written, with the output that the pages show."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```(?:\n\n\1```text\n(.*?)^\1```)?", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def blocks(page: str, section: str | None = None) -> list[str]:
    """The blocks of a page, or of one of its sections, in order."""
    return [code for code, _ in blocks_and_outputs(page, section)]


def blocks_and_outputs(page: str, section: str | None = None) -> list[tuple[str, str]]:
    """The same with the text block that follows each at once, or nothing."""
    text = (ROOT / page).read_text()
    if section is not None:
        level = r"^##+ "
        found = re.findall(
            rf"{level}{re.escape(section)}$(.*?)(?={level}|\Z)", text, re.MULTILINE | re.DOTALL
        )
        (text,) = found
    without = lambda indent, code: re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
    return [(without(indent, code), without(indent, said)) for indent, code, said in _BLOCK.findall(text)]


def run(page: str, section: str | None = None) -> dict[str, Any]:
    """Runs the blocks one after the other and gives the names that they leave; a page is one program."""
    names: dict[str, Any] = {"__name__": "page"}
    for i, (code, shown) in enumerate(blocks_and_outputs(page, section)):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, f"{page}, block {i + 1}", "exec", dont_inherit=True), names)
        print(output.getvalue(), end="")
        missing = lines_missing(output.getvalue(), shown)
        assert not missing, f"{page}, block {i + 1} does not print {missing}, but\n{output.getvalue()}"
    return names


def lines_missing(output: str, shown: str, tolerance: float = 0.05) -> list[str]:
    """The lines that a page shows and a program does not print, in this order; "..." is anything.

    Numbers may differ by ``tolerance``, relative to the larger; those below 1e-4 are rounding errors.
    """
    printed, missing = output.splitlines(), []
    for line in shown.splitlines():
        if line.strip() == "...":
            continue
        places = [i for i, one in enumerate(printed) if _same(line, one, tolerance)]
        if not places:
            missing.append(line)
        printed = printed[places[0] + 1 if places else 0 :]
    return missing


def _same(shown: str, printed: str, tolerance: float) -> bool:
    words = [" ".join(_NUMBER.sub("0", text).split()) for text in (shown.removesuffix("..."), printed)]
    pairs = zip(*(map(_value, _NUMBER.findall(text)) for text in (shown, printed)))
    are_close = all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-4) for a, b in pairs)
    return are_close and (words[1].startswith(words[0]) if shown.endswith("...") else words[0] == words[1])


def _value(number: str) -> float:
    return float(number.replace(",", ""))
