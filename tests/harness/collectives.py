"""What a compiled program communicates."""

from __future__ import annotations

import math
import re

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)


def collectives(text: str) -> list[tuple[str, str, list[tuple[int, ...]]]]:
    """(kind, "loop" or "once", shapes of what it makes) of every collective in an optimised program."""
    found, computation, loops = [], None, set(re.findall(r"body=%?([\w.\-]+)", text))
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if head := re.match(r"%?([\w.\-]+) \(.*\{", line):
            computation = head[1]
        if match := re.search(rf"= (\(?[^=]*?\)?) ({'|'.join(KINDS)})(?:-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            shapes = [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]
            found.append((match[2], "loop" if computation in loops else "once", shapes))
    return found


def sizes(text: str) -> list[tuple[str, int]]:
    """(kind, elements of the largest array that it makes) of every collective."""
    return [(kind, max(map(math.prod, shapes))) for kind, _, shapes in collectives(text)]
