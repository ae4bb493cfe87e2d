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

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.mesh import is_explicit, is_manual, mesh_axes, reshard, spec_of

Axes = tuple[str | None, ...]

# The activations' name for each axis that a weight shares with its product's operand or result.
_OF_ACTIVATIONS = {
    "embed": "activation_embed",
    "heads": "activation_heads",
    "mlp": "activation_mlp",
    "vocab": "activation_vocab",
}


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
    split = spec_of(x)[1] if is_explicit() else by_rule[0] if by_rule else None
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


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Holds an activation, or a weight, to the rules for its axes; ``x`` itself on a mesh with explicit
    axes.
    """
    return x if is_explicit() or is_manual() else nn.with_logical_constraint(x, names)


def beyond(entry: Any, taken: Sequence[str]) -> Any:
    """An entry of `spec_of` without the mesh axes that are taken."""
    left = tuple(axis for axis in mesh_axes(entry) if axis not in taken)
    return left if len(left) > 1 else left[0] if left else None


def unless_indivisible(entry: Any, indivisible_by: int | None) -> Any:
    """An entry of `spec_of`, or None where its devices could not share ``parts`` (heads) evenly."""
    sizes = jax.sharding.get_abstract_mesh().shape
    cut = (
        indivisible_by is not None
        and indivisible_by % math.prod(sizes[axis] for axis in mesh_axes(entry)) > 0
    )
    return None if cut else entry


def is_sharded() -> bool:
    """Whether anything here has a say: on a mesh with explicit axes, and where there are rules."""
    return is_explicit() or (bool(nn.get_logical_axis_rules()) and not is_manual())


def save_all_but_unsharded(primitive: Any, *_: Any, **__: Any) -> bool:
    """A `jax.checkpoint` policy: keeps everything for the backward pass but what was only moved between
    devices, and what is another shape of something else.

    Gathered weights kept from all layers would be the whole model on every device, and `enter_tp` would be
    kept beside the rows.
    """
    return primitive.name not in ("sharding_constraint", "reshard", "broadcast_in_dim", "reshape")


def _unsharded(weight: jax.Array, axes: Axes) -> jax.Array:
    """By rules: ``weight`` gathered from where it is stored to where it is used; its gradient goes the same
    way back.
    """
    return constrain(constrain(weight, *axes), *(_OF_ACTIVATIONS.get(axis or "") for axis in axes))


def unshard(weight: jax.Array, x: jax.Array, axes: Axes, indivisible_by: int | None = None) -> jax.Array:
    """A weight where elementwise use with ``x`` [B, T, C] needs it: whole along the mesh axes that split the
    rows.

    ``axes`` and ``parts`` as in `dot`, but the parts are of the weight's axis 0.
    """
    if not is_explicit():
        return _unsharded(weight, axes)
    taken = [axis for entry in spec_of(x)[:2] for axis in mesh_axes(entry)]
    first, *rest = (beyond(entry, taken) for entry in spec_of(weight))
    return reshard(weight, unless_indivisible(first, indivisible_by), *rest)


def unshard_for_dot(
    x: jax.Array, weight: jax.Array, axes: Axes, indivisible_by: int | None = None
) -> jax.Array:
    """``weight`` [I, O] where the product of ``x`` [..., I] with it needs it; see `dot`."""
    if not is_explicit():
        return _unsharded(weight, axes)
    *rows, inner = spec_of(x)
    taken = [axis for entry in rows for axis in mesh_axes(entry)]
    stored, out = (beyond(entry, taken) for entry in spec_of(weight))
    inner = inner or stored
    return reshard(weight, inner, unless_indivisible(beyond(out, mesh_axes(inner)), indivisible_by))


def out_sharding(*split: Any) -> dict[str, Any]:
    """What a product has to be told of its result's `spec_of`, on a mesh with explicit axes."""
    return {"out_sharding": P(*split)} if is_explicit() else {}


def tp_size_of(x: jax.Array, heads: int) -> int:
    """P for `enter_tp`: over how many devices rules split the heads of the rows of ``x`` [B, T, C]; 1 where
    not evenly, and for single tokens, which have no backward pass.
    """
    if is_explicit() or not is_sharded() or x.shape[1] == 1:
        return 1
    sizes = jax.sharding.get_abstract_mesh().shape
    devices = math.prod(sizes.get(axis, 1) for axis in mesh_axes(_rows_and_heads()[2]))
    return 1 if heads % devices else devices


def _rows_and_heads() -> Any:
    """What the rules split rows, tokens and heads over."""
    return nn.logical_to_mesh_axes(("batch", "length", "activation_heads"))


def enter_tp(x: jax.Array, tp_size: int) -> jax.Array:
    """[B, ...] -> [P B, ...]: rows that all devices of the heads' axis hold, as P rows of one device each.

    Nothing moves. But the gradient of what is made of such rows may differ from device to device: each
    carries its own part of the sum back to here, through mixes, shift and norm, and one [B, T, C] is summed
    in place of one for every product that the rows go into. `dot` with heads ends the copies.
    """
    if tp_size == 1:
        return x
    x = _constrain_tp(jnp.broadcast_to(x, (tp_size, *x.shape)), merged=False)
    return _constrain_tp(x.reshape(-1, *x.shape[2:]), merged=True)


