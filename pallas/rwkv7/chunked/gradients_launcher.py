"""Launches the kernel that makes the gradients of r, w, k, a, b where states, and their gradients, are kept:
for the chunked form's backward of two kernels, and for the recurrent form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton.language as tl

from ....core.call import Call, Recurrence, RWKV7Inputs
from ...plan.chunked import CHUNK, ChunkedPlan, launch_options, make_plan, scaled
from ...plan.kept_states import KeptStates
from ...plan.shapes import like, tile
from ...run.triton import launch
from .large_heads import rwkv7_gradients_kernel
from .launches import LAUNCH, VALUES, token_arguments


def launch_gradients(
    plan: ChunkedPlan,
    x: RWKV7Inputs,
    given: dict[str, jax.Array],
    dstates: KeptStates,
    at_once: bool = False,
    leaving: bool = False,
) -> dict[str, jax.Array]:
    """dr_, dw_, dk_, da_ and db_ from ``given``, the kernel's other arguments; ``at_once`` and ``leaving`` as
    it says.
    """
    K, V, half = x.r.shape[-1], x.v.shape[-1], plan.mode.operand == tl.bfloat16
    BK, num_warps, num_stages = launch_options(LAUNCH, "gradients", K, half)
    BK = min(BK, tile(K))
    blocks, ((number, *others), owner) = -(-K // BK), plan.by_chunks(dstates.every)
    # a program takes all chunks that share a state, also where the last of them is not there
    even = plan.mode.even and tile(V) == V and x.r.shape[1] % (dstates.every * CHUNK) == 0
    return launch(
        rwkv7_gradients_kernel,
        token_arguments(x) | given | dict(owner_=owner) | plan.ranges,
        dict(dr_=like(x.r), dw_=like(x.w), dk_=like(x.k), da_=like(x.a), db_=like(x.b)),
        grid=(number * blocks, *others),
        num_warps=num_warps,
        num_stages=num_stages,
        mode=plan.mode.replaced(BK=BK, BV=tile(V) if dstates.every > 1 else min(VALUES, tile(V)), even=even),
        aliases=dstates.aliases(("dr_", "dk_", "da_", "db_")),
        BLOCKS=blocks,
        ARRAYS=dstates.arrays,
        TAKEN=dstates.taken,
        EVERY=dstates.every,
        LEAVING=leaving,
        AT_ONCE=at_once,
        # so that a multiprocessor holds three programs in place of two; with any decay 168 would spill
        REGISTERS=168 if at_once and not plan.mode.any_decay else 0,
    )


def gradients_from_walks(
    call: Call[Recurrence],
    x: RWKV7Inputs,
    do: jax.Array,
    U: jax.Array,
    dZ: jax.Array,
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
    plan = scaled(make_plan("gradients", LAUNCH, call, x, half=False), x, do, ds)
    kept, none = KeptStates(0, 0, 1, jnp.float32, "dstates"), jnp.zeros(1, jnp.float32)
    given = dict(dy_=do, u_=U, dz_=dZ, states_=states) | dict.fromkeys(kept.names, none)
    made = launch_gradients(plan, x, given | {kept.names[0]: dstates}, kept, leaving=True)
    return made["dr_"], made["dw_"], made["dk_"], made["da_"], made["db_"]
