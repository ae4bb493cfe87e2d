"""Times the fused pieces around the recurrences beside plain JAX and FLA's: ``python benchmarks/layers.py``.

Prints a table and puts its records into ``benchmarks/results/<device>.json`` (`records`). A piece is bound by
memory: the table has the bytes that must move, each array once, over the time (``GB/s``), and that over the
best rate of several kinds and sizes of copies measured in the same run (``of copy``); the head is bound by
its products, and has TFLOP/s. Four calls of ours are one program, as in a model (`pieces.ours`). Peers run in
a process of their own, with torch, where they can be imported, their calls queued one by one; a ratio is our
time over theirs. ``--sweep`` tries launches of our kernels instead, and records nothing.

    python benchmarks/layers.py --quick                    # tiny sizes, seconds on a CPU; times mean nothing
    python benchmarks/layers.py --only attention --shapes 8x4096x1024
    python benchmarks/layers.py --only keys --shapes 8x4096x1024 --sweep
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import records
from pieces import launches, ours
from pieces.piece import PIECES, Piece, Shape
from running import copies, processes, results

SHAPES = ((8, 4096, 1024), (4, 4096, 2048), (2, 4096, 4096))  # B, T, C
QUICK = ((2, 16, 32),)
KEY = results.key_of(("op", "form", "implementation", "shape", "dtype", "pass"))
VERSIONS = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flash-linear-attention")
Job = tuple[Piece, Shape]


def rows_of(
    job: Job, library: str, implementation: str, times: dict[str, float], common: records.Record
) -> list[records.Record]:
    """A record for each pass."""
    import jax

    piece, shape = job
    moved = piece.moved(shape, jax.numpy.dtype(common["dtype"]).itemsize)
    made = []
    for name, ms in times.items():
        rate = moved[name] / ms / 1e6
        row = {"op": piece.op, "form": piece.name, "implementation": implementation, "library": library}
        row |= {
            "shape": list(shape),
            "pass": name,
            "ms": ms,
            "gbs": rate,
            "of_copy": rate / common["copy_gbs"],
        }
        if piece.flops is not None:
            row["tflops"] = piece.flops(shape)[name] / ms / 1e9
        made.append({**row, "ratio": None, **common})
    return made


def our_rows(job: Job, common: records.Record) -> Iterator[list[records.Record]]:
    """Records of this library's implementations."""
    import jax

    piece, shape = job
    gpu = jax.default_backend() == "gpu"
    for name in piece.implementations if gpu else piece.implementations[-1:]:
        times = ours.milliseconds(piece, shape, common["dtype"], name)
        yield rows_of(job, "fla_jax", name, times, common)


def start_peers(jobs: list[Job], dtype: str, shares: tuple[int, int] | None = None) -> processes.Process:
    """A process of FLA's pieces: it times them, or compiles its share of what their tuning chooses from."""
    return processes.Process(
        processes.BENCHMARKS / "pieces" / "child.py",
        f"FLA's pieces {shares or ''}",
        [{"piece": piece.label, "shape": shape, "dtype": dtype} for piece, shape in jobs],
        {"shares": shares},
        variables={"FLA_CACHE_RESULTS": "0"},  # what is tuned while others compile is no choice
    )


def peer_rows(
    jobs: list[Job], options: argparse.Namespace, common: records.Record, skipped: list[str]
) -> Iterator[list[records.Record]]:
    """Records of FLA's pieces, from one process; why there are none goes to ``skipped``."""
    jobs = [job for job in jobs if job[0].peer is not None]
    if not processes.importable("fla"):
        labels = dict.fromkeys(piece.label for piece, _ in jobs)
        skipped += [f"{label} FLA: package fla is not installed" for label in labels]
        return
    # all pieces at the first shape before any at the second: where time ends, every one has a peer
    shapes = [shape for _, shape in jobs]
    jobs = sorted(jobs, key=lambda job: shapes.index(job[1]))
    count = os.cpu_count() or 1
    compiling = [start_peers(jobs, options.dtype, (share, count)) for share in range(count)]
    print(f"FLA: compiled for {processes.all_done(compiling, options.compile_seconds)}", flush=True)
    start = functools.partial(start_peers, dtype=options.dtype)
    for job, line in processes.results(start, jobs, options.timeout):
        if "record" in line:
            yield rows_of(job, "FLA", "FLA", line["record"], common)
        else:
            skipped.append(f"{job[0].label} {'x'.join(map(str, job[1]))} FLA: {line['error'][:300]}")


