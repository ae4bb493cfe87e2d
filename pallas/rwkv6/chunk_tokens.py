"""RWKV-6: r and k of a chunk times their decay factors."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common.decay import Keys, Queries


class ScaledTokens(NamedTuple):
    """The q side and the k side of a chunk, as operands of products."""

    r: Queries
    k: Keys


@triton.jit
def scaled_tokens(r, k, factors, c: tl.constexpr):
    """``r`` (times its scale) and ``k``, float32 [16, K], times their decay factors.

    Under a safe gate one factor serves A and the state, and one k side serves all queries.
    """
    score_r, high_k = (r * factors.score_ge).to(c.operand), (k * factors.second_half).to(c.operand)
    if c.unsafe_gate:
        low_k, state_r = (k * factors.first_half).to(c.operand), (r * factors.state_ge).to(c.operand)
    else:
        low_k, state_r = high_k, score_r
    return ScaledTokens(r=Queries(state=state_r, score=score_r), k=Keys(first_half=low_k, second_half=high_k))
