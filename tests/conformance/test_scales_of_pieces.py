"""The pieces of the layers at every scale of values and cotangents, where they run, against their float64
references; each head, or each call of norm, shift and mixes, by its own norms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import heads_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_ops import norm_mix_cases, norm_mix_reference

from fla_jax.ops.layer import rwkv6_decay, squared_relu
from fla_jax.pallas.layer import norm_shift_mix_variants

from . import places
from .pieces import HEADS
from .places import TRITON_INTERPRETER

SIZES, EXPONENTS = (1e-6, 1.0, 1e3), (-60, -40, -30, -20, 0, 20, 40)
GATES = {"decay", "rate", "mix", "w0", "a0", "v0"}
DTYPES = ("float32", "bfloat16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tolerance(place: places.Place, dtype: str) -> float:
    """Beyond the rounding of 16-bit results, which Triton's interpreter cuts off."""
    return 2.0**-7 if place is TRITON_INTERPRETER and dtype == "bfloat16" else 1e-5


def scaled(x: np.ndarray, by: Any) -> np.ndarray:
    return (np.asarray(x, np.float64) * by).astype(x.dtype)


def draws(names: Any, count: int) -> list[dict[str, float]]:
    """Sizes of arrays by name: all alike, then any."""
    rng = np.random.default_rng(0)
    alike = [dict.fromkeys(names, size) for size in SIZES]
    return alike + [{name: float(rng.choice(SIZES)) for name in names} for _ in range(count - len(alike))]


def of_heads(case: heads_cases.Case, sizes: list[dict[str, float]], exponents: Any) -> Any:
    """Arrays and cotangents of a case whose heads have these sizes and powers of two."""
    arrays, cotangents = heads_cases.build(case)
    by = {name: np.array([size[name] for size in sizes])[:, None] for name in arrays}
    powers = np.exp2(np.array(exponents, float))[:, None]
    return (
        {name: scaled(x, by[name]) for name, x in arrays.items()},
        {name: scaled(x, powers) for name, x in cotangents.items()},
    )


def errors_by_head(got: Any, want: Any) -> dict[str, np.ndarray]:
    """Of results and gradients (``dk``, ...), [H]."""
    return {
        prefix + name: cases.errors_of(one[name], x, (1,) if x.ndim == 2 else (0, 1, 3))
        for prefix, one, wanted in zip(("", "d"), got, want)
        for name, x in wanted.items()
    }


@pytest.mark.parametrize("place", [place for place in places.here() if place in places.HEADS], ids=str)
@pytest.mark.parametrize("op", HEADS)
@each_dtype
def test_pieces_on_heads(op, dtype, place):
    case = heads_cases.Case(op, B=1, T=9, H=28, N=16, residual=True, dtype=dtype)
    sizes = draws([*heads_cases.TOKENS[op], *heads_cases.VECTORS[op]], case.H)
    exponents = [EXPONENTS[h % len(EXPONENTS)] for h in range(case.H)]
    arrays, cotangents = of_heads(case, sizes, exponents)
    got = heads_cases.run(case, place.implementation, arrays, cotangents)
    found = errors_by_head(got, heads_cases.expected(case, arrays, cotangents))
    limit = tolerance(place, dtype)
    wrong = {}
    for h, size in enumerate(sizes):
        for name, error in found.items():
            # a sum of a thousand, argument of a sigmoid, is rounded by up to 6e-5
            large = name[1:] in GATES and size.get(name[1:], 0) and max(size[n] for n in GATES) > 1
            if not error[h] <= (max(limit, 1e-4) if large else limit):
                wrong[name, exponents[h], str(size)] = f"{error[h]:.0e}"
    assert not wrong, wrong


@pytest.mark.parametrize("place", [place for place in places.here() if place in places.HEADS], ids=str)
@pytest.mark.parametrize("at", [-30.0, -12.0, 12.0, 30.0])
def test_gates_that_are_nearly_open_or_shut(at, place):
    """Of a sigmoid that is 1 in float32 one less it is not 0, and nor are gradients; with k_a = 1 keys are
    multiplied by the sigmoid itself.
    """
    case = heads_cases.Case("rwkv7_keys", B=1, T=9, H=4, N=16, residual=True)
    arrays, cotangents = heads_cases.build(case)
    for name in ("w0", "a0", "v0"):
        arrays[name] += np.float32(at)
    arrays["k_a"][:2] = 1
    arrays["v"][:, :, ::2] *= 1e3
    cotangents["b"][:] = cotangents["a"][:] = 0
    got = heads_cases.run(case, place.implementation, arrays, cotangents)
    found = errors_by_head(got, heads_cases.expected(case, arrays, cotangents))
    wrong = {name: error for name, error in found.items() if not np.max(error) <= 1e-5}
    assert not wrong, wrong


