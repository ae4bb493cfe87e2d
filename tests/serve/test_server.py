"""A server's process and OpenAI's client: answers against the model's own, limits, clients that disappear."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from server_process import running

pytestmark = [pytest.mark.slow, pytest.mark.one_python]  # one process for all of them


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def greedy(served, text, count):
    """The model's most probable continuation, token by token from the whole text."""
    tokens = list(text.encode())
    for _ in range(count):
        logits, _ = served.model.apply({"params": served.params}, jnp.array([tokens]))
        tokens.append(int(jnp.argmax(logits[0, -1])))
    return bytes(tokens[len(text) :])


def metric(served, name):
    text = urllib.request.urlopen(f"{served.url}/metrics").read().decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))


def wait_until_idle(served):
    until = time.monotonic() + 120
    while metric(served, "fla_jax_running") and time.monotonic() < until:
        time.sleep(0.05)
    assert metric(served, "fla_jax_running") == 0


def post(served, path, body, **headers):
    """Status and answer, whatever they are."""
    request = urllib.request.Request(f"{served.url}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_greedy_completions_are_the_models(served, client):
    """Of several prompts at once; usage counts tokens."""
    prompts = ["Once", "upon a time", "x"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=6, temperature=0)
    for prompt, choice in zip(prompts, answer.choices):
        assert choice.text == greedy(served, prompt, 6).decode(errors="replace")
        assert choice.finish_reason == "length"
    counts = answer.usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens) == (16, 18, 34)


def test_models_and_health(served, client):
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fla_jax"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")
    assert json.loads(urllib.request.urlopen(f"{served.url}/health").read()) == {"status": "ok"}


def test_sampling_by_seed_and_several_completions(client):
    """The same seed gives the same texts; completions of one prompt differ."""
    ask = lambda seed: client.completions.create(model="tiny", prompt="abc", max_tokens=12, n=3, seed=seed)
    first, again, other = ask(7), ask(7), ask(8)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices] != [choice.text for choice in other.choices]
    assert len(set(texts)) == 3
    assert first.usage.prompt_tokens == 3


def test_logprobs_are_the_models(served, client):
    """Of the chosen token and the most probable ones, in float64 from the model's logits."""
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    tokens = list(b"abc" + greedy(served, "abc", 4))
    logits, _ = served.model.apply({"params": served.params}, jnp.array([tokens]))
    logits = np.asarray(logits[0, 2:-1], np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.token_logprobs, want.max(-1), atol=1e-4)
    for top, row in zip(found.top_logprobs, want):
        assert len(top) == 3
        np.testing.assert_allclose(sorted(top.values()), np.sort(row)[-3:], atol=1e-4)


def test_stop_string(served, client):
    """Ends the text before it, also when streamed."""
    whole = client.completions.create(
        model="tiny", prompt="abc", max_tokens=30, temperature=0, top_p=1
    ).choices[0]
    stop = whole.text[5:8]
    cut = whole.text[: whole.text.index(stop)]
    ask = dict(model="tiny", prompt="abc", max_tokens=30, temperature=0, stop=[stop])
    answer = client.completions.create(**ask).choices[0]
    assert (answer.text, answer.finish_reason) == (cut, "stop")
    pieces = [piece.choices[0] for piece in client.completions.create(**ask, stream=True)]
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish_reason) == (cut, "stop")


@pytest.mark.parametrize("n", [1, 2])
def test_streams_equal_whole_answers(client, n):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ask = dict(model="tiny", messages=messages, max_tokens=10, seed=3, n=n, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**ask)
    texts, logprobs, reasons, usage = [""] * n, [[] for _ in range(n)], [None] * n, None
    for piece in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage


def test_a_message_begins_without_the_space_of_the_format(client):
    """Prompts end with "Assistant:", so the model writes a space first."""
    messages = [{"role": "user", "content": "Hello"}]
    ask = dict(model="tiny", messages=messages, max_tokens=3, logit_bias={"32": 100})
    assert client.chat.completions.create(**ask).choices[0].message.content == "  "
    pieces = [piece.choices[0].delta.content for piece in client.chat.completions.create(**ask, stream=True)]
    assert "".join(pieces) == "  "


