"""Norm, token shift and mixes on NVIDIA GPUs: what the op loads (fla_jax/core/op.py); launches the kernels.

Bytes decide. Where a token's channels fit the registers of one program, a pass is one kernel and touches
every array once. Else forward and backward go by tiles of channels: the forward reads x once more, for the
statistics, and the backward writes dh, and reads it and x once more, for the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.context import Context, Mix, Mixed, MixInputs
from ...core.gpu import current_gpu
from ..backend.triton import launch
from ..common.shapes import given, like, result, tile
from .norm_shift_mix_bwd import mix_bwd_kernel, norm_bwd_kernel
from .norm_shift_mix_fwd import mix_fwd_kernel, statistics_kernel

unused_cotangents = ("x", "normalised")  # layers that end a residual stream, or begin one, use no sum
SLOTS = 6  # mixes that the kernels have arguments for
NARROW = (128, 256, 512, 1024)  # channels of a token that four warps or fewer hold


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        channels: that a program holds; 0 for all.
        warps: of a program; 0 for one for every 128 channels, up to 16.
        span: tokens that a program walks, fewer where few programs would run.
        stages: depth of the pipeline of loads.
        tokens: that a program sums up over channels together, where T is a multiple of so many.
        busy: warps that keep a GPU busy. With fewer, shares are halved, down to the shortest that is worth a
            program. A program of the backward writes a sum for every vector: more of them cost bytes.
    """

    channels: int
    warps: int
    span: int
    stages: int = 1
    tokens: int = 1
    busy: int = 4096


