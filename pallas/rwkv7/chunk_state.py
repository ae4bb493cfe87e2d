"""RWKV-7, what a stretch of chunks makes of the state that enters it, before the forward walks all stretches
at once: ``S_out = M S_in + N``, and what each token reads of S_in (common/state_passing_host.py).

The forward's walk without v, from the identity matrix, gives M and, as its outputs, what each token reads;
with v, from zero, it gives N and, where nothing else needs a second walk, the outputs without S_in.
"""

import triton
import triton.language as tl

from ..common.chunk import Index, has_unsafe_gate, load_gate, with_safe_gate, with_square_state
from .chunk_fwd import Outputs, chunk_fwd
from .chunk_tokens import Tokens


@triton.jit
def split_update(
    tokens, A_, index, o_zero_state_, update_, block, c: tl.constexpr, O_ZERO_STATE: tl.constexpr
):
    """N of a stretch: what it makes of v, from a state of zero; its outputs, if they are wanted."""
    out = Outputs(o_zero_state_, update_, (update_,), update_, update_)  # nothing is kept
    chunk_fwd(tokens, A_, update_, index, out, block, c=c, HAS_H0=False, MAKE_O=O_ZERO_STATE)


@triton.jit
def split_transition(tokens, A_, index, q_entry_, transition_, block, c: tl.constexpr):
    """M of a stretch: what it makes of the state, from the identity."""
    out = Outputs(q_entry_, transition_, (transition_,), transition_, transition_)
    chunk_fwd(tokens, A_, transition_, index, out, block, c=with_square_state(c), HAS_V=False)


@triton.jit
def rwkv7_chunk_state_kernel(
    r_,
    w_,
    k_,
    v_,
    a_,
    b_,
    A_,
    segment_bits_,
    cu_seqlens_,
    chunk_offsets_,
    gate_,
    T,
    split_len,
    q_entry_,
    transition_,
    update_,
    o_zero_state_,
    c: tl.constexpr,
    NV: tl.constexpr,
    O_ZERO_STATE: tl.constexpr,
):
    """Grid (``PARTS`` blocks of values for N, then blocks of keys for M; heads; stretches): ``M_``
    [B * splits, H, K, K], ``N_`` [.., K, V], ``reads_`` like r; with ``OWN`` the outputs from a state of
    zero, ``own_`` like v.
    """
    block = tl.program_id(0)
    gate = load_gate(gate_, tl.program_id(2), c)
    tokens, index = (
        Tokens(r_, w_, k_, v_, a_, b_),
        Index(segment_bits_, cu_seqlens_, chunk_offsets_, T, split_len, gate),
    )
    any_decay = has_unsafe_gate(gate, c)
    if block < NV:
        if any_decay:
            split_update(tokens, A_, index, o_zero_state_, update_, block, c=c, O_ZERO_STATE=O_ZERO_STATE)
        else:
            split_update(
                tokens,
                A_,
                index,
                o_zero_state_,
                update_,
                block,
                c=with_safe_gate(c),
                O_ZERO_STATE=O_ZERO_STATE,
            )
    else:
        if any_decay:
            split_transition(tokens, A_, index, q_entry_, transition_, block - NV, c=c)
        else:
            split_transition(tokens, A_, index, q_entry_, transition_, block - NV, c=with_safe_gate(c))
