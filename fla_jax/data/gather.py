"""The place in the data of several processes, as one."""

from __future__ import annotations

import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree


def gather_state(state: PyTree, size: int, part: slice | list[int]) -> dict[str, PyTree]:
    """The state of `pack_documents` for a whole batch, from the states of the processes that make its parts.

    Every process calls it, and gets the same state: one that `TrainingCheckpoints` saves, and that iterators
    of any parts continue from, in any number of processes.

    Args:
        state: of this process' iterator.
        size: rows in a batch, B.
        part: the rows that this process makes.

    Example:
        >>> import grain, numpy as np
        >>> from fla_jax.data import gather_state, pack_documents
        >>> documents = grain.MapDataset.source([np.arange(1, 10)] * 2)
        >>> iterator = iter(pack_documents(documents, length=4, size=2, part=[0, 1]))
        >>> _ = next(iterator)
        >>> gather_state(iterator.get_state(), 2, [0, 1])
        {'document': [0, 1], 'offset': [4, 4]}
    """
    mine = np.full((2, size), -1, np.int64)
    mine[:, part] = state["document"], state["offset"]
    found = np.asarray(multihost_utils.process_allgather(mine.view(np.int32)))  # JAX would round 64 bits
    # processes that share a row have the same place in it
    document, offset = found.view(np.int64).reshape(-1, 2, size).max(0)
    return {"document": document.tolist(), "offset": offset.tolist()}
