"""What the chunked forms take on a CPU: ``python benchmarks/cpu.py``.

Two things that a change may break without a wrong number anywhere: they compile quickly, and they are much
faster, forward and backward, than the scan over tokens that they replace. ``--check`` exits with 1 where a
guard is broken; the guards have wide margins. Times are CPU time where that is what other processes on the
machine change least. Measured 13 times for RWKV-6, 5.1 for RWKV-7's decays and 2.8 for stronger ones (by the
clock on two cores 10, 5.3 and 3.2).

    python benchmarks/cpu.py --check
    python benchmarks/cpu.py --record            # into benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import records
from running import results

SIZE, QUICK = dict(B=2, T=1024, H=4, K=64, V=64), dict(B=1, T=64, H=1, K=16, V=16)
COMPILE_S = 10.0  # at most
FASTER = {("rwkv6", "smooth"): 5.0, ("rwkv7", "layer"): 4.0, ("rwkv7", "smooth"): 2.0}  # at least
ROUNDS = 10
KEY = results.key_of(("op", "form", "implementation", "shape", "decay"))
Call = Callable[[], Any]


def compiled(op: str, decay: str, size: dict[str, int]) -> tuple[Call, float]:
    """The compiled call and the seconds that compiling takes on two cores: CPU time where other processes
    hold them meanwhile.
    """
    import jax
    import jax.numpy as jnp
    from harness import cases

    x = jax.tree.map(jnp.asarray, cases.build(cases.Case(op, decay=decay, **size)))
    wall, cpu = time.perf_counter(), time.process_time()
    f = cases.runner(op, "xla").lower(*x).compile()
    took = min(time.perf_counter() - wall, (time.process_time() - cpu) / 2)
    return (lambda: jax.block_until_ready(f(*x))), took


def compile_seconds(op: str, size: dict[str, int]) -> float:
    """Of two attempts where the first is too slow."""
    import jax
    from harness import cases

    best = float("inf")
    for _ in range(2):
        jax.clear_caches()  # what was compiled before takes no time
        cases.runner.cache_clear()
        best = min(best, compiled(op, "smooth", size)[1])
        if best < COMPILE_S:
            break
    return best


def naive(op: str, decay: str, size: dict[str, int]) -> Call:
    """The recurrence as a plain `jax.lax.scan`, differentiated by JAX: what the chunked form replaces."""
    import jax
    import jax.numpy as jnp
    from harness import cases

    x = jax.tree.map(jnp.asarray, cases.build(cases.Case(op, decay=decay, **size)))

    def step(S: Any, t: Any) -> Any:
        decayed, update = jnp.exp(t["w"])[..., None] * S, t["k"][..., None] * t["v"][..., None, :]
        if op == "rwkv6":
            read = S + x.arrays["u"][..., None] * update
            return decayed + update, jnp.einsum("bhk,bhkv->bhv", t["r"], read)
        sa = jnp.einsum("bhk,bhkv->bhv", t["a"], S)
        S = decayed + t["b"][..., None] * sa[..., None, :] + update
        return S, jnp.einsum("bhk,bhkv->bhv", t["r"], S)

    def loss(arrays: Any) -> Any:
        tokens = {name: jnp.moveaxis(arrays[name], 1, 0) for name in cases.TOKENS[op]}
        final, o = jax.lax.scan(step, arrays["initial_state"], tokens)
        return jnp.sum(jnp.moveaxis(o, 0, 1) * x.cotangents["o"]) + jnp.sum(final * x.cotangents["ht"])

    f = jax.jit(jax.grad(loss)).lower(x.arrays).compile()
    return lambda: jax.block_until_ready(f(x.arrays))


def seconds(f: Call, n: int) -> float:
    """CPU time of the shortest of ``n`` calls."""
    times = []
    for _ in range(n):
        began = time.process_time()
        f()
        times.append(time.process_time() - began)
    return min(times)


def beside_the_scan(op: str, decay: str, size: dict[str, int]) -> tuple[float, float]:
    """Seconds of the chunked form and of the scan, forward and backward. The two alternate, and the shortest
    times count, of as many rounds as it takes up to ten.
    """
    fast, slow = compiled(op, decay, size)[0], naive(op, decay, size)
    fast(), slow()
    fastest = slowest = float("inf")
    for i in range(ROUNDS):
        slowest, fastest = min(slowest, seconds(slow, 2)), min(fastest, seconds(fast, 6))
        if i >= 2 and slowest / fastest >= FASTER[op, decay]:
            break
    return fastest, slowest


def measure(size: dict[str, int]) -> tuple[list[records.Record], list[str]]:
    """Records, and the guards that are broken."""
    rows, broken = [], []
    shape = list(size.values())
    for op in ("rwkv6", "rwkv7"):
        took = compile_seconds(op, size)
        print(f"{op} compiles in {took:.1f} s (at most {COMPILE_S:g})", flush=True)
        rows.append(
            {"op": "cpu", "form": f"chunk_{op} compile", "shape": shape, "decay": None, "ms": 1e3 * took}
        )
        if took >= COMPILE_S:
            broken.append(f"{op} compiles in {took:.1f} s, longer than {COMPILE_S:g}")
    for (op, decay), wanted in FASTER.items():
        fast, slow = beside_the_scan(op, decay, size)
        text = f"{op}, {decay} decays: {1e3 * fast:.1f} ms, the scan {1e3 * slow:.1f}"
        print(f"{text}: {slow / fast:.1f} times as fast (at least {wanted:g})", flush=True)
        row = {"op": "cpu", "form": f"chunk_{op} beside the scan", "shape": shape, "decay": decay}
        rows.append({**row, "ms": 1e3 * fast, "scan_ms": 1e3 * slow, "ratio_to_scan": slow / fast})
        if slow / fast < wanted:
            broken.append(f"{op} with {decay} decays is {slow / fast:.1f} times as fast, not {wanted:g}")
    return rows, broken


def main(arguments: list[str] | None = None) -> int:
    """Measures; the exit status is 1 with ``--check`` and a broken guard."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, for a smoke test; guards mean nothing"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a guard is broken")
    parser.add_argument("--record", action="store_true", help="put the records into the results file")
    results.add_option(parser)
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(records.ROOT), str(records.ROOT / "tests")]
    rows, broken = measure(QUICK if options.quick else SIZE)
    common = {"implementation": "xla", "library": "fla_jax", "dtype": "float32", "pass": "fwd+bwd"}
    common |= {"device": "cpu", "versions": records.versions(("jax", "jaxlib")), **results.stamp()}
    if options.record or options.out:
        path = results.put(options.out, "cpu", [{**row, **common} for row in rows], KEY)
        print(f"results: {path}")
    for line in broken:
        print(f"broken: {line}", file=sys.stderr)
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
