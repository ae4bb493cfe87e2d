"""Every implementation of the recurrences at every scale of values and cotangents: right and linear."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import cases, places, scales
from harness.places import PALLAS_GPU, SCAN_GPU, TRITON_GPU, TRITON_INTERPRETER
from harness.tiers import each_op

from . import recurrences


def _calls() -> Iterator[Any]:
    for place in places.here():
        interpreted = place.where == "interpreter"
        kinds = {"float32": 16}
        if place is TRITON_INTERPRETER or place.where == "gpu":
            kinds["bfloat16"] = 16 if interpreted else 64
        # two chunks in an interpreter
        T = 24 if interpreted else 40
        for op, form in itertools.product(cases.OPS, recurrences.PLANS[place].forms):
            for dtype, size in kinds.items():
                options: dict[str, Any] = dict(dtype=dtype, T=T, K=size, V=size)
                case = scales.case_of(op, scales.FEW if interpreted else scales.GRID, **options)
                # the recurrent kernels have float32 products for 16 bits too
                exact = dtype == "float32" or place in (PALLAS_GPU, SCAN_GPU)
                tol = scales.FLOAT32 if exact else scales.of_one_head(places.RECURRENCE[place][dtype])
                exponents = (-60, 40) if interpreted else scales.EXPONENTS
                marks = [pytest.mark.slow] if interpreted and form == "fused_recurrent" else []
                yield pytest.param(
                    case, place, form, exponents, tol, id=f"{place} {form}_{op} {dtype}", marks=marks
                )


@pytest.mark.parametrize("case, place, form, exponents, tol", _calls())
def test_gradients_are_right_and_linear_in_the_cotangents(case, place, form, exponents, tol):
    scales.check_linear(case, place.implementation, form, exponents, tol)


TRITON = {TRITON_INTERPRETER, TRITON_GPU}.intersection(places.here())


@pytest.mark.parametrize("place", TRITON)
@each_op
@pytest.mark.parametrize("T, large", [(40, "all but every 16th"), (512, "all but every 16th"), (512, "one")])
def test_scales_of_kernels_hold_for_tokens_of_very_different_sizes(place, op, T, large):
    """The scale of a long split is taken from some of its tokens (`pallas/common/cotangent_scale.py`)."""
    case = scales.case_of(op, [scales.Head("-8.0"), scales.Head("-20.0")], T=T)
    x, token = cases.build(case), np.arange(T)
    is_large = token % 16 > 0 if large.startswith("all") else token == 300
    v = x.arrays["v"] * np.where(is_large, 1, 1e-30)[:, None, None].astype(np.float32)
    x = x._replace(arrays=x.arrays | {"v": v})
    found = scales.wrong(case, cases.run(case, place.implementation, x), case.oracle(x), scales.FLOAT32)
    assert not found, found
