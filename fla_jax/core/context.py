"""The static facts of one call of an op, which choice, sharding and launches depend on."""

from __future__ import annotations

import dataclasses
from typing import Generic, NamedTuple, TypeVar

import jax

from .gpu import GPU

X = TypeVar("X", bound=NamedTuple)  # inputs of an op
Y = TypeVar("Y", bound=NamedTuple)  # its outputs
S = TypeVar("S")  # its settings: frozen and hashable


class ContextParallel(NamedTuple):
    """How devices split the tokens of each sequence.

    Attributes:
        axis: their mesh axis, for collectives, where an implementation gets one device's tokens; None where
            it gets whole sequences.
        size: number of devices.
    """

    axis: str | None = None
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Context(Generic[X, S]):
    """A static, hashable description of one call of an op.

    Attributes:
        op: the public function's name, for messages.
        shapes: the inputs as `jax.ShapeDtypeStruct`, None for those not given. Shapes are those of whole
            arrays, also where an implementation gets one device's shard.
        settings: the op's settings.
        platform: where the call runs: ``"cpu"``, ``"gpu"``, ``"tpu"``, ...
        gpu: the GPU that kernels are made for: see `fla_jax.core.gpu.current_gpu`.
        num_devices: number of devices that split batch and heads, by the mesh in context.
        save_residuals: whether a backward pass will follow.
        cp: how devices split the tokens.
    """

    op: str
    shapes: X
    settings: S
    platform: str
    gpu: GPU
    num_devices: int = 1
    save_residuals: bool = True
    cp: ContextParallel = dataclasses.field(default_factory=ContextParallel)

    def with_whole_sequences(self) -> Context[X, S]:
        """The same call where every device gets whole sequences."""
        return dataclasses.replace(self, cp=ContextParallel(None, self.cp.size))


def shapes_of(x: X) -> X:
    """``x`` with every array replaced by its shape and dtype."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), x)
