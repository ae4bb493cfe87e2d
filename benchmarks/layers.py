"""Times the fused pieces around the recurrences beside plain JAX and FLA's: ``python benchmarks/layers.py``.

Prints a table and puts its records into ``benchmarks/results/<device>.json`` (`records`). A piece is bound by
memory: the table has the bytes that must move, each array once, over the time (``GB/s``), and that over the
rate of a copy measured in the same run (``of copy``). Many calls are queued and waited for once, as in
`peers_run`. Peers run in a process of their own, with torch, where it can be imported.

    python benchmarks/layers.py --quick                    # tiny sizes, seconds on a CPU; times mean nothing
    python benchmarks/layers.py --only 'attention' --shapes 8x4096x1024
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
from peers_run import timed
from pieces import PIECES, Piece

SHAPES = ((8, 4096, 1024), (4, 4096, 2048), (2, 4096, 4096))  # B, T, C
QUICK = ((2, 16, 32),)
PASSES = ("fwd", "bwd")
KEY = ("op", "form", "implementation", "shape", "dtype", "pass")
Shape = tuple[int, int, int]


def copy_rate(bytes_: int) -> float:
    """GB/s, read and written, of the faster of two copies of so many bytes on the device."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(bytes_ // 4, jnp.float32)
    rates = []
    for f in (jnp.copy, jnp.negative):
        compiled = jax.jit(f).lower(x).compile()
        rates.append(2 * bytes_ / timed(functools.partial(queue, compiled, (x,))) / 1e6)
    return max(rates)


def queue(compiled: Callable[..., Any], arguments: tuple[Any, ...], n: int) -> float:
    """Milliseconds that n calls of a compiled JAX function take, queued and waited for once."""
    import jax

    began = time.perf_counter()
    for _ in range(n):
        result = compiled(*arguments)
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - began)


def functions(
    piece: Piece, shape: Shape, dtype: str, implementation: str | None
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """A compiled function and its arguments for each pass."""
    import jax

    keys = iter(jax.random.split(jax.random.key(0), 64))
    wanted = piece.inputs(*shape)
    inputs = {name: jax.random.normal(next(keys), s, d or dtype) for name, (s, d) in wanted.items()}
    call = functools.partial(piece.call, implementation=implementation)
    made, pull = jax.jit(lambda inputs: jax.vjp(call, inputs))(inputs)
    cotangents = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, a.dtype), made)
    passes = {
        "fwd": (call, (inputs,)),
        "bwd": (lambda pull, cotangents: pull(cotangents), (pull, cotangents)),
    }
    return {name: (jax.jit(f).lower(*x).compile(), x) for name, (f, x) in passes.items()}


def ours(piece: Piece, shape: Shape, dtype: str, implementation: str | None) -> dict[str, float]:
    """Milliseconds of each pass."""
    made = functions(piece, shape, dtype, implementation)
    return {name: timed(functools.partial(queue, *one)) for name, one in made.items()}


def peer(piece: Piece, shape: Shape, dtype: str, name: str) -> dict[str, float]:
    """Milliseconds of each pass of a peer on torch; parameters in the tokens' dtype, as in its models."""
    import torch

    call = piece.peers[name]()
    tokens = getattr(torch, dtype)
    inputs = {n: torch.randn(s, device="cuda").to(tokens) for n, (s, _) in piece.inputs(*shape).items()}
    leaves = [array.requires_grad_() for array in inputs.values()]

    def time_of(function: Callable[[], Any]) -> float:
        def run(n: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(n):
                function()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)

        return timed(run)

    with torch.no_grad():
        forward = time_of(lambda: call(inputs))
    made = call(inputs)
    cotangents = [torch.randn_like(array) for array in made]

    def backward() -> None:
        torch.autograd.grad(made, leaves, cotangents, retain_graph=True, allow_unused=True)

    return {"fwd": forward, "bwd": time_of(backward)}


