"""Bodies of requests: what they mean, and what a wrong one is told. Log-probabilities in answers."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fla_jax.generation import Logprobs, Usage, load_tokenizer
from fla_jax.serve import create_app
from fla_jax.serve.__main__ import _default_name
from fla_jax.serve.answers import CompletionAnswer
from fla_jax.serve.protocol import APIError, ChatRequest, CompletionRequest, parse

MESSAGES = [{"role": "user", "content": "a"}]


def body(**parameters):
    return json.dumps({"prompt": "a", **parameters}).encode()


def chat_body(**parameters):
    return json.dumps({"messages": MESSAGES, **parameters}).encode()


def refused(kind, wrong):
    with pytest.raises(APIError) as info:
        parse(kind, wrong)
    return info.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, prompts):
    assert parse(CompletionRequest, body(prompt=prompt)).prompts() == prompts


def test_defaults_are_the_models_own_distribution():
    request = parse(CompletionRequest, body())
    sampling = request.sampling(5)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 1.0, 1.0)
    assert not (sampling.presence_penalty or sampling.frequency_penalty or sampling.top_k or sampling.stop)
    assert sampling.logprobs is None and sampling.n == 1


@pytest.mark.parametrize(
    ("kind", "given", "tokens"),
    [
        (CompletionRequest, body(), 8),
        (CompletionRequest, body(max_tokens=None), 8),
        (CompletionRequest, body(max_tokens=3), 3),
        (CompletionRequest, body(max_tokens=0), 0),
        (ChatRequest, chat_body(), 8),
        (ChatRequest, chat_body(max_tokens=3), 3),
        (ChatRequest, chat_body(max_tokens=3, max_completion_tokens=4), 4),
    ],
)
def test_new_tokens_of_a_server_that_allows_few(kind, given, tokens):
    """A request that does not say gets what the server allows, at most OpenAI's 16 for completions."""
    request = parse(kind, given)
    assert request.new_tokens(8) == tokens
    most = request.new_tokens(100)
    assert most == (tokens if tokens != 8 else 16 if kind is CompletionRequest else 100)


@pytest.mark.parametrize(
    ("kind", "given", "param"),
    [
        (CompletionRequest, body(max_tokens=9), "max_tokens"),
        (ChatRequest, chat_body(max_tokens=9), "max_tokens"),
        (ChatRequest, chat_body(max_completion_tokens=9), "max_completion_tokens"),
    ],
)
def test_too_many_tokens_name_the_clients_parameter(kind, given, param):
    with pytest.raises(APIError) as info:
        parse(kind, given).new_tokens(8)
    assert (info.value.message, info.value.param) == (
        f"{param} must be at most 8 on this server, got 9",
        param,
    )


@pytest.mark.parametrize(
    ("kind", "given", "required"), [(CompletionRequest, body, "prompt"), (ChatRequest, chat_body, "messages")]
)
def test_null_is_not_given(kind, given, required):
    """Of every parameter but the required one, as the default of OpenAI's own schema."""
    default = parse(kind, given())
    for name, field in kind.model_fields.items():
        name = field.alias or name
        if name == required:
            assert refused(kind, given(**{name: None})).param == required
        else:
            assert parse(kind, given(**{name: None})) == default, name
    options = {"stream_options": {"include_usage": None}}
    assert not parse(kind, given(stream=True, **options)).stream_options.include_usage
    assert refused(kind, given(**options)).param == "stream_options"
    assert refused(kind, given(stops=None)).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", "0.5"),
        ("min_p", False),
        ("n", True),
        ("n", "1"),
        ("seed", 1.0),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 1),
        ("echo", 0),
        ("user", 5),
        ("stop_token_ids", ["1"]),
        ("logit_bias", {"1": True}),
        ("stream_options", {"include_usage": "true"}),
    ],
)
def test_other_types_are_errors(name, value):
    assert refused(CompletionRequest, body(**{name: value})).param == name


def test_integers_are_numbers():
    request = parse(CompletionRequest, body(temperature=1, top_p=1, presence_penalty=-2, logit_bias={"7": 3}))
    assert (request.temperature, request.presence_penalty, request.logit_bias) == (1.0, -2.0, {7: 3.0})


def test_best_of_all_completions_changes_nothing():
    for n, best_of in ((None, 1), (1, 1), (3, 3), (3, 1), (3, None)):
        assert parse(CompletionRequest, body(n=n, best_of=best_of)).n == (n or 1)
    for best_of in (0, 2, 4, True, "1"):
        assert refused(CompletionRequest, body(n=3, best_of=best_of)).param == "best_of"


