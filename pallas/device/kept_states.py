"""Where kernels find states that enter chunks, and the gradients of those that leave them: see
plan/kept_states.py, which says why they lie there.
"""

import triton
import triton.language as tl

from .chunk import C


@triton.jit
def state_rows(states, block, axes, mode: tl.constexpr, ARRAYS: tl.constexpr):
    """Pointers [BV, BK] to a state from where its chunks begin: in ``ARRAYS`` token arrays, or with 0 in the
    one array [.., V, K]; of value block ``block``.
    """
    if ARRAYS == 0:
        rows = states[0] + axes.value * mode.K
    else:
        # axes.value, in a form that shows the compiler that all rows of a thread lie in one array
        row = tl.arange(0, mode.BV)
        array = row % ARRAYS  # whole blocks of values begin in the first array
        first = tl.where(
            array < 2, tl.where(array < 1, states[0], states[1]), tl.where(array < 3, states[2], states[3])
        )
        rows = first + (block * (mode.BV // ARRAYS) + row // ARRAYS) * (mode.H * mode.K)
    return rows[:, None] + axes.key[None, :]


@triton.jit
def state_place(ranges, here, n, token, mode: tl.constexpr, ARRAYS: tl.constexpr, EVERY: tl.constexpr):
    """Where the chunks that share a state with the sequence's chunk ``n`` begin in those arrays: by the
    number of their state, or by their first token. ``token`` is where chunk ``n`` begins in token arrays.
    """
    if ARRAYS > 0:
        return token - (n % EVERY) * (C * mode.H * mode.K)
    else:
        if EVERY == 1:
            number = here.chunk0 + n
        elif mode.packed:  # a sequence's last state may be of fewer chunks: room for one more each
            number = (here.chunk0 + here.index * (EVERY - 1)) // EVERY + n // EVERY
        else:
            before = here.row.to(tl.int64) * tl.cdiv(ranges.T, EVERY * C)
            number = before + ((here.first - here.base) // C + n) // EVERY
        return (number * mode.H + tl.program_id(1)) * (mode.K * mode.V)


@triton.jit
def gradients_over_states(states, gradients, TAKEN: tl.constexpr):
    """Where to write four gradients: the first ``TAKEN`` in the memory of states, through the inputs'
    pointers (run/triton.py).
    """
    first, second, third, fourth = gradients
    if TAKEN > 0:
        first = states[0]
    if TAKEN > 1:
        second = states[1]
    if TAKEN > 2:
        third = states[2]
    if TAKEN > 3:
        fourth = states[3]
    return first, second, third, fourth
