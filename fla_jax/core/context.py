"""What is known of a call of an op when it is traced: the one value that choice, sharding and launches go
by.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class Context(Generic[Settings]):
    """A static, hashable description of one call of an op.

    Attributes:
        op: the public function's name, for messages.
        inputs: the op's inputs (a named tuple) as `jax.ShapeDtypeStruct`, None for those that were not given.
            Shapes are those of whole arrays, also where an implementation sees a device's part of them.
        settings: the op's own settings.
        platform: where the call runs: ``"cpu"``, ``"gpu"``, ``"tpu"``, ...
        devices: how many devices share rows and heads, as far as the mesh in context tells.
        keep: whether a backward will follow, for which the forward keeps arrays.
        shards: between how many devices the tokens of a row are split.
        sequence: the mesh axis of these devices, for collectives: an implementation that has it sees the
            tokens of one device. None where a call sees whole rows, also the ones that ``shards`` is about.
    """

    op: str
    inputs: Any
    settings: Settings
    platform: str
    devices: int = 1
    keep: bool = True
    cp_size: int = 1
    sequence: str | None = None


class RWKV6Inputs(NamedTuple):
    """The arrays of one call of RWKV-6; B rows, T tokens, H heads, N = B or the number of packed
    sequences.
    """

    r: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, H, V]
    w: Any  # [B, T, H, K], log decays
    u: Any  # [H, K]
    initial_state: Any  # [N, H, K, V]
    segment_ids: Any = None  # [B, T] integers
    cu_seqlens: Any = None  # [N + 1] integers


class RWKV7Inputs(NamedTuple):
    """The arrays of one call of RWKV-7; axes as in `RWKV6Inputs`."""

    r: Any
    w: Any
    k: Any
    v: Any
    a: Any  # [B, T, H, K]
    b: Any  # [B, T, H, K]
    initial_state: Any
    segment_ids: Any = None
    cu_seqlens: Any = None


class Outputs(NamedTuple):
    """The results of both recurrences."""

    o: Any  # [B, T, H, V]
    final_state: Any  # [N, H, K, V]


class MixInputs(NamedTuple):
    """The arrays of one call of norm, token shift and mixes; B rows, T tokens, C channels, M mixes."""

    x: Any  # [B, T, C]
    mixes: tuple[Any, ...]  # M arrays [C]
    y: Any = None  # [B, T, C], added to x first
    scale: Any = None  # [C], of the norm; None for no norm
    bias: Any = None  # [C]
    last: Any = None  # [B, C], what the first token of a row sees; None for zeros
    moves: Any = None  # [M, B, T, C], added to the mixes
    segment_ids: Any = None  # [B, T] integers


class Mixed(NamedTuple):
    """The results of norm, token shift and mixes."""

    mixed: tuple[Any, ...]  # M arrays [B, T, C]
    last: Any  # [B, C], the normalised last token of every row
    x: Any = None  # [B, T, C], x + y, or x itself; None where there is neither y nor a norm
    normalised: Any = None  # [B, T, C]; None unless asked for


@dataclasses.dataclass(frozen=True)
class Mix:
    """The settings of norm, token shift and mixes.

    Attributes:
        eps: what the norm adds to the variance.
        normalised: whether the normalised tokens are a result as well.
        compute_name: name of the dtype of statistics and arithmetic, ``"float32"`` or ``"float64"``.
    """

    eps: float = 1e-5
    normalised: bool = False
    compute_name: str = "float32"


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """The settings of both recurrences, resolved from the public arguments.

    Attributes:
        scale: factor on the output.
        chunk_size: tokens per chunk, or None for the implementation's own choice.
        lower_bound: promise that every log decay is at least this, or None.
        compute_name: name of the dtype of states and arithmetic, ``"float32"`` or ``"float64"``.
    """

    scale: float = 1.0
    chunk_size: int | None = None
    lower_bound: float | None = None
    compute_name: str = "float32"

    @property
    def compute(self) -> jnp.dtype:
        """The dtype of states and arithmetic."""
        return jnp.dtype(self.compute_name)


def abstract(inputs: Any) -> Any:
    """``inputs`` with every array replaced by its shape and dtype."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
