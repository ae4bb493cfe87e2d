"""Inputs, outputs and settings of the ops: one container from a public function to its kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RWKV6Inputs(NamedTuple):
    """Arrays of RWKV-6: B batch, T tokens, H heads; N is B, or the number of sequences of ``cu_seqlens``."""

    r: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    w: Float[Array, "B T H K"]  # natural log of the decay
    u: Float[Array, "H K"]
    initial_state: Float[Array, "N H K V"]
    segment_ids: Int[Array, "B T"] | None = None
    cu_seqlens: Int[Array, " N+1"] | None = None


class RWKV7Inputs(NamedTuple):
    """Arrays of RWKV-7; axes as in `RWKV6Inputs`."""

    r: Float[Array, "B T H K"]
    w: Float[Array, "B T H K"]  # natural log of the decay
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    a: Float[Array, "B T H K"]
    b: Float[Array, "B T H K"]
    initial_state: Float[Array, "N H K V"]
    segment_ids: Int[Array, "B T"] | None = None
    cu_seqlens: Int[Array, " N+1"] | None = None


Recurrence = TypeVar("Recurrence", RWKV6Inputs, RWKV7Inputs)


class Outputs(NamedTuple):
    """Results of both recurrences."""

    o: Float[Array, "B T H V"]
    final_state: Float[Array, "N H K V"]


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """Settings of both recurrences, resolved from the public arguments.

    Attributes:
        scale: factor on the output.
        chunk_size: tokens per chunk; None: the implementation chooses.
        lower_bound: promise that every log decay is at least this, or None.
        compute_name: dtype of states and arithmetic, ``"float32"`` or ``"float64"``.
        allow_tf32: whether kernels may round the operands of float32 products to TF32.
    """

    scale: float = 1.0
    chunk_size: int | None = None
    lower_bound: float | None = None
    compute_name: str = "float32"
    allow_tf32: bool = False

    @property
    def compute(self) -> jnp.dtype:
        """The dtype of states and arithmetic."""
        return jnp.dtype(self.compute_name)


class MixInputs(NamedTuple):
    """Arrays of norm, token shift and mixes: B batch, T tokens, C channels, M mixes."""

    x: Float[Array, "B T C"]
    mixes: tuple[Float[Array, " C"], ...]
    y: Float[Array, "B T C"] | None = None  # added to x first
    scale: Float[Array, " C"] | None = None  # of the norm; None for no norm
    bias: Float[Array, " C"] | None = None
    last: Float[Array, "B C"] | None = None  # the token before the first one; None for zeros
    mix_delta: Float[Array, "M B T C"] | None = None  # added to the mixes
    segment_ids: Int[Array, "B T"] | None = None


class Mixed(NamedTuple):
    """Results of norm, token shift and mixes."""

    mixed: tuple[Float[Array, "B T C"], ...]
    last: Float[Array, "B C"]  # the last token after the norm
    x: Float[Array, "B T C"] | None = None  # x + y, or x; None with neither y nor a norm
    normalised: Float[Array, "B T C"] | None = None


@dataclasses.dataclass(frozen=True)
class Mix:
    """Settings of norm, token shift and mixes.

    Attributes:
        eps: added to the variance.
        normalised: whether the tokens after the norm are a result as well.
        compute_name: dtype of statistics and arithmetic, ``"float32"`` or ``"float64"``.
    """

    eps: float = 1e-5
    normalised: bool = False
    compute_name: str = "float32"


class KeysInputs(NamedTuple):
    """Arrays of RWKV-7's keys."""

    decay: Float[Array, "B T H N"]
    rate: Float[Array, "B T H N"]
    mix: Float[Array, "B T H N"] | None
    k: Float[Array, "B T H N"]
    v: Float[Array, "B T H N"]
    v_first: Float[Array, "B T H N"] | None
    w0: Float[Array, "H N"]
    a0: Float[Array, "H N"]
    v0: Float[Array, "H N"] | None
    k_k: Float[Array, "H N"]
    k_a: Float[Array, "H N"]
    residual: Int[Array, " 1"] | None = None  # 0 or 1 where it is traced; None: there is one if v_first is


class Keys(NamedTuple):
    """Results of `fla_jax.ops.layer.rwkv7_keys`.

    The recurrence's inputs, ``v_first`` for the layers above, and ``k`` and ``v`` again for the readout, so
    that one backward pass adds the gradients of both uses.
    """

    w: Float[Array, "B T H N"]
    k: Float[Array, "B T H N"]
    v: Float[Array, "B T H N"]
    a: Float[Array, "B T H N"]
    b: Float[Array, "B T H N"]
    v_first: Float[Array, "B T H N"]
    k_bonus: Float[Array, "B T H N"]
    v_bonus: Float[Array, "B T H N"]


@dataclasses.dataclass(frozen=True)
class KeysSettings:
    """Constants of RWKV-7's keys and the names of their dtypes.

    Attributes:
        rate_scale: factor on the rate in the transition.
        decay_name: dtype of the log decays.
        transition_name: dtype of a and b.
        compute_name: dtype of the arithmetic.
        decay_scale: log decay where its sigmoid is one.
        eps: length up to which a key has no direction.
    """

    rate_scale: float
    decay_name: str
    transition_name: str
    compute_name: str
    decay_scale: float = -math.exp(-0.5)
    eps: float = 1e-12


class ReadoutInputs(NamedTuple):
    """Arrays of the readouts; r, k, v and r_k are None for RWKV-6."""

    o: Float[Array, "B T H N"]
    gate: Float[Array, "B T H N"]
    r: Float[Array, "B T H N"] | None
    k: Float[Array, "B T H N"] | None
    v: Float[Array, "B T H N"] | None
    scale: Float[Array, "H N"]
    bias: Float[Array, "H N"]
    r_k: Float[Array, "H N"] | None


class Readout(NamedTuple):
    """Result of the readouts."""

    y: Float[Array, "B T H N"]


@dataclasses.dataclass(frozen=True)
class ReadoutSettings:
    """Constants of a readout and the name of its dtype.

    Attributes:
        eps: added to the variance of a head's channels.
        silu: whether the output is multiplied by silu of the gate, else by the gate itself.
        compute_name: dtype of the arithmetic.
    """

    eps: float
    silu: bool
    compute_name: str