def test_concurrent_clients_get_what_they_get_alone(served, client):
    """64 at once, more than there are slots."""
    more = {"ignore_eos": True}
    ask = lambda i: dict(model="tiny", prompt=f"{i} and", max_tokens=4 + i % 7, seed=i, extra_body=more)
    alone = {i: client.completions.create(**ask(i)).choices[0].text for i in range(0, 64, 9)}

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as many:
            return await asyncio.gather(*[many.completions.create(**ask(i)) for i in range(64)])

    answers = asyncio.run(together())
    assert all(answer.usage.completion_tokens == 4 + i % 7 for i, answer in enumerate(answers))
    assert all(answers[i].choices[0].text == text for i, text in alone.items())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slots(served, stream):
    before = metric(served, "fla_jax_cancelled_total")
    given = {"prompt": "abc", "max_tokens": 2000, "n": 4, "stream": stream, "ignore_eos": True}
    body = json.dumps(given).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert b" 200 " in connection.recv(4096)
        else:
            time.sleep(0.3)
        assert metric(served, "fla_jax_running") == 4
    wait_until_idle(served)
    assert metric(served, "fla_jax_cancelled_total") == before + 1


def test_a_full_queue_refuses(served, client):
    """8 slots and 64 places: 72 fit, and 73 never do."""
    ask = dict(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="n = 73: 72 completions at most"):
        client.completions.create(**ask, max_tokens=1, n=73)
    assert client.completions.create(**ask, max_tokens=1, n=72).choices[71].index == 71
    long = dict(max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    with client.completions.create(**ask, **long, n=72) as busy:
        next(iter(busy))
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            client.completions.create(**ask, max_tokens=1)
    wait_until_idle(served)


@pytest.mark.parametrize(
    ("path", "given", "status", "param"),
    [
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [256]}, 400, "prompt"),
        ("completions", {"prompt": "a" * 70_000}, 400, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 2001}, 400, "max_tokens"),
        ("completions", {"prompt": ["a"] * 37, "n": 2}, 400, "n"),
        ("completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("completions", {"prompt": "a", "stream": True, "logit_bias": {"256": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "stop_token_ids": [256]}, 400, "stop_token_ids"),
        ("completions", {"prompt": "a", "functions": []}, 400, "functions"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 400, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2001},
            400,
            "max_completion_tokens",
        ),
        ("nothing", {}, 404, None),
    ],
)
def test_refusals(served, path, given, status, param):
    found, answer = post(served, f"/v1/{path}", json.dumps(given).encode())
    error = json.loads(answer)["error"]
    assert (found, error["param"]) == (status, param)
    assert error["message"] and "Traceback" not in error["message"]


def test_bodies_beyond_the_limit(served):
    assert post(served, "/v1/completions", b" " * (9 << 20))[0] == 413
    assert post(served, "/v1/models", b"")[0] == 405


def malformed(count):
    """Valid bodies with bytes changed, cut or repeated, and values of other types."""
    rng = random.Random(0)
    values = [None, True, -1, 1e308, "", "x" * 300, [], {}, [[]], {"a": 1}, [None], 2**70, "\ud800"]
    names = [
        "prompt",
        "max_tokens",
        "temperature",
        "stop",
        "logit_bias",
        "n",
        "stream",
        "model",
        "seed",
        "zz",
    ]
    for i in range(count):
        given = {"prompt": "a", "max_tokens": 1, rng.choice(names): rng.choice(values)}
        body = bytearray(json.dumps(given).encode())
        if i % 2:
            for _ in range(rng.randint(1, 8)):
                where = rng.randrange(len(body))
                body[where : where + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        yield bytes(body)


def test_malformed_bodies(served):
    """Each gets an answer, none a status of the server's fault; the server goes on."""
    statuses = []
    for body in malformed(2000):
        status, answer = post(served, "/v1/completions", body)
        assert status in (200, 400, 404), (status, body)
        assert b"Traceback" not in answer
        assert status == 200 or set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        statuses.append(status)
    assert statuses.count(400) > 1000
    assert post(served, "/v1/completions", b'{"prompt": "a"}')[0] == 200


def test_key(checkpoint):
    """Every endpoint but /health wants it."""
    with running(checkpoint[0], "--dtype", "float32", FLA_JAX_API_KEY="secret é") as (_, url):
        assert urllib.request.urlopen(f"{url}/health").status == 200
        for path in ("/v1/models", "/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}{path}")
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.completions.create(model="tiny", prompt="a")


def test_sigterm_lets_requests_end(checkpoint):
    with running(checkpoint[0], "--dtype", "float32") as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            ask = dict(model="tiny", prompt="a", max_tokens=400, extra_body={"ignore_eos": True})
            pieces = client.completions.create(**ask, stream=True)
            next(pieces)
            process.send_signal(signal.SIGTERM)
            assert list(pieces)[-1].choices[0].finish_reason == "length"
        assert process.wait(timeout=120) == -signal.SIGTERM  # uvicorn ends by the signal once all is done
