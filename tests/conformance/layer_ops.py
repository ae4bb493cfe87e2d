"""The calls of the layers' ops that are compared with their float64 references, by place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from harness.cases import HEAD_OPS, MIX_CASES, MIX_KERNELS, HeadCase, MixCase
from harness.places import TRITON_GPU, TRITON_INTERPRETER, XLA, Place

# B, T, H, N: full and partial tiles of every kind, heads that are no power of two, blocks of tokens that are
# summed
_TILES = ((1, 16, 4, 16), (3, 17, 2, 33), (1, 5, 1, 136), (2, 3, 2, 256), (1, 9, 2, 7), (2, 21, 1, 16))
# B, T, C, M: whole tokens and tiles of channels; channels that are no power of two or multiple of 16
_GPU_SHAPES = (
    (2, 70, 256, 2),
    (2, 150, 768, 6),
    (1, 70, 1024, 6),
    (1, 40, 2048, 6),
    (1, 40, 2560, 6),
    (1, 20, 8192, 6),
    (2, 33, 100, 1),
    (3, 1, 77, 2),
)


def on_heads(place: Place) -> Iterator[tuple[str, HeadCase]]:
    """(name, case) of the ops that work on each token and head."""
    for op in HEAD_OPS:
        for B, T, H, N in ((2, 1, 1, 64), (1, 37, 5, 24), *(() if place is XLA else _TILES)):
            yield f"{op} {B} {T} {H} {N}", HeadCase(op, B, T, H, N, residual="traced True")
        if place is XLA:
            yield f"{op} float64", HeadCase(op, dtype="float64")
    for residual in (None, True, False, "traced False"):
        yield f"rwkv7_keys, residual {residual}", HeadCase("rwkv7_keys", residual=residual)
    yield "rwkv7_keys, rate_scale 2", HeadCase("rwkv7_keys", rate_scale=2.0)


def mixes(place: Place) -> Iterator[tuple[str, MixCase]]:
    """(name, case) of norm, shift and mixes."""
    # an interpreter runs those that kernels are compiled anew for
    for name, case in (MIX_KERNELS if place is TRITON_INTERPRETER else MIX_CASES).items():
        yield f"norm_mix {name}", case
    if place is XLA:
        for name in ("rwkv7 attention", "everything"):
            wide: dict[str, Any] = dict(dtype="float64", parameters="float64")
            yield f"norm_mix {name} float64", dataclasses.replace(MIX_CASES[name], **wide)
    if place is TRITON_GPU:
        for dtype in ("float32", "bfloat16", "float16"):
            parameters = "bfloat16" if dtype == "bfloat16" else "float32"
            for shape in _GPU_SHAPES:
                yield f"norm_mix {shape} {dtype}", MixCase(*shape, dtype=dtype, parameters=parameters)
        for B, T, C in ((2, 150, 768), (1, 40, 2560)):
            five: dict[str, Any] = dict(
                y=False, norm=False, mix_delta=True, lengths=(31, 200), dtype="bfloat16"
            )
            yield f"norm_mix five moves {C}", MixCase(B, T, C, 5, **five)
