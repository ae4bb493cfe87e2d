"""The choice of the next token against PIPELINE's rules in NumPy, and PIPELINE where it is installed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import tiers
from sampling_reference import reference

from fla_jax.generation import sampling
from fla_jax.generation.decode_loop import row_keys
from fla_jax.generation.sampling import TokenCounts, choose
from fla_jax.generation.sampling_params import SamplingParams, sampling_arrays
from fla_jax.pallas.backend import triton as run_triton

V = 13
adjusted = jax.jit(sampling.adjusted)  # one program for all settings
SETTINGS = {
    "defaults": SamplingParams(),
    "plain": SamplingParams(top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    "cold": SamplingParams(temperature=0.3, top_p=0.5),
    "hot": SamplingParams(temperature=2.0, top_k=4, top_p=1.0),
    "both": SamplingParams(temperature=1.5, top_k=3, top_p=0.7, banned=(5, 7), uncounted=(2,)),
    "penalties": SamplingParams(
        presence_penalty=0.7, frequency_penalty=1.1, penalty_decay=0.5, uncounted=(4, 9)
    ),
    "repetition": SamplingParams.policy(repetition_penalty=1.7, min_p=0.05),
    "biased": SamplingParams(0.9, min_p=0.2, logit_bias={2: -3.0, 4: 1.5, 11: 6.0}, banned=(11,)),
    "top_p 0": SamplingParams(top_p=0.0),
    "fifty": SamplingParams(top_k=50, top_p=1.0),
    "greedy": SamplingParams(temperature=0.0, banned=(1,)),
}


def steps(seed, count=8):
    rng = np.random.default_rng(seed)
    return [(2 * rng.normal(size=V), int(token)) for token in rng.choice([2, 3, 4, 9], count)]


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_rules(name):
    settings = SETTINGS[name]
    rules, requests = settings.arrays(V), (steps(0), steps(1))
    want = np.stack([reference(settings, request) for request in requests], 1)
    counts, got = TokenCounts.none(2, V), []
    for (a, i), (b, j) in zip(*requests):
        got.append(jax.nn.softmax(adjusted(rules, jnp.asarray([a, b], jnp.float32), counts)))
        counts = counts.add(rules, jnp.array([i, j]))
    np.testing.assert_allclose(np.stack(got), want, atol=2e-6)


def test_rules_by_row():
    """Every setting in a row of one program, against each alone in NumPy."""
    settings, requests = list(SETTINGS.values()), steps(5)
    want = np.stack([reference(one, requests) for one in settings], 1)
    rules, counts, got = sampling_arrays(settings, V), TokenCounts.none(len(settings), V), []
    for logits, token in requests:
        rows = jnp.tile(jnp.asarray(logits, jnp.float32), (len(settings), 1))
        got.append(jax.nn.softmax(adjusted(rules, rows, counts)))
        counts = counts.add(rules, jnp.full(len(settings), token))
    np.testing.assert_allclose(np.stack(got), want, atol=2e-6)


@pytest.mark.one_python
def test_rules_by_row_without_sorting(monkeypatch):
    monkeypatch.setattr(interpreted(), "PART", 16)
    rules, rng = sampling_arrays(list(SETTINGS.values()), V), np.random.default_rng(1)
    B = len(SETTINGS)
    seen = rng.random((B, V)) < 0.3
    counts = TokenCounts(jnp.array(seen), jnp.array(seen * rng.random((B, V)), jnp.float32))
    arguments = rules, jnp.array(2 * rng.normal(size=(B, V)), jnp.float32), counts
    keys = jax.random.split(jax.random.key(2), B)
    want, after = choose(*arguments, keys)
    got, counts = choose(*arguments, keys, "triton")
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(counts.count, after.count, rtol=1e-6)


def test_sample_is_one_program_with_log_probabilities():
    """The public function in a loop of one's own: values vary, nothing is compiled again."""
    # a function of its own: another test's programs of `sample` are not counted
    run, rng = jax.jit(lambda *arguments: sampling.sample(*arguments)), np.random.default_rng(0)
    counts = TokenCounts.none(2, V)
    for i in range(4):
        rules = sampling_arrays([SamplingParams(0.5 + i, top_k=i, seed=i), SamplingParams(0)], V)
        logits = jnp.asarray(rng.normal(size=(2, V)), jnp.float32)
        tokens, logprobs, counts = run(logits, rules, jax.random.key(i), counts)
        p = np.exp(np.float64(logits))
        want = np.log(p / p.sum(1, keepdims=True))
        np.testing.assert_allclose(logprobs, want[np.arange(2), tokens], atol=1e-6)
        order = np.argsort(-want, 1)[:, :3]
        _, top, values = sampling.logprobs(logits, tokens, 3)
        np.testing.assert_array_equal(top, order)
        np.testing.assert_allclose(values, np.take_along_axis(want, order, 1), atol=1e-6)
    assert run._cache_size() == 1 and counts.seen.sum() > 2


