"""RWKV-7, what a stretch of chunks makes of the state that enters it, before the forward walks all stretches
at once: ``S_out = M S_in + N``, and what each token reads of S_in (plan/stretches.py).

The forward's walk without v, from the identity matrix, gives M and, as its outputs, what each token reads;
with v, from zero, it gives N and, where nothing else needs a second walk, the outputs without S_in.
"""

import triton
import triton.language as tl

from ...device.chunk import Ranges, bounded, form_of, needs_any_decay, square
from .forward import Results, walk_forward
from .tokens import Tokens


@triton.jit
def walk_values(tokens, scores_, ranges, own_, N_, block, mode: tl.constexpr, OWN: tl.constexpr):
    """N of a stretch: what it makes of v, from a state of zero; its outputs, if they are wanted."""
    out = Results(own_, N_, (N_,), N_, N_)  # nothing is kept
    walk_forward(tokens, scores_, N_, ranges, out, block, mode=mode, GIVEN=False, READ=OWN)


@triton.jit
def walk_keys(tokens, scores_, ranges, reads_, M_, block, mode: tl.constexpr):
    """M of a stretch: what it makes of the state, from the identity."""
    out = Results(reads_, M_, (M_,), M_, M_)
    walk_forward(tokens, scores_, M_, ranges, out, block, mode=square(mode), WRITE=False)


@triton.jit
def rwkv7_transfer_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    scores_,
    seg_,
    cu_,
    chunk0_,
    any_decay_,
    T,
    span,
    reads_,
    M_,
    N_,
    own_,
    mode: tl.constexpr,
    PARTS: tl.constexpr,
    OWN: tl.constexpr,
):
    """Grid (``PARTS`` blocks of values for N, then blocks of keys for M; heads; stretches): ``M_``
    [B * splits, H, K, K], ``N_`` [.., K, V], ``reads_`` like r; with ``OWN`` the outputs from a state of
    zero, ``own_`` like v.
    """
    block = tl.program_id(0)
    form = form_of(any_decay_, tl.program_id(2), mode)
    tokens, ranges = Tokens(r_, w_, k_, v_, a_, b_), Ranges(seg_, cu_, chunk0_, T, span, form)
    any_decay = needs_any_decay(form, mode)
    if block < PARTS:
        if any_decay:
            walk_values(tokens, scores_, ranges, own_, N_, block, mode=mode, OWN=OWN)
        else:
            walk_values(tokens, scores_, ranges, own_, N_, block, mode=bounded(mode), OWN=OWN)
    else:
        if any_decay:
            walk_keys(tokens, scores_, ranges, reads_, M_, block - PARTS, mode=mode)
        else:
            walk_keys(tokens, scores_, ranges, reads_, M_, block - PARTS, mode=bounded(mode))
