"""What the launchers of the chunked Triton kernels share: runtime arguments, constants, launch options, shapes of what the forward keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.launch import compute_capability
from ..core.partition import devices_in_mesh
from ..ops.config import OpConfig

CHUNK = 16
BOUNDED = -5.0  # exp(16 * 5) is the largest factor that the bounded form may make

# (value block, warps, pipeline stages) by pass and padded K, for 16-bit inputs on GPUs with wgmma; an entry with a third part is for another kind of call:
# "float32" inputs, "small" GPUs, "small float32". See `launch_options`.
LaunchTable = Mapping[tuple[str, int] | tuple[str, int, str], tuple[int, int, int]]


# Programs that fill an H200 (132 multiprocessors, about four programs each), the most of them at which cutting rows still pays for walking them twice (by
# padded K: with 128, one program fills a multiprocessor), and the fewest tokens that are worth a stretch of their own.
FULL, FEW, SHORTEST = 512, {64: 132, 128: 100}, 256


class Layout(NamedTuple):
    """Packed documents or packed sequences as operands of a partitioned call (core/partition.py)."""

    segment_ids: jax.Array | None
    cu_seqlens: jax.Array | None

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """Those that were given."""
        return tuple(x for x in self if x is not None)

    @property
    def rule(self) -> str:
        """Names of their axes."""
        return ", b t" if self.segment_ids is not None else ", m" if self.cu_seqlens is not None else ""

    @property
    def state(self) -> str:
        """Names of a state's axes."""
        return "b h k v" if self.fold else "n h k v"

    @property
    def fold(self) -> bool:
        """Whether `jax.vmap` may merge a mapped axis into the rows: packed sequences have one row."""
        return self.cu_seqlens is None

    def unpack(self, operands: Sequence[jax.Array]) -> tuple[jax.Array | None, jax.Array | None]:
        """(segment_ids, cu_seqlens) from the operands that a call got."""
        given = iter(operands)
        return None if self.segment_ids is None else next(given), None if self.cu_seqlens is None else next(given)


class Plan(NamedTuple):
    """One launch. ``ranges`` are the kernels' arguments seg, cu, chunk0, strong and ``lengths`` T, span; ``options`` go to `launch`; ``parts`` value blocks."""

    ranges: tuple[jax.Array, ...]
    lengths: tuple[int, int]
    options: dict[str, Any]
    parts: int
    chunks: tuple[int, int]  # leading axes of what is kept by chunk: rows, chunks
    store: Any  # dtype of kept states

    @property
    def splits(self) -> int:
        """Stretches that each row is cut into."""
        return self.options["SPLITS"]


def plan_splits(r: jax.Array, cu_seqlens: jax.Array | None) -> int:
    """Into how many stretches to cut the rows of arrays like ``r`` [B, T, H, K]: 1 where rows and heads alone keep the GPU busy.

    Packed sequences are not cut: there are usually many.
    """
    B, T, H, K = r.shape
    programs = max(1, B * H // devices_in_mesh())
    if cu_seqlens is not None or programs > FEW.get(max(64, tile(K)), 0):
        return 1
    wanted = min(-(-FULL // programs), T // SHORTEST)
    return -(-T // _span(T, max(1, wanted)))


def _span(T: int, splits: int) -> int:
    """Tokens of a stretch: whole chunks."""
    return -(-T // (splits * CHUNK)) * CHUNK


def restarts(segment_ids: jax.Array) -> jax.Array:
    """[B, T] int32: how many segments of its row began up to and including a token."""
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.cumsum(jnp.pad(change, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)


def tile(n: int) -> int:
    """Head size padded to what `tl.dot` takes."""
    return max(16, 1 << (n - 1).bit_length())


def launch_options(table: LaunchTable, which: str, K: int, half: bool) -> tuple[int, int, int]:
    """(value block, warps, pipeline stages) of a pass for this GPU, known from its compute capability and never by trial.

    "Small" are all GPUs but 9.0 and 10.x: a block of 8.6, 8.9 and 12.0 has 99 KiB of shared memory, and for 8.0 as for them ptxas gives up on the tiles that
    those two hold (32 or 40 registers and up to 15 KB spilled by each thread); smaller blocks of values compile well. tests/compile has the numbers.
    """
    small = "" if compute_capability() // 10 in (9, 10) else "small"
    kind = " ".join(filter(None, [small, "" if half else "float32"]))
    key = which, max(64, tile(K))
    return table.get((*key, kind), table[key])


def has_half(*arrays: jax.Array) -> bool:
    """Whether products have bfloat16 operands: all token arrays, the decay apart, have 16 bits."""
    return all(x.dtype in (jnp.bfloat16, jnp.float16) for x in arrays)


def store_dtype(half: bool) -> Any:
    """Dtype of kept states, of operands."""
    return jnp.bfloat16 if half else jnp.float32


def make_plan(which: str, table: LaunchTable, cfg: OpConfig, r, w, v, others, segment_ids, cu_seqlens, splits: int = 1) -> Plan:
    """Plans the pass ``which`` of a launch table; ``others`` are the token arrays besides r, w, v."""
    B, T, H, K = r.shape
    V = v.shape[-1]
    BK = tile(K)
    half = has_half(r, v, *others)
    BV, num_warps, num_stages = launch_options(table, which, K, half)
    BV = min(tile(V), BV)
    none = jnp.zeros(1, jnp.int32)
    if cu_seqlens is None:
        rows, chunks, cu, chunk0 = B * splits, (B, -(-T // CHUNK)), none, none
    else:
        rows = cu_seqlens.shape[0] - 1
        chunks = (1, (T + rows * (CHUNK - 1)) // CHUNK)
        cu = cu_seqlens.astype(jnp.int32)
        chunk0 = jnp.concatenate([none, jnp.cumsum(-(-jnp.diff(cu) // CHUNK))])
    bounded = cfg.lower_bound is not None and cfg.lower_bound >= BOUNDED
    strong = none if bounded else (jnp.min(w, (1, 3)) < BOUNDED).astype(jnp.int32)
    parts = -(-V // BV)
    options = dict(
        grid=(parts, H, rows), num_warps=num_warps, num_stages=num_stages,
        H=H, K=K, V=V, BK=BK, BV=BV, SCALE=cfg.scale, HALF=half, PREC="tf32" if half else "tf32x3",
        ANY=not bounded, SEG=segment_ids is not None, VAR=cu_seqlens is not None,
        EVEN=T % CHUNK == 0 and cu_seqlens is None and K == BK and V % BV == 0, SPLITS=splits,
    )  # fmt: skip
    seg = none if segment_ids is None else restarts(segment_ids)
    return Plan((seg, cu, chunk0, strong), (T, _span(T, splits)), options, parts, chunks, store_dtype(half))


def partial_shapes(parts: int, *arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    """Shapes of gradients that every value block contributes to: float32 where they must be summed."""
    return [jax.ShapeDtypeStruct((parts, *x.shape), x.dtype if parts == 1 else jnp.float32) for x in arrays]


def total(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Sum over value blocks in the dtype of ``like``."""
    return gradient[0] if gradient.shape[0] == 1 else jnp.sum(gradient, 0).astype(like.dtype)
