"""RWKV-6, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/core/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context, Outputs, RecurrenceConfig, RWKV6Inputs
from ...core.context_parallel import shard_of
from ..backend.triton import launch
from ..common.chunk_host import (
    ChunkPlan,
    LaunchTable,
    can_be_key_major,
    has_bf16_dots,
    launch_options,
    local_num_splits,
    make_plan,
    num_splits_of,
    partial_shapes,
    sum_value_blocks,
    with_cotangent_scale,
)
from ..common.shapes import like
from ..common.state_buffers_host import StateBuffers, state_buffers
from ..common.state_passing_host import split_dht, split_h0
from .chunk_bwd import rwkv6_bwd_kernel
from .chunk_fwd import rwkv6_fwd_kernel
from .chunk_state import rwkv6_chunk_state_kernel

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("fwd", 64): (64, 2, 3),
    ("chunk_state", 64): (64, 2, 3),
    ("bwd", 64): (64, 4, 3),
    ("fwd", 128): (128, 8, 3),
    ("chunk_state", 128): (128, 8, 3),
    ("bwd", 128): (128, 8, 1),
    ("fwd", 256): (16, 4, 1),
    ("bwd", 256): (16, 8, 1),
    ("fwd", 64, "float32"): (64, 4, 3),
    ("bwd", 64, "float32"): (64, 8, 3),
    ("fwd", 128, "float32"): (128, 8, 1),
    # not measured: what fits and spills least (tests/harness/resources.py)
    ("bwd", 64, "small"): (32, 4, 1),
    ("bwd", 128, "small"): (32, 8, 1),
    ("fwd", 64, "small float32"): (32, 4, 1),
    ("chunk_state", 64, "small float32"): (32, 4, 1),
    ("bwd", 64, "small float32"): (16, 8, 1),
    ("fwd", 128, "small float32"): (32, 8, 1),
    ("chunk_state", 128, "small float32"): (32, 8, 1),
    ("bwd", 128, "small float32"): (16, 4, 1),
    ("fwd", 256, "small float32"): (16, 8, 1),
    ("bwd", 256, "small float32"): (16, 8, 1),
}


def _state_buffers(x: RWKV6Inputs) -> StateBuffers:
    """How the forward keeps states, and where the backward finds them."""
    most = launch_options(LAUNCH, "bwd", x.r.shape[-1], has_bf16_dots(x))[0]
    return state_buffers(x, ("r", "k", "v", "w"), most)


def residual_axes(ctx: Context[RecurrenceConfig]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _state_buffers(ctx.inputs).axes
    return axes | {"M": "b stretch h k", "reads": "b t h k"} if num_splits_of(ctx) > 1 else axes


def _tokens(x: RWKV6Inputs) -> dict[str, jax.Array]:
    """The kernels' arguments r_ to u_; u for each row, [B, H, K], as they read it."""
    u = jnp.broadcast_to(x.u, (x.r.shape[0], *x.u.shape))
    return dict(r_=x.r, k_=x.k, v_=x.v, w_=x.w, u_=u)


def _chunk_state(plan: ChunkPlan, x: RWKV6Inputs) -> dict[str, jax.Array]:
    """M_, N_ and reads_ of all stretches: see common/state_passing_host.py."""
    (B, _, H, K), V, num_splits = x.r.shape, x.v.shape[-1], plan.config.num_splits
    index = {name: plan.ranges[name] for name in ("segment_bits_", "T", "split_len")}
    # exact at any decay, so that there is one form only
    options = plan.options | dict(c=plan.config.replaced(unsafe_gate=True))
    return launch(
        rwkv6_chunk_state_kernel,
        dict(r_=x.r, k_=x.k, v_=x.v, w_=x.w) | index,
        dict(
            q_entry_=like(x.r, plan.store),
            transition_=jax.ShapeDtypeStruct((B * num_splits, H, K), jnp.float32),
            update_=jax.ShapeDtypeStruct((B * num_splits, H, K, V), jnp.float32),
        ),
        **options,
    )


