"""Products whose result is wider than their operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.layers.sharding import ActivationSharding


def error(x, exact):
    return np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)


def product(x, weight):
    sharding = ActivationSharding.of(x)
    return sharding.dot(x, weight, ("embed", "heads"), preferred_element_type=jnp.float32)


def arrays(dtype):
    x, weight, dy = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(2, 64, 48), (48, 96), (2, 64, 96)])
    )
    return x.astype(dtype), weight.astype(dtype), dy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_wide_result_against_float64(dtype):
    """The value is as exact as float32; gradients are rounded as a product of that dtype rounds them."""
    x, weight, dy = arrays(dtype)
    y, pull = jax.vjp(product, x, weight)
    dx, dweight = pull(dy)
    assert y.dtype == jnp.float32 and dx.dtype == dweight.dtype == x.dtype
    X, W, D = (np.asarray(a, np.float64) for a in (x, weight, dy))
    assert error(y, X @ W) < 1e-6
    bound = {"float32": 1e-6, "float16": 4e-4, "bfloat16": 3e-3}[dtype]
    assert error(dx, D @ W.T) < bound
    assert error(dweight, np.einsum("bti,bto->io", X, D)) < bound


def test_the_cotangent_of_a_wide_result_is_rounded_where_that_loses_no_range():
    def kinds(dtype):
        x, weight, dy = arrays(dtype)
        jaxpr = jax.make_jaxpr(lambda x, weight, dy: jax.vjp(product, x, weight)[1](dy))(x, weight, dy)
        products = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
        return {variable.aval.dtype.name for e in products for variable in e.invars}

    assert kinds("bfloat16") == {"bfloat16"}
    assert kinds("float16") == {"float16", "float32"}


def test_the_cotangent_of_a_wide_result_keeps_what_float16_has_not_the_range_for():
    x, weight, dy = arrays("float16")
    weight, dy = weight * 1000, dy * 1e-7
    dx = jax.vjp(product, x, weight)[1](dy)[0]
    assert error(dx, np.asarray(dy, np.float64) @ np.asarray(weight, np.float64).T) < 1e-3
