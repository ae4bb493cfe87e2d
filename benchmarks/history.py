"""What was measured, by date and commit: one line a record, lines are only ever added.

    python benchmarks/history.py                          # the commits that were measured
    python benchmarks/history.py add                      # keeps the results files' new records
    python benchmarks/history.py compare 26a202a HEAD     # fails where something is slower by more than 5 %

A results file (``records.py``) holds the newest record of each measurement, the history beside it
(``<device>.history.jsonl``) every one. Every benchmark adds what it writes; ``add`` is for files that came
from elsewhere. Commits are compared by their fastest records: what slows a machine down for a while is no
change of the code. A measurement is the same where op, form, implementation, shape, dtype, pass, decay and
the other settings are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import records

SETTINGS = (
    *("device", "op", "form", "library", "implementation", "model", "shape", "dtype", "pass", "decay"),
    *("precision", "remat", "scan", "optimizer", "what", "version", "batch", "vocab", "weights", "state"),
)
DERIVED = ("peer", "peer_ms", "ratio")  # what a record says of others of its run
LIMIT = 0.05


def path_of(results: Path) -> Path:
    """The history of a results file."""
    return results.with_name(f"{results.stem}.history.jsonl")


def read(path: Path) -> list[records.Record]:
    """The records of a history, oldest first; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, rows: Iterable[records.Record]) -> int:
    """Adds the measurements that a history lacks to its end, and says how many these were."""
    measured = [
        json.dumps({name: value for name, value in row.items() if name not in DERIVED}, allow_nan=False)
        for row in rows
        if "ms" in row
    ]
    known = set(path.read_text().splitlines()) if path.exists() else set()
    new = [line for line in dict.fromkeys(measured) if line not in known]
    if new:
        with path.open("a") as file:
            file.write("".join(line + "\n" for line in new))
    return len(new)


def key(row: records.Record) -> str:
    """What a record measured, as text."""
    return json.dumps({name: row[name] for name in SETTINGS if row.get(name) is not None})


def title(row: records.Record) -> str:
    """What a record measured, for people."""
    shape = " ".join(map(str, row["shape"])) if isinstance(row.get("shape"), list) else row.get("shape")
    words = [row.get(name) for name in ("op", "form", "library", "implementation")] + [shape]
    words += [row.get(name) for name in ("dtype", "pass", "decay")]
    if "batch" in row:
        words += [f"RWKV-{row['version']} {row['model']}", f"{row['batch']} rows"]
    return ", ".join(str(word) for word in words if word is not None)


def of_commit(rows: Iterable[records.Record], commit: str) -> dict[str, records.Record]:
    """The fastest record of each measurement of a commit, named by the beginning of its hash.

    What was measured with changes that are in no commit counts only where the name ends in ``+changes`` too.
    """
    found: dict[str, records.Record] = {}
    for row in rows:
        (one, _, changes), (name, _, wanted) = row["commit"].partition("+"), commit.partition("+")
        if changes == wanted and (one.startswith(name) or name.startswith(one)):
            before = found.setdefault(key(row), row)
            if row["ms"] < before["ms"]:
                found[key(row)] = row
    return found


def compare(rows: list[records.Record], old: str, new: str, limit: float = LIMIT) -> tuple[str, bool]:
    """A table of what both commits measured, and whether nothing is slower by more than ``limit``.

    Raises:
        ValueError: nothing was measured by both.
    """
    before, after = of_commit(rows, old), of_commit(rows, new)
    both = [one for one in after if one in before]
    if not both:
        what = f"{old} ({len(before)} measurements) and {new} ({len(after)}) have none in common"
        raise ValueError(f"{what}; the history has {', '.join(sorted({row['commit'] for row in rows}))}")
    lines, fine = [], True
    for one in sorted(both, key=lambda one: -after[one]["ms"] / before[one]["ms"]):
        a, b = before[one]["ms"], after[one]["ms"]
        slower = b > (1 + limit) * a
        fine &= not slower
        lines.append(f"{b / a:6.3f}  {a:9.4g} ms -> {b:9.4g} ms  {title(after[one])}{'  SLOWER' * slower}")
    return "\n".join(lines), fine


def overview(rows: list[records.Record]) -> str:
    """The commits, by the date of their first record."""
    found: dict[tuple[str, str], list[records.Record]] = {}
    for row in rows:
        found.setdefault((row["commit"], row.get("device", "unknown")), []).append(row)
    lines = [f"{min(r['run'] for r in v)[:16]}  {c:16} {d}: {len(v)} records" for (c, d), v in found.items()]
    return "\n".join(sorted(lines))


def full(commit: str) -> str:
    """The hash of a commit that git knows by another name, such as HEAD; else as it is."""
    command = ["git", "-C", str(records.ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or commit
    except OSError:  # there is no git
        return commit


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; the exit status is 1 where something is slower, 2 where there is nothing to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=records.RESULTS, help="folder of the results files")
    parser.add_argument("--only-ours", action="store_true", help="compare this library's records alone")
    commands: Any = parser.add_subparsers(dest="command")
    commands.add_parser("add", help="keep the results files' new records")
    comparing = commands.add_parser("compare", help="two commits, by their fastest records")
    comparing.add_argument("old")
    comparing.add_argument("new")
    comparing.add_argument("--limit", type=float, default=LIMIT, help="share that may be lost; default 0.05")
    options = parser.parse_args(arguments)
    if options.command == "add":
        for results in sorted(options.results.glob("*.json")):
            print(f"{path_of(results)}: {add(path_of(results), records.read(results))} new records")
        return 0
    rows = [row for path in sorted(options.results.glob("*.history.jsonl")) for row in read(path)]
    if options.only_ours:
        rows = [row for row in rows if row.get("library", row.get("implementation")) == "fla_jax"]
    if options.command is None:
        print(overview(rows))
        return 0
    try:
        text, fine = compare(rows, full(options.old), full(options.new), options.limit)
    except ValueError as error:
        print(f"history.py: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
