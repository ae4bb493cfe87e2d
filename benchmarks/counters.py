"""Hardware counters of the recurrences' kernels: ``python benchmarks/counters.py``, with NVIDIA's ``ncu``.

Each case is one forward and backward in a process of its own; ``ncu`` repeats each kernel until it has read
all counters. It needs a driver that lets the user read them. ``--only`` selects cases by name.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import records
from peers.ops import IMPLEMENTATIONS, Task
from recurrences.plan import BIG, LONG, WIDE
from steps.kernel_times import KINDS

KEY = records.key_of("op", "form", "implementation")
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats")
# the name of each counter in a record, in percent of its peak unless it is a number of registers
COUNTERS = {
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!\w*not_issued)(\w+)_per_issue_active\.ratio")
MIN_MS = 0.1  # shorter kernels have no record
UNIT_MS = {"ns": 1e-6, "us": 1e-3, "usecond": 1e-3, "nsecond": 1e-6, "ms": 1.0, "msecond": 1.0}


def cases() -> dict[str, Task]:
    """The measurements by name."""
    chosen = [Task(f"chunk_rwkv{version}", "chunk", WIDE, "fwd+bwd", "any-strong") for version in (7, 6)]
    chosen += [
        dataclasses.replace(chosen[0], decay="bounded"),
        dataclasses.replace(chosen[0], shape=LONG),
        dataclasses.replace(chosen[0], shape=BIG),
        dataclasses.replace(chosen[0], shape=BIG, decay="bounded"),
        dataclasses.replace(chosen[0], decay="bounded", dtype="float32"),
        dataclasses.replace(chosen[0], decay="bounded", dtype="float32", precision="tensorfloat32"),
    ]
    return {task.label: task for task in chosen}


def run_case(task: Task) -> str:
    """One forward and backward; returns the device's name."""
    from recurrences.frameworks import Jax

    framework, ours = Jax(), IMPLEMENTATIONS["ours"]
    function = framework.function(ours, task, ours.load(task))
    framework.jax.block_until_ready(function(*framework.arrays(ours, task)))
    return framework.device


def kernels(report: str) -> list[records.Record]:
    """The kernels of a report of ``ncu --csv --page raw``, in the order of their calls."""
    lines = [line for line in report.splitlines() if line.startswith('"')]
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise ValueError(f"ncu reported no kernel: {report[-500:]}")
    units, *rows = csv.DictReader(lines[head:])
    found, number = [], lambda text: float(text.replace(",", ""))
    for row in rows:
        cycles = {stall[1]: number(row[name]) for name in row if (stall := STALL.fullmatch(name))}
        total, largest = sum(cycles.values()), sorted(cycles, key=cycles.__getitem__, reverse=True)
        stalls = [(name, round(cycles[name] / total, 3)) for name in largest if name != "selected"]
        ms = number(row["gpu__time_duration.sum"]) * UNIT_MS[units["gpu__time_duration.sum"]]
        record = {"implementation": row["Kernel Name"].removesuffix("_kernel"), "ms": round(ms, 4)}
        record |= {name: number(row[metric]) for name, metric in COUNTERS.items()}
        found.append(record | {"stalls": dict(stalls[:3])})
    return found


def measure(name: str, task: Task) -> list[records.Record]:
    """The records of a case."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", *sections]
    command += ["-k", f"regex:{KINDS['recurrences']}", sys.executable, str(Path(__file__)), "--case", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"counters.py: {name}: {(done.stderr or done.stdout)[-2000:]}")
    device = re.search(r"^device: (.*)$", done.stdout, re.MULTILINE)[1]
    common = {"op": "counters", "form": name, "shape": task.shape, "decay": task.decay, "dtype": task.dtype}
    common |= {"precision": task.precision, "device": device, **records.stamp()}
    common["versions"] = records.versions(("jax", "jaxlib", "triton"))
    return [common | kernel for kernel in kernels(done.stdout) if kernel["ms"] >= MIN_MS]


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--only", default="", help="a regular expression of cases' names")
    parser.add_argument("--case", choices=cases(), metavar="NAME", help="run one case without ncu")
    options = parser.parse_args(arguments)
    if options.case:
        print(f"device: {run_case(cases()[options.case])}")
        return
    chosen = {name: task for name, task in cases().items() if re.search(options.only, name)}
    if not chosen:
        parser.error(f"--only {options.only!r} matches no case")
    if shutil.which("ncu") is None:
        parser.error("ncu is not in PATH; CUDA's toolkit has it")
    for name, task in chosen.items():
        made = measure(name, task)
        path = records.put(options.out, made[0]["device"], made, KEY)
        for r in made:
            shares = ", ".join(f"{what} {share:.0%}" for what, share in r["stalls"].items())
            print(f"{name}, {r['implementation']}: {r['ms']} ms, issue {r['issue']:.0f} %, {shares}")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
