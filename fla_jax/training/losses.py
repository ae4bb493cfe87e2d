"""Next-token losses, with the official recipe's L2Wrap.

Source: RWKV-LM ``RWKV-v7/train_temp`` (``L2Wrap``).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ..core.arguments import check_integer, check_number
from ..core.mesh import is_explicit, reshard, shard_like, spec_of, vary_alike
from ..layers.sharding import ActivationSharding, constrain, out_sharding
from ..layers.token_blocks import join_tokens, split_tokens, token_blocks


def _check_labels(name: str, x: jax.Array, labels: jax.Array, mask: jax.Array | None) -> None:
    for what, y in (("labels", labels), ("mask", mask)):
        if y is not None and y.shape != x.shape[:-1]:
            raise ValueError(
                f"{what} must have shape {list(x.shape[:-1])}, that of {name} without the last axis, got "
                f"{list(y.shape)}"
            )
    _check_integers(labels)


def _check_integers(labels: jax.Array) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}")


def label_mask(
    labels: Int[Array, "*B"], mask: Shaped[Array, "*B"] | None, ignore_index: int | None
) -> Shaped[Array, "*B"] | None:
    """``mask`` with zeros where the label is ``ignore_index``; None for all labels."""
    if ignore_index is None:
        return mask
    _check_integers(labels)
    limits = jnp.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:  # no label is: jax would cast it, -100 to 156 for uint8
        return mask
    return mask_where(labels != ignore_index, mask)


def divisor(total: jax.Array) -> jax.Array:
    """The divisor of a loss whose weights sum to ``total``: 1 for 0, a sum that negative weights can have."""
    return jnp.where(total != 0, total, 1)


def mask_where(counts: Bool[Array, "*B"], mask: Shaped[Array, "*B"] | None) -> Shaped[Array, "*B"]:
    """``mask``, or None for all positions, with zeros where a position does not count."""
    return counts if mask is None else jnp.where(counts, mask, jnp.zeros_like(mask))


def blocks_of_tokens(x: Shaped[Array, "B T ..."], size: int) -> Shaped[Array, "n B size ..."]:
    """[B, T, ...] in blocks of ``size`` tokens, the last one filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


def _strength(l2wrap: object) -> float:
    """``l2wrap`` as a float."""
    if isinstance(l2wrap, jax.core.Tracer):
        raise TypeError(
            "l2wrap must be a number that is known when the function is compiled, got a traced array; name "
            "it in static_argnames of jax.jit, or close over it"
        )
    return check_number("l2wrap", l2wrap, 0)


def _int32_at_least(labels: jax.Array) -> jax.Array:
    """Casts narrower labels: uint8 cannot number every token of a large vocabulary."""
    return labels.astype(jnp.promote_types(labels.dtype, jnp.int32))


def _nan_unless_token(losses: jax.Array, labels: jax.Array, V: int) -> jax.Array:
    """Sets losses to NaN where the label is not one of V tokens."""
    return jnp.where((labels >= 0) & (labels < V), losses, jnp.nan)


