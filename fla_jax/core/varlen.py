"""From user layouts to equal chunks and back: sequences of any length, segments, packed sequences.

The plain implementations work on arrays ``[n, B, H, C, D]``: ``n`` chunks of ``C`` tokens in order, each
within one sequence. Missing tokens are zeros in every input, which leaves the state unchanged (log decay 0,
k = v = a = b = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from .mesh import vary_alike
from .types import RecurrenceConfig


class Chunks(NamedTuple):
    """How the tokens of one call are cut into chunks.

    ``gather`` [n * C] and ``scatter`` [T] are token positions for packed sequences (``cu_seqlens``), else
    None; ``sequence`` [n] is the packed sequence of a chunk. A step of `scan` takes ``group`` chunks;
    ``number`` is a multiple of it.
    """

    size: int
    number: int
    length: int
    group: int
    gather: jax.Array | None = None
    scatter: jax.Array | None = None
    sequence: jax.Array | None = None

    def split(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """[B, T, H, D] -> [n, B, H, C, D] in ``dtype``, zeros where a chunk has no token."""
        if self.gather is not None:
            x = jnp.take(x, self.gather, axis=1, mode="fill", fill_value=0)
        else:
            x = jnp.pad(x, ((0, 0), (0, self.number * self.size - self.length), (0, 0), (0, 0)))
        return _to_chunks(x, self.size, dtype)

    def join(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """[n, B, H, C, D] -> [B, T, H, D] in ``dtype``."""
        return self._tokens(_from_chunks(x, dtype))

    def _tokens(self, x: jax.Array) -> jax.Array:
        """[B, n * C, H, D] -> [B, T, H, D]."""
        return x[:, : self.length] if self.scatter is None else jnp.take(x, self.scatter, axis=1, mode="clip")

    def scan(
        self,
        step: Callable[[PyTree, tuple[jax.Array, ...], PyTree], tuple[PyTree, tuple[jax.Array, ...], PyTree]],
        carry: PyTree,
        tokens: Sequence[jax.Array],
        xs: PyTree,
        outputs: Sequence[jax.Array],
        compute: jnp.dtype,
        reverse: bool = False,
    ) -> tuple[PyTree, tuple[jax.Array, ...], PyTree]:
        """Runs ``step(carry, tokens, xs) -> (carry, outputs, ys)`` over groups of chunks, by `jax.lax.scan`.

        ``tokens`` are arrays [B, T, H, D], of which the step gets [group, B, H, C, D] in dtype ``compute``;
        its outputs of that shape go to arrays like ``outputs`` [B, T, H, D]. Leaves [n, ...] of ``xs`` and
        ``ys`` are passed as [group, ...]. A step's arrays fit a CPU's cache, and no second copy of all tokens
        is made: touching memory for the first time costs more than the arithmetic on it.
        """
        span = self.group * self.size
        total = self.number * self.size
        pad = lambda x: (
            x if total == x.shape[1] else jnp.pad(x, ((0, 0), (0, total - x.shape[1]), (0, 0), (0, 0)))
        )
        if self.gather is None:
            tokens = [pad(x) for x in tokens]

        def read(x: jax.Array, i: jax.Array) -> jax.Array:
            if self.gather is None:
                x = jax.lax.dynamic_slice_in_dim(x, i * span, span, 1)
            else:
                at = jax.lax.dynamic_slice_in_dim(self.gather, i * span, span)
                x = jnp.take(x, at, axis=1, mode="fill", fill_value=0)
            return _to_chunks(x, self.size, compute)

        def write(buffer: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, _from_chunks(y, buffer.dtype), i * span, 1)

        def body(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
            (carry, buffers), (i, x) = carry, x
            carry, results, ys = step(carry, tuple(read(t, i) for t in tokens), x)
            return (carry, tuple(write(buffer, y, i) for buffer, y in zip(buffers, results))), ys

        buffers = tuple(pad(zeros(x, x)) for x in outputs)
        xs = jax.tree.map(lambda x: x.reshape(-1, self.group, *x.shape[1:]), xs)
        (carry, buffers), ys = jax.lax.scan(
            body, (carry, buffers), (jnp.arange(self.number // self.group), xs), reverse=reverse
        )
        out = tuple(map(self._tokens, buffers))
        return carry, out, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), ys)

    def each(
        self,
        step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        carry: PyTree,
        xs: PyTree,
        reverse: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """`jax.lax.scan` over the chunks of one group (leaves [group, ...])."""
        if self.group > 1:
            return jax.lax.scan(step, carry, xs, reverse=reverse)
        carry, ys = step(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], ys)

    def read(self, state: jax.Array, sequence: jax.Array | None) -> jax.Array:
        """The state of a chunk: [B, H, K, V], or that of its packed sequence as [1, H, K, V]."""
        return state if sequence is None else jax.lax.dynamic_index_in_dim(state, sequence, 0)

    def write(self, state: jax.Array, new: jax.Array, sequence: jax.Array | None) -> jax.Array:
        """``state`` with that of a chunk replaced."""
        return new if sequence is None else jax.lax.dynamic_update_index_in_dim(state, new, sequence, 0)


def _to_chunks(x: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """[B, n * C, H, D] -> [n, B, H, C, D]."""
    B, T, H, D = x.shape
    return x.astype(dtype).reshape(B, T // size, size, H, D).transpose(1, 0, 3, 2, 4)


def _from_chunks(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The inverse of `_to_chunks`."""
    n, B, H, C, D = x.shape
    return x.astype(dtype).transpose(1, 0, 3, 2, 4).reshape(B, n * C, H, D)


