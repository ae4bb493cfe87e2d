"""Launches the kernel that makes the gradients of r, w, k, a, b where states, and their gradients, are kept:
for the chunked form's backward of two kernels, and for the recurrent form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl

from ...core.context import Context
from ...core.types import RecurrenceConfig, RWKV7Inputs
from ..backend.triton import launch
from ..common.chunk_host import CHUNK, ChunkPlan, launch_options, make_plan, with_cotangent_scale
from ..common.shapes import like, tile
from ..common.state_buffers_host import StateBuffers
from .chunk_bwd_split import rwkv7_bwd_grads_kernel
from .chunk_launches import LAUNCH, VALUES, token_arguments


def launch_bwd_grads(
    plan: ChunkPlan,
    x: RWKV7Inputs,
    given: dict[str, jax.Array],
    dstates: StateBuffers,
    pair_tile: bool = False,
    from_scans: bool = False,
) -> dict[str, jax.Array]:
    """dr_, dw_, dk_, da_ and db_ from ``given``, the kernel's other arguments; ``at_once`` and ``leaving`` as
    it says.
    """
    K, V, bf16_dots = x.r.shape[-1], x.v.shape[-1], plan.config.operand == tl.bfloat16
    BK, num_warps, num_stages = launch_options(LAUNCH, "bwd_grads", K, bf16_dots)
    BK = min(BK, tile(K))
    blocks, ((number, *others), owner) = -(-K // BK), plan.by_chunks(dstates.chunks_per_state)
    # a program takes all chunks that share a state, also where the last of them is not there
    even = plan.config.unmasked and tile(V) == V and x.r.shape[1] % (dstates.chunks_per_state * CHUNK) == 0
    return launch(
        rwkv7_bwd_grads_kernel,
        token_arguments(x) | given | dict(chunk_indices_=owner) | plan.ranges,
        dict(dr_=like(x.r), dw_=like(x.w), dk_=like(x.k), da_=like(x.a), db_=like(x.b)),
        grid=(number * blocks, *others),
        num_warps=num_warps,
        num_stages=num_stages,
        c=plan.config.replaced(
            BK=BK, BV=tile(V) if dstates.chunks_per_state > 1 else min(VALUES, tile(V)), unmasked=even
        ),
        aliases=dstates.aliases(("dr_", "dk_", "da_", "db_")),
        NK=blocks,
        NUM_BUFFERS=dstates.num_buffers,
        NUM_ALIASED=dstates.num_aliased,
        CHUNKS_PER_STATE=dstates.chunks_per_state,
        FROM_SCANS=from_scans,
        PAIR_TILE=pair_tile,
        # so that a multiprocessor holds three programs in place of two; with any decay 168 would spill
        MAX_REGISTERS=168 if pair_tile and not plan.config.unsafe_gate else 0,
    )


def bwd_grads_from_scans(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV7Inputs,
    do: jax.Array,
    v_new: jax.Array,
    da_read: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    ds: jax.Array,
) -> tuple[jax.Array, ...]:
    """dr, dw, dk, da, db with float32 operands, from what the walks of the recurrent form keep.

    Args:
        call: the call.
        x: its inputs in whole chunks, [B, T, H, K] and [B, T, H, V], not packed.
        do: cotangent of o, like v.
        U: a^T S of each token, float32, like v.
        dZ: b^T D of each token, likewise.
        states: that enter chunks, [B, T / 16, H, V, K], float32.
        dstates: gradients of those that leave them, likewise.
        ds: cotangents of the last states, [N, H, K, V].
    """
    plan = with_cotangent_scale(make_plan("bwd_grads", LAUNCH, ctx, x, bf16_dots=False), x, do, ds)
    buffer, none = StateBuffers(0, 0, 1, jnp.float32, "dstates"), jnp.zeros(1, jnp.float32)
    given = dict(do_=do, v_new_=v_new, da_read_=da_read, states_=states) | dict.fromkeys(buffer.names, none)
    made = launch_bwd_grads(plan, x, given | {buffer.names[0]: dstates}, buffer, from_scans=True)
    return made["dr_"], made["dw_"], made["dk_"], made["da_"], made["db_"]
