"""Models whose head is the embedding, against the same model with a head of its own."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from harness import tiers

from fla_jax.generation import Generator, SamplingParams
from fla_jax.models import head_kernel, initial_params
from fla_jax.parallel import make_mesh
from fla_jax.training import (
    chunked_loss,
    cross_entropy,
    estimate_memory,
    init_lora,
    muon_dimension_numbers,
    packed_loss,
    parameter_groups,
    state_loss,
    token_logprobs,
    truncated_value_and_grad,
    zero_states,
)

TOKENS = small.tokens(2, 9)


def untied(model):
    return model.clone(config=dataclasses.replace(model.config, tie_embeddings=False))


def with_head(params):
    return {**params, "head": {"kernel": jnp.asarray(np.asarray(params["emb"]["embedding"]).T)}}


def summed(grads):
    """Gradients of the model with a head as those of the tied one: the embedding has two uses."""
    embedding = grads["emb"]["embedding"] + grads["head"]["kernel"].T
    rest = {name: x for name, x in grads.items() if name != "head"}
    return {**rest, "emb": {"embedding": embedding}}


def losses(model, params):
    """The losses that read the head, and a sum to differentiate in which each has a weight of its own."""
    inputs, labels, ids = TOKENS[:, :-1], TOKENS[:, 1:], jnp.arange(8)[None].repeat(2, 0) // 5
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7)))
    each = {
        "packed": packed_loss(model, params, inputs, labels, ids, l2wrap=0.1, block_tokens=3),
        "logprobs": jnp.sum(weights * token_logprobs(model, params, inputs, block_tokens=3)),
        "states": state_loss(model, params, zero_states(model) + 0.1, TOKENS),
    }
    return sum(x * (i + 1) for i, x in enumerate(each.values())), each


@pytest.mark.parametrize("version, scan_layers", tiers.first([(6, True), (7, False)]))
def test_values_and_gradients(version, scan_layers):
    """In float64: every loss is that of a head, its gradient the sum of the gradients of both uses."""
    with jax.enable_x64(True):
        wide = dict(dtype="float64", param_dtype="float64", implementation="reference", num_layers=1)
        model = small.model(version, tie_embeddings=True, scan_layers=scan_layers, **wide)
        params, plain = small.params(model), untied(model)
        assert "head" not in params
        np.testing.assert_array_equal(head_kernel(params), params["emb"]["embedding"].T)
        of = lambda model: jax.jit(jax.value_and_grad(functools.partial(losses, model), has_aux=True))
        value, grads = of(plain)(with_head(params))
        assert np.abs(grads["head"]["kernel"]).max() > 1e-3 < np.abs(grads["emb"]["embedding"]).max()
        small.assert_close(of(model)(params), (value, summed(grads)), 1e-12)

        def formula(p):
            logits, _ = plain.apply({"params": p}, TOKENS[:, :-1])
            return cross_entropy(logits, TOKENS[:, 1:], l2wrap=0.1)

        value, grads = jax.jit(jax.value_and_grad(formula))(with_head(params))
        chunked = lambda p: chunked_loss(model, p, TOKENS, chunk_size=4, l2wrap=0.1)[0]
        small.assert_close(jax.jit(jax.value_and_grad(chunked))(params), (value, summed(grads)), 1e-12)
        truncated = truncated_value_and_grad(model, chunk_size=4, chunks_per_gradient=2, l2wrap=0.1)
        (got, _), got_grads = jax.jit(truncated)(params, TOKENS)
        small.assert_close((got, got_grads), (value, summed(grads)), 1e-12)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_greedy_tokens(version):
    model = small.model(version, hidden_size=64, tie_embeddings=True)
    params = small.params(model)
    greedy = SamplingParams(temperature=0, presence_penalty=0, frequency_penalty=0)
    text, read = np.array([[3, 1, 2, 0, 0, 0, 0, 0]]), jax.jit(untied(model).apply)
    for t in range(3, 8):
        logits, _ = read({"params": with_head(params)}, jnp.asarray(text))
        text[0, t] = jnp.argmax(logits[0, t - 1])
    generator = Generator(model, params, slots=1, implementation="plain")  # which reads weights laid out anew
    (got,) = generator.generate([[3, 1, 2]], greedy, max_tokens=5)
    assert list(map(int, got.tokens)) == text[0, 3:].tolist()


def test_boxed_parameters_in_bfloat16():
    """The numbers of the model with a head, to the bit; axes have the embedding's names."""
    model = small.model(7, tie_embeddings=True, logical_axes=True, dtype="bfloat16")
    boxed = model.init(jax.random.key(0), TOKENS)["params"]
    assert boxed["emb"]["embedding"].names == ("vocab", "embed")
    params = small.params(small.model(7, tie_embeddings=True))
    got, _ = model.apply({"params": params}, TOKENS)
    want, _ = untied(model).apply({"params": with_head(params)}, TOKENS)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
    assert head_kernel(boxed).shape == (32, 24)


def test_parameters_of_the_other_kind_are_refused():
    model = small.model(7, tie_embeddings=True)
    params = small.params(model)
    with pytest.raises(ValueError, match="params must have no head: the model's tie_embeddings=True"):
        model.apply({"params": with_head(params)}, TOKENS)
    with pytest.raises(ValueError, match="params must contain head/kernel: the model's tie_embeddings=False"):
        packed_loss(untied(model), params, TOKENS, TOKENS)
    with pytest.raises(TypeError, match="tie_embeddings must be a bool, got 1"):
        small.model(7, tie_embeddings=1)


@pytest.mark.parametrize("vocab_size, gain", [(128, 1.0), (24, 0.5)])
def test_initial_embedding_is_that_of_a_head(vocab_size, gain):
    """Orthogonal, with the official gain max(1, V / C) ** 0.5 / 2."""
    model = small.model(7, tie_embeddings=True, vocab_size=vocab_size)
    drawn = initial_params(model, jax.random.key(0))
    assert sorted(drawn) == ["blocks_0", "blocks_1", "emb", "ln0", "ln_out"]
    table = np.asarray(drawn["emb"]["embedding"], np.float64)
    gram = table.T @ table if vocab_size > 32 else table @ table.T
    np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)


def test_optimizers_lora_and_memory():
    model = small.model(7, tie_embeddings=True)
    params = small.params(model)
    assert parameter_groups(params)["emb"] == {"embedding": "matrix"}
    assert muon_dimension_numbers(params)["emb"] == {"embedding": None}
    with pytest.raises(ValueError, match=r"targets must .*, got 'head': only projections of layers have"):
        init_lora(params, jax.random.key(0), targets=("head",))
    mesh = make_mesh(devices=jax.devices()[:1])
    bytes_of = lambda model: estimate_memory(model.config, mesh, batch=1, sequence=16)
    assert bytes_of(untied(model)) - bytes_of(model) == 16 * 24 * 32
