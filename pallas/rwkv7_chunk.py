"""RWKV-7, chunked, on NVIDIA GPUs: the forward and backward rules that launch the Triton kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.launch import launch
from ..ops.config import OpConfig
from .chunk_plan import CHUNK, make_plan, partial_shapes, total
from .rwkv7_chunk_bwd import rwkv7_bwd_kernel
from .rwkv7_chunk_fwd import rwkv7_fwd_kernel

LAUNCH = {  # measured on an H200
    ("forward", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 4, 1),
}


def forward(cfg: OpConfig, r, w, k, v, a, b, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    plan = make_plan("forward", LAUNCH, cfg, r, w, v, (k, a, b), segment_ids, cu_seqlens)
    (H, K), V = r.shape[2:], v.shape[-1]
    out = (
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct(s0.shape, jnp.float32),
        jax.ShapeDtypeStruct((plan.chunks, H, V, K), plan.store),  # states that enter the chunks
        jax.ShapeDtypeStruct((plan.chunks, H, CHUNK, CHUNK), plan.store),  # (I - A_ab)^-1
        jax.ShapeDtypeStruct((plan.chunks, H, 2, K), jnp.float32),  # decays of the state before and after a chunk's own writes
    )
    y, final, *kept = launch(rwkv7_fwd_kernel, r, w, k, v, a, b, s0, *plan.ranges, r.shape[1], out=out, KEEP=True, **plan.options)
    return (y, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, w, k, v, a, b and the initial state."""
    r, w, k, v, a, b, s0, segment_ids, cu_seqlens = inputs
    plan = make_plan("backward", LAUNCH, cfg, r, w, v, (k, a, b), segment_ids, cu_seqlens)
    dr, dw, dk, da, db = partial_shapes(plan.parts, r, w, k, a, b)
    out = (dr, dw, dk, jax.ShapeDtypeStruct(v.shape, v.dtype), da, db, jax.ShapeDtypeStruct(s0.shape, jnp.float32))
    dr, dw, dk, dv, da, db, ds0 = launch(rwkv7_bwd_kernel, r, w, k, v, a, b, *plan.ranges, dy, ds, *kept, r.shape[1], out=out, **plan.options)
    return total(dr, r), total(dw, w), total(dk, k), dv, total(da, a), total(db, b), ds0