# By kernel, number of mixes and channels, padded to a power of two: whole tokens. What is missing goes by
# tiles. A sum over channels is a barrier, so several tokens are summed up together. Forwards hold 8 or 16
# channels a thread and walk few tokens without a pipeline, many programs on a multiprocessor: each loads a
# group of tokens at once. Backwards hold a sum for every vector and walk many tokens, with loads under way.
# Of up to forty at 1024, 2048 and 4096 channels these were the fastest on an H200
# (pallas/DESIGN.md, "Layer kernels").
WHOLE: dict[tuple[str, str, int], Launch] = (
    {("fwd", "few", n): Launch(n, max(1, n // 256), 8, tokens=4, busy=16384) for n in NARROW}
    | {("fwd", "many", n): Launch(n, max(1, n // 256), 4, tokens=4, busy=32768) for n in NARROW}
    | {
        ("bwd", mixes, n): Launch(n, max(1, n // 256), 128, 3, tokens=2, busy=1024)
        for mixes in ("few", "many")
        for n in NARROW
    }
    | {
        ("fwd", "few", 2048): Launch(2048, 4, 8, tokens=4, busy=16384),
        ("fwd", "many", 2048): Launch(2048, 4, 8, tokens=2, busy=16384),
        ("bwd", "few", 2048): Launch(2048, 8, 128, 4, tokens=2, busy=1024),
        ("bwd", "many", 2048): Launch(2048, 8, 128, 4, busy=1024),
        ("fwd", "few", 4096): Launch(4096, 8, 32, tokens=2),
        ("fwd", "many", 4096): Launch(4096, 16, 64, 3, tokens=2, busy=2048),
        ("bwd", "few", 4096): Launch(4096, 16, 64, 4, busy=1024),
        ("fwd", "few", 8192): Launch(8192, 32, 64),
    }
)
TILES: dict[str, Launch] = {
    "fwd": Launch(512, 4, 64, 2),
    "bwd": Launch(512, 4, 64, 2),
    "sums": Launch(1024, 4, 128, 3, tokens=2, busy=1024),  # a backward that leaves the norm to "norm"
    "statistics": Launch(0, 0, 16, 2),  # whole tokens
    "norm": Launch(1024, 4, 4),
}
FEW = 2
MIN_BLOCK_LEN = 8  # tokens of a share that is cut to keep a GPU busy


def _fitting(chosen: Launch, x: MixInputs, most: int = 32) -> Launch:
    """The launch for the GPU's shared memory and the tokens' dtype; ``most`` warps."""
    if current_gpu().smem < 100 << 10:
        chosen = chosen._replace(stages=min(chosen.stages, 2))
    if x.x.dtype.itemsize == 2:
        return chosen
    # numbers of four bytes: half as many a thread, and no more on their way than fits every GPU
    stages = 2 if chosen.channels < 4096 else 1
    warps, busy = max(1, min(chosen.channels // 128, most)), min(chosen.busy, 4096)
    return chosen._replace(warps=warps, span=64, stages=stages, tokens=1, busy=busy)


def _whole(kernel: str, x: MixInputs) -> Launch | None:
    """How the kernel is launched on whole tokens; None where it goes by tiles."""
    C = x.x.shape[-1]
    if x.scale is None or x.moves is not None:
        return None  # no sums over channels, or too many arrays at once
    few = "few" if len(x.mixes) <= FEW else "many"
    chosen = WHOLE.get((kernel, few, max(128, tile(C))))
    return chosen and _fitting(chosen, x, 16 if kernel == "bwd" else 32)


def _tiled(kernel: str, x: MixInputs) -> Launch:
    """How a kernel is launched by tiles that waste as few channels as may be."""
    chosen, C = TILES[kernel], x.x.shape[-1]
    if not chosen.channels:
        return chosen._replace(channels=tile(C), warps=min(16, max(1, tile(C) // 128)))
    size = min(chosen.channels, tile(C))
    while size > 128 and C % size:
        size //= 2
    chosen = chosen._replace(channels=size, warps=max(1, chosen.warps * size // chosen.channels))
    return _fitting(chosen, x) if kernel == "sums" else chosen  # the others fit as they are


def _grid(chosen: Launch, B: int, T: int, C: int) -> tuple[int, tuple[int, int], dict[str, Any]]:
    """(tokens that a program walks, grid, options of the launch)."""
    tiles, span = -(-C // chosen.channels), chosen.span
    while span > MIN_BLOCK_LEN and B * -(-T // span) * tiles * chosen.warps < chosen.busy:
        span //= 2
    span = min(span, T)
    options = dict(num_warps=chosen.warps, num_stages=1, C=C, BC=chosen.channels, STAGES=chosen.stages)
    return span, (B * -(-T // span), tiles), options


def _tokens(chosen: Launch, T: int, span: int) -> int:
    """Tokens at a time: all shares of a row hold whole groups of so many."""
    return 1 if T % chosen.tokens or span % chosen.tokens else chosen.tokens


def _slots(prefix: str, arrays: Sequence[Any], unused: Any) -> dict[str, Any]:
    """A kernel's parameters for as many mixes as there may be: ``prefix0_`` to ``prefix5_``."""
    return {f"{prefix}{n}_": arrays[n] if n < len(arrays) else unused for n in range(SLOTS)}


def _shared(x: MixInputs, unused: jax.Array) -> dict[str, jax.Array]:
    """The parameters of both mixing kernels that are inputs of the op."""
    arrays = dict(scale_=x.scale, bias_=x.bias, last_=x.last, seg_=x.segment_ids, moves_=x.moves)
    return {name: given(array, unused) for name, array in arrays.items()} | _slots("mu", x.mixes, unused)


def residual_axes(ctx: Context[Mix]) -> dict[str, str]:
    """What the forward keeps, and its axes: statistics of the norm, and x + y, which is a result as well."""
    kept = {} if ctx.inputs.scale is None else {"mean": "b t", "rstd": "b t"}
    return kept if ctx.inputs.y is None else kept | {"x": "b t c"}


def fwd(ctx: Context[Mix], x: MixInputs) -> tuple[Mixed, dict[str, jax.Array]]:
    """Results and what the backward reads."""
    (B, T, C), M, dtype = x.x.shape, len(x.mixes), x.x.dtype
    norm, add, eps = x.scale is not None, x.y is not None, ctx.settings.eps
    per_token, unused = jax.ShapeDtypeStruct((B, T), jnp.float32), x.x
    whole = _whole("fwd", x)
    before = dict(x_=x.x, y_=given(x.y, unused), mean_=unused, rstd_=unused)
    if norm and whole is None:
        span, grid, options = _grid(_tiled("statistics", x), B, T, C)
        made = launch(
            statistics_kernel,
            dict(x_=x.x, y_=before["y_"], T=T, span=span),
            dict(mean_=per_token, rstd_=per_token, sum_=result(add, x.x.shape, dtype)),
            grid=grid,
            EPS=eps,
            ADD=add,
            **options,
        )
        total = made["sum_"] if add else x.x
        before = dict(x_=total, y_=unused, mean_=made["mean_"], rstd_=made["rstd_"])
    adds = add and (whole is not None or not norm)
    keep = ctx.keep and whole is not None
    chosen = whole or _tiled("fwd", x)
    span, grid, options = _grid(chosen, B, T, C)
    made = launch(
        mix_fwd_kernel,
        before | _shared(x, unused) | dict(B=B, T=T, span=span),
        _slots("o", [like(x.x)] * M, result(False, (), dtype))
        | dict(
            end_=jax.ShapeDtypeStruct((B, C), dtype),
            sum_=result(adds, x.x.shape, dtype),
            h_=result(ctx.settings.normalised, x.x.shape, dtype),
            kept_mean_=result(keep, per_token.shape, jnp.float32),
            kept_rstd_=result(keep, per_token.shape, jnp.float32),
        ),
        grid=grid,
        M=M,
        WHOLE=whole is not None,
        NORM=norm,
        EPS=eps,
        ADD=adds,
        LAST=x.last is not None,
        SEG=x.segment_ids is not None,
        MOVES=x.moves is not None,
        H=ctx.settings.normalised,
        KEEP=keep,
        TOKENS=_tokens(chosen, T, span),
        **options,
    )
    total = made["sum_"] if adds else before["x_"]
    mixed = Mixed(
        tuple(made[f"o{n}_"] for n in range(M)),
        made["end_"],
        total if add or norm else None,
        made["h_"] if ctx.settings.normalised else None,
    )
    residuals = {
        "mean": made["kept_mean_"] if keep else before["mean_"],
        "rstd": made["kept_rstd_"] if keep else before["rstd_"],
        "x": total,
    }
    return mixed, {name: residuals[name] for name in residual_axes(ctx)} if ctx.keep else {}


def bwd(ctx: Context[Mix], x: MixInputs, residuals: dict[str, jax.Array], cotangents: Mixed) -> MixInputs:
    """Gradients of all inputs; those of parameters for each row."""
    (B, T, C), M = x.x.shape, len(x.mixes)
    norm, summed = x.scale is not None, cotangents.x is not None
    total = residuals.get("x", x.x)
    unused, whole = total, _whole("bwd", x)
    statistics = dict(mean_=residuals.get("mean", unused), rstd_=residuals.get("rstd", unused))
    split, lines = norm and whole is None, M + 2 * norm
    chosen = whole or _tiled("sums" if split else "bwd", x)
    span, grid, options = _grid(chosen, B, T, C)
    dsum = given(cotangents.x, unused)
    incoming = _slots("g", cotangents.mixed, unused) | dict(
        dend_=cotangents.last, dsum_=dsum, dnormalised_=given(cotangents.normalised, unused)
    )
    made = launch(
        mix_bwd_kernel,
        dict(x_=total, B=B, T=T, span=span) | _shared(x, unused) | statistics | incoming,
        dict(
            dx_=like(total),
            dlast_=result(x.last is not None, (B, C), given(x.last, unused).dtype),
            dmoves_=result(x.moves is not None, (M, B, T, C), given(x.moves, unused).dtype),
            parts_=jax.ShapeDtypeStruct((grid[0], lines, C), jnp.float32),
            sums_=result(split, (B, T, grid[1], 2), jnp.float32),
        ),
        grid=grid,
        M=M,
        WHOLE=whole is not None,
        NORM=norm,
        LAST=x.last is not None,
        SEG=x.segment_ids is not None,
        MOVES=x.moves is not None,
        SUM=summed,
        H=cotangents.normalised is not None,
        TOKENS=_tokens(chosen, T, span),
        **options,
    )
    dx = made["dx_"]
    if split:
        tiles = grid[1]
        span, grid, options = _grid(_tiled("norm", x), B, T, C)
        arrays = dict(x_=total, scale_=x.scale, dh_=dx, sums_=made["sums_"], dsum_=dsum) | statistics
        dx = launch(
            norm_bwd_kernel,
            arrays | dict(T=T, span=span),
            dict(dx_=like(total)),
            grid=grid,
            TILES=tiles,
            PADDED=1 << (tiles - 1).bit_length(),
            SUM=summed,
            **options,
        )["dx_"]
    per_row = jnp.sum(made["parts_"].reshape(B, -1, lines, C), 1)
    return MixInputs(
        x=dx,
        mixes=tuple(per_row[:, n] for n in range(M)),
        y=None if x.y is None else dx,
        scale=per_row[:, M] if norm else None,
        bias=per_row[:, M + 1] if norm else None,
        last=None if x.last is None else made["dlast_"],
        moves=None if x.moves is None else made["dmoves_"],
    )
