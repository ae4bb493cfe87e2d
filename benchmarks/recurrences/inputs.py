"""The arrays of a task: drawn alike for every implementation, then given as each takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from recurrences.peers import Implementation, Task

NAMES = {6: ("r", "k", "v", "w", "u", "initial_state"), 7: ("r", "w", "k", "v", "a", "b", "initial_state")}


def draw(task: Task, m: Any, normal: Callable[..., Any], uniform: Callable[..., Any]) -> dict[str, Any]:
    """Inputs and cotangents in float32; ``m`` is numpy, jax.numpy or torch. RWKV-7: kk of length one, a =
    -kk, b = kk * gate.
    """
    B, T, H, K, V = task.shape
    x = {name: normal(B, T, H, K) for name in ("r", "k", "w")}
    # what the RWKV-7 layer can pass, or RWKV-6's exp of anything, down to e^-1000
    x["w"] = -m.exp(2 * x["w"]) if task.decay == "any-strong" else -math.exp(-0.5) / (1 + m.exp(-x["w"]))
    if task.version == 6:
        x["u"] = normal(H, K)
    else:
        kk = normal(B, T, H, K)
        kk = kk / m.sqrt((kk * kk).mean(-1) * K)[..., None]
        x.update(a=-kk, b=kk * uniform(B, T, H, K))
    return {
        **x,
        "v": normal(B, T, H, V),
        "do": normal(B, T, H, V),
        "initial_state": normal(B, H, K, V),
        "ds": normal(B, H, K, V),
    }


def conventions(
    implementation: Implementation, x: dict[str, Any], m: Any, dtype: str, cast: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """The arrays as the implementation takes them: decay, orientation of the states, dtypes; ``dtype`` is the
    tokens'.
    """
    x = dict(x)
    if implementation.raw_decay:
        x["w"] = m.log(-x["w"])
    if implementation.value_first:
        x.update({name: m.swapaxes(x[name], -1, -2) for name in ("initial_state", "ds")})
    return {
        name: cast(a, implementation.state_dtype if name in ("initial_state", "ds") else dtype)
        for name, a in x.items()
    }


def split(task: Task, x: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    return {name: x[name] for name in NAMES[task.version]}, x["do"], x["ds"]
