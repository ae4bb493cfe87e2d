"""The layer operations at every scale of values and cotangents against float64, by each head's norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, places, scales, variants
from harness.cases import HEAD_OPS, HeadCase, Inputs, MixCase
from harness.places import TRITON_INTERPRETER

from fla_jax.ops.layer import rwkv6_decay, squared_relu

SIZES, EXPONENTS = (1e-6, 1.0, 1e3), (-60, -40, -30, -20, 0, 20, 40)
GATES = {"decay", "rate", "mix", "w0", "a0", "v0"}
DTYPES = ("float32", "bfloat16")
LIMIT = 1e-5  # of errors beyond the rounding of 16-bit results
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def each_place(table: Any) -> Any:
    return pytest.mark.parametrize("place", [place for place in places.here() if place in table], ids=str)


def scaled(arrays: dict[str, np.ndarray], by: Any) -> dict[str, np.ndarray]:
    return {name: (np.asarray(x, np.float64) * by(name)).astype(x.dtype) for name, x in arrays.items()}


def draws(names: Any, count: int) -> list[dict[str, float]]:
    """Sizes of arrays by name: all alike, then any."""
    rng = np.random.default_rng(0)
    alike = [dict.fromkeys(names, size) for size in SIZES]
    return alike + [{name: float(rng.choice(SIZES)) for name in names} for _ in range(count - len(alike))]


@each_place(places.HEADS)
@pytest.mark.parametrize("op", HEAD_OPS)
@each_dtype
def test_ops_on_heads(op, dtype, place):
    case = HeadCase(op, B=1, T=9, H=28, N=16, residual=True, dtype=dtype)
    x = cases.build(case)
    sizes = draws([*x.arrays], case.H)
    exponents = [EXPONENTS[h % len(EXPONENTS)] for h in range(case.H)]
    powers = np.exp2(np.array(exponents, float))[:, None]
    arrays = scaled(x.arrays, lambda name: np.array([size[name] for size in sizes])[:, None])
    x = Inputs(arrays, scaled(x.cotangents, lambda name: powers), {})
    found = scales.errors(cases.run(case, place.implementation, x), case.oracle(x))
    wrong = {}
    for h, size in enumerate(sizes):
        for name, error in found.items():
            # a sum of a thousand, argument of a sigmoid, is rounded by up to 6e-5
            large = name[1:] in GATES and size.get(name[1:], 0) and max(size[n] for n in GATES) > 1
            if not error[h] <= (1e-4 if large else LIMIT):
                wrong[name, exponents[h], str(size)] = f"{error[h]:.0e}"
    assert not wrong, wrong


@each_place(places.HEADS)
@pytest.mark.parametrize("at", [-30.0, -12.0, 12.0, 30.0])
def test_gates_that_are_nearly_open_or_shut(at, place):
    """One less a sigmoid that is 1 in float32 is not 0; with k_a = 1 keys are multiplied by the sigmoid."""
    case = HeadCase("rwkv7_keys", B=1, T=9, H=4, N=16, residual=True)
    x = case.build()
    for name in ("w0", "a0", "v0"):
        x.arrays[name] += np.float32(at)
    x.arrays["k_a"][:2] = 1
    x.arrays["v"][:, :, ::2] *= 1e3
    x.cotangents["b"][:] = x.cotangents["a"][:] = 0
    found = scales.errors(cases.run(case, place.implementation, x), case.oracle(x))
    wrong = {name: error for name, error in found.items() if not np.max(error) <= 1e-5}
    assert not wrong, wrong


MIXES = {
    "rwkv7 attention": MixCase(B=1, T=6, C=24, M=4),
    "everything": MixCase(B=1, T=6, C=24, M=2, mix_delta=True, normalised=True, lengths=(3, 1, 5)),
    "tiles of channels": MixCase(B=1, T=6, C=160, M=2),
}


@each_place(places.NORM_MIX)
@pytest.mark.parametrize("name", MIXES)
@each_dtype
def test_norm_shift_and_mixes(name, dtype, place):
    case = dataclasses.replace(MIXES[name], dtype=dtype)
    x, wrong = cases.build(case), {}
    tiles = place is TRITON_INTERPRETER and name == "tiles of channels"
    with variants.forced(*["mix: tiles of 128 channels"] if tiles else ()):
        for i, sizes in enumerate(draws([*x.arrays], 4 if place is TRITON_INTERPRETER else 14)):
            n = EXPONENTS[i % len(EXPONENTS)]
            arrays, cotangents = scaled(x.arrays, sizes.get), scaled(x.cotangents, lambda _, n=n: 2.0**n)
            one = Inputs(arrays, cotangents, x.layout)
            for prefix, got, want in zip(
                ("", "d"), cases.run(case, place.implementation, one), case.oracle(one)
            ):
                for array, a in got.items():
                    error = cases.error_of(a, want[array])
                    if not error <= LIMIT:
                        wrong[prefix + array, n, str(sizes)] = f"{error:.0e}"
    assert not wrong, wrong


@each_dtype
def test_activation_and_decays(dtype):
    """A decay's result is of ``dtype``, and so its gradient is as exact as that."""
    rng = np.random.default_rng(0)
    wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
    for size in SIZES:
        for exponent in EXPONENTS:
            h, x = (size * rng.standard_normal((32, 64)) for _ in range(2))
            base = rng.standard_normal(64) - 1
            g = jnp.asarray(np.exp2(float(exponent)) * rng.standard_normal(h.shape), dtype)
            h, x, base = jnp.asarray(h, dtype), jnp.asarray(x, jnp.float32), jnp.asarray(base, jnp.float32)
            y, pull = jax.vjp(squared_relu, h)
            w, pull_w = jax.vjp(lambda x, base: rwkv6_decay(x, base, dtype), x, base)
            assert y.dtype == pull(g)[0].dtype == w.dtype == dtype and pull_w(g)[1].dtype == jnp.float32
            total = wide(x) + wide(base)
            decay = -np.exp(np.minimum(total, 20.0))
            slope = np.where(total < 20.0, decay, 0) * wide(g)
            limit = 1e-6 if dtype == "float32" else 3e-3  # half of 2^-8, and a sum
            for got, want in (
                (y, np.maximum(wide(h), 0) ** 2),
                (pull(g)[0], 2 * np.maximum(wide(h), 0) * wide(g)),
                (w, decay),
                (pull_w(g)[0], slope),
                (pull_w(g)[1], slope.sum(0)),
            ):
                assert cases.error_of(got, want) <= (limit if size < 1e3 else max(limit, 1e-4))
