"""A toy op, all of it: ``y_t = sum_{s <= t} x_s scale``, with an opaque implementation and a plain one. And
its sharded runs.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from fla_jax.core.names import OUT
from fla_jax.ops import Implementation, Op


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
    return Inputs(later * x.scale, jnp.sum(later * x.x, 1))  # the gradient of scale per row: the op sums it


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


def report():
    """The error and the kinds of collectives of every sharding mode on eight devices."""
    import numpy as np
    from collectives import sizes
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    x, scale = jax.random.normal(jax.random.key(0), (8, 16, 4)), jnp.linspace(0.5, 2, 4)
    run = jax.value_and_grad(lambda x, scale: jnp.sum(running_sum(x, scale, "kernel") ** 2), (0, 1))
    want = jax.value_and_grad(lambda x, scale: jnp.sum(jnp.cumsum(x * scale, 1) ** 2), (0, 1))(x, scale)
    found = {}
    rows = dict.fromkeys(("auto", "explicit", "shard_map", "shard_map, unchecked"), P("data"))
    tokens = dict.fromkeys(("tokens, auto", "tokens, explicit"), P(None, "data"))
    for name, spec in (rows | tokens).items():
        kind = AxisType.Explicit if "explicit" in name else AxisType.Auto
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

        def local(x, scale, name=name):
            value, (dx, dscale) = run(x, scale)
            if "unchecked" in name:
                dscale = jax.lax.psum(dscale, "data")
            return value[None], dx, dscale

        f = run
        if name.startswith("shard_map"):
            specs = (P("data"), P())
            f = jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=(P("data"), *specs), check_vma="un" not in name
            )
        with jax.set_mesh(mesh):
            args = (
                jax.device_put(x, NamedSharding(mesh, spec)),
                jax.device_put(scale, NamedSharding(mesh, P())),
            )
            try:
                # the value's own sum is left out of the count: gradients alone
                grads = f if name.startswith("shard_map") else lambda *a: run(*a)[1]
                text = jax.jit(grads).lower(*args).compile().as_text()
                got = jax.device_get(jax.jit(f)(*args))
                got = (np.sum(got[0]), tuple(got[1:])) if name.startswith("shard_map") else got
                error = max(
                    float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
                    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want))
                )
                found[name] = {"error": error, "collectives": sorted({kind for kind, _ in sizes(text)})}
            except ValueError as e:
                found[name] = {"error": str(e), "collectives": None}
    return found
