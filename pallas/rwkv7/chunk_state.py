"""RWKV-7: what a split does to the state at its start, before all splits are scanned (`state_passing_host`):
``ht = transition h0 + update``, and ``q_entry``, the queries of h0.

The forward scan without v, from the identity, gives the transition and, as its outputs, q_entry. With v,
from zero, it gives the update and, where no second scan follows, the outputs of a zero state. Where the
registers hold both states, one program computes both, and what a chunk needs for both only once.

Of a sequence on one device the first split starts from ``x.initial_state``: its update is its final state,
its transition and q_entry are zero.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..backend.types import Tensor
from ..common.chunk import StateTile, chunk_starts, load_state, store_state
from ..common.chunk_config import with_safe_gate, with_square_state
from ..common.forgetting import LARGEST_STATE, TAIL, do_decays_vanish, store_zeros, tail_start
from ..common.gate import has_unsafe_gate, load_gate, state_scale
from .chunk_fwd import (
    FwdOut,
    chunk_output,
    load_chunk,
    next_state,
    scan_chunks,
    scan_of,
    store_values,
    written_values,
)
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
def starts_sequence(x, c: tl.constexpr):
    """Whether the split starts from the sequence's initial state."""
    return (tl.program_id(2) % c.num_splits == 0) & (x.initial_state is not None)


@triton.jit
def ends_sequence(x, c: tl.constexpr):
    """Whether the split is the last of a sequence on one device: the forward computes the final state, and
    nothing reads the update.
    """
    return (tl.program_id(2) % c.num_splits == c.num_splits - 1) & (x.initial_state is not None)


@triton.jit
def scan_without_v(x, A, index, gate, q_entry, scan, block, h, first, last, c: tl.constexpr):
    """`scan_chunks` of a transition: what is left of ``h``, and, as outputs, the queries of it."""
    x, out = ScanInputs(x.r, x.w, x.k, None, x.a, x.b), FwdOut(q_entry, None, None, None, None)
    return scan_chunks(x, A, index, gate, out, scan, block, h, first, last, c)


@triton.jit
def first_chunk_of_update(x, A, index, gate, out, c: tl.constexpr):
    """The chunk from which a scan from zero gives the split's update: the first, or that of the tail if the
    outputs of a zero state are not wanted, or none if nothing reads the update.

    Tokens write back what they read of the state, so a transition may be nonzero where all decays vanish. It
    is computed where the chunks before the tail are more than those that it takes.
    """
    first = 0
    square: tl.constexpr = with_square_state(c)
    if out.o_zero_state is None:
        scan = scan_of(index, 0, square)
        start, last = tail_start(scan.split), scan.num_chunks
        if ends_sequence(x, c):
            first = last
        elif start > TAIL * tl.cdiv(c.K, c.BV):
            forgets = do_decays_vanish(x.w, scan.split, scan.axes, c)
            if forgets:
                for block in range(0, tl.cdiv(c.K, c.BV)):
                    columns = scan_of(index, block, square)
                    h = identity(columns, gate, square) * LARGEST_STATE
                    h = scan_without_v(x, A, index, gate, None, columns, block, h, start, last, square)
                    forgets = forgets & is_zero(h)
            if forgets:
                first = start
    return first


@triton.jit
def split_update(x, A, index, gate, out, block, first, c: tl.constexpr):
    """Writes the update of a split, its state after the chunks from ``first`` on, and its outputs."""
    scan = scan_of(index, block, c)
    h, outputs = tl.full([c.BV, c.BK], 0.0, tl.float32), FwdOut(out.o_zero_state, None, None, None, None)
    if x.initial_state is not None:
        sequence = tl.program_id(2) // c.num_splits
        head = (sequence * c.H + tl.program_id(1)).to(tl.int64)
        is_loaded = starts_sequence(x, c) & (first == 0)
        h = load_state(
            x.initial_state, head, StateTile(scan.tile.offsets, scan.tile.mask & is_loaded), gate, c
        )
    h = scan_chunks(x, A, index, gate, outputs, scan, block, h, first, scan.num_chunks, c)
    store_state(out.update, scan.head, h, scan.tile, gate, c)


