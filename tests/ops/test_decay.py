"""RWKV-6's log decays against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.ops.layer import rwkv6_decay


def error(x, exact):
    return np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 3e-3)])
def test_values_and_gradients_against_float64(dtype, bound):
    """bfloat16: w has a rounding, half of 2^-8 at most, and the gradient that of w and another."""
    x = 2 * jax.random.normal(jax.random.key(0), (64, 32))
    base = jnp.linspace(-6.0, 1.0, 32)
    dw = jax.random.normal(jax.random.key(1), x.shape).astype(dtype)
    w, pull = jax.vjp(lambda x, base: rwkv6_decay(x, base, dtype), x, base)
    dx, dbase = pull(dw)
    exact = -np.exp(np.asarray(base, np.float64) + np.asarray(x, np.float64))
    slope = exact * np.asarray(dw, np.float64)
    assert w.dtype == dtype and dx.dtype == dbase.dtype == jnp.float32
    assert error(w, exact) < bound
    assert error(dx, slope) < bound
    assert error(dbase, slope.sum(0)) < bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decays_of_any_size_are_finite_and_so_are_their_gradients(dtype):
    x = jnp.array([-200.0, -100.0, 0.0, 19.0, 20.5, 100.0, 1e30])
    w, pull = jax.vjp(lambda x: rwkv6_decay(x, jnp.zeros(7), dtype), x)
    dx = np.asarray(pull(jnp.ones_like(w))[0])
    assert np.isfinite(np.asarray(w, np.float32)).all() and np.isfinite(dx).all()
    assert (np.asarray(w, np.float32) <= 0).all() and dx[3] < -1e8
    assert not dx[4:].any()
