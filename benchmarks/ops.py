"""Times this library's ops beside every peer that can be imported, in one run on one GPU:
``python benchmarks/ops.py``.

Prints a table and writes ``benchmarks/results/<device>.json`` (`records`), after every measurement, so that a
run that is cut short keeps what it has. `chart.py` draws it. Every implementation runs in a process of its
own, one after another: for each op ours, then its peers, FLA's RWKV-7 last (it tunes itself for minutes), and
the main shapes of ours once more at the end: where the two differ by more than 3 %, the record has both
(``ms``, ``ms_end``) and the ratio is of the slower. What compiles with nvcc or has hundreds of Triton
configurations to try does so before anything is timed, all at once. Peers are imported from where Python
finds them (PYTHONPATH).

Decays: "bounded" is w = -exp(-0.5) * sigmoid(x) under the promise ``lower_bound=-0.61``; "any-weak" the same
decays without it; "any-strong" w = -exp(2 x). The peer of a record of ours is the fastest one of the same op,
form, shape, pass and decays (the first two kinds have the same), ``ratio`` our time over its.

``roofline_ms``: the bytes that must move at the rate of a device copy, each array once a pass: forward, the
tokens' arrays read, o written, a state read and one written; backward, the tokens' arrays and do read, their
gradients written, both states read again and one written. RWKV-7 has 6 token arrays, RWKV-6 4.

    python benchmarks/ops.py --quick --no-peers                   # seconds, on a CPU too python
    benchmarks/ops.py --only 'rwkv7 chunk' --budget 580    # records of several runs of a commit come together
    in the file
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import records
import tuning
from peers import IMPLEMENTATIONS, Task

BANDWIDTH = {"NVIDIA H200": 4.3e12}  # bytes a second, read and written, of a device copy
OPS = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
WIDE, LONG, SMALL, BIG = (
    (8, 4096, 64, 64, 64),
    (1, 32768, 64, 64, 64),
    (1, 4096, 32, 64, 64),
    (4, 8192, 32, 128, 128),
)
DECODE, QUICK = (512, 1, 64, 64, 64), (1, 64, 2, 64, 64)
PASSES = ("fwd+bwd", "fwd")
KEY = ("op", "form", "implementation", "shape", "dtype", "pass", "decay")
Job = tuple[str, Task]  # key of IMPLEMENTATIONS, task


def chunk(version: int, shapes: list[tuple[int, ...]], *decays: str) -> list[Task]:
    return [
        Task(f"chunk_rwkv{version}", "chunk", shape, passes, decay)
        for shape in shapes
        for decay in decays
        for passes in PASSES
    ]  # type: ignore[arg-type]


def recurrent(version: int, shape: tuple[int, ...], *passes: str) -> list[Task]:
    return [Task(f"fused_recurrent_rwkv{version}", "recurrent", shape, one, "any-weak") for one in passes]  # type: ignore[arg-type]


def decode(version: int, shape: tuple[int, ...]) -> list[Task]:
    return [Task(f"fused_recurrent_rwkv{version}", "decode", shape, "fwd", "any-weak")]  # type: ignore[arg-type]


def plan(quick: bool) -> tuple[list[Job], list[Job]]:
    """All jobs in the order in which they run, and those of ours that run again at the end."""
    wide, every, three, step = WIDE, [WIDE, LONG, SMALL, BIG], [WIDE, LONG, SMALL], DECODE
    if quick:
        wide, every, three, step = QUICK, [QUICK], [QUICK], (2, 1, 2, 64, 64)
    jobs: list[Job] = []
    add = lambda key, tasks: jobs.extend((key, task) for task in tasks)
    others = [shape for shape in every if shape != wide]
    add("ours", chunk(7, [wide], "bounded", "any-weak", "any-strong") + chunk(7, others, "bounded"))
    add("ours", [task for task in chunk(7, others, "any-strong") if task.backward])
    add("wind", chunk(7, [s for s in every if s[3] == 64], "bounded"))
    add("wind", chunk(7, [s for s in every if s[3] != 64], "bounded"))
    add("jla bounded", chunk(7, every, "bounded"))
    add("jla", chunk(7, every, "any-weak") + chunk(7, [wide], "any-strong"))
    add("rwkv-ops triton", chunk(7, [wide], "any-weak", "any-strong"))
    add("rwkv-ops cuda", chunk(7, [s for s in every if s[3] == 64], "any-weak"))
    add(
        "ours",
        chunk(6, [wide], "any-strong", "any-weak", "bounded")
        + chunk(6, [s for s in three if s != wide], "any-strong"),
    )
    add("jla 6", chunk(6, three, "any-strong") + chunk(6, [wide], "any-weak"))
    add("rwkv-ops cuda 6", chunk(6, [s for s in three if s[1] <= 4096], "any-strong"))
    add("fla 6", chunk(6, three, "any-strong") + chunk(6, [wide], "any-weak"))
    add("fla 6 chunk 64", chunk(6, three, "any-strong"))
    add("ours", recurrent(7, wide, *PASSES) + recurrent(6, wide, *PASSES))
    for version in (7, 6):
        for key in ("ours", "ours reference", "ours xla", "copy"):
            add(key, decode(version, step))
    add("wind backstepping", recurrent(7, wide, *PASSES))
    add("fla recurrent 6", recurrent(6, wide, *PASSES) + decode(6, step))
    add("fla recurrent 7", recurrent(7, wide, "fwd") + decode(7, step))
    add("fla 7", chunk(7, every, "bounded"))
    add("fla 7 layer", chunk(7, [wide], "bounded"))
    add("fla 7 default", chunk(7, [wide], "any-weak", "any-strong"))
    add("fla 7 safe", chunk(7, [wide], "any-weak"))
    if quick:  # less to compile
        jobs = [
            (key, task) for key, task in jobs if (key, task.form, task.decay) != ("ours", "chunk", "any-weak")
        ]
    main = [(key, task) for key, task in jobs if key == "ours" and task.form == "chunk" and task.backward]
    again = [
        (key, task) for key, task in main if task.decay == ("bounded" if task.version == 7 else "any-strong")
    ]
    return jobs, [] if quick else again


def group(job: Job) -> str:
    """The process of a job: one an op of ours, near to its peers; one a head size where extensions are
    compiled for one and loaded by a name without it.
    """
    implementation = IMPLEMENTATIONS[job[0]]
    if implementation.group == "fla_jax":
        return f"fla_jax {job[1].op if job[1].form == 'chunk' else 'recurrent'}"
    return implementation.group + (f" D{job[1].shape[3]}" if implementation.prepare else "")


def roofline_ms(task: Task, device: str) -> float | None:
    """Milliseconds in which the bytes that must move can move; None where the bandwidth of the device is not
    known.
    """
    B, T, H, K, V = task.shape
    keys, state = {7: 5, 6: 3}[task.version], 4 * B * H * K * V
    inputs = 2 * B * T * H * (keys * K + V)
    moved = inputs + 2 * B * T * H * V + 2 * state
    if task.backward:
        moved += 2 * inputs + 2 * B * T * H * V + 3 * state
    return None if device not in BANDWIDTH else 1e3 * moved / BANDWIDTH[device]


def importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class Run:
    """The records of a run, and the file that they are in."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.records = options, list[records.Record]()
        self.deadline = time.monotonic() + options.budget if options.budget else None
        self.common = {
            "commit": records.commit(),
            "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.device = "unknown"

    @property
    def path(self) -> Path:
        return self.options.out or records.path_of(
            self.device, Path(os.environ["OUT"]) if os.environ.get("OUT") else records.RESULTS
        )

    def left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def add(self, job: Job, result: dict[str, Any], again: bool) -> None:
        """Puts a measurement into the records and the file."""
        task = job[1]
        self.device = result.pop("device", self.device)
        record = {
            "op": task.op,
            "form": task.form,
            "implementation": result["implementation"],
            "library": result["library"],
            "shape": list(task.shape),
        }
        record |= {
            "dtype": task.dtype,
            "pass": task.passes,
            "decay": task.decay,
            "ms": result["ms"],
            "roofline_ms": roofline_ms(task, self.device),
        }
        record |= (
            {"peak_gb": None, "errors": {}, "peer": None, "peer_ms": None, "ratio": None}
            | result
            | {"device": self.device, **self.common}
        )
        if again:
            before = next((r for r in self.records if self._key(r) == self._key(record)), None)
            if before is not None and abs(record["ms"] / before["ms"] - 1) > 0.03:
                before["ms_end"] = record["ms"]
        else:
            self.records = [r for r in self.records if self._key(r) != self._key(record)] + [record]
        self.save()
        print(
            f"{task.label}: {record['implementation']} {record['ms']:.3f} ms{' (again)' if again else ''}",
            flush=True,
        )

    def skip(self, job: Job, reason: str) -> None:
        """Says why a job has no measurement; one record for each peer, op and reason."""
        key, task = job
        name = IMPLEMENTATIONS[key].name
        print(f"{task.label}: {name} skipped: {reason[:300]}", flush=True)
        record = {
            "op": task.op,
            "form": task.form,
            "shape": list(task.shape),
            "pass": task.passes,
            "decay": task.decay,
            "peer": name,
            "skipped": reason,
        }
        same = lambda r: (
            "skipped" in r
            and (r["op"], r["form"], r["peer"], r["skipped"]) == (task.op, task.form, name, reason)
        )
        if not any(same(r) for r in self.records):
            self.records.append({**record, **self.common})
            self.save()

    @staticmethod
    def _key(record: records.Record) -> str:
        return json.dumps(
            [record.get(name) for name in KEY] + [record.get("peer") if "skipped" in record else None]
        )

    def save(self) -> None:
        """Ratios, then the file: what other benchmarks wrote there stays, and so does what earlier runs of
        the same commit measured and this one did not.
        """
        compare([r for r in self.records if "skipped" not in r])
        if self.device == "unknown":
            return
        base = records.read(self.path) or (
            records.read(records.path_of(self.device)) if self.options.out is None else []
        )
        kept = [r for r in base if r.get("op") not in OPS or r.get("commit") == self.common["commit"]]
        measured = {(r["op"], r["form"], r["implementation"]) for r in self.records if "skipped" not in r}
        # skipped then, measured now
        kept = [r for r in kept if "skipped" not in r or (r["op"], r["form"], r["peer"]) not in measured]
        records.write(self.path, records.merged(kept, self.records, self._key))


def compare(rows: list[records.Record]) -> None:
    """Fills in peer, peer_ms and ratio of our rows, and of a decoding step its time over that of a copy of
    the state.
    """
    data = lambda r: (r["op"], r["form"], r["shape"], r["dtype"], r["pass"], r["decay"] == "any-strong")
    for row in rows:
        if row["library"] != "fla_jax":
            continue
        same = [r for r in rows if data(r) == data(row) and r["library"] != "fla_jax"]
        ours = max(row["ms"], row.get("ms_end", 0.0))
        copy = next((r for r in same if r["implementation"] == IMPLEMENTATIONS["copy"].name), None)
        if copy is not None:
            row.update(copy_ms=copy["ms"], ratio_to_copy=ours / copy["ms"])
        best = min((r for r in same if r is not copy), key=lambda r: r["ms"], default=None)
        if best is not None:
            row.update(peer=best["implementation"], peer_ms=best["ms"], ratio=ours / best["ms"])


class Process:
    """A process with its jobs, started at once; its lines are read as they come."""

    def __init__(
        self,
        name: str,
        jobs: list[Job],
        folder: Path,
        prepare: bool = False,
        shares: tuple[int, int] | None = None,
        checked: bool = True,
    ):
        self.name, self.jobs, self.began = name, jobs, time.monotonic()
        stem = re.sub(r"\W+", "_", f"{name} prepare {shares or ''}" if prepare else name)
        self.lines, self.log, spec = folder / f"{stem}.jsonl", folder / f"{stem}.log", folder / f"{stem}.json"
        self.lines.write_text("")
        self.read = 0
        listed = [
            {
                "id": i,
                "implementation": key,
                "task": {f.name: getattr(task, f.name) for f in dataclasses.fields(task)},
            }
            for i, (key, task) in enumerate(jobs)
        ]
        spec.write_text(
            json.dumps({"jobs": listed, "prepare": prepare, "shares": shares, "checked": checked})
        )
        path = [
            str(records.ROOT),
            str(records.ROOT / "benchmarks"),
            str(records.ROOT / "tests"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        # extensions of one name and several head sizes must not share a folder; what FLA's tuning finds while
        # others run must not be kept
        environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions" / re.sub(r"\W", "_", name))
        environment["FLA_CACHE_RESULTS"] = "0"
        with open(self.log, "w") as log:
            command = [
                sys.executable,
                str(Path(__file__).with_name("peers_run.py")),
                str(spec),
                str(self.lines),
            ]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def news(self) -> list[dict[str, Any]]:
        """Complete lines that were not read yet."""
        text = self.lines.read_text()
        new, self.read = text[self.read : text.rfind("\n") + 1], text.rfind("\n") + 1
        return [json.loads(line) for line in new.splitlines()]

    def end(self) -> str:
        """Ends the process if need be and says how it ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            return f"no result within {time.monotonic() - self.began:.0f} s"
        tail = self.log.read_text(errors="replace").strip()[-300:]
        return f"the process ended with status {self.process.returncode}: {tail}"


def measure(run: Run, name: str, jobs: list[Job], folder: Path, seconds: float, again: bool = False) -> None:
    """Runs a process; after a crash, what comes after the job that crashed in another."""
    while jobs:
        if seconds < 5:
            for job in [] if again else jobs:
                run.skip(job, "no time was left")
            return
        process, open_jobs, current = Process(name, jobs, folder, checked=not again), dict(enumerate(jobs)), 0
        with contextlib.ExitStack() as stack:
            stack.callback(process.process.kill)
            while True:
                over = process.process.poll() is not None or time.monotonic() - process.began > seconds
                for line in process.news():
                    current = line.get("began", current)
                    if "id" in line:
                        job = open_jobs.pop(line["id"])
                        run.add(job, line["record"], again) if "record" in line else run.skip(
                            job, line["error"]
                        )
                if over:
                    break
                time.sleep(0.2)
        reason, crashed = process.end(), process.process.returncode != 0 and process.process.returncode != -9
        for i, job in open_jobs.items():
            if not again and (i <= current or not crashed):
                run.skip(job, reason)
        jobs = [job for i, job in open_jobs.items() if i > current] if crashed else []
        seconds -= time.monotonic() - process.began


def prepare(jobs: dict[str, list[Job]], folder: Path, seconds: float) -> None:
    """Lets all that compile or tune for long do so, at the same time and before anything is timed."""
    chosen: dict[str, list[Job]] = {}
    for name, group_jobs in jobs.items():
        seen = {}
        for key, task in group_jobs:
            if IMPLEMENTATIONS[key].prepare:
                # kernels are compiled for one number and size of heads
                seen.setdefault((key, task.form != "chunk", task.shape[2:]), (key, task))
        if seen:
            chosen[name] = list(seen.values())
    if not chosen:
        return
    began = time.monotonic()
    print(f"compiling: {', '.join(chosen)} ...", flush=True)
    tuned = [
        name for name, group_jobs in chosen.items() if IMPLEMENTATIONS[group_jobs[0][0]].package == "fla"
    ]
    # hundreds of configurations a variant, a core each
    shares = max(1, (os.cpu_count() or 1) // max(1, len(tuned)))
    processes = [
        Process(name, chosen[name], folder, True, (i, shares)) for name in tuned for i in range(shares)
    ]
    processes += [
        Process(name, group_jobs, folder, True) for name, group_jobs in chosen.items() if name not in tuned
    ]
    late = [
        p
        for p, is_late in zip(
            processes, tuning.wait([p.process for p in processes], began + seconds - time.monotonic())
        )
        if is_late
    ]
    print(
        f"  {time.monotonic() - began:.0f} s, not done: {len(late)} of {len(processes)} processes "
        f"{sorted({p.name for p in late})}",
        flush=True,
    )


def table(rows: list[records.Record]) -> str:
    """The records as text, ours first for each shape and pass."""
    number = lambda x, form: "-" if x is None else format(x, form)
    columns = (
        "op",
        "shape",
        "pass",
        "decay",
        "implementation",
        "ms",
        "floor",
        "GB",
        "o",
        "worst grad",
        "ratio",
    )
    lines = [columns]
    for r in sorted(
        rows,
        key=lambda r: (
            OPS.index(r["op"]),
            r["form"],
            str(r["shape"]),
            r["pass"],
            r["library"] != "fla_jax",
            r["ms"],
        ),
    ):
        e = r["errors"]
        name = f"fla_jax {r['implementation']}" if r["library"] == "fla_jax" else r["implementation"]
        ratio = number(r["ratio"], ".2f") if "ratio_to_copy" not in r else f"{r['ratio_to_copy']:.2f} of copy"
        ms = f"{r['ms']:.3f}" + (f" / {r['ms_end']:.3f}" if "ms_end" in r else "")
        cells = (
            r["op"],
            "x".join(map(str, r["shape"])),
            r["pass"],
            r["decay"],
            name,
            ms,
            number(r["roofline_ms"], ".3f"),
            number(r["peak_gb"], ".2f"),
        )
        error = lambda name, e=e, r=r: (
            "not finite"
            if name in (r.get("note") or "").partition("not finite")[2]
            else number(e.get(name), ".1e")
        )
        lines.append((*cells, error("o"), error("worst_gradient"), ratio))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, for a smoke test; times mean nothing"
    )
    parser.add_argument(
        "--only",
        type=re.compile,
        help="regular expression: of 'op form shape pass decay implementation', what to measure",
    )
    parser.add_argument("--no-peers", action="store_true", help="only this library")
    parser.add_argument(
        "--out",
        type=Path,
        help="results file; default: <device>.json in $OUT if that is set, else in benchmarks/results",
    )
    parser.add_argument(
        "--budget", type=float, help="seconds for everything; what does not fit is recorded as skipped"
    )
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process; default 240")
    options = parser.parse_args(arguments)
    wanted = lambda job: (
        options.only is None or options.only.search(f"{job[1].label} {job[0]} {IMPLEMENTATIONS[job[0]].name}")
    )
    mine = lambda job: IMPLEMENTATIONS[job[0]].group == "fla_jax"
    everything, again = (
        [job for job in part if wanted(job) and (mine(job) or not options.no_peers)]
        for part in plan(options.quick)
    )
    run, groups = Run(options), dict[str, list[Job]]()
    for job in everything:
        if importable(IMPLEMENTATIONS[job[0]].package) or mine(job):
            groups.setdefault(group(job), []).append(job)
        else:
            run.skip(job, f"package {IMPLEMENTATIONS[job[0]].package} is not installed")
    folder = Path(tempfile.gettempdir()) / f"fla_jax-benchmark-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    prepare(groups, folder, min(180, run.left() / 3))
    reserve = 10 + 4 * len(again) if again else 0
    for name, jobs in groups.items():
        measure(run, name, jobs, folder, min(options.timeout, run.left() - reserve - 5))
    measure(run, "fla_jax again", again, folder, min(options.timeout, run.left() - 2), again=True)
    rows = [r for r in run.records if "skipped" not in r]
    run.save()
    print("\n" + table(rows) if rows else "nothing was measured")
    for r in run.records:
        if "skipped" in r:
            print(f"skipped: {r['peer']} ({r['op']}): {r['skipped'][:200]}")
    print(f"results: {run.path}")


if __name__ == "__main__":
    main()
