"""The official training recipe: optimizer groups and learning-rate schedule.

Source: RWKV-LM ``RWKV-v7/train_temp`` (``configure_optimizers``, ``trainer.py``).
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..core.arguments import check_number

_DECAY_BASE = ("w0", "time_decay")
_MATRICES = ("kernel", "embedding")
_MUON_RMS = 0.2  # of updates: about what Adam's have (arXiv:2502.16982)


def parameter_groups(params: PyTree) -> PyTree:
    """The optimizer group of every parameter, by its name alone: the same for stacked and boxed parameters.

    Returns:
        A tree like ``params``: ``"decay_base"`` (w0, time_decay: twice the learning rate, no weight decay),
        ``"matrix"`` (embedding, head and dense projections: weight decay) or ``"other"`` (neither).

    Example:
        >>> from fla_jax.training import parameter_groups
        >>> parameter_groups({"w0": 0, "w1": 0, "key": {"kernel": 0}})
        {'key': {'kernel': 'matrix'}, 'w0': 'decay_base', 'w1': 'other'}
    """

    def group(path: PyTree, _: object) -> str:
        name = _names(path)[-1] if _names(path) else None
        return "decay_base" if name in _DECAY_BASE else "matrix" if name in _MATRICES else "other"

    return jax.tree_util.tree_map_with_path(group, params)


def matrix_mask(params: PyTree) -> PyTree:
    """Marks the parameters that have weight decay in the official recipe.

    Those are the ``"matrix"`` ones of `parameter_groups`; ``x.ndim > 1`` also holds for stacked vectors.

    Example:
        >>> import optax
        >>> from fla_jax.training import matrix_mask
        >>> matrix_mask({"w0": 0, "w1": 0, "key": {"kernel": 0}})
        {'key': {'kernel': True}, 'w0': False, 'w1': False}
        >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=matrix_mask)
    """
    return jax.tree.map(lambda group: group == "matrix", parameter_groups(params))


def muon_dimension_numbers(params: PyTree) -> PyTree:
    """The axes of each parameter that `optax.contrib.muon` orthogonalises.

    These are those of the dense projections in layers; Adam gets embedding, head, low-rank matrices and
    vectors, as in BlinkDL's ``modded-nanogpt-rwkv``.

    Returns:
        A tree like ``params``: `optax.contrib.MuonDimensionNumbers` for dense projections, else None.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from fla_jax.training import muon_dimension_numbers
        >>> params = {"head": {"kernel": jnp.zeros((8, 9))}, "key": {"kernel": jnp.zeros((8, 8))}}
        >>> found = muon_dimension_numbers(params)
        >>> found["head"]["kernel"], found["key"]["kernel"]
        (None, MuonDimensionNumbers(reduction_axis=-2, output_axis=-1))
        >>> optimizer = optax.contrib.muon(0.02, muon_weight_dimension_numbers=muon_dimension_numbers)
    """

    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # counted from the end: an axis of layers may precede
    return jax.tree_util.tree_map_with_path(lambda path, _: axes if _is_projection(path) else None, params)


def rwkv_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    kind: Literal["adam", "muon"] = "adam",
    weight_decay: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-18,
    clip_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay and the official parameter groups, or Muon for the dense projections.

    Args:
        learning_rate: a number or a schedule, such as `rwkv_schedule`'s.
        kind: ``"adam"``, the official recipe, or ``"muon"``: dense projections (see
            `muon_dimension_numbers`) get Muon's updates, scaled to a root mean square of 0.2, about that of
            Adam's (Liu et al., arXiv:2502.16982), so that both have one learning rate.
        weight_decay: of embedding, head and dense projections (`matrix_mask`); all others have none.
        b1: Adam's decay of the first moment. Muon's momentum is 0.95.
        b2: Adam's decay of the second moment.
        eps: Adam's epsilon; 1e-18 in effect means none.
        clip_norm: largest global norm of the gradient; None for no clipping.

    Returns:
        An optax transformation; its ``update`` needs ``params``.

    Raises:
        ValueError: ``kind`` is another, or ``clip_norm`` is not above 0. ``init`` raises it for float16
            parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.training import rwkv_optimizer, rwkv_schedule
        >>> tx = rwkv_optimizer(rwkv_schedule(6e-4, 6e-5, total_steps=1000))
        >>> state = tx.init({"w0": jnp.zeros(4), "key": {"kernel": jnp.zeros((4, 4))}})
    """
    if kind not in ("adam", "muon"):
        raise ValueError(f"kind must be 'adam' or 'muon', got {kind!r}")
    # `optax.inject_hyperparams` passes arrays, which may be traced
    if not isinstance(clip_norm, jax.Array | None) and check_number("clip_norm", clip_norm, 0) == 0:
        raise ValueError("clip_norm must be above 0, or None for no clipping, got 0")
    scale = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    if kind == "muon":
        scale = optax.partition({"muon": _scale_by_muon(), "adam": scale}, _muon_labels)
    optimizer = optax.chain(
        optax.identity() if clip_norm is None else _clip_by_global_norm(clip_norm),
        scale,
        optax.add_decayed_weights(weight_decay, mask=matrix_mask),
        optax.masked(optax.scale(2.0), _is_decay_base),
        optax.scale_by_learning_rate(learning_rate),
    )

    def init(params: PyTree) -> PyTree:
        _refuse_float16(params)
        return optimizer.init(params)

    return optimizer._replace(init=init)


