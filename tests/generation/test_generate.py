"""`generate` and `stream` against the official models, in every precision; seeds, programs, NaN, errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import official
import pytest
import small_models as small
from harness import tiers
from sampling_reference import reference

from fla_jax.generation import SamplingParams, decode_loop, generate, load_tokenizer, prefill, stream
from fla_jax.generation import prompts as reading

PROMPTS = [[int(t) for t in small.tokens(1, n, seed=n)[0]] for n in (21, 1, 9)]
SAMPLING = SamplingParams(temperature=1.3, top_p=0.9, banned=(0,), uncounted=(5,), seed=3)


def tokens_of(completions):
    return [completion.tokens.tolist() for completion in completions]


@pytest.fixture(scope="module")
def batch(setup):
    return tokens_of(generate(*setup, PROMPTS, SAMPLING, max_tokens=40))


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
    (got,) = generate(model, params, [prompt], settings, max_tokens=12, state=state)

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
    assert got.tokens.tolist() == [token for _, token in steps]
    assert len({token for _, token in steps}) > 3, "a loop of one token tests nothing"
    for name, want in zip(("att_shift", "ffn_shift", "wkv"), now):
        assert small.error(getattr(got.state.rwkv, name)[:, 0], want) < 2e-5
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)), "the caller's state stays"


@pytest.mark.parametrize(
    "dtype",
    tiers.first(["float64", "float32", "bfloat16", "float16"], 2, (tiers.ONE_PYTHON, tiers.SLOW)),
)
@pytest.mark.parametrize("version", tiers.first([7, 6], 1, (tiers.ONE_PYTHON, tiers.SLOW)))
def test_every_precision_with_64_bits(version, dtype):
    """With jax_enable_x64 the state after some tokens is the official model's, to the model's precision, and
    float32 has the tokens that it has without. The official model reads float32 parameters.
    """
    options = {"num_layers": 1, "implementation": "reference"}
    params = small.params(small.model(version, **options))
    prompts = [[3, 5, 7, 1], [2]]
    rules = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=12, banned=(0,), stop_tokens=(4,), seed=seed)
        for seed in (2**40, -3)
    ]
    with jax.enable_x64(True):
        model = small.model(version, dtype=dtype, param_dtype=dtype, **options)
        exact = jax.tree.map(lambda x: x.astype(dtype), params)
        got = generate(model, exact, prompts, rules, max_tokens=6)
        tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}[dtype]
        z = official.checkpoint(exact, version)
        for prompt, one in zip(prompts, got):
            assert not {0, 4} & set(one.tokens.tolist())
            _, want = official.run(z, version, [*prompt, *one.tokens], heads=small.HEADS)
            state = one.state.rwkv
            for x, y in zip((state.att_shift, state.ffn_shift, state.wkv), want):
                assert small.error(x[:, 0], y) < tolerance
        logits, _ = prefill(model, exact, prompts)
        assert logits.dtype == ("float64" if dtype == "float64" else "float32")
        first = generate(model, exact, prompts, SamplingParams.policy(0.0), max_tokens=1)
        assert tokens_of(first) == np.argmax(logits, -1)[:, None].tolist()
    if dtype == "float32":
        assert tokens_of(generate(model, params, prompts, rules, max_tokens=6)) == tokens_of(got)


def test_rows_equal_themselves_alone(setup, batch):
    """In one batch, alone and in fewer slots; row i has the seed ``seed + i``."""
    assert [len(row) for row in batch] == [40] * 3
    for i, prompt in enumerate(PROMPTS):
        own = dataclasses.replace(SAMPLING, seed=3 + i)
        assert tokens_of(generate(*setup, [prompt], own, max_tokens=40)) == [batch[i]]
    assert tokens_of(generate(*setup, PROMPTS, SAMPLING, max_tokens=40, slots=2)) == batch
    other = tokens_of(generate(*setup, PROMPTS, dataclasses.replace(SAMPLING, seed=4), max_tokens=40))
    assert all(a != b for a, b in zip(other, batch))


def test_states_and_stop_tokens(setup, batch):
    """A completion ends before its first stop token, with the state there; banned tokens never come."""
    assert not any(0 in row for row in batch)
    stop = batch[0][6]
    rules = dataclasses.replace(SAMPLING, stop_tokens=(stop,))
    got = generate(*setup, PROMPTS, rules, max_tokens=40)
    assert tokens_of(got) == [row[: [*row, stop].index(stop)] for row in batch]
    assert len(got[0].tokens) <= 6
    for prompt, one in zip(PROMPTS, got):
        small.assert_close(one.state.rwkv, prefill(*setup, [[*prompt, *one.tokens]])[1])


def test_a_stream(setup, batch):
    """One token at a time, with text; its generator lives as long as it does."""
    streaming = stream(*setup, PROMPTS[0], SAMPLING, max_tokens=40)
    sizes = [event.tokens.size for event in streaming]
    assert sizes == [1] * 40 and streaming.completion.tokens.tolist() == batch[0]
    model = small.model(7, vocab_size=256, num_layers=1)
    rules, bytes_ = SamplingParams(seed=1, n=2, max_tokens=5), load_tokenizer("bytes")
    params = small.params(model)
    texts = ["", ""]
    for event in stream(model, params, "née", rules, tokenizer=bytes_):
        texts[event.index] += event.text
    assert [one.text for one in generate(model, params, ["née"], rules, tokenizer=bytes_)] == texts


def test_every_step_draws_anew(setup):
    """With a head of zeros all tokens are equally probable: only the random keys differ."""
    model, params = setup
    params = {**params, "head": jax.tree.map(jnp.zeros_like, params["head"])}
    rows = tokens_of(generate(model, params, PROMPTS, SamplingParams.policy(max_tokens=40)))
    assert all(len(set(row)) > 12 for row in rows)


def test_one_program_for_all_settings_and_lengths(setup, batch):
    """What is compiled depends on the number of rows alone."""
    before = decode_loop.decode._cache_size(), reading._read._cache_size()
    prompts = [PROMPTS[0][:9], PROMPTS[0][:18], PROMPTS[2]]
    rules = SamplingParams(temperature=0.0, top_k=2, stop_tokens=(9,), seed=2**40)
    generate(*setup, prompts, rules, max_tokens=7)
    assert (decode_loop.decode._cache_size(), reading._read._cache_size()) == before


def test_parameters_placed_by_hand_compile_nothing_twice():
    """As a checkpoint's reader places them: arrays committed to a device."""
    model = small.model(7, num_layers=1, vocab_size=25, implementation="reference")
    params = jax.device_put(small.params(model), jax.devices()[0])
    before = decode_loop.decode._cache_size(), reading._read._cache_size()
    longest = reading.chunk_sizes(32, 1, jax.devices()[0])[-1]
    for _ in range(2):
        list(stream(model, params, [1] * (2 * longest + 3), max_tokens=3))
    assert decode_loop.decode._cache_size() == before[0] + 1
    assert reading._read._cache_size() == before[1] + 2  # the longest chunk, twice, and a short one


