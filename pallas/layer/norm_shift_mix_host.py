"""Norm, token shift and mixes on NVIDIA GPUs: the rule of the op's Triton implementation
(fla_jax/core/op.py). The kernels are selected in `norm_shift_mix_variants`.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp

from ...core.context import Context
from ...core.implementation import Residuals
from ...core.types import Mix, Mixed, MixInputs
from ..backend.triton import Launch, triton_call
from ..backend.types import Group, Kernel
from ..common.select import select
from ..common.shapes import like, like_fields, next_power_of_two, shaped
from .norm_shift_mix_bwd import (
    MixGrads,
    NormBwdConfig,
    NormBwdInputs,
    NormBwdOut,
    mix_bwd_kernel,
    norm_bwd_kernel,
)
from .norm_shift_mix_fwd import FwdOut, StatisticsOut, mix_fwd_kernel, statistics_kernel
from .norm_shift_mix_tiles import Dims, MixConfig, Stats
from .norm_shift_mix_variants import (
    VARIANTS,
    MixKey,
    MixLaunch,
    block_length,
    statistics_launch,
    tile_launch,
    whole_launch,
)

Out = TypeVar("Out")


def _grid(row: MixLaunch, x: jax.Array) -> tuple[int, int, int]:
    B, T, C = x.shape
    return B * -(-T // block_length(row, x)), -(-C // row.channels), 1


def _run(
    kernel: Kernel, *inputs: Group, out: Out, row: MixLaunch, x: jax.Array, eps: float, **tiles: int
) -> Out:
    """Runs ``kernel(*inputs, dims, out, config)`` over tokens ``x`` [B, T, C]."""
    B, T, C = x.shape
    length = block_length(row, x)
    has_groups = T % row.tokens == 0 and length % row.tokens == 0  # blocks are whole groups of tokens
    config = NormBwdConfig if tiles else MixConfig
    return triton_call(
        kernel,
        *inputs,
        Dims(B, T, length),
        out=out,
        config=config(C, row.channels, row.stages, row.tokens if has_groups else 1, eps, **tiles),
        grid=_grid(row, x),
        launch=Launch(row.warps),
    )


def _stats_shape(x: jax.Array) -> Stats:
    per_token = jax.ShapeDtypeStruct(x.shape[:2], jnp.float32)
    return Stats(per_token, per_token)


def residual_axes(ctx: Context[MixInputs, Mix]) -> dict[str, str]:
    """Residuals: statistics of the norm, and x + y, which is also a result."""
    stats = {} if ctx.shapes.scale is None else {"mean": "b t", "rstd": "b t"}
    return stats if ctx.shapes.y is None else stats | {"x": "b t c"}


def fwd(ctx: Context[MixInputs, Mix], x: MixInputs) -> tuple[Mixed, Residuals]:
    """Results and residuals."""
    key, eps = MixKey.of("fwd", x, ctx.gpu), ctx.settings.eps
    variant = select(VARIANTS, key)
    stats, saved, total = None, None, x.x
    if variant.is_whole:
        row = whole_launch(variant, key)
        saved = _stats_shape(x.x) if ctx.save_residuals else None
    else:
        row = tile_launch(variant, "fwd", key)
        if key.has_norm:
            made = _run(
                statistics_kernel,
                MixInputs(x.x, (), y=x.y),
                out=StatisticsOut(_stats_shape(x.x), None if x.y is None else like(x.x)),
                row=statistics_launch(key),
                x=x.x,
                eps=eps,
            )
            stats, total = made.stats, x.x if made.x is None else made.x
            x = x._replace(x=total, y=None)
    results = Mixed(
        mixed=(like(x.x),) * len(x.mixes),
        last=shaped((x.x.shape[0], key.C), x.x.dtype),
        x=None if x.y is None else like(x.x),
        normalised=like(x.x) if ctx.settings.normalised else None,
    )
    out = _run(mix_fwd_kernel, x, stats, out=FwdOut(results, saved), row=row, x=x.x, eps=eps)
    total = total if out.results.x is None else out.results.x
    residuals = {"x": total} | (out.stats or stats or Stats(None, None))._asdict()
    if x.y is not None or key.has_norm:
        out = out._replace(results=out.results._replace(x=total))
    return out.results, {name: residuals[name] for name in residual_axes(ctx)} if ctx.save_residuals else {}


def bwd(ctx: Context[MixInputs, Mix], x: MixInputs, residuals: Residuals, cotangents: Mixed) -> MixInputs:
    """Gradients of all inputs, those of parameters for each sequence."""
    (B, T, C), M, eps = x.x.shape, len(x.mixes), ctx.settings.eps
    key, has_sum = MixKey.of("bwd", x, ctx.gpu), x.y is not None
    x = x._replace(x=residuals.get("x", x.x), y=None)
    stats = Stats(residuals["mean"], residuals["rstd"]) if key.has_norm else None
    variant = select(VARIANTS, key)
    is_split = key.has_norm and not variant.is_whole
    row = (
        whole_launch(variant, key)
        if variant.is_whole
        else tile_launch(variant, "sums" if is_split else "bwd", key)
    )
    programs, tiles, _ = _grid(row, x.x)
    grads = like_fields(x, "x", "last", "mix_delta")
    out = MixGrads(
        x=grads._replace(x=like(x.x, jnp.float32)) if is_split else grads,
        sums=jax.ShapeDtypeStruct((programs, M + 2 * key.has_norm, C), jnp.float32),
        tile_sums=jax.ShapeDtypeStruct((B, T, tiles, 2), jnp.float32) if is_split else None,
    )
    out = _run(mix_bwd_kernel, x, stats, cotangents, out=out, row=row, x=x.x, eps=eps)
    dx = out.x.x
    if is_split:
        inputs = NormBwdInputs(x.x, x.scale, stats, dx, out.tile_sums, cotangents.x)
        sizes = dict(tiles=tiles, padded_tiles=next_power_of_two(tiles))
        row = tile_launch(variant, "norm", key)
        dx = _run(norm_bwd_kernel, inputs, out=NormBwdOut(like(x.x)), row=row, x=x.x, eps=eps, **sizes).dx
    sums = jnp.sum(out.sums.reshape(B, -1, *out.sums.shape[1:]), 1)
    return out.x._replace(
        x=dx,
        mixes=tuple(sums[:, n] for n in range(M)),
        y=dx if has_sum else None,
        scale=sums[:, M] if key.has_norm else None,
        bias=sums[:, M + 1] if key.has_norm else None,
    )