@jax.custom_vjp
def _l2wrap(loss: jax.Array, logits: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns ``loss``; adds ``weights`` [...] times the largest logit to that logit's gradient."""
    return loss


def _l2wrap_fwd(loss: jax.Array, logits: jax.Array, weights: jax.Array) -> tuple[jax.Array, PyTree]:
    return loss, (logits, weights)


def _l2wrap_bwd(residuals: PyTree, cotangent: jax.Array) -> PyTree:
    logits, weights = residuals
    largest = jnp.argmax(logits, -1)
    at_largest = jax.lax.broadcasted_iota(largest.dtype, logits.shape, logits.ndim - 1) == largest[..., None]
    return (
        cotangent,
        jnp.where(at_largest, (cotangent * weights)[..., None] * logits, 0),
        jnp.zeros_like(weights),
    )


_l2wrap.defvjp(_l2wrap_fwd, _l2wrap_bwd)


def cross_entropy(
    logits: Float[Array, "*B V"],
    labels: Int[Array, "*B"],
    mask: Shaped[Array, "*B"] | None = None,
    l2wrap: float = 1e-4,
    *,
    ignore_index: int | None = None,
) -> Float[Array, ""]:
    """Mean next-token cross-entropy, with L2Wrap, which pulls the largest logit of every token towards 0.

    L2Wrap changes the gradient and not the value: it adds ``l2wrap / tokens * max_logit`` to the gradient of
    the largest logit, all times the incoming cotangent (as ``RWKV-v7/train_temp`` since April 2026).

    Args:
        logits: [..., V].
        labels: [...] integers, the token that follows each position: ``tokens[:, 1:]`` for
            ``logits[:, :-1]``. Ignored where the mask is 0; elsewhere a label that is no token makes the loss
            NaN.
        mask: [...] booleans, or weights of the positions, which may be negative; None for all. The loss
            is the sum of weighted losses divided by the sum of weights, or by 1 where that is 0. L2Wrap skips
            positions of weight 0.
        l2wrap: strength, a Python number; 0 for none.
        ignore_index: labels of this value are left out, as if their mask were 0; -100 is PyTorch's. None:
            the mask alone decides.

    Returns:
        A scalar, 0 where the mask is all 0: float32, or float64 where ``logits`` are.

    Raises:
        ValueError: a shape does not fit, or ``l2wrap`` is not a number >= 0.
        TypeError: ``labels`` are not integers, or ``l2wrap`` is traced.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.training import cross_entropy
        >>> logits, tokens = jnp.zeros((1, 3, 4)), jnp.array([[0, 1, 2, 3]])
        >>> round(float(cross_entropy(logits, tokens[:, 1:])), 4)  # log 4
        1.3863
    """
    _check_labels("logits", logits, labels, mask)
    l2wrap, mask = _strength(l2wrap), label_mask(labels, mask, ignore_index)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if mask is not None:  # masked positions may contain inf and NaN
        logits, labels = jnp.where((mask != 0)[..., None], logits, 0), jnp.where(mask != 0, labels, 0)
    labels = _int32_at_least(labels)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses = _nan_unless_token(losses, labels, logits.shape[-1])
    weights = jnp.ones_like(losses) if mask is None else mask.astype(losses.dtype)
    weights = weights / divisor(jnp.sum(weights))
    loss = jnp.sum(losses * weights)
    return _l2wrap(loss, logits, l2wrap * weights) if l2wrap else loss


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sum_of_losses(
    hidden: jax.Array, kernel: jax.Array, labels: jax.Array, weights: jax.Array, l2wrap: float, block: int
) -> jax.Array:
    """Weighted sum of the losses of hidden [B, T, C] under the head kernel [C, V], ``block`` positions of T
    at a time.
    """
    return _losses_and_grads(hidden, kernel, labels, weights, l2wrap, block, gradients=False)[0]


def _losses_and_grads(
    hidden: Array, kernel: Array, labels: Array, weights: Array, l2wrap: float, block: int, gradients: bool
) -> tuple[jax.Array, PyTree, PyTree]:
    """The sum, and with ``gradients`` its derivatives in hidden and kernel, else None for both.

    Each device scans its tokens and accumulates a local gradient of the kernel, or of its shard of the
    vocabulary. These are summed over devices once, at the end: per block that sum would dominate the traffic.
    """
    sharding = ActivationSharding.of(hidden)
    narrow = sharding.unshard_for_dot(hidden, kernel.astype(hidden.dtype), ("embed", "vocab"))
    scan = functools.partial(_scan_blocks, l2wrap=l2wrap, block=block, gradients=gradients)
    h = reshard(hidden, *spec_of(hidden)[:2], spec_of(narrow)[0]) if is_explicit() else hidden
    parts = token_blocks(hidden)
    if parts == (1, 1):
        total, d_hidden, d_kernel = scan(h, narrow, labels, weights)
    else:
        labels, weights = (shard_like(x, hidden, 0, 1) for x in (labels, weights))
        h, labels, weights = (split_tokens(x, parts) for x in (h, labels, weights))
        scan_all = jax.vmap(jax.vmap(scan, (0, None, 0, 0)), (0, None, 0, 0))
        total, d_hidden, d_kernel = scan_all(h, narrow, labels, weights)
        total = jnp.sum(total)
        if gradients:
            d_hidden, d_kernel = join_tokens(d_hidden), jnp.sum(d_kernel, (0, 1))
    if not gradients:
        return total, None, None
    d_kernel = constrain(constrain(d_kernel, None, "activation_vocab"), "embed", "vocab")
    return (
        total,
        shard_like(d_hidden, hidden, 0, 1, 2),
        shard_like(d_kernel.astype(kernel.dtype), kernel, 0, 1),
    )


def _scan_blocks(
    hidden: Array, narrow: Array, labels: Array, weights: Array, l2wrap: float, block: int, gradients: bool
) -> tuple[jax.Array, PyTree, PyTree]:
    """`_losses_and_grads` of one device's tokens; ``narrow`` is the kernel in the dtype of hidden.

    A block's gradients are computed from its logits at once, so no logits are computed twice.
    """
    T = hidden.shape[1]
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=dtype)

    def step(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        (total, d_kernel), (h, label, weight) = carry, x
        # masked positions may contain inf and NaN
        h = jnp.where((weight != 0)[..., None], h, 0)
        label = _int32_at_least(jnp.where(weight != 0, label, 0))
        logits = dot(
            h, narrow, (((2,), (0,)), ((), ())), **out_sharding(*spec_of(h)[:-1], spec_of(narrow)[1])
        )
        position = jax.lax.broadcasted_iota(label.dtype, logits.shape, 2)
        right = position == label[..., None]
        lse = jax.nn.logsumexp(logits, -1, keepdims=True)
        losses = lse[..., 0] - jnp.sum(jnp.where(right, logits, 0), -1)
        total = total + jnp.sum(_nan_unless_token(losses, label, logits.shape[-1]) * weight)
        if not gradients:
            return (total, d_kernel), None
        d = jnp.exp(logits - lse) - right
        if l2wrap:
            largest = jnp.argmax(logits, -1, keepdims=True)
            d = d + jnp.where(position == largest.astype(label.dtype), l2wrap * logits, 0)
        d = (d * weight[..., None]).astype(hidden.dtype)
        d_kernel = d_kernel + dot(h, d, (((0, 1), (0, 1)), ((), ())), **out_sharding(*spec_of(narrow)))
        # made in the dtype of hidden: devices that split the vocabulary sum it
        d_hidden = jax.lax.dot_general(d, narrow, (((2,), (1,)), ((), ())), **out_sharding(*spec_of(h)))
        return (total, d_kernel), d_hidden

    # zeros made from arrays of the mesh: others could not be mapped over an explicit mesh axis
    start = jnp.zeros_like(jnp.sum(weights), dtype), jnp.zeros_like(narrow, dtype) if gradients else None
    start = vary_alike(start, hidden, narrow, labels, weights)
    (total, d_kernel), d_hidden = jax.lax.scan(
        step, start, tuple(blocks_of_tokens(x, block) for x in (hidden, labels, weights.astype(dtype)))
    )
    if d_kernel is None:
        return total, None, None
    d_hidden = jax.lax.collapse(jnp.moveaxis(d_hidden, 0, 1), 1, 3)
    return total, d_hidden[:, :T], d_kernel


def _sum_of_losses_fwd(
    hidden: Array, kernel: Array, labels: Array, weights: Array, l2wrap: float, block: int
) -> tuple[jax.Array, PyTree]:
    total, *grads = _losses_and_grads(hidden, kernel, labels, weights, l2wrap, block, gradients=True)
    return total, grads


def _sum_of_losses_bwd(l2wrap: float, block: int, residuals: PyTree, cotangent: jax.Array) -> PyTree:
    d_hidden, d_kernel = (cotangent * x for x in residuals)
    return d_hidden.astype(residuals[0].dtype), d_kernel.astype(residuals[1].dtype), None, None


_sum_of_losses.defvjp(_sum_of_losses_fwd, _sum_of_losses_bwd)


def chunked_cross_entropy(
    hidden: Float[Array, "B T C"],
    kernel: Float[Array, "C V"],
    labels: Int[Array, "B T"],
    mask: Shaped[Array, "B T"] | None = None,
    l2wrap: float = 1e-4,
    *,
    block_tokens: int = 4096,
    ignore_index: int | None = None,
) -> Float[Array, ""]:
    """`cross_entropy` of ``hidden @ kernel`` with at most about ``block_tokens`` positions' logits in memory.

    Logits and both gradients are computed block by block, in one pass. At 32,768 tokens and a vocabulary of
    32,000 the logits alone would take 4 GB in float32. With bfloat16 activations the gradient of the logits
    is rounded to bfloat16 before its two products.

    Args:
        hidden: [B, T, C], the input of the head:
            ``model.apply({"params": params}, tokens, method="hidden")[0]``.
        kernel: [C, V] of the head, ``fla_jax.models.head_kernel(params)``; cast to ``hidden``'s dtype.
        labels: [B, T] integers, the token that follows each position.
        mask: [B, T] booleans or weights as for `cross_entropy`; None for all. Not differentiated.
        l2wrap: strength of L2Wrap, a Python number (see `cross_entropy`); 0 for none.
        block_tokens: positions whose logits a device computes at once; at least one of each sequence.
        ignore_index: labels of this value are left out (see `cross_entropy`).

    Returns:
        A scalar, 0 where the mask is all 0: float32, or float64 where ``hidden`` is.

    Raises:
        ValueError, TypeError: as `cross_entropy`; ValueError also where ``block_tokens`` is no integer >= 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.training import chunked_cross_entropy, cross_entropy
        >>> hidden, kernel, labels = jnp.ones((2, 5, 4)), jnp.eye(4, 9), jnp.zeros((2, 5), jnp.int32)
        >>> loss = chunked_cross_entropy(hidden, kernel, labels)
        >>> bool(jnp.isclose(loss, cross_entropy(hidden @ kernel, labels)))
        True
    """
    if hidden.ndim != 3 or kernel.ndim != 2 or hidden.shape[2] != kernel.shape[0]:
        raise ValueError(
            f"hidden must have shape [B, T, C] and kernel [C, V], got {list(hidden.shape)} and "
            f"{list(kernel.shape)}"
        )
    _check_labels("hidden", hidden, labels, mask)
    block_tokens = check_integer("block_tokens", block_tokens, 1)
    l2wrap, mask = _strength(l2wrap), label_mask(labels, mask, ignore_index)
    B, T, _ = hidden.shape
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    weights = jax.lax.stop_gradient(jnp.ones((B, T), dtype) if mask is None else mask.astype(dtype))
    total = divisor(jnp.sum(weights))
    batch_parts, sequence_parts = token_blocks(hidden)
    block = max(1, min(T // sequence_parts, block_tokens * batch_parts // max(B, 1)))
    # a custom gradient wants inputs and gradients that vary over the same axes of a checked shard_map
    arrays = vary_alike((hidden, kernel, labels, weights))
    return _sum_of_losses(*arrays, l2wrap, block) / total
