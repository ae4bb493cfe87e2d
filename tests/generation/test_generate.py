"""Generation against the official models, requests against each alone, streaming against the whole."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from sampling_reference import reference

import fla_jax
from fla_jax.generation import SamplingParams, decoding, generate, loop, prefill, stream
from fla_jax.generation import prompts as reading
from fla_jax.generation.sampling_params import row_seeds

V = 24
PROMPTS = [[int(t) for t in small.tokens(1, n, seed=n)[0]] for n in (21, 1, 9)]
SAMPLING = SamplingParams(temperature=1.3, top_p=0.9, banned=(0,), uncounted=(5,))


@pytest.fixture(scope="module")
def batch(setup):
    return generate(*setup, PROMPTS, 40, SAMPLING, seed=3)


@pytest.mark.parametrize("version", small.VERSIONS)
def test_equals_the_official_model_step_by_step(version):
    """Greedy with penalties: every step depends on those before. Model and choice in float64 NumPy."""
    model = small.model(version, num_layers=2 if version == 7 else 1)
    params = small.params(model)
    settings = SamplingParams(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.8,
        penalty_decay=0.9,
        banned=(3,),
        uncounted=(7, 8),
    )
    prompt, state = PROMPTS[2], small.random_state(model, 1)
    got = generate(model, params, [prompt], 12, settings, state=state)

    z = official.checkpoint(params, version)
    logits, now = official.run(
        z,
        version,
        prompt,
        [np.asarray(x)[:, 0] for x in (state.att_shift, state.ffn_shift, state.wkv)],
        heads=small.HEADS,
    )
    steps = []
    for _ in range(12):
        steps.append([logits[-1], 0])
        steps[-1][1] = int(np.argmax(reference(settings, steps)[-1]))
        logits, now = official.run(z, version, [steps[-1][1]], now, heads=small.HEADS)
    assert got.tokens[0].tolist() == [token for _, token in steps]
    assert len({token for _, token in steps}) > 3, "a loop of one token tests nothing"
    for name, want in zip(("att_shift", "ffn_shift", "wkv"), now):
        assert small.error(getattr(got.state, name)[:, 0], want) < 2e-5


def test_requests_equal_themselves_alone(setup, batch):
    assert [len(request) for request in batch.tokens] == [40] * 3
    for i, prompt in enumerate(PROMPTS):
        alone = generate(*setup, [prompt], 40, SAMPLING, seed=3 + i)
        np.testing.assert_array_equal(alone.tokens[0], batch.tokens[i])
    again = generate(*setup, PROMPTS, 40, SAMPLING, seed=[3, 4, 5])
    jax.tree.map(np.testing.assert_array_equal, again, batch)
    other = generate(*setup, PROMPTS, 40, SAMPLING, seed=4)
    assert all((a != b).any() for a, b in zip(other.tokens, batch.tokens))


def test_every_step_draws_anew(setup):
    """With a head of zeros all tokens are equally probable: only the random keys differ."""
    model, params = setup
    params = {**params, "head": jax.tree.map(jnp.zeros_like, params["head"])}
    requests = generate(
        model, params, PROMPTS, 40, SamplingParams(top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    ).tokens
    assert all(len(set(request.tolist())) > 12 for request in requests)


def test_stop_and_ban(setup, batch):
    """Requests end before their first stop token, with the state at that point; banned tokens do not come."""
    assert not any((request == 0).any() for request in batch.tokens)
    stop = int(batch.tokens[0][6])
    got = generate(
        *setup,
        PROMPTS,
        40,
        SamplingParams(temperature=1.3, top_p=0.9, banned=(0,), uncounted=(5,), stop_tokens=(stop,)),
        seed=3,
    )
    for request, whole in zip(got.tokens, batch.tokens):
        ends = [*np.flatnonzero(whole == stop), 40][0]
        assert request.tolist() == whole[:ends].tolist()
    assert len(got.tokens[0]) <= 6
    _, want = prefill(*setup, [[*prompt, *request] for prompt, request in zip(PROMPTS, got.tokens)])
    small.assert_close(got.state, want)


def test_streaming(setup, batch):
    stop = int(batch.tokens[0][6])
    settings = SamplingParams(temperature=1.3, top_p=0.9, banned=(0,), uncounted=(5,), stop_tokens=(stop,))
    want = generate(*setup, PROMPTS, 40, settings, seed=3).tokens
    requests = np.stack(list(stream(*setup, PROMPTS, 40, settings, seed=3)))
    assert requests.shape == (max(map(len, want)), 3)
    for request, whole in zip(requests.T, want):
        assert request[request >= 0].tolist() == whole.tolist() and (request[len(whole) :] < 0).all()


def test_the_state_is_donated_and_the_callers_is_not(setup):
    model, params = setup
    state = small.random_state(model, 3)
    generate(model, params, PROMPTS, 2, SAMPLING, state=state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    requests = [np.array(request, np.int32) for request in PROMPTS]
    carry, decoder, rules = decoding._start(model, params, requests, 2, SAMPLING, 0, state, None)
    new, _ = loop.decode(decoder.step, decoder.weights, rules, carry, np.int32(1), None)
    assert carry.state.wkv.is_deleted() and not new.state.wkv.is_deleted()


def test_one_program_for_all_settings_and_lengths(setup, batch):
    """What is compiled depends on the batch size alone."""
    before = loop.decode._cache_size(), reading._read._cache_size()
    prompts = [PROMPTS[0][:9], PROMPTS[0][:18], PROMPTS[2]]
    generate(*setup, prompts, 7, SamplingParams(temperature=0.0, top_k=2, stop_tokens=(9,)), seed=2**40)
    assert (loop.decode._cache_size(), reading._read._cache_size()) == before


def test_parameters_placed_by_hand_compile_nothing_twice():
    """As a checkpoint's reader places them: arrays committed to a device."""
    model = small.model(7, num_layers=1, vocab_size=25, implementation="reference")
    params = jax.device_put(small.params(model), jax.devices()[0])
    before = loop.decode._cache_size(), reading._read._cache_size()
    longest = reading.chunk_sizes(32, 2, jax.devices()[0])[-1]
    for _ in range(2):
        list(stream(model, params, [[1] * (2 * longest + 3), [2]], 3))
    assert loop.decode._cache_size() == before[0] + 1
    # the longest chunk, twice, and a short one; the other request's, from zeros
    assert reading._read._cache_size() == before[1] + 3


