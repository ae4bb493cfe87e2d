"""RWKV-7, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/ops/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ....core.call import Call, Outputs, Recurrence, RWKV7Inputs
from ....core.sequence import part_of
from ...plan.chunked import (
    CHUNK,
    LaunchTable,
    Plan,
    launch_options,
    make_plan,
    partial_shapes,
    stretches_here,
    stretches_of,
    tile,
    total,
)
from ...plan.kept_states import KeptStates, keep_states, result
from ...plan.stretches import enter, enter_backward
from ...run.triton import launch
from .backward import rwkv7_bwd_kernel, rwkv7_carry_kernel
from .forward import rwkv7_fwd_kernel, rwkv7_transfer_kernel
from .gradients import rwkv7_gradients_kernel

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("forward", 64): (64, 2, 3),
    ("transfer", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("transfer", 128): (128, 8, 3),
    ("carry", 128): (32, 2, 3),
    ("gradients", 128): (64, 2, 1),  # the first number is the block of keys: a program holds all values
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 8, 1),
    # not measured: what fits and spills least (tests/compile/resources.py)
    ("forward", 128, "float32"): (32, 8, 1),
    ("carry", 128, "float32"): (32, 8, 1),
    ("gradients", 128, "float32"): (32, 8, 1),
    ("backward", 64, "small"): (32, 4, 1),
    ("forward", 128, "small"): (128, 8, 2),
    ("transfer", 128, "small"): (64, 8, 2),
    ("backward", 128, "small"): (16, 8, 1),
    ("forward", 64, "small float32"): (32, 4, 1),
    ("transfer", 64, "small float32"): (32, 4, 1),
    ("backward", 64, "small float32"): (16, 8, 1),
    ("forward", 128, "small float32"): (32, 8, 1),
    ("transfer", 128, "small float32"): (32, 8, 1),
    ("carry", 128, "small float32"): (32, 8, 1),
    ("gradients", 128, "small float32"): (32, 8, 1),
    ("backward", 128, "small float32"): (16, 8, 1),
    ("forward", 256, "small float32"): (16, 8, 1),
    ("backward", 256, "small float32"): (16, 8, 1),
}


def _two_kernels(x: RWKV7Inputs) -> bool:
    """Whether the backward takes two kernels: see backward.py."""
    return 64 < x.r.shape[-1] <= 128 and x.v.shape[-1] <= 128


def _states(x: RWKV7Inputs) -> KeptStates:
    """How the forward keeps states, and where the backward finds them."""
    return keep_states(LAUNCH, x, () if _two_kernels(x) else ("r", "k", "a", "b"))


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _states(call.inputs).axes | {"inverses": "b chunk h x y"}  # (I - A_ab)^-1
    if _two_kernels(call.inputs):
        axes["U"] = "b t h v"
    if stretches_of(call) > 1:
        axes |= {"M": "b stretch h k j", "reads": "b t h k"}
    return axes


def _like(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _tokens(x: RWKV7Inputs) -> tuple[jax.Array, ...]:
    return x.r, x.w, x.k, x.v, x.a, x.b


def _transfer(plan: Plan, x: RWKV7Inputs):
    """(M, N, reads) of all stretches: see plan/stretches.py."""
    (B, _, H, K), V, BV = x.r.shape, x.v.shape[-1], plan.options["BV"]
    out = (
        _like(x.r, plan.store),
        jax.ShapeDtypeStruct((B * plan.splits, H, K, K), jnp.float32),
        jax.ShapeDtypeStruct((B * plan.splits, H, K, V), jnp.float32),
    )
    options = plan.options | dict(
        grid=(plan.parts + -(-K // BV), H, B * plan.splits),
        EVEN=plan.options["EVEN"] and K % BV == 0,
        PARTS=plan.parts,
    )
    reads, M, N = launch(rwkv7_transfer_kernel, *_tokens(x), *plan.ranges, *plan.lengths, out=out, **options)
    return M, N, reads


def forward(call: Call[Recurrence], x: RWKV7Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V, splits = x.r.shape, x.v.shape[-1], stretches_here(call)
    part, final_state = part_of(call, x.segment_ids), None
    states, keep_u, s0 = _states(x), call.keep and _two_kernels(x), x.initial_state
    plan = make_plan("forward", LAUNCH, call, x, splits)
    kept: dict[str, jax.Array] = {}
    if stretches_of(call) > 1:
        M, N, reads = _transfer(make_plan("transfer", LAUNCH, call, x, splits), x)
        s0, final_state = enter(M, N, s0, splits, part)
        kept = {"M": M.reshape(B, splits, H, K, K), "reads": reads}
    inverses = result(call.keep, (*plan.chunks, H, CHUNK, CHUNK), plan.store)
    out = (
        _like(x.v),
        _like(s0),
        *states.shapes(x.r, V, plan.chunks, call.keep),
        inverses,
        result(keep_u, x.v.shape, plan.store),
    )
    options = plan.options | dict(KEEP=call.keep, ARRAYS=states.arrays, KEEP_U=keep_u)
    y, final, *made, inverses, u = launch(
        rwkv7_fwd_kernel, *_tokens(x), s0, *plan.ranges, *plan.lengths, out=out, **options
    )
    kept |= dict(zip(states.axes, made)) | {"inverses": inverses, "U": u}
    if final_state is None:
        final_state = final.reshape(-1, splits, H, K, V)[:, -1]
    return Outputs(y, final_state), kept if call.keep else {}


def _backward_by_two(
    plan: Plan, x: RWKV7Inputs, kept: dict[str, jax.Array], do: jax.Array, ds: jax.Array
) -> RWKV7Inputs:
    """The carry kernel, then the gradients kernel, for large heads."""
    K, V, states = x.r.shape[-1], x.v.shape[-1], kept["states"]
    made = (_like(x.v), _like(ds), _like(states), _like(x.v, plan.store))
    before = (*_tokens(x), *plan.ranges, do, ds, kept["inverses"])
    dv, ds0, dstates, dz = launch(rwkv7_carry_kernel, *before, *plan.lengths, out=made, **plan.options)
    BK, num_warps, num_stages = launch_options(LAUNCH, "gradients", K, plan.options["HALF"])
    blocks, number = -(-K // BK), -(-plan.lengths[1] // CHUNK)
    options = plan.options | dict(
        grid=(number * blocks, *plan.options["grid"][1:]),
        num_warps=num_warps,
        num_stages=num_stages,
        BK=BK,
        BV=tile(V),
        BLOCKS=blocks,
        EVEN=plan.options["EVEN"] and tile(V) == V,
    )
    operands = (*_tokens(x), *plan.ranges, do, kept["U"], dz, states, dstates, *plan.lengths)
    out = tuple(map(_like, (x.r, x.w, x.k, x.a, x.b)))
    dr, dw, dk, da, db = launch(rwkv7_gradients_kernel, *operands, out=out, **options)
    return RWKV7Inputs(dr, dw, dk, dv, da, db, ds0)


def backward(
    call: Call[Recurrence], x: RWKV7Inputs, kept: dict[str, jax.Array], cotangents: Outputs
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    do, ds = cotangents
    (H, K), V, splits = x.r.shape[2:], x.v.shape[-1], stretches_here(call)
    two = _two_kernels(x)
    plan = make_plan("carry" if two else "backward", LAUNCH, call, x, splits)
    part = part_of(call, x.segment_ids)
    if stretches_of(call) > 1:
        ds = enter_backward(plan, kept["M"].reshape(-1, H, K, K), kept["reads"], do, ds, part)
    if two:
        gradients = _backward_by_two(plan, x, kept, do, ds)
    else:
        states = _states(x)
        dr, dw, dk, da, db = partial_shapes(plan.parts, x.r, x.w, x.k, x.a, x.b)
        before = (*_tokens(x), *plan.ranges, do, ds)
        operands = (*before, *states.operands([kept[name] for name in states.axes]), kept["inverses"])
        options = plan.options | dict(ARRAYS=states.arrays, TAKEN=states.taken)
        dr, dw, dk, dv, da, db, ds0 = launch(
            rwkv7_bwd_kernel,
            *operands,
            *plan.lengths,
            out=(dr, dw, dk, _like(x.v), da, db, _like(ds)),
            aliases=states.aliases(len(before), (0, 2, 4, 5)),
            **options,
        )
        parts = (total(dr, x.r), total(dw, x.w), total(dk, x.k), dv, total(da, x.a), total(db, x.b))
        gradients = RWKV7Inputs(*parts, ds0)
    first = gradients.initial_state.reshape(-1, splits, H, K, V)[:, 0]
    if part is not None:
        first = jnp.where(part.is_first, first, 0)
    return gradients._replace(initial_state=first)
