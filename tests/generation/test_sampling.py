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
from fla_jax.generation.loop import row_keys
from fla_jax.generation.sampling import Sampling, TokenCounts, sample
from fla_jax.pallas.backend import triton as run_triton

V = 13
adjusted = jax.jit(sampling.adjusted)  # one program for all settings
SETTINGS = {
    "defaults": Sampling(),
    "plain": Sampling(top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0),
    "cold": Sampling(temperature=0.3, top_p=0.5),
    "hot": Sampling(temperature=2.0, top_k=4, top_p=1.0),
    "both": Sampling(temperature=1.5, top_k=3, top_p=0.7, banned=(5, 7), uncounted=(2,)),
    "penalties": Sampling(presence_penalty=0.7, frequency_penalty=1.1, penalty_decay=0.5, uncounted=(4, 9)),
    "top_p 0": Sampling(top_p=0.0),
    "greedy": Sampling(temperature=0.0, banned=(1,)),
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


EXTREMES = {"freezing": Sampling(temperature=1e-38), "boiling": Sampling(temperature=1e38, banned=(3,))}
OTHERS = ("defaults", "plain", "cold", "hot", "top_p 0", "freezing")


def interpreted():
    """The host of kernels, where Triton's interpreter is on."""
    host = pytest.importorskip("fla_jax.pallas.decode.host")
    if not run_triton.INTERPRET:
        pytest.skip("Triton's interpreter is off (on a GPU tests/gpu runs the kernels)")
    return host


@pytest.mark.one_python
@pytest.mark.parametrize("part", tiers.first([4, 16]))
@pytest.mark.parametrize("name", tiers.first(["both", "penalties", "greedy", "boiling", *OTHERS], 4))
def test_without_sorting(name, part, monkeypatch):
    """The kernels choose sorting's tokens: ties, infinities, nothing to choose from; one part and four."""
    host = interpreted()
    monkeypatch.setattr(host, "PART", part)
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
    want, after = sample(*arguments, implementation="xla")
    got, counts = sample(*arguments, implementation="triton")
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(counts.seen, after.seen)
    np.testing.assert_allclose(counts.count, after.count, rtol=1e-6)
    assert (np.asarray(got[4:7]) == sampling.UNDEFINED).all()


@pytest.mark.one_python
@pytest.mark.parametrize(
    "name, spread",
    tiers.first(
        [("both", 3), ("defaults", 0.5), ("defaults", 3), ("defaults", 12), ("plain", 3), ("greedy", 3)]
    ),
)
def test_lists_of_what_is_probable_enough(name, spread, monkeypatch):
    """Distributions from nearly flat to nearly certain, over parts of which the last is not full."""
    monkeypatch.setattr(interpreted(), "PART", 256)
    rules, rng = SETTINGS[name].arrays(1000), np.random.default_rng(2)
    logits = jnp.array(spread * rng.normal(size=(6, 1000)), jnp.float32)
    counts = TokenCounts.none(6, 1000)
    for i in range(2):  # tokens that have been chosen are less probable then
        keys = jax.random.split(jax.random.key(i), 6)
        alone = [x[:1] for x in (logits, counts.seen, counts.count)]
        one, _ = sample(rules, alone[0], TokenCounts(*alone[1:]), keys[:1], "triton")
        want, after = sample(rules, logits, counts, keys)
        got, counts = sample(rules, logits, counts, keys, "triton")
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
                dataclasses.replace(settings, banned=()).arrays(V),
                jnp.asarray(logits[None]),
                TokenCounts.none(1, V),
            )
            np.testing.assert_allclose(jax.nn.softmax(got)[0], seen.pop(), atol=2e-6)


