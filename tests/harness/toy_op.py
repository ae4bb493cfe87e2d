"""A toy op, all of it: ``y_t = sum_{s <= t} x_s scale``, with an opaque implementation and a plain one. And
its case for the harness.

Five places make an op from outside the package: the named tuples `Inputs` and `Outputs`, the rule (`fwd`,
`bwd`, `residual_axes`), the record `OP` with the axes of its arrays, the function `running_sum`, and `check`.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fla_jax.core.names import OUT
from fla_jax.ops import Implementation, Op

from . import cases
from .compare import Results, largest_of


class Inputs(NamedTuple):
    x: Any  # [B, T, C]
    scale: Any  # [C]


class Outputs(NamedTuple):
    y: Any  # [B, T, C]


def fwd(ctx, x):
    return Outputs(jnp.einsum("ts,bsc->btc", jnp.tri(x.x.shape[1]), x.x * x.scale)), {}


def residual_axes(ctx):
    return {}


def bwd(ctx, x, residuals, cotangents):
    later = jnp.einsum("ts,btc->bsc", jnp.tri(x.x.shape[1]), cotangents.y)
    return Inputs(later * x.scale, jnp.sum(later * x.x, 1))  # per batch entry: the op sums it


def check(ctx, x, outputs):
    checkify.check(jnp.all(x.x >= 0), f"{ctx.op}: x is negative")


THIS = sys.modules[__name__]
OP = Op(
    "running_sum",
    Inputs,
    Outputs,
    {"x": "b t c", "scale": "c", "y": "b t c"},
    [Implementation("plain", lambda: THIS), Implementation("kernel", lambda: THIS, opaque=True)],
    output_names=(OUT,),
    check=check,
)


def running_sum(x, scale, implementation=None):
    return OP(Inputs(x, scale), None, implementation).y


@dataclasses.dataclass(frozen=True)
class ToyCase:
    """One call of the toy op."""

    B: int = 3
    T: int = 4
    C: int = 5
    seed: int = 0
    op: str = "running_sum"

    def options(self, **more: Any) -> dict[str, Any]:
        return more

    def axes(self, name: str) -> str:
        return "." if name == "scale" else "bt"

    def build(self) -> cases.Inputs:
        rng = np.random.default_rng(self.seed)
        draw = lambda *shape: rng.normal(size=shape).astype("float32")
        shape = self.B, self.T, self.C
        return cases.Inputs({"x": draw(*shape), "scale": draw(self.C)}, {"y": draw(*shape)}, {})

    def oracle(self, x: cases.Inputs) -> Results:
        (inputs, scale), dy = x.arrays.values(), x.cotangents["y"]
        later = np.cumsum(np.float64(dy)[:, ::-1], 1)[:, ::-1]
        grads = {"x": later * scale, "scale": np.sum(later * inputs, (0, 1))}
        return Results({"y": np.cumsum(np.float64(inputs) * scale, 1)}, grads)

    def errors(self, got: Results, want: Results, tol: float = 1e-5) -> dict[str, tuple[float, float]]:
        found = {name: (largest_of(x, want.outputs[name]), tol) for name, x in got.outputs.items()}
        return found | {f"d{name}": (largest_of(g, want.grads[name]), tol) for name, g in got.grads.items()}


cases.CALLS["running_sum"] = lambda op, arrays, layout, **options: {"y": running_sum(**arrays, **options)}