def fwd(ctx: Context[RecurrenceConfig], x: RWKV6Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V, num_splits = x.r.shape, x.v.shape[-1], local_num_splits(ctx)
    shard, final = shard_of(ctx, x.segment_ids), None
    buffers, h0 = _state_buffers(x), x.initial_state
    plan = make_plan("fwd", LAUNCH, ctx, x, num_splits)
    residuals: dict[str, jax.Array] = {}
    if num_splits_of(ctx) > 1:
        chunk_state = _chunk_state(make_plan("chunk_state", LAUNCH, ctx, x, num_splits), x)
        h0, final = split_h0(chunk_state["transition_"], chunk_state["update_"], h0, num_splits, shard)
        residuals = {
            "M": chunk_state["transition_"].reshape(B, num_splits, H, K),
            "reads": chunk_state["q_entry_"],
        }
    made = launch(
        rwkv6_fwd_kernel,
        _tokens(x) | dict(h0_=h0) | plan.ranges,
        dict(o_=like(x.v), ht_=like(h0, jnp.float32)) | buffers.shapes(x.r, V, plan, ctx.keep),
        SAVE_RESIDUALS=ctx.keep,
        NUM_BUFFERS=buffers.num_buffers,
        **plan.options,
    )
    outputs = Outputs(made["o_"], made["ht_"] if final is None else final)
    return outputs, residuals | buffers.residuals(made) if ctx.keep else {}


def _is_key_major(plan: ChunkPlan, x: RWKV6Inputs, do: jax.Array) -> bool:
    """Whether the backward's tiles have keys as rows: chunk_bwd_key_major.py.

    Measured on an H200, backward alone, usual tiles and these: heads of 64 with bounded decays 2.3 and 1.3
    ms, any decay 3.5 and 1.7 at strong, 2.5 and 1.6 at weak ones; heads of 128 with bounded decays 5.0 and
    3.9, with any decay 7.1 and 10.0, for the form spills there.
    """
    fits = plan.config.BK == 64 or (plan.config.BK == 128 and not plan.config.unsafe_gate)
    return fits and can_be_key_major(x, do)


def bwd(
    ctx: Context[RecurrenceConfig], x: RWKV6Inputs, residuals: dict[str, jax.Array], cotangents: Outputs
) -> RWKV6Inputs:
    """Gradients of all inputs, that of u per row."""
    do, dht = cotangents
    (B, _, H, K), V, num_splits = x.r.shape, x.v.shape[-1], local_num_splits(ctx)
    buffers = _state_buffers(x)
    plan = make_plan("bwd", LAUNCH, ctx, x, num_splits)
    shard = shard_of(ctx, x.segment_ids)
    if num_splits_of(ctx) > 1:
        dht = split_dht(plan, residuals["M"].reshape(-1, H, K), residuals["reads"], do, dht, shard)
    plan = with_cotangent_scale(plan, x, do, dht)
    dr, dk, dw = partial_shapes(plan.NV, x.r, x.k, x.w)
    (dv,) = partial_shapes(1, x.v)
    # one for each block of values and stretch: no atomics
    du = jax.ShapeDtypeStruct((plan.NV, dht.shape[0], H, K), jnp.float32)
    made = launch(
        rwkv6_bwd_kernel,
        _tokens(x) | dict(do_=do, dht_=dht) | buffers.operands(residuals) | plan.ranges,
        dict(dr_=dr, dk_=dk, dv_=dv, dw_=dw, du_=du, dh0_=like(dht, jnp.float32)),
        aliases=buffers.aliases(("dr_", "dk_", "dv_", "dw_")),
        NUM_BUFFERS=buffers.num_buffers,
        NUM_ALIASED=buffers.num_aliased,
        KEY_MAJOR=_is_key_major(plan, x, do),
        **plan.options,
    )
    ds0 = made["dh0_"].reshape(-1, num_splits, H, K, V)[:, 0]
    if shard is not None:
        ds0 = jnp.where(shard.is_first, ds0, 0)
    return RWKV6Inputs(
        r=sum_value_blocks(made["dr_"], x.r),
        k=sum_value_blocks(made["dk_"], x.k),
        v=made["dv_"][0],
        w=sum_value_blocks(made["dw_"], x.w),
        u=jnp.sum(made["du_"].reshape(plan.NV, B, -1, H, K), (0, 2)),
        initial_state=ds0,
    )
