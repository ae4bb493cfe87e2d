"""The kernels between the stretches of rows: see common/state_passing_host.py, which launches them."""

import triton
import triton.language as tl

from .dots import dot


@triton.jit
def state_passing_kernel(
    transition_,
    update_,
    edge_,
    states_,
    last_,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Grid (value blocks, heads, rows): the state at the near edge of every stretch, from ``edge_``
    [B, H, K, V] on, and that at the far edge of the ``last_``; from the end with ``BACKWARD``.

    Stretches are one after another, few programs walk them, and what takes time is to wait for memory. M is
    copied ahead by the load pipeline; N, which no product reads as a tile, is loaded a stretch ahead here.
    """
    block, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    has_key, has_value = key < K, value < V
    offsets, mask = key[:, None] * V + value[None, :], has_key[:, None] & has_value[None, :]
    S = tl.load(edge_ + (row * H + h).to(tl.int64) * (K * V) + offsets, mask=mask, other=0.0)
    head = ((row * NUM_SPLITS + (NUM_SPLITS - 1 if REVERSE else 0)) * H + h).to(tl.int64)
    step = -H if REVERSE else H
    N = tl.load(update_ + head * (K * V) + offsets, mask=mask, other=0.0)
    for i in range(0, NUM_SPLITS):
        tl.store(states_ + head * (K * V) + offsets, S, mask=mask)
        ahead = tl.load(
            update_ + (head + step) * (K * V) + offsets, mask=mask & (i < NUM_SPLITS - 1), other=0.0
        )
        if DIAGONAL:
            S = S * tl.load(transition_ + head * K + key, mask=has_key, other=0.0)[:, None] + N
        else:
            there = has_key[:, None] & has_key[None, :]
            M = tl.load(transition_ + head * (K * K) + key[:, None] * K + key[None, :], mask=there, other=0.0)
            S = tl.dot(tl.trans(M) if REVERSE else M, S, N, input_precision="tf32x3")
        N = ahead
        head += step
    tl.store(last_ + (row * H + h).to(tl.int64) * (K * V) + offsets, S, mask=mask)


@triton.jit
def add_entry_output_kernel(
    o_zero_state_, q_entry_, states_, T, split_len, o_, c: tl.constexpr, BT: tl.constexpr, NV: tl.constexpr
):
    """Grid (``BLOCKS`` of values and tiles of ``TILE`` tokens, heads, stretches): ``y_t = own_t + reads_t S``
    with the state S that enters the stretch. S is not rounded to 16 bits: what is loaded takes the time.
    """
    block, h, p = tl.program_id(0) % NV, tl.program_id(1), tl.program_id(2)
    start = (p % c.num_splits) * split_len
    t = tl.program_id(0) // NV * BT + tl.arange(0, BT)
    key, value = tl.arange(0, c.BK), block * c.BV + tl.arange(0, c.BV)
    has_token, has_key, has_value = t < tl.minimum(split_len, T - start), key < c.K, value < c.V
    head = (p * c.H + h).to(tl.int64)
    at = states_ + head * (c.K * c.V) + key[:, None] * c.V + value[None, :]
    S = tl.load(at, mask=has_key[:, None] & has_value[None, :], other=0.0)
    token = (((p // c.num_splits).to(tl.int64) * T + start + t) * c.H + h)[:, None]
    there = has_token[:, None] & has_key[None, :]
    reads = tl.load(q_entry_ + token * c.K + key[None, :], mask=there, other=0.0).to(tl.float32)
    place, there = token * c.V + value[None, :], has_token[:, None] & has_value[None, :]
    own = tl.load(o_zero_state_ + place, mask=there, other=0.0).to(tl.float32)
    tl.store(o_ + place, dot(reads, S, c, own), mask=there)


@triton.jit
def state_grad_kernel(q_entry_, do_, T, split_len, dh_, c: tl.constexpr):
    """Grid (value blocks, heads, stretches): ``sum_t reads_t do_t^T`` [K, V] of each stretch."""
    block, h, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, key, value = tl.arange(0, 32), tl.arange(0, c.BK), block * c.BV + tl.arange(0, c.BV)
    start = (p % c.num_splits) * split_len
    left = tl.minimum(split_len, T - start)
    first = ((p // c.num_splits).to(tl.int64) * T + start) * c.H + h
    acc = tl.full([c.BK, c.BV], 0.0, tl.float32)
    for n in range(0, tl.cdiv(left, 32)):
        t = n * 32 + token
        there = (t < left)[None, :] & (key < c.K)[:, None]
        at = q_entry_ + (first + t[None, :] * c.H) * c.K + key[:, None]
        reads = tl.load(at, mask=there, other=0.0).to(c.operand)
        there = (t < left)[:, None] & (value < c.V)[None, :]
        at = do_ + (first + t[:, None] * c.H) * c.V + value[None, :]
        do = tl.load(at, mask=there, other=0.0).to(c.operand)
        acc = dot(reads, do, c, acc)
    head = (p * c.H + h).to(tl.int64)
    there = (key < c.K)[:, None] & (value < c.V)[None, :]
    tl.store(dh_ + head * (c.K * c.V) + key[:, None] * c.V + value[None, :], acc, mask=there)
