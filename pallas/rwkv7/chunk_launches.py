"""How RWKV-7's chunked kernels are launched on each kind of GPU, and what all of them are called with."""

from __future__ import annotations

import jax

from ...core.context import RWKV7Inputs
from ..common.chunk_host import LaunchTable

# (value block, warps, pipeline stages) by pass and padded K, measured on an H200
LAUNCH: LaunchTable = {
    ("fwd", 64): (64, 2, 3),
    ("chunk_state", 64): (64, 2, 3),
    ("bwd", 64): (64, 4, 3),
    ("fwd", 128): (128, 8, 3),
    ("chunk_state", 128): (128, 8, 3),
    ("bwd_dh", 128): (64, 4, 3),
    ("bwd_grads", 128): (64, 4, 1),  # the block of keys; all values, in float32 `VALUES` at a time
    ("bwd", 128): (128, 8, 1),
    ("fwd", 256): (16, 4, 1),
    ("bwd", 256): (16, 8, 1),
    ("fwd", 64, "float32"): (64, 4, 3),
    ("chunk_state", 64, "float32"): (64, 4, 3),
    ("bwd_dh", 64, "float32"): (64, 4, 3),
    ("bwd_grads", 64, "float32"): (64, 4, 3),
    ("fwd", 128, "float32"): (128, 8, 2),
    ("chunk_state", 128, "float32"): (128, 8, 2),
    ("bwd_dh", 128, "float32"): (128, 8, 2),
    ("bwd_grads", 128, "float32"): (64, 4, 2),
    # not measured: what fits and spills least (tests/harness/resources.py)
    ("bwd", 64, "float32"): (64, 4, 1),
    ("bwd", 64, "small"): (32, 4, 1),
    ("fwd", 128, "small"): (128, 8, 2),
    ("bwd_dh", 128, "small"): (32, 2, 3),
    ("chunk_state", 128, "small"): (64, 8, 2),
    ("bwd", 128, "small"): (16, 8, 1),
    ("fwd", 64, "small float32"): (64, 4, 2),
    ("chunk_state", 64, "small float32"): (64, 4, 2),
    ("bwd_dh", 64, "small float32"): (64, 4, 2),
    ("bwd_grads", 64, "small float32"): (64, 4, 2),
    ("bwd", 64, "small float32"): (16, 8, 1),
    ("fwd", 128, "small float32"): (16, 8, 1),
    ("chunk_state", 128, "small float32"): (16, 8, 1),
    ("bwd_dh", 128, "small float32"): (16, 8, 1),
    ("bwd_grads", 128, "small float32"): (64, 4, 2),
    ("bwd", 128, "small float32"): (16, 8, 1),
    ("fwd", 256, "small float32"): (16, 8, 1),
    ("bwd", 256, "small float32"): (16, 8, 1),
}

PRECOMPUTED_A = 16, 1  # keys at a time, warps
VALUES = 32  # that gradients of one chunk are summed over at a time


def token_arguments(x: RWKV7Inputs) -> dict[str, jax.Array]:
    """The kernels' arguments r_ to b_."""
    return dict(r_=x.r, w_=x.w, k_=x.k, v_=x.v, a_=x.a, b_=x.b)
