"""Two guards with wide margins: the chunked form compiles quickly and is much faster than the scan it replaces."""

import time

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import OPS, Case

each_op = pytest.mark.parametrize("op", OPS)
SIZE = dict(B=2, T=1024, H=4, K=64, V=64)


def _compiled(op, implementation):
    """The compiled call and the seconds that compiling takes on two cores: CPU time where other processes hold them meanwhile."""
    x = jax.tree.map(jnp.asarray, cases.build(Case(op, **SIZE)))
    wall, cpu = time.perf_counter(), time.process_time()
    f = cases.runner(op, implementation).lower(*x).compile()
    return (lambda: jax.block_until_ready(f(*x))), min(time.perf_counter() - wall, (time.process_time() - cpu) / 2)


def _compile_seconds(op):
    jax.clear_caches()  # otherwise what another test has compiled takes no time
    cases.runner.cache_clear()
    return _compiled(op, "xla")[1]


@each_op
def test_compile_time(op):
    seconds = [_compile_seconds(op)]
    if seconds[0] >= 10:
        seconds.append(_compile_seconds(op))
    assert min(seconds) < 10, seconds


def _seconds(f, n):
    """The shortest of ``n`` calls: what is left when nobody else was on the machine."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


@each_op
def test_chunks_are_faster_than_the_scan(op):
    """Forward and backward, at least five times. The two alternate, and the shortest times count, of as many rounds as it takes up to ten."""
    fast, slow = _compiled(op, "xla")[0], _compiled(op, "reference")[0]
    fast(), slow()
    fastest = slowest = float("inf")
    for i in range(10):
        slowest, fastest = min(slowest, _seconds(slow, 3)), min(fastest, _seconds(fast, 6))
        if i >= 2 and slowest / fastest >= 5:
            return
    raise AssertionError(f"xla takes {fastest:.3f} s and reference {slowest:.3f} s: {slowest / fastest:.1f} times")
