"""State tuning: what is trained, what is not, and the files."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from harness import tiers
from harness.compare import assert_same_bits as same

from fla_jax.checkpoints import load_checkpoint, load_extras, read_pth, save_checkpoint, write_pth
from fla_jax.training import initial_state, load_states, save_states, state_loss, tune_states, zero_states


@pytest.fixture(scope="module")
def setup():
    model = small.model(7)
    return model, small.params(model)


def random_states(model, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=zero_states(model).shape), jnp.float32)


def test_loss_and_initial_state(setup):
    """Against the official equations in float64, started from the same matrices."""
    model, params = setup
    tokens, states = small.tokens(2, 9), random_states(model)
    want = []
    z = official.checkpoint(params, 7)
    for row in np.asarray(tokens):
        logits, _ = official.run(
            z, 7, row[:-1], (np.zeros((2, 32)), np.zeros((2, 32)), states), heads=small.HEADS
        )
        want += list(np.log(np.exp(logits).sum(-1)) - logits[np.arange(8), row[1:]])
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 8)))
    loss = jax.jit(lambda mask: state_loss(model, params, states, tokens, mask))
    np.testing.assert_allclose(loss(None), np.mean(want), rtol=1e-5)
    np.testing.assert_allclose(loss(mask), np.average(want, weights=np.ravel(mask)), rtol=1e-5)


@pytest.mark.slow
def test_tuning_lowers_the_loss_and_leaves_the_weights(setup):
    model, params = setup
    before = jax.tree.map(np.array, params)
    tokens = small.tokens(2, 9)
    states, losses = tune_states(model, params, [tokens] * 30, 30)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    assert losses.shape == (30,) and losses[0] == pytest.approx(
        float(state_loss(model, params, zero_states(model), tokens)), rel=1e-5
    )
    assert state_loss(model, params, states, tokens) < 0.9 * losses[0]
    assert all(np.abs(layer).max() > 0.1 for layer in states), "every layer's state takes part"
    more, _ = tune_states(model, params, [(tokens, jnp.ones((2, 8)))], 1, learning_rate=0.0, states=states)
    np.testing.assert_array_equal(more, states)


@pytest.mark.parametrize(
    "version, stacked", tiers.first([(7, True), (6, False)], 1, (tiers.SLOW, tiers.ONE_PYTHON))
)
def test_documents_of_a_sequence(version, stacked):
    """Packed documents have the losses of separate ones, each started from the states, and the gradient."""
    model = small.model(version, scan_layers=stacked)
    params, tokens = small.params(model), small.tokens(2, 12)
    ids = jnp.array([[0] * 5 + [1] * 4 + [2] * 3, [5] * 10 + [7] * 2])
    documents = [tokens[0, :5], tokens[0, 5:9], tokens[0, 9:], tokens[1, :10], tokens[1, 10:]]
    padded = jnp.stack([jnp.pad(document, (0, 10 - len(document))) for document in documents])
    is_label = jnp.arange(1, 10) < jnp.array([len(document) for document in documents])[:, None]
    apart = lambda states: state_loss(model, params, states, padded, is_label)

    def packed(states, max_segments=3):
        options = {"every_segment": True, "max_segments": max_segments}
        return state_loss(model, params, states, tokens, segment_ids=ids, **options)

    states = 0.5 * random_states(model)
    want, wanted = jax.jit(jax.value_and_grad(apart))(states)
    got, grad = jax.jit(jax.value_and_grad(packed))(states)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted, rtol=1e-3, atol=1e-5)
    assert np.isnan(jax.jit(packed, static_argnums=1)(states, 2)), "5 documents, memory for 4"


@pytest.mark.slow
def test_first_document_alone(setup):
    """Without ``every_segment`` other documents start from zeros."""
    model, params = setup
    tokens, states = small.tokens(1, 9), random_states(model)
    ids = jnp.array([[0] * 5 + [1] * 4])
    loss = jax.jit(functools.partial(state_loss, model, params))
    first = loss(states, tokens[:, :5]) * 4
    second = loss(zero_states(model), tokens[:, 5:]) * 3
    got = loss(states, tokens, segment_ids=ids)
    np.testing.assert_allclose(got, (first + second) / 7, rtol=1e-5)
    options = {"every_segment": True, "max_segments": 2}
    batch = (tokens, None, ids)
    tuned, losses = tune_states(model, params, [batch] * 5, 5, **options)
    after = jax.jit(functools.partial(state_loss, model, params, **options))(tuned, tokens, segment_ids=ids)
    assert after < losses[0] - 0.05
    with pytest.raises(ValueError, match="segment_ids must have the shape"):
        state_loss(model, params, states, tokens, segment_ids=ids[:, 1:])


def test_files(setup, tmp_path):
    model, _ = setup
    states = random_states(model)
    save_states(tmp_path / "states.pth", states)
    stored = read_pth(tmp_path / "states.pth")
    assert list(stored) == ["blocks.0.att.time_state", "blocks.1.att.time_state"]
    for i, x in enumerate(stored.values()):
        np.testing.assert_array_equal(x, np.asarray(states[i]).transpose(0, 2, 1))  # [H, V, K]
    np.testing.assert_array_equal(load_states(tmp_path / "states.pth", model), states)
    write_pth(
        tmp_path / "prefixed.pth",
        {f"model.{name}": x for name, x in stored.items()}
        | {"model.emb.weight": np.zeros((2, 2), np.float32)},
    )
    np.testing.assert_array_equal(load_states(tmp_path / "prefixed.pth", model), states)


@pytest.mark.parametrize("version", small.VERSIONS)
@pytest.mark.parametrize("format, suffix", [("pth", ".pth"), ("huggingface", ""), ("orbax", "")])
def test_whole_models_with_states(version, format, suffix, tmp_path):
    """Every format stores them beside the parameters, which it returns as without them."""
    model = small.model(version)
    params, states = small.params(model), random_states(model)
    path = tmp_path / f"a{suffix}"
    save_checkpoint(path, model, params, format=format, states=states.astype(jnp.bfloat16))
    name = "model.layers.{}.attn.time_state" if format == "huggingface" else "blocks.{}.att.time_state"
    found = load_extras(path)
    assert sorted(found) == [name.format(i) for i in range(2)]
    for i, x in enumerate(found.values()):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, np.asarray(states.astype(jnp.bfloat16))[i].transpose(0, 2, 1))
    read = load_states(path, model)
    assert read.dtype == jnp.float32
    np.testing.assert_array_equal(read, states.astype(jnp.bfloat16).astype(jnp.float32))
    same(load_checkpoint(path)[1], params)
    bare = tmp_path / f"b{suffix}"
    save_checkpoint(bare, model, params, format=format)
    assert load_extras(bare) == {}
    with pytest.raises(
        ValueError, match=r"b.*: the time_state of layer 0 is missing; the model has 2 layers"
    ):
        load_states(bare, model)
    with pytest.raises(ValueError, match=r"states must have shape .*, got \[1, 2, 16, 16\]"):
        save_checkpoint(bare, model, params, format=format, states=states[:1])
    with pytest.raises(ValueError, match=r"extras must not have .*time_state, which states has too"):
        save_checkpoint(bare, model, params, format=format, states=states, extras=found)
    assert load_extras(bare) == {}


def test_errors(setup, tmp_path):
    model, params = setup
    states, tokens = random_states(model), small.tokens(2, 9)
    with pytest.raises(ValueError, match=r"states must have shape .* = \[2, 2, 16, 16\], got \[1, 2"):
        initial_state(model, states[:1], 2)
    with pytest.raises(ValueError, match="states must have shape"):
        tune_states(model, params, [tokens], 1, states=states[0])
    with pytest.raises(ValueError, match="batches must have at least steps = 2 batches, got 1"):
        tune_states(model, params, [tokens], 2)
    with pytest.raises(ValueError, match="steps must be"):
        tune_states(model, params, [tokens], 0)
    with pytest.raises(ValueError, match="batches must hold tokens"):
        tune_states(model, params, [tokens[:, :1]], 1)
    for steps in (True, "1", 1.0):
        with pytest.raises(ValueError, match="steps must be an integer >= 1, got"):
            tune_states(model, params, [tokens], steps)
    for rate in ("0.1", True, -1.0, float("nan"), [0.1]):
        with pytest.raises(ValueError, match="learning_rate must be"):
            tune_states(model, params, [tokens], 1, learning_rate=rate)
    with pytest.raises(TypeError, match="batches must be iterable, got 5"):
        tune_states(model, params, 5, 1)
    for batch, error, message in (
        ("text", TypeError, r"of batches\[0\] tokens must be an integer array, got 'text'"),
        ([[1, 2, 3]], TypeError, "tokens must be an integer array, got"),
        (tokens.astype(float), TypeError, "tokens must be an integer array, got"),
        (tokens + 24, ValueError, r"of batches\[0\] tokens must be from 0 to 23, got 4\d"),
        (tokens - 24, ValueError, r"tokens must be from 0 to 23, got -"),
        (tokens[0], ValueError, r"tokens must have shape \[B, T \+ 1\] with B, T >= 1, got \[9\]"),
        ((tokens,), ValueError, r"batches\[0\] must be tokens or \(tokens, mask\), .* got a tuple of 1"),
        ((tokens, np.ones((2, 9))), ValueError, r"mask must have shape \[B, T\] = \[2, 8\], got \[2, 9\]"),
        ((tokens, "all"), TypeError, "mask must be an array of booleans or numbers, got 'all'"),
    ):
        with pytest.raises(error, match=message):
            tune_states(model, params, [batch], 1)
    with pytest.raises(TypeError, match="tokens must be an integer array"):
        state_loss(model, params, states, tokens.astype(float))
    for wrong in ("states", None, np.zeros(states.shape, int)):
        with pytest.raises(TypeError, match="states must be an array of floating-point numbers, got"):
            initial_state(model, wrong, 2)
        with pytest.raises(TypeError, match="states must be an array of floating-point numbers, got"):
            save_states(tmp_path / "states.pth", wrong)
    for batch in (0, True, "2", 2.0):
        with pytest.raises(ValueError, match="batch must be an integer >= 1, got"):
            initial_state(model, states, batch)
    with pytest.raises(ValueError, match="states must have shape"):
        save_states(tmp_path / "states.pth", states[0])
    for wrong, message in (
        (states[:1], "the time_state of layer 1 is missing"),
        (jnp.concatenate([states, states[:1]]), "blocks.2.att.time_state is surplus"),
        (states[:, :1], r"blocks.0.att.time_state must have .* = \[2, 16, 16\], got \[1, 16, 16\]"),
    ):
        save_states(tmp_path / "states.pth", wrong)
        with pytest.raises(ValueError, match=message):
            load_states(tmp_path / "states.pth", model)