def test_all_bits_of_a_seed_count(setup, batch):
    """Request i has seed + i, also beyond 32 bits; below, the keys are those of `jax.random.key`."""
    first = 2**32 - 2
    seeds = [first, first + 1, first + 2]
    requests = generate(*setup, [PROMPTS[0]] * 3, 12, SAMPLING, seed=first).tokens
    np.testing.assert_array_equal(
        requests, generate(*setup, [PROMPTS[0]] * 3, 12, SAMPLING, seed=seeds).tokens
    )
    more = generate(*setup, [PROMPTS[0]] * 3, 12, SAMPLING, seed=np.array([0, -1, 2**63 - 1])).tokens
    assert len({request.tobytes() for request in (*requests, *more)}) == 6
    data = lambda seed, batch: np.asarray(jax.random.key_data(loop.row_keys(row_seeds(seed, batch))))
    for seed in (0, 3, 2**31, 2**32 - 1):
        np.testing.assert_array_equal(data(seed, 1)[0], jax.random.key_data(jax.random.key(np.uint32(seed))))
    with jax.enable_x64(True):  # JAX's own keys of 64 bits, and the same ones here
        wide = [0, 2**32, 2**62 + 5, -1, -(2**63)]
        want = np.stack([jax.random.key_data(jax.random.key(seed)) for seed in wide])
        np.testing.assert_array_equal(data(wide, 5), want)
    np.testing.assert_array_equal(data(wide, 5), want)
    np.testing.assert_array_equal(data([2**64 - 1], 1), data([-1], 1))