def test_every_parameter_arrives():
    given = dict(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.3, frequency_penalty=0.4)
    given |= dict(repetition_penalty=1.5, penalty_decay=0.9, seed=3, n=2, ignore_eos=True, logprobs=4)
    lists = dict(stop=["x", "yz"], stop_token_ids=[5, 6], logit_bias={"17": -3.5})
    sampling = parse(CompletionRequest, body(**given, **lists)).sampling(9, ["end"])
    assert {name: getattr(sampling, name) for name in given} == given
    assert tuple(sampling.stop) == ("x", "yz", "end")
    assert tuple(sampling.stop_tokens) == (5, 6)
    assert dict(sampling.logit_bias) == {17: -3.5}


def test_chat():
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "user", "content": [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}]},
    ]
    given = {"messages": messages, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    request = parse(ChatRequest, json.dumps(given).encode())
    found = [(one.role, one.text()) for one in request.messages]
    assert found == [("system", "Short."), ("user", "Good day")]
    assert (request.new_tokens(9), request.top_logprobs()) == (3, 2)
    del given["logprobs"]
    assert refused(ChatRequest, json.dumps(given).encode()).param == "top_logprobs"


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"{", None, "invalid_json"),
        (b"\xff\xfe", None, "invalid_json"),
        (b"[" * 100_000, None, "invalid_json"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "invalid_value"),
        (b"[]", None, "invalid_value"),
        (b"{}", "prompt", "invalid_value"),
        (body(prompt={"a": 1}), "prompt", "invalid_value"),
        (body(prompt=[1, "a"]), "prompt", "invalid_value"),
        (body(prompt=[True]), "prompt", "invalid_value"),
        (body(prompt=[-1]), "prompt", "invalid_value"),
        (body(temperatures=1), "temperatures", "unknown_parameter"),
        (body(temperature=-1), "temperature", "invalid_value"),
        (body(temperature="hot"), "temperature", "invalid_value"),
        (body(top_p=0), "top_p", "invalid_value"),
        (body(n=0), "n", "invalid_value"),
        (body(n=1.5), "n", "invalid_value"),
        (body(max_tokens=-1), "max_tokens", "invalid_value"),
        (body(stop=""), "stop", "invalid_value"),
        (body(stop=["a"] * 17), "stop", "invalid_value"),
        (body(logprobs=21), "logprobs", "invalid_value"),
        (body(logit_bias={"a": 1}), "logit_bias", "invalid_value"),
        (body(echo=True), "echo", "invalid_value"),
        (body(seed=2**63), "seed", "invalid_value"),
    ],
)
def test_errors_name_the_parameter(wrong, param, code):
    raised = refused(CompletionRequest, wrong)
    error = raised.body()["error"]
    assert (raised.status, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error" and error["message"]


PROMPTS = "a string, a list of strings, a list of token ids from 0, or a list of such lists"
STOPS = "a string of 1 to 256 characters, or a list of at most 16 such strings"


@pytest.mark.parametrize(
    ("kind", "wrong", "param", "message"),
    [
        (CompletionRequest, b"{}", "prompt", f"prompt must be {PROMPTS}"),
        (CompletionRequest, body(prompt=5), "prompt", f"prompt must be {PROMPTS}"),
        (CompletionRequest, body(prompt=[-1]), "prompt", f"prompt must be {PROMPTS}"),
        (CompletionRequest, body(prompt=["a", [1]]), "prompt", f"prompt must be {PROMPTS}"),
        (CompletionRequest, body(stop=""), "stop", f"stop must be {STOPS}"),
        (CompletionRequest, body(stop=["a", 3]), "stop", f"stop must be {STOPS}"),
        (
            CompletionRequest,
            body(logit_bias={"a": 1}),
            "logit_bias",
            "logit_bias must be an object of at most 1024 token ids with numbers from -100 to 100",
        ),
        (
            CompletionRequest,
            body(stop_token_ids=[1, -1]),
            "stop_token_ids",
            "stop_token_ids.1: Input should be greater than or equal to 0",
        ),
        (
            ChatRequest,
            chat_body(messages=[*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]),
            "messages",
            "messages.1.content must be a string, or a list of parts of type text",
        ),
        (
            ChatRequest,
            chat_body(messages=[{**MESSAGES[0], "tool_calls": []}]),
            "messages",
            "Unknown parameter: 'messages.0.tool_calls'",
        ),
    ],
)
def test_errors_say_what_is_accepted(kind, wrong, param, message):
    error = refused(kind, wrong)
    assert (error.param, error.message) == (param, message)


@pytest.mark.parametrize(
    ("given", "param"),
    [({"stop_token_ids": [300]}, "stop_token_ids"), ({"logit_bias": {"300": 1}}, "logit_bias")],
)
def test_refusals_of_the_generator_name_the_parameter(given, param):
    """Also where the library's name is another one."""
    request = parse(CompletionRequest, body(**given))
    with pytest.raises(ValueError) as info:
        request.sampling(1).arrays(256)
    error = request.refusal(info.value)
    assert (error.message, error.param) == (f"{param} must hold tokens from 0 to 255, got 300", param)
    assert request.refusal(ValueError("the cache is full")).param is None


class Words:
    """A tokenizer like Metaspace: tokens begin with a space, which the first one of a text loses."""

    pieces = (" h", "h", "e", " ", "")

    def encode(self, text):
        raise NotImplementedError

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens).removeprefix(" ")


