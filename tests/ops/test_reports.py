"""Reports about other RWKV-6 kernels that this library grew from, with the default implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases
from harness.cases import Case

import fla_jax
from fla_jax.ops import chunk_rwkv6


def test_training_at_strong_decay_stays_finite():
    """NaN in training with ``w = -exp(x)``: x is learned, from a decay of e^-55 further."""
    given = jax.tree.map(jnp.asarray, cases.build(Case("rwkv6", B=2, T=64, K=16, V=16)))
    x, target = given.arrays, given.cotangents["o"]

    def loss(p):
        o, _ = chunk_rwkv6(x["r"], p["k"], x["v"], -jnp.exp(p["x"]), p["u"])
        return jnp.mean((o - target) ** 2)

    def step(p, _):
        value, g = jax.value_and_grad(loss)(p)
        finite = [jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(g)]
        return jax.tree.map(lambda a, b: a - 0.3 * b, p, g), (value, jnp.array(finite))

    start = {"k": x["k"], "u": x["u"], "x": jnp.linspace(-6.0, 4.0, 16) * jnp.ones((2, 64, 2, 1))}
    _, (losses, finite) = jax.jit(lambda p: jax.lax.scan(step, p, length=30))(start)
    assert np.all(finite) and np.all(np.isfinite(losses)) and losses[-1] < losses[0]


def test_six_thousand_tokens():
    cases.check(Case("rwkv6", B=1, T=6000, H=1, K=16, V=16))


def test_a_positive_decay_is_reported():
    """``w = exp(x)``, a sign forgotten: the gradient explodes, and the checked mode says why."""
    x = cases.build(Case("rwkv6", B=1, T=64, K=16, V=16)).arrays

    def gradient(w):
        return jax.grad(lambda k: jnp.sum(chunk_rwkv6(x["r"], k, x["v"], w, x["u"])[0]))(x["k"])

    with pytest.raises(ValueError, match=r"chunk_rwkv6: w, the log decay, must be <= 0, got a largest value"):
        fla_jax.checked(gradient)(-x["w"])
    assert np.all(np.isfinite(fla_jax.checked(gradient)(x["w"])))
