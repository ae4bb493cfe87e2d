"""Which axis of what is split over which axis of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..layers.state import RWKVState
from .mesh import ROWS, check_axes

Rules = tuple[tuple[str, Any], ...]


def axis_rules(model: Any, mesh: Mesh) -> Rules:
    """The logical axis rules (`flax.linen.logical_axis_rules`) that train ``model`` on ``mesh``.

    Parameters: ``embed``, the channels between layers, over fsdp; ``heads``, ``mlp`` and ``vocab`` over
    tensor. Vectors over the channels between layers have no name and are whole everywhere. Activations:
    ``batch`` over data and fsdp, ``act_heads``, ``act_mlp`` and ``act_vocab`` over tensor, ``act_embed``
    whole: matrices are gathered, and activations never move but for two sums a layer over tensor.

    A vocabulary that tensor does not divide, and ranks of low-rank pairs that fsdp does not divide, are
    whole.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        mesh: from `make_mesh`.

    Returns:
        Pairs of a logical axis and a mesh axis, or several, or None.

    Raises:
        ValueError: the mesh does not divide the model's channels, heads or hidden channels; the message names
            the size and the mesh axis.
    """
    check_axes(mesh)
    config, fsdp, tensor = model.config, mesh.shape["fsdp"], mesh.shape["tensor"]
    widths = _widths(model)
    heads = config.hidden_size // config.head_dim
    for what, size, axis in (
        ("hidden_size", config.hidden_size, "fsdp"),
        (f"hidden_size / head_dim = {config.hidden_size} / {config.head_dim}, the heads,", heads, "tensor"),
        *(("intermediate_size", size, "tensor") for size in sorted(widths["mlp"])),
    ):
        if size % mesh.shape[axis]:
            raise ValueError(
                f"{what} must be a multiple of mesh axis {axis} = {mesh.shape[axis]}, got {size}"
            )
    vocab = None if config.vocab_size % tensor else "tensor"
    return (
        ("batch", ROWS),
        ("length", "sequence"),
        ("embed", "fsdp"),
        ("heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", vocab),
        ("rank", None if any(size % fsdp for size in widths["rank"]) else "fsdp"),
        ("kv", None),
        ("layers", None),
        ("act_embed", None),
        ("act_heads", "tensor"),
        ("act_mlp", "tensor"),
        ("act_vocab", vocab),
    )


def parameter_shardings(model: Any, mesh: Mesh) -> Any:
    """How each parameter is stored: a tree of `jax.sharding.NamedSharding` like
    ``model.init(...)["params"]``.

    Raises:
        ValueError: see `axis_rules`.
    """
    rules = axis_rules(model, mesh)

    def one(box: Any) -> NamedSharding:
        return NamedSharding(mesh, nn.logical_to_mesh_axes(box.names, rules) or P())

    return jax.tree.map(one, _boxed(model), is_leaf=_is_box)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
    """How an optimiser's state is stored: what mirrors a parameter like the parameter, everything else whole.

    Args:
        optimizer: any optax transformation.
        params: the parameters, or their shapes (`jax.ShapeDtypeStruct`).
        shardings: theirs, from `parameter_shardings`.
        mesh: of the shardings.

    Returns:
        A tree of shardings like ``optimizer.init(params)``.
    """
    whole = NamedSharding(mesh, P())

    def mirrored(x: Any, param: Any, sharding: NamedSharding) -> NamedSharding:
        return sharding if x.shape == param.shape else whole

    state = jax.eval_shape(optimizer.init, params)
    return optax.tree_map_params(
        optimizer, mirrored, state, params, shardings, transform_non_params=lambda _: whole
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of tokens, masks and everything else [B, ...] that comes with a batch: rows over data and fsdp."""
    check_axes(mesh)
    return NamedSharding(mesh, P(ROWS))


def state_shardings(mesh: Mesh) -> Any:
    """Of a model's recurrent state: rows over data and fsdp, heads over tensor.

    Returns:
        An `RWKVState` of shardings, for ``jax.device_put(model.init_state(batch), state_shardings(mesh))``.
    """
    check_axes(mesh)
    shift, wkv = NamedSharding(mesh, P(None, ROWS)), NamedSharding(mesh, P(None, ROWS, "tensor"))
    fields: dict[str, Any] = {"att_shift": shift, "ffn_shift": shift, "wkv": wkv}
    return RWKVState(**fields)


def parameter_shapes(model: Any) -> Any:
    """Shapes and dtypes of the parameters, without boxes."""
    return jax.tree.map(lambda box: box.value, _boxed(model), is_leaf=_is_box)


@functools.lru_cache(maxsize=4)
def _boxed(model: Any) -> Any:
    """The parameters' shapes, boxed with the names of their axes."""
    named = model.clone(config=dataclasses.replace(model.config, logical_axes=True))
    return jax.eval_shape(named.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


def _is_box(x: Any) -> bool:
    return isinstance(x, nn.LogicallyPartitioned)


def _widths(model: Any) -> dict[str, set[int]]:
    """The sizes that hidden channels, and ranks where nothing else of a matrix is over fsdp, have in the
    model.
    """
    found: dict[str, set[int]] = {"mlp": set(), "rank": set()}
    for box in jax.tree.leaves(_boxed(model), is_leaf=_is_box):
        for name, size in zip(box.names, box.value.shape):
            if name == "mlp" or (name == "rank" and "embed" not in box.names):
                found[name].add(size)
    return found
