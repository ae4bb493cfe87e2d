"""A completion as it comes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

from .requests import Completion, Event, Request
from .rows import GenerationState


class Stream:
    """The events of a request, one token at a time; an iterator.

    While a token is looked at, the one after it is being computed. A stream without references, after a
    ``break`` for example, is cancelled by the next step of its generator.

    Attributes:
        request: that is streamed.
        state: after the tokens that have been returned, of the first completion; None before the first one.
            A stop string's last token is part of it, a stop token is not.

    Raises:
        Exception: iterating raises the error of a completion that failed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> stream = Generator(model, params, slots=1).stream([1, 2, 3], max_tokens=50)
        >>> for number, event in enumerate(stream):
        ...     if number == 2:
        ...         stream.stop()
        >>> stream.completion.finish_reason, len(stream.completion.tokens)
        ('cancelled', 3)
    """

    def __init__(
        self, request: Request, events: collections.deque[Event], step: Callable[[], object]
    ) -> None:
        self.request, self._events, self._step = request, events, step
        self.state: GenerationState | None = None

    @property
    def completion(self) -> Completion | None:
        """The first completion; None until it is over."""
        return self.request.completion

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._events:
            if self.request.done:
                raise StopIteration
            self._step()
        event = self._events.popleft()
        if event.index == 0 and event.state is not None:
            self.state = event.state
        if event.completion is not None and event.completion.error is not None:
            raise event.completion.error
        return event

    def stop(self) -> None:
        """Ends the request: one more event comes, with the completion."""
        self.request.cancel()
