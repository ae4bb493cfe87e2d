"""The recurrent states that a `CarriedTrainState` carries from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core.mesh import is_explicit, reshard
from ..layers.state import RWKVState
from .accumulate import joined
from .mesh import BATCH_AXES


def carry_shardings(mesh: Mesh) -> PyTree:
    """The shardings of a carry: those of `state_shardings` with the batch axis first.

    Every axis is named: on explicit meshes a shorter spec is another type, and a step would compile twice.
    """
    shift, wkv = P(BATCH_AXES, None, None), P(BATCH_AXES, None, "tensor", None, None)
    fields = {"att_shift": shift, "ffn_shift": shift, "wkv": wkv}
    shardings: dict[str, PyTree] = {name: NamedSharding(mesh, spec) for name, spec in fields.items()}
    return RWKVState(**shardings)


def with_carry(batch: PyTree, carry: RWKVState) -> dict[str, PyTree]:
    """A batch of `fla_jax.data.pack_documents` with the carry of the batch before it.

    Raises:
        ValueError: the batch does not have ``continues``, or has another number of sequences.
    """
    if not isinstance(batch, Mapping) or "continues" not in batch:
        got = f"a dict of {', '.join(sorted(batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            "batch must be a dict with continues, as pack_documents(..., carry_state=True) makes it, since "
            f"carry_sequences is set; got {got}"
        )
    size, wanted = len(batch["continues"]), carry.wkv.shape[0]
    if size != wanted:
        raise ValueError(f"batch must have carry_sequences = {wanted} sequences, got {size}")
    return {**batch, "carry": carry}


def stored_carry(carry: RWKVState, microbatches: int, shardings: PyTree) -> RWKVState:
    """The carry that a loss has returned, in the order of the batch, and sharded as a step's states are.

    On meshes with automatic axes, the program's output shardings do the latter.
    """
    carry = joined(carry) if microbatches > 1 else carry
    if not is_explicit():
        return carry
    return jax.tree.map(lambda x, sharding: reshard(x, *sharding.spec), carry, shardings)