def _refuse_float16(params: PyTree) -> None:
    """Raises ValueError for float16: squares of small gradients and epsilon are 0 in it, and updates NaN."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.result_type(x) == jnp.float16:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            why = "Adam's second moments underflow in it"
            raise ValueError(f"params must not be float16, got {name}: {why}; train in float32")


def _names(path: PyTree) -> list[str]:
    """The dict keys of a path; what follows them is inside a box (`flax.linen.LogicallyPartitioned`)."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]


def _is_decay_base(params: PyTree) -> PyTree:
    return jax.tree.map(lambda group: group == "decay_base", parameter_groups(params))


def _is_projection(path: PyTree) -> bool:
    """Whether a parameter is the matrix of a dense projection in a layer."""
    return _names(path)[-1:] == ["kernel"] and "head" not in _names(path)


def _muon_labels(params: PyTree) -> PyTree:
    """The name of the transformation that each parameter has."""
    name = lambda path, _: "muon" if _is_projection(path) else "adam"
    return jax.tree_util.tree_map_with_path(name, params)


def _scale_by_muon() -> optax.GradientTransformation:
    """Muon's updates with a root mean square of `_MUON_RMS`, whatever shape a matrix has.

    Measured, not computed from the shape: optax before 0.2.7 scales the updates itself.
    """
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=muon_dimension_numbers)

    def scale(x: jax.Array) -> jax.Array:
        rms = jnp.sqrt(jnp.mean(x * x, (-2, -1), keepdims=True))
        return x * (_MUON_RMS / jnp.where(rms > 0, rms, 1)).astype(x.dtype)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> PyTree:
        return jax.tree.map(scale, updates), state

    return optax.chain(muon, optax.GradientTransformation(optax.init_empty_state, update))


def _clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with a barrier behind the factor.

    Without it XLA fuses the factor into the update of every parameter: with 24 layers a third of the time
    that it spends on fusion.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> PyTree:
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
    _check_schedule(peak, final, total_steps, warmup_steps)
    return optax.warmup_cosine_decay_schedule(0.01 * peak, peak, warmup_steps, total_steps, final)


def wsd_schedule(
    peak: float, final: float, total_steps: int, decay_steps: int, warmup_steps: int = 10
) -> optax.Schedule:
    """Learning rate in three parts: warm-up to ``peak``, constant, and a linear decay to ``final`` (WSD).

    The constant part can be made longer when a run is resumed, and only the decay depends on its end.

    Args:
        peak: largest learning rate, reached after ``warmup_steps`` from ``0.01 * peak``.
        final: learning rate from ``total_steps`` on.
        total_steps: steps in all.
        decay_steps: steps of the decay, the last of all; usual are 10 to 20 % of them.
        warmup_steps: steps of the warm-up; 0 for none.

    Raises:
        ValueError: ``total_steps`` is below the steps of warm-up and decay, ``decay_steps`` is not positive,
            or ``peak`` or ``final`` is negative.

    Source: Hu et al., "MiniCPM", 2024 (warmup-stable-decay).

    Example:
        >>> from fla_jax.training import wsd_schedule
        >>> schedule = wsd_schedule(6e-4, 6e-5, total_steps=1000, decay_steps=100)
        >>> [f"{float(schedule(step)):.1e}" for step in (0, 10, 900, 1000)]
        ['6.0e-06', '6.0e-04', '6.0e-04', '6.0e-05']
    """
    _check_schedule(peak, final, total_steps, warmup_steps)
    if not 0 < decay_steps <= total_steps - warmup_steps:
        raise ValueError(
            f"decay_steps must be from 1 to total_steps - warmup_steps = {total_steps - warmup_steps}, got "
            f"{decay_steps}"
        )
    warmup = optax.linear_schedule(0.01 * peak, peak, max(warmup_steps, 1))
    decay = optax.linear_schedule(peak, final, decay_steps, total_steps - decay_steps)
    return optax.join_schedules([warmup, lambda step: decay(step + warmup_steps)], [warmup_steps])


def _check_schedule(peak: float, final: float, total_steps: int, warmup_steps: int) -> None:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"total_steps must be above warmup_steps >= 0, got total_steps = {total_steps}, warmup_steps = "
            f"{warmup_steps}"
        )
    peak, final = check_number("peak", peak, -math.inf), check_number("final", final, -math.inf)
    if peak <= 0 or final < 0:
        raise ValueError(f"peak must be > 0 and final >= 0, got peak = {peak}, final = {final}")
