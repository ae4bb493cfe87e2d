"""Named calls of norm, shift and mixes for every test of them: inputs, the float64 answer, the comparison."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from layer_ops import norm_mix_reference as reference

from fla_jax.ops.layer import norm_shift_mix

EXACT = {"float64": 1e-12, "float32": 1e-6}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``lengths`` are the segments of every row, later in later rows."""

    B: int = 2
    T: int = 11
    C: int = 20
    M: int = 6
    y: bool = True
    norm: bool = True
    last: bool = True
    moves: bool = False
    normalised: bool = False
    lengths: tuple[int, ...] = ()
    dtype: str = "float32"
    parameters: str = "float32"
    seed: int = 0

    @property
    def carries(self) -> bool:
        return self.y or self.norm


CASES = {
    "rwkv7 attention": Case(),
    "rwkv7 feed-forward": Case(M=1),
    "rwkv6 feed-forward": Case(M=2, C=7),
    "rwkv6 attention, one": Case(M=1, normalised=True),
    "rwkv6 attention, five": Case(M=5, y=False, norm=False, moves=True),
    "public layer": Case(y=False, norm=False),
    "no state": Case(M=2, last=False),
    "no norm": Case(M=2, norm=False),
    "no sum": Case(M=2, y=False, normalised=True),
    "everything": Case(M=3, moves=True, normalised=True, lengths=(3, 1, 5, 9)),
    "segments": Case(M=2, lengths=(4, 1, 1, 9)),
    "segments of moves": Case(M=5, y=False, norm=False, moves=True, lengths=(8, 9)),
    "one token": Case(T=1),
    "one token of a segment": Case(T=1, M=2, last=False, lengths=(1,)),
}
# those that differ in what the kernels are compiled for
KERNELS = (
    "rwkv7 attention",
    "rwkv6 feed-forward",
    "rwkv6 attention, one",
    "rwkv6 attention, five",
    "no state",
    "no sum",
    "everything",
    "segments",
    "one token",
)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def build(case: Case) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keyword arguments of the public function, and cotangents of its results by name."""
    rng = np.random.default_rng(case.seed)
    B, T, C, M = case.B, case.T, case.C, case.M
    token, parameter = dtype_of(case.dtype), dtype_of(case.parameters)

    def normal(*shape: int, dtype: np.dtype = token) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    # a residual stream has channels with means far from zero
    x = (rng.standard_normal((B, T, C)) * 2 + 5 * rng.standard_normal(C)).astype(token)
    arrays: dict[str, Any] = {"x": x, "mixes": tuple(rng.uniform(0, 1, (M, C)).astype(parameter))}
    if case.y:
        arrays["y"] = normal(B, T, C)
    if case.norm:
        arrays["scale"] = (1 + 0.3 * rng.standard_normal(C)).astype(parameter)
        arrays["bias"] = normal(C, dtype=parameter)
    if case.last:
        arrays["last"] = normal(B, C)
    if case.moves:
        arrays["moves"] = (0.3 * rng.standard_normal((M, B, T, C))).astype(token)
    if case.lengths:
        ids = np.repeat([7, -3, 7, 0, 12][: len(case.lengths)], case.lengths)
        arrays["segment_ids"] = np.stack(
            [np.concatenate([np.full(b, ids[0]), ids])[:T] for b in range(B)]
        ).astype(np.int32)
    cotangents = {"mixed": normal(M, B, T, C), "last": normal(B, C)}
    cotangents |= {"x": normal(B, T, C)} if case.carries else {}
    cotangents |= {"normalised": normal(B, T, C)} if case.normalised else {}
    return arrays, cotangents


@functools.cache
def expected(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results and gradients by name, of the inputs as rounded; x + y is rounded as the op rounds it."""
    arrays, cotangents = build(case)
    arrays = dict(arrays)
    if case.y:
        total = (reference.wide(arrays["x"]) + reference.wide(arrays.pop("y"))).astype(arrays["x"].dtype)
        arrays["x"] = total
    made = reference.results(**arrays)
    grads = reference.gradients(
        made, arrays.get("scale"), *(cotangents.get(n) for n in ("mixed", "last", "x", "normalised"))
    )
    given = {name for name in build(case)[0] if name != "segment_ids"}
    return {name: made[name] for name in cotangents}, {name: grads[name] for name in given}


