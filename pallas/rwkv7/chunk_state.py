"""RWKV-7: what a split does to the state at its start, before all splits are scanned (`state_passing_host`):
``ht = transition h0 + update``, and ``q_entry``, the queries of h0.

The forward scan without v, from the identity, gives the transition and, as its outputs, q_entry. With v,
from zero, it gives the update and, where no second scan follows, the outputs of a zero state.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk_config import with_safe_gate, with_square_state
from ..common.gate import has_unsafe_gate, load_gate
from .chunk_fwd import FwdOut, chunk_fwd
from .chunk_tokens import ScanInputs


class StateOut(NamedTuple):
    """Outputs: q_entry like r; transition [splits, H, K, K] and update [splits, H, K, V], float32;
    o_zero_state like v in float32, or None.
    """

    q_entry: Tensor
    transition: Tensor
    update: Tensor
    o_zero_state: Tensor


@triton.jit
def split_update(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes the update of a split, its final state from an initial state of zero, and its outputs."""
    x = ScanInputs(x.r, x.w, x.k, x.v, x.a, x.b, None)
    chunk_fwd(x, A, index, gate, FwdOut(out.o_zero_state, out.update, None, None, None), block, c)


@triton.jit
def split_transition(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes the transition of a split, its final state from the identity and no v, and entry queries."""
    x = ScanInputs(x.r, x.w, x.k, None, x.a, x.b, None)
    out = FwdOut(out.q_entry, out.transition, None, None, None)
    chunk_fwd(x, A, index, gate, out, block, with_square_state(c))


@triton.jit
def rwkv7_chunk_state_kernel(x, A, index, out, c: tl.constexpr):
    """Grid (``num_blocks`` blocks of values for the update, then blocks of keys for the transition; heads;
    splits).
    """
    block = tl.program_id(0)
    gate = load_gate(index, tl.program_id(2), c)
    is_unsafe = has_unsafe_gate(gate, c)
    if block < c.num_blocks:
        if is_unsafe:
            split_update(x, A, index, gate, out, block, c)
        else:
            split_update(x, A, index, gate, out, block, with_safe_gate(c))
    else:
        if is_unsafe:
            split_transition(x, A, index, gate, out, block - c.num_blocks, c)
        else:
            split_transition(x, A, index, gate, out, block - c.num_blocks, with_safe_gate(c))
