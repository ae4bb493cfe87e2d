"""Errors of an implementation on B1 T128 H2: relative Frobenius norm against the float64 recurrence of
tests/harness/oracles.py on the same rounded inputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from recurrences.inputs import conventions, draw, split
from recurrences.peers import Implementation, Task

CHECKED = (1, 128, 2)


def relative(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(side: Any, implementation: Implementation, task: Task) -> dict[str, Any]:
    """Errors on the small shape, after the inputs were rounded as the implementation takes them."""
    from harness import oracles

    backward = implementation.backward
    small = dataclasses.replace(
        task, shape=(*CHECKED, *task.shape[3:]), passes="fwd+bwd" if backward else "fwd"
    )
    rng = np.random.default_rng(1)
    drawn = draw(small, np, lambda *s: rng.standard_normal(s), lambda *s: rng.uniform(size=s))
    cast = lambda a, dtype: np.ascontiguousarray(a).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    inputs = split(small, conventions(implementation, drawn, np, task.dtype, cast))
    (o, final), grads = side.to_numpy(
        side.function(implementation, small, implementation.load(small))(*side.from_numpy(inputs))
    )

    x, do, ds = (
        {name: a.astype(np.float64) for name, a in inputs[0].items()},
        *(a.astype(np.float64) for a in inputs[1:]),
    )
    turn = (lambda a: a.swapaxes(-1, -2)) if implementation.value_first else lambda a: a
    raw = x["w"]
    x["w"] = -np.exp(raw) if implementation.raw_decay else raw
    x["initial_state"], ds = turn(x["initial_state"]), turn(ds) * implementation.final_cotangent
    if backward and not implementation.states_backward:
        x["initial_state"], ds = np.zeros_like(ds), np.zeros_like(ds)
    oracle = getattr(oracles, small.op.split("_")[-1])
    out, want = oracle(x, {"o": do, "ht": ds} if backward else None)
    found: dict[str, Any] = {
        "o": relative(o, out["o"]),
        "final_state": None if final is None else relative(turn(final), out["ht"]),
    }
    found |= {"worst_gradient": None, "dw": None}
    if backward:
        if implementation.raw_decay:
            want["w"] = want["w"] * x["w"]
        if implementation.states_backward:
            grads["initial_state"] = turn(grads["initial_state"])
        else:
            del want["initial_state"]
        each = {name: relative(grads[name], g) for name, g in want.items()}
        worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name])
        found |= {"worst_gradient": each[worst], "worst_of": f"d{worst}", "dw": each["w"]}
    return found
