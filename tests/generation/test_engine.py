"""Continuous batching: requests against each one alone; how much of the slots is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.generation import Decoder, Engine, SamplingParams, generate
from fla_jax.generation import engine as module

SAMPLING = SamplingParams(temperature=1.3, top_p=0.9, stop_tokens=(0,))
LENGTHS = (21, 1, 9, 30, 5, 17, 2)


@pytest.fixture(scope="module")
def alone(setup):
    """Prompts with their limits of tokens, seeds and states, and the results of each alone."""
    requests = []
    for i, length in enumerate(LENGTHS):
        prompt = [int(t) for t in small.tokens(1, length, seed=length)[0]]
        state = small.random_state(setup[0], 1, seed=i) if i % 3 == 1 else None
        limit = (3, 40, 17, 0, 33, 8, 25)[i]
        result = generate(*setup, [prompt], limit, SAMPLING, seed=50 + i, state=state)
        requests.append((prompt, limit, 50 + i, state, result))
    assert len({len(result.tokens[0]) for *_, result in requests}) > 4, "requests must end at different times"
    return requests


def test_every_request_is_what_it_is_alone(setup, alone):
    """Put in at once or between results; the state after each request is its own, too."""
    engine = Engine(*setup, 3, SAMPLING, states=True)
    waiting = [(prompt, limit, seed, state) for prompt, limit, seed, state, _ in alone]
    for prompt, limit, seed, state in waiting[:4]:
        engine.put(prompt, limit, seed=seed, state=state)
    done = {}
    for result in engine.results():
        done[result.number] = result
        if len(done) in (1, 2, 3):
            prompt, limit, seed, state = waiting[3 + len(done)]
            assert engine.put(prompt, limit, seed=seed, state=state) == 3 + len(done)
    assert sorted(done) == list(range(len(alone)))
    for i, (*_, want) in enumerate(alone):
        np.testing.assert_array_equal(done[i].tokens, want.tokens[0])
        small.assert_close(done[i].state, want.state)
    assert engine.chosen == sum(len(want.tokens[0]) for *_, want in alone)
    assert list(engine.results()) == []


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
    sampling = SamplingParams(temperature=0.0, presence_penalty=0, frequency_penalty=0, stop_tokens=(23,))
    engine = Engine(model, params, 16, sampling, decoder=decoder)
    for length in lengths:
        state = zeros.replace(att_shift=jnp.full_like(zeros.att_shift, length))
        engine.put([1], int(length) if known else 2048, state=state)
    assert sum(len(result.tokens) for result in engine.results()) == lengths.sum() == engine.chosen
    assert engine.chosen / engine.started >= 0.85, engine.chosen / engine.started


def test_nothing_waits_for_the_device(setup, monkeypatch):
    """The tokens of a call are read when the next one has been started."""
    events, decode, result = [], module.decode, module.Results.ready

    def started(*args):
        events.append("start")
        return decode(*args)

    def read(self, late):
        for call in result(self, late):
            events.append("read")
            yield call

    monkeypatch.setattr(module, "decode", started)
    monkeypatch.setattr(module.Results, "ready", read)
    engine = Engine(*setup, 1, SamplingParams(temperature=0.0))
    engine.put([1], 32 * 3)
    list(engine.results())
    assert events == ["start", "start", "read", "start", "read", "read"]


def test_a_request_that_becomes_nan_fails_alone(setup, alone):
    """Requests with NaN in their initial state end with an error, all others as they do alone."""
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), setup[0].init_state(1))
    engine = Engine(*setup, 3, SAMPLING, states=True)
    bad = [engine.put([1, 2], 9, state=nan)]
    good = {
        engine.put(prompt, limit, seed=seed, state=state): i
        for i, (prompt, limit, seed, state, _) in enumerate(alone[:3])
    }
    bad.append(engine.put([3], 1, state=nan))  # leaves its slot before its tokens are read
    done = {result.number: result for result in engine.results()}
    good |= {
        engine.put(prompt, limit, seed=seed, state=state): i
        for i, (prompt, limit, seed, state, _) in enumerate(alone[3:], 3)
    }
    done |= {result.number: result for result in engine.results()}
    assert sorted(done) == sorted([*bad, *good]) and len(good) == len(alone)
    for number in bad:
        assert len(done[number].tokens) == 0 and done[number].state is None
        with pytest.raises(FloatingPointError, match=f"row {number}: the logits for new token 0 hold NaN"):
            raise done[number].error
    for number, i in good.items():
        want = alone[i][-1]
        assert done[number].error is None
        np.testing.assert_array_equal(done[number].tokens, want.tokens[0])
        small.assert_close(done[number].state, want.state)


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
    engine = Engine(model, broken, 3, greedy, decoder=decoder)
    for prompt in prompts:
        engine.put(prompt, 12)
    for number, tokens, _, error in engine.results():
        ends = whole[number].index(token) + 1 if token in whole[number][:-1] else 12
        assert tokens.tolist() == whole[number][:ends]
        assert (error is None) == (ends == 12) and (error is None or f"new token {ends} hold" in str(error))
    with pytest.raises(FloatingPointError, match=r"row \d: the logits for new token \d+ hold NaN"):
        generate(model, broken, prompts, 12, greedy, slots=3, decoder=decoder)


def test_a_request_whose_state_was_donated_fails_alone(setup):
    model, params = setup
    engine, state = Engine(*setup, 2, SamplingParams(temperature=0.0)), small.random_state(model, 1)
    numbers = [engine.put([1, 2], 3), engine.put([1, 2], 3, state=state)]
    jax.tree.map(lambda x: x.delete(), state)
    with pytest.raises(ValueError, match=r"^state contains deleted arrays: they were donated to an earlier"):
        engine.put([1], 3, state=state)
    done = {result.number: result for result in engine.results()}
    assert "row 1: state contains deleted arrays" in str(done[numbers[1]].error)
    want = generate(model, params, [[1, 2]], 3, SamplingParams(temperature=0.0)).tokens[0]
    np.testing.assert_array_equal(done[numbers[0]].tokens, want)


def test_parameters_of_an_engine_stay(setup):
    model, params = setup
    mine = jax.tree.map(jnp.copy, params)
    engine = Engine(model, mine, 1, SamplingParams(temperature=0.0))
    with pytest.raises(AttributeError, match=r"params of an Engine cannot be replaced.* Engine\(model"):
        engine.params = params
    assert engine.params["emb"]["embedding"] is mine["emb"]["embedding"]
    mine["head"] = jax.tree.map(jnp.zeros_like, mine["head"])
    engine.put([1, 2], 6)
    (result,) = engine.results()
    want = generate(model, params, [[1, 2]], 6, SamplingParams(temperature=0.0)).tokens[0]
    np.testing.assert_array_equal(result.tokens, want)
    engine.put([1, 2], 6)
    jax.tree.map(lambda x: x.delete(), engine.params)
    with pytest.raises(ValueError, match=r"^params contains deleted arrays"):
        list(engine.results())


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        (1, {}, TypeError, "prompt must be a sequence of tokens, got 1"),
        ("text", {}, TypeError, "prompt must be a sequence of tokens, got 'text'"),
        ([], {}, ValueError, "prompt must be a sequence of at least one token"),
        ([24], {}, ValueError, "prompt must hold tokens from 0 to 23, got 24"),
        ([1], {"max_tokens": -1}, ValueError, "max_tokens must be an integer >= 0, got -1"),
        ([1], {"seed": 2**64}, ValueError, "seed must be from"),
        ([1], {"state": small.model(7).init_state(2)}, ValueError, "state.att_shift must have shape"),
    ],
)
def test_errors_of_put(setup, prompt, options, error, message):
    with pytest.raises(error, match=message):
        Engine(*setup, 1).put(prompt, **{"max_tokens": 3, **options})


def test_errors(setup):
    model, params = setup
    with pytest.raises(ValueError, match="slots must be an integer >= 1, got 0"):
        Engine(model, params, 0)
    with pytest.raises(TypeError, match="sampling must be a SamplingParams or None"):
        Engine(model, params, 1, {"temperature": 1})
    with pytest.raises(ValueError, match="params must be the parameters alone"):
        Engine(model, {"params": params}, 1)
    with pytest.raises(ValueError, match=r"slots must be an integer >= 1, got 1\.5"):
        generate(model, params, [[1]], 1, slots=1.5)
