"""Errors with heads over devices where every op is opaque to XLA. For test_models_parallel.py.

JAX runs no interpreter on automatic axes: plain implementations say that they are opaque.
"""

import dataclasses

import flax.linen as nn
import jax
import small_models as small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.models import stack_layers
from fla_jax.ops.layer import keys, norm_mix, readout
from fla_jax.ops.rwkv6 import api as rwkv6
from fla_jax.ops.rwkv7 import api as rwkv7
from fla_jax.parallel import axis_rules, make_mesh, parameter_shardings
from fla_jax.training import next_token_loss

OPS = norm_mix.NORM_SHIFT_MIX, keys.KEYS, readout.RWKV6, readout.RWKV7, rwkv6.CHUNK, rwkv7.CHUNK


def report(version):
    before = [list(op.implementations) for op in OPS]
    try:
        for op in OPS:
            (plain,) = (one for one in op.implementations if one.name == "xla")
            op.implementations[:] = [dataclasses.replace(plain, opaque=True)]
        return error(version)
    finally:
        for op, implementations in zip(OPS, before):
            op.implementations[:] = implementations


def error(version):
    model = small.model(version, scan_layers=True, remat="dense")
    params = stack_layers(small.params(small.model(version)))
    tokens, step = small.tokens(4, 17), jax.value_and_grad(next_token_loss(model))
    want = jax.jit(step)(params, tokens)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    stored = parameter_shardings(model, mesh)
    with jax.set_mesh(mesh), nn.logical_axis_rules(axis_rules(model, mesh)):
        rows = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
        got = jax.jit(step, out_shardings=(None, stored))(jax.device_put(params, stored), rows)
    return small.largest_error(got, want)