def _constrain_tp(x: jax.Array, merged: bool) -> jax.Array:
    """Holds [P, B, ...], or ``merged`` [P B, ...], to one device a copy, and [..., T, C] to the rules."""
    rows, tokens, heads = (mesh_axes(entry) for entry in _rows_and_heads())
    first = (heads + rows,) if merged else (heads, rows or None)
    free = x.ndim - len(first)
    rest = (tokens or None, None) if free == 2 else (P.UNCONSTRAINED,) * free
    return jax.lax.with_sharding_constraint(x, P(*first, *rest))


def _dot_of_tp(x: jax.Array, weight: jax.Array, tp_size: int, to_heads: bool, **options: Any) -> jax.Array:
    """`dot` of `enter_tp` [P B, T, I]: with each copy's part of the weight [I, O], or with all of it."""
    if not to_heads:
        return _constrain_tp(_dot(x, weight, (((2,), (0,)), ((), ())), **options), merged=True)
    x = _constrain_tp(x.reshape(tp_size, -1, *x.shape[1:]), merged=False)
    weight = weight.reshape(weight.shape[0], tp_size, -1)
    y = jnp.moveaxis(_dot(x, weight, (((3,), (0,)), ((0,), (1,))), **options), 0, 2)
    return constrain(y.reshape(*y.shape[:2], -1), "batch", "length", "activation_heads")


def product(
    x: jax.Array,
    weight: jax.Array,
    axes: Axes,
    indivisible_by: int | None = None,
    tp_size: int = 1,
    **options: Any,
) -> jax.Array:
    """``x @ weight``, computed where the rows are.

    Args:
        x: [..., I], [B, T, I] as a rule.
        weight: [I, O].
        axes: names of the weight's axes.
        parts: how many pieces O consists of that no device may own a fraction of (heads); None for O itself.
        copies: where it is not 1, ``x`` is from `enter_tp`; the result is [B, T, O] if O are heads, and still
            [P B, T, O] if not.
        options: of `jax.lax.dot_general`.

    Returns:
        [..., O], its rows split like those of ``x``, and O like the weight's where that leaves the parts
        whole.
    """
    weight = unshard_for_dot(x, weight, axes, indivisible_by)
    if tp_size > 1:
        return _dot_of_tp(x, weight, tp_size, axes[-1] == "heads", **options)
    *rows, _ = spec_of(x)
    inner, out = spec_of(weight)
    names = ("batch", "length", *(None,) * (x.ndim - 3))[: x.ndim - 1]
    before, after = (_OF_ACTIVATIONS.get(axis or "") for axis in axes)
    x = reshard(x, *rows, inner) if is_explicit() else constrain(x, *names, before)
    y = _dot(x, weight, (((x.ndim - 1,), (0,)), ((), ())), **out_sharding(*rows, out), **options)
    return constrain(y, *names, after)


def _dot(x: jax.Array, weight: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
    """`jax.lax.dot_general`; a wider result of bfloat16 gives a cotangent that is rounded to bfloat16.

    Else both products of the backward pass are of float32 operands, at a fraction of the speed, from twice
    the bytes. float16 has not the range for that.
    """
    wide = options.pop("preferred_element_type", None)
    dot: Any = functools.partial(jax.lax.dot_general, dimension_numbers=dimensions, **options)
    if wide is None or x.dtype != jnp.bfloat16:
        return dot(x, weight, preferred_element_type=wide)
    return _wide_dot(dot, wide, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wide_dot(dot: Any, wide: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    return dot(x, weight, preferred_element_type=wide)


def _wide_dot_forward(dot: Any, wide: Any, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    return dot(x, weight, preferred_element_type=wide), (x, weight)


def _wide_dot_backward(dot: Any, wide: Any, kept: Any, dy: jax.Array) -> Any:
    _, pull = jax.vjp(dot, *kept)
    return pull(dy.astype(kept[0].dtype))


_wide_dot.defvjp(_wide_dot_forward, _wide_dot_backward)


def token_parts(x: jax.Array) -> tuple[int, int]:
    """Over how many devices the rows and the tokens of ``x`` [B, T, ...] are split, as far as it is known; 1
    where not evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or is_manual():
        return 1, 1
    split: Any = spec_of(x)[:2] if is_explicit() else nn.logical_to_mesh_axes(("batch", "length"))
    rows, tokens = (math.prod(mesh.shape[axis] for axis in mesh_axes(entry)) for entry in split)
    return 1 if x.shape[0] % rows else rows, 1 if x.shape[1] % tokens else tokens


def split_tokens(x: jax.Array, parts: tuple[int, int]) -> jax.Array:
    """[B, T, ...] -> [P, Q, B / P, T / Q, ...], the first two axes split over devices as rows and tokens
    were.
    """
    rows, tokens = parts
    x = x.reshape(rows, -1, *x.shape[1:])
    x = x.reshape(*x.shape[:2], tokens, -1, *x.shape[3:])
    return constrain(jnp.moveaxis(x, 2, 1), "batch", "length", *(None,) * (x.ndim - 2))


def join_tokens(x: jax.Array) -> jax.Array:
    """The inverse of `split_tokens`."""
    x = constrain(x, "batch", "length", *(None,) * (x.ndim - 2))
    x = jnp.moveaxis(x, 1, 2)
    x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
    return constrain(x.reshape(-1, *x.shape[2:]), "batch", "length", *(None,) * (x.ndim - 3))
