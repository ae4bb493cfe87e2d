"""The nnx model of docs/nnx.md on eight fake devices and on one. For test_nnx.py."""

from __future__ import annotations

import blocks
import flax.linen as nn
import jax
import optax
from flax import nnx

from fla_jax.parallel import make_mesh


def report():
    names = blocks.run("docs/nnx.md")
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 256)
    meshes = {"mesh": make_mesh(data=2, fsdp=2, tensor=2), "one device": make_mesh(devices=jax.devices()[:1])}
    found = {}
    for name, mesh in meshes.items():
        with jax.set_mesh(mesh), nn.logical_axis_rules(names["rules"]):
            model = names["Model"](vocab_size=256, width=64, num_layers=2, rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
            found[name] = [float(names["own_step"](model, optimizer, tokens)) for _ in range(3)]
        if name == "mesh":
            attention = model.blocks[0].attention
            params = {"key": attention.key["kernel"], "w1": attention.w1, "r_k": attention.r_k}
            found["specs"] = {key: spec(x[...]) for key, x in params.items()}
    return found


def spec(x):
    return (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
