"""Where activations and weights lie on a mesh of devices: the one place where the layers say so.

Devices share the rows of a batch, and each makes all that the layers make of its rows. A weight may be stored
in parts; but a mesh axis that splits the rows of a product cannot split its weight as well, so there the
weight is gathered when it is used (FSDP). Any other mesh axis may split heads and hidden channels (tensor
parallelism).

On a mesh with explicit axes arrays carry their shardings in their types, and all that stands here follows
them. On any other mesh XLA decides, and `flax.linen.logical_axis_rules`, where there are any, hold it to the
plan. Activations have names of axes of their own (batch, length, act_embed, act_heads, act_mlp, act_vocab),
so that a rule can split parameters (vocab, embed, heads, kv, mlp, rank, layers) and leave activations whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.sharding import entries, is_explicit, is_manual, mesh_axes, place

Axes = tuple[str | None, ...]

# The activations' name for each axis that a weight shares with its product's operand or result.
_OF_ACTIVATIONS = {"embed": "act_embed", "heads": "act_heads", "mlp": "act_mlp", "vocab": "act_vocab"}


def sequence_axis(x: jax.Array) -> str | None:
    """The mesh axis that the tokens of the rows of ``x`` [B, T, ...] are split over, None for whole rows.

    Types say it on a mesh with explicit axes, else the rule for ``length``, also inside `jax.shard_map`.

    Raises:
        ValueError: they are split over several.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    by_rule = None if is_explicit() else nn.logical_to_mesh_axes(("length",))
    split = entries(x)[1] if is_explicit() else by_rule[0] if by_rule else None
    axes = [axis for axis in mesh_axes(split) if mesh.shape.get(axis, 1) > 1]
    if len(axes) > 1:
        raise ValueError(f"T can be split over one mesh axis, got {' and '.join(map(repr, axes))}")
    return axes[0] if axes else None


def check_sequence(name: str, x: jax.Array, lengths: jax.Array | None) -> None:
    """Raises unless the devices that share the tokens of ``x`` [B, T, ...] can do so."""
    axis = sequence_axis(x)
    if axis is None:
        return
    size = jax.sharding.get_abstract_mesh().shape[axis]
    if not is_manual() and x.shape[1] % size:
        raise ValueError(
            f"{name} must have a number of tokens T that is a multiple of mesh axis {axis!r} = {size}, got "
            f"T = {x.shape[1]}; rows of other lengths want rules without 'length'"
        )
    if lengths is not None:
        raise ValueError(f"lengths cannot go with tokens over mesh axis {axis!r}; segment_ids can")


def hold(x: jax.Array, *names: str | None) -> jax.Array:
    """Holds an activation, or a weight, to the rules for its axes; ``x`` itself on a mesh with explicit
    axes.
    """
    return x if is_explicit() or is_manual() else nn.with_logical_constraint(x, names)


def beyond(entry: Any, taken: Sequence[str]) -> Any:
    """An entry of `entries` without the mesh axes that are taken."""
    left = tuple(axis for axis in mesh_axes(entry) if axis not in taken)
    return left if len(left) > 1 else left[0] if left else None


def whole_parts(entry: Any, parts: int | None) -> Any:
    """An entry of `entries`, or None where its devices could not share ``parts`` (heads) evenly."""
    sizes = jax.sharding.get_abstract_mesh().shape
    cut = parts is not None and parts % math.prod(sizes[axis] for axis in mesh_axes(entry)) > 0
    return None if cut else entry


def is_placed() -> bool:
    """Whether anything here has a say: on a mesh with explicit axes, and where there are rules."""
    return is_explicit() or (bool(nn.get_logical_axis_rules()) and not is_manual())


