"""Parameters of scanned and of separate layers: conversion and initial values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .families import family_of_block


def stack_layers(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """``blocks_0``, ``blocks_1``, ... -> ``blocks``, every array with a leading layer axis.

    Parameters that layer 0 lacks (RWKV-7's v0, v1, v2) are zero there.

    Args:
        params: parameters (or gradients) of an unscanned model; plain arrays (`flax.linen.meta.unbox`).

    Raises:
        ValueError: ``params`` lacks ``blocks_0``, ``blocks_1``, ..., or holds a single layer of RWKV-7.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.models import stack_layers
        >>> layer = {"att": {"time_decay": jnp.zeros(64)}}
        >>> stack_layers({"blocks_0": layer, "blocks_1": layer})["blocks"]["att"]["time_decay"].shape
        (2, 64)
    """
    names = [f"blocks_{i}" for i in range(sum(name.startswith("blocks_") for name in params))]
    if not names or any(name not in params for name in names):
        raise ValueError(f"params must hold blocks_0, blocks_1, ... without gaps, got {sorted(params)}")
    first, *rest = (params[name] for name in names)
    like, family = (rest[0] if rest else first), family_of_block(first)
    if family is not None and (lost := [x for x in family.not_in_first_layer if x not in first["att"]]):
        if not rest:
            raise ValueError(
                f"params hold one layer of {family.name}, without the shapes of {', '.join(lost)}"
            )
        zeros = {name: jax.tree.map(jnp.zeros_like, like["att"][name]) for name in lost}
        first = {**first, "att": {**first["att"], **zeros}}
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), first, *rest)
    return {**{name: value for name, value in params.items() if name not in names}, "blocks": stacked}


def unstack_layers(params: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """``blocks`` -> ``blocks_0``, ``blocks_1``, ...: the inverse of `stack_layers`.

    Raises:
        ValueError: there is no ``blocks`` in ``params``.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.models import unstack_layers
        >>> layers = unstack_layers({"blocks": {"att": {"time_decay": jnp.zeros((2, 64))}}})
        >>> sorted(layers), layers["blocks_1"]["att"]["time_decay"].shape
        (['blocks_0', 'blocks_1'], (64,))
    """
    if "blocks" not in params:
        raise ValueError(f"params must hold blocks, the stacked layers, got {sorted(params)}")
    stacked = params["blocks"]
    layers = {
        f"blocks_{i}": jax.tree.map(lambda x, i=i: x[i], stacked)
        for i in range(jax.tree.leaves(stacked)[0].shape[0])
    }
    first = layers["blocks_0"]
    if (family := family_of_block(first)) is not None:
        att = {name: x for name, x in first["att"].items() if name not in family.not_in_first_layer}
        layers["blocks_0"] = {**first, "att": att}
    return {**{name: value for name, value in params.items() if name != "blocks"}, **layers}


def initial_params(model: nn.Module, key: jax.Array) -> dict[str, PyTree]:
    """Initial parameters, drawn in a program that compiles in seconds for any number of layers.

    The layers are drawn by a scan and then unstacked, where ``jax.jit(model.init)`` compiles for more than a
    minute (24 layers, a GPU). The numbers for a key are those of the model with ``scan_layers=True``.

    Returns:
        A tree like ``model.init(key, tokens)["params"]``.

    Example:
        >>> import jax
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, initial_params
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> sorted(initial_params(model, jax.random.key(0)))
        ['blocks_0', 'blocks_1', 'emb', 'head', 'ln0', 'ln_out']
    """
    config = model.config
    apart = not (config.scan_layers or config.logical_axes or config.num_layers == 1)
    drawn = type(model)(dataclasses.replace(config, scan_layers=True)) if apart else model
    return _draw(drawn, apart, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _draw(model: nn.Module, apart: bool, key: jax.Array) -> dict[str, PyTree]:
    params = model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]
    return unstack_layers(params) if apart else params
