"""Two guards with wide margins: the chunked form compiles quickly and is much faster than the scan it
replaces.
"""

import time

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import OPS, Case

pytestmark = pytest.mark.slow

each_op = pytest.mark.parametrize("op", OPS)
SIZE = dict(B=2, T=1024, H=4, K=64, V=64)


def _compiled(op, decay="smooth"):
    """The compiled call and the seconds that compiling takes on two cores: CPU time where other processes
    hold them meanwhile.
    """
    x = jax.tree.map(jnp.asarray, cases.build(Case(op, decay=decay, **SIZE)))
    wall, cpu = time.perf_counter(), time.process_time()
    f = cases.runner(op, "xla").lower(*x).compile()
    return (lambda: jax.block_until_ready(f(*x))), min(
        time.perf_counter() - wall, (time.process_time() - cpu) / 2
    )


def _compile_seconds(op):
    jax.clear_caches()  # otherwise what another test has compiled takes no time
    cases.runner.cache_clear()
    return _compiled(op)[1]


@each_op
def test_compile_time(op):
    seconds = [_compile_seconds(op)]
    if seconds[0] >= 10:
        seconds.append(_compile_seconds(op))
    assert min(seconds) < 10, seconds


def _seconds(f, n):
    """CPU time of the shortest of ``n`` calls."""
    times = []
    for _ in range(n):
        start = time.process_time()
        f()
        times.append(time.process_time() - start)
    return min(times)


def _naive(op, x):
    """The recurrence as a plain `jax.lax.scan`, differentiated by JAX: what the chunked form replaces."""

    def step(S, t):
        if op == "rwkv6":
            kv = t["k"][..., None] * t["v"][..., None, :]
            return jnp.exp(t["w"])[..., None] * S + kv, jnp.einsum(
                "bhk,bhkv->bhv", t["r"], S + x.arrays["u"][..., None] * kv
            )
        sa = jnp.einsum("bhk,bhkv->bhv", t["a"], S)
        S = (
            jnp.exp(t["w"])[..., None] * S
            + t["b"][..., None] * sa[..., None, :]
            + t["k"][..., None] * t["v"][..., None, :]
        )
        return S, jnp.einsum("bhk,bhkv->bhv", t["r"], S)

    def loss(arrays):
        tokens = {name: jnp.moveaxis(arrays[name], 1, 0) for name in cases.TOKENS[op]}
        final, o = jax.lax.scan(step, arrays["initial_state"], tokens)
        return jnp.sum(jnp.moveaxis(o, 0, 1) * x.do) + jnp.sum(final * x.ds)

    f = jax.jit(jax.grad(loss)).lower(x.arrays).compile()
    return lambda: jax.block_until_ready(f(x.arrays))


@pytest.mark.parametrize(
    "op, decay, times", [("rwkv6", "smooth", 5), ("rwkv7", "layer", 4), ("rwkv7", "smooth", 2)]
)
def test_chunks_are_faster_than_the_scan(op, decay, times):
    """Forward and backward, by CPU time, which other processes on the machine change least; the chunked form
    also spreads over cores, the scan does not.

    Guards with a margin: measured 13 times for RWKV-6, 5.1 for RWKV-7's decays and 2.8 for stronger ones (by
    the clock on two cores 10, 5.3 and 3.2). The two alternate, and the shortest times count, of as many
    rounds as it takes up to ten.
    """
    x = jax.tree.map(jnp.asarray, cases.build(Case(op, decay=decay, **SIZE)))
    fast, slow = _compiled(op, decay)[0], _naive(op, x)
    fast(), slow()
    fastest = slowest = float("inf")
    for i in range(10):
        slowest, fastest = min(slowest, _seconds(slow, 2)), min(fastest, _seconds(fast, 6))
        if i >= 2 and slowest / fastest >= times:
            return
    raise AssertionError(
        f"xla takes {fastest:.3f} s and the scan {slowest:.3f} s: {slowest / fastest:.1f} times"
    )
