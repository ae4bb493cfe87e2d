"""RWKV-6, token by token: the functions that the op loads (fla_jax/core/op.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV6Inputs
from ..backend.triton import triton_call
from ..common.shapes import like, shaped
from ..common.token_pairs import TokenValues
from ..common.token_pairs_host import KEYS, PAIR_LAUNCH, pair_config, pair_grid, sum_over_values
from ..common.token_scan_host import SCAN_LAUNCH, ScanPlan, plan_scan
from .pair_gradients import PairGrads, PairInputs, rwkv6_pair_grads_kernel
from .scan import ScanInputs, ScanOutputs, rwkv6_scan_kernel
from .variants import INTERVAL


def residual_axes(ctx: Context[RWKV6Inputs, RecurrenceConfig]) -> dict[str, str]:
    """The states at the starts of intervals."""
    return {"states": "b state h k v"}


def _scan(plan: ScanPlan, x: ScanInputs, y: jax.Array, save: bool) -> ScanOutputs:
    """A scan whose outputs are like ``y``."""
    c = plan.config
    states = shaped((*plan.intervals, c.H, c.K, c.V), jnp.float32)
    return triton_call(
        rwkv6_scan_kernel,
        x,
        plan.index,
        out=ScanOutputs(like(y), like(x.start), states if save else None),
        config=c,
        grid=plan.grid,
        launch=SCAN_LAUNCH,
    )


def fwd(ctx: Context[RWKV6Inputs, RecurrenceConfig], x: RWKV6Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and what the backward reads."""
    plan = plan_scan(ctx, x, INTERVAL)
    start = plan.edge(x.initial_state)
    made = _scan(plan, ScanInputs(x.r, x.k, x.w, x.v, x.u, start), x.v, ctx.save_residuals)
    outputs = Outputs(made.y, plan.from_edge(made.end))
    return outputs, {"states": made.states} if ctx.save_residuals else {}


def bwd(
    ctx: Context[RWKV6Inputs, RecurrenceConfig],
    x: RWKV6Inputs,
    residuals: Residuals,
    cotangents: Outputs,
) -> RWKV6Inputs:
    """Gradients of all inputs, that of u for each batch element."""
    scale, do, states = ctx.settings.scale, cotangents.o, residuals["states"]
    plan = plan_scan(ctx, x, INTERVAL)
    scan = ScanInputs(x.k, x.r, x.w, do, x.u, plan.edge(cotangents.final_state))
    made = _scan(plan.backward(), scan, x.v, save=True)
    sums = sum_over_values(plan, TokenValues(do, None), TokenValues(x.v, None), states, made.states, scale)
    grads = triton_call(
        rwkv6_pair_grads_kernel,
        PairInputs(x.r, x.w, x.k, x.u, *sums),
        plan.index,
        out=PairGrads(like(x.r), like(x.w), like(x.k), plan.sums(plan.config.K)),
        config=pair_config(plan, KEYS),
        grid=pair_grid(plan, KEYS),
        launch=PAIR_LAUNCH,
    )
    du = jnp.sum(grads.u.reshape(*plan.intervals, *grads.u.shape[1:]), 1)
    return RWKV6Inputs(grads.r, grads.k, made.y, grads.w, du, plan.from_edge(made.end))
