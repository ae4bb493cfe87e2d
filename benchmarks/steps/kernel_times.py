"""A profile of some steps: the time of their kernels by name, and what nothing hides."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from records import table as text_table

STEPS = 3
# the first pattern that matches counts
KINDS = {
    "products": r"gemm|nvjet|cutlass|cublas|xmma|splitK",
    "recurrences": r"rwkv[67]_|state_passing_kernel|state_grad_kernel",
    "layer operations": r"^(mix|norm|statistics|keys|readout)\w*_kernel",
    "collectives": r"nccl",
    "copies": r"memcpy|memset|copy",
    "reductions": r"reduce",
    "other fusions": r"",
}


class Event(NamedTuple):
    """A kernel that ran: its name without XLA's numbers, and when, in milliseconds."""

    device: int
    name: str
    begin: float
    end: float


class Kernel(NamedTuple):
    """All calls of the kernels of one name."""

    name: str
    ms: float
    calls: int


def events_of(folder: Path) -> list[Event]:
    """The kernels of the newest profile of a folder.

    Raises:
        FileNotFoundError: the folder has no ``*.trace.json.gz``.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder} has no profile (*.trace.json.gz)")
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"].get("name", "")
        for event in events
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name")
    }
    devices = {pid for (_, pid, _), name in names.items() if "/device:GPU" in name}
    # other lines of a device repeat the same by operation or module
    streams = {
        (pid, tid)
        for (what, pid, tid), name in names.items()
        if what == "thread_name" and pid in devices and name.startswith("Stream")
    }
    return [
        Event(
            event["pid"],
            re.sub(r"([._]\d+)+$", "", event["name"]),
            event["ts"] / 1e3,
            (event["ts"] + event["dur"]) / 1e3,
        )
        for event in events
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams
    ]


def kernels(events: Iterable[Event]) -> list[Kernel]:
    """The events by name, the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.end - event.begin)
    found = [Kernel(name, sum(each), len(each)) for name, each in times.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)


def not_hidden(events: Iterable[Event]) -> dict[str, float]:
    """Milliseconds, summed over devices, in which only collectives ran, and in which nothing did."""
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    alone = idle = 0.0
    for ran in by_device.values():
        busy = _covered(ran)
        alone += busy - _covered(x for x in ran if _kind(x.name) != "collectives")
        idle += max(x.end for x in ran) - min(x.begin for x in ran) - busy
    return {"collectives alone": alone, "idle": idle}


def _covered(events: Iterable[Event]) -> float:
    """Milliseconds in which at least one event ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.begin):
        total += max(0.0, event.end - max(event.begin, until))
        until = max(until, event.end)
    return total


def by_kind(found: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds by `KINDS`."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in found:
        sums[_kind(kernel.name)] += kernel.ms
    return dict(sums)


def _kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I))


def table(found: list[Kernel], steps: int) -> str:
    """Milliseconds a step as text: kinds, then names."""
    total = sum(kernel.ms for kernel in found) or 1.0
    kinds = [Kernel(f"all {kind}", ms, 0) for kind, ms in by_kind(found).items()]
    columns = {
        "ms a step": lambda r: f"{r['ms'] / steps:.3f}",
        "share": lambda r: f"{r['ms'] / total:.1%}",
        "calls": lambda r: f"{r['calls'] / steps:g}" if r["calls"] else "",
        "kernel": "name",
    }
    return text_table([kernel._asdict() for kernel in (*kinds, *found)], columns)


def profiled(folder: Path, step: Callable[[], object], devices: int = 1) -> dict[str, float]:
    """Profiles steps into a folder; returns milliseconds a step and device by kind, and `not_hidden`."""
    import jax

    jax.profiler.start_trace(str(folder))
    jax.block_until_ready([step() for _ in range(STEPS)])
    jax.profiler.stop_trace()
    events, steps = events_of(folder), STEPS * devices
    found, alone = kernels(events), not_hidden(events)
    lines = [f"{what}: {ms / steps:.3f} ms a step" for what, ms in alone.items()]
    (folder / "kernels.txt").write_text("\n".join([*lines, table(found, steps)]) + "\n")
    return {kind: round(ms / steps, 3) for kind, ms in (by_kind(found) | alone).items()}
