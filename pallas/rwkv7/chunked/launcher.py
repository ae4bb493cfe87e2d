"""RWKV-7, chunked, on NVIDIA GPUs: the functions that the op loads (fla_jax/ops/op.py); they launch the
Triton kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ....core.call import Call, Outputs, Recurrence, RWKV7Inputs
from ....core.sequence import part_of
from ...plan.chunked import (
    CHUNK,
    ChunkedPlan,
    has_half,
    has_warp_groups,
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
from ...plan.shapes import given, like, result, tile, unused
from ...plan.stretches import enter, enter_backward, with_entering
from ...run.triton import launch
from .backward import rwkv7_bwd_kernel, rwkv7_carry_kernel
from .forward import rwkv7_fwd_kernel
from .gradients_launcher import launch_gradients
from .launches import LAUNCH, SCORES, token_arguments
from .scores import COUNT, rwkv7_scores_kernel
from .transfer import rwkv7_transfer_kernel


def _scored(x: RWKV7Inputs) -> bool:
    """Whether a kernel makes the scores of all chunks beforehand: scores.py."""
    return not has_half(x)


def _two_kernels(x: RWKV7Inputs) -> bool:
    """Whether the backward takes two kernels: see backward.py."""
    small = x.r.shape[-1] <= 64 and has_half(x)
    return not small and x.r.shape[-1] <= 128 and x.v.shape[-1] <= 128


def _every(x: RWKV7Inputs) -> int:
    """For how many chunks one state is kept: two, where the state between them is never made
    (large_heads.py), halve what two kernels hand each other. In float32 ptxas gives up on that.
    """
    return 2 if _two_kernels(x) and has_half(x) else 1


def _scores(call: Call[Recurrence], x: RWKV7Inputs, splits: int) -> jax.Array | None:
    """What scores.py makes of all chunks beforehand, [rows, chunks, H, 4 * 16, 16]."""
    if not _scored(x):
        return None
    plan, H = make_plan("forward", LAUNCH, call, x, splits, _scored(x)), x.r.shape[2]
    grid, owner = plan.by_chunks(1)
    made = launch(
        rwkv7_scores_kernel,
        {name: array for name, array in token_arguments(x).items() if name != "v_"}
        | dict(owner_=owner)
        | plan.ranges,
        dict(scores_=jax.ShapeDtypeStruct((*plan.chunks, H, COUNT.value * CHUNK, CHUNK), jnp.float32)),
        grid=grid,
        num_warps=SCORES[1],
        num_stages=1,
        mode=plan.mode.replaced(BK=min(SCORES[0], plan.mode.BK)),
    )
    return made["scores_"]


def _states(x: RWKV7Inputs) -> KeptStates:
    """How the forward keeps states, and where the backward finds them."""
    most = launch_options(LAUNCH, "backward", x.r.shape[-1], has_half(x))[0]
    return keep_states(x, () if _two_kernels(x) else ("r", "k", "a", "b"), most, _every(x))


def _state_gradients(x: RWKV7Inputs) -> KeptStates:
    """How the first of two backward kernels hands the gradients of states to the second."""
    return keep_states(x, ("r", "k", "a", "b"), tile(x.v.shape[-1]), _every(x), "dstates")


def kept_axes(call: Call[Recurrence]) -> dict[str, str]:
    """What the forward keeps, and its axes."""
    axes = _states(call.inputs).axes | {"scores": "b chunk h x y"}
    if _two_kernels(call.inputs):
        axes["U"] = "b t h v"
    if stretches_of(call) > 1:
        axes |= {"M": "b stretch h k j", "reads": "b t h k"}
    return axes


def _transfer(plan: ChunkedPlan, x: RWKV7Inputs, scores: jax.Array | None, own: bool) -> dict[str, jax.Array]:
    """M_, N_ and reads_ of all stretches, and with ``own`` their outputs own_: see plan/stretches.py."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    splits, BV = plan.mode.splits, plan.mode.BV
    options = plan.options | dict(
        grid=(plan.parts + -(-K // BV), H, B * splits),
        mode=plan.mode.replaced(even=plan.mode.even and K % BV == 0),
    )
    return launch(
        rwkv7_transfer_kernel,
        token_arguments(x) | dict(scores_=given(scores, unused())) | plan.ranges,
        dict(
            reads_=like(x.r, plan.store),
            M_=jax.ShapeDtypeStruct((B * splits, H, K, K), jnp.float32),
            N_=jax.ShapeDtypeStruct((B * splits, H, K, V), jnp.float32),
            own_=result(own, x.v.shape, jnp.float32),  # rounded once, with what is added to it
        ),
        PARTS=plan.parts,
        OWN=own,
        **options,
    )


def forward(call: Call[Recurrence], x: RWKV7Inputs) -> tuple[Outputs, dict[str, jax.Array]]:
    """Outputs and what the backward reads."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    # the transfer kernel's two walks are all there are; in float32 large heads leave no registers for that
    once = not call.keep and (has_half(x) or K <= 64)
    walks = 2 if once else 1
    splits = stretches_here(call, walks)
    part, final = part_of(call, x.segment_ids), None
    s0, kept, scores = x.initial_state, {}, _scores(call, x, splits)
    if stretches_of(call, walks) > 1:
        transfer = make_plan("transfer", LAUNCH, call, x, splits, _scored(x))
        whole = _transfer(transfer, x, scores, own=once)
        s0, final = enter(whole["M_"], whole["N_"], s0, splits, part)
        if once:
            y = with_entering(transfer, whole["own_"], whole["reads_"], s0, x.v.dtype)
            return Outputs(y, final), {}
        kept = {"M": whole["M_"].reshape(B, splits, H, K, K), "reads": whole["reads_"]}
    states, keep_u = _states(x), call.keep and _two_kernels(x)
    plan = make_plan("forward", LAUNCH, call, x, splits, _scored(x))
    out = dict(
        y_=like(x.v),
        sT_=like(s0),
        **states.shapes(x.r, V, plan, call.keep),
        made_=result(call.keep and scores is None, (*plan.chunks, H, COUNT.value * CHUNK, CHUNK), plan.store),
        u_=result(keep_u, x.v.shape, plan.store),
    )
    made = launch(
        rwkv7_fwd_kernel,
        token_arguments(x) | dict(scores_=given(scores, unused()), s0_=s0) | plan.ranges,
        out,
        KEEP=call.keep,
        ARRAYS=states.arrays,
        EVERY=states.every,
        KEEP_U=keep_u,
        **plan.options,
    )
    final = made["sT_"] if final is None else final
    outputs = Outputs(made["y_"], final)
    kept |= states.kept(made) | {"scores": given(scores, made["made_"]), "U": made["u_"]}
    return outputs, kept if call.keep else {}


def _keys_as_rows(plan: ChunkedPlan, x: RWKV7Inputs, do: jax.Array) -> bool:
    """Whether the backward's tiles have keys as rows: keys_as_rows.py.

    Measured on an H200, backward alone, usual tiles and these: bounded decays 2.6 and 2.3 ms, any decay 5.8
    and 3.6 at strong, 3.3 and 2.4 at weak ones.
    """
    return plan.mode.BK == 64 and takes_rows(x, do)


def _backward_by_one(
    plan: ChunkedPlan, x: RWKV7Inputs, kept: dict[str, jax.Array], do: jax.Array, ds: jax.Array
) -> RWKV7Inputs:
    """All gradients in one kernel."""
    states = _states(x)
    dr, dw, dk, da, db = partial_shapes(plan.parts, x.r, x.w, x.k, x.a, x.b)
    made = launch(
        rwkv7_bwd_kernel,
        token_arguments(x)
        | dict(dy_=do, dsT_=ds, scores_=kept["scores"])
        | states.operands(kept)
        | plan.ranges,
        dict(dr_=dr, dw_=dw, dk_=dk, dv_=like(x.v), da_=da, db_=db, ds0_=like(ds)),
        aliases=states.aliases(("dr_", "dk_", "da_", "db_")),
        ARRAYS=states.arrays,
        TAKEN=states.taken,
        KEYS_AS_ROWS=_keys_as_rows(plan, x, do),
        **plan.options,
    )
    return RWKV7Inputs(
        r=total(made["dr_"], x.r),
        w=total(made["dw_"], x.w),
        k=total(made["dk_"], x.k),
        v=made["dv_"],
        a=total(made["da_"], x.a),
        b=total(made["db_"], x.b),
        initial_state=made["ds0_"],
    )


def _at_once(plan: ChunkedPlan, x: RWKV7Inputs, do: jax.Array) -> bool:
    """Whether the gradients kernel takes two chunks as one tile where decays are bounded: bounded_pairs.py.

    Its tiles hold two arrays each, so these have one dtype.
    """
    same = all(array.dtype == plan.store for array in (x.r, x.k, x.v, x.a, x.b, do))
    return _every(x) == 2 and same and has_warp_groups()


def _backward_by_two(
    plan: ChunkedPlan, x: RWKV7Inputs, kept: dict[str, jax.Array], do: jax.Array, ds: jax.Array
) -> RWKV7Inputs:
    """The carry kernel, then the gradients kernel."""
    V, dstates = x.v.shape[-1], _state_gradients(x)
    carried = launch(
        rwkv7_carry_kernel,
        token_arguments(x) | dict(dy_=do, dsT_=ds, scores_=kept["scores"]) | plan.ranges,
        dict(dv_=like(x.v), ds0_=like(ds), dz_=like(x.v, plan.store)) | dstates.shapes(x.r, V, plan),
        ARRAYS=dstates.arrays,
        EVERY=dstates.every,
        **plan.options,
    )
    given = dict(dy_=do, u_=kept["U"], dz_=carried["dz_"], states_=kept["states"])
    given |= {name: carried[name] for name in dstates.names}
    made = launch_gradients(plan, x, given, dstates, _at_once(plan, x, do))
    return RWKV7Inputs(
        r=made["dr_"],
        w=made["dw_"],
        k=made["dk_"],
        v=carried["dv_"],
        a=made["da_"],
        b=made["db_"],
        initial_state=carried["ds0_"],
    )


def backward(
    call: Call[Recurrence], x: RWKV7Inputs, kept: dict[str, jax.Array], cotangents: Outputs
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    do, ds = cotangents
    (H, K), V, splits = x.r.shape[2:], x.v.shape[-1], stretches_here(call)
    two = _two_kernels(x)
    plan = make_plan("carry" if two else "backward", LAUNCH, call, x, splits, _scored(x))
    part = part_of(call, x.segment_ids)
    if stretches_of(call) > 1:
        ds = enter_backward(plan, kept["M"].reshape(-1, H, K, K), kept["reads"], do, ds, part)
    plan = scaled(plan, x, do, ds)
    gradients = (_backward_by_two if two else _backward_by_one)(plan, x, kept, do, ds)
    first = gradients.initial_state.reshape(-1, splits, H, K, V)[:, 0]
    if part is not None:
        first = jnp.where(part.is_first, first, 0)
    return gradients._replace(initial_state=first)
