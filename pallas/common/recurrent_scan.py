"""Device functions that the recurrent Pallas kernels share, and the scan over tokens.

The state of a program is one tile [parts, columns, width] in registers, ``width`` running fastest in memory:
Triton puts four neighbours of that axis in a thread and four lanes to its 16, the other eight lanes to
``columns``, and all parts in a thread. So a sum over parts and width is mostly within a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..backend.pallas import is_interpreting

Loaded = TypeVar("Loaded")
Index: TypeAlias = jax.Array | int


class ScanTile(NamedTuple):
    """The part of the state that a program scans: ``columns`` values, whose keys are ``parts`` times
    ``width`` in memory.
    """

    columns: int
    parts: int
    width: int


class Sizes(NamedTuple):
    """Compile-time facts of a scan. Token arrays are [B * tokens * H, K] and [..., V]."""

    heads: int
    interval: int  # tokens of an interval, at whose start a state is saved
    num_intervals: int  # of a sequence
    K: int  # padded to powers of two from 16 on, like V
    V: int
    scan: ScanTile
    segmented: bool
    packed: bool

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, padding included."""
        return self.interval * self.num_intervals


def fma(x: jax.Array, y: jax.Array | float, z: jax.Array) -> jax.Array:
    """``x * y + z`` in float32 with one rounding: XLA lets Triton contract nothing, and products and sums
    apart take twice the instructions.
    """
    if is_interpreting():
        return x * y + z
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(y), jnp.shape(z))
    args = [jnp.broadcast_to(a, shape) for a in (x, y, z)]
    (out,) = pltriton.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=args,
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return out


def along(x: jax.Array) -> jax.Array:
    """[parts, width] -> float32, broadcast against a scan's state."""
    return x.astype(jnp.float32)[:, None, :]


def across(x: jax.Array) -> jax.Array:
    """[columns] -> float32, broadcast against a scan's state."""
    return x.astype(jnp.float32)[None, :, None]


def dot(state: jax.Array, x: jax.Array) -> jax.Array:
    """[columns]: sums of products over parts and width."""
    return jnp.sum(jnp.sum(state * x, 0), -1)


def restarted(state: jax.Array, restart_: jax.Ref, row: Index, t: Index, sizes: Sizes) -> jax.Array:
    """Zeros where the state restarts before token ``t`` of batch element ``row``."""
    return jnp.where(restart_[row * sizes.tokens + t] == 0, state, 0.0) if sizes.segmented else state


def positions(number: int) -> Callable[[Index, Index], jax.Array]:
    """``at(row, t)``: where token (or interval) ``t`` of batch element ``row`` and of the program's head is
    in arrays [B * intervals * H, ...].

    Reads the program's head at once: Pallas' interpreter has it only outside loops.
    """
    h, H = pl.program_id(1), pl.num_programs(1)
    return lambda row, t: (row * number + t) * H + h


def scan_tokens(
    load: Callable[[jax.Array], Loaded],
    token: Callable[[jax.Array, Loaded, jax.Array], jax.Array],
    start: jax.Array,
    states_: jax.Ref,
    restart_: jax.Ref,
    bounds_: jax.Ref,
    sizes: Sizes,
    reverse: bool,
    save: bool,
    by_value: bool = False,
) -> jax.Array:
    """Runs ``S = token(S, load(at), at)`` over the program's sequence, axis 2 of the grid, and returns the
    last state.

    Each token's arrays are loaded while the token before it is worked on: the compiler moves no load over the
    stores of a token.

    Args:
        load: arrays of the token at a position in [B * T' * H, ...] arrays.
        token: the next state, from a state, a token's arrays and its position.
        start: state [parts, columns of V, width].
        states_: [B * intervals * H, K, V], where the state at the start of each interval is stored.
        restart_: see `RecurrentPlan`.
        bounds_: see `RecurrentPlan`.
        sizes: of the call.
        reverse: from the last token to the first.
        save: whether to store states.
        by_value: as [.., V, K] in place of [.., K, V].
    """
    n = pl.program_id(2)
    row, lowest, highest = (0, bounds_[n], bounds_[n + 1]) if sizes.packed else (n, 0, sizes.num_intervals)
    part, column, element = (jax.lax.broadcasted_iota(jnp.int32, start.shape, i) for i in range(3))
    k, v = part * sizes.scan.width + element, column + pl.program_id(0) * sizes.scan.columns
    at, entry = positions(sizes.tokens), positions(sizes.num_intervals)

    def one(c: jax.Array, i: jax.Array, carry: tuple[jax.Array, Loaded]) -> tuple[jax.Array, Loaded]:
        S, loaded = carry
        t = c * sizes.interval + (sizes.interval - 1 - i if reverse else i)
        following = load(at(row, jnp.maximum(t - 1, 0) if reverse else jnp.minimum(t + 1, sizes.tokens - 1)))
        S = S if reverse else restarted(S, restart_, row, t, sizes)
        S = token(S, loaded, at(row, t))
        return restarted(S, restart_, row, t, sizes) if reverse else S, following

    def scan_interval(i: jax.Array, carry: tuple[jax.Array, Loaded]) -> tuple[jax.Array, Loaded]:
        c = highest - 1 - i if reverse else lowest + i
        if save:
            states_[(entry(row, c), *((v, k) if by_value else (k, v)))] = carry[0]
        return jax.lax.fori_loop(0, sizes.interval, lambda i, carry: one(c, i, carry), carry)

    edge = jnp.clip((highest if reverse else lowest) * sizes.interval - reverse, 0, sizes.tokens - 1)
    return jax.lax.fori_loop(0, highest - lowest, scan_interval, (start, load(at(row, edge))))[0]
