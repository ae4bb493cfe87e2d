"""Calls the kernel that computes gradients of r, w, k, a and b from stored states and state gradients: for
the chunked op's backward in two kernels, and for the recurrent op.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.types import RecurrenceConfig, RWKV7Inputs
from ..backend.triton import triton_call
from ..common.chunk_plan import CHUNK, ChunkPlan, plan_pass, with_cotangent_scale
from ..common.chunk_variants import BlockLaunch
from ..common.shapes import like, tile, without
from ..common.state_buffers_host import StateBuffers
from .chunk_bwd_split import GradsSaved, rwkv7_bwd_grads_kernel
from .chunk_tokens import KeyGrads
from .variants import GRADS_VALUES, from_scans_launch


def bwd_grads(
    plan: ChunkPlan, x: RWKV7Inputs, saved: GradsSaved, dstates: StateBuffers, launch: BlockLaunch
) -> KeyGrads:
    """Gradients of r, w, k, a and b."""
    K, V, c = x.r.shape[-1], x.v.shape[-1], plan.config
    BK, chunks = min(launch.block, tile(K)), dstates.chunks_per_state
    num_blocks, ((number, H, splits), index) = -(-K // BK), plan.by_chunks(chunks)
    return triton_call(
        rwkv7_bwd_grads_kernel,
        without(x, "initial_state", "segment_ids", "cu_seqlens"),
        saved,
        index,
        out=KeyGrads(r=like(x.r), w=like(x.w), k=like(x.k), a=like(x.a), b=like(x.b)),
        config=c.replace(
            BK=BK,
            BV=tile(V) if chunks > 1 else min(GRADS_VALUES, tile(V)),
            # programs take all chunks of a state, also those beyond the end
            unmasked=c.unmasked and tile(V) == V and x.r.shape[1] % (chunks * CHUNK) == 0,
            num_blocks=num_blocks,
            num_buffers=dstates.num_buffers,
            late_loads=launch.max_registers > 0,
        ),
        grid=(number * num_blocks, H, splits),
        launch=launch.launch,
        aliases=dstates.aliases("saved.dstates", ("r", "k", "a", "b"))
        | ({} if saved.grads is None else {f"saved.grads.{name}": name for name in KeyGrads._fields}),
        in_place=saved.grads is not None,
    )


def plan_from_scans(
    ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs, do: jax.Array, dht: jax.Array
) -> ChunkPlan:
    """The pass of `bwd_grads_from_scans`, from the cotangents of outputs and of final states [N, H, K, V]."""
    launch = from_scans_launch(ctx.gpu, x.r.shape[-1])
    plan = plan_pass(ctx, x, launch, bf16_dots=False, from_scans=True)
    return with_cotangent_scale(plan, x, do, dht)


def bwd_grads_from_scans(
    ctx: Context[RWKV7Inputs, RecurrenceConfig], plan: ChunkPlan, x: RWKV7Inputs, saved: GradsSaved
) -> KeyGrads:
    """Gradients of r, w, k, a and b with float32 operands, from the arrays of the recurrent kernels.

    Args:
        ctx: the call.
        plan: `plan_from_scans`.
        x: inputs.
        saved: do in its dtype; v_new = a^T h and da_read = b^T dh of each token; states at the starts and
            state gradients at the ends of chunks, [.., H, V, K]; all but do float32.
    """
    launch = from_scans_launch(ctx.gpu, x.r.shape[-1])
    return bwd_grads(plan, x, saved, StateBuffers(0, 0, 1, jnp.float32), launch)