def event(tokens, top=()):
    """Tokens with log-probabilities 0, and 0, -1, ... for the tokens in ``top``; also a whole completion."""
    shape, tokens = (len(tokens), len(top)), np.array(tokens, np.int32)
    tops = np.broadcast_to(np.int32(top), shape), np.broadcast_to(-np.arange(len(top)), shape)
    logprobs = Logprobs(np.zeros(len(tokens)), *(tops if top else (None, None)))
    rest = dict(text="", completion=None, finish_reason="length", request=0, usage=Usage(1, 0, len(tokens)))
    return SimpleNamespace(tokens=tokens, logprobs=logprobs, **rest)


def logprobs_of(piece):
    return piece["choices"][0]["logprobs"]


@pytest.mark.parametrize("size", [1, 2, 4, 20])
def test_offsets_count_whole_characters(size):
    """Also of characters of several tokens, streamed in any pieces."""
    text = "é!é😀?"
    tokens, new = list(text.encode()), lambda: CompletionAnswer("m", load_tokenizer("bytes"), [[97]])
    want = [i for i, character in enumerate(text) for _ in character.encode()]
    assert logprobs_of(new().whole([event(tokens)]))["text_offset"] == want
    answer, found = new(), []
    for i in range(0, len(tokens), size):
        found += logprobs_of(answer.piece(0, event(tokens[i : i + size])))["text_offset"]
    assert found == want


def test_offsets_of_words():
    """The text goes on after the prompt, so its first word keeps its space; each choice counts its own."""
    answer = CompletionAnswer("m", Words(), [[1], [2]], 2)
    for index in (0, 3, 1):
        assert logprobs_of(answer.piece(index, event([0, 2, 0])))["text_offset"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("token", "names"),
    [
        (0, {"h": 0, "token_id:1": -1, "e": -2, "token_id:4": -3}),
        (1, {"token_id:0": 0, "h": -1, "e": -2, "token_id:4": -3}),
        (2, {"h": 0, "token_id:1": -1, "e": -2, "token_id:4": -3}),
    ],
)
def test_tokens_of_one_text_have_different_names(token, names):
    """The chosen token has the name under which it is listed."""
    one = event([token], [0, 1, 2, 4])
    found = logprobs_of(CompletionAnswer("m", Words(), [[1]]).piece(0, one))
    assert found["top_logprobs"] == [names]
    assert found["top_logprobs"][0][found["tokens"][0]] == -token


@pytest.mark.parametrize(("top", "others"), [([0, 2], {"token_id:0": 0, "e": -1}), ([], {})])
def test_the_chosen_token_is_listed_beside_the_most_probable_ones(top, others):
    """OpenAI's API has up to ``logprobs + 1`` of them. Its text names no other."""
    one = event([1], top)
    one.logprobs.chosen[:] = -7
    found = logprobs_of(CompletionAnswer("m", Words(), [[1]]).piece(0, one))
    assert found["top_logprobs"] == [{**others, "h": -7}] and found["token_logprobs"] == [-7]


def test_a_client_that_disconnects_in_its_body(caplog):
    """Counts as other clients that went away, and is no error in the log."""
    generator = SimpleNamespace(engine=SimpleNamespace(slots=1), tokenizer=load_tokenizer("bytes"))
    app, sent = create_app(generator, "tiny"), []
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(parts)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    with caplog.at_level(logging.ERROR):
        asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499 and json.loads(sent[1]["body"])["error"]["code"] == "disconnected"
    assert not caplog.records


def test_default_names_of_models(tmp_path, monkeypatch):
    """A folder's name may have dots in it; only a file has a suffix."""
    folder = tmp_path / "RWKV7-Goose-World3-2.9B-HF"
    folder.mkdir()
    (folder / "rwkv7-0.1B.pth").touch()
    assert _default_name(folder) == folder.name
    assert _default_name(folder / "rwkv7-0.1B.pth") == "rwkv7-0.1B"
    monkeypatch.chdir(folder)
    assert _default_name(type(folder)(".")) == folder.name


def test_a_missing_package_is_named_with_its_extra():
    code = "import sys; sys.modules['starlette'] = None; import fla_jax.serve"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith(
        "fla_jax.serve needs the package starlette: pip install 'fla-jax[serve]'"
    )
