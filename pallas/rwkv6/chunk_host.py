"""RWKV-6, chunked, in Triton: the rule that the op loads."""

from __future__ import annotations

import jax.numpy as jnp

from ...core.context import Context
from ...core.context_parallel import shard_of
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ..backend.triton import triton_call
from ..common import chunk_variants
from ..common.chunk_plan import (
    ChunkPlan,
    local_num_splits,
    num_splits_of,
    partial_shapes,
    plan_pass,
    sum_value_blocks,
    with_cotangent_scale,
)
from ..common.chunk_variants import launch_of, variant_key
from ..common.select import select
from ..common.shapes import like, shaped, without
from ..common.state_buffers_host import StateBuffers, state_buffers
from ..common.state_passing_host import split_dht, split_h0
from .chunk_bwd import Saved, rwkv6_bwd_kernel
from .chunk_fwd import FwdOut, rwkv6_fwd_kernel
from .chunk_state import StateOut, rwkv6_chunk_state_kernel
from .variants import LAUNCHES, VARIANTS

Ctx = Context[RWKV6Inputs, RecurrenceConfig]


def _plan(ctx: Ctx, x: RWKV6Inputs, name: str, num_splits: int) -> ChunkPlan:
    """The pass ``name`` of the call's variant."""
    key = variant_key(ctx, x)
    variant = select(VARIANTS, key)
    launch = launch_of(LAUNCHES, variant, name, key)
    return plan_pass(ctx, x, launch, key.bf16_dots, num_splits, key_major=variant.key_major)


def _state_buffers(ctx: Ctx, x: RWKV6Inputs) -> StateBuffers:
    key = variant_key(ctx, x)
    launch = launch_of(LAUNCHES, select(VARIANTS, key), "bwd", key)
    return state_buffers(x, ("r", "k", "v", "w"), launch.block, key.store_dtype)


def describe(ctx: Ctx) -> str:
    """The variant of a call, for messages."""
    return chunk_variants.describe(VARIANTS, variant_key(ctx, ctx.shapes))


def residual_axes(ctx: Ctx) -> dict[str, str]:
    """Residuals of the forward, and their axes."""
    axes = _state_buffers(ctx, ctx.shapes).axes
    if num_splits_of(ctx) == 1:
        return axes
    return axes | {"transition": "b split h k", "q_entry": "b t h k"}


def _kernel_inputs(x: RWKV6Inputs) -> RWKV6Inputs:
    """The fields that kernels read but the state, with u for each sequence, [B, H, K]."""
    u = jnp.broadcast_to(x.u, (x.r.shape[0], *x.u.shape))
    return without(x._replace(u=u), "initial_state", "segment_ids", "cu_seqlens")


def _chunk_state(ctx: Ctx, x: RWKV6Inputs, num_splits: int) -> StateOut:
    """Transitions, updates and entry queries of all splits (`state_passing_host`)."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    plan = _plan(ctx, x, "chunk_state", num_splits)
    return triton_call(
        rwkv6_chunk_state_kernel,
        without(x, "u", "initial_state", "segment_ids"),
        plan.index._replace(gates=None),
        out=StateOut(
            q_entry=like(x.r, plan.store_dtype),
            transition=shaped((B * num_splits, H, K), jnp.float32),
            update=shaped((B * num_splits, H, K, V), jnp.float32),
        ),
        # exact for every decay, so the gate does not matter
        config=plan.config.replace(unsafe_gate=True, num_blocks=plan.grid[0]),
        grid=(plan.grid[0] + 1, *plan.grid[1:]),
        launch=plan.launch,
    )


def fwd(ctx: Ctx, x: RWKV6Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and residuals."""
    (B, _, H, K), V, num_splits = x.r.shape, x.v.shape[-1], local_num_splits(ctx)
    shard, final = shard_of(ctx.cp, x.segment_ids), None
    buffers, h0 = _state_buffers(ctx, x), x.initial_state
    residuals: Residuals = {}
    if num_splits_of(ctx) > 1:
        split = _chunk_state(ctx, x, num_splits)
        h0, final = split_h0(split.transition, split.update, h0, num_splits, shard)
        residuals = {
            "transition": split.transition.reshape(B, num_splits, H, K),
            "q_entry": split.q_entry,
        }
    plan = _plan(ctx, x, "fwd", num_splits)
    out = triton_call(
        rwkv6_fwd_kernel,
        _kernel_inputs(x)._replace(initial_state=h0),
        plan.index,
        out=FwdOut(
            o=like(x.v),
            ht=like(h0, jnp.float32),
            states=buffers.shapes(x.r, V, plan) if ctx.save_residuals else None,
        ),
        config=plan.config.replace(num_buffers=buffers.num_buffers, A_in_registers=plan.A_in_registers),
        grid=plan.grid,
        launch=plan.launch,
    )
    outputs = Outputs(out.o, out.ht if final is None else final)
    return outputs, residuals | buffers.residuals(out.states) if ctx.save_residuals else {}


def bwd(ctx: Ctx, x: RWKV6Inputs, residuals: Residuals, cotangents: Outputs) -> RWKV6Inputs:
    """Gradients of all inputs."""
    do, dht = cotangents
    (B, _, H, K), V, num_splits = x.r.shape, x.v.shape[-1], local_num_splits(ctx)
    buffers, shard = _state_buffers(ctx, x), shard_of(ctx.cp, x.segment_ids)
    plan = _plan(ctx, x, "bwd", num_splits)
    if num_splits_of(ctx) > 1:
        transition = residuals["transition"].reshape(-1, H, K)
        dht = split_dht(plan, transition, residuals["q_entry"], do, dht, shard)
    plan = with_cotangent_scale(plan, x, do, dht)
    NV = plan.grid[0]
    dr, dk, dw = partial_shapes(NV, x.r, x.k, x.w)
    (dv,) = partial_shapes(1, x.v)
    du = shaped((NV, dht.shape[0], H, K), jnp.float32)  # of each split: no atomics
    grads = triton_call(
        rwkv6_bwd_kernel,
        _kernel_inputs(x),
        Saved(do, dht, buffers.operands(residuals)),
        plan.index,
        out=RWKV6Inputs(r=dr, k=dk, v=dv, w=dw, u=du, initial_state=like(dht, jnp.float32)),
        config=plan.config.replace(num_buffers=buffers.num_buffers),
        grid=plan.grid,
        launch=plan.launch,
        aliases=buffers.aliases("saved.states", ("r", "k", "v", "w")),
    )
    dh0 = grads.initial_state.reshape(-1, num_splits, H, K, V)[:, 0]
    return RWKV6Inputs(
        r=sum_value_blocks(grads.r, x.r),
        k=sum_value_blocks(grads.k, x.k),
        v=grads.v[0],
        w=sum_value_blocks(grads.w, x.w),
        u=jnp.sum(grads.u.reshape(NV, B, -1, H, K), (0, 2)),
        initial_state=dh0 if shard is None else jnp.where(shard.is_first, dh0, 0),
    )
