"""Where kernels find states that enter chunks, and the gradients of those that leave them: see
common/state_buffers_host.py, which says why they lie there.
"""

import triton
import triton.language as tl

from .chunk import C


@triton.jit
def state_pointers(states, block, axes, c: tl.constexpr, NUM_BUFFERS: tl.constexpr):
    """Pointers [BV, BK] to a state from where its chunks begin: in ``ARRAYS`` token arrays, or with 0 in the
    one array [.., V, K]; of value block ``block``.
    """
    if NUM_BUFFERS == 0:
        rows = states[0] + axes.value * c.K
    else:
        # axes.value, in a form that shows the compiler that all rows of a thread lie in one array
        row = tl.arange(0, c.BV)
        array = row % NUM_BUFFERS  # whole blocks of values begin in the first array
        first = tl.where(
            array < 2, tl.where(array < 1, states[0], states[1]), tl.where(array < 3, states[2], states[3])
        )
        rows = first + (block * (c.BV // NUM_BUFFERS) + row // NUM_BUFFERS) * (c.H * c.K)
    return rows[:, None] + axes.key[None, :]


@triton.jit
def state_offset(
    index, split, n, token, c: tl.constexpr, NUM_BUFFERS: tl.constexpr, CHUNKS_PER_STATE: tl.constexpr
):
    """Where the chunks that share a state with the sequence's chunk ``n`` begin in those arrays: by the
    number of their state, or by their first token. ``token`` is where chunk ``n`` begins in token arrays.
    """
    if NUM_BUFFERS > 0:
        return token - (n % CHUNKS_PER_STATE) * (C * c.H * c.K)
    else:
        if CHUNKS_PER_STATE == 1:
            number = split.first_chunk + n
        elif c.packed:  # a sequence's last state may be of fewer chunks: room for one more each
            number = (
                split.first_chunk + split.index * (CHUNKS_PER_STATE - 1)
            ) // CHUNKS_PER_STATE + n // CHUNKS_PER_STATE
        else:
            before = split.row.to(tl.int64) * tl.cdiv(index.T, CHUNKS_PER_STATE * C)
            number = before + ((split.first - split.base) // C + n) // CHUNKS_PER_STATE
        return (number * c.H + tl.program_id(1)) * (c.K * c.V)


@triton.jit
def aliased_gradients(states, gradients, NUM_ALIASED: tl.constexpr):
    """Where to write four gradients: the first ``TAKEN`` in the memory of states, through the inputs'
    pointers (backend/triton.py).
    """
    first, second, third, fourth = gradients
    if NUM_ALIASED > 0:
        first = states[0]
    if NUM_ALIASED > 1:
        second = states[1]
    if NUM_ALIASED > 2:
        third = states[2]
    if NUM_ALIASED > 3:
        fourth = states[3]
    return first, second, third, fourth
