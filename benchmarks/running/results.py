"""What every benchmark does with its records: says when and of which commit they are, and puts them away."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import records


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--out``, the same everywhere."""
    parser.add_argument(
        "--out",
        type=Path,
        help="results file; default: <device>.json in $OUT if that is set, else in benchmarks/results",
    )


def stamp() -> dict[str, str]:
    """The commit and the time of a run."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"commit": records.commit(), "run": now}


def key_of(names: Iterable[str]) -> Callable[[records.Record], str]:
    """A function that says which records replace each other: those that have the same under these names."""
    names = tuple(names)
    return lambda record: json.dumps([record.get(name) for name in names], sort_keys=True)


def path_of(out: Path | None, device: str) -> Path:
    """The results file of a run."""
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else records.RESULTS
    return out or records.path_of(device, folder)


def put(
    out: Path | None,
    device: str,
    rows: list[records.Record],
    key: Callable[[records.Record], Any],
    keep: Callable[[records.Record], bool] = lambda record: True,
) -> Path:
    """Puts the rows into the results file, in place of those with the same keys.

    A new file in $OUT begins with what the repository's has. ``keep`` says which other records stay.
    """
    path = path_of(out, device)
    base = records.read(path) or (records.read(records.path_of(device)) if out is None else [])
    records.write(path, records.merged([record for record in base if keep(record)], rows, key))
    return path


def table(lines: list[tuple[str, ...]]) -> str:
    """Lines of cells as text, one under another; the first line has the names of the columns."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )
