"""Chunks of a long sequence against one call on the whole, in value, gradients and memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from harness import tiers

from fla_jax.training import chunked_loss, cross_entropy, packed_loss, truncated_value_and_grad

TOKENS = small.tokens(2, 25)
MASK = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 24)), bool)


def whole(model, state=None):
    def loss(params, state, tokens, mask):
        logits, state = model.apply({"params": params}, tokens[:, :-1], state)
        return cross_entropy(logits, tokens[:, 1:], mask, 0.1), state

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


@pytest.fixture(params=tiers.first([7, 6], 1, (tiers.SLOW, tiers.ONE_PYTHON)))
def exact(request):
    """A float64 model, its parameters, a state, and weights of either sign, some chunks' sums 0."""
    with jax.enable_x64(True):
        wide = dict(dtype="float64", param_dtype="float64", implementation="reference")
        model = small.model(request.param, num_layers=1, **wide)
        weights = np.tile([1.0, -1.0, 2.0, 0.0, 0.0, -1.0, 0.5, 0.5], 6).reshape(2, 24)
        yield model, small.params(model), small.random_state(model, 2), jnp.asarray(weights)


def test_exact(exact):
    """Value, state, and gradients in parameters and state, of chunks and of a single group of them."""
    model, params, state, weights = exact
    want = jax.jit(whole(model))(params, state, TOKENS, weights)
    loss = lambda p, s: chunked_loss(model, p, TOKENS, weights, s, chunk_size=3, l2wrap=0.1)
    got = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, state)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float64")}
    small.assert_close(got, want, 1e-12)
    assert all(np.abs(x).max() > 1e-4 for x in jax.tree.leaves(got[1][1])), "the state's gradient must count"
    group = truncated_value_and_grad(model, chunk_size=3, chunks_per_gradient=8, l2wrap=0.1)
    small.assert_close(jax.jit(group)(params, TOKENS, weights, state), (want[0], want[1][0]), 1e-12)


@pytest.fixture(scope="module")
def setup():
    model = small.model(7, num_layers=1, implementation="reference")
    return model, small.params(model), small.random_state(model, 2)


@pytest.mark.slow
def test_truncated(setup):
    """Two groups of two chunks are two calls on the halves, the state passed on as a constant."""
    model, params, state = setup
    two = jax.jit(truncated_value_and_grad(model, chunk_size=6, chunks_per_gradient=2, l2wrap=0.1))
    got = two(params, TOKENS, MASK, state)
    run, total, parts = jax.jit(whole(model)), MASK.sum(), []
    now = state
    for tokens, mask in ((TOKENS[:, :13], MASK[:, :12]), (TOKENS[:, 12:], MASK[:, 12:])):
        (value, now), (grad, _) = run(params, now, tokens, mask)
        share = mask.sum() / total
        parts.append(jax.tree.map(lambda x, share=share: x * share, (value, grad)))
    value, grad = jax.tree.map(jnp.add, *parts)
    small.assert_close(got, ((value, now), grad))
    _, (exact, _) = run(params, state, TOKENS, MASK)
    assert small.largest_error(exact, grad) > 1e-3, "truncation must count"


@pytest.mark.slow
def test_memory():
    """Truncated: no state more for four times the groups. Exact: one a chunk, far less than activations."""
    model = small.model(7, num_layers=1, implementation="reference")
    params = small.shapes(model, TOKENS)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(model.init_state(2)))

    def temporary(f, chunks):
        tokens = jax.ShapeDtypeStruct((2, 64 * chunks + 1), jnp.int32)
        # tokens, labels, weights in chunks
        return (
            jax.jit(f).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes
            - 3 * 4 * 2 * 64 * chunks
        )

    truncated = truncated_value_and_grad(model, chunk_size=64)
    assert temporary(truncated, 16) - temporary(truncated, 4) < state_bytes
    exact = lambda p, tokens: jax.value_and_grad(
        lambda p: chunked_loss(model, p, tokens, chunk_size=64), has_aux=True
    )(p)
    activations = 64 * 2 * 32 * 4 * 20  # of a chunk: more than 20 arrays [B, T, C]
    for_a_chunk = (temporary(exact, 16) - temporary(exact, 4)) / 12
    assert for_a_chunk < 3 * state_bytes < activations / 2, (for_a_chunk, state_bytes)


def test_all_masked(setup):
    model, params, _ = setup
    f = lambda mask: chunked_loss(model, params, TOKENS, mask, chunk_size=24)[0]
    assert jax.jit(f)(jnp.zeros((2, 24))) == 0


@pytest.mark.parametrize(
    "tokens, options, error, message",
    [
        (TOKENS, {"chunk_size": 7}, ValueError, "multiple of chunk_size = 7, got T = 24"),
        (TOKENS, {"chunk_size": 0}, ValueError, "chunk_size must be an integer >= 1"),
        (TOKENS[0], {"chunk_size": 8}, ValueError, "tokens must have shape"),
        (TOKENS * 1.0, {"chunk_size": 8}, TypeError, "tokens must be integers"),
        (TOKENS, {"chunk_size": 8, "mask": jnp.ones((2, 25))}, ValueError, "mask must have shape"),
        (
            TOKENS,
            {"chunk_size": 8, "state": small.model(7).init_state(1)},
            ValueError,
            "state.att_shift must have shape",
        ),
    ],
)
def test_errors(setup, tokens, options, error, message):
    with pytest.raises(error, match=message):
        chunked_loss(setup[0], setup[1], tokens, **options)


def test_truncation_errors(setup):
    with pytest.raises(ValueError, match="chunks_per_gradient must be an integer >= 1"):
        truncated_value_and_grad(setup[0], chunk_size=8, chunks_per_gradient=0)
    with pytest.raises(ValueError, match=r"chunk_size \* chunks_per_gradient = 8 \* 2, got T = 24"):
        truncated_value_and_grad(setup[0], chunk_size=8, chunks_per_gradient=2)(setup[1], TOKENS)


@pytest.mark.slow
def test_packed_documents():
    """The state restarts within chunks and between them; values and gradients are those of `packed_loss`."""
    model = small.model(7)
    params, tokens = small.params(model), small.tokens(2, 13)
    ids = jnp.array([[0] * 4 + [1] * 5 + [2] * 4, [3] * 6 + [4] * 7])
    same = ids[:, 1:] == ids[:, :-1]
    plain = lambda p: packed_loss(model, p, tokens[:, :-1], tokens[:, 1:], ids[:, :-1], same)
    run = lambda p: chunked_loss(model, p, tokens, chunk_size=4, segment_ids=ids)
    want, wanted = jax.jit(jax.value_and_grad(plain))(params)
    (got, state), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    small.assert_close(grads, wanted, 1e-4)
    last = jax.jit(model.apply)({"params": params}, tokens[:, :-1], segment_ids=ids[:, :-1])[1]
    small.assert_close(state, last)
