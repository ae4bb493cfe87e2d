"""The parts of a model alone: blocks in a loop, embeddings instead of tokens, methods, layers' outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import small_models as small

from fla_jax.models import RWKVBlock, stack_layers

TOKENS = small.tokens(2, 5)


@pytest.fixture(scope="module", params=small.VERSIONS)
def setup(request):
    model = small.model(request.param)
    return model, small.params(model)


def test_blocks_in_a_loop_are_the_model(setup):
    """Outputs of layers too, which ``capture_intermediates`` returns, and the states."""
    model, params = setup
    (_, want), captured = model.apply({"params": params}, TOKENS, method="hidden", capture_intermediates=True)
    x = model.apply({"params": params}, TOKENS, method="embed")
    x, v_first = model.bind({"params": params}).ln0(x), None
    for i in range(2):
        block = {"params": params[f"blocks_{i}"]}
        x, state, v_first = RWKVBlock(model.config).apply(block, x, None, v_first, i)
        small.assert_close(x, captured["intermediates"][f"blocks_{i}"]["__call__"][0][0])
        small.assert_close(state, jax.tree.map(lambda x, i=i: x[i], want))


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_embeddings_instead_of_tokens(setup, scan):
    model, params = setup
    want = model.apply({"params": params}, TOKENS, lengths=jnp.array([5, 3]))
    if scan:
        model = type(model)(type(model.config)(**{**model.config.__dict__, "scan_layers": True}))
        params = stack_layers(params)
    variables = {"params": params}
    embeddings = model.apply(variables, TOKENS, method="embed")
    assert embeddings.shape == (2, 5, 32)
    small.assert_close(embeddings, params["emb"]["embedding"][TOKENS])
    got, state = model.apply(variables, embeddings=embeddings, lengths=jnp.array([5, 3]))
    small.assert_close(got[0], want[0][0])
    small.assert_close(got[1, :3], want[0][1, :3])
    small.assert_close(state, want[1])
    hidden, _ = model.apply(variables, embeddings=embeddings, method="hidden")
    small.assert_close(model.apply(variables, hidden, method="logits")[0], want[0][0])
    grad = jax.grad(lambda e: model.apply(variables, embeddings=e)[0].sum())(embeddings)
    assert jnp.abs(grad).max() > 0


def test_errors(setup):
    model, params = setup
    for options, error, message in (
        ({}, ValueError, "tokens or embeddings must be given, got none"),
        ({"tokens": TOKENS, "embeddings": jnp.ones((2, 5, 32))}, ValueError, "must be given, got both"),
        ({"embeddings": jnp.ones((2, 5, 31))}, ValueError, r"shape \[B, T, C = 32\] .* got \[2, 5, 31\]"),
        ({"embeddings": jnp.ones((2, 5, 32), int)}, TypeError, "embeddings must have a floating-point dtype"),
    ):
        with pytest.raises(error, match=message):
            model.apply({"params": params}, **options)
