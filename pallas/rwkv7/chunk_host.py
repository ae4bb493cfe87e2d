"""RWKV-7, chunked, in Triton: the rule that the op loads."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.context_parallel import shard_of
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ..backend.triton import triton_call
from ..common import chunk_variants
from ..common.chunk_plan import (
    CHUNK,
    ChunkPlan,
    local_num_splits,
    num_splits_of,
    partial_shapes,
    plan_pass,
    sum_value_blocks,
    with_cotangent_scale,
)
from ..common.chunk_variants import Variant, VariantKey, launch_of, variant_key
from ..common.select import select
from ..common.shapes import like, shaped, tile, without
from ..common.state_buffers_host import StateBuffers, state_buffers
from ..common.state_passing_host import add_entry_output, split_dht, split_h0
from .chunk_A import NUM_A_TILES, AOut, rwkv7_chunk_A_kernel
from .chunk_bwd import DhOut, Saved, rwkv7_bwd_dh_kernel, rwkv7_bwd_kernel
from .chunk_bwd_grads_host import bwd_grads
from .chunk_bwd_split import GradsSaved
from .chunk_fwd import FwdOut, rwkv7_fwd_kernel
from .chunk_state import StateOut, rwkv7_chunk_state_kernel
from .variants import A_LAUNCH, LAUNCHES, VARIANTS

Ctx = Context[RWKV7Inputs, RecurrenceConfig]

# `MAX_SPLIT_PROGRAMS` of forwards without residuals, lower since no backward gains from the splits
MAX_FORWARD_PROGRAMS = {64: 80, 128: 48}


class Call(NamedTuple):
    """A call's key, and the variant that it selects."""

    key: VariantKey
    variant: Variant

    @classmethod
    def of(cls, ctx: Ctx, x: RWKV7Inputs) -> Call:
        """The call of the op on ``x``."""
        key = variant_key(ctx, x)
        return cls(key, select(VARIANTS, key))

    def plan(self, ctx: Ctx, x: RWKV7Inputs, name: str, num_splits: int) -> ChunkPlan:
        """The pass ``name``."""
        launch, variant = launch_of(LAUNCHES, self.variant, name, self.key), self.variant
        return plan_pass(
            ctx,
            x,
            launch,
            self.key.bf16_dots,
            num_splits,
            precomputed_A=variant.precomputed_A,
            joint_scan=variant.joint_scan,
            chunks_per_state=variant.chunks_per_state,
            key_major=variant.key_major and not variant.split_bwd,
            pair_tile=variant.key_major and variant.split_bwd,
        )

    def state_buffers(self, x: RWKV7Inputs) -> StateBuffers:
        """Where states are stored."""
        if self.variant.split_bwd:
            return StateBuffers(0, 0, self.variant.chunks_per_state, self.key.store_dtype)
        block = launch_of(LAUNCHES, self.variant, "bwd", self.key).block
        return state_buffers(x, ("r", "k", "a", "b"), block, self.key.store_dtype)

    def dstate_buffers(self, x: RWKV7Inputs) -> StateBuffers:
        """Where the first of two backward kernels stores gradients of states."""
        block, dtype = tile(self.key.V), self.key.store_dtype
        return state_buffers(x, ("r", "k", "a", "b"), block, dtype, self.variant.chunks_per_state)


def describe(ctx: Ctx) -> str:
    """The variant of a call, for messages."""
    return chunk_variants.describe(VARIANTS, variant_key(ctx, ctx.shapes))


def residual_axes(ctx: Ctx) -> dict[str, str]:
    """Residuals of the forward, and their axes."""
    call = Call.of(ctx, ctx.shapes)
    axes = call.state_buffers(ctx.shapes).axes | {"A": "b chunk h x y"}
    if call.variant.split_bwd:
        axes["v_new"] = "b t h v"
    if num_splits_of(ctx) > 1:
        axes |= {"transition": "b split h k j", "q_entry": "b t h k"}
    return axes


def _tokens(x: RWKV7Inputs) -> RWKV7Inputs:
    """The arrays [B, T, ...] that kernels read."""
    return without(x, "initial_state", "segment_ids", "cu_seqlens")


