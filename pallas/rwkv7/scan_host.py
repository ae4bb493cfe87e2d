"""RWKV-7, token by token: the functions that the op loads (fla_jax/core/op.py)."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Outputs, RecurrenceConfig, RWKV7Inputs
from ..backend.triton import Launch, triton_call
from ..common.chunk_plan import MIN_SPLIT_LEN, ChunkPlan, split_length
from ..common.shapes import like, shaped, tile
from ..common.token_pairs import TokenValues
from ..common.token_pairs_host import KEYS, PAIR_LAUNCH, pair_config, pair_grid, sum_over_values
from ..common.token_scan_host import SCAN_LAUNCH, ScanPlan, plan_scan
from .chunk_bwd_grads_host import bwd_grads_from_scans, plan_from_scans
from .chunk_bwd_split import GradsSaved
from .chunk_tokens import KeyGrads
from .pair_gradients import PairInputs, rwkv7_pair_grads_kernel
from .scan import ScanInputs, ScanOutputs, rwkv7_scan_kernel
from .token_step import TokenConfig, TokenOutputs, rwkv7_token_kernel
from .variants import INTERVAL, has_chunk_gradients

TOKEN_LAUNCH = Launch(num_warps=4)
Grads: TypeAlias = tuple[ScanOutputs, KeyGrads]
BWD_SPLITS = 4  # at most, one after the other: 5.7 GB at B8 T4096 H64 D64, in one 7.3


def residual_axes(ctx: Context[RWKV7Inputs, RecurrenceConfig]) -> dict[str, str]:
    """The states at the starts of intervals, and a^T S of each token."""
    states = "b state h v k" if has_chunk_gradients(ctx, ctx.shapes) else "b state h k v"
    return {"states": states, "inner": "b t h v"}


def _scan(plan: ScanPlan, x: ScanInputs, y: jax.Array, save: bool, value_major: bool) -> ScanOutputs:
    """A scan whose outputs are like ``y``."""
    c = dataclasses.replace(plan.config, value_major=value_major)
    state = (c.V, c.K) if value_major else (c.K, c.V)
    return triton_call(
        rwkv7_scan_kernel,
        x,
        plan.index,
        out=ScanOutputs(
            like(y),
            like(x.start),
            like(y, jnp.float32) if save else None,
            shaped((*plan.intervals, c.H, *state), jnp.float32) if save else None,
        ),
        config=c,
        grid=plan.grid,
        launch=SCAN_LAUNCH,
        aliases={} if x.y is None else {"x.y": "y"},
        in_place=x.y is not None,
    )


def fwd(ctx: Context[RWKV7Inputs, RecurrenceConfig], x: RWKV7Inputs) -> tuple[Outputs, Residuals]:
    """Outputs and what the backward reads."""
    if x.r.shape[1] == 1 and not ctx.save_residuals and x.cu_seqlens is None:
        return _one_token(ctx.settings.scale, x), {}
    plan = plan_scan(ctx, x, INTERVAL)
    scan = ScanInputs(x.a, x.b, x.w, x.k, x.r, x.v, plan.edge(x.initial_state))
    made = _scan(plan, scan, x.v, ctx.save_residuals, has_chunk_gradients(ctx, x))
    outputs = Outputs(made.y, plan.from_edge(made.end))
    return outputs, {"states": made.states, "inner": made.inner} if ctx.save_residuals else {}


def _one_token(scale: float, x: RWKV7Inputs) -> Outputs:
    """One token of every sequence."""
    (B, _, H, K), V = x.r.shape, x.v.shape[-1]
    BK = tile(K)
    BV = min(tile(V), max(16, 4096 // BK))
    made = triton_call(
        rwkv7_token_kernel,
        x._replace(segment_ids=None),
        out=TokenOutputs(like(x.v), like(x.initial_state)),
        config=TokenConfig(H, K, V, BK, BV, scale),
        grid=(-(-V // BV), H, B),
        launch=TOKEN_LAUNCH,
        aliases={"x.initial_state": "state"},
        in_place=True,
    )
    return Outputs(made.o, made.state)


def bwd(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    x: RWKV7Inputs,
    residuals: Residuals,
    cotangents: Outputs,
) -> RWKV7Inputs:
    """Gradients of all inputs."""
    plan, dht = plan_scan(ctx, x, INTERVAL).backward(), cotangents.final_state
    scan = ScanInputs(x.b, x.a, x.w, x.r, x.k, cotangents.o, plan.edge(dht))
    if has_chunk_gradients(ctx, x):
        made, grads = _bwd_by_chunks(ctx, plan, x, scan, residuals, dht)
    else:
        made = _scan(plan, scan, x.v, save=True, value_major=False)
        read, written = TokenValues(scan.x, made.inner), TokenValues(x.v, residuals["inner"])
        sums = sum_over_values(plan, read, written, residuals["states"], made.states, ctx.settings.scale)
        grads = triton_call(
            rwkv7_pair_grads_kernel,
            PairInputs(x.r, x.w, x.k, x.a, x.b, *sums),
            plan.index,
            out=KeyGrads(like(x.r), like(x.w), like(x.k), like(x.a), like(x.b)),
            config=pair_config(plan, KEYS),
            grid=pair_grid(plan, KEYS),
            launch=PAIR_LAUNCH,
        )
    ds0 = plan.from_edge(made.end)
    return RWKV7Inputs(grads.r, grads.w, grads.k, made.y, grads.a, grads.b, ds0)


def _bwd_by_chunks(
    ctx: Context[RWKV7Inputs, RecurrenceConfig],
    plan: ScanPlan,
    x: RWKV7Inputs,
    scan: ScanInputs,
    residuals: Residuals,
    dht: jax.Array,
) -> Grads:
    """The backward's scan, and gradients by the chunked form's kernel: one split of all sequences after the
    other, so that the state gradients of only one are stored at a time.
    """
    chunks = plan_from_scans(ctx, x, scan.x, dht)

    def run(plan: ScanPlan, chunks: ChunkPlan, scan: ScanInputs, grads: KeyGrads | None) -> Grads:
        made = _scan(plan, scan, x.v, save=True, value_major=True)
        saved = GradsSaved(scan.x, residuals["inner"], made.inner, residuals["states"], (made.states,), grads)
        return made, bwd_grads_from_scans(ctx, chunks, x, saved)

    num_splits = min(BWD_SPLITS, x.r.shape[1] // MIN_SPLIT_LEN)
    if plan.config.packed or num_splits < 2:
        return run(plan, chunks, scan, None)
    chunks, split_len = chunks.by_splits(num_splits), split_length(x.r.shape[1], num_splits)
    made, grads = run(plan.of_split(num_splits - 1, split_len), chunks.of_split(num_splits - 1), scan, None)
    for split in reversed(range(num_splits - 1)):
        scan = scan._replace(start=made.end, y=made.y, after=grads.r)
        made, grads = run(plan.of_split(split, split_len), chunks.of_split(split), scan, grads)
    return made, grads