def test_all_bits_of_a_seed_count():
    """The keys are JAX's own of 64 bits, with and without jax_enable_x64."""
    data = lambda seeds: np.asarray(jax.random.key_data(decode_loop.row_keys(seeds)))
    for seed in (0, 3, 2**31, 2**32 - 1):
        np.testing.assert_array_equal(data([seed])[0], jax.random.key_data(jax.random.key(np.uint32(seed))))
    wide = [0, 2**32, 2**62 + 5, -1, -(2**63)]
    with jax.enable_x64(True):
        want = np.stack([jax.random.key_data(jax.random.key(seed)) for seed in wide])
        np.testing.assert_array_equal(data(wide), want)
    np.testing.assert_array_equal(data(wide), want)
    np.testing.assert_array_equal(data([2**64 - 1]), data([-1]))


def test_not_a_number_is_an_error(setup):
    """In the parameters, at once; in a row's state, with its number; ignored in a row that is over."""
    model, params = setup
    broken = {**params, "ln_out": jax.tree.map(lambda x: x.at[3].set(jnp.nan), params["ln_out"])}
    message = "row 0: the logits for new token 0 hold NaN or no finite largest one. Either params or state"
    for run in (lambda: generate(model, broken, PROMPTS), lambda: next(stream(model, broken, PROMPTS[0]))):
        with pytest.raises(FloatingPointError, match=message):
            run()
    state = model.init_state(3)
    state = state.replace(wkv=state.wkv.at[0, 1, 0, 0, 0].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="row 1: the logits for new token 0"):
        generate(model, params, PROMPTS, max_tokens=3, state=state)
    # a token whose embedding is NaN: nothing happens until it is read, and never in a row that it ends
    prompts, greedy = [[1], [2], [4]], SamplingParams(temperature=0.0, presence_penalty=2.0, max_tokens=5)
    whole = tokens_of(generate(model, params, prompts, greedy))
    token = whole[0][0]
    assert token not in (1, 2, 4) and any(token not in row for row in whole)
    broken = {**params, "emb": {"embedding": params["emb"]["embedding"].at[token].set(jnp.nan)}}
    with pytest.raises(FloatingPointError, match="row 0: the logits for new token 1"):
        generate(model, broken, prompts, greedy)
    stopped = generate(model, broken, prompts, dataclasses.replace(greedy, stop_tokens=(token,)))
    assert tokens_of(stopped) == [row[: [*row, token].index(token)] for row in whole]


@pytest.mark.parametrize(
    "prompts, options, error, message",
    [
        ([[1], []], {}, ValueError, r"prompts\[1\] must be a sequence of at least one token"),
        ("text", {}, TypeError, "prompts must be a sequence of prompts, got text"),
        (5, {}, TypeError, "prompts must be a sequence of prompts, got 5"),
        ([[1]], {"state": 5}, TypeError, "state must be a state, or a sequence of them, got 5"),
        ([[1]], {"slots": 1.5}, ValueError, r"slots must be an integer >= 1, got 1\.5"),
        ([[1]], {"max_tokens": True}, ValueError, "max_tokens must be an integer >= 0, got True"),
        ([[1]], {"max_tokens": 1.0}, ValueError, "max_tokens must be an integer >= 0, got 1.0"),
        ([[1]], {"sampling": {"temperature": 1}}, TypeError, "sampling must be a SamplingParams"),
        ([[1]], {"state": small.model(7).init_state(2)}, ValueError, "state.att_shift must have shape"),
    ],
)
def test_errors(setup, prompts, options, error, message):
    with pytest.raises(error, match=message):
        generate(*setup, prompts, **options)


def test_nothing_to_do(setup):
    assert tokens_of(generate(*setup, PROMPTS, max_tokens=0)) == [[], [], []]
    assert generate(*setup, []) == []
