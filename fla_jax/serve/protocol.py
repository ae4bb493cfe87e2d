"""Requests in the format of OpenAI's API, and their translation to the library's terms.

Source: https://platform.openai.com/docs/api-reference (completions, chat, models). ``top_k``, ``min_p``,
``repetition_penalty``, ``stop_token_ids`` and ``ignore_eos`` have the names and the meaning of vLLM's server;
``penalty_decay`` is the ``rwkv`` package's ``alpha_decay``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from ..generation import SamplingParams

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
Token = Annotated[StrictInt, Field(ge=0)]
Choice = Annotated[StrictInt, Field(ge=1, le=128)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class APIError(Exception):
    """An answer with OpenAI's error object.

    Attributes:
        status: HTTP status code.
        message: for the user.
        param: the request's parameter that is wrong, or None.
        code: short name of the error, or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> JSON:
        """The error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    """A JSON object in which unknown names and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``stream_options``."""

    include_usage: bool = False


class Request(_Strict):
    """Parameters that completions and chat share."""

    model: str | None = None
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Choice = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: (
        Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None
    ) = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    penalty_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool = False

    def limit(self) -> int | None:
        """Largest number of new tokens, None for the server's."""
        return self.max_tokens

    def top_logprobs(self) -> int | None:
        """Number of alternatives whose log-probabilities are wanted, None without log-probabilities."""
        raise NotImplementedError

    def sampling(self, max_tokens: int, stop: Sequence[str] = ()) -> SamplingParams:
        """The request's parameters in the library's terms; ``stop`` are stop strings beside its own."""
        own = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            penalty_decay=self.penalty_decay,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            max_tokens=max_tokens,
            stop_tokens=tuple(self.stop_token_ids or ()),
            stop=(*own, *stop),
            n=self.n,
            logprobs=self.top_logprobs(),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Request):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = 16
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    # parameters that OpenAI's clients send with these values when they mean nothing
    echo: Literal[False] = False
    suffix: None = None
    best_of: None = None

    def top_logprobs(self) -> int | None:
        """See `Request`."""
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts: texts, or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Request):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs_: Annotated[StrictInt, Field(ge=0, le=20)] | None = Field(None, alias="top_logprobs")

    def limit(self) -> int | None:
        """See `Request`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top_logprobs(self) -> int | None:
        """See `Request`."""
        return (self.top_logprobs_ or 0) if self.logprobs else None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """The request in a body.

    Raises:
        APIError: 400; it names the first parameter that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "json_invalid":
        raise APIError(400, f"The body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        raise APIError(400, f"Unknown parameter: {where!r}", param=where, code="unknown_parameter")
    raise APIError(400, f"{where or 'The body'}: {first['msg']}", param=where or None, code="invalid_value")
