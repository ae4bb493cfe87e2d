"""The records of a run of ops.py: written after every measurement, and as a table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import records
from peers.ops import IMPLEMENTATIONS
from records import Record

from recurrences.plan import OPS, Job, roofline_ms

KEY = ("op", "form", "implementation", "shape", "dtype", "precision", "pass", "decay")


class Run:
    """The records of a run and the file that they are in."""

    def __init__(self, out: Path | None, budget: float | None):
        self.out, self.records = out, list[Record]()
        self.deadline = time.monotonic() + budget if budget else None
        self.common = records.stamp()
        self.device = "unknown"

    @property
    def path(self) -> Path:
        return records.results_path(self.out, self.device)

    def seconds_left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def measured(self) -> list[Record]:
        return [r for r in self.records if "skipped" not in r]

    def add(self, job: Job, result: dict[str, Any], again: bool) -> None:
        """Adds a measurement. The second one of a job only counts if it differs by more than 3 %."""
        task = job[1]
        self.device = result.pop("device", self.device)
        record = {"op": task.op, "form": task.form}
        record |= {name: result[name] for name in ("implementation", "library")}
        record |= {"shape": list(task.shape), "dtype": task.dtype, "pass": task.passes, "decay": task.decay}
        record |= {} if task.precision is None else {"precision": task.precision}
        record |= {"ms": result["ms"], "roofline_ms": roofline_ms(task, self.device)}
        record |= {"peak_gb": None, "errors": {}, "peer": None, "peer_ms": None, "ratio": None}
        record |= result | {"device": self.device, **self.common}
        same = [r for r in self.records if self._key(r) == self._key(record)]
        if not again:
            self.records = [r for r in self.records if r not in same] + [record]
        elif same and abs(record["ms"] / same[0]["ms"] - 1) > 0.03:
            same[0]["ms_end"] = record["ms"]
        self.save()
        text = f"{task.label}: {record['implementation']} {record['ms']:.3f} ms"
        print(f"{text}{' (again)' if again else ''}", flush=True)

    def skip(self, job: Job, reason: str) -> None:
        """Records why a job has no measurement, once for each peer, op and reason."""
        key, task = job
        name = IMPLEMENTATIONS[key].name
        print(f"{task.label}: {name} skipped: {reason[:300]}", flush=True)
        record = {"op": task.op, "form": task.form, "shape": list(task.shape), "pass": task.passes}
        record |= {"decay": task.decay, "peer": name, "skipped": reason}
        same = ("op", "form", "peer", "skipped")
        if not any(all(r.get(name) == record[name] for name in same) for r in self.records):
            self.records.append({**record, **self.common})
            self.save()

    @staticmethod
    def _key(record: Record) -> str:
        peer = record.get("peer") if "skipped" in record else None
        return json.dumps([*(record.get(name) for name in KEY), peer])

    def save(self) -> None:
        """Fills in ratios and writes the file; other records stay, and those of ops of the same commit."""
        compare(self.measured())
        if self.device == "unknown":
            return
        measured = {(r["op"], r["form"], r["implementation"]) for r in self.measured()}

        def keep(r: Record) -> bool:
            if r.get("op") in OPS and r.get("commit") != self.common["commit"]:
                return False
            # an earlier run may have skipped what this one measured
            return "skipped" not in r or (r["op"], r.get("form"), r.get("peer")) not in measured

        records.put(self.out, self.device, self.records, self._key, keep)


def not_finite(r: Record) -> list[str]:
    """The results of a record that are not finite, from its note (`worker.as_json`)."""
    return (r.get("note") or "").partition("not finite: ")[2].partition(";")[0].split(", ")


def is_peer(r: Record) -> bool:
    """Whether the results of the pass that was timed are finite."""
    bad = not_finite(r)
    return not ({"o", "final_state"} & set(bad) if r["pass"] == "fwd" else any(bad))


def task_of(r: Record) -> tuple[Any, ...]:
    """Op, form, shape, dtype, precision and pass; "bounded" and "any-weak" have equal decays."""
    settings = r["shape"], r["dtype"], r.get("precision"), r["pass"]
    return r["op"], r["form"], *settings, r["decay"] == "any-strong"


def compare(measured: list[Record]) -> None:
    """Fills in the peers of our records, and of a decoding step its ratio to a copy of the state."""
    copies = [r for r in measured if r["implementation"] == IMPLEMENTATIONS["copy"].name]
    records.fill_peers(measured, task_of, lambda r: r not in copies and is_peer(r))
    for record in (r for r in measured if r["library"] == "fla_jax"):
        for copy in (r for r in copies if task_of(r) == task_of(record)):
            ours = max(record["ms"], record.get("ms_end", 0.0))
            record.update(copy_ms=copy["ms"], ratio_to_copy=ours / copy["ms"])


def table(measured: list[Record]) -> str:
    """The records as text, ours first for each shape and pass."""

    def error(name: str) -> Any:
        number = lambda r: None if r["errors"].get(name) is None else f"{r['errors'][name]:.1e}"
        return lambda r: "not finite" if name in not_finite(r) else number(r)

    def order(r: Record) -> tuple[Any, ...]:
        op = OPS.index(r["op"])
        return op, r["form"], str(r["shape"]), r["pass"], r["library"] != "fla_jax", r["ms"]

    def ratio(r: Record) -> str | None:
        if "ratio_to_copy" in r:
            return f"{r['ratio_to_copy']:.2f} of copy"
        return None if r["ratio"] is None else f"{r['ratio']:.2f}"

    columns = {
        **{name: name for name in ("op", "dtype", "pass", "decay")},
        "shape": lambda r: "x".join(map(str, r["shape"])),
        "implementation": lambda r: "fla_jax " * (r["library"] == "fla_jax") + r["implementation"],
        "ms": lambda r: f"{r['ms']:.3f}" + (f" / {r['ms_end']:.3f}" if "ms_end" in r else ""),
        "floor": "roofline_ms:.3f",
        "GB": "peak_gb:.2f",
        "o": error("o"),
        "worst grad": error("worst_gradient"),
        "ratio": ratio,
    }
    return records.table(sorted(measured, key=order), columns)
