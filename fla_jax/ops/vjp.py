"""The custom_vjp core of an op: one rule, whatever implementation runs it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.names import name_results

# An implementation is a pair of plain functions over the op's inputs (token arrays, u for RWKV-6, initial state, segment_ids, cu_seqlens):
#   forward(cfg, *inputs)                    -> (o, final_state), states          `states`: a tree of arrays that only its own backward reads (cfg.keep)
#   backward(cfg, inputs, states, do, dfinal) -> gradients of all inputs but the last two
Implementation = tuple[Callable[..., Any], Callable[..., Any]]


def lazy(module: str) -> Implementation:
    """The rules ``forward`` and ``backward`` of a module of this package that is imported when one of them runs first."""

    def rule(name: str) -> Callable[..., Any]:
        return lambda *args: getattr(importlib.import_module(module, __package__), name)(*args)

    return rule("forward"), rule("backward")


def _reduced(gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """Inside `jax.shard_map`: summed over the mesh axes that the primal does not vary over (u, over the rows)."""
    axes = tuple(jax.typeof(gradient).manual_axis_type.varying - jax.typeof(primal).manual_axis_type.varying)
    return jax.lax.psum(gradient, axes) if axes else gradient


def make_core(table: Mapping[str, Implementation]) -> Callable[..., Any]:
    """``core(cfg, *inputs) -> (o, final_state)``, differentiable in reverse mode, run by ``table[cfg.implementation]``."""
    # jitted, so that calls outside jit find what the first one compiled; inlined where a jit surrounds them
    jitted = {name: tuple(jax.jit(rule, static_argnums=0, inline=True) for rule in rules) for name, rules in table.items()}

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def core(cfg, *inputs):
        results, _ = jitted[cfg.implementation][0](dataclasses.replace(cfg, keep=False), *inputs)
        return results

    def forward(cfg, *inputs):
        (o, final), states = jitted[cfg.implementation][0](cfg, *inputs)
        # named inside the rule, so that a policy can keep them: see core/names.py
        o, final, states = name_results(o, final, states)
        return (o, final), (inputs, states)

    def backward(cfg, residuals, cotangents):
        inputs, states = residuals
        gradients = jitted[cfg.implementation][1](cfg, inputs, states, *cotangents)
        return (*(_reduced(g, x) for g, x in zip(gradients, inputs)), None, None)

    core.defvjp(forward, backward)
    return core
