"""The records of a run of ops.py: into the file after every measurement, and as a table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import records
from running import results

from recurrences.peers import IMPLEMENTATIONS
from recurrences.plan import OPS, Job, roofline_ms

KEY = ("op", "form", "implementation", "shape", "dtype", "pass", "decay")


class Run:
    """The records of a run, and the file that they are in."""

    def __init__(self, out: Path | None, budget: float | None):
        self.out, self.records = out, list[records.Record]()
        self.deadline = time.monotonic() + budget if budget else None
        self.common = results.stamp()
        self.device = "unknown"

    @property
    def path(self) -> Path:
        return results.path_of(self.out, self.device)

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
        one = (task.op, task.form, name, reason)
        said = [(r["op"], r["form"], r["peer"], r["skipped"]) for r in self.records if "skipped" in r]
        if one not in said:
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
        measured = {(r["op"], r["form"], r["implementation"]) for r in self.records if "skipped" not in r}

        def keep(r: records.Record) -> bool:
            if r.get("op") in OPS and r.get("commit") != self.common["commit"]:
                return False
            # else it may have been skipped then and measured now
            return "skipped" not in r or (r["op"], r.get("form"), r.get("peer")) not in measured

        results.put(self.out, self.device, self.records, self._key, keep)


def not_finite(r: records.Record) -> list[str]:
    """The errors of a record that are none, for the results were not finite: `child.plain` notes them."""
    return (r.get("note") or "").partition("not finite: ")[2].partition(";")[0].split(", ")


def counts(r: records.Record) -> bool:
    """Whether a peer gives all that its time is the time of."""
    bad = not_finite(r)
    return not ({"o", "final_state"} & set(bad) if r["pass"] == "fwd" else any(bad))


def compare(rows: list[records.Record]) -> None:
    """Fills in peer, peer_ms and ratio of our rows, and of a decoding step its time over that of a copy of
    the state.
    """

    def data(r: records.Record) -> tuple[Any, ...]:
        return r["op"], r["form"], r["shape"], r["dtype"], r["pass"], r["decay"] == "any-strong"

    for row in rows:
        if row["library"] != "fla_jax":
            continue
        same = [r for r in rows if data(r) == data(row) and r["library"] != "fla_jax"]
        ours = max(row["ms"], row.get("ms_end", 0.0))
        copy = next((r for r in same if r["implementation"] == IMPLEMENTATIONS["copy"].name), None)
        if copy is not None:
            row.update(copy_ms=copy["ms"], ratio_to_copy=ours / copy["ms"])
        best = min((r for r in same if r is not copy and counts(r)), key=lambda r: r["ms"], default=None)
        if best is not None:
            row.update(peer=best["implementation"], peer_ms=best["ms"], ratio=ours / best["ms"])


def table(rows: list[records.Record]) -> str:
    """The records as text, ours first for each shape and pass."""

    def number(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    def error(r: records.Record, name: str) -> str:
        if name in not_finite(r):
            return "not finite"
        return number(r["errors"].get(name), ".1e")

    columns = (
        "op",
        "shape",
        "dtype",
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
        name = f"fla_jax {r['implementation']}" if r["library"] == "fla_jax" else r["implementation"]
        ratio = number(r["ratio"], ".2f") if "ratio_to_copy" not in r else f"{r['ratio_to_copy']:.2f} of copy"
        ms = f"{r['ms']:.3f}" + (f" / {r['ms_end']:.3f}" if "ms_end" in r else "")
        cells = (
            r["op"],
            "x".join(map(str, r["shape"])),
            r["dtype"],
            r["pass"],
            r["decay"],
            name,
            ms,
            number(r["roofline_ms"], ".3f"),
            number(r["peak_gb"], ".2f"),
        )
        lines.append((*cells, error(r, "o"), error(r, "worst_gradient"), ratio))
    return results.table(lines)
