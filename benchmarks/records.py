"""The results file of a device: a JSON list of records, and what every benchmark writes into each of them.

A benchmark puts its records in place of those with the same key; records of other benchmarks stay. The file
is replaced as a whole, so that a process that is stopped while it writes loses nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]


def commit() -> str:
    """The commit that runs, with a mark if files differ from it; ``FLA_JAX_COMMIT`` where the tree is a copy
    without its history.
    """
    if given := os.environ.get("FLA_JAX_COMMIT"):
        return given
    git = lambda *arguments: subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True
    ).stdout.strip()
    head = git("rev-parse", "--short", "HEAD")
    return (
        head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
        if head
        else "unknown"
    )


def versions(names: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def path_of(device: str, folder: Path = RESULTS) -> Path:
    """The results file of a device."""
    return folder / f"{device.lower().replace(' ', '-')}.json"


def read(path: Path) -> list[Record]:
    """The records of a file, none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else []


def write(path: Path, records: list[Record]) -> None:
    """Replaces the file, and adds the new records to the history beside it."""
    import history  # which imports this module

    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n")
    new.replace(path)
    history.add(history.path_of(path), records)


def merged(old: list[Record], new: list[Record], key: Callable[[Record], Any]) -> list[Record]:
    """``old`` without the records that ``new`` has the keys of, then ``new``."""
    keys = {key(record) for record in new}
    return [record for record in old if key(record) not in keys] + new