@pytest.mark.parametrize("vocab_size", [1024, 1000])
def test_logprobs_of_a_large_vocabulary(vocab_size):
    """Against sorting in NumPy: equal numbers, -inf, the largest all in one group, numbers of 1e3."""
    logits = np.random.default_rng(0).normal(size=(6, vocab_size)).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2] = 0
    logits[3, 2:] = -np.inf
    logits[4, 960:] += 30
    logits[5] *= 1e3
    drawn = np.arange(6) * 100
    own, tokens, values = jax.jit(lambda x: sampling.logprobs(x, drawn, 3))(logits)
    wide = np.float64(logits)
    order = np.argsort(-wide, 1, kind="stable")[:, :3]
    np.testing.assert_array_equal(tokens, order)
    highest = wide.max(1, keepdims=True)
    want = wide - highest - np.log(np.exp(wide - highest).sum(1, keepdims=True))
    np.testing.assert_allclose(values, np.take_along_axis(want, order, 1), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(own, want[np.arange(6), drawn], rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(sampling.logprobs(logits, drawn)[0], own)


EXTREMES = {
    "freezing": SamplingParams(temperature=1e-38),
    "boiling": SamplingParams(temperature=1e38, banned=(3,)),
}
OTHERS = ("penalties", "defaults", "plain", "cold", "hot", "top_p 0", "freezing")


def interpreted():
    """The host of kernels, where Triton's interpreter is on."""
    host = pytest.importorskip("fla_jax.pallas.decode.host")
    if not run_triton.INTERPRET:
        pytest.skip("Triton's interpreter is off (on a GPU tests/gpu runs the kernels)")
    return host


@pytest.mark.one_python
@pytest.mark.parametrize("part", tiers.first([4, 16]))
@pytest.mark.parametrize(
    "name", tiers.first(["both", "repetition", "biased", "greedy", "boiling", "penalties", *OTHERS], 5)
)
def test_without_sorting(name, part, monkeypatch):
    """The kernels choose sorting's tokens: ties, infinities, nothing to choose from; one part and four."""
    host = interpreted()
    monkeypatch.setattr(host, "PART", part)
    monkeypatch.setattr(host, "GROUP", 4)
    rules, rng = (SETTINGS | EXTREMES)[name].arrays(V), np.random.default_rng(1)
    logits = (2 * rng.normal(size=(16, V))).astype(np.float32)
    logits[1] = 0  # all tie
    logits[2, 3:] = -np.inf
    logits[3] = 50 * logits[3]
    logits[4, 2] = np.nan
    logits[5, 2] = np.inf
    logits[6] = -np.inf
    seen = rng.random((16, V)) < 0.3
    counts = TokenCounts(jnp.array(seen), jnp.array(seen * rng.random((16, V)), jnp.float32))
    keys = jax.random.split(jax.random.key(0), 16)
    arguments = rules, jnp.array(logits), counts, keys
    want, after = choose(*arguments, implementation="xla")
    got, counts = choose(*arguments, implementation="triton")
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(counts.seen, after.seen)
    np.testing.assert_allclose(counts.count, after.count, rtol=1e-6)
    assert (np.asarray(got[4:7]) == sampling.UNDEFINED).all()


@pytest.mark.one_python
@pytest.mark.parametrize(
    "name, spread",
    tiers.first(
        [("both", 3), ("fifty", 0.5), ("defaults", 0.5), ("defaults", 3), ("defaults", 12)]
        + [("fifty", 12), ("plain", 3), ("greedy", 3)],
        2,
    ),
)
def test_lists_of_what_is_probable_enough(name, spread, monkeypatch):
    """Distributions from nearly flat to nearly certain, over parts of which the last is not full."""
    monkeypatch.setattr(interpreted(), "PART", 256)
    monkeypatch.setattr(interpreted(), "GROUP", 16)
    rules, rng = SETTINGS[name].arrays(1000), np.random.default_rng(2)
    logits = jnp.array(spread * rng.normal(size=(6, 1000)), jnp.float32)
    counts = TokenCounts.none(6, 1000)
    for i in range(2):  # tokens that have been chosen are less probable then
        keys = jax.random.split(jax.random.key(i), 6)
        alone = [x[:1] for x in (logits, counts.seen, counts.count)]
        one, _ = choose(rules, alone[0], TokenCounts(*alone[1:]), keys[:1], "triton")
        want, after = choose(rules, logits, counts, keys)
        got, counts = choose(rules, logits, counts, keys, "triton")
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(one, got[:1])
        jax.tree.map(np.testing.assert_array_equal, counts, after)


def test_equals_pipeline(monkeypatch):
    """The installed package itself; penalties are outside of its sample_logits."""
    pipeline = pytest.importorskip("rwkv.utils", exc_type=ImportError).PIPELINE
    import torch

    seen = []
    monkeypatch.setattr(np.random, "choice", lambda a, p: seen.append(p) or 0)
    for settings in SETTINGS.values():
        if settings.top_p == 1:  # PIPELINE's rounding: see `allowed`
            settings = dataclasses.replace(settings, top_p=0.999)
        for logits, _ in steps(2):
            logits = np.float32(logits)
            pipeline.sample_logits(
                None, torch.tensor(logits), settings.temperature, settings.top_p, settings.top_k
            )
            got = adjusted(
                dataclasses.replace(settings, banned=(), logit_bias={}, min_p=0).arrays(V),
                jnp.asarray(logits[None]),
                TokenCounts.none(1, V),
            )
            np.testing.assert_allclose(jax.nn.softmax(got)[0], seen.pop(), atol=2e-6)


def test_draws_follow_the_probabilities():
    settings, n = SETTINGS["both"], 4000
    logits = steps(3)[0][0]
    keys = jax.random.split(jax.random.key(0), n)
    tokens, _ = choose(
        settings.arrays(V),
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, V)),
        TokenCounts.none(n, V),
        keys,
    )
    want = reference(settings, [(logits, 0)])[0]
    got = np.bincount(tokens, minlength=V) / n
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / n)).all(), (got, want)


