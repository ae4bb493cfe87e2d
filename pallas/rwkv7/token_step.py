"""RWKV-7, one token: the state is read once and written once. Plain JAX reads it twice, for ``a^T S`` and for
the new state: 1.9 times as long as a copy of it on an H200, this kernel 1.3 times.

Grid: blocks of values, heads, batch elements.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.decay import token_decay


@dataclasses.dataclass(frozen=True)
class TokenConfig:
    """Everything that a launch is compiled for: heads, keys and values of a head, keys and values of a
    program (powers of two), the factor of o.
    """

    H: int
    K: int
    V: int
    BK: int
    BV: int
    scale: float


class TokenOutputs(NamedTuple):
    """o [B, 1, H, V] and the new state [B, H, K, V]."""

    o: Tensor
    state: Tensor


@triton.jit
def rwkv7_token_kernel(x, out, c: tl.constexpr):
    """``x``: RWKV7Inputs with T = 1. ``out.state`` has the memory of the initial state."""
    key, value = tl.arange(0, c.BK), tl.program_id(0) * c.BV + tl.arange(0, c.BV)
    has_key, has_value = key < c.K, value < c.V
    head = tl.program_id(2).to(tl.int64) * c.H + tl.program_id(1)
    at = head * (c.K * c.V) + key[:, None] * c.V + value[None, :]
    mask = has_key[:, None] & has_value[None, :]
    k_at = head * c.K + key
    S = tl.load(x.initial_state + at, mask=mask, other=0.0)
    r = tl.load(x.r + k_at, mask=has_key, other=0.0).to(tl.float32)[:, None]
    w = tl.load(x.w + k_at, mask=has_key, other=0.0).to(tl.float32)[:, None]
    k = tl.load(x.k + k_at, mask=has_key, other=0.0).to(tl.float32)[:, None]
    a = tl.load(x.a + k_at, mask=has_key, other=0.0).to(tl.float32)[:, None]
    b = tl.load(x.b + k_at, mask=has_key, other=0.0).to(tl.float32)[:, None]
    v = tl.load(x.v + head * c.V + value, mask=has_value, other=0.0).to(tl.float32)[None, :]
    S = S * token_decay(w) + (b * tl.sum(S * a, 0)[None, :] + k * v)
    tl.store(x.initial_state + at, S, mask=mask)
    o = tl.sum(S * r, 0) * c.scale
    tl.store(out.o + head * c.V + value, o.to(out.o.dtype.element_ty), mask=has_value)