def _precompute_A(plan: ChunkPlan, x: RWKV7Inputs) -> jax.Array:
    """A of all chunks, [rows, chunks, H, 4 * 16, 16] float32."""
    grid, index = plan.by_chunks(1)
    shape = (*plan.chunks, plan.config.H, NUM_A_TILES.value * CHUNK, CHUNK)
    return triton_call(
        rwkv7_chunk_A_kernel,
        without(x, "v", "initial_state", "segment_ids", "cu_seqlens"),
        index,
        out=AOut(shaped(shape, jnp.float32)),
        config=plan.config.replace(BK=min(A_LAUNCH.block, plan.config.BK)),
        grid=grid,
        launch=A_LAUNCH.launch,
    ).A


def _chunk_state(
    plan: ChunkPlan, x: RWKV7Inputs, A: jax.Array | None, from_h0: bool, o_zero_state: bool
) -> StateOut:
    """Transitions, updates and entry queries of all splits (`state_passing_host`), and outputs of zero
    states. With ``from_h0`` the first split of a sequence starts from its state.
    """
    (B, _, H, K), V, c = x.r.shape, x.v.shape[-1], plan.config
    values, keys, splits = plan.grid[0], -(-K // c.BV), B * c.num_splits
    return triton_call(
        rwkv7_chunk_state_kernel,
        without(x, "segment_ids", "cu_seqlens") if from_h0 else _tokens(x),
        A,
        plan.index,
        out=StateOut(
            q_entry=like(x.r, plan.store_dtype),
            transition=shaped((splits, H, K, K), jnp.float32),
            update=shaped((splits, H, K, V), jnp.float32),
            o_zero_state=like(x.v, jnp.float32) if o_zero_state else None,  # rounded once, with its sum
        ),
        config=c.replace(unmasked=c.unmasked and K % c.BV == 0),
        grid=(max(values, keys) if c.joint_scan else values + keys, H, splits),
        launch=plan.launch,
    )


def fwd(ctx: Ctx, x: RWKV7Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and residuals."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    call = Call.of(ctx, x)
    # without residuals the two scans of chunk_state replace the forward, but for float32 tiles of large heads
    is_single_pass = not ctx.save_residuals and (call.key.bf16_dots or K <= 64)
    passes = 2 if is_single_pass and not call.variant.joint_scan else 1
    max_programs = None if ctx.save_residuals else MAX_FORWARD_PROGRAMS
    num_splits = local_num_splits(ctx, passes, max_programs)
    shard = shard_of(ctx.cp, x.segment_ids)
    plan = call.plan(ctx, x, "fwd", num_splits)
    A = _precompute_A(plan, x) if call.variant.precomputed_A else None
    h0 = final = x.initial_state
    residuals: Residuals = {}
    if num_splits > 1 or shard is not None:
        split_plan = call.plan(ctx, x, "chunk_state", num_splits)
        split = _chunk_state(split_plan, x, A, from_h0=shard is None, o_zero_state=is_single_pass)
        h0, final = split_h0(split.transition, split.update, h0, num_splits, shard)
        if is_single_pass:
            o = add_entry_output(split_plan, split.o_zero_state, split.q_entry, h0, x.v.dtype)
            return Outputs(o, final), {}
        residuals = {
            "transition": split.transition.reshape(B, num_splits, H, K, K),
            "q_entry": split.q_entry,
        }
    buffers = call.state_buffers(x)
    shape = (*plan.chunks, H, NUM_A_TILES.value * CHUNK, CHUNK)
    out = triton_call(
        rwkv7_fwd_kernel,
        _tokens(x)._replace(initial_state=h0),
        A,
        plan.index,
        out=FwdOut(
            o=like(x.v),
            ht=like(h0),
            states=buffers.shapes(x.r, V, plan) if ctx.save_residuals else None,
            A=shaped(shape, plan.store_dtype) if ctx.save_residuals and A is None else None,
            v_new=like(x.v, plan.store_dtype) if ctx.save_residuals and call.variant.split_bwd else None,
        ),
        config=plan.config.replace(num_buffers=buffers.num_buffers, A_in_registers=plan.A_in_registers),
        grid=plan.grid,
        launch=plan.launch,
    )
    if shard is None:
        final = out.ht.reshape(final.shape[0], -1, H, K, V)[:, -1]
    outputs = Outputs(out.o, final)
    if not ctx.save_residuals:
        return outputs, {}
    residuals |= buffers.residuals(out.states) | {"A": out.A if A is None else A}
    return outputs, residuals | ({} if out.v_new is None else {"v_new": out.v_new})


def _bwd_fused(
    call: Call,
    plan: ChunkPlan,
    x: RWKV7Inputs,
    residuals: Residuals,
    do: jax.Array,
    dht: jax.Array,
) -> RWKV7Inputs:
    """All gradients in one kernel."""
    buffers = call.state_buffers(x)
    dr, dw, dk, da, db = partial_shapes(plan.grid[0], x.r, x.w, x.k, x.a, x.b)
    grads = triton_call(
        rwkv7_bwd_kernel,
        _tokens(x),
        Saved(do, dht, buffers.operands(residuals), residuals["A"]),
        plan.index,
        out=RWKV7Inputs(r=dr, w=dw, k=dk, v=like(x.v), a=da, b=db, initial_state=like(dht)),
        config=plan.config.replace(num_buffers=buffers.num_buffers),
        grid=plan.grid,
        launch=plan.launch,
        aliases=buffers.aliases("saved.states", ("r", "k", "a", "b")),
    )
    names = ("r", "w", "k", "a", "b")
    summed = {name: sum_value_blocks(getattr(grads, name), getattr(x, name)) for name in names}
    return grads._replace(**summed)


def _bwd_split(
    call: Call,
    plan: ChunkPlan,
    x: RWKV7Inputs,
    residuals: Residuals,
    do: jax.Array,
    dht: jax.Array,
) -> RWKV7Inputs:
    """State gradients, then token gradients."""
    buffers = call.dstate_buffers(x)
    made = triton_call(
        rwkv7_bwd_dh_kernel,
        _tokens(x),
        Saved(do, dht, None, residuals["A"]),
        plan.index,
        out=DhOut(
            v=like(x.v),
            initial_state=like(dht),
            dstates=buffers.shapes(x.r, x.v.shape[-1], plan),
            da_read=like(x.v, plan.store_dtype),
        ),
        config=plan.config.replace(num_buffers=buffers.num_buffers),
        grid=plan.grid,
        launch=plan.launch,
    )
    is_safe_pair = plan.config.pair_tile and not plan.config.unsafe_gate
    name = "bwd_grads_safe" if is_safe_pair else "bwd_grads"
    saved = GradsSaved(do, residuals["v_new"], made.da_read, residuals["states"], made.dstates)
    grads = bwd_grads(plan, x, saved, buffers, launch_of(LAUNCHES, call.variant, name, call.key))
    return RWKV7Inputs(**grads._asdict(), v=made.v, initial_state=made.initial_state)


def bwd(ctx: Ctx, x: RWKV7Inputs, residuals: Residuals, cotangents: Outputs) -> RWKV7Inputs:
    """Gradients of all inputs."""
    do, dht = cotangents
    (H, K), V, num_splits = x.r.shape[2:], x.v.shape[-1], local_num_splits(ctx)
    call, shard = Call.of(ctx, x), shard_of(ctx.cp, x.segment_ids)
    is_split = call.variant.split_bwd
    plan = call.plan(ctx, x, "bwd_dh" if is_split else "bwd", num_splits)
    if num_splits_of(ctx) > 1:
        transition = residuals["transition"].reshape(-1, H, K, K)
        dht = split_dht(plan, transition, residuals["q_entry"], do, dht, shard)
    plan = with_cotangent_scale(plan, x, do, dht)
    grads = (_bwd_split if is_split else _bwd_fused)(call, plan, x, residuals, do, dht)
    dh0 = grads.initial_state.reshape(-1, num_splits, H, K, V)[:, 0]
    return grads._replace(initial_state=dh0 if shard is None else jnp.where(shard.is_first, dh0, 0))
