"""lm_eval_adapter.py with a local task, against calls of the model on whole texts."""

import json
import string
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


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, dict(temperature=0.0, max_tokens=256, top_p=1.0, stop=())),
        ({"until": "$", "max_new_tokens": 7}, dict(max_tokens=7, stop=("$",))),
        ({"max_tokens": 7, "max_gen_toks": 5}, dict(max_tokens=5)),
        ({"temperature": 0.7, "top_k": 3, "min_p": 0.1}, dict(temperature=0.7, top_k=3, min_p=0.1)),
        ({"temperature": 0.7, "do_sample": False}, dict(temperature=0.0)),
        ({"do_sample": True, "top_p": 0.9}, dict(temperature=1.0, top_p=0.9)),
    ],
)
def test_options_of_tasks(setup, monkeypatch, options, want):
    """They mean what `lm_eval.models.utils.normalize_gen_kwargs` makes of them."""
    asked = []
    monkeypatch.setattr(setup[0].generator, "generate", lambda prompts, rules: asked.extend(rules) or [])
    setup[0].generate_until([Request(("a", options))])
    assert {name: getattr(asked[0], name) for name in want} == want


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
metric_list: [{metrics}]
"""
GENERATION = """\
target_delimiter: ""
generation_kwargs: {{until: {until}, max_gen_toks: 6, do_sample: false}}
"""


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Runs lm-eval on a task that is made of documents and a file of YAML; nothing is downloaded."""
    reason = "needs lm-eval (pip install lm-eval), which no extra has"
    lm_eval = pytest.importorskip("lm_eval", reason=reason)
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)

    def run(adapter, name, kind, docs, metrics, more):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        listed = ", ".join(f"{{metric: {metric}}}" for metric in metrics)
        text = TASK.format(name=name, file=file, kind=kind, metrics=listed)
        (tmp_path / f"{name}.yaml").write_text(text + more)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = lm_eval.simple_evaluate(adapter, tasks=[name], task_manager=manager, bootstrap_iters=0)
        print(lm_eval.utils.make_table(found))
        return [found["results"][name][f"{metric},none"] for metric in metrics]

    return run


def contexts_of_ascii(apply, count):
    """Texts after which the most probable byte is a letter or a digit, and that character."""
    texts = [f"Q: {end}" for end in string.printable]
    pairs = [(text, chr(greedy(apply, text.encode(), 1)[0])) for text in texts]
    return [(text, char) for text, char in pairs if char.isascii() and char.isalnum()][:count]


def test_multiple_choice_of_lm_eval(setup, evaluate):
    """Accuracies by the sum of log-probabilities and by that for each character."""
    adapter, apply = setup
    choices = [["no", "a longer answer"], ["maybe", "x", "yes and no"], ["é", "1 2 3"], ["zz", "z"]]
    gold = [0, 1, 1, 1]
    docs = [{"text": f"Q: {i} A:", "choices": one, "target": gold[i]} for i, one in enumerate(choices)]
    sums = [
        [log_probability(apply, doc["text"].encode(), f" {choice}".encode()) for choice in doc["choices"]]
        for doc in docs
    ]
    scaled = [np.divide(row, [len(one) for one in doc["choices"]]) for row, doc in zip(sums, docs)]
    want = [np.mean([np.argmax(row) == i for i, row in zip(gold, rows)]) for rows in (sums, scaled)]
    assert want == [0.75, 0.25]
    more = 'doc_to_choice: "{{choices}}"\n'
    assert evaluate(adapter, "choices", "multiple_choice", docs, ["acc", "acc_norm"], more) == want


def test_last_words_of_lm_eval(setup, evaluate):
    """Perplexity of targets, and the share of those that greedy decoding returns: three of five here."""
    adapter, apply = setup
    found = contexts_of_ascii(apply, 5)
    assert len(found) == 5
    docs = [{"text": text, "target": char if i % 2 == 0 else "#"} for i, (text, char) in enumerate(found)]
    sums = [log_probability(apply, doc["text"].encode(), doc["target"].encode()) for doc in docs]
    more = 'target_delimiter: ""\n'
    perplexity, accuracy = evaluate(adapter, "words", "loglikelihood", docs, ["perplexity", "acc"], more)
    assert perplexity == pytest.approx(np.exp(-np.mean(sums)), rel=1e-4)
    assert accuracy == pytest.approx(0.6)


def test_perplexity_of_lm_eval(setup, evaluate):
    """Of whole texts, for each word and byte, with all documents as one sum."""
    adapter, apply = setup
    texts = ["Some words of a text.", "Größe, größer", "x"]
    total = sum(log_probability(apply, [0], text.encode()) for text in texts)
    words = sum(len(text.split()) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    metrics = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    docs = [{"text": "", "target": text} for text in texts]
    found = evaluate(adapter, "texts", "loglikelihood_rolling", docs, metrics, "")
    want = [np.exp(-total / words), np.exp(-total / size), -total / size / np.log(2)]
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_exact_match_of_lm_eval(setup, evaluate):
    """Of greedy continuations up to a character: two of three here."""
    adapter, apply = setup
    texts = ["Q: one", "Q: two", "Q: three"]
    whole = [bytes(greedy(apply, text.encode(), 6)).decode(errors="replace") for text in texts]
    targets = [text.partition(whole[0][2])[0] for text in whole]
    assert 0 < len(targets[0]) < len(whole[0])
    docs = [{"text": text, "target": target} for text, target in zip(texts, [*targets[:2], "other"])]
    more = GENERATION.format(until=json.dumps([whole[0][2]]))
    (found,) = evaluate(adapter, "answers", "generate_until", docs, ["exact_match"], more)
    assert found == pytest.approx(2 / 3)


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
