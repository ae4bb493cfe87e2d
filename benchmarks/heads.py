"""RWKV-7's keys and the readouts on a GPU: time, bytes moved, and the share of what a plain copy reaches.

    python benchmarks/heads.py                              all three, as launched and in plain JAX
    python benchmarks/heads.py --ops rwkv7_keys --sweep     every launch option below, each pass by itself
    python benchmarks/heads.py --low-rank float32 --decay float32

Bytes count every array that a pass reads or writes once. A time is the mean of many calls queued together.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fla_jax.ops.layer.keys import Keys, rwkv7_keys
from fla_jax.ops.layer.readout import rwkv6_readout, rwkv7_readout
from fla_jax.pallas.plan.heads import Tile, tile

OPS = ("rwkv7_keys", "rwkv7_readout", "rwkv6_readout")
# for heads of 64 channels
SWEEP = [
    Tile(tokens, heads, warps, stages, programs)
    for tokens, heads, warps in (
        (4, 1, 4),
        (8, 1, 4),
        (16, 1, 4),
        (32, 1, 4),
        (8, 2, 4),
        (16, 1, 8),
        (8, 1, 2),
    )
    for stages in (1, 2, 3)
    for programs in (1056, 2112, 4224)
]


def problem(op: str, options: argparse.Namespace) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """The op as a function of its arrays and an implementation, and arrays."""
    (B, T, H, N), dtype = options.shape, options.dtype
    keys = iter(jax.random.split(jax.random.key(0), 16))
    token = lambda dtype: jax.random.normal(next(keys), (B, T, H, N)).astype(dtype)
    vector = lambda: jax.random.normal(next(keys), (H, N))
    if op == "rwkv7_keys":
        arrays = {name: token(options.low_rank) for name in ("decay", "rate", "mix")}
        arrays |= {name: token(dtype) for name in ("k", "v", "v_first")}
        arrays |= {name: vector() for name in ("w0", "a0", "v0", "k_k", "k_a")}
        if not options.known:
            arrays["residual"] = jnp.array(True)
        return functools.partial(rwkv7_keys, decay_dtype=options.decay), arrays
    names = ("o", "r", "k", "v") if op == "rwkv7_readout" else ("o",)
    arrays = {name: token(dtype) for name in names} | {"gate": token(options.low_rank)}
    arrays |= {name: vector() for name in ("scale", "bias", *(["r_k"] if op == "rwkv7_readout" else []))}
    return rwkv7_readout if op == "rwkv7_readout" else rwkv6_readout, arrays


def passes(
    function: Callable[..., Any], arrays: dict[str, Any], known: bool
) -> dict[str, tuple[Any, Any, int]]:
    """Function, arguments and bytes of forward and backward."""
    forward = lambda arrays: function(**arrays)
    results = jax.jit(forward)(arrays)
    floats = {name: x for name, x in arrays.items() if name != "residual"}
    rest = {name: x for name, x in arrays.items() if name == "residual"}
    backward = lambda floats, cotangents: jax.vjp(lambda floats: forward(floats | rest), floats)[1](
        cotangents
    )
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    # what comes twice is written once, what comes as it was not at all
    own = (5 if known else 6) if isinstance(results, Keys) else 1
    alone = lambda arrays: jax.tree.leaves(forward(arrays))[:own]
    return {
        "forward": (alone, (arrays,), size(arrays) + size(jax.tree.leaves(results)[:own])),
        "backward": (backward, (floats, results), 2 * size(floats) + size(results)),
    }


def milliseconds(function: Callable[..., Any], arguments: Any, repeats: int) -> float:
    run = jax.jit(function)
    jax.block_until_ready([run(*arguments) for _ in range(3)])
    start = time.perf_counter()
    for _ in range(repeats):
        last = run(*arguments)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / repeats * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--shape", nargs=4, type=int, default=(8, 4096, 16, 64), metavar=("B", "T", "H", "N"))
    parser.add_argument("--dtype", default="bfloat16", help="of tokens")
    parser.add_argument("--low-rank", default="bfloat16", help="of low-rank outputs, the readout's gate too")
    parser.add_argument("--decay", default="bfloat16", help="of log decays")
    parser.add_argument("--known", action="store_true", help="keys: the layer's index is known, not traced")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args(arguments)

    size = 1 << 28
    rate = 2 * size / milliseconds(jnp.negative, (jnp.zeros(size // 2, jnp.bfloat16),), options.repeats)
    print(f"a copy: {rate / 1e9:.2f} TB/s")
    for op in options.ops:
        function, arrays = problem(op, options)
        for implementation in ("triton", "xla"):
            for which, (run, given, moved) in passes(
                functools.partial(function, implementation=implementation), arrays, options.known
            ).items():
                tables = [None]
                if options.sweep and implementation == "triton":
                    from fla_jax.pallas.layer import keys_launcher, readout_launcher

                    launch = (keys_launcher if op == "rwkv7_keys" else readout_launcher).LAUNCH
                    entry, tables = (which, tile(options.shape[-1])), [None, *SWEEP]
                    usual = launch[entry]
                for table in tables:
                    if table is not None:
                        launch[entry] = table
                        jax.clear_caches()
                    try:
                        ms = milliseconds(run, given, options.repeats)
                        note = f"{ms:8.4f} ms {moved / ms / 1e9:6.2f} TB/s {moved / ms / rate:5.0%} of a copy"
                    except Exception as error:
                        note = f"{type(error).__name__}: {str(error)[:80]}"
                    shown = "" if table is None else str(tuple(table))
                    print(
                        f"{op:14} {implementation:6} {which:8} {moved / 1e6:7.0f} MB {note} {shown}",
                        flush=True,
                    )
                if len(tables) > 1:
                    launch[entry] = usual
                    jax.clear_caches()


if __name__ == "__main__":
    main()