@triton.jit
def split_transition(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes the transition of a split, its final state from the identity and no v, and entry queries.

    After strong decays both are zero and remain so: no token reads anything of the identity any more.
    """
    scan = scan_of(index, block, c)
    h = tl.where(starts_sequence(x, c), 0.0, identity(scan, gate, c))
    for first in range(0, scan.num_chunks, TAIL):
        last = tl.minimum(first + TAIL, scan.num_chunks)
        if is_zero(h):
            store_zeros(out.q_entry, scan.split, first, last, scan.axes.value, scan.axes.has_value, c)
        else:
            h = scan_without_v(x, A, index, gate, out.q_entry, scan, block, h, first, last, c)
    store_state(out.transition, scan.head, h, scan.tile, gate, c)


@triton.jit
def split_both(x, A, index, gate, out, block, c: tl.constexpr):
    """Writes what `split_update` and `split_transition` write, in one scan where both scan all chunks."""
    square: tl.constexpr = with_square_state(c)
    first = first_chunk_of_update(x, A, index, gate, out, c)
    if starts_sequence(x, c) | (first > 0):
        split_update(x, A, index, gate, out, block, first, c)
        split_transition(x, A, index, gate, out, block, square)
    else:
        scan = scan_of(index, block, c)
        columns = scan
        if c.K != c.V:
            columns = scan_of(index, block, square)
        h, transition = tl.full([c.BV, c.BK], 0.0, tl.float32), identity(columns, gate, square)
        for n in range(0, scan.num_chunks):
            k_start, v_start = chunk_starts(scan.split, n, tl.program_id(1), c)
            chunk = load_chunk(x, A, index, gate, scan, n, c, MAKE_O=True)
            state = transition.to(c.operand)
            v_new = written_values(state, chunk, c, HAS_V=False)
            queries = chunk_output(state, v_new, chunk, c, HAS_V=False)
            store_values(out.q_entry + k_start, columns, n, queries, square)
            transition = next_state(transition, v_new, chunk, c, HAS_V=False)
            state = h.to(c.operand)
            v_new = written_values(state, chunk, c, HAS_V=True)
            if out.o_zero_state is not None:
                o = chunk_output(state, v_new, chunk, c, HAS_V=True)
                store_values(out.o_zero_state + v_start, scan, n, o, c)
            h = next_state(h, v_new, chunk, c, HAS_V=True)
        store_state(out.update, scan.head, h, scan.tile, gate, c)
        store_state(out.transition, scan.head, transition, columns.tile, gate, square)


@triton.jit
def chunk_state(x, A, index, gate, out, c: tl.constexpr):
    """Writes the program's blocks of update and transition."""
    block = tl.program_id(0)
    square: tl.constexpr = with_square_state(c)
    values: tl.constexpr = (c.V + c.BV - 1) // c.BV
    keys: tl.constexpr = (c.K + c.BV - 1) // c.BV
    if not c.joint_scan:
        if block < values:
            split_update(x, A, index, gate, out, block, first_chunk_of_update(x, A, index, gate, out, c), c)
        else:
            split_transition(x, A, index, gate, out, block - values, square)
    elif values == keys or (block < values) & (block < keys):
        split_both(x, A, index, gate, out, block, c)
    elif values > keys:
        split_update(x, A, index, gate, out, block, first_chunk_of_update(x, A, index, gate, out, c), c)
    else:
        split_transition(x, A, index, gate, out, block, square)


@triton.jit
def rwkv7_chunk_state_kernel(x, A, index, out, c: tl.constexpr):
    """Grid (blocks, heads, splits). With `Config.joint_scan` a program takes a block of values for the update
    and a block of keys for the transition, otherwise one or the other, blocks of values first.
    """
    gate = load_gate(index, tl.program_id(2), c)
    if has_unsafe_gate(gate, c):
        chunk_state(x, A, index, gate, out, c)
    else:
        chunk_state(x, A, index, gate, out, with_safe_gate(c))