NORM_MIX = {
    "rwkv7 attention": norm_mix_cases.Case(B=1, T=6, C=24, M=4),
    "everything": norm_mix_cases.Case(B=1, T=6, C=24, M=2, moves=True, normalised=True, lengths=(3, 1, 5)),
    "tiles of channels": norm_mix_cases.Case(B=1, T=6, C=160, M=2),
}


@pytest.mark.parametrize("place", [place for place in places.here() if place in places.NORM_MIX], ids=str)
@pytest.mark.parametrize("name", NORM_MIX)
@each_dtype
def test_norm_shift_and_mixes(name, dtype, place, monkeypatch):
    if place is TRITON_INTERPRETER and name == "tiles of channels":  # of 128, and no token whole
        variants = [one for one in norm_shift_mix_variants.VARIANTS if not one.is_whole]
        monkeypatch.setattr(norm_shift_mix_variants, "VARIANTS", variants)
        tiles = {
            name: one._replace(channels=min(one.channels, 128))
            for name, one in norm_shift_mix_variants.TILES.items()
        }
        monkeypatch.setattr(norm_shift_mix_variants, "TILES", tiles)
    case = dataclasses.replace(NORM_MIX[name], dtype=dtype)
    arrays, cotangents = norm_mix_cases.build(case)
    run = jax.jit(norm_mix_cases.runner(place.implementation, case.normalised))
    stack = lambda tree: {n: np.stack(a) if isinstance(a, tuple) else np.asarray(a) for n, a in tree.items()}
    count = 4 if place is TRITON_INTERPRETER else 14
    wrong = {}
    for i, sizes in enumerate(draws([n for n in arrays if n != "segment_ids"], count)):
        exponent = EXPONENTS[i % len(EXPONENTS)]
        by_size = lambda n, a, sizes=sizes: a if n == "segment_ids" else scaled(a, sizes[n])
        x = {
            n: tuple(by_size(n, mu) for mu in a) if n == "mixes" else by_size(n, a) for n, a in arrays.items()
        }
        ct = {n: scaled(a, 2.0**exponent) for n, a in cotangents.items()}
        floats = jax.tree.map(jnp.asarray, {n: a for n, a in x.items() if n != "segment_ids"})
        made, grads = run(floats, x.get("segment_ids"), ct)
        if case.y:  # rounded as the op rounds it
            total = norm_mix_reference.wide(x["x"]) + norm_mix_reference.wide(x.pop("y"))
            x["x"] = total.astype(x["x"].dtype)
        want = norm_mix_reference.results(**x)
        wanted = norm_mix_reference.gradients(
            want, x.get("scale"), *(ct.get(n) for n in ("mixed", "last", "x", "normalised"))
        )
        for prefix, one, right in (("", stack(made), want), ("d", stack(grads), wanted)):
            for n, a in one.items():
                error = cases.error_of(a, right[n])
                if not error <= tolerance(place, dtype):
                    wrong[prefix + n, exponent, str(sizes)] = f"{error:.0e}"
    assert not wrong, wrong


@each_dtype
def test_activation_and_decays(dtype):
    """A decay's result is of ``dtype``, and so its gradient is as exact as that."""
    rng = np.random.default_rng(0)
    for size in SIZES:
        for exponent in EXPONENTS:
            h, x = (size * rng.standard_normal((32, 64)) for _ in range(2))
            base = rng.standard_normal(64) - 1
            g = jnp.asarray(np.exp2(float(exponent)) * rng.standard_normal(h.shape), dtype)
            h, x, base = jnp.asarray(h, dtype), jnp.asarray(x, jnp.float32), jnp.asarray(base, jnp.float32)
            y, pull = jax.vjp(squared_relu, h)
            w, pull_w = jax.vjp(lambda x, base: rwkv6_decay(x, base, dtype), x, base)
            wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
            total = wide(x) + wide(base)
            decay = -np.exp(np.minimum(total, 20.0))
            slope = np.where(total < 20.0, decay, 0) * wide(g)
            limit = 1e-5 if dtype == "float32" else 2.0**-8
            for got, want in (
                (y, np.maximum(wide(h), 0) ** 2),
                (pull(g)[0], 2 * np.maximum(wide(h), 0) * wide(g)),
                (w, decay),
                (pull_w(g)[0], slope),
                (pull_w(g)[1], slope.sum(0)),
            ):
                assert cases.error_of(got, want) <= (limit if size < 1e3 else max(limit, 1e-4))
