"""Host code that the ops share that scan token by token: tiles, indices, edge states."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.types import Recurrence, RecurrenceConfig
from ..backend.triton import Launch
from .shapes import shaped, tile
from .token_scan import ScanConfig, TokenIndex

SCAN_LAUNCH = Launch(num_warps=1)
TILE = 2048  # elements of a state tile: 64 a thread of one warp, as measured on an H200


@dataclasses.dataclass(frozen=True)
class ScanPlan:
    """One call.

    Attributes:
        index: where tokens are.
        config: what a forward scan is compiled for.
        grid: blocks of values, heads, sequences.
        intervals: leading axes of arrays that have an entry an interval.
    """

    index: TokenIndex
    config: ScanConfig
    grid: tuple[int, int, int]
    intervals: tuple[int, int]

    @property
    def num_intervals(self) -> int:
        """Intervals of the batch; packed sequences may have fewer."""
        return self.intervals[0] * self.intervals[1]

    def backward(self) -> ScanPlan:
        """The plan of the backward's scan."""
        c = self.config
        config = dataclasses.replace(c, reverse=True, x_scale=c.y_scale, y_scale=c.x_scale)
        return dataclasses.replace(self, config=config)

    def of_split(self, split: int, split_len: int) -> ScanPlan:
        """The plan of tokens ``split * split_len`` to ``(split + 1) * split_len`` of each sequence."""
        index = self.index._replace(split=jnp.full(1, split, jnp.int32))
        config = dataclasses.replace(self.config, split_len=split_len)
        intervals = (self.intervals[0], split_len // config.interval)
        return dataclasses.replace(self, index=index, config=config, intervals=intervals)

    def edge(self, state: jax.Array) -> jax.Array:
        """[N, H, K, V] -> [N, H, V', K'], as `edge_state` loads it."""
        keys, values = self.config.P * 16, self.grid[0] * self.config.BV
        K, V = state.shape[2:]
        return jnp.swapaxes(jnp.pad(state, ((0, 0), (0, 0), (0, keys - K), (0, values - V))), 2, 3)

    def from_edge(self, state: jax.Array) -> jax.Array:
        """[N, H, V', K'] -> [N, H, K, V]."""
        return jnp.swapaxes(state, 2, 3)[:, :, : self.config.K, : self.config.V]

    def sums(self, *shape: int) -> jax.Array:
        """The shape of a float32 result with an entry an interval and head."""
        return shaped((self.num_intervals, self.config.H, *shape), jnp.float32)


def plan_scan(ctx: Context[Recurrence, RecurrenceConfig], x: Recurrence, interval: int) -> ScanPlan:
    """Plans a call on ``x`` that saves states every ``interval`` tokens."""
    B, T, H, K = x.r.shape
    V, P = x.v.shape[-1], tile(K) // 16
    BV = min(tile(V), 32, TILE // (16 * P))
    restarts: jax.Array | None = None
    packed: dict[str, jax.Array] = {}
    if x.segment_ids is not None:
        changes = x.segment_ids[:, 1:] != x.segment_ids[:, :-1]
        restarts = jnp.pad(changes.astype(jnp.int32), ((0, 0), (1, 0)))
    intervals = (B, -(-T // interval))
    if x.cu_seqlens is not None:
        cu_seqlens = x.cu_seqlens.astype(jnp.int32)
        N = cu_seqlens.shape[0] - 1
        intervals = (1, (T + N * (interval - 1)) // interval)
        ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // interval))
        sequences = jnp.searchsorted(ends, jnp.arange(intervals[1]), side="right")
        packed = dict(
            cu_seqlens=cu_seqlens,
            first_intervals=jnp.pad(ends, (1, 0)).astype(jnp.int32),
            sequences=jnp.minimum(sequences, N - 1).astype(jnp.int32),
        )
    index = TokenIndex(restarts, None, None, None, None, T)._replace(**packed)
    config = ScanConfig(
        H=H,
        K=K,
        V=V,
        P=P,
        BV=BV,
        interval=interval,
        split_len=0,
        whole=T % interval == 0 and not packed,
        unmasked=K == 16 * P and V % BV == 0,
        reverse=False,
        segments=restarts is not None,
        packed=bool(packed),
        value_major=False,
        x_scale=1.0,
        y_scale=ctx.settings.scale,
    )
    return ScanPlan(index, config, (-(-V // BV), H, x.initial_state.shape[0]), intervals)
