"""Activation and RWKV-6's log decays: extreme numbers, second derivatives, residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax import remat_policy
from fla_jax.layers import RWKV6FeedForward, RWKV7FeedForward
from fla_jax.ops.layer import rwkv6_decay, squared_relu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decays_of_any_size_are_finite_and_so_are_their_gradients(dtype):
    x = jnp.array([-200.0, -100.0, 0.0, 19.0, 20.5, 100.0, 1e30])
    w, pull = jax.vjp(lambda x: rwkv6_decay(x, jnp.zeros(7), dtype), x)
    dx = np.asarray(pull(jnp.ones_like(w))[0])
    assert np.isfinite(np.asarray(w, np.float32)).all() and np.isfinite(dx).all()
    assert (np.asarray(w, np.float32) <= 0).all() and dx[3] < -1e8
    assert not dx[4:].any()


@pytest.mark.parametrize(
    "x, base, dtype, error, message",
    [
        (jnp.ones((2, 4)), jnp.ones(3), None, ValueError, r"base must have shape \[C\] = \[4\], got \[3\]"),
        ([1.0], jnp.ones(1), None, TypeError, "x must be a floating-point array, got list"),
        (jnp.ones(4), jnp.ones(4), "int32", TypeError, "dtype must be floating-point, got int32"),
        (jnp.ones(4), jnp.ones(4), "foo", TypeError, "dtype must be floating-point, got foo"),
    ],
)
def test_errors_of_decays(x, base, dtype, error, message):
    with pytest.raises(error, match=message):
        rwkv6_decay(x, base, dtype)


def test_small_numbers_of_float16_keep_their_digits():
    h = jnp.array([2.0**-14, 2.0**-10, -1.0], jnp.float16)
    grad = jax.grad(lambda h: squared_relu(h).sum())(h)
    np.testing.assert_array_equal(grad, [2.0**-13, 2.0**-9, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_not_finite_numbers(dtype):
    most = float(jnp.finfo(dtype).max)
    h = jnp.array([jnp.nan, jnp.inf, -jnp.inf, most, -most, -0.0], dtype)
    np.testing.assert_array_equal(np.asarray(squared_relu(h), np.float32), [np.nan, np.inf, 0, np.inf, 0, 0])
    grad = jax.grad(lambda h: squared_relu(h).sum())(h)
    assert np.isnan(grad[0]) and not np.asarray(grad[jnp.array([2, 4, 5])]).any()


def test_no_maximum_that_a_product_could_take_over():
    """With a maximum in their product, weights are copied out of the stack of layers (seen on GPUs only)."""
    assert "max" not in str(jax.make_jaxpr(squared_relu)(jnp.ones(3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_second_derivative(dtype):
    """2 above 0 and 0 below, at 0 too: a square root's slope there is infinite."""
    h = jnp.array([-3.0, -0.0, 0.0, 0.25, 8.0], dtype)
    slope = lambda h: jax.grad(lambda h: squared_relu(h).sum())(h).sum()
    np.testing.assert_array_equal(jax.grad(slope)(h), [0, 0, 0, 2, 2])
    np.testing.assert_array_equal(jax.jit(jax.grad(slope))(h), [0, 0, 0, 2, 2])


@pytest.mark.parametrize("policy", [None, remat_policy(dense=True)])
@pytest.mark.parametrize("layer", [RWKV6FeedForward, RWKV7FeedForward])
def test_a_channel_mix_stores_one_array_of_its_hidden_layer(layer, policy):
    """The square, which the product with ``value`` stores anyway."""
    layer = layer(hidden_size=32, layer_index=0, num_layers=2, intermediate_size=96)
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    params = layer.init(jax.random.key(1), x)
    mix = lambda params, x: layer.apply(params, x)[0]
    f = mix if policy is None else jax.checkpoint(mix, policy=policy)
    residuals = jax.tree.leaves(jax.vjp(f, params, x)[1])
    # one object or several of the same numbers: XLA makes those one
    assert len({np.asarray(array).tobytes() for array in residuals if array.shape == (2, 8, 96)}) == 1
