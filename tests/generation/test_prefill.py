"""Requests of different lengths in one call of a model, and prompts read in few chunks by few programs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from harness import tiers

from fla_jax.generation import prompts as module
from fla_jax.generation.prefill_plan import chunk_sizes, plan
from fla_jax.generation.prompts import prefill
from fla_jax.models import stack_layers

LENGTHS = (20, 0, 37, 5)


@pytest.fixture(scope="module")
def setup():
    model = small.model(7, num_layers=1, implementation="reference")
    return model, small.params(model)


def official_rows(params, version, requests, state):
    """Logits (None if it is empty) and state after each request, read alone, in float64 NumPy."""
    z, out = official.checkpoint(params, version), []
    for i, request in enumerate(requests):
        now = [np.asarray(x)[:, i] for x in (state.att_shift, state.ffn_shift, state.wkv)]
        logits, now = official.run(z, version, request, now, heads=small.HEADS)
        out.append((logits if len(request) else None, now))
    return out


def assert_row(i, state, want):
    for x, y in zip((state.att_shift, state.ffn_shift, state.wkv), want):
        assert small.error(x[:, i], y) < 2e-5


@pytest.mark.parametrize("version, scan", [(6, False), (7, False), (7, True)])
def test_a_request_with_a_length_equals_the_request_alone(version, scan):
    """Behind the ends stands a token whose embedding is NaN: nothing of it may reach a result."""
    model = small.model(version, num_layers=2 if scan else 1)
    params, state = small.params(model), small.random_state(model, 4)
    tokens = np.minimum(small.tokens(4, 37), 22)
    for i, length in enumerate(LENGTHS):
        tokens[i, length:] = 23
    broken = {**params, "emb": {"embedding": params["emb"]["embedding"].at[23].set(jnp.nan)}}
    if scan:
        model = small.model(version, scan_layers=True)
        broken = stack_layers(broken)
    apply = jax.jit(model.apply)
    for T in (37, 1):  # the chunked op and the recurrent one
        lengths = np.minimum(LENGTHS, T)
        logits, new = apply({"params": broken}, tokens[:, :T], state, lengths=lengths)
        requests = [request[:length] for request, length in zip(tokens, lengths)]
        for i, (want, want_new) in enumerate(official_rows(params, version, requests, state)):
            assert want is None or small.error(logits[i, : lengths[i]], want) < 2e-5
            assert_row(i, new, want_new)


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_gradients_know_nothing_of_what_stands_behind_a_length(version):
    """A token without an embedding, or with one of NaN: of a loss of the tokens before, and of the state."""
    model = small.model(version)
    params, state = small.params(model), small.random_state(model, 2)
    params["emb"] = {"embedding": params["emb"]["embedding"].at[23].set(jnp.nan)}
    lengths = jnp.array([6, 3])
    real = jnp.arange(6) < lengths[:, None]

    @jax.jit
    def gradients(tokens):
        def loss(params, state):
            logits, new = model.apply({"params": params}, tokens, state, lengths=lengths)
            chosen = jax.nn.log_softmax(logits)[..., 0]
            return jnp.where(real, chosen, 0).sum() + sum(jnp.sum(x**2) for x in jax.tree.leaves(new))

        return jax.value_and_grad(loss, (0, 1))(params, state)

    tokens = np.minimum(small.tokens(2, 6), 22)
    want = gradients(np.where(real, tokens, 0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    for padding in (23, 24, -100):
        jax.tree.map(np.testing.assert_array_equal, gradients(np.where(real, tokens, padding)), want)


def test_errors_of_lengths(setup):
    model, params = setup
    tokens = small.tokens(2, 4)
    apply = lambda **options: model.apply({"params": params}, tokens, **options)
    with pytest.raises(TypeError, match="lengths must be an integer array, got list"):
        apply(lengths=[1, 2])
    with pytest.raises(TypeError, match="lengths must be an integer array, got float32"):
        apply(lengths=jnp.ones(2))
    with pytest.raises(ValueError, match=r"lengths must have shape \[B\] = \[2\], got \[3\]"):
        apply(lengths=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match="segment_ids and lengths cannot go together"):
        apply(lengths=jnp.ones(2, jnp.int32), segment_ids=jnp.zeros((2, 4), jnp.int32))


class Device(NamedTuple):
    """What `chunk_sizes` looks at."""

    platform: str
    memory: int | None

    def memory_stats(self):
        return self.memory and {"bytes_limit": self.memory}


@pytest.mark.parametrize(
    "platform, memory", [("cpu", None), ("gpu", 100 << 30), ("gpu", 18 << 30), ("tpu", None)]
)
@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("hidden_size", [32, 1024, 4096])
def test_few_sizes_and_little_padding(hidden_size, batch, platform, memory):
    """Whatever the length: tokens read and overheads are at most 1.15 of those of a call of that length."""
    sizes = chunk_sizes(hidden_size, batch, Device(platform, memory))
    assert len(sizes) <= 40 and list(sizes) == sorted(set(sizes)) and not any(size % 16 for size in sizes)
    assert {1 << n for n in range(4, 15)} & set(range(sizes[0], sizes[-1] + 1)) <= set(sizes)
    assert sizes[-1] == 16 or batch * sizes[-1] <= (512 if platform == "cpu" else 16384)
    if memory:  # 25 float32 numbers for each channel and token in a sixteenth of the memory
        assert sizes[-1] == 16 or batch * sizes[-1] * hidden_size * 100 <= memory / 16
    overhead = 32 if platform == "cpu" else min(max(2**30 / hidden_size**2, 128), 4096)
    for length in (1, 15, 17, 129, 500, 513, 1025, 2047, 4097, 8191, 8192, 10001, 20000, 33000):
        chunks = plan(length, sizes)
        assert sum(chunks) >= length and set(chunks[:-1]) <= {sizes[-1]}
        cost, asked = overhead + batch * chunks[-1], overhead + batch * (length - sum(chunks[:-1]))
        assert cost <= 1.15 * asked + 16 * batch, (length, chunks)
    assert plan(sizes[-1] * 3, sizes) == [sizes[-1]] * 3 and plan(1, sizes) == [sizes[0]]


@pytest.fixture
def reads(monkeypatch):
    shapes, read = [], module._read

    def counting(model, with_head, params, carry, tokens, lengths):
        shapes.append(tokens.shape)
        return read(model, with_head, params, carry, tokens, lengths)

    monkeypatch.setattr(module, "_read", counting)
    return shapes


@pytest.mark.parametrize(
    "lengths, want",
    [
        # in fours of falling lengths: 75 to 61, 56 to 41, 36 to 21, 16 to 1
        ((*range(1, 75, 5), 75), [(4, 32)] * 2 + [(4, 16)] + [(4, 32)] * 3 + [(4, 16)] * 2),
        # in pairs, the last of which is one request
        ((3, 75, 1, 16, 70), [(2, 32)] * 2 + [(2, 16)] * 3),
        # nothing to gain
        ((40, 33, 48), [(3, 32), (3, 16)]),
    ],
)
def test_requests_of_similar_lengths_are_read_together(setup, reads, monkeypatch, lengths, want):
    """From states of their own; every request comes back in its place."""
    model, params = setup
    monkeypatch.setattr(module, "chunk_sizes", lambda *_: (16, 32))
    prompts = [np.asarray(small.tokens(1, n, seed=n)[0]) for n in lengths]
    state = small.random_state(model, len(lengths))
    before = jax.tree.map(np.array, state)
    logits, new = prefill(model, params, prompts, state)
    assert reads == want
    jax.tree.map(np.testing.assert_array_equal, state, before)
    for i, (want, want_new) in enumerate(official_rows(params, 7, prompts, state)):
        assert small.error(logits[i], want[-1]) < 2e-5
        assert_row(i, new, want_new)


def test_pieces_without_padding(setup, monkeypatch):
    """Long ones are read by a program that masks nothing; with equal results."""
    model, params = setup
    monkeypatch.setattr(module, "chunk_sizes", lambda *_: (16, 32))
    requests, state = small.tokens(2, 80), small.random_state(model, 2)
    want = prefill(model, params, requests, state)
    masked, read = [], module._read
    monkeypatch.setattr(module, "UNMASKED_TOKENS", 64)
    monkeypatch.setattr(module, "_read", lambda *args: masked.append(args[-1] is not None) or read(*args))
    got = prefill(model, params, requests, state)
    assert masked == [False, False, True]
    small.assert_close(got, want, 2e-5)


@pytest.mark.parametrize("requests, share", [(32, 1.35), (256, 1.2)])
def test_mixed_lengths_read_little_padding(requests, share):
    """Requests from 16 to 1024 tokens, on a GPU's sizes: one batch would read twice as many as there are."""
    sizes = lambda batch: chunk_sizes(1024, batch, Device("gpu", 100 << 30))
    lengths = np.random.default_rng(0).integers(16, 1025, requests)
    groups = module.grouped(lengths, sizes, 1024)
    assert sorted(np.concatenate(groups).tolist()) == list(range(requests))
    read = sum(len(groups[0]) * sum(plan(int(lengths[g].max()), sizes(len(groups[0])))) for g in groups)
    assert read <= share * lengths.sum() and requests * max(lengths) > 1.8 * lengths.sum()


