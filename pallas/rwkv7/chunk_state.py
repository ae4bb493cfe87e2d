"""RWKV-7: what a split does to the state at its start, before all splits are scanned (`state_passing_host`):
``ht = transition h0 + update``, and ``q_entry``, the queries of h0.

The forward scan without v, from the identity, gives the transition and, as its outputs, q_entry. With v,
from zero, it gives the update and, where no second scan follows, the outputs of a zero state.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import store_state
from ..common.chunk_config import with_safe_gate, with_square_state
from ..common.forgetting import LARGEST_STATE, TAIL, do_decays_vanish, store_zeros, tail_start
from ..common.gate import has_unsafe_gate, load_gate, state_scale
from .chunk_fwd import FwdOut, scan_chunks, scan_of
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
def identity(scan, gate, c: tl.constexpr):
    """The program's block of the identity, as `load_state` would load it."""
    return tl.where(scan.axes.value[:, None] == scan.axes.key[None, :], state_scale(gate, c, False), 0.0)


@triton.jit
def is_zero(h):
    """Whether all elements of a state are."""
    return tl.sum(tl.sum((h != 0.0).to(tl.int32), 1), 0) == 0


@triton.jit
def scan_without_v(x, A, index, gate, q_entry, scan, block, h, first, last, c: tl.constexpr):
    """`scan_chunks` of a transition: what is left of ``h``, and, as outputs, the queries of it."""
    x, out = ScanInputs(x.r, x.w, x.k, None, x.a, x.b), FwdOut(q_entry, None, None, None, None)
    return scan_chunks(x, A, index, gate, out, scan, block, h, first, last, c)


@triton.jit
def first_chunk_of_update(x, A, index, gate, scan, c: tl.constexpr):
    """The chunk from which a scan from zero gives the split's update: the first, or that of the tail.

    Tokens write back what they read of the state, so a transition may be nonzero where all decays vanish. It
    is computed where the chunks before the tail are more than those that it takes.
    """
    start, last = tail_start(scan.split), scan.num_chunks
    forgets = (start > TAIL * tl.cdiv(c.K, c.BV)) & do_decays_vanish(x.w, scan.split, scan.axes, c)
    if forgets:
        for block in range(0, tl.cdiv(c.K, c.BV)):
            columns = scan_of(index, block, c)
            h = identity(columns, gate, c) * LARGEST_STATE
            h = scan_without_v(x, A, index, gate, None, columns, block, h, start, last, c)
            forgets = forgets & is_zero(h)
    return tl.where(forgets, start, 0)


@triton.jit
def split_update(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes the update of a split, its final state from an initial state of zero, and its outputs."""
    scan, first = scan_of(index, block, c), 0
    if out.o_zero_state is None:
        first = first_chunk_of_update(x, A, index, gate, scan, with_square_state(c))
    h, outputs = tl.full([c.BV, c.BK], 0.0, tl.float32), FwdOut(out.o_zero_state, None, None, None, None)
    h = scan_chunks(x, A, index, gate, outputs, scan, block, h, first, scan.num_chunks, c)
    store_state(out.update, scan.head, h, scan.tile, gate, c)


@triton.jit
def split_transition(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes the transition of a split, its final state from the identity and no v, and entry queries.

    After strong decays both are zero and remain so: no token reads anything of the identity any more.
    """
    scan = scan_of(index, block, c)
    h = identity(scan, gate, c)
    for first in range(0, scan.num_chunks, TAIL):
        last = tl.minimum(first + TAIL, scan.num_chunks)
        if is_zero(h):
            store_zeros(out.q_entry, scan.split, first, last, scan.axes.value, scan.axes.has_value, c)
        else:
            h = scan_without_v(x, A, index, gate, out.q_entry, scan, block, h, first, last, c)
    store_state(out.transition, scan.head, h, scan.tile, gate, c)


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
        block -= c.num_blocks
        if is_unsafe:
            split_transition(x, A, index, gate, out, block, with_square_state(c))
        else:
            split_transition(x, A, index, gate, out, block, with_square_state(with_safe_gate(c)))
