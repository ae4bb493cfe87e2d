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

from ...core.call import Call, Recurrence
from ...core.gpu import compute_capability
from ..device.chunk import ANY_DECAY, C, Mode
from ..device.cotangents import cotangent_scale_kernel
from ..run.triton import INTERPRET, launch
from .shapes import like, tile, unused

CHUNK = C.value
BOUNDED = -2.0  # the bounded form makes factors from exp(-8 * 2) to exp(8 * 2)
# times the lowest log decay: half of what a chunk may decay, in powers of two (`device.chunk.form_of`)
GAUGE = -CHUNK / 2 / math.log(2)

# (value block, warps, pipeline stages) by pass and padded K, for 16-bit inputs on compute capability 9.0 and
# 10.x; an entry with a third part is for another kind of call: "float32" inputs, "small" GPUs, or both. See
# `launch_options`.
LaunchTable = Mapping[tuple[str, int] | tuple[str, int, str], tuple[int, int, int]]


# Programs that fill an H200 (132 multiprocessors, about four programs each), the most of them at which
# cutting rows still pays for walking them again (by padded K: with 128, one program fills a multiprocessor),
# and the fewest tokens that are worth a stretch of their own.
FULL, FEW, SHORTEST = 512, {64: 132, 128: 100}, 256


class ChunkedPlan(NamedTuple):
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
    parts: int
    chunks: tuple[int, int]
    sequences: int

    def kept(self, every: int) -> tuple[int, int]:
        """Leading axes of what is kept for every ``every`` chunks: as device/kept_states.py counts them."""
        rows, chunks = self.chunks
        more = self.sequences if self.mode.packed else 1
        return rows, (chunks + more * (every - 1)) // every

    def by_chunks(self, every: int) -> tuple[tuple[int, int, int], jax.Array]:
        """The grid of programs that take ``every`` chunks each: these, heads, stretches; and the kernels'
        argument owner_, the sequence of each where sequences are packed. These share the first axis: with one
        of their own each would start programs for all chunks there are.
        """
        _, H, sequences = self.options["grid"]
        if not self.mode.packed:
            return (-(-self.ranges["span"] // (every * CHUNK)), H, sequences), unused()
        count, chunk0 = self.kept(every)[1], cast(jax.Array, self.ranges["chunk0_"])
        first = (chunk0[:-1] + jnp.arange(sequences) * (every - 1)) // every
        owner = jnp.searchsorted(first, jnp.arange(count), side="right") - 1
        return (count, H, 1), owner.astype(jnp.int32)

    @property
    def mode(self) -> Mode:
        """What the kernel is compiled for."""
        return self.options["mode"]

    @property
    def store(self) -> Any:
        """Dtype of what is kept, of operands."""
        return store_dtype(self.mode.operand == tl.bfloat16)


def stretches_of(call: Call[Recurrence], walks: int = 1) -> int:
    """Into how many stretches to cut each whole row: 1 where rows and heads alone keep the GPU busy, and as
    many on each of the devices that share rows. So many ``walks`` of each stretch run at once.

    Packed sequences are not cut: there are usually many.
    """
    B, T, H, K = call.inputs.r.shape
    T //= call.shards
    programs = max(1, B * H * call.shards // call.devices)
    if call.inputs.cu_seqlens is not None or programs > FEW.get(max(64, tile(K)), 0):
        return call.shards
    wanted = min(-(-FULL // (walks * programs)), T // SHORTEST)
    return call.shards * -(-T // _span(T, max(1, wanted)))


def stretches_here(call: Call[Recurrence], walks: int = 1) -> int:
    """How many of `stretches_of` the tokens are that an implementation sees."""
    return stretches_of(call, walks) // (1 if call.sequence is None else call.shards)


def _span(T: int, splits: int) -> int:
    """Tokens of a stretch: whole chunks, and two of them that share a state are in one."""
    return -(-T // (splits * 2 * CHUNK)) * 2 * CHUNK


def segment_starts(segment_ids: jax.Array) -> jax.Array:
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


def launch_options(table: LaunchTable, which: str, K: int, half: bool) -> tuple[int, int, int]:
    """(value block, warps, pipeline stages) of a pass for this GPU, known from its compute capability and
    never by trial.

    "Small" are all GPUs but 9.0 and 10.x: a block of 8.6, 8.9 and 12.0 has 99 KiB of shared memory, and for
    8.0 as for them ptxas gives up on the tiles that those two hold (32 or 40 registers and up to 15 KB
    spilled by each thread); smaller blocks of values compile well. tests/compile has the numbers.
    """
    small = "" if compute_capability() // 10 in (9, 10) else "small"
    kind = " ".join(filter(None, [small, "" if half else "float32"]))
    key = which, max(64, tile(K))
    return table[(*key, kind)] if (*key, kind) in table else table[key]


def has_half(x: Any) -> bool:
    """Whether products have bfloat16 operands: all token arrays of a recurrence's inputs, the decay apart,
    have 16 bits.
    """
    tokens = [array for name, array in x._asdict().items() if name in "rkvab"]
    return all(array.dtype in (jnp.bfloat16, jnp.float16) for array in tokens)


def has_warp_groups() -> bool:
    """Whether the GPU has products of a warp group: compute capability 9.0 alone. Tiles with keys as rows
    (device/rows.py) are made for them; elsewhere they are longer, and spill up to 800 bytes.
    """
    return compute_capability() // 10 == 9


def takes_rows(x: Any, do: jax.Array) -> bool:
    """Whether a backward may take tiles with keys as rows: they also take two parts of 8 bits in place of
    float32, so that tokens are bfloat16 and decays that or float32.
    """
    tokens = [array for name, array in x._asdict().items() if name in "rkvab"]
    half = all(array.dtype == jnp.bfloat16 for array in (*tokens, do))
    return half and x.w.dtype != jnp.float16 and has_warp_groups()


def store_dtype(half: bool) -> Any:
    """Dtype of kept states, of operands."""
    return jnp.bfloat16 if half else jnp.float32


def make_plan(
    which: str,
    table: LaunchTable,
    call: Call[Recurrence],
    x: Any,
    splits: int = 1,
    scored: bool = False,
    half: bool | None = None,
) -> ChunkedPlan:
    """Plans the pass ``which`` of a launch table for a recurrence's inputs ``x``, rows cut into ``splits``
    stretches; ``scored`` as in `Mode`. Operands have 16 bits where inputs have, or as ``half`` says.
    """
    B, T, H, K = x.r.shape
    V = x.v.shape[-1]
    BK = tile(K)
    half = has_half(x) if half is None else half
    BV, num_warps, num_stages = launch_options(table, which, K, half)
    BV = min(tile(V), BV)
    none = unused()
    if x.cu_seqlens is None:
        rows, chunks, cu, chunk0 = B * splits, (B, -(-T // CHUNK)), none, none
    else:
        rows = x.cu_seqlens.shape[0] - 1
        chunks = (1, (T + rows * (CHUNK - 1)) // CHUNK)
        cu = x.cu_seqlens.astype(jnp.int32)
        chunk0 = jnp.concatenate([none, jnp.cumsum(-(-jnp.diff(cu) // CHUNK))])
    lower_bound = call.settings.lower_bound
    any_decay = lower_bound is None or lower_bound < BOUNDED
    needs = none
    if any_decay:
        lowest = jnp.min(x.w, (1, 3)).astype(jnp.float32)
        needs = jnp.where(
            lowest < BOUNDED, ANY_DECAY.value, jnp.round(GAUGE * jnp.minimum(lowest, 0)).astype(jnp.int32)
        )
        needs = jnp.repeat(needs, rows // B, 0)  # one of each stretch or packed sequence
    parts = -(-V // BV)
    mode = Mode(
        H=H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        splits=splits,
        scale=call.settings.scale,
        operand=tl.bfloat16 if half else tl.float32,
        in_parts=not half and not INTERPRET,  # Triton's interpreter multiplies float32 numbers as they are
        any_decay=any_decay,
        segments=x.segment_ids is not None,
        packed=x.cu_seqlens is not None,
        even=T % CHUNK == 0 and x.cu_seqlens is None and K == BK and V % BV == 0,
        scored=scored,
        gauge=0 if any_decay else round(GAUGE * min(cast(float, lower_bound), 0.0)),
    )
    seg = none if x.segment_ids is None else segment_starts(x.segment_ids)
    ranges = dict(seg_=seg, cu_=cu, chunk0_=chunk0, any_decay_=needs, T=T, span=_span(T, splits))
    options = dict(grid=(parts, H, rows), num_warps=num_warps, num_stages=num_stages, mode=mode)
    return ChunkedPlan(ranges, options, parts, chunks, rows)


def scaled(plan: ChunkedPlan, x: Any, do: jax.Array, ds: jax.Array) -> ChunkedPlan:
    """``plan`` for kernels that take cotangents, ``do`` of outputs and ``ds`` of last states, [.., H, K, V],
    of each sequence or more of them for one: at which scale, says `cotangent_scale_kernel`. In the bounded
    form they are taken as they are.
    """
    if not plan.mode.any_decay:
        return plan
    names, needs = ("cu_", "chunk0_", "any_decay_", "T", "span"), cast(jax.Array, plan.ranges["any_decay_"])
    top = jnp.max(jnp.abs(ds.astype(jnp.float32)), (2, 3))
    top = jnp.max(top.reshape(needs.shape[0], -1, needs.shape[1]), 1)
    made = launch(
        cotangent_scale_kernel,
        dict(do_=do, top_=top, r_=x.r, k_=x.k, v_=x.v) | {name: plan.ranges[name] for name in names},
        dict(form_=like(needs)),
        grid=(1, *plan.options["grid"][1:]),
        num_warps=4,
        num_stages=1,
        mode=plan.mode.replaced(BK=tile(plan.mode.K), BV=tile(plan.mode.V)),
    )
    return plan._replace(ranges=plan.ranges | dict(any_decay_=made["form_"]))


def partial_shapes(parts: int, *arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Shapes of gradients that every value block contributes to: float32 where they must be summed."""
    return [jax.ShapeDtypeStruct((parts, *x.shape), x.dtype if parts == 1 else jnp.float32) for x in arrays]


def total(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over value blocks in the dtype of ``like``."""
    return gradient[0] if gradient.shape[0] == 1 else jnp.sum(gradient, 0).astype(like.dtype)
