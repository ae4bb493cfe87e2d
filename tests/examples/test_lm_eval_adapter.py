"""lm_eval_adapter.py with a local task, against calls of the model on whole texts."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from lm_eval_adapter import LM, GeneratorLM

from fla_jax.generation import Generator, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.one_python]


class Request(NamedTuple):
    """What the adapter reads of lm-eval's ``Instance``."""

    args: tuple


@pytest.fixture(scope="module")
def setup():
    model = small.model(7, vocab_size=256, num_layers=1)
    params = small.params(model)
    generator = Generator(model, params, slots=4, tokenizer=load_tokenizer("bytes"))
    return GeneratorLM(generator), jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])


def logits_of(apply, text):
    """[T, 256] in float64; texts are padded to one length, which a causal model does not see."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(apply(jnp.asarray(tokens))[0, : len(text)], np.float64)


def greedy(apply, text, count):
    text = [*text]
    for _ in range(count):
        text.append(int(np.argmax(logits_of(apply, text)[-1])))
    return text[-count:]


def log_probability(apply, before, after):
    logits = logits_of(apply, [*before, *after])
    found = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return sum(found[len(before) + i - 1, token] for i, token in enumerate(after))


def test_a_local_task(setup, tmp_path):
    """Multiple choice from a file, with an empty context and one that ends in a space."""
    adapter, apply = setup
    docs = [
        {"context": "Q: one A:", "choices": [" two", " 2"]},
        {"context": "Q: A: ", "choices": ["x"]},
        {"context": "", "choices": ["alone"]},
    ]
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(map(json.dumps, docs)))
    lines = map(json.loads, path.read_text().splitlines())
    requests = [Request((line["context"], choice)) for line in lines for choice in line["choices"]]
    got = adapter.loglikelihood(requests)
    pairs = [("Q: one A:", " two"), ("Q: one A:", " 2"), ("Q: A:", " x"), ("\0", "alone")]
    for (value, is_greedy), (before, after) in zip(got, pairs, strict=True):
        before, after = before.encode(), after.encode()
        assert value == pytest.approx(log_probability(apply, before, after), rel=1e-4)
        assert is_greedy == (greedy(apply, before, len(after)) == [*after])
    assert adapter.loglikelihood([]) == []


def test_the_greedy_continuation(setup):
    """Of tokens, since random bytes are not always text."""
    adapter, apply = setup
    after = greedy(apply, b"Q:", 4)
    (found,) = adapter_of_tokens(adapter, [*b"Q:"], after).loglikelihood([Request(("", ""))])
    (other,) = adapter_of_tokens(adapter, [*b"Q:"], [after[0], *after[:3]]).loglikelihood([Request(("", ""))])
    assert found[1] and other[1] == (after == [after[0], *after[:3]])
    assert found[0] == pytest.approx(log_probability(apply, b"Q:", after), rel=1e-4)


def adapter_of_tokens(adapter, before, after):
    """One whose every pair has these tokens."""
    own = GeneratorLM(adapter.generator)
    own.pair = lambda context, continuation: (before, after)
    return own


def test_whole_texts(setup):
    adapter, apply = setup
    got = adapter.loglikelihood_rolling([Request(("some text",)), Request(("",)), Request(("é",))])
    want = [log_probability(apply, [0], text.encode()) for text in ("some text", "", "é")]
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_generate_until(setup):
    adapter, apply = setup
    whole = bytes(greedy(apply, b"Q: one", 12)).decode(errors="replace")
    plain, stopped, sampled = adapter.generate_until(
        [
            Request(("Q: one", {"max_gen_toks": 12, "until": []})),
            Request(("Q: one", {"max_gen_toks": 12, "until": ["zz", whole[3]], "do_sample": False})),
            Request(("", {"max_gen_toks": 5, "until": "\n\n", "do_sample": True, "temperature": 0.7})),
        ]
    )
    assert plain == whole and stopped == whole[: whole.index(whole[3])] and isinstance(sampled, str)


def test_the_interface():
    """The methods are those of the installed lm-eval, and its requests are read."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM as Interface

    assert LM is Interface and not GeneratorLM.__abstractmethods__
    model = small.model(7, vocab_size=256, num_layers=1)
    generator = Generator(model, small.params(model), slots=2, tokenizer=load_tokenizer("bytes"))
    adapter = GeneratorLM(generator)
    asked = [("loglikelihood", ("a", "b")), ("loglikelihood_rolling", ("ab",)), ("generate_until", ("a", {}))]
    values = [getattr(adapter, kind)([Instance(kind, {}, args, 0)]) for kind, args in asked]
    assert [len(value) for value in values] == [1, 1, 1] and adapter.rank == 0
