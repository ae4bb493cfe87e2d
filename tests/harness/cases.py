# ruff: noqa: F401 (what describes and compares cases is used as ``cases.NAME``)
"""One way to run and judge a call of any op: build it, call the public function, compare with the oracle.

A case (`Case`, `HeadCase`, `MixCase`) describes a call; an implementation is a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import layer_cases, recurrences
from .compare import (
    DOUBLE,
    EXACT,
    Inputs,
    Results,
    Tolerances,
    assert_close,
    assert_same_bits,
    dtype_of,
    error_of,
    errors_of,
)
from .layer_cases import HEAD_OPS, MIX_CASES, MIX_KERNELS, VECTORS, HeadCase, MixCase
from .recurrences import DECAYS, INPUTS, LEVELS, OPS, TOKENS, Case, log_decay

AnyCase = Case | HeadCase | MixCase
CALLS = dict.fromkeys(OPS, recurrences.call) | dict.fromkeys((*HEAD_OPS, "norm_shift_mix"), layer_cases.call)


@functools.lru_cache(maxsize=64)
def build(case: AnyCase) -> Inputs:
    return case.build()


@functools.lru_cache(maxsize=64)
def expected(case: AnyCase) -> Results:
    return case.oracle(build(case))


def call(op: str, arrays: dict[str, Any], layout: Any = None, **options: Any) -> dict[str, Any]:
    return CALLS[op](op, arrays, layout or {}, **options)


@functools.cache
def runner(op: str, implementation: str | None = None, **options: Any):
    """Jitted ``(arrays, cotangents, layout) -> Results``; cases with the same static options share it."""

    def run(arrays, cotangents, layout):
        f = lambda arrays: call(op, arrays, layout, implementation=implementation, **options)
        outputs, pull = jax.vjp(f, arrays)
        return Results(outputs, pull(cotangents)[0])

    return jax.jit(run)


def run(case: AnyCase, implementation: str | None = None, x: Inputs | None = None, **options: Any) -> Results:
    """Outputs and gradients of the case, or of ``x`` in its place."""
    f = runner(case.op, implementation, **case.options(**options))
    return jax.device_get(f(*jax.tree.map(jnp.asarray, x or build(case))))


def outputs(case: AnyCase, implementation: str | None = None, x: Inputs | None = None, **options: Any) -> Any:
    x = x or build(case)
    options = case.options(**options) | {"implementation": implementation}
    return jax.device_get(jax.jit(lambda arrays: call(case.op, arrays, x.layout, **options))(x.arrays))


def compare(case: AnyCase, got: Results, want: Results | None = None, *tol: Any) -> None:
    """Outputs and gradients; lists everything that is wrong."""
    found = case.errors(got, expected(case) if want is None else want, *tol)
    wrong = {
        name: f"{error:.2e} > {limit:.0e}" for name, (error, limit) in found.items() if not error <= limit
    }
    assert not wrong, wrong


def check(
    case: AnyCase, implementation: str | None = None, *tol: Any, x: Inputs | None = None, **options: Any
):
    """Values and dtypes of outputs and gradients; on heads also the outputs of a call without gradients."""
    given, got = x or build(case), run(case, implementation, x, **options)
    want = expected(case) if x is None else case.oracle(x)
    for found, like in ((got.outputs, given.cotangents), (got.grads, given.arrays)):
        assert {name: a.dtype for name, a in found.items()} == {name: a.dtype for name, a in like.items()}
    compare(case, got, want, *tol)
    if isinstance(case, HeadCase):
        alone = outputs(case, implementation, x, **options)
        compare(case, Results(alone, {}), Results(want.outputs, {}), *tol)


def check_vmap(case: AnyCase, implementation: str | None, *tol: Any, shared: tuple[str, ...] = (), **options):
    """vmap over everything but the arrays in ``shared``, against the oracle on each slice."""
    first, second = (build(dataclasses.replace(case, seed=seed)) for seed in range(2))
    second = second._replace(arrays=second.arrays | {name: first.arrays[name] for name in shared})
    axes = Inputs({name: None if name in shared else 0 for name in first.arrays}, 0, 0)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    stacked = stacked._replace(arrays=stacked.arrays | {name: first.arrays[name] for name in shared})
    run = runner(case.op, implementation, **case.options(**options))
    got = jax.device_get(jax.jit(jax.vmap(run, in_axes=tuple(axes)))(*stacked))
    for i, x in enumerate((first, second)):
        compare(case, jax.tree.map(lambda a, i=i: a[i], got), case.oracle(x), *tol)


@contextlib.contextmanager
def fresh_traces():
    """Traces made before the code is patched are not used, nor those made meanwhile afterwards."""

    def forget():
        jax.clear_caches()
        runner.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()
