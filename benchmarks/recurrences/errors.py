"""Relative errors on B1 T128 H2 against the float64 recurrence of tests/harness/oracles.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from peers.ops import Implementation, Task

from recurrences.inputs import converted, draw, split

CHECKED = (1, 128, 2)


def relative(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def small_task(implementation: Implementation, task: Task) -> Task:
    """The task whose errors are measured."""
    passes = "fwd+bwd" if implementation.backward else "fwd"
    return dataclasses.replace(task, shape=(*CHECKED, *task.shape[3:]), passes=passes)


def errors(framework: Any, implementation: Implementation, task: Task) -> dict[str, Any]:
    from harness import oracles

    backward, states = implementation.backward, implementation.states_backward
    small = small_task(implementation, task)
    rng = np.random.default_rng(1)
    drawn = draw(small, np, lambda *s: rng.standard_normal(s), lambda *s: rng.uniform(size=s))
    cast = lambda a, dtype: np.ascontiguousarray(a).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    inputs = split(small, converted(implementation, drawn, np, task.dtype, cast))
    run = framework.function(implementation, small, implementation.load(small))
    (o, final), grads = framework.to_numpy(run(*framework.from_numpy(inputs)))

    x = {name: a.astype(np.float64) for name, a in inputs[0].items()}
    do, ds = (a.astype(np.float64) for a in inputs[1:])
    key_first = (lambda a: a.swapaxes(-1, -2)) if implementation.value_first else lambda a: a
    x["w"] = -np.exp(x["w"]) if implementation.raw_decay else x["w"]
    x["initial_state"], ds = key_first(x["initial_state"]), key_first(ds) * implementation.final_cotangent
    if backward and not states:
        x["initial_state"], ds = np.zeros_like(ds), np.zeros_like(ds)
    oracle = getattr(oracles, small.op.split("_")[-1])
    out, want = oracle(x, {"o": do, "ht": ds} if backward else None)
    found: dict[str, Any] = {"o": relative(o, out["o"]), "worst_gradient": None, "dw": None}
    found["final_state"] = None if final is None else relative(key_first(final), out["ht"])
    if backward:
        if implementation.raw_decay:
            want["w"] = want["w"] * x["w"]
        if states:
            grads["initial_state"] = key_first(grads["initial_state"])
        else:
            del want["initial_state"]
        each = {name: relative(grads[name], g) for name, g in want.items()}
        worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name])
        found |= {"worst_gradient": each[worst], "worst_of": f"d{worst}", "dw": each["w"]}
    return found
