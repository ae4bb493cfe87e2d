"""The recurrences' calls that are compared with the oracle, by what varies and by place."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from harness import cases, scales
from harness.cases import OPS, Case
from harness.places import (
    PALLAS_GPU,
    PALLAS_INTERPRETER,
    REFERENCE,
    SCAN_GPU,
    SCAN_INTERPRETER,
    TRITON_GPU,
    TRITON_INTERPRETER,
    XLA,
    Place,
)

SEGMENTS, PACKED = (5, 9, 1, 17, 16), (0, 7, 16, 0, 1, 20, 0)
MORE_LAYOUTS = {
    "segments": ((10, 17, 16, 9), (1,) * 52, (52,), (1, 30, 1, 1, 16, 3)),
    "packed": ((16, 1, 14, 3, 2, 1, 3), (0, 5, 0, 0, 17, 18, 0), (1, 1, 1, 34, 1, 1, 1), (40,)),
}
BOUNDED = dict(decay="layer", lower_bound=-0.61)


class Plan(NamedTuple):
    """What a place runs.

    Attributes:
        forms: of the ops.
        shape: of cases that do not say theirs.
        lengths: numbers of tokens.
        sizes: K, V.
        dtypes: that every decay is run in, each with the K and V that it is run at.
        kinds: dtypes of the inputs and of w that "smooth" decays are run in.
        layouts: whether segments and packed sequences of all kinds run, or one of each.
        chunk_sizes: that are asked for.
        promises: decays with their lower bounds.
        others: what else there is only here.
    """

    forms: tuple[str, ...]
    shape: dict[str, int]
    lengths: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    dtypes: tuple[tuple[str, int, int], ...]
    kinds: tuple[tuple[str, str | None], ...] = ()
    layouts: bool = False
    chunk_sizes: tuple[int, ...] = ()
    promises: tuple[dict[str, Any], ...] = ()
    others: tuple[dict[str, Any], ...] = ()


_GPU_SIZES = ((16, 16), (40, 40), (128, 128), (256, 256), (32, 72), (72, 32))
_PROMISES = (BOUNDED, dict(decay="strong", lower_bound=-20.0))
_BOTH = (("float32", 8, 6), ("float64", 8, 6))
_KINDS = (("bfloat16", None), ("float16", None), ("bfloat16", "float32"))
PLANS = {
    REFERENCE: Plan(("chunk",), dict(B=2, T=37, K=8, V=6), (1, 17), ((1, 9), (24, 16)), _BOTH, _KINDS),
    XLA: Plan(
        ("chunk", "fused_recurrent"),
        dict(B=2, T=37, K=8, V=6),
        (1, 15, 17, 100),
        ((1, 1), (16, 24), (256, 5), (7, 256)),
        _BOTH,
        _KINDS,
        layouts=True,
        chunk_sizes=(1, 2, 8, 16, 64),
        promises=_PROMISES,
    ),
    TRITON_INTERPRETER: Plan(
        ("chunk",),
        dict(B=1, T=37, K=16, V=16),
        (1, 15, 16, 17, 48),
        ((1, 9), (24, 16), (16, 72), (64, 64), (72, 20), (128, 136), (256, 16)),
        (("float32", 16, 16), ("bfloat16", 16, 16)),
        promises=(*_PROMISES, dict(decay="none", lower_bound=-0.1)),
    ),
    TRITON_GPU: Plan(
        ("chunk",),
        dict(B=2, T=48, K=64, V=64, dtype="bfloat16"),
        (1, 15, 16, 17, 100),
        _GPU_SIZES,
        # small heads compile faster
        (("bfloat16", 64, 64), ("float16", 32, 32), ("float32", 16, 16)),
        kinds=(("bfloat16", "float32"), ("bfloat16", "float16")),
        promises=(
            BOUNDED,
            dict(decay="none", lower_bound=-0.61),
            dict(dtype="float32", K=16, V=16, **BOUNDED),
        ),
        others=(
            *(dict(T=40, K=K, V=V, decay="mixed") for K, V in _GPU_SIZES),
            *(dict(T=40, K=D, V=D, decay=d, dtype="float32") for D in (64, 128) for d in ("smooth", "mixed")),
            *(dict(w_dtype=d, **BOUNDED) for d in ("float32", "float16")),
            dict(w_dtype="float32", decay="mixed", T=40),
            # RWKV-7's large heads have other kernels
            dict(K=128, V=128, w_dtype="float32", **BOUNDED),
            dict(K=128, V=128, w_dtype="float16", T=64, **BOUNDED),
            dict(K=128, V=128, decay="mixed", layout="segments", lengths=(5, 9, 1, 17, 16)),
            dict(K=128, V=128, decay="mixed", layout="packed", lengths=PACKED),
            # gradients of states are stored where those of tokens will be: whole pairs of chunks
            dict(T=64, K=128, V=128, decay="mixed"),
            dict(T=96, K=72, V=40, layout="segments", lengths=(5, 9, 1, 17, 64), **BOUNDED),
        ),
    ),
    PALLAS_INTERPRETER: Plan(
        ("fused_recurrent",),
        dict(B=2, T=37, K=16, V=16),
        (1, 18),
        ((24, 40), (1, 3)),
        (("float32", 16, 16),),
        (("bfloat16", "float32"),),
    ),
    PALLAS_GPU: Plan(
        ("fused_recurrent",),
        dict(B=2, T=100, K=64, V=64),
        (2, 16, 17, 700),
        ((16, 16), (24, 40), (64, 256), (128, 128), (256, 64), (5, 3)),
        (("float32", 64, 64),),
        (("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", None), ("float16", None)),
        # where all gradients have 16 bits, RWKV-7's come from the chunked form's kernel
        others=(
            *(dict(dtype="bfloat16", decay=decay) for decay in cases.DECAYS),
            dict(dtype="float16", decay="mixed", K=24, V=40),
            *(dict(dtype="bfloat16", decay="mixed", K=K, V=V) for K, V in ((128, 128), (16, 256), (256, 16))),
            dict(dtype="bfloat16", decay="mixed", T=40, layout="segments", lengths=SEGMENTS),
            dict(dtype="bfloat16", decay="mixed", layout="packed", lengths=PACKED),
        ),
    ),
}
PLANS[SCAN_INTERPRETER] = PLANS[PALLAS_INTERPRETER]._replace(
    kinds=(("bfloat16", "float32"), ("float16", "float32"))
)
PLANS[SCAN_GPU] = PLANS[PALLAS_GPU]


def calls(place: Place) -> Iterator[tuple[str, str, Case]]:
    """(name, form, case) of everything that ``place`` runs."""
    plan = PLANS[place]
    for op in OPS:
        for form in plan.forms:
            whole = form == plan.forms[0]
            for name, options in _varied(plan, op) if whole else [("mixed", dict(decay="mixed", scale=0.5))]:
                case = Case(op, **(plan.shape | options))
                yield f"{form}_{op} {name}", form, _at_some_scale(f"{form}_{op} {name}", case)


def _at_some_scale(name: str, case: Case) -> Case:
    """The case with sizes of its values and cotangents drawn by its name; errors are relative to norms."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if case.dtype == "float16" or case.w_dtype == "float16":
        size, exponent = rng.choice((0.5, 1.0, 2.0)), rng.integers(-3, 4)
    else:
        size, exponent = rng.choice((1e-6, 1.0, 1e3)), rng.integers(-60, 41)
    if size < 1e-3 and (exponent < scales.LOWEST_OF_SMALL or case.decay not in ("none", "weak", "layer")):
        size = 1.0
    return dataclasses.replace(case, sizes=(float(size),), exponents=(int(exponent),))


