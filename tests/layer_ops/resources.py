"""Registers, spills, shared memory of norm, shift and mixes without a GPU: see tests/compile/resources.py.

PYTHONPATH=.:tests python tests/layer_ops/resources.py [--targets 90] [--channels 1024 2048]
PYTHONPATH=.:tests python tests/layer_ops/resources.py --ci     # every kernel, every kind of GPU
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing

import jax
import jax.numpy as jnp
from compile.resources import TARGETS, Call, Launch, Usage, compile_launch, recorded

from fla_jax.ops.layer import norm_shift_mix

# what layers call: mixes, with a sum and a norm, with moves, with the normalised tokens as a result
KINDS = {
    "six": (6, True, False, False),
    "two": (2, True, False, False),
    "one": (1, True, False, False),
    "one, normalised": (1, True, False, True),
    "five, moved": (5, False, True, False),
}
CI = [("six", 1024, "bfloat16", target) for target in (80, 90, 120)] + [
    ("six", 8192, "bfloat16", 90),
    ("five, moved", 1024, "bfloat16", 90),
    ("two", 2048, "float32", 90),
]


def record(kind: str, C: int, dtype: str, target: int) -> list[Launch]:
    """The launches of forward and backward of a call with 8 rows of 2048 tokens and segments."""
    M, norm, moved, normalised = KINDS[kind]
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    tokens, vector = array(8, 2048, C), array(C, dtype="float32")
    floats = {"x": tokens, "mixes": (vector,) * M, "last": array(8, C)}
    floats |= {"y": tokens, "scale": vector, "bias": vector} if norm else {}
    floats |= {"moves": array(M, 8, 2048, C)} if moved else {}

    def both(floats, segment_ids):
        f = lambda floats: norm_shift_mix(
            **floats, segment_ids=segment_ids, normalised=normalised, implementation="triton"
        )
        made, pull = jax.vjp(f, floats)
        return pull(made)

    call = Call(kind, target, C, dtype)
    return recorded(call, both, floats, array(8, 2048, dtype=jnp.int32))


def measure(wanted: list[tuple[str, int, str, int]], workers: int) -> list[Usage]:
    """Records and compiles, each launch once."""
    launches = {
        (one[3], dataclasses.replace(launch, call=None)): launch for one in wanted for launch in record(*one)
    }
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(compile_launch, launches.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--targets", nargs="+", type=int, choices=TARGETS, default=(90,))
    parser.add_argument("--channels", nargs="+", type=int, default=(512, 768, 1024, 2048, 2560, 4096, 8192))
    parser.add_argument("--dtypes", nargs="+", default=("bfloat16",))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="for a program to read")
    args = parser.parse_args()
    wanted = [
        (k, C, d, t) for t in args.targets for d in args.dtypes for C in args.channels for k in args.kinds
    ]
    usages = measure(CI if args.ci else wanted, args.workers)
    if args.json:
        print("USAGES", json.dumps([dataclasses.asdict(u) for u in usages]))
        return
    print(f"{'kernel':20} {'GPU':>6} {'C':>5} {'dtype':8} {'mixes':16} warps registers spilled  shared")
    for u in usages:
        too_much = " TOO MUCH" if u.shared > u.limit else ""
        print(
            f"{u.kernel:20} {'sm_' + str(u.call.target):>6} {u.call.head:5} {u.call.dtype:8} {u.call.op:16} "
            f"{u.num_warps:5} {u.registers:9} {u.spilled:7} {u.shared:7}{too_much}"
        )


if __name__ == "__main__":
    main()