def test_a_seed_means_the_same_whatever_is_configured():
    def tokens():
        rules, requests = SETTINGS["plain"].arrays(V), jnp.zeros((64, V))
        return choose(rules, requests, TokenCounts.none(64, V), row_keys(range(64)))[0]

    want = tokens()
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(tokens(), want)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(tokens(), want)


@functools.partial(jax.jit, static_argnums=2)
def draws(rules, logits, n):
    keys = jax.random.split(jax.random.key(1), n)
    requests = jnp.broadcast_to(logits, (n, logits.shape[-1]))
    return choose(rules, requests, TokenCounts.none(n, logits.shape[-1]), keys)[0]


# tokens 10, 3, 0 and 7 lead
LOGITS = np.float32([7.5, 2.0, 2.5, 8.0, -3.0, 2.25, 1.0, 7.0, -80.0, 0.0, 9.0, 2.75, 2.0])
TEMPERATURES = (1e-320, 1e-300, 1e-40, 1e-38, 2e-38, 1e-30, 1e-3, 1.0, 1e3, 1e30, 1e38, 3.4e38, 1e39, 1e300)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "options, kept",
    [
        ({"top_p": 1.0, "banned": (3, 7)}, set(range(V)) - {3, 7}),
        ({"top_p": 1.0, "top_k": 3, "banned": (10,)}, {3, 0, 7}),
        ({"top_p": 0.75, "banned": (3,)}, {10, 0}),
    ],
)
def test_no_temperature_lets_a_token_in(temperature, options, kept):
    """Also where it, or the quotient, is more or less than float32 holds; what is kept comes as it should."""
    rules = SamplingParams(temperature=temperature, **options).arrays(V)
    tokens = set(np.unique(draws(rules, LOGITS, 3000)).tolist())
    best = max(kept, key=LOGITS.__getitem__)
    assert tokens <= kept
    if temperature <= 1e-3:
        assert tokens == {best}
    elif temperature >= 1e3:
        assert tokens == kept
        got = np.bincount(draws(rules, LOGITS, 3000), minlength=V)[sorted(kept)] / 3000
        want = 1 / len(kept)  # hot enough that all are alike
        assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / 3000)).all()


