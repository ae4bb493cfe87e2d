"""Rows that join and leave a batch of slots, against each row alone; how much of the slots is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.generation import Decoder, Engine, Sampling, generate
from fla_jax.generation import engine as module

SAMPLING = Sampling(temperature=1.3, top_p=0.9, stop=(0,))
LENGTHS = (21, 1, 9, 30, 5, 17, 2)


@pytest.fixture(scope="module")
def alone(setup):
    """Prompts, and the rows that they give one by one: the row's own limit of tokens, seed and state."""
    rows = []
    for i, length in enumerate(LENGTHS):
        prompt = [int(t) for t in small.tokens(1, length, seed=length)[0]]
        state = small.random_state(setup[0], 1, seed=i) if i % 3 == 1 else None
        limit = (3, 40, 17, 0, 33, 8, 25)[i]
        result = generate(*setup, [prompt], limit, SAMPLING, seed=50 + i, state=state)
        rows.append((prompt, limit, 50 + i, state, result))
    assert len({len(result.tokens[0]) for *_, result in rows}) > 4, "rows must end at different times"
    return rows


def test_every_row_is_what_it_is_alone(setup, alone):
    """Put in at once or between results; the state after each row is its own, too."""
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
        jax.tree.map(
            lambda a, b: np.testing.assert_array_less(small.error(a, b), 1e-5), done[i].state, want.state
        )
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
    """Lengths from 16 to 1024 in 16 slots, eight prompts for each: 85 % of the row-steps give a token.

    It is about the bookkeeping, which is the same for any model: this one counts down in its state from the
    length that a row shall have, and then says the stop token, where the engine does not know the length.
    """

    class Countdown:
        sampling, per_call = "xla", fixed

        def __call__(self, weights, tokens, state, alive):
            left = state.att_shift - alive[None, :, None]
            return jax.nn.one_hot(jnp.where(left[0, :, 0] > 0, 1, 23), 24), state.replace(att_shift=left)

    def reading(model, params, rows, batch, initial):
        yield jax.nn.one_hot(jnp.ones(initial.wkv.shape[1], int), 24), initial

    monkeypatch.setattr(module, "reading", reading)
    model, params = setup
    decoder = Decoder(model, params)
    decoder.step = Countdown()
    lengths = np.random.default_rng(0).integers(16, 1025, 128)
    zeros = model.init_state(1)
    sampling = Sampling(temperature=0.0, presence_penalty=0, frequency_penalty=0, stop=(23,))
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
    engine = Engine(*setup, 1, Sampling(temperature=0.0))
    engine.put([1], 32 * 3)
    list(engine.results())
    assert events == ["start", "start", "read", "start", "read", "read"]


def test_not_a_number_names_the_row(setup):
    model, params = setup
    engine = Engine(model, params, 2)
    state = model.init_state(1)
    for i in range(3):
        broken = state.replace(wkv=state.wkv.at[0].set(jnp.nan)) if i == 2 else None
        engine.put([1], 4, state=broken)
    with pytest.raises(FloatingPointError, match="row 2: the logits for new token 0 hold NaN"):
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
    with pytest.raises(TypeError, match="sampling must be a Sampling or None"):
        Engine(model, params, 1, {"temperature": 1})
    with pytest.raises(ValueError, match="params must be the parameters alone"):
        Engine(model, {"params": params}, 1)
    with pytest.raises(ValueError, match=r"slots must be an integer >= 1, got 1\.5"):
        generate(model, params, [[1]], 1, slots=1.5)
