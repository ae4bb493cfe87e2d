"""RWKV-7, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/core/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.context_parallel import shard_of
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ..backend.triton import launch
from ..common.chunk_host import (
    CHUNK,
    ChunkPlan,
    can_be_key_major,
    has_bf16_dots,
    has_wgmma,
    launch_options,
    local_num_splits,
    make_plan,
    num_splits_of,
    partial_shapes,
    sum_value_blocks,
    with_cotangent_scale,
)
from ..common.shapes import given, like, result, tile, unused
from ..common.state_buffers_host import StateBuffers, state_buffers
from ..common.state_passing_host import add_entry_output, split_dht, split_h0
from .chunk_A import NUM_A_TILES, rwkv7_chunk_A_kernel
from .chunk_bwd import rwkv7_bwd_dh_kernel, rwkv7_bwd_kernel
from .chunk_bwd_grads_host import launch_bwd_grads
from .chunk_fwd import rwkv7_fwd_kernel
from .chunk_launches import LAUNCH, PRECOMPUTED_A, token_arguments
from .chunk_state import rwkv7_chunk_state_kernel


def _has_precomputed_A(x: RWKV7Inputs) -> bool:
    """Whether a kernel makes the scores of all chunks beforehand: chunk_A.py."""
    return not has_bf16_dots(x)


def _has_split_bwd(x: RWKV7Inputs) -> bool:
    """Whether the backward takes two kernels: see chunk_bwd.py."""
    small = x.r.shape[-1] <= 64 and has_bf16_dots(x)
    return not small and x.r.shape[-1] <= 128 and x.v.shape[-1] <= 128


def _chunks_per_state(x: RWKV7Inputs) -> int:
    """For how many chunks one state is kept: two, where the state between them is never made
    (chunk_bwd_split.py), halve what two kernels hand each other. In float32 ptxas gives up on that.
    """
    return 2 if _has_split_bwd(x) and has_bf16_dots(x) else 1


def _precompute_A(
    ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs, num_splits: int
) -> jax.Array | None:
    """What chunk_A.py makes of all chunks beforehand, [rows, chunks, H, 4 * 16, 16]."""
    if not _has_precomputed_A(x):
        return None
    plan, H = make_plan("fwd", LAUNCH, ctx, x, num_splits, _has_precomputed_A(x)), x.r.shape[2]
    grid, owner = plan.by_chunks(1)
    made = launch(
        rwkv7_chunk_A_kernel,
        {name: array for name, array in token_arguments(x).items() if name != "v_"}
        | dict(chunk_indices_=owner)
        | plan.ranges,
        dict(A_=jax.ShapeDtypeStruct((*plan.chunks, H, NUM_A_TILES.value * CHUNK, CHUNK), jnp.float32)),
        grid=grid,
        num_warps=PRECOMPUTED_A[1],
        num_stages=1,
        c=plan.config.replaced(BK=min(PRECOMPUTED_A[0], plan.config.BK)),
    )
    return made["A_"]


def _state_buffers(x: RWKV7Inputs) -> StateBuffers:
    """How the forward keeps states, and where the backward finds them."""
    most = launch_options(LAUNCH, "bwd", x.r.shape[-1], has_bf16_dots(x))[0]
    return state_buffers(x, () if _has_split_bwd(x) else ("r", "k", "a", "b"), most, _chunks_per_state(x))


def _dstate_buffers(x: RWKV7Inputs) -> StateBuffers:
    """How the first of two backward kernels hands the gradients of states to the second."""
    return state_buffers(x, ("r", "k", "a", "b"), tile(x.v.shape[-1]), _chunks_per_state(x), "dstates")


def residual_axes(ctx: Context[RWKV7Inputs, RecurrenceConfig]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _state_buffers(ctx.shapes).axes | {"scores": "b chunk h x y"}
    if _has_split_bwd(ctx.shapes):
        axes["U"] = "b t h v"
    if num_splits_of(ctx) > 1:
        axes |= {"M": "b split h k j", "reads": "b t h k"}
    return axes


def _chunk_state(
    plan: ChunkPlan, x: RWKV7Inputs, A: jax.Array | None, o_zero_state: bool
) -> dict[str, jax.Array]:
    """M_, N_ and reads_ of all stretches, and with ``own`` their outputs own_: see
    common/state_passing_host.py."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    num_splits, BV = plan.config.num_splits, plan.config.BV
    options = plan.options | dict(
        grid=(plan.NV + -(-K // BV), H, B * num_splits),
        c=plan.config.replaced(unmasked=plan.config.unmasked and K % BV == 0),
    )
    return launch(
        rwkv7_chunk_state_kernel,
        token_arguments(x) | dict(A_=given(A, unused())) | plan.ranges,
        dict(
            q_entry_=like(x.r, plan.store),
            transition_=jax.ShapeDtypeStruct((B * num_splits, H, K, K), jnp.float32),
            update_=jax.ShapeDtypeStruct((B * num_splits, H, K, V), jnp.float32),
            o_zero_state_=result(
                o_zero_state, x.v.shape, jnp.float32
            ),  # rounded once, with what is added to it
        ),
        NV=plan.NV,
        O_ZERO_STATE=o_zero_state,
        **options,
    )


def fwd(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    # the transfer kernel's two walks are all there are; in float32 large heads leave no registers for that
    is_single_pass = not ctx.save_residuals and (has_bf16_dots(x) or K <= 64)
    passes = 2 if is_single_pass else 1
    num_splits = local_num_splits(ctx, passes)
    shard, final = shard_of(ctx.cp, x.segment_ids), None
    h0, residuals, A = x.initial_state, {}, _precompute_A(ctx, x, num_splits)
    if num_splits_of(ctx, passes) > 1:
        transfer = make_plan("chunk_state", LAUNCH, ctx, x, num_splits, _has_precomputed_A(x))
        chunk_state = _chunk_state(transfer, x, A, o_zero_state=is_single_pass)
        h0, final = split_h0(chunk_state["transition_"], chunk_state["update_"], h0, num_splits, shard)
        if is_single_pass:
            o = add_entry_output(
                transfer, chunk_state["o_zero_state_"], chunk_state["q_entry_"], h0, x.v.dtype
            )
            return Outputs(o, final), {}
        residuals = {
            "M": chunk_state["transition_"].reshape(B, num_splits, H, K, K),
            "reads": chunk_state["q_entry_"],
        }
    buffers, save_v_new = _state_buffers(x), ctx.save_residuals and _has_split_bwd(x)
    plan = make_plan("fwd", LAUNCH, ctx, x, num_splits, _has_precomputed_A(x))
    out = dict(
        o_=like(x.v),
        ht_=like(h0),
        **buffers.shapes(x.r, V, plan, ctx.save_residuals),
        made_=result(
            ctx.save_residuals and A is None, (*plan.chunks, H, NUM_A_TILES.value * CHUNK, CHUNK), plan.store
        ),
        v_new_=result(save_v_new, x.v.shape, plan.store),
    )
    made = launch(
        rwkv7_fwd_kernel,
        token_arguments(x) | dict(A_=given(A, unused()), h0_=h0) | plan.ranges,
        out,
        SAVE_RESIDUALS=ctx.save_residuals,
        NUM_BUFFERS=buffers.num_buffers,
        CHUNKS_PER_STATE=buffers.chunks_per_state,
        SAVE_V_NEW=save_v_new,
        **plan.options,
    )
    final = made["ht_"] if final is None else final
    outputs = Outputs(made["o_"], final)
    residuals |= buffers.residuals(made) | {"scores": given(A, made["made_"])}
    if save_v_new:
        residuals["U"] = made["v_new_"]
    return outputs, residuals if ctx.save_residuals else {}


def _is_key_major(plan: ChunkPlan, x: RWKV7Inputs, do: jax.Array) -> bool:
    """Whether the backward's tiles have keys as rows: chunk_bwd_key_major.py.

    Measured on an H200, backward alone, usual tiles and these: bounded decays 2.6 and 2.3 ms, any decay 5.8
    and 3.6 at strong, 3.3 and 2.4 at weak ones.
    """
    return plan.config.BK == 64 and can_be_key_major(x, do)


def _bwd_fused(
    plan: ChunkPlan, x: RWKV7Inputs, residuals: Residuals, do: jax.Array, dht: jax.Array
) -> RWKV7Inputs:
    """All gradients in one kernel."""
    buffers = _state_buffers(x)
    dr, dw, dk, da, db = partial_shapes(plan.NV, x.r, x.w, x.k, x.a, x.b)
    made = launch(
        rwkv7_bwd_kernel,
        token_arguments(x)
        | dict(do_=do, dht_=dht, A_=residuals["scores"])
        | buffers.operands(residuals)
        | plan.ranges,
        dict(dr_=dr, dw_=dw, dk_=dk, dv_=like(x.v), da_=da, db_=db, dh0_=like(dht)),
        aliases=buffers.aliases(("dr_", "dk_", "da_", "db_")),
        NUM_BUFFERS=buffers.num_buffers,
        NUM_ALIASED=buffers.num_aliased,
        KEY_MAJOR=_is_key_major(plan, x, do),
        **plan.options,
    )
    return RWKV7Inputs(
        r=sum_value_blocks(made["dr_"], x.r),
        w=sum_value_blocks(made["dw_"], x.w),
        k=sum_value_blocks(made["dk_"], x.k),
        v=made["dv_"],
        a=sum_value_blocks(made["da_"], x.a),
        b=sum_value_blocks(made["db_"], x.b),
        initial_state=made["dh0_"],
    )


def _is_pair_tile(plan: ChunkPlan, x: RWKV7Inputs, do: jax.Array) -> bool:
    """Whether the gradients kernel takes two chunks as one tile where decays are bounded:
    chunk_bwd_split_pair.py.

    Its tiles hold two arrays each, so these have one dtype.
    """
    same = all(array.dtype == plan.store for array in (x.r, x.k, x.v, x.a, x.b, do))
    return _chunks_per_state(x) == 2 and same and has_wgmma()


def _bwd_split(
    plan: ChunkPlan, x: RWKV7Inputs, residuals: Residuals, do: jax.Array, dht: jax.Array
) -> RWKV7Inputs:
    """The carry kernel, then the gradients kernel."""
    V, dstates = x.v.shape[-1], _dstate_buffers(x)
    carried = launch(
        rwkv7_bwd_dh_kernel,
        token_arguments(x) | dict(do_=do, dht_=dht, A_=residuals["scores"]) | plan.ranges,
        dict(dv_=like(x.v), dh0_=like(dht), da_read_=like(x.v, plan.store)) | dstates.shapes(x.r, V, plan),
        NUM_BUFFERS=dstates.num_buffers,
        CHUNKS_PER_STATE=dstates.chunks_per_state,
        **plan.options,
    )
    given = dict(do_=do, v_new_=residuals["U"], da_read_=carried["da_read_"], states_=residuals["states"])
    given |= {name: carried[name] for name in dstates.names}
    made = launch_bwd_grads(plan, x, given, dstates, _is_pair_tile(plan, x, do))
    return RWKV7Inputs(
        r=made["dr_"],
        w=made["dw_"],
        k=made["dk_"],
        v=carried["dv_"],
        a=made["da_"],
        b=made["db_"],
        initial_state=carried["dh0_"],
    )


def bwd(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV7Inputs,
    residuals: Residuals,
    cotangents: Outputs,
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    do, dht = cotangents
    (H, K), V, num_splits = x.r.shape[2:], x.v.shape[-1], local_num_splits(ctx)
    two = _has_split_bwd(x)
    plan = make_plan("bwd_dh" if two else "bwd", LAUNCH, ctx, x, num_splits, _has_precomputed_A(x))
    shard = shard_of(ctx.cp, x.segment_ids)
    if num_splits_of(ctx) > 1:
        dht = split_dht(plan, residuals["M"].reshape(-1, H, K, K), residuals["reads"], do, dht, shard)
    plan = with_cotangent_scale(plan, x, do, dht)
    gradients = (_bwd_split if two else _bwd_fused)(plan, x, residuals, do, dht)
    first = gradients.initial_state.reshape(-1, num_splits, H, K, V)[:, 0]
    if shard is not None:
        first = jnp.where(shard.is_first, first, 0)
    return gradients._replace(initial_state=first)
