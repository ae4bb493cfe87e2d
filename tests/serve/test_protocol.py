"""Bodies of requests: what they mean, and what a wrong one is told."""

from __future__ import annotations

import json

import pytest

from fla_jax.serve.protocol import APIError, ChatRequest, CompletionRequest, parse


def body(**parameters):
    return json.dumps({"prompt": "a", **parameters}).encode()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt, prompts):
    assert parse(CompletionRequest, body(prompt=prompt)).prompts() == prompts


def test_defaults_are_the_models_own_distribution():
    request = parse(CompletionRequest, body())
    sampling = request.sampling(5)
    assert (request.limit(), sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 5, 1.0, 1.0)
    assert not (sampling.presence_penalty or sampling.frequency_penalty or sampling.top_k or sampling.stop)
    assert sampling.logprobs is None and sampling.n == 1


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
    assert (request.limit(), request.top_logprobs()) == (3, 2)


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
    with pytest.raises(APIError) as info:
        parse(CompletionRequest, wrong)
    error = info.value.body()["error"]
    named = (error["param"] or "").split(".")[0] or None
    assert (info.value.status, named, error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error" and error["message"]
