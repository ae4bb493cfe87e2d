"""The token arrays of RWKV-6 in its chunked kernels, and what they become times decay factors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.decay import Keys, Queries


class Tokens(NamedTuple):
    """Pointers to the inputs, or to their gradients: r, k, w [B, T, H, K], v [B, T, H, V], u [B, H, K]."""

    r_: Any
    k_: Any
    v_: Any
    w_: Any
    u_: Any


class Scaled(NamedTuple):
    """What reads and what writes in a chunk, as operands of products."""

    r: Queries
    k: Keys


@triton.jit
def scaled_tokens(r, k, factors, c: tl.constexpr):
    """``r`` (times its scale) and ``k``, float32 [16, K], times their decay factors.

    The bounded form has one factor for scores and state, and one for all rows.
    """
    score_r, high_k = (r * factors.score_ge).to(c.operand), (k * factors.second_half).to(c.operand)
    if c.unsafe_gate:
        low_k, state_r = (k * factors.first_half).to(c.operand), (r * factors.state_ge).to(c.operand)
    else:
        low_k, state_r = high_k, score_r
    return Scaled(r=Queries(state=state_r, score=score_r), k=Keys(first_half=low_k, second_half=high_k))
