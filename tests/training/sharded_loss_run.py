"""The loss in blocks of tokens, with the rows of a batch on two devices: for test_chunked_loss.py."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fla_jax.training import chunked_cross_entropy


def loss(hidden, kernel, labels):
    return chunked_cross_entropy(hidden, kernel, labels, block_tokens=4)


def report():
    """(value, gradients) on one device; for each kind of mesh the same, and where hidden's gradient lies."""
    rng = np.random.default_rng(0)
    hidden, kernel = np.float32(rng.normal(size=(2, 6, 8))), np.float32(rng.normal(size=(8, 10)))
    labels = rng.integers(0, 10, (2, 6))
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    found = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = ((hidden, P("data")), (kernel, P()), (labels, P("data")))
            got = run(*(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed))
        found[kind.name] = jax.device_get(got), got[1][0].sharding.spec
    return jax.device_get(run(hidden, kernel, labels)), found
