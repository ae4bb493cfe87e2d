"""The token arrays of RWKV-7 in its chunked kernels, and what they become times decay factors."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.decay import Keys, Queries


class Tokens(NamedTuple):
    """Pointers to the inputs, or to their gradients: r, w, k, a, b [B, T, H, K], v [B, T, H, V]."""

    r_: Any
    w_: Any
    k_: Any
    v_: Any
    a_: Any
    b_: Any


@triton.jit
def advanced(tokens, at):
    """The pointers ``at`` elements further on."""
    return Tokens(
        tokens.r_ + at, tokens.w_ + at, tokens.k_ + at, tokens.v_ + at, tokens.a_ + at, tokens.b_ + at
    )


class Scaled(NamedTuple):
    """What reads (r, a) and what writes (k, b) in a chunk, as operands of products."""

    r: Queries
    a: Queries
    k: Keys
    b: Keys


@triton.jit
def scaled_tokens(r, k, a, b, factors, c: tl.constexpr):
    """``r`` (float32, times its scale), ``k``, ``a`` and ``b`` [16, K], times their decay factors.

    The bounded form has one factor for scores and state, and one for all rows.
    """
    score_r = (r * factors.score_gi).to(c.operand)
    score_a = (a.to(tl.float32) * factors.score_ge).to(c.operand)
    high_k = (k.to(tl.float32) * factors.second_half).to(c.operand)
    high_b = (b.to(tl.float32) * factors.second_half).to(c.operand)
    if c.unsafe_gate:
        low_k = (k.to(tl.float32) * factors.first_half).to(c.operand)
        low_b = (b.to(tl.float32) * factors.first_half).to(c.operand)
        state_r = (r * factors.state_gi).to(c.operand)
        state_a = (a.to(tl.float32) * factors.state_ge).to(c.operand)
    else:
        low_k, low_b, state_r, state_a = high_k, high_b, score_r, score_a
    return Scaled(
        r=Queries(state=state_r, score=score_r),
        a=Queries(state=state_a, score=score_a),
        k=Keys(first_half=low_k, second_half=high_k),
        b=Keys(first_half=low_b, second_half=high_b),
    )
