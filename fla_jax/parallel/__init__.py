"""Training on many devices: meshes, shardings, a compiled step.

mesh = make_mesh(fsdp=-1)
step = TrainStep(model, rwkv_optimizer(6e-4), mesh)
state = step.init(jax.random.key(0))
for tokens in batches:
    state, loss = step(state, step.shard(tokens))
"""

from ..training.next_token import over_sequence
from .mesh import make_mesh
from .rules import (
    axis_rules,
    batch_sharding,
    optimizer_shardings,
    parameter_shardings,
    state_shardings,
)
from .train_state import CarriedTrainState, FP8TrainState
from .train_step import TrainStep
from .xla_options import overlap_flags, overlap_options

__all__ = [
    "CarriedTrainState",
    "FP8TrainState",
    "TrainStep",
    "axis_rules",
    "batch_sharding",
    "make_mesh",
    "optimizer_shardings",
    "over_sequence",
    "overlap_flags",
    "overlap_options",
    "parameter_shardings",
    "state_shardings",
]
