"""Two guards with wide margins: the chunked form compiles quickly and is much faster than the scan it replaces."""

import statistics
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
    jax.clear_caches()
    cases.runner.cache_clear()
    return _compiled(op, "xla")[1]


@each_op
def test_compile_time(op):
    assert _compile_seconds(op) < 10 or _compile_seconds(op) < 10


def _median(f, n):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@each_op
def test_chunks_are_faster_than_the_scan(op):
    """Forward and backward, at least five times; the two alternate, so that a busy machine slows both, and the best of six rounds counts."""
    fast, slow = _compiled(op, "xla")[0], _compiled(op, "reference")[0]
    fast(), slow()
    ratios = []
    for _ in range(6):
        ratios.append(_median(slow, 2) / _median(fast, 5))
        if ratios[-1] >= 5:
            return
    raise AssertionError(f"xla is only {[f'{r:.1f}' for r in ratios]} times faster than reference")
