"""Gradient accumulation: the loss and the gradient of a batch, one microbatch after the other.

`optax.microbatch` takes the same sequences into each microbatch. Up to optax 0.2.8 it fails on meshes with
explicit axes: it compares versions of JAX as text, in which 0.10 is older than 0.7.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..core.mesh import spec_of
from ..layers.sharding import out_sharding
from ..training.losses import divisor

Trained = tuple[PyTree, PyTree]  # parameters, and the scales of FP8 products or None
LossAndAux = Callable[[Trained, PyTree, jax.Array | None], tuple[jax.Array, PyTree]]
Weight = Callable[[PyTree], jax.Array]


def microbatches(batch: PyTree, count: int) -> PyTree:
    """[B, ...] -> [count, B / count, ...] of each array: sequence i goes into microbatch i % count, so that
    every device takes a part of its own sequences.
    """

    def split(x: jax.Array) -> jax.Array:
        first, *rest = spec_of(x) or (None,)
        x = x.reshape(-1, count, *x.shape[1:], **out_sharding(first, None, *rest))
        return x.swapaxes(0, 1)

    return jax.tree.map(split, batch)


def joined(parts: PyTree) -> PyTree:
    """[count, B / count, ...] -> [B, ...] of each array: undoes `microbatches`."""

    def join(x: jax.Array) -> jax.Array:
        _, first, *rest = spec_of(x) or (None, None)
        x = x.swapaxes(0, 1)
        return x.reshape(-1, *x.shape[2:], **out_sharding(first, *rest))

    return jax.tree.map(join, parts)


def accumulated_value_and_grad(
    loss: LossAndAux, weight: Weight, count: int, constrain: Callable[[PyTree], PyTree]
) -> Callable[[Trained, PyTree, jax.Array | None], tuple[PyTree, Trained]]:
    """`jax.value_and_grad` of a loss that is a weighted mean, in ``count`` microbatches.

    Only one microbatch's activations are in memory at a time. ``weight`` weighs losses and gradients,
    so that value and gradient are those of the whole batch; gradients are summed in at least float32. Where
    a weight is 0, the loss is the undivided sum (see `divisor`). Scales of FP8 products are the largest of
    all microbatches. Aux outputs of several are stacked, [count, ...].

    Args:
        loss: of parameters and scales, a batch, and a key of random numbers or None; each microbatch gets
            another key.
        weight: of a batch, such as its number of labels.
        count: microbatches.
        constrain: shards the sum of gradients like the parameters.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if count == 1:
        return value_and_grad

    def accumulated(trained: Trained, batch: PyTree, key: jax.Array | None) -> tuple[PyTree, Trained]:
        total = divisor(weight(batch))

        def add(sums: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
            microbatch, key = xs
            (value, aux), (grads, scales) = value_and_grad(trained, microbatch, key)
            wide = jnp.promote_types(value.dtype, jnp.float32)
            share = divisor(weight(microbatch)).astype(wide) / total.astype(wide)
            grads = jax.tree.map(lambda total, x: total + share * x, sums[0], grads)
            return (constrain(grads), jax.tree.map(jnp.maximum, sums[1], scales)), (share * value, aux)

        params, scales = trained
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params)
        start = constrain(zeros), jax.tree.map(jnp.zeros_like, scales)
        keys = None if key is None else jax.random.split(key, count)
        sums, (values, aux) = jax.lax.scan(add, start, (microbatches(batch, count), keys))
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), sums[0], params)
        return (jnp.sum(values), aux), (grads, sums[1])

    return accumulated


def weighted_losses(
    loss: LossAndAux, weight: Weight, count: int, trained: Trained, batch: PyTree
) -> tuple[jax.Array, PyTree]:
    """Sums of weighted losses and of weights over ``count`` microbatches; aux outputs, stacked if several."""

    def one(microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        total = weight(microbatch)
        value, aux = loss(trained, microbatch, None)
        return jnp.stack([value * divisor(total), total]), aux

    if count == 1:
        return one(batch)
    sums, aux = jax.lax.map(one, microbatches(batch, count))
    return sums.sum(0), aux


def num_sequences(batch: PyTree) -> jax.Array:
    """The weight of a batch whose loss does not name another."""
    return jnp.float32(jax.tree.leaves(batch)[0].shape[0])
