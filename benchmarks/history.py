"""Compares commits by their fastest record of each measurement (equal `records.SETTINGS`).

python benchmarks/history.py                          # the commits that were measured
python benchmarks/history.py add                      # append the results files' new records
python benchmarks/history.py compare 6af4be6 HEAD     # status 1 if something is more than 5 % slower
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import records
from records import Record


def title(record: Record) -> str:
    """The settings of a record, for people."""
    shape = record.get("shape")
    words = [record.get(name) for name in ("op", "form", "library", "implementation")]
    words.append(" ".join(map(str, shape)) if isinstance(shape, list) else shape)
    words += [record.get(name) for name in ("dtype", "precision", "pass", "decay")]
    if "batch" in record:
        words += [f"RWKV-{record['version']} {record['model']}", f"batch {record['batch']}"]
    return ", ".join(str(word) for word in words if word is not None)


def of_commit(history: Iterable[Record], commit: str) -> dict[str, Record]:
    """The fastest record of each measurement of a commit, with uncommitted changes if named ``+changes``."""
    found: dict[str, Record] = {}
    name, _, wanted = commit.partition("+")
    for record in history:
        one, _, changes = record["commit"].partition("+")
        if changes == wanted and (one.startswith(name) or name.startswith(one)):
            key = records.measurement(record)
            found[key] = min(found.get(key, record), record, key=lambda r: r["ms"])
    return found


def compare(history: list[Record], old: str, new: str, tolerance: float) -> tuple[str, bool]:
    """A table of the measurements of both commits, and whether none is slower by more than ``tolerance`` %.

    Raises:
        ValueError: the commits have no measurement in common.
    """
    before, after = of_commit(history, old), of_commit(history, new)
    both = [key for key in after if key in before]
    if not both:
        text = f"{old} ({len(before)} measurements) and {new} ({len(after)}) have none in common"
        raise ValueError(f"{text}; the history has {', '.join(sorted({r['commit'] for r in history}))}")
    lines, within = [], True
    for key in sorted(both, key=lambda key: -after[key]["ms"] / before[key]["ms"]):
        a, b = before[key]["ms"], after[key]["ms"]
        slower = b > (1 + tolerance / 100) * a
        within &= not slower
        lines.append(f"{b / a:6.3f}  {a:9.4g} ms -> {b:9.4g} ms  {title(after[key])}{'  SLOWER' * slower}")
    return "\n".join(lines), within


def overview(history: list[Record]) -> str:
    """The commits by the date of their first record."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in history:
        found.setdefault((record["commit"], record.get("device", "unknown")), []).append(record)
    lines = [f"{min(r['run'] for r in v)[:16]}  {c:16} {d}: {len(v)} records" for (c, d), v in found.items()]
    return "\n".join(sorted(lines))


def full_hash(commit: str) -> str:
    """The hash of a commit that git knows by another name, such as HEAD; else the name itself."""
    command = ["git", "-C", str(records.ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or commit
    except OSError:  # git is not installed
        return commit


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__, out=False)
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the results files")
    parser.add_argument("--only-ours", action="store_true", help="compare only this library's records")
    commands: Any = parser.add_subparsers(dest="command")
    commands.add_parser("add", help="append the results files' new records to their histories")
    comparing = commands.add_parser("compare", help="compare two commits by their fastest records")
    comparing.add_argument("old")
    comparing.add_argument("new")
    text = "percent by which a measurement may be slower; default 5"
    comparing.add_argument("--tolerance", type=float, default=5.0, help=text)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; status 1 if something is slower, 2 if there is nothing to compare."""
    options = parse(arguments)
    if options.command == "add":
        for path in sorted(options.results.glob("*.json")):
            history = records.history_of(path)
            print(f"{history}: {records.add_to_history(history, records.read(path))} new records")
        return 0
    paths = sorted(options.results.glob("*.history.jsonl"))
    history = [record for path in paths for record in records.read_history(path)]
    if options.only_ours:
        history = [r for r in history if r.get("library", r.get("implementation")) == "fla_jax"]
    if options.command is None:
        print(overview(history))
        return 0
    try:
        old, new = full_hash(options.old), full_hash(options.new)
        text, within = compare(history, old, new, options.tolerance)
    except ValueError as error:
        print(f"history.py: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