def _varied(plan: Plan, op: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for dtype, K, V in plan.dtypes:
        for decay in cases.DECAYS if dtype != "float64" else ("smooth", "mixed"):
            yield f"{decay} {dtype}", dict(decay=decay, dtype=dtype, K=K, V=V, scale=0.7)
    for T in plan.lengths:
        yield f"T {T}", dict(T=T, scale=0.35)
    for K, V in plan.sizes:
        # eight batch entries and heads: with K = V = 1 and one of them dS0 is a single number, a product of
        # differences that may nearly all cancel, and its relative error would judge the numbers drawn
        yield f"K {K} V {V}", dict(T=20, H=4, K=K, V=V)
    for dtype, w_dtype in plan.kinds:
        yield f"{dtype}, w {w_dtype or dtype}", dict(dtype=dtype, w_dtype=w_dtype)
    for decay in ("smooth", "mixed"):
        yield f"{decay} segments", dict(B=2, T=40, decay=decay, layout="segments", lengths=SEGMENTS)
        yield f"{decay} packed", dict(decay=decay, layout="packed", lengths=PACKED)
    if plan.layouts:
        for layout, kinds in MORE_LAYOUTS.items():
            for i, lengths in enumerate(kinds):
                yield f"{layout} {i}", dict(T=52, layout=layout, lengths=lengths)
    for chunk_size in plan.chunk_sizes:
        yield f"chunk {chunk_size}", dict(T=67, decay="mixed", chunk_size=chunk_size)
    for promise in plan.promises:
        name = f"{promise['decay']} {promise.get('dtype', '')} above {promise['lower_bound']}"
        yield name, promise
        yield f"{name}, segments", dict(promise, B=2, T=40, layout="segments", lengths=SEGMENTS)
    for other in plan.others:
        yield " ".join(f"{name}={value}" for name, value in other.items()), other
    if op == "rwkv7":
        yield from _nearly_parallel(plan)


def _nearly_parallel(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """The triangular inverse of RWKV-7 at its worst: each token removes what the one before holds."""
    if plan.shape.get("dtype") != "bfloat16" and plan.forms[0] == "chunk":
        for options in (dict(decay="none"), dict(decay="layer"), dict(decay="none", lower_bound=-5.0)):
            yield f"nearly parallel kk {options}", dict(T=100, K=16, V=16, parallel=True, **options)