def keep_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy: keeps everything for the backward pass but what was only moved between
    devices.

    Gathered weights kept from all layers would be the whole model on every device.
    """
    return primitive.name not in ("sharding_constraint", "reshard")


def _held(weight: jax.Array, axes: Axes) -> jax.Array:
    """By rules: ``weight`` gathered from where it is stored to where it is used; its gradient goes the same
    way back.
    """
    return hold(hold(weight, *axes), *(_OF_ACTIVATIONS.get(axis or "") for axis in axes))


def gathered(weight: jax.Array, x: jax.Array, axes: Axes, parts: int | None = None) -> jax.Array:
    """A weight where elementwise use with ``x`` [B, T, C] needs it: whole along the mesh axes that split the
    rows.

    ``axes`` and ``parts`` as in `product`, but the parts are of the weight's axis 0.
    """
    if not is_explicit():
        return _held(weight, axes)
    taken = [axis for entry in entries(x)[:2] for axis in mesh_axes(entry)]
    first, *rest = (beyond(entry, taken) for entry in entries(weight))
    return place(weight, whole_parts(first, parts), *rest)


def weight_for(x: jax.Array, weight: jax.Array, axes: Axes, parts: int | None = None) -> jax.Array:
    """``weight`` [I, O] where the product of ``x`` [..., I] with it needs it; see `product`."""
    if not is_explicit():
        return _held(weight, axes)
    *rows, inner = entries(x)
    taken = [axis for entry in rows for axis in mesh_axes(entry)]
    stored, out = (beyond(entry, taken) for entry in entries(weight))
    inner = inner or stored
    return place(weight, inner, whole_parts(beyond(out, mesh_axes(inner)), parts))


def result(*split: Any) -> dict[str, Any]:
    """What a product has to be told of its result's `entries`, on a mesh with explicit axes."""
    return {"out_sharding": P(*split)} if is_explicit() else {}


def product(
    x: jax.Array, weight: jax.Array, axes: Axes, parts: int | None = None, **options: Any
) -> jax.Array:
    """``x @ weight``, computed where the rows are.

    Args:
        x: [..., I], [B, T, I] as a rule.
        weight: [I, O].
        axes: names of the weight's axes.
        parts: how many pieces O consists of that no device may own a fraction of (heads); None for O itself.
        options: of `jax.lax.dot_general`.

    Returns:
        [..., O], its rows split like those of ``x``, and O like the weight's where that leaves the parts
        whole.
    """
    weight = weight_for(x, weight, axes, parts)
    *rows, _ = entries(x)
    inner, out = entries(weight)
    names = ("batch", "length", *(None,) * (x.ndim - 3))[: x.ndim - 1]
    before, after = (_OF_ACTIVATIONS.get(axis or "") for axis in axes)
    x = place(x, *rows, inner) if is_explicit() else hold(x, *names, before)
    y = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), **result(*rows, out), **options)
    return hold(y, *names, after)


def token_parts(x: jax.Array) -> tuple[int, int]:
    """Over how many devices the rows and the tokens of ``x`` [B, T, ...] are split, as far as it is known; 1
    where not evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or is_manual():
        return 1, 1
    split: Any = entries(x)[:2] if is_explicit() else nn.logical_to_mesh_axes(("batch", "length"))
    rows, tokens = (math.prod(mesh.shape[axis] for axis in mesh_axes(entry)) for entry in split)
    return 1 if x.shape[0] % rows else rows, 1 if x.shape[1] % tokens else tokens


def split_tokens(x: jax.Array, parts: tuple[int, int]) -> jax.Array:
    """[B, T, ...] -> [P, Q, B / P, T / Q, ...], the first two axes split over devices as rows and tokens
    were.
    """
    rows, tokens = parts
    x = x.reshape(rows, -1, *x.shape[1:])
    x = x.reshape(*x.shape[:2], tokens, -1, *x.shape[3:])
    return hold(jnp.moveaxis(x, 2, 1), "batch", "length", *(None,) * (x.ndim - 2))


def join_tokens(x: jax.Array) -> jax.Array:
    """The inverse of `split_tokens`."""
    x = hold(x, "batch", "length", *(None,) * (x.ndim - 2))
    x = jnp.moveaxis(x, 1, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return hold(x.reshape(-1, *x.shape[2:]), "batch", "length", *(None,) * (x.ndim - 3))
