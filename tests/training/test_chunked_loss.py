"""Cross-entropy in blocks: value and gradients of the plain one, and less memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.training import chunked_cross_entropy, cross_entropy

B, T, C, V = 2, 7, 6, 11


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden, kernel = (
        jnp.asarray(rng.normal(size=(B, T, C)), dtype),
        jnp.asarray(3 * rng.normal(size=(C, V)), jnp.float32),
    )
    return hidden, kernel, jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)


def plain(hidden, kernel, labels, mask=None, l2wrap=1e-4):
    return cross_entropy(
        jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32),
        labels,
        mask,
        l2wrap,
    )


@pytest.mark.parametrize("mask", [None, "booleans", "weights"])
@pytest.mark.parametrize("l2wrap, block_tokens", [(0.5, 6), (1e-4, 1), (0.0, 1000)])
def test_equals_the_plain_loss(mask, l2wrap, block_tokens):
    """Blocks that divide T, that do not, and one for all; a cotangent other than 1."""
    hidden, kernel, labels = inputs()
    rng = np.random.default_rng(1)
    mask = {
        None: None,
        "booleans": jnp.asarray(rng.integers(0, 2, (B, T)), bool),
        "weights": jnp.asarray(rng.uniform(size=(B, T)), jnp.float32),
    }[mask]
    want, pull = jax.vjp(lambda h, k: plain(h, k, labels, mask, l2wrap), hidden, kernel)
    got, pull_blocks = jax.vjp(
        lambda h, k: chunked_cross_entropy(h, k, labels, mask, l2wrap, block_tokens=block_tokens),
        hidden,
        kernel,
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
        chunked_cross_entropy(hidden, kernel, labels, mask, l2wrap, block_tokens=block_tokens),
        want,
        rtol=1e-6,
    )
    for a, b in zip(pull_blocks(jnp.float32(3.0)), pull(jnp.float32(3.0))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [chunked_cross_entropy, plain])
def test_weights_of_either_sign(loss):
    """Against the weighted mean in float64, its gradient in the logits by hand."""
    hidden, kernel, labels = inputs()
    weights = np.random.default_rng(1).choice([-1.5, 0.0, 2.0], (B, T))
    logits = np.asarray(hidden, np.float64) @ np.asarray(kernel, np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    right = np.eye(V)[np.asarray(labels)]
    want = -np.sum(np.log(p) * right * weights[..., None]) / weights.sum()
    d = (p - right) * weights[..., None] / weights.sum()
    got, grads = jax.value_and_grad(loss, (0, 1))(
        hidden, kernel, labels, jnp.asarray(weights, jnp.float32), 0
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grads[0], d @ np.asarray(kernel, np.float64).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], np.einsum("btc,btv->cv", hidden, d), rtol=1e-4, atol=1e-5)


def test_bfloat16_activations():
    hidden, kernel, labels = inputs(jnp.bfloat16)
    value, grads = jax.value_and_grad(chunked_cross_entropy, (0, 1))(hidden, kernel, labels, block_tokens=4)
    want, wanted = jax.value_and_grad(plain, (0, 1))(hidden, kernel, labels)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for a, b in zip(grads, wanted):
        assert a.dtype == b.dtype
        assert np.abs(np.float32(a) - np.float32(b)).max() < 0.02 * np.abs(np.float32(b)).max()


def test_masked_positions_may_hold_anything():
    hidden, kernel, labels = inputs()
    mask = jnp.ones((B, T), bool).at[0, 2].set(False).at[1].set(False)
    spoiled = hidden.at[0, 2].set(jnp.nan).at[1].set(jnp.inf)
    loss = jax.value_and_grad(chunked_cross_entropy, (0, 1))
    jax.tree.map(
        np.testing.assert_array_equal,
        loss(spoiled, kernel, labels, mask),
        loss(jnp.where(mask[..., None], hidden, 0), kernel, labels, mask),
    )
    assert chunked_cross_entropy(hidden, kernel, labels, jnp.zeros((B, T))) == 0


@pytest.mark.parametrize("loss", [chunked_cross_entropy, plain])
def test_labels_that_are_no_tokens(loss):
    """Where the mask is 0 they are passed over; elsewhere the loss is NaN, and no other number."""
    hidden, kernel, labels = inputs()
    mask = jnp.ones((B, T), bool).at[0, 2].set(False).at[1, 0].set(False)
    run = jax.value_and_grad(loss, (0, 1))
    for other in (-100, -1, kernel.shape[1], 2**31 - 1):
        changed = labels.at[0, 2].set(other).at[1, 0].set(other)
        jax.tree.map(
            np.testing.assert_array_equal,
            run(hidden, kernel, changed, mask),
            run(hidden, kernel, jnp.where(mask, labels, 0), mask),
        )
        assert np.isnan(loss(hidden, kernel, changed))


@pytest.mark.parametrize("loss", [chunked_cross_entropy, plain])
def test_labels_of_a_narrow_dtype(loss):
    """Bytes, where there are more tokens than bytes: 4 and 260 are not one."""
    hidden, kernel = jnp.ones((1, 2, 1)), jnp.zeros((1, 300)).at[0, 260].set(5.0)
    labels, run = jnp.array([[4, 3]], jnp.uint8), jax.value_and_grad(loss, (0, 1))
    value, grads = run(hidden, kernel, labels)
    assert value == pytest.approx(np.log(299 + np.exp(5.0)), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, grads, run(hidden, kernel, labels.astype(jnp.int32))[1])


def test_memory():
    """Compiled gradient: the plain one holds all logits, the chunked one a block of them."""
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (((2, 256, 16), jnp.float32), ((16, 2048), jnp.float32), ((2, 256), jnp.int32))
    ]
    temporary = lambda loss: (
        jax.jit(jax.value_and_grad(loss, (0, 1)))
        .lower(*shapes)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    logits = 2 * 256 * 2048 * 4
    assert temporary(plain) > logits
    assert temporary(lambda *x: chunked_cross_entropy(*x, block_tokens=32)) < logits / 3


def test_errors():
    hidden, kernel, labels = inputs()
    with pytest.raises(ValueError, match="hidden must have shape"):
        chunked_cross_entropy(hidden, kernel.T, labels)
    with pytest.raises(ValueError, match="labels must have shape"):
        chunked_cross_entropy(hidden, kernel, labels[:, 1:])
    with pytest.raises(ValueError, match="mask must have shape"):
        chunked_cross_entropy(hidden, kernel, labels, jnp.ones(T))
    with pytest.raises(TypeError, match="labels must be integers"):
        chunked_cross_entropy(hidden, kernel, labels.astype(jnp.float32))
    with pytest.raises(ValueError, match="block_tokens"):
        chunked_cross_entropy(hidden, kernel, labels, block_tokens=0)


def test_gradient_of_hidden_is_made_in_its_dtype():
    """Devices that share the vocabulary sum what the product made: in float32 it would be twice the bytes."""
    hidden, kernel = jnp.zeros((2, 6, 8), jnp.bfloat16), jnp.zeros((8, 32))
    labels = jnp.zeros((2, 6), jnp.int32)
    gradient = jax.grad(lambda hidden: chunked_cross_entropy(hidden, kernel, labels, block_tokens=8))
    lowered = jax.jit(gradient).lower(hidden).as_text()
    products = re.findall(r"dot_general .*-> tensor<(\S+)>", lowered)
    assert sorted(products) == ["2x4x32xf32", "2x4x8xbf16"], products
