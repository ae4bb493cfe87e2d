"""The kernels between the stretches of rows: see plan/stretches.py, which launches them."""

import triton
import triton.language as tl

from .products import product


@triton.jit
def combine_kernel(
    M_,
    N_,
    edge_,
    states_,
    last_,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SPLITS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    BACKWARD: tl.constexpr,
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
    head = ((row * SPLITS + (SPLITS - 1 if BACKWARD else 0)) * H + h).to(tl.int64)
    step = -H if BACKWARD else H
    N = tl.load(N_ + head * (K * V) + offsets, mask=mask, other=0.0)
    for i in range(0, SPLITS):
        tl.store(states_ + head * (K * V) + offsets, S, mask=mask)
        ahead = tl.load(N_ + (head + step) * (K * V) + offsets, mask=mask & (i < SPLITS - 1), other=0.0)
        if DIAGONAL:
            S = S * tl.load(M_ + head * K + key, mask=has_key, other=0.0)[:, None] + N
        else:
            there = has_key[:, None] & has_key[None, :]
            M = tl.load(M_ + head * (K * K) + key[:, None] * K + key[None, :], mask=there, other=0.0)
            S = tl.dot(tl.trans(M) if BACKWARD else M, S, N, input_precision="tf32x3")
        N = ahead
        head += step
    tl.store(last_ + (row * H + h).to(tl.int64) * (K * V) + offsets, S, mask=mask)


@triton.jit
def reads_kernel(
    own_, reads_, states_, T, span, y_, mode: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Grid (``BLOCKS`` of values and tiles of ``TILE`` tokens, heads, stretches): ``y_t = own_t + reads_t S``
    with the state S that enters the stretch. S is not rounded to 16 bits: what is loaded takes the time.
    """
    block, h, p = tl.program_id(0) % BLOCKS, tl.program_id(1), tl.program_id(2)
    start = (p % mode.splits) * span
    t = tl.program_id(0) // BLOCKS * TILE + tl.arange(0, TILE)
    key, value = tl.arange(0, mode.BK), block * mode.BV + tl.arange(0, mode.BV)
    has_token, has_key, has_value = t < tl.minimum(span, T - start), key < mode.K, value < mode.V
    head = (p * mode.H + h).to(tl.int64)
    at = states_ + head * (mode.K * mode.V) + key[:, None] * mode.V + value[None, :]
    S = tl.load(at, mask=has_key[:, None] & has_value[None, :], other=0.0)
    token = (((p // mode.splits).to(tl.int64) * T + start + t) * mode.H + h)[:, None]
    there = has_token[:, None] & has_key[None, :]
    reads = tl.load(reads_ + token * mode.K + key[None, :], mask=there, other=0.0).to(tl.float32)
    place, there = token * mode.V + value[None, :], has_token[:, None] & has_value[None, :]
    own = tl.load(own_ + place, mask=there, other=0.0).to(tl.float32)
    tl.store(y_ + place, product(reads, S, mode, own), mask=there)


@triton.jit
def gather_kernel(reads_, do_, T, span, D_, mode: tl.constexpr):
    """Grid (value blocks, heads, stretches): ``sum_t reads_t do_t^T`` [K, V] of each stretch."""
    block, h, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, key, value = tl.arange(0, 32), tl.arange(0, mode.BK), block * mode.BV + tl.arange(0, mode.BV)
    start = (p % mode.splits) * span
    left = tl.minimum(span, T - start)
    first = ((p // mode.splits).to(tl.int64) * T + start) * mode.H + h
    acc = tl.full([mode.BK, mode.BV], 0.0, tl.float32)
    for n in range(0, tl.cdiv(left, 32)):
        t = n * 32 + token
        there = (t < left)[None, :] & (key < mode.K)[:, None]
        at = reads_ + (first + t[None, :] * mode.H) * mode.K + key[:, None]
        reads = tl.load(at, mask=there, other=0.0).to(mode.operand)
        there = (t < left)[:, None] & (value < mode.V)[None, :]
        at = do_ + (first + t[:, None] * mode.H) * mode.V + value[None, :]
        do = tl.load(at, mask=there, other=0.0).to(mode.operand)
        acc = product(reads, do, mode, acc)
    head = (p * mode.H + h).to(tl.int64)
    there = (key < mode.K)[:, None] & (value < mode.V)[None, :]
    tl.store(D_ + head * (mode.K * mode.V) + key[:, None] * mode.V + value[None, :], acc, mask=there)
