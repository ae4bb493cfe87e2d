"""Host code that the chunked ops share: splits, one planned pass, the scale of cotangents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import triton.language as tl
from jax.typing import DTypeLike

from ...core.context import Context
from ...core.types import Recurrence, RecurrenceConfig
from ..backend.triton import INTERPRET, Launch, triton_call
from .chunk import C, Index
from .chunk_config import Config
from .chunk_variants import SAFE_GATE_BOUND, BlockLaunch
from .cotangent_scale import Cotangents, ScaledGates, cotangent_scale_kernel
from .gate import UNSAFE_GATE
from .shapes import like, shaped, tile

CHUNK = C.value
SAFE_GATE_EXPONENT = -CHUNK / 2 / math.log(2)  # times the lowest log decay: log2 of half a chunk's decay

# Programs that an H100 or H200 runs at once, four on each of its 132 multiprocessors; the most programs, by
# padded K, at which splits pay for scanning twice; the fewest tokens of a split
FULL_GPU, MAX_SPLIT_PROGRAMS, MIN_SPLIT_LEN = 528, {64: 132, 128: 100}, 256


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """One pass over all chunks.

    Attributes:
        index: where tokens are.
        config: what the kernel is compiled for.
        grid: blocks of values, heads, splits (or packed sequences).
        launch: how programs are compiled.
        chunks: leading axes of arrays that have an entry a chunk.
    """

    index: Index
    config: Config
    grid: tuple[int, int, int]
    launch: Launch
    chunks: tuple[int, int]

    def states(self, chunks_per_state: int) -> tuple[int, int]:
        """Leading axes of arrays that have an entry for ``chunks_per_state`` chunks (`state_offset`)."""
        rows, chunks = self.chunks
        sequences = self.grid[2] if self.config.packed else 1
        return rows, (chunks + sequences * (chunks_per_state - 1)) // chunks_per_state

    def by_chunks(self, chunks_per_state: int) -> tuple[tuple[int, int, int], Index]:
        """The grid of programs that take ``chunks_per_state`` chunks each (these, heads, splits), and its
        index.

        The programs of all packed sequences share the first axis, so that a short one starts none in vain.
        """
        _, H, splits = self.grid
        if not self.config.packed:
            return (-(-self.index.split_len // (chunks_per_state * CHUNK)), H, splits), self.index
        count = self.states(chunks_per_state)[1]
        first = (
            self.index.chunk_offsets[:-1] + jnp.arange(splits) * (chunks_per_state - 1)
        ) // chunks_per_state
        sequences = jnp.searchsorted(first, jnp.arange(count), side="right") - 1
        return (count, H, 1), self.index._replace(chunk_indices=sequences.astype(jnp.int32))

    def by_splits(self, num_splits: int) -> ChunkPlan:
        """The plan, of whole sequences, for launches that take one of ``num_splits`` splits of each
        (`Index.split`).
        """
        gates = self.index.gates
        index = self.index._replace(
            gates=None if gates is None else jnp.repeat(gates, num_splits, 0),
            split_len=split_length(self.index.T, num_splits),
        )
        return dataclasses.replace(self, index=index, config=self.config.replace(num_splits=num_splits))

    def of_split(self, split: int) -> ChunkPlan:
        """The plan `by_splits` of the launch that takes ``split``."""
        return dataclasses.replace(self, index=self.index._replace(split=jnp.full(1, split, jnp.int32)))

    @property
    def A_in_registers(self) -> bool:
        """Whether the forward has `Config.A_in_registers`; larger heads and scans of states alone spill more
        with it.
        """
        return self.config.key_major and max(self.config.K, self.config.V) <= 64

    @property
    def store_dtype(self) -> DTypeLike:
        """The dtype of stored states and operands."""
        return jnp.bfloat16 if self.config.operand == tl.bfloat16 else jnp.float32


def num_splits_of(
    ctx: Context[Recurrence, RecurrenceConfig], passes: int = 1, max_programs: Mapping[int, int] | None = None
) -> int:
    """Splits of each sequence: 1 if sequences and heads alone keep the GPU busy, and equally many on each
    device of a sequence axis. ``passes`` scans of a split run at once; ``max_programs`` replaces
    `MAX_SPLIT_PROGRAMS`. Packed sequences are not split.
    """
    B, T, H, K = ctx.shapes.r.shape
    T //= ctx.cp.size
    programs = max(1, B * H * ctx.cp.size // ctx.num_devices)
    limits = MAX_SPLIT_PROGRAMS if max_programs is None else max_programs
    if ctx.shapes.cu_seqlens is not None or programs > limits.get(max(64, tile(K)), 0):
        return ctx.cp.size
    wanted = min(FULL_GPU // (passes * programs), T // MIN_SPLIT_LEN)
    return ctx.cp.size * -(-T // split_length(T, max(1, wanted)))


def local_num_splits(
    ctx: Context[Recurrence, RecurrenceConfig], passes: int = 1, max_programs: Mapping[int, int] | None = None
) -> int:
    """Splits of the tokens that one device has."""
    return num_splits_of(ctx, passes, max_programs) // (1 if ctx.cp.axis is None else ctx.cp.size)


def split_length(T: int, num_splits: int) -> int:
    """Tokens of a split: whole pairs of chunks, which may share a state."""
    return -(-T // (num_splits * 2 * CHUNK)) * 2 * CHUNK


def segment_bits(segment_ids: jax.Array) -> jax.Array:
    """[B, chunks] int32 for `chunk_segments`: a bit for each token that begins a segment, bit 16 set, then
    the first such token (16 if none) in five bits and the last (0 if none) above.

    The first token of a sequence begins none: its segment starts from the initial state.
    """
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    change = jnp.pad(change, ((0, 0), (1, -segment_ids.shape[1] % CHUNK)))
    change = change.reshape(change.shape[0], -1, CHUNK)
    token = jnp.arange(CHUNK, dtype=jnp.int32)
    bits = jnp.sum(change << token, -1, dtype=jnp.int32)
    first = jnp.min(jnp.where(change, token, CHUNK), -1)
    last = jnp.max(jnp.where(change, token, 0), -1)
    return bits | 1 << CHUNK | first << CHUNK + 1 | last << CHUNK + 6


def plan_pass(
    ctx: Context[Recurrence, RecurrenceConfig],
    x: Recurrence,
    launch: BlockLaunch,
    bf16_dots: bool,
    num_splits: int = 1,
    **config: Any,
) -> ChunkPlan:
    """Plans one pass over the tokens of ``x``.

    Args:
        ctx: the call.
        x: its arrays.
        launch: a row of the launch table.
        bf16_dots: whether products have bfloat16 operands.
        num_splits: of each sequence.
        config: further fields of `Config`.
    """
    B, T, H, K = x.r.shape
    V = x.v.shape[-1]
    BK, BV = tile(K), min(tile(V), launch.block)
    if x.cu_seqlens is None:
        splits, chunks, cu_seqlens, chunk_offsets = B * num_splits, (B, -(-T // CHUNK)), None, None
    else:
        splits = x.cu_seqlens.shape[0] - 1
        chunks = (1, (T + splits * (CHUNK - 1)) // CHUNK)
        cu_seqlens = x.cu_seqlens.astype(jnp.int32)
        ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // CHUNK))
        chunk_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    bound = ctx.settings.lower_bound
    unsafe_gate = bound is None or bound < SAFE_GATE_BOUND
    exact = not bf16_dots and not INTERPRET  # the interpreter computes float32 products exactly
    index = Index(
        segment_bits=None if x.segment_ids is None else segment_bits(x.segment_ids),
        cu_seqlens=cu_seqlens,
        chunk_offsets=chunk_offsets,
        chunk_indices=None,
        gates=jnp.repeat(_gates(x.w), splits // B, 0) if unsafe_gate else None,
        split=None,
        T=T,
        split_len=split_length(T, num_splits),
    )
    c = Config(
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        num_splits=num_splits,
        scale=ctx.settings.scale,
        operand=tl.bfloat16 if bf16_dots else tl.float32,
        tf32x3=exact and not ctx.settings.allow_tf32,
        exact_sums=exact,
        unsafe_gate=unsafe_gate,
        safe_gate_exponent=0 if bound is None or unsafe_gate else round(SAFE_GATE_EXPONENT * min(bound, 0.0)),
        segments=x.segment_ids is not None,
        packed=x.cu_seqlens is not None,
        unmasked=T % CHUNK == 0 and x.cu_seqlens is None and K == BK and V % BV == 0,
        **config,
    )
    return ChunkPlan(index, c, (-(-V // BV), H, splits), launch.launch, chunks)


def _gates(w: jax.Array) -> jax.Array:
    """[B, H] int32, the gate of each sequence and head by its lowest log decay (`load_gate`)."""
    lowest = jnp.min(w, (1, 3)).astype(jnp.float32)
    exponent = jnp.round(SAFE_GATE_EXPONENT * jnp.minimum(lowest, 0)).astype(jnp.int32)
    return jnp.where(lowest < SAFE_GATE_BOUND, UNSAFE_GATE.value, exponent)


def with_cotangent_scale(plan: ChunkPlan, x: Recurrence, do: jax.Array, dht: jax.Array) -> ChunkPlan:
    """The plan of a backward pass with the scale of its cotangents in the gates (`cotangent_scale_kernel`).

    ``do`` [B, T, H, V] are cotangents of outputs, ``dht`` [n splits, H, K, V] of final states. The safe gate
    needs no scale.
    """
    gates = plan.index.gates
    if gates is None:
        return plan
    # XLA folds the maximum of a constant, such as the zeros of a final state that is not used, for seconds
    dht = jax.lax.optimization_barrier(dht)
    dht_max = jnp.max(jnp.abs(dht.astype(jnp.float32)), (2, 3))
    dht_max = jnp.max(dht_max.reshape(gates.shape[0], -1, gates.shape[1]), 1)
    c = plan.config
    made = triton_call(
        cotangent_scale_kernel,
        Cotangents(do, dht_max, x.r, x.k, x.v),
        plan.index,
        out=ScaledGates(like(gates)),
        config=c.replace(BK=tile(c.K), BV=tile(c.V)),
        grid=(1, *plan.grid[1:]),
        launch=Launch(num_warps=4),
    )
    return dataclasses.replace(plan, index=plan.index._replace(gates=made.gates))


def partial_shapes(NV: int, *arrays: jax.Array) -> list[jax.Array]:
    """Shapes of gradients with an axis of value blocks in front: float32 if more than one are summed."""
    return [shaped((NV, *x.shape), x.dtype if NV == 1 else jnp.float32) for x in arrays]


def sum_value_blocks(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over value blocks in the dtype of ``like``."""
    return gradient[0] if gradient.shape[0] == 1 else jnp.sum(gradient, 0).astype(like.dtype)
