"""Host code that the recurrent Pallas kernels share: tile sizes, padding to whole tiles, tokens in
whole intervals.

A scan saves the state at the start of each interval of 16 or 32 tokens for the backward, which computes the
gradients of one interval at a time. Arrays are padded with zeros, which do not change the state (log decay 0,
k = v = a = b = 0), and each packed sequence begins an interval. So no kernel needs a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...core import varlen as packing
from ...core.types import Recurrence
from .recurrent_scan import ScanTile, Sizes
from .shapes import tile


class RecurrentPlan(NamedTuple):
    """One call: its sizes, and how arrays become padded ones and back."""

    sizes: Sizes
    K: int
    V: int
    B: int  # batch elements
    sequences: int  # B, or the number of packed sequences
    restart: jax.Array  # [B * T'] int32: the state is emptied before a token; [1] without segments
    bounds: jax.Array  # [N + 1] int32: first interval of each packed sequence; [1] without
    chunks: packing.Chunks

    @property
    def entries(self) -> tuple[int]:
        """(B * intervals * H,): leading axis of arrays with an entry for each interval and head."""
        return (self.B * self.sizes.num_intervals * self.sizes.heads,)

    def by_sequence(self, x: jax.Array) -> jax.Array:
        """[B * n * H, ...] -> [B, n, H, ...]."""
        return x.reshape(self.B, -1, self.sizes.heads, *x.shape[1:])

    def flat(self, x: jax.Array) -> jax.Array:
        """[B, n, H, ...] -> [B * n * H, ...]."""
        return x.reshape(-1, *x.shape[3:])

    def tokens(self, x: jax.Array, wide: int) -> jax.Array:
        """[B, T, H, D] -> [B * T' * H, wide]."""
        if self.chunks.gather is not None:
            x = jnp.take(x, self.chunks.gather, axis=1, mode="fill", fill_value=0)
        return _pad(x, (0, self.sizes.tokens - x.shape[1], 0, wide - x.shape[3])).reshape(-1, wide)

    def untokens(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """[B * T' * H, wide] -> [B, T, H, D] in the shape and dtype of ``like``."""
        B, _, H, D = like.shape
        x = x.reshape(B, self.sizes.tokens, H, -1)[..., :D]
        x = (
            x[:, : like.shape[1]]
            if self.chunks.scatter is None
            else jnp.take(x, self.chunks.scatter, axis=1, mode="clip")
        )
        return x.astype(like.dtype)

    def state(self, x: jax.Array) -> jax.Array:
        """[N, H, K, V] -> [N * H, parts, V', width], as scans load it."""
        s = self.sizes
        x = _pad(x, (0, 0, s.K - self.K, s.V - self.V)).reshape(-1, s.scan.parts, s.scan.width, s.V)
        return jnp.swapaxes(x, 2, 3)

    def unstate(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """[N * H, parts, V', width] -> [N, H, K, V] in the shape of ``like``."""
        x = jnp.swapaxes(x, 2, 3).reshape(*like.shape[:2], self.sizes.K, self.sizes.V)
        return x[:, :, : self.K, : self.V]


def _pad(x: jax.Array, after: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, n) for n in after]) if any(after) else x


def by_key_block(x: jax.Array, tile: ScanTile) -> jax.Array:
    """[..., K] -> [..., parts, width]."""
    return x.reshape(*x.shape[:-1], tile.parts, tile.width)


def scan_tile(K: int, V: int) -> ScanTile:
    """For padded K and V: 64 elements of the state per thread of one warp, as measured on an H200."""
    return ScanTile(min(V, 32, 2048 // K), K // 16, 16)


def make_plan(x: Recurrence, interval: int, save: bool = True) -> RecurrentPlan:
    """Plans a call on ``x`` that saves states every ``interval`` tokens.

    If no states are saved, each sequence is one interval, and nothing is padded.
    """
    (B, T, H, K), V, segment_ids, cu_seqlens = x.r.shape, x.v.shape[-1], x.segment_ids, x.cu_seqlens
    interval = interval if save or cu_seqlens is not None else T
    chunks = packing.plan(T, interval, cu_seqlens)
    restart = bounds = jnp.zeros(1, jnp.int32)  # Pallas kernels have no absent arrays
    if segment_ids is not None:
        change = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
        restart = jnp.pad(change, ((0, 0), (1, chunks.number * interval - T))).reshape(-1)
    if cu_seqlens is not None:
        bounds = jnp.pad(jnp.cumsum(-(-jnp.diff(cu_seqlens.astype(jnp.int32)) // interval)), (1, 0))
        bounds = bounds.astype(jnp.int32)
    Kp, Vp = tile(K), tile(V)
    sizes = Sizes(
        H,
        interval,
        chunks.number,
        Kp,
        Vp,
        scan_tile(Kp, Vp),
        segment_ids is not None,
        cu_seqlens is not None,
    )
    return RecurrentPlan(
        sizes, K, V, B, B if cu_seqlens is None else cu_seqlens.shape[0] - 1, restart, bounds, chunks
    )
