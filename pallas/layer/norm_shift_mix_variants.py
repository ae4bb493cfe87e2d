"""Variants and launches of the kernels of norm, token shift and mixes.

Memory traffic decides. A program that has whole tokens in registers does a pass in one kernel and touches
every array once. With tiles of channels the forward reads x once more, for the statistics, and the backward
writes dh and reads it and x once more, for the norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from ...core.context import Context
from ...core.gpu import GPU
from ...core.types import Mix, MixInputs
from ..common.select import select
from ..common.shapes import tile

PASSES: tuple[Literal["fwd"], Literal["bwd"]] = ("fwd", "bwd")
MIN_BLOCK_LEN = 8  # tokens of the smallest block that is worth a program


@dataclasses.dataclass(frozen=True)
class MixKey:
    """The facts that select the kernels of a pass.

    Attributes:
        gpu: of the call.
        name: of the pass.
        mixes: ``"few"`` up to two.
        C: channels.
        is_16bit: whether tokens have 16 bits.
        has_norm: whether sums over channels are needed.
        has_mix_delta: whether mixes differ by token: too many arrays for whole tokens.
    """

    gpu: GPU
    name: Literal["fwd", "bwd"]
    mixes: Literal["few", "many"]
    C: int
    is_16bit: bool
    has_norm: bool
    has_mix_delta: bool

    @classmethod
    def of(cls, name: Literal["fwd", "bwd"], x: MixInputs, gpu: GPU) -> MixKey:
        """The key of a call, from shapes and dtypes alone."""
        return cls(
            gpu=gpu,
            name=name,
            mixes="few" if len(x.mixes) <= 2 else "many",
            C=x.x.shape[-1],
            is_16bit=x.x.dtype.itemsize == 2,
            has_norm=x.scale is not None,
            has_mix_delta=x.mix_delta is not None,
        )

    @property
    def padded_C(self) -> int:
        """Channels of a program with whole tokens."""
        return max(128, tile(self.C))


class Variant(NamedTuple):
    """One way to run a pass: its name in the launch tables, whether it serves a call, whether a program has
    whole tokens.
    """

    name: str
    when: Callable[[MixKey], bool]
    is_whole: bool


MAX_WHOLE = {("fwd", "few"): 8192, ("fwd", "many"): 4096, ("bwd", "few"): 4096, ("bwd", "many"): 2048}


def _is_whole(key: MixKey) -> bool:
    return key.has_norm and not key.has_mix_delta and key.padded_C <= MAX_WHOLE[key.name, key.mixes]


VARIANTS = (
    Variant("whole", lambda key: _is_whole(key) and key.is_16bit, True),
    Variant("whole_fp32", _is_whole, True),
    Variant("tiles", lambda key: key.is_16bit, False),
    Variant("tiles_fp32", lambda key: True, False),
)


def describe(ctx: Context[MixInputs, Mix]) -> str:
    """The variants of a call's passes, for messages."""
    x = ctx.shapes
    fwd, bwd = (select(VARIANTS, MixKey.of(name, x, ctx.gpu)).name for name in PASSES)
    return f"forward {fwd}, backward {bwd}, for {x.x.shape[-1]} channels and {len(x.mixes)} mixes"


