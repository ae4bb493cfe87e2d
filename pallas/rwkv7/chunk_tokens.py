"""RWKV-7: r, a, k and b of a chunk times their decay factors."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.decay import Keys, Queries


class ScanInputs(NamedTuple):
    """The inputs that a scan reads; without v it gives the transition."""

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


class KeyGrads(NamedTuple):
    """Gradients of r, w, k, a and b."""

    r: Tensor
    w: Tensor
    k: Tensor
    a: Tensor
    b: Tensor


@triton.jit
def chunk_grads(grads, at):
    """The gradients of the chunk at offset ``at``."""
    return KeyGrads(grads.r + at, grads.w + at, grads.k + at, grads.a + at, grads.b + at)


class ScaledTokens(NamedTuple):
    """The q side (r, a) and the k side (k, b) of a chunk, as operands of products."""

    r: Queries
    a: Queries
    k: Keys
    b: Keys


@triton.jit
def scaled_tokens(r, k, a, b, factors, c: tl.constexpr):
    """``r`` (float32, times its scale), ``k``, ``a`` and ``b`` [16, K], times their decay factors.

    Under a safe gate one factor serves A and the state, and one k side serves all queries.
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
    return ScaledTokens(
        r=Queries(state=state_r, score=score_r),
        a=Queries(state=state_a, score=score_a),
        k=Keys(first_half=low_k, second_half=high_k),
        b=Keys(first_half=low_b, second_half=high_b),
    )
