"""A GPU that is not here, for programs that are lowered and never run."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from fla_jax.core.gpu import lowering_for


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """JAX lowers for it; from 0.11 on Pallas asks which device that is."""
    known = {"platform": "gpu"} if "platform" in AbstractDevice.__dataclass_fields__ else {}
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, **known)
    with lowering_for(90), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield
