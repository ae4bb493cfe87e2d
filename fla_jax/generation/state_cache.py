"""States after prompts that were read, found by the longest common prefix."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from .rows import GenerationState


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A text that was read once, from `fla_jax.generation.Generator.prefix`: a prompt, also with more tokens.

    Attributes:
        tokens: that were read.
        state: after them.
        params_key: identifies the parameters that read them.
        rest: tokens behind them that are not read yet: ``prefix + tokens``.

    A generator with other parameters, also after `Generator.update_params`, reads all of its tokens again.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.generation import Generator, SamplingParams
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> generator = Generator(model, params, slots=2)
        >>> prefix = generator.prefix([1, 2, 3])
        >>> (completion,) = generator.generate([prefix + [4]], max_tokens=5)
        >>> completion.usage.cached_tokens
        3
    """

    tokens: np.ndarray
    state: GenerationState
    params_key: object
    rest: tuple[int, ...] = ()

    def __add__(self, tokens: Sequence[int]) -> Self:
        """The prompt of the prefix with more tokens."""
        return dataclasses.replace(self, rest=(*self.rest, *tokens))


class StateCache:
    """States by the tokens that they have read, those used last on the device, then some on the host.

    Attributes:
        hits, misses: of `longest`.
        device_bytes, host_bytes: largest sizes of all states there.
    """

    def __init__(self, device_bytes: int, host_bytes: int) -> None:
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self.hits = self.misses = 0
        self._device: collections.OrderedDict[bytes, GenerationState] = collections.OrderedDict()
        self._host: collections.OrderedDict[bytes, GenerationState] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._device) + len(self._host)

    def put(self, tokens: np.ndarray, state: GenerationState) -> None:
        """Adds the state after some tokens; what was not used for longest makes room."""
        key = tokens.astype(np.int32).tobytes()
        self._host.pop(key, None)
        self._device[key] = state
        self._device.move_to_end(key)
        size = sum(x.nbytes for x in jax.tree.leaves(state))  # that of every state of the model
        while len(self._device) * size > self.device_bytes:
            old, moved = self._device.popitem(last=False)
            self._host[old] = jax.device_get(moved)
        while len(self._host) * size > self.host_bytes:
            self._host.popitem(last=False)

    def longest(self, tokens: np.ndarray) -> tuple[int, GenerationState] | None:
        """The number of first tokens that a state has read, and that state; None where there is none."""
        text = tokens.astype(np.int32).tobytes()
        keys = [key for key in (*self._device, *self._host) if text.startswith(key)]
        if not keys:
            self.misses += len(self) > 0
            return None
        self.hits += 1
        key = max(keys, key=len)
        state = self._device[key] if key in self._device else jax.tree.map(jnp.asarray, self._host[key])
        self.put(np.frombuffer(key, np.int32), state)
        return len(key) // 4, state

    def clear(self) -> None:
        """Forgets all states."""
        self._device.clear()
        self._host.clear()
