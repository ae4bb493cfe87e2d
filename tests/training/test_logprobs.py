"""`token_logprobs` against a log-softmax in float64 and the gradient of the plain formula."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiers

from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
from fla_jax.training import token_logprobs

V = 37
MODEL = RWKV7ForCausalLM(RWKV7Config(vocab_size=V, hidden_size=32, num_layers=2, head_dim=16))


@pytest.fixture(scope="module")
def params():
    params = jax.jit(MODEL.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    leaves, tree = jax.tree.flatten(params)  # most initial kernels are zero
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)])


def tokens(B=2, T=8):
    return jnp.asarray(np.random.default_rng(0).integers(0, V, (B, T)))


@jax.jit
def plain(params, tokens):
    logits, _ = MODEL.apply({"params": params}, tokens)
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2)[..., 0]


@pytest.mark.parametrize("block_tokens", tiers.first([6, 1, 4096], 1, (tiers.SLOW, tiers.ONE_PYTHON)))
def test_value_and_gradient(params, block_tokens):
    x = tokens()
    logits = np.asarray(jax.jit(MODEL.apply)({"params": params}, x)[0], np.float64)[:, :-1]
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    want = np.take_along_axis(log_p, np.asarray(x)[:, 1:, None], 2)[..., 0]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=want.shape), jnp.float32)

    def weighted(params, of_tokens):
        values = of_tokens(params)
        return jnp.sum(weights * values), values

    run = jax.jit(jax.grad(weighted, has_aux=True), static_argnums=1)
    got, values = run(params, lambda params: token_logprobs(MODEL, params, x, block_tokens=block_tokens))
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5)
    wanted, _ = run(params, lambda params: plain(params, x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4), got, wanted)


@pytest.mark.slow
def test_lengths(params):
    x, lengths = tokens(3), jnp.array([8, 4, 0])
    got = jax.jit(functools.partial(token_logprobs, MODEL))(params, x, lengths)
    want = plain(params, x)  # a token's is that of no later one
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1, :3], want[1, :3], rtol=1e-4, atol=1e-5)
    assert not np.any(got[1, 3:]) and not np.any(got[2])


@pytest.mark.slow
def test_documents_of_a_row(params):
    x, ids = tokens(1), jnp.array([[0, 0, 0, 4, 4, 4, 4, 4]])
    got = jax.jit(functools.partial(token_logprobs, MODEL))(params, x, segment_ids=ids)[0]
    np.testing.assert_allclose(got[:2], plain(params, x)[0, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[3:], plain(params, jnp.roll(x, -3, 1))[0, :4], rtol=1e-4, atol=1e-5)
    assert got[2] == 0


def test_memory():
    """A compiled gradient allocates less than the logits of all tokens."""
    B, T = 2, 512
    model = RWKV7ForCausalLM(RWKV7Config(vocab_size=8192, hidden_size=32, num_layers=1, head_dim=16))
    x = jax.ShapeDtypeStruct((B, T), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    loss = lambda params, x: jnp.sum(token_logprobs(model, params, x, block_tokens=32))
    memory = jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < B * T * 8192 * 4 / 2


def test_errors(params):
    with pytest.raises(ValueError, match="tokens must have shape"):
        token_logprobs(MODEL, params, tokens(T=1))
    with pytest.raises(ValueError, match="segment_ids must have the shape"):
        token_logprobs(MODEL, params, tokens(), segment_ids=tokens(T=7))
    for bad in (0, 2.5):
        with pytest.raises(ValueError, match=f"block_tokens must be an integer >= 1, got {bad}"):
            token_logprobs(MODEL, params, tokens(), block_tokens=bad)