def test_a_prompt_is_one_call(setup, reads, monkeypatch):
    """With the sizes for a GPU: lengths that would be a chunk for every bit."""
    sizes = chunk_sizes(1024, 1, Device("gpu", 100 << 30))
    zeros = jnp.zeros((1, setup[0].config.hidden_size)), setup[0].init_state(1)
    no_reading = lambda model, with_head, params, carry, tokens, _: reads.append(tokens.shape) or zeros
    monkeypatch.setattr(module, "_read", no_reading)
    monkeypatch.setattr(module, "chunk_sizes", lambda *_: sizes)
    for length in (1, 127, 1023, 8191, 8192):
        prefill(*setup, [np.zeros(length, int)])
    assert reads == [(1, 128), (1, 128), (1, 1024), (1, 8192), (1, 8192)]


@pytest.mark.parametrize("rows, width", [(1, 8), (2, 2)])
def test_a_head_has_more_than_one_row(setup, rows, width):
    """For one row XLA would first convert 16-bit weights to float32 (on GPUs, with `COMPILER_OPTIONS`)."""
    model, params = setup
    hidden = jnp.ones((rows, model.config.hidden_size))
    text = module._head.lower(model, params, hidden).as_text()
    assert f"-> tensor<{width}x{model.config.vocab_size}xf32>" in text
    assert module._head(model, params, hidden).shape == (rows, model.config.vocab_size)


