"""RWKV-6, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/ops/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ....core.call import Call, Outputs, Recurrence, RWKV6Inputs
from ....core.sequence import part_of
from ...plan.chunked import (
    ChunkedPlan,
    LaunchTable,
    has_half,
    launch_options,
    make_plan,
    partial_shapes,
    scaled,
    stretches_here,
    stretches_of,
    takes_rows,
    total,
)
from ...plan.kept_states import KeptStates, keep_states
from ...plan.shapes import like
from ...plan.stretches import enter, enter_backward
from ...run.triton import launch
from .backward import rwkv6_bwd_kernel
from .forward import rwkv6_fwd_kernel
from .transfer import rwkv6_transfer_kernel

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
    ("forward", 64, "float32"): (64, 4, 3),
    ("backward", 64, "float32"): (64, 8, 3),
    ("forward", 128, "float32"): (128, 8, 1),
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
    most = launch_options(LAUNCH, "backward", x.r.shape[-1], has_half(x))[0]
    return keep_states(x, ("r", "k", "v", "w"), most)


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _states(call.inputs).axes
    return axes | {"M": "b stretch h k", "reads": "b t h k"} if stretches_of(call) > 1 else axes


def _tokens(x: RWKV6Inputs) -> dict[str, jax.Array]:
    """The kernels' arguments r_ to u_; u for each row, [B, H, K], as they read it."""
    u = jnp.broadcast_to(x.u, (x.r.shape[0], *x.u.shape))
    return dict(r_=x.r, k_=x.k, v_=x.v, w_=x.w, u_=u)


def _transfer(plan: ChunkedPlan, x: RWKV6Inputs) -> dict[str, jax.Array]:
    """M_, N_ and reads_ of all stretches: see plan/stretches.py."""
    (B, _, H, K), V, splits = x.r.shape, x.v.shape[-1], plan.mode.splits
    ranges = {name: plan.ranges[name] for name in ("seg_", "T", "span")}
    # exact at any decay, so that there is one form only
    options = plan.options | dict(mode=plan.mode.replaced(any_decay=True))
    return launch(
        rwkv6_transfer_kernel,
        dict(r_=x.r, k_=x.k, v_=x.v, w_=x.w) | ranges,
        dict(
            reads_=like(x.r, plan.store),
            M_=jax.ShapeDtypeStruct((B * splits, H, K), jnp.float32),
            N_=jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32),
        ),
        **options,
    )


def forward(call: Call[Recurrence], x: RWKV6Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V, splits = x.r.shape, x.v.shape[-1], stretches_here(call)
    part, final = part_of(call, x.segment_ids), None
    states, s0 = _states(x), x.initial_state
    plan = make_plan("forward", LAUNCH, call, x, splits)
    kept: dict[str, jax.Array] = {}
    if stretches_of(call) > 1:
        whole = _transfer(make_plan("transfer", LAUNCH, call, x, splits), x)
        s0, final = enter(whole["M_"], whole["N_"], s0, splits, part)
        kept = {"M": whole["M_"].reshape(B, splits, H, K), "reads": whole["reads_"]}
    made = launch(
        rwkv6_fwd_kernel,
        _tokens(x) | dict(s0_=s0) | plan.ranges,
        dict(y_=like(x.v), sT_=like(s0, jnp.float32)) | states.shapes(x.r, V, plan, call.keep),
        KEEP=call.keep,
        ARRAYS=states.arrays,
        **plan.options,
    )
    outputs = Outputs(made["y_"], made["sT_"] if final is None else final)
    return outputs, kept | states.kept(made) if call.keep else {}


def _keys_as_rows(plan: ChunkedPlan, x: RWKV6Inputs, do: jax.Array) -> bool:
    """Whether the backward's tiles have keys as rows: keys_as_rows.py.

    Measured on an H200, backward alone, usual tiles and these: heads of 64 with bounded decays 2.3 and 1.3
    ms, any decay 3.5 and 1.7 at strong, 2.5 and 1.6 at weak ones; heads of 128 with bounded decays 5.0 and
    3.9, with any decay 7.1 and 10.0, for the form spills there.
    """
    fits = plan.mode.BK == 64 or (plan.mode.BK == 128 and not plan.mode.any_decay)
    return fits and takes_rows(x, do)


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
    plan = scaled(plan, x, do, ds)
    dr, dk, dw = partial_shapes(plan.parts, x.r, x.k, x.w)
    (dv,) = partial_shapes(1, x.v)
    # one for each block of values and stretch: no atomics
    du = jax.ShapeDtypeStruct((plan.parts, ds.shape[0], H, K), jnp.float32)
    made = launch(
        rwkv6_bwd_kernel,
        _tokens(x) | dict(dy_=do, dsT_=ds) | states.operands(kept) | plan.ranges,
        dict(dr_=dr, dk_=dk, dv_=dv, dw_=dw, du_=du, ds0_=like(ds, jnp.float32)),
        aliases=states.aliases(("dr_", "dk_", "dv_", "dw_")),
        ARRAYS=states.arrays,
        TAKEN=states.taken,
        KEYS_AS_ROWS=_keys_as_rows(plan, x, do),
        **plan.options,
    )
    ds0 = made["ds0_"].reshape(-1, splits, H, K, V)[:, 0]
    if part is not None:
        ds0 = jnp.where(part.is_first, ds0, 0)
    return RWKV6Inputs(
        r=total(made["dr_"], x.r),
        k=total(made["dk_"], x.k),
        v=made["dv_"][0],
        w=total(made["dw_"], x.w),
        u=jnp.sum(made["du_"].reshape(plan.parts, B, -1, H, K), (0, 2)),
        initial_state=ds0,
    )