def measure(
    piece: Piece, shape: Shape, options: argparse.Namespace
) -> list[tuple[str, str, dict[str, float] | str]]:
    """(library, implementation, milliseconds by pass or why there are none) of ours and of the peers."""
    import jax

    found: list[tuple[str, str, dict[str, float] | str]] = []
    for name in ("triton", "xla") if jax.default_backend() == "gpu" else ("xla",):
        found.append(("fla_jax", name, ours(piece, shape, options.dtype, name)))
    for name in () if options.no_peers else piece.peers:
        command = [
            sys.executable,
            __file__,
            "--peer",
            piece.label,
            name,
            *map(str, shape),
            "--dtype",
            options.dtype,
        ]
        path = os.pathsep.join(filter(None, [str(records.ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout, env=environment
            )
        except subprocess.TimeoutExpired:
            found.append((name, name, f"no result within {options.timeout:.0f} s"))
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("MS ")]
        why = done.stderr.strip().rpartition("\n")[2][-300:] or f"exit status {done.returncode}"
        found.append((name, name, json.loads(lines[0][3:]) if lines else why))
    return found


def table(rows: list[records.Record]) -> str:
    """The records as text."""
    lines = [("piece", "shape", "pass", "implementation", "ms", "GB/s", "of copy", "ratio")]
    for r in rows:
        shape, ratio = "x".join(map(str, r["shape"])), "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        cells = (f"{r['op']} {r['form']}", shape, r["pass"], f"{r['library']} {r['implementation']}")
        lines.append((*cells, f"{r['ms']:.4f}", f"{r['gbs']:.0f}", f"{r['of_copy']:.2f}", ratio))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


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
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each peer; default 300")
    parser.add_argument(
        "--out",
        type=Path,
        help="results file; default: <device>.json in $OUT if that is set, else in benchmarks/results",
    )
    parser.add_argument("--peer", nargs=5, metavar=("PIECE", "NAME", "B", "T", "C"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs what was asked for."""
    options = parse(arguments)
    if options.peer:
        label, name, *shape = options.peer
        piece = next(piece for piece in PIECES if piece.label == label)
        print("MS", json.dumps(peer(piece, tuple(map(int, shape)), options.dtype, name)))
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory as well
    sys.path.insert(0, str(records.ROOT))
    import jax

    device, copied = jax.devices()[0].device_kind, copy_rate(1 << 20 if options.quick else 1 << 30)
    print(f"{device}: a copy moves {copied:.0f} GB/s", flush=True)
    common = {
        "dtype": options.dtype,
        "copy_gbs": copied,
        "versions": records.versions(
            ("jax", "jaxlib", "jax-triton", "triton", "torch", "flash-linear-attention")
        ),
        "device": device,
        "commit": records.commit(),
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    rows, skipped = list[records.Record](), []
    for piece in PIECES:
        if options.only is not None and not options.only.search(piece.label):
            continue
        for shape in options.shapes or (QUICK if options.quick else SHAPES):
            B, T, C = shape
            array = B * T * C * jax.numpy.dtype(options.dtype).itemsize
            found = measure(piece, shape, options)
            best = {
                p: min(
                    (ms[p] for lib, _, ms in found if lib != "fla_jax" and isinstance(ms, dict)), default=None
                )
                for p in PASSES
            }
            before = len(rows)
            for library, name, ms in found:
                if isinstance(ms, str):
                    skipped.append(f"{piece.label} {name}: {ms}")
                    continue
                for moved, passes in zip(piece.moved, PASSES):
                    row = {
                        "op": piece.op,
                        "form": piece.name,
                        "implementation": name,
                        "library": library,
                        "shape": list(shape),
                    }
                    rate = moved * array / ms[passes] / 1e6
                    row |= {"pass": passes, "ms": ms[passes], "gbs": rate, "of_copy": rate / copied}
                    ratio = ms[passes] / best[passes] if library == "fla_jax" and best[passes] else None
                    rows.append({**row, "ratio": ratio, **common})
            print(table(rows[before:]).partition("\n")[2], flush=True)
    path = options.out or records.path_of(
        device, Path(os.environ["OUT"]) if os.environ.get("OUT") else records.RESULTS
    )
    key = lambda r: json.dumps([r.get(name) for name in KEY])
    records.write(path, records.merged(records.read(path), rows, key))
    print("\n" + table(rows) if rows else "nothing was measured")
    for line in skipped:
        print(f"skipped: {line}")
    print(f"results: {path}")


if __name__ == "__main__":
    main()
