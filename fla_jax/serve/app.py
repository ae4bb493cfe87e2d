"""The HTTP server: OpenAI's endpoints over a `Generator`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..generation import Completion, Event, Generator, Tokenizer
from ..generation.chat import ChatTemplate, Turn, WorldTemplate
from .answers import Answer, ChatAnswer, CompletionAnswer
from .http import HANDLERS, Counted
from .metrics import Metrics
from .protocol import JSON, APIError, ChatRequest, CompletionRequest, Request, parse
from .worker import Job, QueueFullError, StoppedError, Worker

T = TypeVar("T")
_ENCODER = json.JSONEncoder(ensure_ascii=False)  # json.dumps would make one for every event


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server accepts. A request beyond a limit gets an error that names the limit.

    Attributes:
        prompt_tokens: largest length of a prompt.
        new_tokens: largest number of new tokens a completion, also for requests that do not say how many.
        choices: largest number of completions a request, over all of its prompts; never more than the slots
            and ``waiting`` hold together.
        waiting: completions that may wait for a slot; beyond it, requests get status 429.
        body_bytes: largest body of a request.
        body_seconds: longest time that a client may take to send a body.

    Example:
        >>> from fla_jax.serve import Limits
        >>> Limits(new_tokens=512).prompt_tokens
        65536
    """

    prompt_tokens: int = 65536
    new_tokens: int = 8192
    choices: int = 128
    waiting: int = 1024
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0


def create_app(
    generator: Generator,
    name: str,
    *,
    template: ChatTemplate | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
) -> Starlette:
    """An ASGI application that answers OpenAI's clients.

    Endpoints: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health`` and ``/metrics``
    (Prometheus). The generator's steps run in a thread of the application's lifespan, so the server must run
    lifespan events (uvicorn does).

    Args:
        generator: with a tokenizer. The application uses it alone.
        name: of the model.
        template: how chats become prompts; None for RWKV World's format.
        limits: None for the default values.
        api_key: where given, every endpoint but ``/health`` requires ``Authorization: Bearer KEY``.

    Returns:
        The application.

    Raises:
        ValueError: ``generator`` has no tokenizer, or ``api_key`` is empty.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, load_tokenizer
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.serve import create_app
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=256, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, tokenizer=load_tokenizer("bytes"))
        >>> app = create_app(generator, "tiny")  # for uvicorn, or another ASGI server
        >>> [route.path for route in app.routes][:2]
        ['/v1/completions', '/v1/chat/completions']
    """
    if generator.tokenizer is None:
        raise ValueError("generator must have a tokenizer: Generator(model, params, tokenizer=...)")
    if api_key is not None and not api_key:
        raise ValueError("api_key must not be empty; None serves without one")
    server = _Server(
        generator, generator.tokenizer, name, template or WorldTemplate(), limits or Limits(), api_key
    )
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
        Route("/metrics", server.metrics_text),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=server.lifespan)
    app.add_middleware(Counted, metrics=server.metrics, paths=frozenset(route.path for route in routes))
    return app


