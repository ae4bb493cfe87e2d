"""The fast path of decoding against the model: in plain JAX, and its kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from harness import tiers, variants

from fla_jax.generation import Decoder, Generator, SamplingParams, decoder, generate, prefill, stream
from fla_jax.models import stack_layers
from fla_jax.ops.decode import Matrix, Quantisation, quantised
from fla_jax.pallas.backend import triton

SLOW = (pytest.mark.slow, pytest.mark.one_python)
PROMPTS = [[3, 1, 4, 1, 5], [9]]


@functools.cache
def setup(version, **options):
    # ranks that are no multiples of anything, and layers of different ranks would be filled up, too
    model = small.model(version, hidden_size=64, head_dim=16, **options)
    return model, small.params(model)


def compared(model, params, B, implementation, tol, active=None, **options):
    """Logits and state of one token, asserted to be the plain form's (the model's without options)."""
    tokens, start = jnp.arange(B) * 3, small.random_state(model, B, 1)
    run = lambda name: Decoder(model, params, implementation=name, **options)(
        tokens, jax.tree.map(jnp.copy, start), active
    )
    (got, state), (want, want_state) = run(implementation), run("plain" if options else "model")
    live = slice(None) if active is None else active
    small.assert_close((got[live], state), (want[live], want_state), tol)
    return got, state, start


@pytest.mark.parametrize("version", small.VERSIONS)
def test_one_token_is_the_models(version):
    """Logits and states; an inactive entry keeps its state to the last bit. Layers stacked or not."""
    model, params = setup(version)
    active = jnp.arange(4) != 1
    got, state, start = compared(model, params, 4, "plain", 2e-6, active)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 1], b[:, 1]), state, start)
    scanned = type(model)(type(model.config)(**{**vars(model.config), "scan_layers": True}))
    again, _ = Decoder(scanned, stack_layers(params), implementation="plain")(
        jnp.arange(4) * 3, start, active
    )
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=SLOW)])
def test_greedy_tokens_are_the_models(version):
    """512 of two requests, in float32: each is the argmax of `model.apply` on all tokens before it."""
    model, params = setup(version)
    generator = Generator(model, params, slots=2, implementation="plain")
    got = generator.generate(PROMPTS, SamplingParams.policy(0.0), max_tokens=512)
    for prompt, one in zip(PROMPTS, got):
        text = [*prompt, *one.tokens.tolist()]
        logits, _ = model.apply({"params": params}, jnp.asarray([text]))
        want = np.argmax(logits[0, len(prompt) - 1 : -1], -1)
        np.testing.assert_array_equal(one.tokens, want)
    assert len(set(got[0].tokens.tolist())) > 3, "a loop of few tokens tests nothing"


@pytest.fixture
def interpreted(monkeypatch):
    """The host code of the kernels, with fewer and larger programs: the interpreter is slow."""
    host = pytest.importorskip("fla_jax.pallas.decode.projections_host")
    if not triton.INTERPRET:
        pytest.skip("Triton's interpreter is off (on a GPU tests/gpu runs the kernels)")
    with variants.forced("decode: many tiles"):
        yield host


@pytest.mark.parametrize(
    "version, B", [(7, 1), pytest.param(6, 1, marks=SLOW), pytest.param(7, 5, marks=SLOW), (6, 5)]
)
def test_kernels(version, B, interpreted):
    """Greedy tokens through Triton's interpreter; one request ends early. Small batches, and larger ones."""
    # a vocabulary that is no multiple of anything, and with B = 1 a width that is no power of two
    sizes = {"vocab_size": 23, "num_layers": 2 if version == 7 else 1}
    model = small.model(version, hidden_size=192 if B == 1 else 64, head_dim=16, **sizes)
    params = small.params(model)
    prompts = [[3, 1, 4], [9], [2, 6], [5], [3, 5]][:B]
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    plain = generate(model, params, prompts, greedy)
    stop = dataclasses.replace(greedy, stop_tokens=(int(plain[-1].tokens[1]),))
    generator = Generator(model, params, slots=B, implementation="triton")
    streams = [generator.stream(prompt, stop) for prompt in prompts]  # few steps: the interpreter is slow
    for streaming, want in zip(streams, generate(model, params, prompts, stop), strict=True):
        assert [int(event.tokens[0]) for event in streaming if event.tokens.size] == want.tokens.tolist()
        small.assert_close(streaming.state.rwkv, want.state.rwkv, 5e-6)


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_products_of_the_library(version, interpreted, monkeypatch):
    """What follows products that are not the kernels': one token of five requests."""
    monkeypatch.setattr(interpreted, "MAX_GEMM", interpreted.MAX_GEMV)
    compared(*setup(version), 5, "triton", 5e-6)


