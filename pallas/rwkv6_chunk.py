"""RWKV-6, chunked, on NVIDIA GPUs: the forward and backward rules that launch the Triton kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.launch import launch
from ..ops.config import OpConfig
from .chunk_plan import make_plan, partial_shapes, total
from .rwkv6_chunk_bwd import rwkv6_bwd_kernel
from .rwkv6_chunk_fwd import rwkv6_fwd_kernel

LAUNCH = {  # measured on an H200
    ("forward", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 4, 1),
}


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    plan = make_plan("forward", LAUNCH, cfg, r, w, v, (k,), segment_ids, cu_seqlens)
    (H, K), V = r.shape[2:], v.shape[-1]
    out = (
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct(s0.shape, jnp.float32),
        jax.ShapeDtypeStruct((plan.chunks, H, V, K), plan.store),  # states that enter the chunks
        jax.ShapeDtypeStruct((plan.chunks, H, 2, K), jnp.float32),  # decays of the state before and after a chunk's own writes
    )
    y, final, *kept = launch(rwkv6_fwd_kernel, r, k, v, w, u, s0, *plan.ranges, r.shape[1], out=out, KEEP=True, **plan.options)
    return (y, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, k, v, w, u and the initial state."""
    r, k, v, w, u, s0, segment_ids, cu_seqlens = inputs
    plan = make_plan("backward", LAUNCH, cfg, r, w, v, (k,), segment_ids, cu_seqlens)
    dr, dk, dw = partial_shapes(plan.parts, r, k, w)
    du = jax.ShapeDtypeStruct((plan.parts, s0.shape[0], *u.shape), jnp.float32)  # one per value block and sequence: no atomics
    out = (dr, dk, jax.ShapeDtypeStruct(v.shape, v.dtype), dw, du, jax.ShapeDtypeStruct(s0.shape, jnp.float32))
    dr, dk, dv, dw, du, ds0 = launch(rwkv6_bwd_kernel, r, k, v, w, u, *plan.ranges, dy, ds, *kept, r.shape[1], out=out, **plan.options)
    return total(dr, r), total(dk, k), dv, total(dw, w), jnp.sum(du, (0, 1)).astype(u.dtype), ds0
