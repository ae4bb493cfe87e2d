"""Memory of a device: what training needs, what there is, and the rematerialisation that fits."""

from __future__ import annotations

import os
import sys
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..models import RWKVConfig

# Bytes a parameter: itself, its gradient and two moments in float32. Numbers that a layer saves a token, in
# units of its channels: measured on an H200 34 for RWKV-7, 36 for RWKV-6. Bytes a word of the vocabulary: a
# block of logits, its gradient, and casts.
_BYTES_OF_PARAMETER, _SAVED_OF_TOKEN, _BYTES_OF_WORD = 16, 40, 4096 * 8


def estimate_memory(
    config: RWKVConfig, mesh: Mesh, *, batch: int, sequence: int, accumulate: int = 1
) -> float:
    """Bytes that a training step needs on a device without rematerialisation, estimated from above.

    For steps of 24 and 12 layers on an H200 the estimate was larger than the measurement, by a third at most.

    Args:
        config: of the model; its ``dtype`` is that of the activations.
        mesh: from `fla_jax.parallel.make_mesh`.
        batch: number of sequences of a step, over all devices.
        sequence: tokens of a sequence.
        accumulate: see `fla_jax.parallel.TrainStep`.

    Example:
        >>> from fla_jax.models import RWKV7Config
        >>> from fla_jax.parallel import make_mesh
        >>> from fla_jax.training import estimate_memory
        >>> config = RWKV7Config(65536, 768, 12, dtype="bfloat16")
        >>> estimate_memory(config, make_mesh(fsdp=-1), batch=32, sequence=4096) > 1e9
        True
    """
    C, L, V = config.hidden_size, config.num_layers, config.vocab_size
    size, itemsize = mesh.shape, np.dtype(config.dtype).itemsize
    ends, block_params = 1 if config.tie_embeddings else 2, 14 * L * C * C
    params = (block_params + ends * V * C) / (size["fsdp"] * size["tensor"])
    tokens = batch * sequence / accumulate / (size["data"] * size["fsdp"] * size["sequence"])
    saved = _SAVED_OF_TOKEN * itemsize * tokens * C * L
    if size["fsdp"] > 1 and not config.reshard_after_forward:
        saved += itemsize * block_params / size["tensor"]
    return _BYTES_OF_PARAMETER * params + saved + _BYTES_OF_WORD * V


def choose_remat(
    config: RWKVConfig,
    mesh: Mesh,
    *,
    batch: int,
    sequence: int,
    accumulate: int = 1,
    memory: float | None = None,
) -> Literal[False, "dense"]:
    """The configuration's ``remat``: False, which is fastest, if `estimate_memory` fits, else "dense".

    All processes of a run get the same.

    Args:
        memory: bytes of a device; None for `available_memory`. The other arguments: `estimate_memory`.

    Example:
        >>> from fla_jax.models import RWKV7Config
        >>> from fla_jax.parallel import make_mesh
        >>> from fla_jax.training import choose_remat
        >>> config = RWKV7Config(65536, 768, 12, dtype="bfloat16")
        >>> choose_remat(config, make_mesh(), batch=1024, sequence=4096, memory=80e9 / 1024)
        'dense'
    """
    memory = available_memory() if memory is None else memory
    needed = estimate_memory(config, mesh, batch=batch, sequence=sequence, accumulate=accumulate)
    fits = memory is not None and needed <= memory
    if jax.process_count() > 1:
        fits = bool(multihost_utils.broadcast_one_to_all(np.int32(fits)))
    return False if fits else "dense"


def compiled_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs on a device, by the compiler's account: arguments, results, all
    between, and code.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.training import compiled_memory
        >>> compiled_memory(jax.jit(lambda x: x + 1).lower(jnp.zeros(1000)).compile()) >= 8000
        True
    """
    of: PyTree = compiled.memory_analysis()
    made = of.output_size_in_bytes - of.alias_size_in_bytes + of.temp_size_in_bytes
    return int(of.argument_size_in_bytes + made + of.generated_code_size_in_bytes)


def available_memory() -> float | None:
    """Bytes of a device that JAX may use; on a CPU its share of the machine's memory; None if unknown.

    Example:
        >>> from fla_jax.training import available_memory
        >>> (available_memory() or 1e9) > 1e6
        True
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    if device.platform == "cpu" and sys.platform != "win32":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
    return None


def count_parameters(params: PyTree) -> tuple[int, int]:
    """The number of a model's parameters, and of those that multiply every token.

    The latter are all but the embedding, which counts if it is also the head.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import count_parameters
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> tokens = jnp.zeros((1, 2), jnp.int32)
        >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        >>> total, multiplied = count_parameters(params)
        >>> total - multiplied
        3200
    """
    total = sum(x.size for x in jax.tree.leaves(params))
    return total, total - (params["emb"]["embedding"].size if "head" in params else 0)


def peak_memory() -> float:
    """The most bytes that one of this process' devices has used; on a CPU, that the process has.

    Example:
        >>> from fla_jax.training import peak_memory
        >>> peak_memory() > 0
        True
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("peak_bytes_in_use" in of_device for of_device in stats):
        return float(max(of_device["peak_bytes_in_use"] for of_device in stats))
    if sys.platform == "win32":
        return float("nan")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