@pytest.mark.slow
@pytest.mark.one_python
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("B, group", [(1, 16), (2, 16), (5, 64)], ids=str)
def test_the_kernels_of_quantised_weights(interpreted, monkeypatch, weight_dtype, B, group):
    """Groups of fewer and of more channels than a tile."""
    host = importlib.import_module("fla_jax.pallas.decode.gemm_host")
    launches = {key: one._replace(BK=32) for key, one in host.GEMM_LAUNCHES.items()}
    monkeypatch.setattr(host, "GEMM_LAUNCHES", launches)
    compared(*setup(7), B, "triton", 5e-6, weight_dtype=weight_dtype, weight_group=group)


@pytest.mark.one_python
@pytest.mark.parametrize("weight_dtype", tiers.first([None, "int8", "int4"]))
def test_programs_that_share_channels(interpreted, weight_dtype):
    """Split-K, of the second product of the feed-forward, with what is added to it."""
    options = {} if weight_dtype is None else dict(weight_dtype=weight_dtype, weight_group=64)
    with variants.forced("decode: split-K"):
        compared(*setup(7), 3, "triton", 5e-6, **options)


def is_matrix(x):
    return isinstance(x, Matrix)


def logits_of(decoder, tokens, state):
    """Logits [T, B, V] of forced tokens [T, B]."""
    step, weights = decoder.step, decoder.weights

    def one(state, tokens):
        logits, state = step(weights, tokens, state, jnp.ones(tokens.shape, bool))
        return state, logits

    return np.asarray(
        jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens)[1])(decoder.state(state), tokens)
    )


@pytest.mark.parametrize("version", [7, pytest.param(6, marks=SLOW)])
def test_bfloat16_is_as_near_as_the_model(version):
    """Root mean square error of the logits of 64 tokens, against float32 with the same weights."""
    model, params = setup(version, dtype="bfloat16", param_dtype="bfloat16")
    exact, _ = setup(version)
    tokens = small.tokens(64, 4, seed=5)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want = logits_of(Decoder(exact, wide, implementation="model"), tokens, exact.init_state(4))
    error = {}
    for name in ("model", "plain"):
        got = logits_of(Decoder(model, params, implementation=name), tokens, model.init_state(4))
        error[name] = np.sqrt(np.mean(np.square(got - want)))
    assert error["plain"] <= error["model"], error


@pytest.mark.parametrize("name, bound", [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_states_of_16_bits(name, bound):
    """After 256 tokens, in units of the largest logit. Requests that are over keep their state exactly."""
    model, params = setup(7)
    tokens = small.tokens(256, 2, seed=5)
    want = logits_of(Decoder(model, params, implementation="plain"), tokens, model.init_state(2))
    decoder = Decoder(model, params, implementation="plain", state_dtype=name)
    assert small.error(logits_of(decoder, tokens, model.init_state(2))[-16:], want[-16:]) < bound
    start = decoder.init_state(2)
    before = jax.tree.map(np.array, decoder(jnp.array([1, 2]), start)[1])
    assert before.wkv.dtype == name
    _, after = decoder(jnp.array([3, 4]), jax.tree.map(jnp.array, before), jnp.array([True, False]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 1], b[:, 1]), after, before)
    # the definition takes them too
    model_step = Decoder(model, params, implementation="model", state_dtype=name)
    got, state = model_step(jnp.array([1, 2]), model_step.init_state(2))
    assert state.wkv.dtype == name and got.dtype == jnp.float32


@pytest.mark.parametrize("group", [64, pytest.param(16, marks=SLOW)])
def test_weights_of_8_bits(group):
    """A weight is off by half a step of its group, 1/254 of its largest, and the logits by little."""
    model, params = setup(7)
    decoder = Decoder(model, params, weight_dtype="int8", weight_group=group)
    assert decoder.implementation == "plain" and decoder.weights.head.weight.dtype == jnp.int8
    exact = Decoder(model, params, implementation="plain").weights
    leaves = functools.partial(jax.tree.leaves, is_leaf=is_matrix)
    for got, want in zip(leaves(decoder.weights), leaves(exact), strict=True):
        if is_matrix(got):
            grouped = np.asarray(want.weight).reshape(*got.scale.shape, group)
            step = np.abs(grouped).max(-1, keepdims=True) / 127
            off = np.abs(np.asarray(got.dense(jnp.float32)).reshape(grouped.shape) - grouped)
            assert (off <= step * 0.57).all()  # half, and what float16 makes of the factor
    tokens = small.tokens(64, 2, seed=5)
    want = logits_of(Decoder(model, params, implementation="plain"), tokens, model.init_state(2))
    assert small.error(logits_of(decoder, tokens, model.init_state(2)), want) < 0.05


def test_weights_of_4_bits():
    """Bytes of two weights against NumPy: whole numbers from -8 to 7, none farther off than half a step or
    the end of the range, and closer than with the largest weight over 7 as the factor.
    """
    rng, group = np.random.default_rng(0), 32
    exact = rng.normal(size=(6, 64)).astype(np.float32) * np.exp(rng.normal(size=(6, 1)))
    exact[0] = 0
    made = quantised(Matrix(jnp.asarray(exact), None, ((6, 0, 0),)), Quantisation(4, group))
    stored, scale = np.asarray(made.weight), np.asarray(made.scale, np.float64)
    assert stored.shape == (6, 32) and stored.dtype == np.uint8 and made.shape == (6, 64)
    levels = np.stack([stored % 16, stored // 16], -1).reshape(6, 64).astype(np.float64) - 8
    factors = np.repeat(scale, group, 1)
    got, ends = levels * factors, np.sort([-8 * factors, 7 * factors], 0)
    assert (np.abs(got - np.clip(exact, *ends)) <= np.abs(factors) * 0.501).all() and not got[0].any()
    np.testing.assert_allclose(made.dense(jnp.float32), got, rtol=1e-6)
    plain = np.repeat(np.abs(exact).reshape(6, 2, group).max(-1) / 7, group, 1)
    rounded = np.where(plain > 0, np.round(exact / np.maximum(plain, 1e-30)), 0) * plain
    of_group = lambda x: np.square(x - exact).reshape(6, 2, group).sum(-1)
    assert of_group(got).sum() < 0.85 * of_group(rounded).sum()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"implementation": "xla"}, ValueError, "implementation must be one of .* or None, got 'xla'"),
        ({"state_dtype": "int8"}, TypeError, "state_dtype must be float32, bfloat16, float16 or None, got"),
        (
            {"weight_dtype": "int8", "weight_group": 48},
            ValueError,
            "weight_group must be a power of two that divides the widths 64 and 256",
        ),
        ({"weight_group": 16}, ValueError, "weight_group must be None without weight_dtype, got 16"),
        ({"weight_dtype": "int2"}, ValueError, "weight_dtype must be 'int8', 'int4' or None, got 'int2'"),
        ({"weight_dtype": "int8", "implementation": "model"}, ValueError, "it has no int8 weights"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        Decoder(*setup(7), **options)


class Device(NamedTuple):
    """What `has_room` looks at."""

    stats: dict | None

    def memory_stats(self):
        return self.stats


def test_kernels_are_taken_where_memory_allows(monkeypatch):
    model, params = setup(7)
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    assert decoder.has_room(model, params) and decoder.has_room(model, params, Device(None))
    assert decoder.has_room(model, params, Device({"bytes_limit": 3 * size, "bytes_in_use": 2 * size}))
    assert not decoder.has_room(
        model, params, Device({"bytes_limit": 3 * size, "bytes_in_use": 2 * size + 1})
    )
    half = type(model)(type(model.config)(**{**vars(model.config), "dtype": "bfloat16"}))
    assert decoder.has_room(half, params, Device({"bytes_limit": 2 * size, "bytes_in_use": size + size // 2}))
    monkeypatch.setattr(decoder, "unsupported", lambda *arguments: None)
    monkeypatch.setattr(decoder.triton, "INTERPRET", False)
    for enough, taken in ((True, "triton"), (False, "model")):
        monkeypatch.setattr(decoder, "has_room", lambda *arguments, enough=enough: enough)
        assert Decoder(model, params).implementation == taken


def test_errors_of_decoders():
    model, params = setup(7)
    narrow = small.model(7)
    with pytest.raises(ValueError, match="implementation='plain' cannot run this call: it takes widths"):
        Decoder(narrow, small.params(narrow), implementation="plain")
    state = model.init_state(2)
    for run in (
        lambda state: Decoder(model, params)(jnp.ones(2, jnp.int32), state),
        Decoder(model, params).state,
    ):
        with pytest.raises(TypeError, match=r"state must be an RWKVState.*, got tuple"):
            run((state.att_shift, state.ffn_shift, state.wkv))
    with pytest.raises(ValueError, match=r"tokens must be integers \[B\], got int32\[1, 1\]"):
        Decoder(model, params)(jnp.ones((1, 1), jnp.int32), model.init_state(1))
    for active, got in (([True, False, True], r"bool\[3\]"), (jnp.ones(2, jnp.int32), r"int32\[2\]")):
        with pytest.raises(ValueError, match=rf"active must be booleans \[2\], one for each.*, got {got}"):
            Decoder(model, params)(jnp.ones(2, jnp.int32), model.init_state(2), active)


def test_donated_parameters_are_named():
    model, params = setup(7)
    mine = jax.tree.map(jnp.copy, params)
    decoder = Decoder(model, mine)
    streaming = stream(model, mine, [1], max_tokens=9)
    next(streaming)
    jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)(mine)
    tokens = jnp.array([1])
    for run in (
        lambda: generate(model, mine, [[1]]),
        lambda: stream(model, mine, [1]),
        lambda: list(streaming),
        lambda: prefill(model, mine, [[1]]),
        lambda: Decoder(model, mine),
        lambda: decoder(tokens, model.init_state(1)),
    ):
        with pytest.raises(ValueError, match=r"^params contains deleted arrays: they were donated to"):
            run()
    decoder, state = Decoder(model, params), model.init_state(1)
    decoder(tokens, state)
    for run in (
        lambda: decoder(tokens, state),
        lambda: prefill(model, params, [[1]], state),
        lambda: generate(model, params, [[1]], state=state),
    ):
        with pytest.raises(ValueError, match=r"^state contains deleted arrays"):
            run()


@pytest.mark.parametrize("version", small.VERSIONS)
def test_what_is_no_token_has_no_logits(version):
    """NaN on every way to decode, and nothing in the other requests; a list says which requests live."""
    model, params = setup(version)
    for implementation in ("model", "plain"):
        decoder = Decoder(model, params, implementation=implementation)
        read = lambda tokens, decoder=decoder: decoder(tokens, model.init_state(2), [True, True])[0]
        for wrong in (model.config.vocab_size, -1, -model.config.vocab_size - 1):
            logits = read(jnp.array([4, wrong]))
            assert np.isnan(logits[1]).all()
            np.testing.assert_array_equal(logits[0], read(jnp.array([4, 1]))[0])