class _Server:
    """The endpoints."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        name: str,
        template: ChatTemplate,
        limits: Limits,
        api_key: str | None,
    ) -> None:
        self.tokenizer, self.name, self.template, self.limits = tokenizer, name, template, limits
        self.worker = Worker(generator, limits.waiting)
        self.metrics = Metrics(self.worker)
        self.started = int(time.time())
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Runs the worker's thread while the server runs."""
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.stop)

    async def completions(self, http: HTTPRequest) -> Response:
        """``POST /v1/completions``."""
        request = parse(CompletionRequest, await self._body(http))
        return await self._answer(http, request, request.prompts(), "prompt", CompletionAnswer)

    async def chat(self, http: HTTPRequest) -> Response:
        """``POST /v1/chat/completions``."""
        request = parse(ChatRequest, await self._body(http))
        try:
            prompt = self.template([Turn(one.role, one.text()) for one in request.messages])
        except ValueError as error:
            raise APIError(400, str(error), param="messages", code="invalid_value") from None
        return await self._answer(http, request, [prompt], "messages", ChatAnswer, self.template.stop)

    async def models(self, http: HTTPRequest) -> Response:
        """``GET /v1/models``."""
        self._check_key(http)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HTTPRequest) -> Response:
        """``GET /v1/models/NAME``."""
        self._check_key(http)
        self._check_model(http.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, http: HTTPRequest) -> Response:
        """``GET /health``: status 503 once the generator has failed."""
        healthy = self.worker.is_healthy
        return JSONResponse({"status": "ok" if healthy else "failed"}, status_code=200 if healthy else 503)

    async def metrics_text(self, http: HTTPRequest) -> Response:
        """``GET /metrics``."""
        self._check_key(http)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, str | int]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "fla_jax"}

    def _check_key(self, http: HTTPRequest) -> None:
        given = http.headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise APIError(401, "The API key is missing or wrong", code="invalid_api_key")

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"The model {name!r} does not exist; this server has {self.name!r}"
            raise APIError(404, message, param="model", code="model_not_found")

    async def _body(self, http: HTTPRequest) -> bytes:
        self._check_key(http)
        body = bytearray()
        limit = self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in http.stream():
                    body += part
                    if len(body) > limit:
                        raise APIError(413, f"The body is larger than {limit} bytes", code="body_too_large")
        except TimeoutError:
            raise APIError(408, "The body took too long to arrive", code="timeout") from None
        return bytes(body)

    async def _answer(
        self,
        http: HTTPRequest,
        request: Request,
        prompts: Sequence[str] | Sequence[list[int]],
        param: str,
        kind: type[Answer],
        stop: Sequence[str] = (),
    ) -> Response:
        """Answers with completions of ``prompts``, which come from the request's ``param``."""
        self._check_model(request.model)
        if any(isinstance(prompt, str) for prompt in prompts):
            rows = await asyncio.to_thread(self._tokens, prompts)  # long texts would hold up other clients
        else:
            rows = self._tokens(prompts)
        self._check_lengths(rows, request.n, param)
        sampling = request.sampling(request.new_tokens(self.limits.new_tokens), stop)
        job = Job(rows, sampling, streams=request.stream)
        try:
            self.worker.submit(job)
        except QueueFullError:
            message = f"The queue is full: {self.limits.waiting} completions wait at most"
            raise APIError(429, message, code="queue_full") from None
        except StoppedError as error:
            raise APIError(503, str(error), code="stopped") from None
        events = self._counted(request, job)
        answer = kind(self.name, self.tokenizer, rows, request.n)
        if not request.stream:
            completions = await self._unless_disconnected(http, _collect(events))
            for one in completions:
                if one.error is not None:
                    raise APIError(500, str(one.error), code="generation_failed")
            return JSONResponse(answer.whole(completions))
        # the status is sent with the first piece, so that a refused parameter has one
        first = await self._unless_disconnected(http, anext(events))
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        pieces = _pieces(answer, first, events, with_usage)
        return StreamingResponse(
            pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    def _tokens(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        return [self.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]

    def _check_lengths(self, rows: Sequence[Sequence[int]], n: int, param: str) -> None:
        """Raises unless the prompts, with ``n`` completions each, are within the limits."""
        limits = self.limits
        if not rows or not all(rows):
            raise APIError(400, f"{param} must not be empty", param=param, code="invalid_value")
        longest = max(len(row) for row in rows)
        if longest > limits.prompt_tokens:
            message = f"{param} has {longest} tokens; this server reads {limits.prompt_tokens} at most"
            raise APIError(400, message, param=param, code="context_length_exceeded")
        most = min(limits.choices, self.worker.slots + limits.waiting)
        if len(rows) * n > most:
            message = f"{len(rows)} prompts with n = {n}: {most} completions at most"
            raise APIError(400, message, param="n", code="invalid_value")

    async def _counted(self, request: Request, job: Job) -> AsyncGenerator[list[tuple[int, Event]]]:
        """The job's events as they come; cancels the job when nobody listens any more."""
        started, metrics, first, over = time.monotonic(), self.metrics, True, False
        try:
            async for some in job.events():
                if first:
                    metrics.first_token.observe(time.monotonic() - started)
                    first = False
                for _, event in some:
                    if event.completion is not None:
                        metrics.count(event.completion)
                yield some
            over = True
            metrics.whole.observe(time.monotonic() - started)
        except (ValueError, TypeError) as error:
            over = True
            raise request.refusal(error) from None
        except StoppedError as error:
            over = True
            raise APIError(503, str(error), code="stopped") from None
        finally:
            if not over:
                self.worker.cancel(job)
                metrics.cancelled.inc()

    async def _unless_disconnected(self, http: HTTPRequest, answer: Awaitable[T]) -> T:
        """The answer; a client that disconnects before it cancels it."""
        work = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientDisconnect
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _collect(events: AsyncIterator[list[tuple[int, Event]]]) -> list[Completion]:
    """All completions, in the order of choices."""
    every = [one async for some in events for one in some]
    found = {index: event.completion for index, event in every if event.completion is not None}
    return [found[index] for index in sorted(found)]


async def _pieces(
    answer: Answer,
    first: list[tuple[int, Event]],
    events: AsyncGenerator[list[tuple[int, Event]]],
    with_usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events; an error after the first piece is one of them."""
    completions: list[Completion] = []

    def piece(index: int, event: Event) -> JSON:
        if event.completion is not None:
            completions.append(event.completion)
            if event.completion.error is not None:
                return APIError(500, str(event.completion.error), code="generation_failed").body()
        return answer.piece(index, event)

    try:
        yield "".join(_server_sent(piece(*one)) for one in first)
        async for some in events:
            yield "".join(_server_sent(piece(*one)) for one in some)
        if with_usage:
            yield _server_sent(answer.last_piece(completions))
        yield "data: [DONE]\n\n"
    except APIError as error:
        yield _server_sent(error.body())
    finally:
        await events.aclose()


def _server_sent(data: JSON) -> str:
    return f"data: {_ENCODER.encode(data)}\n\n"
