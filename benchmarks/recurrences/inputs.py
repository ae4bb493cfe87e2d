"""The arrays of a task: drawn alike for every implementation, then converted to its conventions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from peers.ops import Implementation, Task

NAMES = {6: ("r", "k", "v", "w", "u", "initial_state"), 7: ("r", "w", "k", "v", "a", "b", "initial_state")}
STATES = ("initial_state", "ds")


def draw(task: Task, m: Any, normal: Callable[..., Any], uniform: Callable[..., Any]) -> dict[str, Any]:
    """Inputs and cotangents in float32 by numpy, jax.numpy or torch. RWKV-7: a = -kk, b = kk * gate."""
    B, T, H, K, V = task.shape
    x = {name: normal(B, T, H, K) for name in ("r", "k", "w")}
    # decays of the RWKV-7 layer, or RWKV-6's exp of anything, down to e^-1000
    x["w"] = -m.exp(2 * x["w"]) if task.decay == "any-strong" else -math.exp(-0.5) / (1 + m.exp(-x["w"]))
    if task.version == 6:
        x["u"] = normal(H, K)
    else:
        kk = normal(B, T, H, K)
        kk = kk / m.sqrt((kk * kk).mean(-1) * K)[..., None]
        x.update(a=-kk, b=kk * uniform(B, T, H, K))
    x.update(v=normal(B, T, H, V), do=normal(B, T, H, V))
    return x | {name: normal(B, H, K, V) for name in STATES}


def converted(
    implementation: Implementation, x: dict[str, Any], m: Any, dtype: str, cast: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """The arrays in an implementation's convention of the decay, orientation of states and dtypes."""
    x = dict(x)
    if implementation.raw_decay:
        x["w"] = m.log(-x["w"])
    if implementation.value_first:
        x.update({name: m.swapaxes(x[name], -1, -2) for name in STATES})
    return {name: cast(a, implementation.state_dtype if name in STATES else dtype) for name, a in x.items()}


def split(task: Task, x: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """The inputs, do and the cotangent of the final state."""
    return {name: x[name] for name in NAMES[task.version]}, x["do"], x["ds"]