def test_not_a_number_is_an_error(setup):
    """In the parameters, at once; in a request's state, with its number; ignored in a finished one."""
    model, params = setup
    broken = {**params, "ln_out": jax.tree.map(lambda x: x.at[3].set(jnp.nan), params["ln_out"])}
    message = "row 0: the logits for new token 0 hold NaN or no finite largest one. Either params or state"
    for run in (generate, lambda *args, **options: list(stream(*args, **options))):
        with pytest.raises(FloatingPointError, match=message):
            run(model, broken, PROMPTS, 3)
    state = model.init_state(3)
    with pytest.raises(FloatingPointError, match="row 1: the logits for new token 0"):
        generate(model, params, PROMPTS, 3, state=state.replace(wkv=state.wkv.at[0, 1, 0, 0, 0].set(jnp.nan)))
    # a token whose embedding is NaN: nothing happens until it is read, and never in a request that it ends
    prompts, greedy = [[1], [2], [4]], SamplingParams(temperature=0.0, presence_penalty=2.0)
    whole = [request.tolist() for request in generate(model, params, prompts, 5, greedy).tokens]
    token = whole[0][0]
    assert token not in (1, 2, 4) and any(token not in request for request in whole)
    broken = {**params, "emb": {"embedding": params["emb"]["embedding"].at[token].set(jnp.nan)}}
    with pytest.raises(FloatingPointError, match="row 0: the logits for new token 1"):
        generate(model, broken, prompts, 5, greedy)
    stopped = generate(model, broken, prompts, 5, dataclasses.replace(greedy, stop_tokens=(token,))).tokens
    assert [request.tolist() for request in stopped] == [
        request[: [*request, token].index(token)] for request in whole
    ]


def test_it_is_not_to_be_traced(setup):
    model, params = setup
    for run in (
        lambda: fla_jax.checked(lambda: generate(model, params, [[1]], 2).tokens)(),
        lambda: fla_jax.checked(lambda params: generate(model, params, [[1]], 2).tokens)(params),
        lambda: jax.jit(lambda params: generate(model, params, [[1]], 2).tokens)(params),
        lambda: jax.grad(lambda params: generate(model, params, [[1]], 2).state.wkv.sum())(params),
        lambda: fla_jax.checked(lambda: list(stream(model, params, [[1]], 2)))(),
    ):
        with pytest.raises(TypeError, match=r"generate and stream run outside of jax.jit, .* fla_jax"):
            run()


def test_no_tokens(setup):
    assert [len(request) for request in generate(*setup, PROMPTS, 0).tokens] == [0, 0, 0]
    assert list(stream(*setup, PROMPTS, 0)) == []


@pytest.mark.parametrize(
    "prompts, options, error, message",
    [
        ([], {}, ValueError, "prompts must hold at least one row"),
        ([[1], []], {}, ValueError, r"prompts\[1\] must be a sequence of at least one token"),
        ([[1, 24]], {}, ValueError, r"prompts\[0\] must hold tokens from 0 to 23, got 24"),
        ([[1, -1]], {}, ValueError, "got -1"),
        ([[1.5]], {}, TypeError, r"prompts\[0\] must be integers"),
        ("text", {}, TypeError, "tokenizer"),
        ([[1]], {"max_tokens": -1}, ValueError, "max_tokens must be"),
        ([[1]], {"max_tokens": True}, ValueError, "max_tokens must be an integer >= 0, got True"),
        ([[1]], {"max_tokens": 1.0}, ValueError, "max_tokens must be an integer >= 0, got 1.0"),
        (
            [[1]],
            {"sampling": {"temperature": 1}},
            TypeError,
            "sampling must be a SamplingParams or ",
        ),
        ([[1]], {"seed": [1, 2]}, ValueError, "seed must be an integer or one for each of the 1 prompts"),
        ([[1]], {"seed": "1"}, ValueError, "seed must be an integer or one for each .*, got '1'"),
        ([[1]], {"seed": True}, ValueError, "seed must be an integer or one for each .*, got True"),
        ([[1]], {"seed": [0.5]}, ValueError, r"seed must be an integer or one for each .*, got \[0.5\]"),
        ([[1]], {"seed": 2**64}, ValueError, r"seed must be from -2\*\*63 to 2\*\*64 - 1 .*, got 18"),
        ([[1], [1]], {"seed": 2**64 - 1}, ValueError, "seed must be from .* got 18446744073709551616"),
        ([[1]], {"seed": [-(2**63) - 1]}, ValueError, "seed must be from .* got -9223372036854775809"),
        ([[1]], {"sampling": SamplingParams(stop_tokens=(24,))}, ValueError, "stop_tokens must hold tokens"),
        ([[1]], {"state": small.model(7).init_state(2)}, ValueError, "state.att_shift must have shape"),
    ],
)
def test_errors(setup, prompts, options, error, message):
    with pytest.raises(error, match=message):
        generate(*setup, prompts, **{"max_tokens": 3, **options})
