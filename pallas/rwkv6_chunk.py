"""RWKV-6, chunked, on NVIDIA GPUs: the forward and backward rules that launch the Triton kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..core.launch import launch
from ..core.partition import partitioned
from ..ops.config import OpConfig
from .chunk_plan import LaunchTable, Layout, has_half, make_plan, partial_shapes, plan_splits, total
from .kept_states import KeptStates, keep_states
from .rwkv6_chunk_bwd import rwkv6_bwd_kernel
from .rwkv6_chunk_fwd import rwkv6_fwd_kernel, rwkv6_transfer_kernel
from .sequence_split import enter, enter_backward

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("forward", 64): (64, 2, 3),
    ("transfer", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("transfer", 128): (128, 8, 3),
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 8, 1),
    # not measured: what fits and spills least (tests/compile/resources.py)
    ("backward", 64, "small"): (32, 4, 1),
    ("backward", 128, "small"): (32, 8, 1),
    ("forward", 64, "small float32"): (32, 4, 1),
    ("transfer", 64, "small float32"): (32, 4, 1),
    ("backward", 64, "small float32"): (16, 8, 1),
    ("forward", 128, "small float32"): (32, 8, 1),
    ("transfer", 128, "small float32"): (32, 8, 1),
    ("backward", 128, "small float32"): (16, 4, 1),
    ("forward", 256, "small float32"): (16, 8, 1),
    ("backward", 256, "small float32"): (16, 8, 1),
}
TOKENS = "b t h k, b t h k, b t h v, b t h k, b h k"
TRANSFER = ", b s h k, b t h k"


def _per_row(u: jax.Array, r: jax.Array) -> jax.Array:
    """u [H, K] for each row, [B, H, K]: its gradient is summed over rows outside the kernel, and `jax.vmap` may map it."""
    return jnp.broadcast_to(u, (r.shape[0], *u.shape))


def _keeps(r: jax.Array, k: jax.Array, v: jax.Array, w: jax.Array, cu_seqlens: jax.Array | None) -> KeptStates:
    """How the forward keeps states, and where the backward finds them."""
    return keep_states(LAUNCH, r, v, (r, k, v, w), has_half(r, k, v), cu_seqlens)


def forward(cfg: OpConfig, r, k, v, w, u, s0, segment_ids, cu_seqlens):
    """Forward rule: ``(o, final_state), kept``."""
    splits, layout = plan_splits(r, cu_seqlens), Layout(segment_ids, cu_seqlens)
    keeps = _keeps(r, k, v, w, cu_seqlens)

    def run(r, k, v, w, u, s0, *rest):
        (B, _, H, K), V = r.shape, v.shape[-1]
        place = layout.unpack(rest)
        plan = make_plan("forward", LAUNCH, cfg, r, w, v, (k,), *place, splits)
        transfer: tuple[jax.Array, ...] = ()
        if splits > 1:
            cut = make_plan("transfer", LAUNCH, cfg, r, w, v, (k,), *place, splits)
            options = {name: x for name, x in cut.options.items() if name not in ("ANY", "VAR")}
            reads, M = jax.ShapeDtypeStruct(r.shape, cut.store), jax.ShapeDtypeStruct((B * splits, H, K), jnp.float32)
            N = jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32)
            reads, M, N = launch(rwkv6_transfer_kernel, r, k, v, w, cut.ranges[0], *cut.lengths, out=(reads, M, N), **options)
            s0, transfer = enter(M, N, s0, splits), (M.reshape(B, splits, H, K), reads)
        out = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(s0.shape, jnp.float32), *keeps.shapes(r, V, plan.chunks, cfg.keep))
        options = plan.options | dict(KEEP=cfg.keep, ARRAYS=keeps.arrays)
        y, final, *states = launch(rwkv6_fwd_kernel, r, k, v, w, u, s0, *plan.ranges, *plan.lengths, out=out, **options)
        final = final.reshape(-1, splits, H, K, V)[:, -1]
        return (y, final, *states[: keeps.count], *transfer) if cfg.keep else (y, final)

    results = keeps.rule + (TRANSFER if splits > 1 else "")
    rule = f"{TOKENS}, {layout.state}{layout.rule} -> b t h v, {layout.state}" + (f", {results}" if cfg.keep else "")
    y, final, *kept = partitioned(run, rule, layout.fold)(r, k, v, w, _per_row(u, r), s0, *layout.operands)
    return (y, final), tuple(kept)


def backward(cfg: OpConfig, inputs, kept, dy, ds):
    """Backward rule: gradients of r, k, v, w, u and the initial state."""
    r, k, v, w, u, _, segment_ids, cu_seqlens = inputs
    splits, layout = plan_splits(r, cu_seqlens), Layout(segment_ids, cu_seqlens)
    keeps = _keeps(r, k, v, w, cu_seqlens)

    def run(r, k, v, w, u, dy, ds, *rest):
        states, rest = rest[: keeps.count], rest[keeps.count :]
        transfer, rest = (rest[:2], rest[2:]) if splits > 1 else ((), rest)
        (B, _, H, K), V = r.shape, v.shape[-1]
        plan = make_plan("backward", LAUNCH, cfg, r, w, v, (k,), *layout.unpack(rest), splits)
        if splits > 1:
            M, reads = transfer
            ds = enter_backward(plan, M.reshape(-1, H, K), reads, dy, ds)
        dr, dk, dw = partial_shapes(plan.parts, r, k, w)
        (dv,) = partial_shapes(1, v)
        partial_du = jax.ShapeDtypeStruct((plan.parts, ds.shape[0], H, K), jnp.float32)  # one per value block and stretch: no atomics
        out = (dr, dk, dv, dw, partial_du, jax.ShapeDtypeStruct(ds.shape, jnp.float32))
        before = (r, k, v, w, u, *plan.ranges, dy, ds)
        dr, dk, dv, dw, du, ds0 = launch(
            rwkv6_bwd_kernel, *before, *keeps.operands(states), *plan.lengths,
            out=out, aliases=keeps.aliases(len(before), (0, 1, 2, 3)), ARRAYS=keeps.arrays, TAKEN=keeps.taken, **plan.options,
        )  # fmt: skip
        du = jnp.sum(du.reshape(plan.parts, B, -1, H, K), (0, 2))
        return total(dr, r), total(dk, k), dv[0], total(dw, w), du, ds0.reshape(-1, splits, H, K, V)[:, 0]

    rule = f"{TOKENS}, b t h v, {layout.state}, {keeps.rule}{TRANSFER if splits > 1 else ''}{layout.rule} -> {TOKENS}, {layout.state}"
    dr, dk, dv, dw, du, ds0 = partitioned(run, rule, layout.fold)(r, k, v, w, _per_row(u, r), dy, ds, *kept, *layout.operands)
    return dr, dk, dv, dw, jnp.sum(du, 0).astype(u.dtype), ds0