def compare(rows: list[records.Record]) -> None:
    """Fills in the ratios of our rows."""
    for row in rows:
        same = ("op", "form", "shape", "pass", "dtype")
        peers = [r for r in rows if r["library"] != "fla_jax" and all(r[name] == row[name] for name in same)]
        if row["library"] == "fla_jax" and peers:
            row["ratio"] = row["ms"] / min(r["ms"] for r in peers)


def table(rows: list[records.Record]) -> str:
    """The records as text, a piece's together."""
    lines = [("piece", "shape", "pass", "implementation", "ms", "GB/s", "of copy", "TFLOP/s", "ratio")]
    order = {piece.label: i for i, piece in enumerate(PIECES)}
    for r in sorted(rows, key=lambda r: (order[f"{r['op']} {r['form']}"], r["shape"][2], r["pass"], r["ms"])):
        shape, ratio = "x".join(map(str, r["shape"])), "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        cells = (f"{r['op']} {r['form']}", shape, r["pass"], f"{r['library']} {r['implementation']}")
        flops = f"{r['tflops']:.0f}" if "tflops" in r else "-"
        lines.append((*cells, f"{r['ms']:.4f}", f"{r['gbs']:.0f}", f"{r['of_copy']:.2f}", flops, ratio))
    return results.table(lines)


def shape_of(text: str) -> Shape:
    """``8x4096x1024``."""
    B, T, C = map(int, text.split("x"))
    return B, T, C


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, for a smoke test; times mean nothing"
    )
    parser.add_argument("--only", type=re.compile, help="regular expression: of 'op piece', what to measure")
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="BxTxC")
    parser.add_argument("--dtype", default="bfloat16", help="of the tokens")
    parser.add_argument("--no-peers", action="store_true", help="only this library")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the peers; default 300")
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=180,
        help="what peers tune is compiled on all cores before, this long at most; default 180",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="try launch options instead, on a GPU; with --quick a few"
    )
    results.add_option(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for."""
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory as well
    sys.path.insert(0, str(records.ROOT))
    import jax

    device = jax.devices()[0].device_kind
    small = options.quick or jax.default_backend() != "gpu"
    rates = copies.copy_rates((1 << 20,) if small else copies.SIZES)
    kind, copied = max(rates.items(), key=lambda one: one[1])
    print(
        f"{device}: a copy moves {copied:.0f} GB/s ({kind}; the slowest {min(rates.values()):.0f})",
        flush=True,
    )
    chosen = [piece for piece in PIECES if options.only is None or options.only.search(piece.label)]
    shapes = options.shapes or (QUICK if options.quick else SHAPES)
    jobs = [(piece, shape) for piece in chosen for shape in shapes]
    if options.sweep:
        for piece, shape in jobs:
            launches.sweep(piece, shape, options.dtype, copied, options.quick)
        return
    common: dict[str, Any] = {"dtype": options.dtype, "copy_gbs": copied, "copy": kind, "device": device}
    common |= {"versions": records.versions(VERSIONS), **results.stamp()}
    rows, skipped = list[records.Record](), list[str]()

    def found(more: list[records.Record]) -> None:
        rows.extend(more)
        compare(rows)
        # after every one, so that a run that is cut short keeps what it has
        results.put(options.out, device, rows, KEY)
        print(table(more).partition("\n")[2], flush=True)

    for job in jobs:
        for more in our_rows(job, common):
            found(more)
    for more in () if options.no_peers else peer_rows(jobs, options, common, skipped):
        found(more)
    print("\n" + table(rows) if rows else "nothing was measured")
    for line in skipped:
        print(f"skipped: {line}")
    print(f"results: {results.path_of(options.out, device)}")


if __name__ == "__main__":
    main()
