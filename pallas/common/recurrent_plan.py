"""What the launchers of the recurrent Pallas kernels share: tile sizes, padding to whole tiles, tokens in
whole windows.

Tokens are walked in windows of 16 or 32; the state that enters each is kept for the backward, which works on
one window at a time. Arrays are padded before a kernel sees them with zeros, which leave the state as it is
(log decay 0, k = v = a = b = 0); packed sequences are spread so that each starts a window. So no kernel needs
a mask.
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
    array_rows: int  # B
    rows: int  # states: B, or packed sequences
    restart: jax.Array  # [B * T'] int32: the state is emptied before a token; [1] without segments
    bounds: jax.Array  # [N + 1] int32: first window of each packed sequence; [1] without
    chunks: packing.Chunks

    @property
    def entries(self) -> tuple[int]:
        """(B * number * H,): leading axis of what there is one of for each window and head."""
        return (self.array_rows * self.sizes.number * self.sizes.heads,)

    def by_row(self, x: jax.Array) -> jax.Array:
        """[B * n * H, ...] -> [B, n, H, ...]."""
        return x.reshape(self.array_rows, -1, self.sizes.heads, *x.shape[1:])

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
        """[N, H, K, V] -> [N * H, parts, V', width], as the walks hold it."""
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


def make_plan(x: Recurrence, save_every: int, keep: bool = True) -> RecurrentPlan:
    """Plans a call on ``x`` and so many tokens in a window.

    Where no states are kept a row is one window, so that nothing is padded and no padding is walked.
    """
    (B, T, H, K), V, segment_ids, cu_seqlens = x.r.shape, x.v.shape[-1], x.segment_ids, x.cu_seqlens
    save_every = save_every if keep or cu_seqlens is not None else T
    chunks = packing.plan(T, save_every, cu_seqlens)
    restart = bounds = jnp.zeros(1, jnp.int32)  # Pallas kernels have no absent arrays
    if segment_ids is not None:
        change = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
        restart = jnp.pad(change, ((0, 0), (1, chunks.number * save_every - T))).reshape(-1)
    if cu_seqlens is not None:
        bounds = jnp.pad(jnp.cumsum(-(-jnp.diff(cu_seqlens.astype(jnp.int32)) // save_every)), (1, 0))
        bounds = bounds.astype(jnp.int32)
    Kp, Vp = tile(K), tile(V)
    sizes = Sizes(
        H,
        save_every,
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
