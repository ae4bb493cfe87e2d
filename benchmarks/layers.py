"""Times the layer operations beside plain JAX and FLA's: ``python benchmarks/layers.py``.

``GB/s`` is the bytes that must move over the time, ``of copy`` that over the best of several copies; the head
has TFLOP/s. Four calls of ours are one program, as in a model. Peers run in one process; a ratio is our time
over theirs. ``--sweep`` tries launches of our kernels instead and records nothing.

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
import runner
from layer_ops import launches, ours
from layer_ops.layer_op import LAYER_OPS, LayerOp, Shape
from records import Record
from timing import best_copy

SHAPES = ((8, 4096, 1024), (4, 4096, 2048), (2, 4096, 4096))  # B, T, C
QUICK = ((2, 16, 32),)
KEY = records.key_of("op", "form", "implementation", "shape", "dtype", "pass")
VERSIONS = ("jax", "jaxlib", "jax-triton", "triton", "torch", "flash-linear-attention")
Job = tuple[LayerOp, Shape]


def records_of(
    job: Job, library: str, implementation: str, times: dict[str, float], common: Record
) -> list[Record]:
    """A record for each pass."""
    import jax

    layer_op, shape = job
    moved = layer_op.moved(shape, jax.numpy.dtype(common["dtype"]).itemsize)
    made = []
    for name, ms in times.items():
        rate = moved[name] / ms / 1e6
        record = {
            "op": layer_op.op,
            "form": layer_op.name,
            "implementation": implementation,
            "library": library,
        }
        record |= {"shape": list(shape), "pass": name, "ms": ms, "gbs": rate}
        record["of_copy"] = rate / common["copy_gbs"]
        if layer_op.flops is not None:
            record["tflops"] = layer_op.flops(shape)[name] / ms / 1e9
        made.append({**record, "ratio": None, **common})
    return made


def measure_ours(jobs: list[Job], common: Record) -> Iterator[list[Record]]:
    """Records of this library's implementations."""
    import jax

    gpu = jax.default_backend() == "gpu"
    for layer_op, shape in jobs:
        for name in layer_op.implementations if gpu else layer_op.implementations[-1:]:
            times = ours.milliseconds(layer_op, shape, common["dtype"], name)
            yield records_of((layer_op, shape), "fla_jax", name, times, common)


def start_peers(jobs: list[Job], dtype: str, shares: tuple[int, int] | None = None) -> runner.Process:
    """A process that times FLA's operations, or compiles its share of what their tuning chooses from."""
    return runner.Process(
        "peers.fla_layers:make",
        f"FLA's layers {shares or ''}",
        [{"layer_op": layer_op.label, "shape": shape, "dtype": dtype} for layer_op, shape in jobs],
        {"shares": shares},
        variables={"FLA_CACHE_RESULTS": "0"},  # what is tuned while others compile is no choice
    )


def measure_peers(
    jobs: list[Job], options: argparse.Namespace, common: Record, skipped: list[str]
) -> Iterator[list[Record]]:
    """Records of FLA's operations, from one process; the reasons of missing ones go to ``skipped``."""
    jobs = [job for job in jobs if job[0].peer is not None]
    if not runner.is_importable("fla"):
        labels = dict.fromkeys(layer_op.label for layer_op, _ in jobs)
        skipped += [f"{label} FLA: package fla is not installed" for label in labels]
        return
    # all layer operations at the first shape before any at the second: if time runs out, every one has a peer
    shapes = [shape for _, shape in jobs]
    jobs = sorted(jobs, key=lambda job: shapes.index(job[1]))
    count = os.cpu_count() or 1
    compiling = [start_peers(jobs, options.dtype, (share, count)) for share in range(count)]
    print(f"FLA: compiled for {runner.wait_for(compiling, options.compile_seconds)}", flush=True)
    start = functools.partial(start_peers, dtype=options.dtype)
    for job, line in runner.results(start, jobs, options.timeout):
        if "record" in line:
            yield records_of(job, "FLA", "FLA", line["record"], common)
        else:
            skipped.append(f"{job[0].label} {'x'.join(map(str, job[1]))} FLA: {line['error'][:300]}")


def task_of(r: Record) -> list[Any]:
    return [r[name] for name in ("op", "form", "shape", "pass", "dtype")]


def compare(measured: list[Record]) -> None:
    """Fills in the peers of our records."""
    records.fill_peers(measured, task_of, lambda r: True)


def table(measured: list[Record]) -> str:
    labels = [layer_op.label for layer_op in LAYER_OPS]
    label = lambda r: f"{r['op']} {r['form']}"
    columns = {
        "layer_op": label,
        "shape": lambda r: "x".join(map(str, r["shape"])),
        "pass": "pass",
        "implementation": lambda r: f"{r['library']} {r['implementation']}",
        **{"ms": "ms:.4f", "GB/s": "gbs:.0f", "of copy": "of_copy:.2f", "TFLOP/s": "tflops:.0f"},
        "ratio": "ratio:.2f",
    }
    order = lambda r: (labels.index(label(r)), r["shape"][2], r["pass"], r["ms"])
    return records.table(sorted(measured, key=order), columns)


def shape_of(text: str) -> Shape:
    """``8x4096x1024``."""
    B, T, C = map(int, text.split("x"))
    return B, T, C


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="tiny shapes, for a smoke test; times mean nothing")
    add("--only", type=re.compile, help="regular expression of 'op name'")
    add("--shapes", nargs="+", type=shape_of, metavar="BxTxC")
    add("--dtype", default="bfloat16", help="of the tokens")
    add("--no-peers", action="store_true", help="only this library")
    add("--timeout", type=float, default=300, help="seconds for the peers; default 300")
    add("--compile-seconds", type=float, default=180, help="limit for compiling peers; default 180")
    add("--sweep", action="store_true", help="try launch options instead, on a GPU; with --quick a few")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory as well
    sys.path.insert(0, str(records.ROOT))
    import jax

    device = jax.devices()[0].device_kind
    kind, copied = best_copy(options.quick or jax.default_backend() != "gpu")
    chosen = [
        layer_op for layer_op in LAYER_OPS if options.only is None or options.only.search(layer_op.label)
    ]
    shapes = options.shapes or (QUICK if options.quick else SHAPES)
    jobs = [(layer_op, shape) for layer_op in chosen for shape in shapes]
    if options.sweep:
        for layer_op, shape in jobs:
            launches.sweep(layer_op, shape, options.dtype, copied, options.quick)
        return
    common: dict[str, Any] = {"dtype": options.dtype, "copy_gbs": copied, "copy": kind, "device": device}
    common |= {"versions": records.versions(VERSIONS), **records.stamp()}
    measured, skipped = list[Record](), list[str]()
    sides = [measure_ours(jobs, common)]
    if not options.no_peers:
        sides.append(measure_peers(jobs, options, common, skipped))
    for more in (more for side in sides for more in side):
        measured.extend(more)
        compare(measured)
        # after every layer operation, so that a run that is cut short loses nothing
        records.put(options.out, device, measured, KEY)
        print(table(more).partition("\n")[2], flush=True)
    path = records.results_path(options.out, device)
    records.report(table(measured) if measured else "", skipped, path)


if __name__ == "__main__":
    main()