def test_prompts_of_any_kind(setup):
    """Lists, NumPy and JAX arrays of any integers, a whole batch as one array; a state in another dtype."""
    model, params = setup
    requests = [[3, 5, 7], [1, 2, 3]]
    state = small.random_state(model, 2)
    want = prefill(model, params, requests, state)
    for prompts in (
        jnp.array(requests),
        np.array(requests, np.uint8),
        tuple(jnp.array(request) for request in requests),
        [[np.int64(token) for token in request] for request in requests],
        [list(jnp.array(request)) for request in requests],
    ):
        jax.tree.map(np.testing.assert_array_equal, prefill(model, params, prompts, state), want)
    got = prefill(model, params, requests, jax.tree.map(lambda x: np.asarray(x, np.float64), state))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        (5, TypeError, "prompts must be a sequence of sequences of tokens, got 5"),
        (None, TypeError, "prompts must be a sequence of sequences of tokens, got None"),
        ([1, 2], ValueError, r"prompts\[0\] must be a sequence of at least one token, got shape \[\]"),
        (["text"], TypeError, r"prompts\[0\] must be sequences of tokens, got text"),
        ([[1], [[1], [2, 3]]], ValueError, r"prompts\[1\] must be a sequence of tokens, got \[\[1\]"),
        ([[True]], TypeError, r"prompts\[0\] must be integers, got bool"),
        ([[2**70]], TypeError, r"prompts\[0\] must be integers, got object"),
        (np.zeros((0, 3), int), ValueError, "prompts must hold at least one row"),
    ],
)
def test_errors_of_prompts(setup, prompts, error, message):
    with pytest.raises(error, match=message):
        prefill(*setup, prompts)


def test_errors_of_params(setup):
    model, params = setup
    for wrong in ({"params": params}, {}):
        with pytest.raises(ValueError, match="params must be the parameters alone"):
            prefill(model, wrong, [[1]])
