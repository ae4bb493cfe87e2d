"""Requests of a generator: each against itself alone, its text, its state, how it ends."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

import fla_jax
from fla_jax.generation import (
    GenerationState,
    Generator,
    SamplingParams,
    decode_loop,
    generate,
    load_tokenizer,
    slots,
)
from fla_jax.generation.array_checks import check_untraced

RULES = SamplingParams(temperature=1.3, top_p=0.9, stop_tokens=(0,))
GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (21, 1, 9, 30, 5, 17, 2)
PROMPTS = [[int(t) for t in small.tokens(1, n, seed=n)[0]] for n in LENGTHS]


class Letters:
    """A token is a letter, the end of text is token 23."""

    end_of_text = 23

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.fixture(scope="module")
def generator(setup):
    return Generator(*setup, slots=3)


@pytest.fixture(scope="module")
def letters(setup):
    return Generator(*setup, slots=2, tokenizer=Letters())


def varied():
    """Rules that differ in every value."""
    return [
        dataclasses.replace(
            RULES, seed=50 + i, top_k=i, temperature=0.5 + i / 4, max_tokens=limit, banned=(i,)
        )
        for i, limit in enumerate((3, 40, 17, 0, 33, 8, 25))
    ]


def test_every_request_is_what_it_is_alone(setup, generator):
    """With rules and states of its own, whatever the others are; nothing is compiled for other values."""
    states = [small.random_state(setup[0], 1, seed=i) if i % 3 == 1 else None for i in range(7)]
    rules = varied()
    for_all = generator.generate(PROMPTS, rules, state=states, keep_state=True)
    programs = decode_loop.decode._cache_size(), slots._insert._cache_size()
    rules = [dataclasses.replace(rule, presence_penalty=0.1 * i) for i, rule in enumerate(rules)]
    for_all = generator.generate(PROMPTS, rules, state=states, keep_state=True)
    assert programs == (decode_loop.decode._cache_size(), slots._insert._cache_size())
    for prompt, rule, state, got in zip(PROMPTS, rules, states, for_all, strict=True):
        (want,) = generate(*setup, [prompt], rule, state=state)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        assert got.finish_reason == ("length" if len(got.tokens) == rule.max_tokens else "stop")
        small.assert_close(got.state.rwkv, want.state.rwkv)
        assert got.usage == (len(prompt), 0, len(got.tokens))


def test_results_and_events(generator):
    """Requests may be added between results; their events add up to the completions."""
    requests = [generator.submit(prompt, rule) for prompt, rule in zip(PROMPTS[:4], varied(), strict=False)]
    tokens, done = {}, []
    while generator.busy:
        for event in generator.step():
            tokens.setdefault(event.request.number, []).extend(event.tokens.tolist())
            if event.completion is not None:
                done.append(event.completion)
                if len(done) == 1:
                    requests.append(generator.submit(PROMPTS[4], varied()[4]))
    assert sorted(one.request for one in done) == [request.number for request in requests]
    for one in done:
        assert one.tokens.tolist() == tokens[one.request]
    assert list(generator.results()) == []  # each event is returned once
    assert all(request.done for request in requests) and not generator.busy


def test_log_probabilities_are_the_models(setup, generator):
    """Of chosen tokens and the most probable ones, against `model.apply` in float64."""
    model, params = setup
    rule = SamplingParams(seed=3, logprobs=4, max_tokens=12, logit_bias={2: 3.0})
    (got,) = generator.generate([PROMPTS[2]], rule)
    text = [*PROMPTS[2], *got.tokens.tolist()]
    logits, _ = model.apply({"params": params}, jnp.asarray([text]))
    logits = np.asarray(logits[0, len(PROMPTS[2]) - 1 : -1], np.float64)
    want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(got.logprobs.chosen, want[np.arange(12), got.tokens], atol=1e-4)
    np.testing.assert_allclose(got.logprobs.top, -np.sort(-want, 1)[:, :4], atol=1e-4)
    assert got.logprobs.top_tokens.shape == (12, 4)
    (chosen,) = generator.generate([PROMPTS[2]], dataclasses.replace(rule, logprobs=0))
    assert chosen.logprobs.top is None
    np.testing.assert_allclose(chosen.logprobs.chosen, got.logprobs.chosen, atol=1e-5)


def test_completions_of_one_prompt(setup, generator):
    """More than there are slots, from one prefill: each is that of its seed."""
    rule = dataclasses.replace(RULES, n=5, seed=9, max_tokens=6)
    request = generator.submit(PROMPTS[0], rule)
    got = sorted(generator.results(), key=lambda one: one.index)
    assert request.done and [one.index for one in got] == list(range(5))
    for i, one in enumerate(got):
        (want,) = generate(*setup, [PROMPTS[0]], dataclasses.replace(RULES, seed=9 + i), max_tokens=6)
        np.testing.assert_array_equal(one.tokens, want.tokens)


@pytest.mark.parametrize("implementation", ["model", "plain"])
def test_two_parts_equal_one(implementation):
    """A state without a prompt goes on with the next logits, counts and random numbers."""
    model = small.model(7, hidden_size=64, num_layers=1)
    generator = Generator(model, small.params(model), slots=2, implementation=implementation)
    rule = SamplingParams(seed=4, frequency_penalty=1.0)
    (whole,) = generator.generate([PROMPTS[2]], rule, max_tokens=23)
    (first,) = generator.generate([PROMPTS[2]], rule, max_tokens=9, keep_state=True)
    (second,) = generator.generate([None], rule, max_tokens=14, state=first.state)
    np.testing.assert_array_equal(whole.tokens, [*first.tokens, *second.tokens])


def test_cancel(generator):
    """A request that waits, and one that decodes; the others go on."""
    kept = generator.submit(PROMPTS[1], GREEDY, max_tokens=60)
    decoding = generator.submit(PROMPTS[2], GREEDY, max_tokens=10**6)
    waiting = [generator.submit(PROMPTS[3], GREEDY, max_tokens=5) for _ in range(3)]
    while not any(event.request is decoding and len(event.tokens) for event in generator.step()):
        pass
    decoding.cancel()
    waiting[2].cancel()
    done = {one.request: one for one in generator.results()}
    assert done[decoding.number].finish_reason == "cancelled" and len(done[decoding.number].tokens)
    assert done[waiting[2].number].finish_reason == "cancelled" and not len(done[waiting[2].number].tokens)
    assert done[kept.number].finish_reason == "length" and len(done[kept.number].tokens) == 60


def test_a_stream_goes_on_from_any_token(setup, generator):
    (whole,) = generator.generate([PROMPTS[2]], GREEDY, max_tokens=40)
    stream, tokens = generator.stream(PROMPTS[2], GREEDY, max_tokens=40), []
    for event in stream:
        tokens += event.tokens.tolist()
        if len(tokens) == 7:
            state = stream.state
        if len(tokens) == 11:
            stream.stop()
    assert stream.completion.finish_reason == "cancelled" and isinstance(state, GenerationState)
    np.testing.assert_array_equal(tokens, whole.tokens[: len(tokens)])
    for start, n in ((state, 7), (stream.state, len(tokens))):
        (rest,) = generator.generate([None], GREEDY, max_tokens=40 - n, state=start)
        np.testing.assert_array_equal(rest.tokens, whole.tokens[n:])


def test_an_abandoned_stream_is_cancelled(setup):
    """Its slot is free for others, and no events collect."""
    generator = Generator(*setup, slots=1)
    event = next(generator.stream(PROMPTS[2], GREEDY, max_tokens=10**6))
    request = weakref.ref(event.request)
    assert request().rows[0].finish_reason is None
    (want,) = Generator(*setup, slots=1).generate([PROMPTS[0]], GREEDY, max_tokens=5)
    (got,) = generator.generate([PROMPTS[0]], GREEDY, max_tokens=5)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert event.request.completion.finish_reason == "cancelled"
    assert [*generator.results()] == [] and not generator.busy
    del event
    gc.collect()
    assert request() is None


@pytest.mark.parametrize("first", [True, False])
def test_states_of_other_dtypes(setup, first):
    """The first state of a generator does not decide in which dtype others are decoded."""
    generator, rule = Generator(*setup, slots=2), SamplingParams(seed=5, logprobs=0)
    (want,) = generator.generate([PROMPTS[0]], rule, max_tokens=9, keep_state=True)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, want.state)
    other = Generator(*setup, slots=2) if first else generator
    (rest,) = other.generate([None], rule, max_tokens=4, state=half, keep_state=True)
    assert len(rest.tokens) == 4 and rest.state.logits.dtype == jnp.float32
    (got,) = other.generate([PROMPTS[0]], rule, max_tokens=9)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.logprobs.chosen, want.logprobs.chosen, atol=1e-5)


def test_states_of_another_vocabulary(generator):
    (one,) = generator.generate([[1, 2]], GREEDY, max_tokens=2, keep_state=True)
    wrong = one.state.replace(logits=one.state.logits[:, :5])
    with pytest.raises(ValueError, match=r"state\.logits must have shape \[1, 24\], got \[1, 5\]"):
        generator.submit(None, state=wrong)
    with pytest.raises(ValueError, match=r"state\.step must have shape \[1\], got \[2\]"):
        generator.submit(None, state=one.state.replace(step=np.zeros(2, np.int32)))
    assert not generator.busy


def test_stop_strings_across_tokens(letters):
    """The text ends before the stop string, and no event has a part of it."""
    rule = SamplingParams.policy(2.0, seed=1, ignore_eos=True)
    (whole,) = letters.generate(["hello"], rule, max_tokens=40)
    stop = whole.text[17:20]
    at = whole.text.find(stop)
    stopped = dataclasses.replace(rule, stop=("zz", stop))
    (got,) = letters.generate(["hello"], stopped, max_tokens=40, keep_state=True)
    assert got.text == whole.text[:at] and got.finish_reason == "stop"
    assert got.tokens.tolist() == whole.tokens[: at + 3].tolist()
    pieces, stream = [], letters.stream("hello", stopped, max_tokens=40)
    for event in stream:
        pieces.append(event.text)
    assert "".join(pieces) == got.text
    jax.tree.map(np.testing.assert_array_equal, stream.state, got.state)
    (rest,) = letters.generate([None], rule, max_tokens=40 - at - 3, state=stream.state)
    assert rest.text == whole.text[at + 3 :]


def test_the_end_of_text(letters):
    rule = SamplingParams.policy(seed=0, logit_bias={23: 4.0})
    (ended,) = letters.generate(["abc"], rule, max_tokens=200)
    (ignored,) = letters.generate(["abc"], dataclasses.replace(rule, ignore_eos=True), max_tokens=200)
    assert ended.finish_reason == "stop" and 23 not in ended.tokens and len(ended.tokens) < 200
    assert ignored.finish_reason == "length" and ignored.tokens[len(ended.tokens)] == 23
    assert ended.text == Letters().decode(ended.tokens.tolist())


def test_text_of_bytes_comes_whole():
    model = small.model(7, vocab_size=256, num_layers=1)
    generator = Generator(model, small.params(model), slots=1, tokenizer=load_tokenizer("bytes"))
    rule = SamplingParams.policy(3.0, seed=2, max_tokens=60)
    pieces = [event.text for event in generator.stream("é", rule)]
    (want,) = generator.generate(["é"], rule)
    assert "".join(pieces) == want.text == bytes(want.tokens.tolist()).decode(errors="replace")
    with pytest.raises(ValueError, match=r"prompts\[1\] is not Unicode text: .*surrogates"):
        generator.generate(["a", "\ud800"], rule)


def test_a_text_of_bytes_ends_at_byte_0():
    """The end of documents in `fla_jax.data`, and of the answers that examples/finetune.py teaches."""
    model = small.model(7, vocab_size=256, num_layers=1)
    generator = Generator(model, small.params(model), slots=1, tokenizer=load_tokenizer("bytes"))
    rule = SamplingParams.policy(seed=2, max_tokens=9, logit_bias={0: 100.0})
    ends = [rule, dataclasses.replace(rule, ignore_eos=True)]
    ended, ignored = generator.generate(["a", "a"], ends)
    assert (ended.finish_reason, ended.text) == ("stop", "")
    assert (ignored.finish_reason, ignored.text) == ("length", "\0" * 9)


def test_a_request_that_becomes_nan_fails_alone(setup, generator):
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), setup[0].init_state(1))
    bad = generator.submit([1, 2], RULES, state=nan)
    good = generator.submit(PROMPTS[2], GREEDY, max_tokens=9)
    done = {one.request: one for one in generator.results()}
    assert done[bad.number].finish_reason == "error" and len(done[bad.number].tokens) == 0
    assert isinstance(done[bad.number].error, FloatingPointError)
    (want,) = generate(*setup, [PROMPTS[2]], GREEDY, max_tokens=9)
    np.testing.assert_array_equal(done[good.number].tokens, want.tokens)
    with pytest.raises(FloatingPointError, match="the logits for new token 0 hold NaN"):
        generator.generate([[1]], state=nan)


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
def test_other_parameters(setup, in_flight):
    """What is in flight finishes with the old ones or begins again; nothing is compiled again."""
    model, params = setup
    other = small.params(model, seed=5)
    old, new = (
        [generate(model, p, [PROMPTS[i]], GREEDY, max_tokens=50)[0].tokens.tolist() for i in (0, 2, 5)]
        for p in (params, other)
    )
    generator = Generator(model, params, slots=2)
    requests = [generator.submit(PROMPTS[i], GREEDY, max_tokens=50) for i in (0, 2, 5)]
    while not any(len(event.tokens) for event in generator.step()):
        pass
    programs = decode_loop.decode._cache_size()
    generator.update_params(other, in_flight=in_flight)
    got = {one.request: one.tokens.tolist() for one in generator.results()}
    # the prompts of similar lengths are read first
    want = new if in_flight == "restart" else [old[0], new[1], old[2]]
    assert [got[request.number] for request in requests] == want
    assert programs == decode_loop.decode._cache_size()


def test_the_old_parameters_may_be_donated(setup):
    """As a training step does before it hands over the new ones; nothing keeps them alive."""
    model, params = setup
    mine = jax.tree.map(jnp.copy, params)
    alive = weakref.ref(mine["emb"]["embedding"])
    generator = Generator(model, mine, slots=2)
    generator.generate([PROMPTS[0]], GREEDY, max_tokens=3)
    new = jax.jit(lambda x: jax.tree.map(lambda x: x * 1.5, x), donate_argnums=0)(mine)
    generator.update_params(new)
    (got,) = generator.generate([PROMPTS[0]], GREEDY, max_tokens=9)
    (want,) = generate(model, new, [PROMPTS[0]], GREEDY, max_tokens=9)
    assert got.tokens.tolist() == want.tokens.tolist()
    del mine
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_error_while_a_prompt_is_read_ends_nothing(setup, monkeypatch, kind):
    """The prompt is read again by the next step, from its beginning."""
    generator = Generator(*setup, slots=1)
    (want,) = generator.generate([PROMPTS[0]], GREEDY, max_tokens=5)
    request = generator.submit(PROMPTS[0], GREEDY, max_tokens=5)

    def interrupted(*_):
        raise kind
        yield

    with monkeypatch.context() as patch:
        patch.setattr("fla_jax.generation.engine.prefill_chunks", interrupted)
        for _ in range(2):
            with pytest.raises(kind):
                generator.step()
    (got,) = generator.results()
    assert got is request.completion and got.tokens.tolist() == want.tokens.tolist()


def test_donated_parameters_can_be_replaced(setup):
    model, params = setup
    mine = jax.tree.map(jnp.copy, params)
    generator = Generator(model, mine, slots=1)
    jax.tree.map(lambda x: x.delete(), mine)
    for _ in range(2):
        with pytest.raises(ValueError, match="params contains deleted arrays"):
            generator.generate([PROMPTS[0]], GREEDY, max_tokens=5)
    generator.update_params(params)
    (want,) = generate(model, params, [PROMPTS[0]], GREEDY, max_tokens=5)
    (got,) = generator.generate([PROMPTS[0]], GREEDY, max_tokens=5)
    assert got.tokens.tolist() == want.tokens.tolist()


def test_a_state_waits_for_other_parameters(setup):
    """A request without a prompt, added after them, does not begin with the old ones."""
    model, params = setup
    other = small.params(model, seed=5)
    generator, plain = Generator(model, params, slots=2), Generator(model, other, slots=2)
    (before,) = generator.generate([PROMPTS[2]], GREEDY, max_tokens=3, keep_state=True)
    generator.submit(PROMPTS[4], GREEDY, max_tokens=9)
    generator.step()
    generator.update_params(other)
    late = generator.submit(None, GREEDY, max_tokens=9, state=before.state)
    (want,) = plain.generate([None], GREEDY, max_tokens=9, state=before.state)
    got = {one.request: one.tokens.tolist() for one in generator.results()}
    assert got[late.number] == want.tokens.tolist()


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        (1, {}, TypeError, "prompt must be a sequence of tokens, got 1"),
        ([[1], [2, 3]], {}, ValueError, "prompt must be a sequence of tokens, got "),
        ("text", {}, TypeError, "prompt is text, which needs a tokenizer"),
        ([], {}, ValueError, "prompt must be a sequence of at least one token"),
        ([24], {}, ValueError, "prompt must hold tokens from 0 to 23, got 24"),
        (None, {}, ValueError, "prompt must hold at least one token unless state is a GenerationState"),
        ([1], {"max_tokens": -1}, ValueError, "max_tokens must be an integer >= 0, got -1"),
        ([1], {"sampling": {"temperature": 1}}, TypeError, "sampling must be a SamplingParams or None"),
        ([1], {"sampling": SamplingParams(stop="a")}, ValueError, "sampling.stop needs a tokenizer"),
        ([1], {"sampling": SamplingParams(stop_tokens=[24])}, ValueError, "stop_tokens must hold tokens"),
        ([1], {"state": small.model(7).init_state(2)}, ValueError, "state.att_shift must have shape"),
    ],
)
def test_errors(generator, prompt, options, error, message):
    with pytest.raises(error, match=message):
        generator.submit(prompt, **options)
    assert not generator.busy


def test_errors_of_the_generator(setup, generator):
    with pytest.raises(ValueError, match="slots must be an integer >= 1, got 0"):
        Generator(*setup, slots=0)
    with pytest.raises(ValueError, match="weights must be None, 'bfloat16', 'int8' or 'int4', got 'int3'"):
        Generator(*setup, weights="int3")
    for weights in (None, "int8"):
        with pytest.raises(ValueError, match="params must be the parameters alone"):
            Generator(setup[0], {"params": setup[1]}, weights=weights)
    with pytest.raises(ValueError, match="in_flight must be 'finish' or 'restart'"):
        generator.update_params(setup[1], in_flight="stop")
    with pytest.raises(TypeError, match="prompts must be a sequence of prompts, got text"):
        generator.generate("text")
    with pytest.raises(TypeError, match="sampling must be a SamplingParams, one for each of the 2 prompts"):
        generator.generate([[1], [2]], [GREEDY])


def test_it_is_not_to_be_traced(setup, generator):
    """Neither its making nor its requests; a refusal leaves the generator as it is."""
    model, params = setup
    state = model.init_state(1)
    for run in (
        lambda: fla_jax.checked(lambda: Generator(model, params, slots=1))(),
        lambda: fla_jax.checked(lambda: generator.generate([[1]], max_tokens=2)[0].tokens)(),
        lambda: jax.jit(lambda params: Generator(model, params, slots=1))(params),
        lambda: jax.jit(lambda x: generator.submit([1]) and x)(1.0),
        lambda: jax.jit(lambda params: generator.update_params(params))(params),
        lambda: jax.grad(lambda s: generator.generate([[1]], state=s, keep_state=True)[0].state)(state),
    ):
        with pytest.raises(TypeError, match=r"generation runs outside of jax.jit, .* fla_jax.checked"):
            run()
    assert not generator.busy


def test_looking_for_a_trace_uses_no_device():
    """A server looks at every request, and would wait for the device."""
    with jax.transfer_guard("disallow"):
        check_untraced(None)
    with pytest.raises(TypeError, match="generation runs outside"):
        jax.vmap(lambda x: check_untraced(None))(jnp.ones(2))


def test_the_implementation_is_the_decoders():
    model = small.model(7, hidden_size=64, num_layers=1)
    generator = Generator(model, small.params(model), slots=1, implementation="plain")
    assert generator.engine.decoder.implementation == "plain"
    generator.update_params(small.params(model, seed=5))
    assert generator.engine.decoder.implementation == "plain"
    with pytest.raises(ValueError, match=r"implementation must be one of .* or None, got 'xla'"):
        Generator(model, small.params(model), implementation="xla")
