"""Answers in OpenAI's format: whole objects, and pieces for server-sent events."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..generation import Completion, Event, Logprobs, Tokenizer
from ..generation.text import TextDecoder
from .protocol import JSON


class _TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most probable tokens with theirs."""

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def _by_token(tokens: np.ndarray, logprobs: Logprobs | None) -> list[_TokenLogprob] | None:
    if logprobs is None:
        return None
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if logprobs.top is not None and logprobs.top_tokens is not None:
        pairs = zip(logprobs.top_tokens.tolist(), logprobs.top.tolist())
        tops = [list(zip(ids, values)) for ids, values in pairs]
    return [_TokenLogprob(*one) for one in zip(tokens.tolist(), logprobs.chosen.tolist(), tops)]


class Answer:
    """The answer to one request. Subclasses give the format of an endpoint.

    Attributes:
        model: the name under which the model is served.
        tokenizer: for the texts of tokens beside their log-probabilities.
        prompts: their tokens.
        n: completions of each prompt.
    """

    whole_kind = piece_kind = prefix = ""

    def __init__(
        self, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], n: int = 1
    ) -> None:
        self.model, self.tokenizer, self.prompts, self.n = model, tokenizer, prompts, n
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._begun = [False] * (len(prompts) * n)
        self._lengths = [0] * (len(prompts) * n)  # characters so far

    def whole(self, completions: Sequence[Completion]) -> JSON:
        """The answer without streaming; ``completions`` in the order of choices."""
        choices: list[JSON] = []
        for index, completion in enumerate(completions):
            logprobs = self._logprobs(index, _by_token(completion.tokens, completion.logprobs))
            choice = self._choice(completion.text or "")
            reason = completion.finish_reason
            choices.append({"index": index, **choice, "logprobs": logprobs, "finish_reason": reason})
        return {**self._head(self.whole_kind), "choices": choices, "usage": usage(completions)}

    def piece(self, index: int, event: Event) -> JSON:
        """What an event adds to choice ``index``."""
        first, self._begun[index] = not self._begun[index], True
        logprobs = self._logprobs(index, _by_token(event.tokens, event.logprobs))
        reason = None if event.completion is None else event.completion.finish_reason
        delta = self._delta(index, event.text or "", first)
        choice: JSON = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self.piece_kind), "choices": [choice]}

    def last_piece(self, completions: Sequence[Completion]) -> JSON:
        """Usage, after all choices."""
        return {**self._head(self.piece_kind), "choices": [], "usage": usage(completions)}

    def _head(self, kind: str) -> dict[str, JSON]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def _choice(self, text: str) -> dict[str, JSON]:
        raise NotImplementedError

    def _delta(self, index: int, text: str, first: bool) -> dict[str, JSON]:
        raise NotImplementedError

    def _logprobs(self, index: int, logprobs: Sequence[_TokenLogprob] | None) -> JSON:
        raise NotImplementedError

    def _text(self, token: int) -> str | None:
        """The text of a token; None for a part of a character, or a token without text."""
        text = self.tokenizer.decode([token])
        return None if not text or "\ufffd" in text else text

    def _name(self, token: int) -> str:
        """The text of a token, or its number where it has none."""
        text = self._text(token)
        return _numbered(token) if text is None else text


class CompletionAnswer(Answer):
    """Of ``/v1/completions``."""

    whole_kind = piece_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, text: str) -> dict[str, JSON]:
        return {"text": text}

    def _delta(self, index: int, text: str, first: bool) -> dict[str, JSON]:
        return {"text": text}

    @functools.cached_property
    def _decoders(self) -> list[TextDecoder]:
        """Of each choice, as its text is decoded."""
        return [TextDecoder(self.tokenizer, prompt) for prompt in self.prompts for _ in range(self.n)]

    def _logprobs(self, index: int, logprobs: Sequence[_TokenLogprob] | None) -> JSON:
        if logprobs is None:
            return None
        offsets: list[JSON] = []
        for one in logprobs:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(self._decoders[index].push([one.token]))
        return {
            "tokens": [self._name(one.token) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: _TokenLogprob) -> JSON:
        """The most probable tokens by name, and the chosen one. A text that several tokens have names the
        chosen one, else the most probable one.
        """
        tokens = {self._name(one.token): one.token}
        top: dict[str, JSON] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            name = self._name(token)
            is_own = tokens.setdefault(name, token) == token
            top.setdefault(name if is_own else _numbered(token), logprob)
        return top


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``, without the space that follows "Assistant:" in World's format."""

    whole_kind, piece_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def _choice(self, text: str) -> dict[str, JSON]:
        return {"message": {"role": "assistant", "content": text.removeprefix(" ")}}

    def _delta(self, index: int, text: str, first: bool) -> dict[str, JSON]:
        content = text if self._lengths[index] else text.removeprefix(" ")
        self._lengths[index] += len(text)
        return {"delta": {**({"role": "assistant"} if first else {}), "content": content}}

    def _logprobs(self, index: int, logprobs: Sequence[_TokenLogprob] | None) -> JSON:
        if logprobs is None:
            return None
        content: list[JSON] = []
        for one in logprobs:
            top: list[JSON] = [self._token(token, value) for token, value in one.top]
            content.append({**self._token(one.token, one.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, JSON]:
        text = self._text(token)
        data: JSON = None if text is None else [*text.encode()]
        return {"token": self._name(token), "logprob": logprob, "bytes": data}


def _numbered(token: int) -> str:
    """The name of a token without a text of its own."""
    return f"token_id:{token}"


def usage(completions: Sequence[Completion]) -> JSON:
    """Counts of tokens; a prompt counts once, however many completions it has."""
    prompts = {one.request: one.usage for one in completions}
    read = sum(one.prompt_tokens for one in prompts.values())
    new = sum(one.usage.completion_tokens for one in completions)
    cached = sum(one.cached_tokens for one in prompts.values())
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
