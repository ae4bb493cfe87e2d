"""Continuous batching: how much of the slots is used, what waits for what, requests that fail."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.generation import Decoder, Generator, SamplingParams
from fla_jax.generation import engine as module
from fla_jax.generation import slots as device
from fla_jax.generation.engine import Engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def engine_of(model, params, slots):
    return Engine(params, Decoder(model, params), slots)


def tokens_of(engine):
    """Runs until nothing is left: the tokens of each row, by number."""
    found = {}
    while engine.busy:
        for event in engine.step():
            found.setdefault(event.row.number, []).extend(event.tokens.tolist())
    return found


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
    engine = Engine(params, decoder, 16)
    for length in lengths:
        state = zeros.replace(att_shift=jnp.full_like(zeros.att_shift, length))
        limit = int(length) if known else 2048
        engine.submit([1], dataclasses.replace(sampling, max_tokens=limit), state=state)
    assert sum(map(len, tokens_of(engine).values())) == lengths.sum() == engine.chosen
    assert engine.chosen / engine.started >= 0.85, engine.chosen / engine.started


def test_calls_of_few_steps(setup):
    """Their number is bounded; the tokens are the same."""
    engine = engine_of(*setup, 1)
    engine.submit([1, 2], dataclasses.replace(GREEDY, max_tokens=8))
    want = tokens_of(engine)[0]
    engine.steps = 3
    engine.submit([1, 2], dataclasses.replace(GREEDY, max_tokens=8))
    pieces = []
    while engine.busy:
        pieces += [event.tokens.tolist() for event in engine.step()]
    assert list(map(len, pieces)) == [3, 3, 2] and np.concatenate(pieces).tolist() == want


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
    engine = engine_of(*setup, 1)
    engine.submit([1], dataclasses.replace(GREEDY, max_tokens=32 * 3))
    tokens_of(engine)
    assert events == ["start", "start", "read", "start", "read", "read"]


@pytest.mark.parametrize("implementation", ["model", "plain"])
def test_a_row_that_becomes_nan_later_keeps_its_tokens(setup, implementation):
    """A token whose embedding is NaN: rows that choose it end with the next one, other rows go on."""
    model = setup[0] if implementation == "model" else small.model(7, hidden_size=64)
    params = small.params(model)
    greedy = SamplingParams(temperature=0.0, presence_penalty=2.0, max_tokens=12)
    prompts = [[1], [2], [4], [5]]
    make = lambda params: Generator(model, params, slots=3, implementation=implementation)
    whole = [one.tokens.tolist() for one in make(params).generate(prompts, greedy)]
    inside = lambda token: [token in row[:-1] for row in whole]
    token = next(t for t in range(6, 24) if any(inside(t)) and not all(inside(t)))
    broken = make({**params, "emb": {"embedding": params["emb"]["embedding"].at[token].set(jnp.nan)}})
    requests = [broken.submit(prompt, greedy) for prompt in prompts]
    list(broken.results())
    for own, request in zip(whole, requests):
        ends = own.index(token) + 1 if token in own[:-1] else 12
        assert request.completion.tokens.tolist() == own[:ends]
        error = request.completion.error
        assert (error is None) == (ends == 12)
        assert error is None or f"new token {ends} hold" in str(error)
    with pytest.raises(FloatingPointError, match=r"row \d: the logits for new token \d+ hold NaN"):
        broken.generate(prompts, greedy)


def test_a_row_whose_state_was_donated_fails_alone(setup):
    engine, state = engine_of(*setup, 2), small.random_state(setup[0], 1)
    (good,), (bad,) = engine.submit([1, 2], GREEDY), engine.submit([1, 2], GREEDY, state=state)
    jax.tree.map(lambda x: x.delete(), state)
    with pytest.raises(ValueError, match=r"^state contains deleted arrays: they were donated to an earlier"):
        engine.submit([1], state=state)
    found = tokens_of(engine)
    assert bad.finish_reason == "error" and "row 1: state contains deleted arrays" in str(bad.error)
    assert good.finish_reason == "length" and len(found[good.number]) == 6


def test_parameters_of_an_engine_stay(setup):
    """When the caller changes the dictionaries; arrays that were donated are named."""
    model, params = setup
    mine = jax.tree.map(jnp.copy, params)
    engine = engine_of(model, mine, 1)
    assert engine.params["emb"]["embedding"] is mine["emb"]["embedding"]
    engine.submit([1, 2], GREEDY)
    want = tokens_of(engine)
    mine["head"] = jax.tree.map(jnp.zeros_like, mine["head"])
    engine.submit([1, 2], GREEDY)
    assert tokens_of(engine)[1] == want[0]
    engine.submit([1, 2], GREEDY)
    jax.tree.map(lambda x: x.delete(), engine.params)
    with pytest.raises(ValueError, match=r"^params contains deleted arrays"):
        tokens_of(engine)