def test_draws_follow_the_probabilities():
    settings, n = SETTINGS["both"], 4000
    logits = steps(3)[0][0]
    keys = jax.random.split(jax.random.key(0), n)
    tokens, _ = sample(
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
        return sample(rules, requests, TokenCounts.none(64, V), row_keys(range(64)))[0]

    want = tokens()
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(tokens(), want)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(tokens(), want)


@functools.partial(jax.jit, static_argnums=2)
def draws(rules, logits, n):
    keys = jax.random.split(jax.random.key(1), n)
    requests = jnp.broadcast_to(logits, (n, logits.shape[-1]))
    return sample(rules, requests, TokenCounts.none(n, logits.shape[-1]), keys)[0]


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
    rules = Sampling(temperature=temperature, **options).arrays(V)
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
    settings = Sampling(temperature, banned=(0, 3), presence_penalty=penalty, frequency_penalty=penalty)
    rules, seen = settings.arrays(V), jnp.arange(V)[None] > 0
    counts = TokenCounts(jnp.broadcast_to(seen, (200, V)), jnp.broadcast_to(200.0 * seen, (200, V)))
    logits = jnp.broadcast_to(LOGITS, (200, V))
    tokens, _ = sample(rules, logits, counts, jax.random.split(jax.random.key(0), 200))
    assert tokens.min() >= 0 and not {0, 3} & set(tokens.tolist())


def test_logits_to_choose_nothing_from():
    """NaN and infinity give no token and do not disturb other requests; -inf never comes."""
    requests = jnp.stack([jnp.asarray(LOGITS)] * 5)
    requests = (
        requests.at[1, 4].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(-jnp.inf).at[4, 10].set(-jnp.inf)
    )
    keys = jax.random.split(jax.random.key(0), 5)
    for temperature in (0.0, 1e38):
        settings = Sampling(temperature=temperature, top_k=1)
        tokens, _ = sample(settings.arrays(V), requests, TokenCounts.none(5, V), keys)
        assert tokens.tolist() == [10, sampling.UNDEFINED, sampling.UNDEFINED, sampling.UNDEFINED, 3]
        nan_is_banned = dataclasses.replace(settings, banned=(4,)).arrays(V)
        tokens, _ = sample(nan_is_banned, requests, TokenCounts.none(5, V), keys)
        assert tokens.tolist() == [10, 10, 10, sampling.UNDEFINED, 3]


def test_arguments_of_any_number_type():
    """Scalars of NumPy and JAX, sequences and arrays of tokens; equal settings have one hash."""
    want = Sampling(temperature=0.5, top_k=10**12, top_p=1.0, banned=(1, 2), stop=(3,))
    half, many, tokens = np.float32(0.5), np.int64(10**12), [np.int32(1), 2]
    got = Sampling(temperature=half, top_k=many, top_p=1, banned=tokens, stop=jnp.array([3]))
    assert got == want and hash(got) == hash(want) and type(got.top_p) is float and got.banned == (1, 2)
    assert want.arrays(V).top_k == V
    for tokens in (np.array([1, 2]), range(1, 3), iter((1, 2))):
        assert Sampling(banned=tokens).banned == (1, 2)


def test_ties_at_the_border_stay_in():
    logits = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    left = lambda settings: np.isfinite(adjusted(settings.arrays(4), logits, TokenCounts.none(1, 4)))[
        0
    ].tolist()
    assert left(Sampling(top_k=2, top_p=1.0)) == [True, True, True, False]
    assert left(Sampling(top_p=0.4)) == [True, True, True, False]
    assert left(Sampling(temperature=0.0)) == [True, False, False, False]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_top_k_of_tokens_without_probability(top_p):
    """All but the first are 0 in float32, and a large temperature makes them likely again."""
    logits = jnp.array([[-300.0, 0.0, -400.0, -200.0]])
    rules = Sampling(top_k=2, top_p=top_p, temperature=100.0).arrays(4)
    left = np.isfinite(adjusted(rules, logits, TokenCounts.none(1, 4)))[0].tolist()
    assert left == [False, True, False, top_p == 1.0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite"),
        ({"top_k": -1}, "top_k must be an integer"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"penalty_decay": 2.0}, "penalty_decay must be from 0 to 1"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be a finite"),
        ({"banned": (V,)}, f"banned must hold tokens from 0 to {V - 1}, got {V}"),
        ({"stop": (-1,)}, "stop must hold tokens"),
        ({"banned": tuple(range(V))}, "banned holds all"),
        ({"banned": (1.5,)}, r"banned must be a sequence of tokens, which are integers, got \(1.5,\)"),
        ({"stop": (2.0,)}, "stop must be a sequence of tokens"),
        ({"uncounted": (True,)}, "uncounted must be a sequence of tokens"),
        ({"stop": "12"}, "stop must be a sequence of tokens, which are integers, got '12'"),
        ({"stop": b"12"}, "stop must be a sequence of tokens"),
        ({"stop": 3}, "stop must be a sequence of tokens, which are integers, got 3"),
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
        Sampling(**options).arrays(V)


@pytest.mark.parametrize("rule", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=1.0)])
def test_one_nan_among_many_logits(rule):
    """XLA's maximum of 4096 numbers and more passes NaN over on a CPU."""
    logits = jnp.zeros((2, 4096)).at[0, 1000].set(jnp.nan)
    none, keys = sampling.TokenCounts.none(2, 4096), jax.random.split(jax.random.key(0), 2)
    for run in (sampling.sample, jax.jit(sampling.sample)):
        tokens, _ = run(rule.arrays(4096), logits, none, keys)
        assert tokens[0] == sampling.UNDEFINED and tokens[1] >= 0