def zeros(like: jax.Array, varying: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Zeros for a scan's carry, sharded like ``like``; in `jax.shard_map` they vary over the mesh axes of
    ``varying``.
    """
    return vary_alike(jnp.zeros_like(like, dtype), varying)


def group_size(tokens: object) -> int:
    """Number of chunks of ``tokens`` (times batch and heads) in a step.

    They fit a CPU's second-level cache, or fill an accelerator; 1 where the batch is symbolic.
    """
    if not isinstance(tokens, int):
        return 1
    return max(1, (1024 if jax.default_backend() == "cpu" else 1 << 18) // tokens)


def plan(length: int, size: int, cu_seqlens: jax.Array | None, group: int = 1) -> Chunks:
    """Cuts ``length`` tokens into chunks of ``size``, at most ``group`` of them at a time.

    With ``cu_seqlens`` [N + 1], each packed sequence starts a chunk.
    """
    n_seq = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # with sequences: the most that sum(ceil(len / size)) can be
    count = (length + max(n_seq, 1) * (size - 1)) // size
    group = max(1, min(group, count))
    count = -(-count // group) * group
    if cu_seqlens is None:
        return Chunks(size, count, length, group)
    cu = cu_seqlens.astype(jnp.int32)
    ends = jnp.cumsum(-(-jnp.diff(cu) // size))  # last chunk + 1 of each sequence
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    chunk = jnp.arange(count, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), n_seq - 1).astype(jnp.int32)
    token = (cu[sequence] + (chunk - starts[sequence]) * size)[:, None] + jnp.arange(size, dtype=jnp.int32)
    gather = jnp.where(token < cu[sequence + 1][:, None], token, length).reshape(-1)  # `length` reads as zero
    t = jnp.arange(length, dtype=jnp.int32)
    of_token = jnp.clip(jnp.searchsorted(cu, t, side="right") - 1, 0, n_seq - 1)
    return Chunks(size, count, length, group, gather, starts[of_token] * size + t - cu[of_token], sequence)


def chunk_plan(settings: RecurrenceConfig, x: jax.Array, cu_seqlens: jax.Array | None) -> Chunks:
    """The plan of chunked implementations for arrays like ``x`` [B, T, H, D], 16 tokens a chunk."""
    B, T, H, _ = x.shape
    size = min(settings.chunk_size or 16, 1 << (T - 1).bit_length())
    return plan(T, size, cu_seqlens, group_size(B * H * size))


class Segments(NamedTuple):
    """Which tokens of a chunk reach each other, and its h0 and ht; see `segments`."""

    ids: jax.Array  # [n, B, 1, C, 1] int32: number of restarts up to and including the token
    start: jax.Array  # [n, B, 1, C, 1]: h0 of the chunk reaches the token
    end: jax.Array  # [n, B, 1, C, 1]: the token reaches ht of the chunk
    through: jax.Array  # [n, B, 1, 1, 1]: h0 of the chunk reaches its ht

    @property
    def pairs(self) -> jax.Array:
        """[n, B, 1, C, C]: two tokens are in one segment."""
        return self.ids == jnp.swapaxes(self.ids, -1, -2)


def ends(seg: Segments | None) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """The masks ``start``, ``end`` and ``through``; None without segments."""
    return (None, None, None) if seg is None else (seg.start, seg.end, seg.through)


def select(mask: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` where ``mask``, else 0; all of ``x`` without a mask. Not a product: 0 times NaN is NaN."""
    return x if mask is None else jnp.where(mask, x, 0)


def segments(chunks: Chunks, segment_ids: jax.Array | None) -> Segments | None:
    """Restart masks from ``segment_ids`` [B, T] (None without them)."""
    if segment_ids is None:
        return None
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    missing = chunks.number * chunks.size - chunks.length  # they belong to the last segment
    ids = jnp.cumsum(jnp.pad(change, ((0, 0), (1, missing))).astype(jnp.int32), axis=1)
    ids = ids.reshape(-1, chunks.number, chunks.size).transpose(1, 0, 2)[:, :, None, :, None]
    last = ids[..., -1:, :]
    before = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    return Segments(ids, ids == before, ids == last, last == before)
