"""Addresses of stored chunk states and of their gradients; `state_buffers_host` says where they are and
why."""

import triton
import triton.language as tl

from .chunk import C


@triton.jit
def state_pointers(states, block, axes, num_buffers: tl.constexpr, c: tl.constexpr):
    """Pointers [BV, BK] to the state of value block ``block``, relative to `state_offset`: in ``num_buffers``
    token-shaped arrays, or with 0 in one array [.., V, K].
    """
    if num_buffers == 0:
        values = states[0] + axes.value * c.K
    else:
        # axes.value, in a form from which the compiler sees that all values of a thread are in one array
        value = tl.arange(0, c.BV)
        array = value % num_buffers  # whole blocks of values begin in the first array
        first = tl.where(
            array < 2,
            tl.where(array < 1, states[0], states[1 % num_buffers]),
            tl.where(array < 3, states[2 % num_buffers], states[3 % num_buffers]),
        )
        first = tl.multiple_of(first, 16)  # bytes; see `select_row`
        values = first + (block * (c.BV // num_buffers) + value // num_buffers) * (c.H * c.K)
    return values[:, None] + axes.key[None, :]


@triton.jit
def state_offset(index, split, n, token, num_buffers: tl.constexpr, c: tl.constexpr):
    """Offset of the state of the split's chunk ``n``, by its number or by the first token of the chunks that
    share it. ``token`` is the offset of chunk ``n`` in token arrays.
    """
    if num_buffers > 0:
        return token - (n % c.chunks_per_state) * (C * c.H * c.K)
    else:
        if c.chunks_per_state == 1:
            number = split.first_chunk + n
        elif c.packed:  # the last state of a sequence may have fewer chunks, so each sequence has one more
            number = (
                split.first_chunk + split.index * (c.chunks_per_state - 1)
            ) // c.chunks_per_state + n // c.chunks_per_state
        else:
            before = split.row.to(tl.int64) * tl.cdiv(index.T, c.chunks_per_state * C)
            number = before + ((split.first - split.base) // C + n) // c.chunks_per_state
        return (number * c.H + tl.program_id(1)) * (c.K * c.V)


@triton.jit
def dstate_offset(index, split, n, token, c: tl.constexpr):
    """`state_offset` in the gradients of states, which has an entry a chunk of what one launch takes."""
    if index.split is not None:
        number = tl.program_id(2).to(tl.int64) * (index.split_len // C) + n
        return (number * c.H + tl.program_id(1)) * (c.K * c.V)
    else:
        return state_offset(index, split, n, token, c.num_buffers, c)