class MixLaunch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        channels: of a program.
        warps: of a program.
        block_len: tokens of a program, fewer where few programs would run.
        stages: depth of the load pipeline.
        tokens: tokens whose sums over channels are computed together, where T is a multiple of it.
        busy: warps that keep a GPU busy. With fewer, blocks are halved. Every program of the backward writes
            a sum for each vector, so more programs cost memory traffic.
    """

    channels: int
    warps: int
    block_len: int
    stages: int = 1
    tokens: int = 1
    busy: int = 4096


def _fp32(row: MixLaunch, max_warps: int) -> MixLaunch:
    """The row for float32 tokens: half as many channels a thread, a pipeline that fits every GPU."""
    warps, stages = min(max(1, row.channels // 128), max_warps), 2 if row.channels < 4096 else 1
    return row._replace(warps=warps, block_len=64, stages=stages, tokens=1, busy=min(row.busy, 4096))


# By pass, number of mixes and padded channels, the fastest on an H200 at 1024, 2048 and 4096 channels
# (pallas/DESIGN.md, "Layer kernels"). Sums over channels are barriers, so several tokens share one. Forward:
# 8 or 16 channels a thread, short blocks, no pipeline. Backward: a sum for every vector, long blocks, a
# pipeline.
_NARROW = {n: max(1, n // 256) for n in (128, 256, 512, 1024)}
_WHOLE = {
    **{("fwd", "few", n): MixLaunch(n, warps, 8, tokens=4, busy=16384) for n, warps in _NARROW.items()},
    **{("fwd", "many", n): MixLaunch(n, warps, 4, tokens=4, busy=32768) for n, warps in _NARROW.items()},
    **{("bwd", "few", n): MixLaunch(n, warps, 128, 3, tokens=2, busy=1024) for n, warps in _NARROW.items()},
    **{("bwd", "many", n): MixLaunch(n, warps, 128, 3, tokens=2, busy=1024) for n, warps in _NARROW.items()},
    ("fwd", "few", 2048): MixLaunch(2048, 4, 8, tokens=4, busy=16384),
    ("fwd", "many", 2048): MixLaunch(2048, 4, 8, tokens=2, busy=16384),
    ("bwd", "few", 2048): MixLaunch(2048, 8, 128, 4, tokens=2, busy=1024),
    ("bwd", "many", 2048): MixLaunch(2048, 8, 128, 4, busy=1024),
    ("fwd", "few", 4096): MixLaunch(4096, 8, 32, tokens=2),
    ("fwd", "many", 4096): MixLaunch(4096, 16, 64, 3, tokens=2, busy=2048),
    ("bwd", "few", 4096): MixLaunch(4096, 16, 64, 4, busy=1024),
    ("fwd", "few", 8192): MixLaunch(8192, 32, 64),
}
WHOLE: dict[tuple[str, str, str, int], MixLaunch] = {
    **{("whole", *key): row for key, row in _WHOLE.items()},
    **{("whole_fp32", *key): _fp32(row, 16 if key[0] == "bwd" else 32) for key, row in _WHOLE.items()},
}
# By variant and kernel, with the most channels of a tile. "sums" is the backward before "norm".
TILES: dict[tuple[str, str], MixLaunch] = {
    ("tiles", "fwd"): MixLaunch(512, 4, 64, 2),
    ("tiles", "bwd"): MixLaunch(512, 4, 64, 2),
    ("tiles", "sums"): MixLaunch(1024, 4, 128, 3, tokens=2, busy=1024),
    ("tiles", "norm"): MixLaunch(1024, 4, 4),
    ("tiles_fp32", "fwd"): MixLaunch(512, 4, 64, 2),
    ("tiles_fp32", "bwd"): MixLaunch(512, 4, 64, 2),
    ("tiles_fp32", "sums"): MixLaunch(1024, 8, 64, 2, busy=1024),
    ("tiles_fp32", "norm"): MixLaunch(1024, 4, 4),
}


def whole_launch(variant: Variant, key: MixKey) -> MixLaunch:
    """The launch of a pass over whole tokens.

    Raises:
        KeyError: the table lacks the row.
    """
    return _on_gpu(WHOLE[variant.name, key.name, key.mixes, key.padded_C], key.gpu)


def tile_launch(variant: Variant, kernel: str, key: MixKey) -> MixLaunch:
    """The launch of a kernel by tiles of channels, halved while they waste channels."""
    row = TILES[variant.name, kernel]
    channels = min(row.channels, tile(key.C))
    while channels > 128 and key.C % channels:
        channels //= 2
    warps = max(1, row.warps * channels // row.channels)
    return _on_gpu(row._replace(channels=channels, warps=warps), key.gpu)


def statistics_launch(key: MixKey) -> MixLaunch:
    """The launch of the kernel that computes statistics of whole tokens."""
    channels = tile(key.C)
    return MixLaunch(channels, min(16, max(1, channels // 128)), 16, 2)


def _on_gpu(row: MixLaunch, gpu: GPU) -> MixLaunch:
    """Two stages at most where programs have little shared memory."""
    return row if gpu.smem >= 100 << 10 else row._replace(stages=min(row.stages, 2))


def block_length(row: MixLaunch, x: jax.Array) -> int:
    """Tokens of a program, for tokens [B, T, C]."""
    B, T, C = x.shape
    tiles, length = -(-C // row.channels), row.block_len
    while length > MIN_BLOCK_LEN and B * -(-T // length) * tiles * row.warps < row.busy:
        length //= 2
    return min(length, T)
