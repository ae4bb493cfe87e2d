"""The recurrences under the cotangents that a layer's group norm gives them: orthogonal to the output of each
head, and large where that is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import cases, places
from harness.cases import Case, Inputs

from . import recurrences

EPS = 64e-5  # RWKV's, for heads of 64
DECAYS = {"rwkv6": "strong", "rwkv7": "layer"}  # the strongest of their layers


def cotangent(o: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradient of ``vdot(dy, group_norm(o))``."""
    x = o - o.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    y = x * scale
    return scale * (dy - dy.mean(-1, keepdims=True) - y * (dy * y).mean(-1, keepdims=True))


def _calls() -> Iterator[Any]:
    for place in places.here():
        interpreted = place.where == "interpreter"
        for op in cases.OPS:
            for dtype in ("float32", "bfloat16"):
                if dtype in places.RECURRENCE[place]:
                    size = 16 if dtype == "float32" else 64
                    case = Case(op, B=1, T=40, K=size, V=size, decay=DECAYS[op], dtype=dtype)
                    slow = interpreted and recurrences.PLANS[place].forms == ("fused_recurrent",)
                    marks = [pytest.mark.slow] if slow else []
                    yield pytest.param(case, place, id=f"{place} {op} {dtype}", marks=marks)


@pytest.mark.parametrize("case, place", [*_calls()])
def test_gradients(case, place):
    x = cases.build(case)
    o = case.oracle(x).outputs["o"]
    do = cotangent(o, np.random.default_rng(1).normal(size=o.shape))
    cotangents = {name: np.zeros_like(a) for name, a in x.cotangents.items()}
    cotangents["o"] = do.astype(x.cotangents["o"].dtype)
    tol = places.RECURRENCE[place][case.dtype]
    form = recurrences.PLANS[place].forms[0]
    cases.check(case, place.implementation, tol, x=Inputs(x.arrays, cotangents, x.layout), form=form)
