"""What the launchers of the chunked Triton kernels share: runtime arguments, constants, launch options,
shapes of what the forward keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import triton.language as tl

from ...core.context import Context, RecurrenceConfig
from ...core.gpu import current_gpu
from ..backend.triton import INTERPRET, launch
from .chunk import UNSAFE_GATE, C, Config
from .cotangent_scale import cotangent_scale_kernel
from .shapes import like, tile, unused

CHUNK = C.value
SAFE_GATE_BOUND = -2.0  # the bounded form makes factors from exp(-8 * 2) to exp(8 * 2)
# times the lowest log decay: half of what a chunk may decay, in powers of two (`device.chunk.load_gate`)
SAFE_GATE_EXPONENT = -CHUNK / 2 / math.log(2)

# (value block, warps, pipeline stages) by pass and padded K, for 16-bit inputs on compute capability 9.0 and
# 10.x; an entry with a third part is for another kind of call: "float32" inputs, "small" GPUs, or both. See
# `launch_options`.
LaunchTable = Mapping[tuple[str, int] | tuple[str, int, str], tuple[int, int, int]]


# Programs that fill an H200 (132 multiprocessors, about four programs each), the most of them at which
# cutting rows still pays for walking them again (by padded K: with 128, one program fills a multiprocessor),
# and the fewest tokens that are worth a stretch of their own.
FULL_GPU, MAX_SPLIT_PROGRAMS, MIN_SPLIT_LEN = 512, {64: 132, 128: 100}, 256


class ChunkPlan(NamedTuple):
    """One launch.

    Attributes:
        ranges: the kernels' arguments seg_, cu_, chunk0_, any_decay_, T, span, by name.
        options: what `launch` takes besides arrays: grid, num_warps, num_stages, mode.
        parts: value blocks.
        chunks: leading axes of what is kept by chunk: rows, chunks.
        sequences: rows, stretches of them or packed sequences.
    """

    ranges: dict[str, jax.Array | int]
    options: dict[str, Any]
    NV: int
    chunks: tuple[int, int]
    sequences: int

    def state_shape(self, every: int) -> tuple[int, int]:
        """Leading axes of what is kept for every ``every`` chunks: as common/state_buffers.py counts them."""
        rows, chunks = self.chunks
        more = self.sequences if self.config.packed else 1
        return rows, (chunks + more * (every - 1)) // every

    def by_chunks(self, every: int) -> tuple[tuple[int, int, int], jax.Array]:
        """The grid of programs that take ``every`` chunks each: these, heads, stretches; and the kernels'
        argument owner_, the sequence of each where sequences are packed. These share the first axis: with one
        of their own each would start programs for all chunks there are.
        """
        _, H, sequences = self.options["grid"]
        if not self.config.packed:
            return (-(-self.ranges["split_len"] // (every * CHUNK)), H, sequences), unused()
        count, chunk_offsets = self.state_shape(every)[1], cast(jax.Array, self.ranges["chunk_offsets_"])
        first = (chunk_offsets[:-1] + jnp.arange(sequences) * (every - 1)) // every
        owner = jnp.searchsorted(first, jnp.arange(count), side="right") - 1
        return (count, H, 1), owner.astype(jnp.int32)

    @property
    def config(self) -> Config:
        """What the kernel is compiled for."""
        return self.options["c"]

    @property
    def store(self) -> Any:
        """Dtype of what is kept, of operands."""
        return store_dtype(self.config.operand == tl.bfloat16)


def num_splits_of(ctx: Context[RecurrenceConfig], passes: int = 1) -> int:
    """Into how many stretches to cut each whole row: 1 where rows and heads alone keep the GPU busy, and as
    many on each of the devices that share rows. So many ``walks`` of each stretch run at once.

    Packed sequences are not cut: there are usually many.
    """
    B, T, H, K = ctx.inputs.r.shape
    T //= ctx.cp_size
    programs = max(1, B * H * ctx.cp_size // ctx.devices)
    if ctx.inputs.cu_seqlens is not None or programs > MAX_SPLIT_PROGRAMS.get(max(64, tile(K)), 0):
        return ctx.cp_size
    wanted = min(-(-FULL_GPU // (passes * programs)), T // MIN_SPLIT_LEN)
    return ctx.cp_size * -(-T // _split_len(T, max(1, wanted)))


def local_num_splits(ctx: Context[RecurrenceConfig], passes: int = 1) -> int:
    """How many of `num_splits_of` the tokens are that an implementation sees."""
    return num_splits_of(ctx, passes) // (1 if ctx.sequence is None else ctx.cp_size)


def _split_len(T: int, num_splits: int) -> int:
    """Tokens of a stretch: whole chunks, and two of them that share a state are in one."""
    return -(-T // (num_splits * 2 * CHUNK)) * 2 * CHUNK


def segment_bits(segment_ids: jax.Array) -> jax.Array:
    """[B, chunks] int32: which tokens of a chunk begin a segment, a bit each, then a bit that is always set,
    the first of them (16 without one) in five bits and the last (0 without one) above.

    A row's first token begins none: the row's initial state is its segment's.
    """
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    change = jnp.pad(change, ((0, 0), (1, -segment_ids.shape[1] % CHUNK)))
    change = change.reshape(change.shape[0], -1, CHUNK)
    token = jnp.arange(CHUNK, dtype=jnp.int32)
    bits = jnp.sum(change << token, -1, dtype=jnp.int32)
    first = jnp.min(jnp.where(change, token, CHUNK), -1)
    last = jnp.max(jnp.where(change, token, 0), -1)
    return bits | 1 << CHUNK | first << CHUNK + 1 | last << CHUNK + 6


def launch_options(table: LaunchTable, launch_pass: str, K: int, bf16_dots: bool) -> tuple[int, int, int]:
    """(value block, warps, pipeline stages) of a pass for this GPU, from its record and never by trial.

    Without ``large_tiles`` ptxas spills up to 15 KB a thread on the usual blocks of values; smaller ones
    compile well.
    """
    small = "" if current_gpu().large_tiles else "small"
    kind = " ".join(filter(None, [small, "" if bf16_dots else "float32"]))
    key = launch_pass, max(64, tile(K))
    return table[(*key, kind)] if (*key, kind) in table else table[key]


def has_bf16_dots(x: Any) -> bool:
    """Whether products have bfloat16 operands: all token arrays of a recurrence's inputs, the decay apart,
    have 16 bits.
    """
    tokens = [array for name, array in x._asdict().items() if name in "rkvab"]
    return all(array.dtype in (jnp.bfloat16, jnp.float16) for array in tokens)


def has_wgmma() -> bool:
    """Whether the GPU has products of a warp group, which key-major tiles (common/key_major.py) are made for.
    Elsewhere these tiles spill up to 800 bytes.
    """
    return current_gpu().wgmma


def can_be_key_major(x: Any, do: jax.Array) -> bool:
    """Whether a backward may take tiles with keys as rows: they also take two parts of 8 bits in place of
    float32, so that tokens are bfloat16 and decays that or float32.
    """
    tokens = [array for name, array in x._asdict().items() if name in "rkvab"]
    bf16_dots = all(array.dtype == jnp.bfloat16 for array in (*tokens, do))
    return bf16_dots and x.w.dtype != jnp.float16 and has_wgmma()


def store_dtype(bf16_dots: bool) -> Any:
    """Dtype of kept states, of operands."""
    return jnp.bfloat16 if bf16_dots else jnp.float32


def make_plan(
    launch_pass: str,
    table: LaunchTable,
    ctx: Context[RecurrenceConfig],
    x: Any,
    num_splits: int = 1,
    precomputed_A: bool = False,
    bf16_dots: bool | None = None,
) -> ChunkPlan:
    """Plans the pass ``which`` of a launch table for a recurrence's inputs ``x``, rows cut into ``splits``
    stretches; ``scored`` as in `Config`. Operands have 16 bits where inputs have, or as ``half`` says.
    """
    B, T, H, K = x.r.shape
    V = x.v.shape[-1]
    BK = tile(K)
    bf16_dots = has_bf16_dots(x) if bf16_dots is None else bf16_dots
    BV, num_warps, num_stages = launch_options(table, launch_pass, K, bf16_dots)
    BV = min(tile(V), BV)
    none = unused()
    if x.cu_seqlens is None:
        rows, chunks, cu_seqlens, chunk_offsets = B * num_splits, (B, -(-T // CHUNK)), none, none
    else:
        rows = x.cu_seqlens.shape[0] - 1
        chunks = (1, (T + rows * (CHUNK - 1)) // CHUNK)
        cu_seqlens = x.cu_seqlens.astype(jnp.int32)
        chunk_offsets = jnp.concatenate([none, jnp.cumsum(-(-jnp.diff(cu_seqlens) // CHUNK))])
    lower_bound = ctx.settings.lower_bound
    unsafe_gate = lower_bound is None or lower_bound < SAFE_GATE_BOUND
    needs = none
    if unsafe_gate:
        lowest = jnp.min(x.w, (1, 3)).astype(jnp.float32)
        needs = jnp.where(
            lowest < SAFE_GATE_BOUND,
            UNSAFE_GATE.value,
            jnp.round(SAFE_GATE_EXPONENT * jnp.minimum(lowest, 0)).astype(jnp.int32),
        )
        needs = jnp.repeat(needs, rows // B, 0)  # one of each stretch or packed sequence
    NV = -(-V // BV)
    c = Config(
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        num_splits=num_splits,
        scale=ctx.settings.scale,
        operand=tl.bfloat16 if bf16_dots else tl.float32,
        tf32x3=not bf16_dots and not INTERPRET,  # Triton's interpreter multiplies float32 numbers as they are
        unsafe_gate=unsafe_gate,
        segments=x.segment_ids is not None,
        packed=x.cu_seqlens is not None,
        unmasked=T % CHUNK == 0 and x.cu_seqlens is None and K == BK and V % BV == 0,
        precomputed_A=precomputed_A,
        safe_gate_exponent=0
        if unsafe_gate
        else round(SAFE_GATE_EXPONENT * min(cast(float, lower_bound), 0.0)),
    )
    seg = none if x.segment_ids is None else segment_bits(x.segment_ids)
    ranges = dict(
        segment_bits_=seg,
        cu_seqlens_=cu_seqlens,
        chunk_offsets_=chunk_offsets,
        gate_=needs,
        T=T,
        split_len=_split_len(T, num_splits),
    )
    options = dict(grid=(NV, H, rows), num_warps=num_warps, num_stages=num_stages, c=c)
    return ChunkPlan(ranges, options, NV, chunks, rows)


def with_cotangent_scale(plan: ChunkPlan, x: Any, do: jax.Array, ds: jax.Array) -> ChunkPlan:
    """``plan`` for kernels that take cotangents, ``do`` of outputs and ``ds`` of last states, [.., H, K, V],
    of each sequence or more of them for one: at which scale, says `cotangent_scale_kernel`. In the bounded
    form they are taken as they are.
    """
    if not plan.config.unsafe_gate:
        return plan
    names, needs = (
        ("cu_seqlens_", "chunk_offsets_", "gate_", "T", "split_len"),
        cast(jax.Array, plan.ranges["gate_"]),
    )
    top = jnp.max(jnp.abs(ds.astype(jnp.float32)), (2, 3))
    top = jnp.max(top.reshape(needs.shape[0], -1, needs.shape[1]), 1)
    made = launch(
        cotangent_scale_kernel,
        dict(do_=do, top_=top, r_=x.r, k_=x.k, v_=x.v) | {name: plan.ranges[name] for name in names},
        dict(scaled_gate_=like(needs)),
        grid=(1, *plan.options["grid"][1:]),
        num_warps=4,
        num_stages=1,
        c=plan.config.replaced(BK=tile(plan.config.K), BV=tile(plan.config.V)),
    )
    return plan._replace(ranges=plan.ranges | dict(gate_=made["scaled_gate_"]))


def partial_shapes(NV: int, *arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Shapes of gradients that every value block contributes to: float32 where they must be summed."""
    return [jax.ShapeDtypeStruct((NV, *x.shape), x.dtype if NV == 1 else jnp.float32) for x in arrays]


def sum_value_blocks(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over value blocks in the dtype of ``like``."""
    return gradient[0] if gradient.shape[0] == 1 else jnp.sum(gradient, 0).astype(like.dtype)
