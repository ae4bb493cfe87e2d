"""The official training recipe: optimizer groups and learning-rate schedule.

Source: RWKV-LM ``RWKV-v7/train_temp`` (``configure_optimizers``, ``trainer.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

_DECAY_BASE = ("w0", "time_decay")
_MATRICES = ("kernel", "embedding")


def parameter_groups(params: Any) -> Any:
    """The optimizer group of every parameter, by its name alone, so for scanned and unscanned, boxed and
    plain parameters alike.

    Args:
        params: a tree of parameters, or of anything with their structure.

    Returns:
        A tree of the same structure: ``"decay_base"`` (w0, time_decay: twice the learning rate, no weight
            decay), ``"matrix"`` (embedding, head and dense
        projections: weight decay) or ``"other"`` (all low-rank matrices included: neither).

    Example:
        >>> from fla_jax.training import parameter_groups
        >>> parameter_groups({"w0": 0, "w1": 0, "key": {"kernel": 0}})
        {'key': {'kernel': 'matrix'}, 'w0': 'decay_base', 'w1': 'other'}
    """

    def group(path: Any, _: Any) -> str:
        # the last key of a dict: below it lies only the inside of a box (flax.linen.LogicallyPartitioned)
        name = next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None)
        return "decay_base" if name in _DECAY_BASE else "matrix" if name in _MATRICES else "other"

    return jax.tree_util.tree_map_with_path(group, params)


def _in_group(name: str) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(lambda group: group == name, parameter_groups(params))


def rwkv_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-18,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay and the official parameter groups (see `parameter_groups`).

    Args:
        learning_rate: a number or a schedule, such as `rwkv_schedule`'s.
        weight_decay: of embedding, head and dense projections; every other parameter has none.
        b1: Adam's decay of the first moment.
        b2: Adam's decay of the second moment.
        eps: Adam's epsilon; 1e-18 in effect means none.
        clip_norm: largest global norm of the gradient; None for no clipping.

    Returns:
        An optax transformation; its ``update`` needs ``params``.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.training import rwkv_optimizer, rwkv_schedule
        >>> tx = rwkv_optimizer(rwkv_schedule(6e-4, 6e-5, total_steps=1000))
        >>> state = tx.init({"w0": jnp.zeros(4), "key": {"kernel": jnp.zeros((4, 4))}})
    """
    return optax.chain(
        optax.identity() if clip_norm is None else _clip_by_global_norm(clip_norm),
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=_in_group("matrix")),
        optax.masked(optax.scale(2.0), _in_group("decay_base")),
        optax.scale_by_learning_rate(learning_rate),
    )


def _clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm`, whose factor all parameters wait for.

    XLA else computes the factor again for every parameter, and looks at all of those places each time that it
    has changed one: with 24 layers a third of its time to find what to fuse.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = optax.tree.norm(updates)
        factor = jax.lax.optimization_barrier(jnp.where(norm < limit, 1.0, limit / norm))
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def rwkv_schedule(peak: float, final: float, total_steps: int, warmup_steps: int = 10) -> optax.Schedule:
    """Learning rate: from ``0.01 * peak`` linearly to ``peak``, then along a cosine to ``final``.

    Args:
        peak: largest learning rate, reached after ``warmup_steps``.
        final: learning rate from ``total_steps`` on.
        total_steps: steps in all, those of the warm-up included.
        warmup_steps: steps of the warm-up; 0 for none.

    Raises:
        ValueError: ``total_steps`` is not above ``warmup_steps``, or ``peak`` or ``final`` is negative.

    Example:
        >>> from fla_jax.training import rwkv_schedule
        >>> schedule = rwkv_schedule(6e-4, 6e-5, total_steps=1000, warmup_steps=10)
        >>> [f"{float(schedule(step)):.1e}" for step in (0, 10, 1000)]
        ['6.0e-06', '6.0e-04', '6.0e-05']
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"total_steps must be above warmup_steps >= 0, got total_steps = {total_steps}, warmup_steps = "
            f"{warmup_steps}"
        )
    if peak <= 0 or final < 0:
        raise ValueError(f"peak must be > 0 and final >= 0, got peak = {peak}, final = {final}")
    return optax.warmup_cosine_decay_schedule(0.01 * peak, peak, warmup_steps, total_steps, final)