def runner(implementation: str | None, normalised: bool, **options: Any):
    """``(floats, segment_ids, cotangents) -> (results, gradients)`` by name."""

    def run(floats, segment_ids, cotangents):
        def f(floats):
            made = norm_shift_mix(
                **floats,
                segment_ids=segment_ids,
                normalised=normalised,
                implementation=implementation,
                **options,
            )
            return {name: field for name, field in made._asdict().items() if field is not None}

        made, pull = jax.vjp(f, floats)
        return made, pull(cotangents | {"mixed": tuple(cotangents["mixed"])})[0]

    return run


def jitted(f):
    """``f`` jitted, compiled fast rather than well on a CPU."""
    return jax.jit(f)


def run(case: Case, implementation: str | None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Results and gradients by name, mixes stacked."""
    arrays, cotangents = build(case)
    floats = {
        name: jnp.asarray(a) if name != "mixes" else tuple(map(jnp.asarray, a)) for name, a in arrays.items()
    }
    segment_ids = floats.pop("segment_ids", None)
    made, grads = jitted(runner(implementation, case.normalised))(floats, segment_ids, cotangents)
    stack = lambda tree: {n: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for n, a in tree.items()}
    return stack(made), stack(grads)


def errors(case: Case, got: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, float]:
    """Relative Frobenius errors of results and gradients (``dx``, ...); all that is wanted is there."""
    found = {}
    for prefix, one, want in zip(("", "d"), got, expected(case)):
        assert one.keys() == want.keys(), (one.keys(), want.keys())
        for name, w in want.items():
            g = one[name].astype(np.float64)
            assert g.shape == w.shape, (prefix + name, g.shape, w.shape)
            norm = np.linalg.norm(w)
            found[prefix + name] = float(np.linalg.norm(g - w) / norm) if norm else float(np.abs(g).max())
    return found


def check(case: Case, implementation: str | None, tolerance: float | None = None) -> None:
    """Values, gradients and their dtypes."""
    got = run(case, implementation)
    arrays, _ = build(case)
    assert {a.dtype for a in got[0].values()} == {arrays["x"].dtype}
    for name, g in got[1].items():
        assert g.dtype == (arrays["mixes"][0] if name == "mixes" else arrays[name]).dtype, name
    worst = errors(case, got)
    limit = EXACT[case.dtype] if tolerance is None else tolerance
    assert max(worst.values()) <= limit, {n: e for n, e in worst.items() if not e <= limit}


def check_vmap(implementation: str, shared: tuple[str, ...]) -> None:
    """Over all arrays but those that are ``shared``, against the calls one by one."""
    case = Case(B=1, T=5, C=6, M=2, moves=True, lengths=(2, 4))
    each = [dict(build(dataclasses.replace(case, seed=seed))[0]) for seed in range(2)]
    for one in each:
        one |= {name: each[0][name] for name in shared}
    cotangents = [build(dataclasses.replace(case, seed=seed))[1] for seed in range(2)]
    stack = lambda *xs: jax.tree.map(lambda *x: jnp.stack(x), *xs)
    axes = {name: None if name in shared else 0 for name in each[0]}
    stacked = stack(*each) | {name: each[0][name] for name in shared}
    run = runner(implementation, False)
    one_by_one = jitted(run)
    split = lambda arrays: ({n: a for n, a in arrays.items() if n != "segment_ids"}, arrays["segment_ids"])
    in_axes = (*split(axes), 0)
    got = jitted(jax.vmap(run, in_axes=in_axes))(*split(stacked), stack(*cotangents))
    for i in range(2):
        want = one_by_one(*split(each[i]), cotangents[i])
        chex.assert_trees_all_close(jax.tree.map(lambda a, i=i: a[i], got), want, rtol=1e-5, atol=1e-6)
