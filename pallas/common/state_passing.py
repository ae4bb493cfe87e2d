"""Kernels between the splits of a sequence; `state_passing_host` calls them.

A split maps the state h0 at its start to ``ht = transition h0 + update`` at its end, and its outputs are
``o_t = q_entry_t^T h0 + o_zero_state_t``.
"""

import dataclasses
from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from .dots import dot


@dataclasses.dataclass(frozen=True)
class PassingConfig:
    """Compile-time facts of `state_passing_kernel`: sizes, splits of a sequence, whether ``transition`` is
    diagonal, and whether splits are passed from the last to the first, by the transposed transition.
    """

    H: int
    K: int
    V: int
    BK: int
    BV: int
    num_splits: int
    diagonal: bool
    reverse: bool


class Passing(NamedTuple):
    """Arrays of `state_passing_kernel`, float32.

    Attributes:
        transition: [splits, H, K, K], or [splits, H, K] if diagonal.
        update: [splits, H, K, V].
        edge: [B, H, K, V], the state at the start of each sequence, or its gradient at the end.
    """

    transition: Tensor
    update: Tensor
    edge: Tensor


class PassedStates(NamedTuple):
    """Outputs of `state_passing_kernel`, float32.

    Attributes:
        states: [splits, H, K, V], at the edge of each split that comes first in the order of passing.
        last: [B, H, K, V], at the far edge of the last split.
    """

    states: Tensor
    last: Tensor


class EntryOutput(NamedTuple):
    """Arrays of `add_entry_output_kernel` and `state_grad_kernel`, and their tokens.

    Attributes:
        q_entry: [B, T, H, K], effective queries of the state at the start of a split.
        o: [B, T, H, V], outputs of a zero state, or cotangents of outputs.
        h0: [splits, H, K, V] float32, states at the starts of splits.
        T: tokens of a sequence.
        split_len: tokens of a split.
    """

    q_entry: Tensor
    o: Tensor
    h0: Tensor
    T: Tensor
    split_len: Tensor


class SplitOutput(NamedTuple):
    """Output of `add_entry_output_kernel`, o [B, T, H, V]."""

    o: Tensor


class SplitGrad(NamedTuple):
    """Output of `state_grad_kernel`, dh [splits, H, K, V] float32."""

    dh: Tensor


@triton.jit
def state_passing_kernel(x, out, c: tl.constexpr):
    """Grid (blocks of values, heads, sequences): states at the edges of all splits.

    Few programs pass one split after another, and loads take the time. The load pipeline copies transitions
    ahead; updates, which no product reads as a tile, are loaded one split ahead here.
    """
    block, i_h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, c.BK), block * c.BV + tl.arange(0, c.BV)
    has_key, has_value = key < c.K, value < c.V
    offsets, mask = key[:, None] * c.V + value[None, :], has_key[:, None] & has_value[None, :]
    h = tl.load(x.edge + (row * c.H + i_h).to(tl.int64) * (c.K * c.V) + offsets, mask=mask, other=0.0)
    head = ((row * c.num_splits + (c.num_splits - 1 if c.reverse else 0)) * c.H + i_h).to(tl.int64)
    step = -c.H if c.reverse else c.H
    update = tl.load(x.update + head * (c.K * c.V) + offsets, mask=mask, other=0.0)
    for i in range(0, c.num_splits):
        tl.store(out.states + head * (c.K * c.V) + offsets, h, mask=mask)
        ahead = tl.load(
            x.update + (head + step) * (c.K * c.V) + offsets, mask=mask & (i < c.num_splits - 1), other=0.0
        )
        if c.diagonal:
            h = h * tl.load(x.transition + head * c.K + key, mask=has_key, other=0.0)[:, None] + update
        else:
            square = has_key[:, None] & has_key[None, :]
            transition = tl.load(
                x.transition + head * (c.K * c.K) + key[:, None] * c.K + key[None, :], mask=square, other=0.0
            )
            h = tl.dot(tl.trans(transition) if c.reverse else transition, h, update, input_precision="tf32x3")
        update = ahead
        head += step
    tl.store(out.last + (row * c.H + i_h).to(tl.int64) * (c.K * c.V) + offsets, h, mask=mask)


@triton.jit
def add_entry_output_kernel(x, out, c: tl.constexpr):
    """Grid (``num_blocks`` blocks of values times tiles of ``c.BT`` tokens, heads, splits):
    ``o_t = o_zero_state_t + q_entry_t^T h0``. h0 stays float32, since loads take the time.
    """
    block, i_h, p = tl.program_id(0) % c.num_blocks, tl.program_id(1), tl.program_id(2)
    start = (p % c.num_splits) * x.split_len
    t = tl.program_id(0) // c.num_blocks * c.BT + tl.arange(0, c.BT)
    key, value = tl.arange(0, c.BK), block * c.BV + tl.arange(0, c.BV)
    has_token, has_key, has_value = t < tl.minimum(x.split_len, x.T - start), key < c.K, value < c.V
    head = (p * c.H + i_h).to(tl.int64)
    at = x.h0 + head * (c.K * c.V) + key[:, None] * c.V + value[None, :]
    h0 = tl.load(at, mask=has_key[:, None] & has_value[None, :], other=0.0)
    token = (((p // c.num_splits).to(tl.int64) * x.T + start + t) * c.H + i_h)[:, None]
    mask = has_token[:, None] & has_key[None, :]
    q_entry = tl.load(x.q_entry + token * c.K + key[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets, mask = token * c.V + value[None, :], has_token[:, None] & has_value[None, :]
    o_zero_state = tl.load(x.o + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out.o + offsets, dot(q_entry, h0, c, o_zero_state), mask=mask)


@triton.jit
def state_grad_kernel(x, out, c: tl.constexpr):
    """Grid (blocks of values, heads, splits): ``sum_t q_entry_t do_t^T`` [K, V] of each split."""
    block, i_h, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, key, value = tl.arange(0, 32), tl.arange(0, c.BK), block * c.BV + tl.arange(0, c.BV)
    start = (p % c.num_splits) * x.split_len
    left = tl.minimum(x.split_len, x.T - start)
    first = ((p // c.num_splits).to(tl.int64) * x.T + start) * c.H + i_h
    acc = tl.full([c.BK, c.BV], 0.0, tl.float32)
    for n in range(0, tl.cdiv(left, 32)):
        t = n * 32 + token
        mask = (t < left)[None, :] & (key < c.K)[:, None]
        at = x.q_entry + (first + t[None, :] * c.H) * c.K + key[:, None]
        q_entry = tl.load(at, mask=mask, other=0.0).to(c.operand)
        mask = (t < left)[:, None] & (value < c.V)[None, :]
        at = x.o + (first + t[:, None] * c.H) * c.V + value[None, :]
        do = tl.load(at, mask=mask, other=0.0).to(c.operand)
        acc = dot(q_entry, do, c, acc)
    head = (p * c.H + i_h).to(tl.int64)
    mask = (key < c.K)[:, None] & (value < c.V)[None, :]
    tl.store(out.dh + head * (c.K * c.V) + key[:, None] * c.V + value[None, :], acc, mask=mask)
