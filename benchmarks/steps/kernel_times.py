"""A profile of some steps: the time of their kernels, summed by name."""

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


class Kernel(NamedTuple):
    """All calls of the kernels of one name."""

    name: str
    ms: float
    calls: int


def kernels(folder: Path) -> list[Kernel]:
    """The kernels of the newest profile of a folder, by name without XLA's numbers, the longest first.

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
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            times[re.sub(r"([._]\d+)+$", "", event["name"])].append(event["dur"] / 1e3)
    found = [Kernel(name, sum(each), len(each)) for name, each in times.items()]
    return sorted(found, key=lambda kernel: -kernel.ms)


def by_kind(found: Iterable[Kernel]) -> dict[str, float]:
    """Milliseconds by `KINDS`."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in found:
        kinds = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.name, re.I))
        sums[next(kinds)] += kernel.ms
    return dict(sums)


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
    """Profiles steps into a folder; returns milliseconds a step and device by kind of kernel."""
    import jax

    jax.profiler.start_trace(str(folder))
    jax.block_until_ready([step() for _ in range(STEPS)])
    jax.profiler.stop_trace()
    found, steps = kernels(folder), STEPS * devices
    (folder / "kernels.txt").write_text(table(found, steps) + "\n")
    return {kind: round(ms / steps, 3) for kind, ms in by_kind(found).items()}
