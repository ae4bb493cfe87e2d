# ruff: noqa: F401 (what describes and compares cases is used as ``cases.NAME``)
"""One way to run and judge a call of any op: build it, call the public function, compare with the oracle.

A case (`Case`, `HeadCase`, `MixCase`) describes a call; an implementation is a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def stacked(case: AnyCase, mapped: Collection[str]) -> tuple[Inputs, Inputs, tuple[Inputs, Inputs]]:
    """Two calls that differ in what ``mapped`` names: arrays, layouts, "cotangents".

    Returns:
        The inputs for `jax.vmap`, their axes, and the inputs of each call.
    """
    first, other = (dataclasses.replace(case, seed=seed).build() for seed in range(2))
    for name, ids in first.layout.items():
        other.layout[name] = ids[-1] - ids[::-1] if name == "cu_seqlens" else ids[::-1]
    outputs = {*first.cotangents} if "cotangents" in mapped else set()
    differ = ({*first.arrays} & {*mapped}, outputs, {*first.layout} & {*mapped})
    parts = [*zip(first, other, differ)]
    second = Inputs(*({n: b[n] if n in names else a[n] for n in a} for a, b, names in parts))
    both = Inputs(*({n: np.stack([a[n], b[n]]) if n in names else a[n] for n in a} for a, b, names in parts))
    axes = Inputs(*({n: 0 if n in names else None for n in a} for a, _, names in parts))
    return both, axes, (first, second)


def check_vmap(case: AnyCase, implementation: str | None, *tol: Any, shared: tuple[str, ...] = (), **options):
    """vmap over everything but the arrays in ``shared``."""
    x = build(case)
    mapped = {"cotangents", *x.arrays, *x.layout} - {*shared}
    check_vmap_over(case, implementation, mapped, *tol, **options)


def check_vmap_over(
    case: AnyCase, implementation: str | None, mapped: Collection[str], *tol: Any, **options: Any
) -> None:
    """vmap of outputs and gradients over the inputs in ``mapped``, against the oracle on each slice."""
    x, axes, slices = stacked(case, mapped)
    run = runner(case.op, implementation, **case.options(**options))
    got = jax.device_get(jax.jit(jax.vmap(run, in_axes=tuple(axes)))(*x))
    for i, one in enumerate(slices):
        compare(case, jax.tree.map(lambda a, i=i: a[i], got), case.oracle(one), *tol)


def check_grad_of_vmap(
    case: AnyCase, name: str, tol: float, implementation: str | None = None, **options: Any
) -> None:
    """Of a loss of all outputs: what an array shared by the slices gets is the sum of theirs."""
    x, axes, slices = stacked(case, {name})
    options = case.options(**options) | {"implementation": implementation}

    @jax.jit
    def one(arrays):
        got = call(case.op, arrays, x.layout, **options)
        return sum(jnp.vdot(c, got[output]) for output, c in x.cotangents.items())

    total = lambda arrays: jnp.sum(jax.vmap(one, (axes.arrays,))(arrays))
    wanted = [case.oracle(x).grads for x in slices]
    for got in (jax.grad(total)(x.arrays), jax.jit(jax.grad(jax.jit(total)))(x.arrays)):
        for of, grad in got.items():
            want = np.stack([one[of] for one in wanted])
            assert_close(f"d{of}", grad, want if of == name else want.sum(0), tol)


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
