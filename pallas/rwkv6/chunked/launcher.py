"""RWKV-6, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/ops/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ....core.call import Call, Outputs, Recurrence, RWKV6Inputs
from ....core.sequence import part_of
from ...plan.chunked import LaunchTable, Plan, make_plan, partial_shapes, stretches_here, stretches_of, total
from ...plan.kept_states import KeptStates, keep_states
from ...plan.stretches import enter, enter_backward
from ...run.triton import launch
from .backward import rwkv6_bwd_kernel
from .forward import rwkv6_fwd_kernel, rwkv6_transfer_kernel

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


def _states(x: RWKV6Inputs) -> KeptStates:
    """How the forward keeps states, and where the backward finds them."""
    return keep_states(LAUNCH, x, ("r", "k", "v", "w"))


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _states(call.inputs).axes
    return axes | {"M": "b stretch h k", "reads": "b t h k"} if stretches_of(call) > 1 else axes


def _bonus(x: RWKV6Inputs) -> jax.Array:
    """u for each row, [B, H, K], as the kernels read it."""
    return jnp.broadcast_to(x.u, (x.r.shape[0], *x.u.shape))


def _transfer(plan: Plan, x: RWKV6Inputs):
    """(M, N, reads) of all stretches: see plan/stretches.py."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    out = (
        jax.ShapeDtypeStruct(x.r.shape, plan.store),
        jax.ShapeDtypeStruct((B * plan.splits, H, K), jnp.float32),
        jax.ShapeDtypeStruct((B * plan.splits, H, K, V), jnp.float32),
    )
    options = {name: value for name, value in plan.options.items() if name not in ("ANY", "VAR")}
    operands = (x.r, x.k, x.v, x.w, plan.ranges[0], *plan.lengths)
    reads, M, N = launch(rwkv6_transfer_kernel, *operands, out=out, **options)
    return M, N, reads


def forward(call: Call[Recurrence], x: RWKV6Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V, splits = x.r.shape, x.v.shape[-1], stretches_here(call)
    part, final_state = part_of(call, x.segment_ids), None
    states, s0 = _states(x), x.initial_state
    plan = make_plan("forward", LAUNCH, call, x, splits)
    kept: dict[str, jax.Array] = {}
    if stretches_of(call) > 1:
        M, N, reads = _transfer(make_plan("transfer", LAUNCH, call, x, splits), x)
        s0, final_state = enter(M, N, s0, splits, part)
        kept = {"M": M.reshape(B, splits, H, K), "reads": reads}
    out = (
        jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
        jax.ShapeDtypeStruct(s0.shape, jnp.float32),
        *states.shapes(x.r, V, plan.chunks, call.keep),
    )
    operands = (x.r, x.k, x.v, x.w, _bonus(x), s0, *plan.ranges, *plan.lengths)
    options = plan.options | dict(KEEP=call.keep, ARRAYS=states.arrays)
    y, final, *made = launch(rwkv6_fwd_kernel, *operands, out=out, **options)
    kept |= dict(zip(states.axes, made))
    if final_state is None:
        final_state = final.reshape(-1, splits, H, K, V)[:, -1]
    return Outputs(y, final_state), kept if call.keep else {}


def backward(
    call: Call[Recurrence], x: RWKV6Inputs, kept: dict[str, jax.Array], cotangents: Outputs
) -> RWKV6Inputs:
    """Gradients of all inputs, that of u per row."""
    do, ds = cotangents
    (B, _, H, K), V, splits = x.r.shape, x.v.shape[-1], stretches_here(call)
    states = _states(x)
    plan = make_plan("backward", LAUNCH, call, x, splits)
    part = part_of(call, x.segment_ids)
    if stretches_of(call) > 1:
        ds = enter_backward(plan, kept["M"].reshape(-1, H, K), kept["reads"], do, ds, part)
    dr, dk, dw = partial_shapes(plan.parts, x.r, x.k, x.w)
    (dv,) = partial_shapes(1, x.v)
    # one for each block of values and stretch: no atomics
    partial_du = jax.ShapeDtypeStruct((plan.parts, ds.shape[0], H, K), jnp.float32)
    before = (x.r, x.k, x.v, x.w, _bonus(x), *plan.ranges, do, ds)
    operands = (*before, *states.operands([kept[name] for name in states.axes]), *plan.lengths)
    dr, dk, dv, dw, du, ds0 = launch(
        rwkv6_bwd_kernel,
        *operands,
        out=(dr, dk, dv, dw, partial_du, jax.ShapeDtypeStruct(ds.shape, jnp.float32)),
        aliases=states.aliases(len(before), (0, 1, 2, 3)),
        ARRAYS=states.arrays,
        TAKEN=states.taken,
        **plan.options,
    )
    du = jnp.sum(du.reshape(plan.parts, B, -1, H, K), (0, 2))
    ds0 = ds0.reshape(-1, splits, H, K, V)[:, 0]
    if part is not None:
        ds0 = jnp.where(part.is_first, ds0, 0)
    return RWKV6Inputs(total(dr, x.r), total(dk, x.k), dv[0], total(dw, x.w), du, ds0)
