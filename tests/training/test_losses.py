"""`cross_entropy` and `chunked_cross_entropy` against NumPy in float64; masks, memory, errors."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax.training import chunked_cross_entropy, cross_entropy

B, T, C, V = 2, 7, 6, 11


def plain(hidden, kernel, labels, mask=None, l2wrap=1e-4, **options):
    kernel = kernel.astype(hidden.dtype)
    logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
    return cross_entropy(logits, labels, mask, l2wrap, **options)


def chunked(block_tokens):
    return functools.partial(chunked_cross_entropy, block_tokens=block_tokens)


# blocks that divide T, that do not, and one for all
LOSSES = {"plain": plain, "1": chunked(1), "6": chunked(6), "all": chunked(1000)}
BOTH = pytest.mark.parametrize("loss", [plain, chunked(6)], ids=["plain", "chunked"])


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, T, C)), 3 * rng.normal(size=(C, V))
    kernel[:, 3], hidden[0, 0] = (
        kernel[:, 2],
        3 * kernel[:, 2],
    )  # a tie of the largest logits: the first counts
    return (
        jnp.asarray(hidden, dtype),
        jnp.asarray(kernel, jnp.float32),
        jnp.asarray(rng.integers(0, V, (B, T))),
    )


def masks(kind):
    rng = np.random.default_rng(1)
    made = {"booleans": rng.integers(0, 2, (B, T)) > 0, "weights": rng.choice([-1.5, 0.0, 2.0], (B, T))}
    return made.get(kind)


def reference(hidden, kernel, labels, weights, l2wrap):
    """Value, and gradients in hidden and kernel."""
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    weights = np.ones((B, T)) if weights is None else np.asarray(weights, np.float64)
    weights = weights[..., None] / weights.sum()
    logits, right = hidden @ kernel, np.eye(V)[np.asarray(labels)]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d = p - right + l2wrap * np.eye(V)[logits.argmax(-1)] * logits
    value = -np.sum(np.log(p) * right * weights)
    return value, (d * weights) @ kernel.T, np.einsum("btc,btv->cv", hidden, d * weights)


CALLS = [(loss, mask, 0.5) for loss in LOSSES for mask in (None, "booleans", "weights")]
CALLS += [(loss, None, l2wrap) for loss in ("plain", "6") for l2wrap in (1e-4, 0.0)]


@pytest.mark.parametrize("loss, mask, l2wrap", CALLS)
def test_value_and_gradients(loss, mask, l2wrap):
    hidden, kernel, labels = inputs()
    mask = masks(mask)
    run = lambda h, k: LOSSES[loss](h, k, labels, None if mask is None else jnp.asarray(mask), l2wrap)
    value, *wanted = reference(hidden, kernel, labels, mask, l2wrap)
    got, pull = jax.vjp(run, hidden, kernel)
    for found in (got, run(hidden, kernel)):
        np.testing.assert_allclose(found, value, rtol=1e-5)
    for grad, want in zip(pull(jnp.float32(3.0)), wanted):  # linear in the cotangent
        np.testing.assert_allclose(grad, 3 * want, rtol=1e-4, atol=1e-5)


@BOTH
def test_bfloat16_activations(loss):
    hidden, kernel, labels = inputs(jnp.bfloat16)
    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, kernel, labels)
    want, *wanted = reference(hidden, kernel.astype(jnp.bfloat16), labels, None, 1e-4)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, grad, like in zip(grads, wanted, (hidden, kernel)):
        assert got.dtype == like.dtype
        assert np.abs(np.float32(got) - grad).max() < 0.02 * np.abs(grad).max()


@BOTH
def test_masked_positions_may_hold_anything(loss):
    hidden, kernel, labels = inputs()
    mask = jnp.ones((B, T), bool).at[0, 2].set(False).at[1].set(False)
    spoiled = hidden.at[0, 2].set(jnp.nan).at[1].set(jnp.inf)
    run = jax.value_and_grad(loss, (0, 1))
    clean = jnp.where(mask[..., None], hidden, 0)
    if loss is not plain:  # a product with NaN comes before the plain loss
        jax.tree.map(
            np.testing.assert_array_equal,
            run(spoiled, kernel, labels, mask),
            run(clean, kernel, labels, mask),
        )
    logits, spoiled = clean @ kernel, jnp.where(mask[..., None], clean @ kernel, jnp.nan)
    of_logits = jax.value_and_grad(cross_entropy)
    jax.tree.map(
        np.testing.assert_array_equal, of_logits(spoiled, labels, mask), of_logits(logits, labels, mask)
    )
    assert loss(hidden, kernel, labels, jnp.zeros((B, T))) == 0


@BOTH
def test_labels_that_are_no_tokens(loss):
    """Ignored where the mask is 0; elsewhere the loss is NaN."""
    hidden, kernel, labels = inputs()
    mask = jnp.ones((B, T), bool).at[0, 2].set(False).at[1, 0].set(False)
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    want = run(hidden, kernel, jnp.where(mask, labels, 0), mask)
    for other in (-100, -1, V, 2**31 - 1):
        changed = labels.at[0, 2].set(other).at[1, 0].set(other)
        jax.tree.map(np.testing.assert_array_equal, run(hidden, kernel, changed, mask), want)
        assert np.isnan(loss(hidden, kernel, changed))


@BOTH
@pytest.mark.parametrize("mask", [None, "booleans", "weights"])
def test_ignored_labels(loss, mask):
    hidden, kernel, labels = inputs()
    ignored = labels.at[0, 2].set(-100).at[1, 3:].set(-100)
    kept = np.where(ignored == -100, 0, 1) * (1 if mask is None else masks(mask))
    mask = None if mask is None else jnp.asarray(masks(mask))
    want, *wanted = reference(hidden, kernel, labels, kept, 1e-4)
    got, grads = jax.value_and_grad(functools.partial(loss, ignore_index=-100), (0, 1))(
        hidden, kernel, ignored, mask
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for grad, found in zip(wanted, grads):
        np.testing.assert_allclose(found, grad, rtol=1e-4, atol=1e-5)


@BOTH
def test_labels_of_a_narrow_dtype(loss):
    """Bytes, where there are more tokens than bytes: 4 and 260 are not one."""
    hidden, kernel = jnp.ones((1, 2, 1)), jnp.zeros((1, 300)).at[0, 260].set(5.0)
    labels, run = jnp.array([[4, 3]], jnp.uint8), jax.value_and_grad(loss, (0, 1))
    value, grads = run(hidden, kernel, labels)
    assert value == pytest.approx(np.log(299 + np.exp(5.0)), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, grads, run(hidden, kernel, labels.astype(jnp.int32))[1])


@BOTH
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_ignored_labels_of_any_dtype(loss, dtype):
    """Cast to uint8, -100 is the token 156, which is no ignored label; the same for NumPy's labels."""
    hidden, kernel = jnp.ones((1, 3, 1)), jnp.zeros((1, 200)).at[0, 156].set(5.0)
    is_ignored, unlikely = np.issubdtype(dtype, np.signedinteger), np.log(199 + np.exp(5.0))
    labels = np.array([[1, -100 if is_ignored else 156, 3]], dtype)
    for given in (labels, jnp.asarray(labels)):
        found = loss(hidden, kernel, given, l2wrap=0.0, ignore_index=-100)
        assert found == pytest.approx(unlikely - (0 if is_ignored else 5 / 3), rel=1e-6)


@BOTH
@pytest.mark.parametrize("sizes", [(0, T), (B, 0), (0, 0)])
def test_no_tokens(loss, sizes):
    hidden, labels = jnp.zeros((*sizes, C)), jnp.zeros(sizes, jnp.int32)
    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, jnp.ones((C, V)), labels)
    assert value == 0 and grads[0].shape == hidden.shape and not grads[1].any()


def test_memory():
    """Compiled gradient: the plain loss needs all logits, the chunked one a block of them."""
    shapes = ((2, 256, 16), jnp.float32), ((16, 2048), jnp.float32), ((2, 256), jnp.int32)
    shapes, logits = [jax.ShapeDtypeStruct(*x) for x in shapes], 2 * 256 * 2048 * 4

    def temporary(loss):
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(plain) > logits
    assert temporary(chunked(32)) < logits / 3


def test_gradient_of_hidden_is_made_in_its_dtype():
    """Devices that split the vocabulary sum that product: in float32 it would be twice the bytes."""
    hidden, kernel = jnp.zeros((2, 6, 8), jnp.bfloat16), jnp.zeros((8, 32))
    labels = jnp.zeros((2, 6), jnp.int32)
    lowered = jax.jit(jax.grad(lambda hidden: chunked(8)(hidden, kernel, labels))).lower(hidden).as_text()
    products = re.findall(r"dot_general .*-> tensor<(\S+)>", lowered)
    assert sorted(products) == ["2x4x32xf32", "2x4x8xbf16"], products


@BOTH
def test_errors(loss):
    hidden, kernel, labels = inputs()
    for change, error, match in (
        ({"labels": labels[:, 1:]}, ValueError, "labels must have shape"),
        ({"labels": labels.astype(jnp.float32)}, TypeError, "labels must be integers"),
        ({"mask": jnp.ones(T)}, ValueError, "mask must have shape"),
        ({"l2wrap": "yes"}, ValueError, "l2wrap must be a finite number, got 'yes'"),
    ):
        with pytest.raises(error, match=match):
            loss(**{"hidden": hidden, "kernel": kernel, "labels": labels, **change})
    run = lambda l2wrap: loss(hidden, kernel, labels, l2wrap=l2wrap)
    with pytest.raises(TypeError, match=r"l2wrap must be a number that is known when .* static_argnames"):
        jax.jit(run)(1e-4)
    assert all(np.isfinite(run(x)) for x in (np.float32(1e-4), 0, jnp.float32(1)))


def test_errors_of_the_chunked_loss():
    hidden, kernel, labels = inputs()
    with pytest.raises(ValueError, match="hidden must have shape"):
        chunked_cross_entropy(hidden, kernel.T, labels)
    for bad in (0, 2.5, "4", None):
        with pytest.raises(ValueError, match=f"block_tokens must be an integer >= 1, got {bad!r}"):
            chunked_cross_entropy(hidden, kernel, labels, block_tokens=bad)
