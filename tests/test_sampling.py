"""The choice of the next token against PIPELINE's rules in NumPy, and against PIPELINE itself where it is installed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fla_jax import sampling
from fla_jax.sampling import Occurrences, Sampling, sample

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


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
    """Compile time is most of the time here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def probabilities(logits, temperature, top_p, top_k):
    """PIPELINE.sample_logits, up to the draw."""
    if temperature == 0:
        temperature, top_p = 1.0, 0.0
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += p[token]
        if total >= top_p and top_p < 1:
            break
    if top_k:
        kept = kept[:top_k]
    out = np.zeros(len(p))
    out[kept] = p[kept] ** (1 / temperature)
    return out / out.sum()


def reference(settings, steps):
    """PIPELINE.generate's bookkeeping: for each (logits, token generated from them) the probabilities."""
    occurrence, out = {}, []
    for logits, token in steps:
        logits = np.array(logits, np.float64)
        logits[list(settings.banned)] = -np.inf
        for seen, count in occurrence.items():
            logits[seen] -= settings.presence_penalty + count * settings.frequency_penalty
        out.append(probabilities(logits, settings.temperature, settings.top_p, settings.top_k))
        occurrence = {seen: count * settings.penalty_decay for seen, count in occurrence.items()}
        occurrence[token] = occurrence.get(token, 0) + (0 if token in settings.uncounted else 1)
    return out


def steps(seed, count=8):
    rng = np.random.default_rng(seed)
    return [(2 * rng.normal(size=V), int(token)) for token in rng.choice([2, 3, 4, 9], count)]


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_rules(name):
    settings = SETTINGS[name]
    rules, rows = settings.arrays(V), (steps(0), steps(1))
    want = np.stack([reference(settings, row) for row in rows], 1)
    occurrences, got = Occurrences.none(2, V), []
    for (a, i), (b, j) in zip(*rows):
        got.append(jax.nn.softmax(adjusted(rules, jnp.asarray([a, b], jnp.float32), occurrences)))
        occurrences = occurrences.add(rules, jnp.array([i, j]))
    np.testing.assert_allclose(np.stack(got), want, atol=2e-6)


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
            pipeline.sample_logits(None, torch.tensor(logits), settings.temperature, settings.top_p, settings.top_k)
            got = adjusted(dataclasses.replace(settings, banned=()).arrays(V), jnp.asarray(logits[None]), Occurrences.none(1, V))
            np.testing.assert_allclose(jax.nn.softmax(got)[0], seen.pop(), atol=2e-6)


def test_draws_follow_the_probabilities():
    settings, n = SETTINGS["both"], 4000
    logits = steps(3)[0][0]
    keys = jax.random.split(jax.random.key(0), n)
    tokens = sample(settings.arrays(V), jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, V)), Occurrences.none(n, V), keys)
    want = reference(settings, [(logits, 0)])[0]
    got = np.bincount(tokens, minlength=V) / n
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / n)).all(), (got, want)


def test_ties_at_the_border_stay_in():
    logits = jnp.array([[1.0, 1.0, 1.0, 0.0]])
    left = lambda settings: np.isfinite(adjusted(settings.arrays(4), logits, Occurrences.none(1, 4)))[0].tolist()
    assert left(Sampling(top_k=2, top_p=1.0)) == [True, True, True, False]
    assert left(Sampling(top_p=0.4)) == [True, True, True, False]
    assert left(Sampling(temperature=0.0)) == [True, False, False, False]


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
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options).arrays(V)