@pytest.mark.parametrize("penalty", [3e38, -3e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1.0, 1e38])
def test_no_penalty_lets_a_token_in(penalty, temperature):
    """Penalties that add up to more than float32 holds, on all tokens that are left."""
    settings = SamplingParams(temperature, banned=(0, 3), presence_penalty=penalty, frequency_penalty=penalty)
    rules, seen = settings.arrays(V), jnp.arange(V)[None] > 0
    counts = TokenCounts(jnp.broadcast_to(seen, (200, V)), jnp.broadcast_to(200.0 * seen, (200, V)))
    logits = jnp.broadcast_to(LOGITS, (200, V))
    tokens, _ = choose(rules, logits, counts, jax.random.split(jax.random.key(0), 200))
    assert tokens.min() >= 0 and not {0, 3} & set(tokens.tolist())


def test_logits_to_choose_nothing_from():
    """NaN and infinity give no token and do not disturb other requests; -inf never comes."""
    requests = jnp.stack([jnp.asarray(LOGITS)] * 5)
    requests = (
        requests.at[1, 4].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(-jnp.inf).at[4, 10].set(-jnp.inf)
    )
    keys = jax.random.split(jax.random.key(0), 5)
    for temperature in (0.0, 1e38):
        settings = SamplingParams(temperature=temperature, top_k=1)
        tokens, _ = choose(settings.arrays(V), requests, TokenCounts.none(5, V), keys)
        assert tokens.tolist() == [10, sampling.UNDEFINED, sampling.UNDEFINED, sampling.UNDEFINED, 3]
        nan_is_banned = dataclasses.replace(settings, banned=(4,)).arrays(V)
        tokens, _ = choose(nan_is_banned, requests, TokenCounts.none(5, V), keys)
        assert tokens.tolist() == [10, 10, 10, sampling.UNDEFINED, 3]


def test_arguments_of_any_number_type():
    """Scalars of NumPy and JAX, sequences and arrays of tokens; equal settings have one hash."""
    want = SamplingParams(temperature=0.5, top_k=10**12, top_p=1.0, banned=(1, 2), stop_tokens=(3,))
    half, many, tokens = np.float32(0.5), np.int64(10**12), [np.int32(1), 2]
    got = SamplingParams(temperature=half, top_k=many, top_p=1, banned=tokens, stop_tokens=jnp.array([3]))
    assert got == want and hash(got) == hash(want) and type(got.top_p) is float and got.banned == (1, 2)
    assert want.arrays(V).top_k.tolist() == [V]
    for tokens in (np.array([1, 2]), range(1, 3), iter((1, 2))):
        assert SamplingParams(banned=tokens).banned == (1, 2)


