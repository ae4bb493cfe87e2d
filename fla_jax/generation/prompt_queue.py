"""Prompts that wait to be read, and which are read together."""

from __future__ import annotations

import collections
import itertools

from .rows import Prompt

# How many prompts are read at a time: each number makes programs to compile. Few are filled up to the next
# number; from four on so many are read as there is a number for, for rows that fill a batch up cost as much
# as others. A free slot waits until there are a few to be filled together, a sixteenth of all.
TOGETHER = (1, 4, 16, 64)
_FILLED_UP = 4
_WAITING_SLOTS = 16
_WINDOW = 4  # prompts are chosen for similar lengths among so many times as many as are read together


class PromptQueue(collections.deque[Prompt]):
    """Prompts in the order of their submission."""

    def take(self, free: int, slots: int) -> list[Prompt]:
        """Removes the prompts to be read next: the first, and others of similar lengths.

        Args:
            free: number of free slots.
            slots: number of all slots.
        """
        count = min(free, len(self))
        if count == 0 or count < min(slots // _WAITING_SLOTS, len(self)):
            return []
        if count >= _FILLED_UP:
            count = max(size for size in TOGETHER if size <= count)
        window = list(itertools.islice(self, _WINDOW * count))
        first = _length(window[0])
        window.sort(key=lambda prompt: (abs(_length(prompt) - first), prompt.rows[0].number))
        for prompt in window[:count]:
            self.remove(prompt)
        return window[:count]


def _length(prompt: Prompt) -> int:
    assert prompt.tokens is not None
    return len(prompt.tokens)
