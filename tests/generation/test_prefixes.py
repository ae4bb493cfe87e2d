"""Prefixes that are read once, and log-probabilities of given continuations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small

from fla_jax.generation import Generator, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SYSTEM, FIRST, SECOND = ([int(t) for t in small.tokens(1, n, seed=n)[0]] for n in (40, 5, 9))


def test_a_prefix_is_read_once(setup):
    """Its prompts give the same tokens; the longest prefix counts; other parameters forget all."""
    plain, generator = (Generator(*setup, slots=2) for _ in range(2))
    prompts = [[*SYSTEM, *FIRST], [*SYSTEM, *SECOND], SYSTEM, FIRST]
    want = plain.generate(prompts, GREEDY)
    assert plain.cache.hits == plain.cache.misses == 0
    prefix = generator.prefix(SYSTEM)
    generator.prefix(SYSTEM[:7])
    got = generator.generate(prompts, GREEDY)
    handles = generator.generate([prefix + FIRST, prefix + SECOND, prefix], GREEDY)
    assert [one.usage.cached_tokens for one in got] == [40, 40, 40, 0]
    assert generator.cache.hits == 3 and generator.cache.misses == 2
    for i, one in enumerate((*got, *handles)):
        np.testing.assert_array_equal(one.tokens, want[i % 4].tokens)
        assert one.usage.prompt_tokens == len(prompts[i % 4])
    generator.update_params(setup[1])
    assert len(generator.cache) == 0


def test_states_move_to_the_host_and_are_dropped(setup):
    size = sum(x.nbytes for x in jax.tree.leaves(Generator(*setup).prefix([1]).state))
    generator = Generator(*setup, slots=1, cache_bytes=size, host_cache_bytes=size)
    for token in (1, 2, 3):
        generator.prefix([token])
    assert len(generator.cache) == 2
    cached = [generator.generate([[t, 4]], GREEDY)[0].usage.cached_tokens for t in (2, 3, 1)]
    assert cached == [1, 1, 0]
    assert Generator(*setup, cache_bytes=0, host_cache_bytes=0).prefix([1]).tokens.tolist() == [1]


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_other_parameters_read_what_was_cached_again(setup, in_flight, has_begun):
    """Prompts that wait, also those that the cache knows whole, and the `Prefix`."""
    model, params = setup
    generator, other = Generator(model, params, slots=1), small.params(model, seed=5)
    prefix = generator.prefix(SYSTEM)
    begun = [generator.submit([*SYSTEM, *SECOND], GREEDY, max_tokens=99)] if has_begun else []
    while has_begun and not any(len(event.tokens) for event in generator.step()):
        pass
    prompts = [[*SYSTEM, *FIRST], SYSTEM, [*SYSTEM, *SECOND]]
    requests = [generator.submit(prompt, GREEDY) for prompt in prompts[:2]]
    generator.update_params(other, in_flight=in_flight)
    requests.append(generator.submit(prefix + SECOND, GREEDY))
    for _ in generator.results():
        pass
    new = Generator(model, other, slots=1)
    for request, prompt in zip(requests, prompts, strict=True):
        (want,) = new.generate([prompt], GREEDY)
        assert request.completion.tokens.tolist() == want.tokens.tolist()
        assert request.completion.usage == want.usage
    for request in begun:
        plain = new if in_flight == "restart" else Generator(model, params, slots=1)
        (want,) = plain.generate([prompts[2]], GREEDY, max_tokens=99)
        assert request.completion.tokens.tolist() == want.tokens.tolist()
        assert request.completion.usage.cached_tokens == (0 if in_flight == "restart" else len(SYSTEM))


def test_scores_are_of_the_last_parameters(setup):
    """Also while a request finishes with the old ones, which may have been donated."""
    model, params = setup
    mine, other = jax.tree.map(jnp.copy, params), small.params(model, seed=5)
    (want,) = Generator(model, other).score([FIRST], [SECOND])
    generator = Generator(model, mine, slots=1)
    generator.update_params(other)
    np.testing.assert_array_equal(generator.score([FIRST], [SECOND])[0], want)
    generator.update_params(mine)
    generator.submit(FIRST, GREEDY)
    generator.step()
    generator.update_params(other)
    np.testing.assert_array_equal(generator.score([FIRST], [SECOND])[0], want)
    generator = Generator(model, mine, slots=1)
    jax.tree.map(lambda x: x.delete(), mine)
    with pytest.raises(ValueError, match="params contains deleted arrays"):
        generator.score([FIRST], [SECOND])


def test_scores_are_the_models(setup):
    """Against `model.apply` of each text, in float64."""
    model, params = setup
    prompts = [[int(t) for t in small.tokens(1, n, seed=n)[0]] for n in (3, 20, 1, 7, 2, 4, 9, 11, 30)]
    continuations = [prompt[::-1] for prompt in prompts]
    got = Generator(model, params, slots=1).score(prompts, continuations)
    for prompt, continuation, scores in zip(prompts, continuations, got, strict=True):
        logits, _ = model.apply({"params": params}, jnp.asarray([[*prompt, *continuation]]))
        logits = np.asarray(logits[0, len(prompt) - 1 : -1], np.float64)
        want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(scores, want[np.arange(len(continuation)), continuation], atol=1e-4)


def test_errors(setup):
    generator = Generator(*setup, slots=1)
    with pytest.raises(ValueError, match="continuations must be one for each of the 2 prompts, got 1"):
        generator.score([[1], [2]], [[1]])
    with pytest.raises(ValueError, match=r"continuations\[0\] must be a sequence of at least one token"):
        generator.score([[1]], [[]])
    with pytest.raises(TypeError, match=r"prompts must be a sequence of prompts, got text: pass \[text\]"):
        generator.score("ab", "cd")
    with pytest.raises(ValueError, match="cache_bytes must be an integer >= 0"):
        Generator(*setup, cache_bytes=-1)
    with pytest.raises(ValueError, match="state must be None with a Prefix"):
        generator.submit(generator.prefix([1]), state=setup[0].init_state(1))
