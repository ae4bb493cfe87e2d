"""Times the chunked forms on a CPU: ``python benchmarks/cpu.py``.

They must compile quickly and be much faster than a scan over tokens: ``--check`` exits with status 1 if not.
Limits have wide margins: 13 times faster was measured for RWKV-6, 5.1 for RWKV-7's decays, 2.8 for stronger.

    python benchmarks/cpu.py --check
    python benchmarks/cpu.py --record            # into benchmarks/results/cpu.json
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import records

SIZE, QUICK = dict(B=2, T=1024, H=4, K=64, V=64), dict(B=1, T=64, H=1, K=16, V=16)
COMPILE_S = 10.0  # at most
FASTER = {("rwkv6", "smooth"): 5.0, ("rwkv7", "layer"): 4.0, ("rwkv7", "smooth"): 2.0}  # at least
ROUNDS = 10
KEY = records.key_of("op", "form", "implementation", "shape", "decay")
Call = Callable[[], Any]


def inputs(op: str, decay: str, size: dict[str, int]) -> Any:
    """The arrays of a case of tests/harness/cases.py."""
    import jax
    import jax.numpy as jnp
    from harness import cases

    return jax.tree.map(jnp.asarray, cases.build(cases.Case(op, decay=decay, **size)))


def compiled(op: str, decay: str, size: dict[str, int]) -> tuple[Call, float]:
    """The compiled call and the seconds of compiling on two cores, by wall time or CPU time."""
    import jax
    from harness import cases

    x = inputs(op, decay, size)
    wall, cpu = time.perf_counter(), time.process_time()
    f = cases.runner(op, "xla").lower(*x).compile()
    took = min(time.perf_counter() - wall, (time.process_time() - cpu) / 2)
    return (lambda: jax.block_until_ready(f(*x))), took


def compile_seconds(op: str, size: dict[str, int]) -> float:
    """Compile time, the lower of two if the first is too slow."""
    import jax
    from harness import cases

    best = float("inf")
    for _ in range(2):
        jax.clear_caches()
        cases.runner.cache_clear()
        best = min(best, compiled(op, "smooth", size)[1])
        if best < COMPILE_S:
            break
    return best


def token_scan(op: str, decay: str, size: dict[str, int]) -> Call:
    """The recurrence as a plain `jax.lax.scan`, differentiated by JAX."""
    import jax
    import jax.numpy as jnp
    from harness import cases

    x = inputs(op, decay, size)

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


def chunked_and_scan(op: str, decay: str, size: dict[str, int]) -> tuple[float, float]:
    """Seconds of the chunked form and of the scan, both passes: the shortest of alternating rounds."""
    chunked, scan = compiled(op, decay, size)[0], token_scan(op, decay, size)
    chunked(), scan()
    fast = slow = float("inf")
    for i in range(ROUNDS):
        slow, fast = min(slow, seconds(scan, 2)), min(fast, seconds(chunked, 6))
        if i >= 2 and slow / fast >= FASTER[op, decay]:
            break
    return fast, slow


def measure(size: dict[str, int]) -> tuple[list[records.Record], list[str]]:
    """Records, and the limits that are exceeded."""
    made, exceeded = [], []
    about = {"op": "cpu", "shape": list(size.values())}
    for op in ("rwkv6", "rwkv7"):
        took = compile_seconds(op, size)
        print(f"{op} compiles in {took:.1f} s (at most {COMPILE_S:g})", flush=True)
        made.append({**about, "form": f"chunk_{op} compile", "decay": None, "ms": 1e3 * took})
        if took >= COMPILE_S:
            exceeded.append(f"{op} compiles in {took:.1f} s, longer than {COMPILE_S:g}")
    for (op, decay), wanted in FASTER.items():
        fast, slow = chunked_and_scan(op, decay, size)
        text = f"{op}, {decay} decays: {1e3 * fast:.1f} ms, the scan {1e3 * slow:.1f}"
        print(f"{text}: {slow / fast:.1f} times as fast (at least {wanted:g})", flush=True)
        times = {"ms": 1e3 * fast, "scan_ms": 1e3 * slow, "ratio_to_scan": slow / fast}
        made.append({**about, "form": f"chunk_{op} beside the scan", "decay": decay, **times})
        if slow / fast < wanted:
            exceeded.append(f"{op} with {decay} decays is {slow / fast:.1f} times as fast, not {wanted:g}")
    return made, exceeded


def main(arguments: list[str] | None = None) -> int:
    """Measures; status 1 with ``--check`` if a limit is exceeded."""
    parser = records.parser(__doc__)
    text = "tiny sizes, for a smoke test; limits mean nothing"
    parser.add_argument("--quick", action="store_true", help=text)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    parser.add_argument("--record", action="store_true", help="put the records into the results file")
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(records.ROOT), str(records.ROOT / "tests")]
    made, exceeded = measure(QUICK if options.quick else SIZE)
    common = {"implementation": "xla", "library": "fla_jax", "dtype": "float32", "pass": "fwd+bwd"}
    common |= {"device": "cpu", "versions": records.versions(("jax", "jaxlib")), **records.stamp()}
    if options.record or options.out:
        path = records.put(options.out, "cpu", [{**record, **common} for record in made], KEY)
        print(f"results: {path}")
    for line in exceeded:
        print(f"exceeded: {line}", file=sys.stderr)
    return 1 if exceeded and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
