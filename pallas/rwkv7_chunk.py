"""RWKV-7, chunked, on NVIDIA GPUs: the forward and backward rules that launch the Triton kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.launch import launch
from ..ops.config import OpConfig
from .rwkv7_chunk_bwd import rwkv7_bwd_kernel
from .rwkv7_chunk_fwd import rwkv7_fwd_kernel

CHUNK = 16
BOUNDED = -5.0  # exp(16 * 5) is the largest factor that the bounded kernels may form
# (values per program, warps, stages) by pass and padded K: measured on an H200
LAUNCH = {
    ("forward", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 4, 1),
}


def restarts(segment_ids: jax.Array) -> jax.Array:
    """[B, T] int32: how many segments of its row began up to and including a token."""
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.cumsum(jnp.pad(change, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)


def _tile(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _plan(which: str, cfg: OpConfig, r, w, k, v, a, b, segment_ids, cu_seqlens):
    """Runtime arguments, constants, grid, launch options, and the shapes of what the forward keeps."""
    B, T, H, K = r.shape
    V = v.shape[-1]
    BK = _tile(K)
    BV, num_warps, num_stages = LAUNCH[which, max(64, BK)]
    BV = min(_tile(V), BV)
    bounded = cfg.lower_bound is not None and cfg.lower_bound >= BOUNDED
    half = all(x.dtype in (jnp.bfloat16, jnp.float16) for x in (r, k, v, a, b))
    dummy = jnp.zeros(1, jnp.int32)
    seg = dummy if segment_ids is None else restarts(segment_ids)
    if cu_seqlens is None:
        rows, chunks, cu, chunk0 = B, B * -(-T // CHUNK), dummy, dummy
    else:
        rows = cu_seqlens.shape[0] - 1
        chunks = (T + rows * (CHUNK - 1)) // CHUNK
        cu = cu_seqlens.astype(jnp.int32)
        chunk0 = jnp.concatenate([dummy, jnp.cumsum(-(-jnp.diff(cu) // CHUNK))])
    constants = dict(
        H=H, K=K, V=V, BK=BK, BV=BV, SCALE=cfg.scale, HALF=half, PREC="tf32" if half else "tf32x3",
        ANY=not bounded, SEG=segment_ids is not None, VAR=cu_seqlens is not None,
        EVEN=T % CHUNK == 0 and cu_seqlens is None and K == BK and V % BV == 0,
    )  # fmt: skip
    kept = (
        jax.ShapeDtypeStruct((chunks, H, V, K), jnp.bfloat16 if half else jnp.float32),
        jax.ShapeDtypeStruct((chunks, H, CHUNK, CHUNK), jnp.bfloat16 if half else jnp.float32),
        jax.ShapeDtypeStruct((chunks, H, 2, K), jnp.float32),
    )
    strong = dummy if bounded else (jnp.min(w, (1, 3)) < BOUNDED).astype(jnp.int32)
    options = dict(grid=(-(-V // BV), H, rows), num_warps=num_warps, num_stages=num_stages, **constants)
    return (seg, cu, chunk0, strong), options, kept


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    ranges, options, kept = _plan("forward", cfg, r, w, k, v, a, b, segment_ids, cu_seqlens)
    out = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(s0.shape, jnp.float32), *kept)
    y, final, *kept = launch(rwkv7_fwd_kernel, r, w, k, v, a, b, s0, *ranges, r.shape[1], out=out, KEEP=True, **options)
    return (y, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    r, w, k, v, a, b, s0, segment_ids, cu_seqlens = inputs
    ranges, options, _ = _plan("backward", cfg, r, w, k, v, a, b, segment_ids, cu_seqlens)
    parts = options["grid"][0]
    of_k = lambda x: jax.ShapeDtypeStruct((parts, *x.shape), x.dtype if parts == 1 else jnp.float32)
    out = (*map(of_k, (r, w, k)), jax.ShapeDtypeStruct(v.shape, v.dtype), *map(of_k, (a, b)), jax.ShapeDtypeStruct(s0.shape, jnp.float32))
    dr, dw, dk, dv, da, db, ds0 = launch(rwkv7_bwd_kernel, r, w, k, v, a, b, *ranges, dy, ds, *kept, r.shape[1], out=out, **options)
    whole = lambda g, x: g[0] if parts == 1 else jnp.sum(g, 0).astype(x.dtype)
    return whole(dr, r), whole(dw, w), whole(dk, k), dv, whole(da, a), whole(db, b), ds0
