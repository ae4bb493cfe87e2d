"""Records of measurements: the results file of a device and the history beside it.

``<device>.json`` has the newest record of each measurement, ``<device>.history.jsonl`` all, a line each.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SETTINGS = (
    *("device", "op", "form", "library", "implementation", "model", "shape", "dtype", "pass", "decay"),
    *("precision", "remat", "scan", "optimizer", "what", "version", "batch", "vocab", "weights", "state"),
    *("mode", "devices", "reshard_after_forward"),
)
RELATIVE = ("peer", "peer_ms", "ratio")  # fields that compare a record with others of its run
Record = dict[str, Any]
Key = Callable[[Record], Any]


def commit() -> str:
    """The commit that runs, with ``+changes`` if tracked files differ; ``FLA_JAX_COMMIT`` overrides it."""
    if given := os.environ.get("FLA_JAX_COMMIT"):
        return given

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    changed = head and git("status", "--porcelain", "--untracked-files=no")
    return head + "+changes" * bool(changed) or "unknown"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def stamp() -> dict[str, str]:
    """The commit and the time of a run."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "run": now}


def path_of(device: str, folder: Path = RESULTS) -> Path:
    """The results file of a device."""
    return folder / f"{device.lower().replace(' ', '-')}.json"


def read(path: Path) -> list[Record]:
    """The records of a results file, none if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else []


def write(path: Path, records: list[Record]) -> None:
    """Replaces the file as a whole, so that a killed process loses nothing, and adds to its history."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n")
    new.replace(path)
    add_to_history(history_of(path), records)


def history_of(results: Path) -> Path:
    """The history of a results file."""
    return results.with_name(f"{results.stem}.history.jsonl")


def read_history(path: Path) -> list[Record]:
    """The records of a history, oldest first, none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_to_history(path: Path, records: Iterable[Record]) -> int:
    """Appends the measurements that a history lacks and returns their number."""
    lines = []
    for record in records:
        if "ms" in record:
            facts = {name: value for name, value in record.items() if name not in RELATIVE}
            lines.append(json.dumps(facts, allow_nan=False))
    known = set(path.read_text().splitlines()) if path.exists() else set()
    new = [line for line in dict.fromkeys(lines) if line not in known]
    if new:
        with path.open("a") as file:
            file.write("".join(line + "\n" for line in new))
    return len(new)


def measurement(record: Record) -> str:
    """The settings of a record as text: equal for two records of one measurement."""
    return json.dumps({name: record[name] for name in SETTINGS if record.get(name) is not None})


def key_of(*names: str) -> Key:
    """A function that tells which records replace each other: those with equal values under these names."""
    return lambda record: json.dumps([record.get(name) for name in names], sort_keys=True)


def merged(old: list[Record], new: list[Record], key: Key) -> list[Record]:
    """``old`` without the records whose keys are in ``new``, then ``new``."""
    keys = {key(record) for record in new}
    return [record for record in old if key(record) not in keys] + new


def parser(doc: str | None, out: bool = True) -> argparse.ArgumentParser:
    """A command's parser, with ``--out`` if it writes results."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        text = "results file; default: <device>.json in $OUT if that is set, else in benchmarks/results"
        made.add_argument("--out", type=Path, help=text)
    return made


def results_path(out: Path | None, device: str) -> Path:
    """The results file of a run: ``--out``, else the device's in ``$OUT`` or benchmarks/results."""
    return out or path_of(device, Path(os.environ.get("OUT") or RESULTS))


def put(
    out: Path | None,
    device: str,
    records: list[Record],
    key: Key,
    keep: Callable[[Record], bool] = lambda record: True,
) -> Path:
    """Writes records in place of those with equal keys; ``keep`` tells which others stay.

    A new file in ``$OUT`` starts with the repository's records.
    """
    path = results_path(out, device)
    base = read(path) or (read(path_of(device)) if out is None else [])
    write(path, merged([record for record in base if keep(record)], records, key))
    return path


def fill_peers(measured: list[Record], task: Key, is_peer: Callable[[Record], bool]) -> None:
    """Fills in the fastest peer of the same task of each of our records, and our time over its."""
    for ours in (r for r in measured if r["library"] == "fla_jax"):
        peers = [r for r in measured if r["library"] != "fla_jax" and task(r) == task(ours) and is_peer(r)]
        if peers:
            best = min(peers, key=lambda r: r["ms"])
            ratio = max(ours["ms"], ours.get("ms_end", 0.0)) / best["ms"]
            ours.update(peer=best["implementation"], peer_ms=best["ms"], ratio=ratio)


def table(measured: Iterable[Record], columns: Mapping[str, str | Callable[[Record], Any]]) -> str:
    """Records as aligned text. A column is ``"field:format"`` or a function; None becomes ``-``."""

    def cell(record: Record, column: str | Callable[[Record], Any]) -> str:
        if not isinstance(column, str):
            value = column(record)
            return "-" if value is None else str(value)
        name, _, form = column.partition(":")
        value = record.get(name)
        return "-" if value is None else format(value, form)

    lines = [list(columns), *([cell(record, column) for column in columns.values()] for record in measured)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def report(text: str, skipped: Iterable[str], path: Path) -> None:
    """The end of a command's output."""
    print(f"\n{text}" if text else "nothing was measured")
    for line in skipped:
        print(f"skipped: {line}")
    print(f"results: {path}")
