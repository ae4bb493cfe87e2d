"""Requests in the format of OpenAI's API, and their translation to the library's terms.

Source: https://platform.openai.com/docs/api-reference (completions, chat, models). ``top_k``, ``min_p``,
``repetition_penalty``, ``stop_token_ids`` and ``ignore_eos`` have the names and the meaning of vLLM's server;
``penalty_decay`` is the ``rwkv`` package's ``alpha_decay``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, PydanticUseDefault

from ..generation import SamplingParams

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"
Token = Annotated[int, Field(ge=0)]
Choice = Annotated[int, Field(ge=1, le=128)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenName = Annotated[int, Strict(False), Field(ge=0)]  # names in JSON are strings
# Values that parameters of several types accept: pydantic's message would name the first type only.
_ACCEPTED = {
    "prompt": "a string, a list of strings, a list of token ids from 0, or a list of such lists",
    "stop": "a string of 1 to 256 characters, or a list of at most 16 such strings",
    "logit_bias": "an object of at most 1024 token ids with numbers from -100 to 100",
    "content": "a string, or a list of parts of type text",
}


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
    """A JSON object in which unknown names, other types and numbers that are not finite are errors.

    An optional parameter that is null has its default value.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _replace_null(cls, value: object) -> object:
        if value is None:
            raise PydanticUseDefault
        return value


class StreamOptions(_Strict):
    """``stream_options``."""

    include_usage: bool = False


class Request(_Strict):
    """Parameters that completions and chat share.

    Attributes:
        default_tokens: largest number of new tokens of a request that does not say how many; None for the
            server's limit.
    """

    default_tokens: ClassVar[int | None] = None

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Choice = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    penalty_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool = False

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(
        cls, options: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise PydanticCustomError("stream_options", "Input needs stream = true")
        return options

    def wanted_tokens(self) -> tuple[str, int | None]:
        """The parameter that limits the new tokens, and its value; None where the request does not say."""
        return "max_tokens", self.max_tokens

    def new_tokens(self, most: int) -> int:
        """Largest number of new tokens a completion, of a server that allows ``most``.

        Raises:
            APIError: 400, the request wants more.
        """
        name, wanted = self.wanted_tokens()
        if wanted is None:
            return most if self.default_tokens is None else min(self.default_tokens, most)
        if wanted > most:
            message = f"{name} must be at most {most} on this server, got {wanted}"
            raise APIError(400, message, param=name, code="invalid_value")
        return wanted

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

    def refusal(self, error: Exception) -> APIError:
        """The answer where the generator raised ``error``, whose message begins with an argument's name."""
        name, _, rest = str(error).partition(" ")
        name = "stop_token_ids" if name == "stop_tokens" else name
        param = name if name in type(self).model_fields else None
        return APIError(400, f"{name} {rest}", param=param, code="invalid_value")


class CompletionRequest(Request):
    """Body of ``POST /v1/completions``."""

    default_tokens = 16

    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # OpenAI's clients send these with values that mean nothing; others are errors
    echo: bool = False
    suffix: None = None
    best_of: int | None = None

    @field_validator("echo")
    @classmethod
    def _check_echo(cls, echo: bool) -> bool:
        if echo:
            raise PydanticCustomError("echo", "Input should be false")
        return echo

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, 1, info.data.get("n")):
            raise PydanticCustomError("best_of", "Input should be 1 or equal to n")
        return best_of

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
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs_: Annotated[int, Field(ge=0, le=20)] | None = Field(None, alias="top_logprobs")

    @field_validator("top_logprobs_")
    @classmethod
    def _check_top_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "Input needs logprobs = true")
        return top_logprobs

    def wanted_tokens(self) -> tuple[str, int | None]:
        """See `Request`."""
        if self.max_completion_tokens is None:
            return super().wanted_tokens()
        return "max_completion_tokens", self.max_completion_tokens

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
    if first["type"] == "json_invalid":
        raise APIError(400, f"The body is not valid JSON: {first['msg']}", code="invalid_json")
    path = [str(part) for part in first["loc"]]
    param, where = path[0] if path else None, ".".join(path) or "The body"
    if first["type"] == "extra_forbidden":
        raise APIError(400, f"Unknown parameter: {where!r}", param=param, code="unknown_parameter")
    message = f"{where}: {first['msg']}"
    if depth := next((depth for depth, name in enumerate(path, 1) if name in _ACCEPTED), 0):
        message = f"{'.'.join(path[:depth])} must be {_ACCEPTED[path[depth - 1]]}"
    raise APIError(400, message, param=param, code="invalid_value")
