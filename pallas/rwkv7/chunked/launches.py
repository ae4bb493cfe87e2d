"""How RWKV-7's chunked kernels are launched on each kind of GPU, and what all of them are called with."""

from __future__ import annotations

import jax

from ....core.call import RWKV7Inputs
from ...plan.chunked import LaunchTable

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("forward", 64): (64, 2, 3),
    ("transfer", 64): (64, 2, 3),
    ("backward", 64): (64, 4, 3),
    ("forward", 128): (128, 8, 3),
    ("transfer", 128): (128, 8, 3),
    ("carry", 128): (64, 4, 3),
    ("gradients", 128): (64, 4, 1),  # the block of keys; all values, in float32 `VALUES` at a time
    ("backward", 128): (128, 8, 1),
    ("forward", 256): (16, 4, 1),
    ("backward", 256): (16, 8, 1),
    ("forward", 64, "float32"): (64, 4, 3),
    ("transfer", 64, "float32"): (64, 4, 3),
    ("carry", 64, "float32"): (64, 4, 3),
    ("gradients", 64, "float32"): (64, 4, 3),
    ("forward", 128, "float32"): (128, 8, 2),
    ("transfer", 128, "float32"): (128, 8, 2),
    ("carry", 128, "float32"): (128, 8, 2),
    ("gradients", 128, "float32"): (64, 4, 2),
    # not measured: what fits and spills least (tests/compile/resources.py)
    ("backward", 64, "float32"): (64, 4, 1),
    ("backward", 64, "small"): (32, 4, 1),
    ("forward", 128, "small"): (128, 8, 2),
    ("carry", 128, "small"): (32, 2, 3),
    ("transfer", 128, "small"): (64, 8, 2),
    ("backward", 128, "small"): (16, 8, 1),
    ("forward", 64, "small float32"): (64, 4, 2),
    ("transfer", 64, "small float32"): (64, 4, 2),
    ("carry", 64, "small float32"): (64, 4, 2),
    ("gradients", 64, "small float32"): (64, 4, 2),
    ("backward", 64, "small float32"): (16, 8, 1),
    ("forward", 128, "small float32"): (16, 8, 1),
    ("transfer", 128, "small float32"): (16, 8, 1),
    ("carry", 128, "small float32"): (16, 8, 1),
    ("gradients", 128, "small float32"): (64, 4, 2),
    ("backward", 128, "small float32"): (16, 8, 1),
    ("forward", 256, "small float32"): (16, 8, 1),
    ("backward", 256, "small float32"): (16, 8, 1),
}

SCORES = 16, 1  # keys at a time, warps
VALUES = 32  # that gradients of one chunk are summed over at a time


def token_arguments(x: RWKV7Inputs) -> dict[str, jax.Array]:
    """The kernels' arguments r_ to b_."""
    return dict(r_=x.r, w_=x.w, k_=x.k, v_=x.v, a_=x.a, b_=x.b)
