"""Continuous batching: how much of the slots is used, what waits for what, requests that fail."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.generation import Decoder, Engine, SamplingParams, generate
from fla_jax.generation import engine as module
from fla_jax.generation import slots as device

SAMPLING = SamplingParams(temperature=1.3, top_p=0.9, stop_tokens=(0,))
LENGTHS = (21, 1, 9, 30, 5, 17, 2)


def tokens_of(engine):
    """Runs until nothing is left: the tokens of each row, by number."""
    found = {}
    while engine.busy:
        for event in engine.step():
            found.setdefault(event.row.number, []).extend(event.tokens.tolist())
    return found


def test_generate_with_more_prompts_than_slots(setup):
    model, params = setup
    prompts = [[int(t) for t in small.tokens(1, n, seed=n)[0]] for n in LENGTHS]
    state = small.random_state(model, len(prompts))
    want = generate(model, params, prompts, 20, SAMPLING, seed=7, state=state)
    got = generate(model, params, prompts, 20, SAMPLING, seed=7, state=state, slots=3)
    for a, b in zip(want.tokens, got.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert got.state is None and want.state is not None
    same = generate(model, params, prompts, 20, SAMPLING, seed=7, state=state, slots=7)
    assert same.state is not None


@pytest.mark.parametrize(("known", "fixed"), [(True, None), (False, None), (True, 8), (False, 8)])
def test_the_slots_are_used(setup, monkeypatch, known, fixed):
    """85 % of the steps give a token, for lengths from 16 to 1024. This model counts down in its state."""

    class Countdown:
        sampling, per_call = "xla", fixed

        def __call__(self, weights, tokens, state, active):
            left = state.att_shift - active[None, :, None]
            return jax.nn.one_hot(jnp.where(left[0, :, 0] > 0, 1, 23), 24), state.replace(att_shift=left)

    def reading(model, params, requests, batch, initial):
        yield jax.nn.one_hot(jnp.ones(initial.wkv.shape[1], int), 24), initial

    monkeypatch.setattr(module, "prefill_chunks", reading)
    model, params = setup
    decoder = Decoder(model, params)
    decoder.step = Countdown()
    lengths = np.random.default_rng(0).integers(16, 1025, 128)
    zeros = model.init_state(1)
    sampling = SamplingParams.policy(0.0, stop_tokens=(23,))
    engine = Engine(model, params, 16, decoder=decoder)
    for length in lengths:
        state = zeros.replace(att_shift=jnp.full_like(zeros.att_shift, length))
        limit = int(length) if known else 2048
        engine.submit([1], dataclasses.replace(sampling, max_tokens=limit), state=state)
    assert sum(map(len, tokens_of(engine).values())) == lengths.sum() == engine.chosen
    assert engine.chosen / engine.started >= 0.85, engine.chosen / engine.started


def test_nothing_waits_for_the_device(setup, monkeypatch):
    """The tokens of a call are read when the next one has been started."""
    events, decode, result = [], device.decode, module.Results.ready

    def started(*args):
        events.append("start")
        return decode(*args)

    def read(self, late):
        for call in result(self, late):
            events.append("read")
            yield call

    monkeypatch.setattr(device, "decode", started)
    monkeypatch.setattr(module.Results, "ready", read)
    engine = Engine(*setup, 1)
    engine.submit([1], SamplingParams(temperature=0.0, max_tokens=32 * 3))
    tokens_of(engine)
    assert events == ["start", "start", "read", "start", "read", "read"]


@pytest.mark.parametrize("implementation", ["model", "plain"])
def test_a_request_that_becomes_nan_later_keeps_its_tokens(setup, implementation):
    """A token whose embedding is NaN: requests that choose it end with the next one, other requests go on."""
    model = setup[0] if implementation == "model" else small.model(7, hidden_size=64)
    params, greedy = small.params(model), SamplingParams(temperature=0.0, presence_penalty=2.0)
    prompts = [[1], [2], [4], [5]]
    decoder = Decoder(model, params, implementation=implementation)
    whole = generate(model, params, prompts, 12, greedy, slots=3, decoder=decoder).tokens
    whole = [request.tolist() for request in whole]
    inside = lambda token: [token in request[:-1] for request in whole]
    token = next(t for t in range(6, 24) if any(inside(t)) and not all(inside(t)))
    broken = {**params, "emb": {"embedding": params["emb"]["embedding"].at[token].set(jnp.nan)}}
    decoder = Decoder(model, broken, implementation=implementation)
    engine = Engine(model, broken, 3, decoder=decoder)
    rows = [engine.submit(prompt, dataclasses.replace(greedy, max_tokens=12))[0] for prompt in prompts]
    found = tokens_of(engine)
    for row in rows:
        own = whole[row.number]
        ends = own.index(token) + 1 if token in own[:-1] else 12
        assert found[row.number] == own[:ends]
        assert (row.error is None) == (ends == 12)
        assert row.error is None or f"new token {ends} hold" in str(row.error)
    with pytest.raises(FloatingPointError, match=r"row \d: the logits for new token \d+ hold NaN"):
        generate(model, broken, prompts, 12, greedy, slots=3, decoder=decoder)


def test_a_request_whose_state_was_donated_fails_alone(setup):
    model, params = setup
    engine, state = Engine(*setup, 2), small.random_state(model, 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    (good,), (bad,) = engine.submit([1, 2], greedy), engine.submit([1, 2], greedy, state=state)
    jax.tree.map(lambda x: x.delete(), state)
    with pytest.raises(ValueError, match=r"^state contains deleted arrays: they were donated to an earlier"):
        engine.submit([1], state=state)
    found = tokens_of(engine)
    assert bad.finish_reason == "error" and "row 1: state contains deleted arrays" in str(bad.error)
    want = generate(model, params, [[1, 2]], 3, SamplingParams(temperature=0.0)).tokens[0]
    assert found[good.number] == want.tolist()


def test_parameters_of_an_engine_stay(setup):
    model, params = setup
    mine = jax.tree.map(jnp.copy, params)
    engine, greedy = Engine(model, mine, 1), SamplingParams(temperature=0.0, max_tokens=6)
    assert engine.params["emb"]["embedding"] is mine["emb"]["embedding"]
    mine["head"] = jax.tree.map(jnp.zeros_like, mine["head"])
    engine.submit([1, 2], greedy)
    want = generate(model, params, [[1, 2]], 6, greedy).tokens[0]
    assert tokens_of(engine) == {0: want.tolist()}
    engine.submit([1, 2], greedy)
    jax.tree.map(lambda x: x.delete(), engine.params)
    with pytest.raises(ValueError, match=r"^params contains deleted arrays"):
        tokens_of(engine)


def test_errors(setup):
    model, params = setup
    with pytest.raises(ValueError, match="slots must be an integer >= 1, got 0"):
        Engine(model, params, 0)
    with pytest.raises(TypeError, match="sampling must be a SamplingParams or None"):
        Engine(model, params, 1).submit([1], {"temperature": 1})
    with pytest.raises(ValueError, match="params must be the parameters alone"):
        Engine(model, {"params": params}, 1)
    with pytest.raises(ValueError, match=r"slots must be an integer >= 1, got 1\.5"):
        generate(model, params, [[1]], 1, slots=1.5)