def test_ties_at_the_border_stay_in():
    logits = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    left = lambda settings: np.isfinite(adjusted(settings.arrays(4), logits, TokenCounts.none(1, 4)))[
        0
    ].tolist()
    assert left(SamplingParams(top_k=2, top_p=1.0)) == [True, True, True, False]
    assert left(SamplingParams(top_p=0.4)) == [True, True, True, False]
    assert left(SamplingParams(temperature=0.0)) == [True, False, False, False]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_top_k_of_tokens_without_probability(top_p):
    """All but the first are 0 in float32, and a large temperature makes them likely again."""
    logits = jnp.array([[-300.0, 0.0, -400.0, -200.0]])
    rules = SamplingParams(top_k=2, top_p=top_p, temperature=100.0).arrays(4)
    left = np.isfinite(adjusted(rules, logits, TokenCounts.none(1, 4)))[0].tolist()
    assert left == [False, True, False, top_p == 1.0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"min_p": 2}, "min_p must be from 0 to 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100, got 0"),
        ({"logit_bias": {V: 1}}, "logit_bias must hold tokens from 0 to"),
        ({"logit_bias": {1: "x"}}, "logit_bias must be a finite number, got 'x'"),
        ({"logit_bias": [1]}, "logit_bias must map tokens to numbers"),
        ({"seed": 2**64}, "seed must be an integer from"),
        ({"max_tokens": -1}, "max_tokens must be an integer >= 0"),
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"logprobs": 21}, "logprobs must be an integer from 0 to 20, got 21"),
        ({"stop": ("",)}, "stop must be a sequence of texts"),
        ({"stop": (1,)}, "stop must be a sequence of texts"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite"),
        ({"top_k": -1}, "top_k must be an integer"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"penalty_decay": 2.0}, "penalty_decay must be from 0 to 1"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be a finite"),
        ({"banned": (V,)}, f"banned must hold tokens from 0 to {V - 1}, got {V}"),
        ({"stop_tokens": (-1,)}, "stop_tokens must hold tokens"),
        ({"banned": tuple(range(V))}, "banned holds all"),
        ({"banned": (1.5,)}, r"banned must be a sequence of tokens, which are integers, got \(1.5,\)"),
        ({"stop_tokens": (2.0,)}, "stop_tokens must be a sequence of tokens"),
        ({"uncounted": (True,)}, "uncounted must be a sequence of tokens"),
        ({"stop_tokens": "12"}, "stop_tokens must be a sequence of tokens, which are integers, got '12'"),
        ({"stop_tokens": b"12"}, "stop_tokens must be a sequence of tokens"),
        ({"stop_tokens": 3}, "stop_tokens must be a sequence of tokens, which are integers, got 3"),
        ({"banned": np.zeros((1, 1), int)}, "banned must be a sequence of tokens"),
        ({"banned": (10**30,)}, f"banned must hold tokens from 0 to {V - 1}, got 10+"),
        ({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
        ({"top_k": True}, "top_k must be an integer >= 0, got True"),
        ({"top_k": "3"}, "top_k must be an integer >= 0, got '3'"),
        ({"temperature": "1"}, "temperature must be a finite number, got '1'"),
        ({"temperature": True}, "temperature must be a finite number, got True"),
        ({"temperature": None}, "temperature must be a finite number, got None"),
        ({"temperature": 1j}, "temperature must be a finite number"),
        ({"temperature": 10**400}, "temperature must be a finite number, got 10+"),
        ({"top_p": np.array([0.5])}, "top_p must be a finite number"),
        ({"top_p": np.True_}, "top_p must be a finite number"),
        ({"penalty_decay": "x"}, "penalty_decay must be a finite number, got 'x'"),
        ({"presence_penalty": 1e39}, "presence_penalty must be from -3.40282e[+]38 to 3.40282e[+]38, got 1e"),
        ({"frequency_penalty": False}, "frequency_penalty must be a finite number, got False"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options).arrays(V)


@pytest.mark.parametrize("rule", [SamplingParams(), SamplingParams(0.0), SamplingParams(top_p=1.0)])
def test_one_nan_among_many_logits(rule):
    """XLA's maximum of 4096 numbers and more passes NaN over on a CPU."""
    logits = jnp.zeros((2, 4096)).at[0, 1000].set(jnp.nan)
    none, keys = sampling.TokenCounts.none(2, 4096), jax.random.split(jax.random.key(0), 2)
    for run in (choose, jax.jit(choose)):
        tokens, _ = run(rule.arrays(4096), logits, none, keys)
        assert tokens[0] == sampling.UNDEFINED and tokens[1] >= 0
