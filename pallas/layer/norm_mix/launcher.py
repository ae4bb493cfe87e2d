"""Norm, token shift and mixes on NVIDIA GPUs: what the op loads (fla_jax/ops/op.py); launches the kernels.

Bytes decide. Where a token's channels fit the registers of one program, a pass is one kernel and touches
every array once. Else forward and backward go by tiles of channels: the forward reads x once more, for the
statistics, and the backward writes dh, and reads it and x once more, for the norm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....core.call import Call, Mix, Mixed, MixInputs
from ...plan.kept_states import result
from ...run.triton import launch
from .backward import mix_bwd_kernel, norm_bwd_kernel
from .forward import mix_fwd_kernel, statistics_kernel

SLOTS = 6  # mixes that the kernels have arguments for


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        channels: that a program holds; 0 for all.
        warps: of a program; 0 for one for every 128 channels, up to 16.
        span: tokens that a program walks, fewer where few programs would run.
        stages: depth of the pipeline of loads.
        hoist: whether the mixes stay in registers meanwhile; else they are read, from cache, for every token.
    """

    channels: int
    warps: int
    span: int
    stages: int = 1
    hoist: bool = True


# By kernel, number of mixes and channels, padded to a power of two: whole tokens. What is missing goes by
# tiles. Four channels a thread are loads of 8 bytes and keep the backward of six mixes within 128 registers:
# two programs of 1024 channels share a multiprocessor of Hopper's. Not measured: it compiles without spills.
WHOLE: dict[tuple[str, str, int], Launch] = {
    **{
        ("forward", few, n): Launch(n, n // 128, 64, 2)
        for few in ("few", "many")
        for n in (128, 256, 512, 1024, 2048, 4096)
    },
    **{
        ("backward", few, n): Launch(n, n // 128, 64, 2)
        for few in ("few", "many")
        for n in (128, 256, 512, 1024, 2048)
    },
    ("forward", "few", 8192): Launch(8192, 32, 64),
    ("backward", "few", 4096): Launch(4096, 16, 64, 2),
}
TILES: dict[str, Launch] = {
    "forward": Launch(512, 4, 64, 2),
    "backward": Launch(512, 4, 64, 2),
    "statistics": Launch(0, 0, 16, 2),  # these two hold whole tokens
    "norm": Launch(0, 0, 16, 2),
}
FEW = 2
# Warps that keep a GPU busy: with fewer, stretches are halved, down to the shortest that is worth a program.
WARPS, SHORTEST = 4096, 8


def _padded(C: int) -> int:
    return max(16, 1 << (C - 1).bit_length())


def _whole(kernel: str, x: MixInputs) -> Launch | None:
    """How the kernel is launched on whole tokens; None where it goes by tiles."""
    C = x.x.shape[-1]
    if x.scale is None or x.moves is not None:
        return None  # no sums over channels, or too many arrays at once
    few = "few" if len(x.mixes) <= FEW else "many"
    return WHOLE.get((kernel, few, max(128, _padded(C))))


def _tiled(kernel: str, C: int) -> Launch:
    """How a kernel is launched by tiles that waste as few channels as may be."""
    chosen = TILES[kernel]
    if not chosen.channels:
        return chosen._replace(channels=_padded(C), warps=min(16, max(1, _padded(C) // 128)))
    size = min(chosen.channels, _padded(C))
    while size > 128 and C % size:
        size //= 2
    return chosen._replace(channels=size, warps=max(1, chosen.warps * size // chosen.channels))


def _grid(chosen: Launch, B: int, T: int, C: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """(tokens that a program walks, grid, options of the launch)."""
    tiles, span = -(-C // chosen.channels), chosen.span
    while span > SHORTEST and B * -(-T // span) * tiles * chosen.warps < WARPS:
        span //= 2
    span = min(span, T)
    options = dict(num_warps=chosen.warps, num_stages=1, C=C, BC=chosen.channels, STAGES=chosen.stages)
    return span, (B * -(-T // span), tiles), options


def _pad(arrays: tuple[jax.Array, ...], unused: jax.Array) -> tuple[jax.Array, ...]:
    return arrays + (unused,) * (SLOTS - len(arrays))


def kept_axes(call: Call[Mix]) -> dict[str, str]:
    """What the forward keeps, and its axes: statistics of the norm, and x + y, which is a result as well."""
    kept = {} if call.inputs.scale is None else {"mean": "b t", "rstd": "b t"}
    return kept if call.inputs.y is None else kept | {"x": "b t c"}


def _like(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _or(x: jax.Array | None, unused: jax.Array) -> jax.Array:
    return unused if x is None else x


def forward(call: Call[Mix], x: MixInputs) -> tuple[Mixed, dict[str, jax.Array]]:
    """Results and what the backward reads."""
    (B, T, C), M, dtype = x.x.shape, len(x.mixes), x.x.dtype
    norm, add, eps = x.scale is not None, x.y is not None, call.settings.eps
    tokens, per_token, unused = _like(x.x), jax.ShapeDtypeStruct((B, T), jnp.float32), x.x
    whole = _whole("forward", x)
    if norm and whole is None:
        chosen = _tiled("statistics", C)
        span, grid, options = _grid(chosen, B, T, C)
        out = (per_token, per_token, result(add, x.x.shape, dtype))
        mean, rstd, total = launch(
            statistics_kernel, x.x, _or(x.y, unused), T, span, out=out, grid=grid, EPS=eps, ADD=add, **options
        )
        before, statistics = (total if add else x.x, unused), (mean, rstd)
    else:
        before, statistics = (x.x, _or(x.y, unused)), (unused, unused)
    adds = add and (whole is not None or not norm)
    keep = call.keep and whole is not None
    chosen = whole or _tiled("forward", C)
    span, grid, options = _grid(chosen, B, T, C)
    *outputs, last, summed, h, kept_mean, kept_rstd = launch(
        mix_fwd_kernel,
        *before,
        *(_or(array, unused) for array in (x.scale, x.bias, x.last, x.segment_ids, x.moves)),
        *statistics,
        *_pad(x.mixes, unused),
        B,
        T,
        span,
        out=(
            *(result(n < M, x.x.shape, dtype) for n in range(SLOTS)),
            jax.ShapeDtypeStruct((B, C), dtype),
            result(adds, tokens.shape, dtype),
            result(call.settings.normalised, tokens.shape, dtype),
            result(keep, per_token.shape, jnp.float32),
            result(keep, per_token.shape, jnp.float32),
        ),
        grid=grid,
        M=M,
        WHOLE=whole is not None,
        HOIST=chosen.hoist,
        NORM=norm,
        EPS=eps,
        ADD=adds,
        LAST=x.last is not None,
        SEG=x.segment_ids is not None,
        MOVES=x.moves is not None,
        H=call.settings.normalised,
        KEEP=keep,
        **options,
    )
    if keep:
        statistics = (kept_mean, kept_rstd)
    total = summed if adds else before[0]
    kept = dict(zip(("mean", "rstd"), statistics)) | {"x": total}
    mixed = Mixed(
        tuple(outputs[:M]), last, total if add or norm else None, h if call.settings.normalised else None
    )
    return mixed, {name: kept[name] for name in kept_axes(call)} if call.keep else {}


def backward(call: Call[Mix], x: MixInputs, kept: dict[str, jax.Array], cotangents: Mixed) -> MixInputs:
    """Gradients of all inputs; those of parameters for each row."""
    (B, T, C), M = x.x.shape, len(x.mixes)
    norm, summed, normalised = (
        x.scale is not None,
        cotangents.x is not None,
        cotangents.normalised is not None,
    )
    total = kept.get("x", x.x)
    unused, whole = total, _whole("backward", x)
    mean, rstd = (kept["mean"], kept["rstd"]) if norm else (unused, unused)
    chosen = whole or _tiled("backward", C)
    span, grid, options = _grid(chosen, B, T, C)
    split, lines = norm and whole is None, M + 2 * norm
    dx, dlast, dmoves, parts, sums = launch(
        mix_bwd_kernel,
        total,
        *(_or(array, unused) for array in (x.scale, x.bias, x.last, x.segment_ids, x.moves)),
        mean,
        rstd,
        *_pad(x.mixes, unused),
        *_pad(cotangents.mixed, unused),
        cotangents.last,
        _or(cotangents.x, unused),
        _or(cotangents.normalised, unused),
        B,
        T,
        span,
        out=(
            _like(total),
            result(x.last is not None, (B, C), unused.dtype if x.last is None else x.last.dtype),
            result(x.moves is not None, (M, B, T, C), unused.dtype if x.moves is None else x.moves.dtype),
            jax.ShapeDtypeStruct((grid[0], lines, C), jnp.float32),
            result(split, (B, T, grid[1], 2), jnp.float32),
        ),
        grid=grid,
        M=M,
        WHOLE=whole is not None,
        HOIST=chosen.hoist,
        NORM=norm,
        LAST=x.last is not None,
        SEG=x.segment_ids is not None,
        MOVES=x.moves is not None,
        SUM=summed,
        H=normalised,
        **options,
    )
    if split:
        tiles = grid[1]
        span, grid, options = _grid(_tiled("norm", C), B, T, C)
        dx = launch(
            norm_bwd_kernel,
            total,
            x.scale,
            mean,
            rstd,
            dx,
            sums,
            _or(cotangents.x, unused),
            T,
            span,
            out=_like(total),
            grid=grid,
            TILES=tiles,
            PADDED=1 << (tiles - 1).bit_length(),
            SUM=summed,
            **options,
        )
    per_row = jnp.sum(parts.reshape(B, -1, lines, C), 1)
    return MixInputs(
        x=dx,
        mixes=tuple(per_row[:, n] for n in range(M)),
        y=None if x.y is None else dx,
        scale=per_row[:, M] if norm else None,
        bias=per_row[:, M + 1] if norm else None,
        last=None if x.last is None else dlast,
        moves=None if x.moves is None else dmoves,
    )
