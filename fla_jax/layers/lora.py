"""LoRA in a dense projection: the product with a frozen kernel plus that with a trained low-rank pair."""

from __future__ import annotations

from collections.abc import Collection

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, PyTree

from ..core.mesh import is_explicit, shard_like, spec_of
from .sharding import ActivationSharding, Axes


class LoRA(struct.PyTreeNode):
    """A low-rank pair beside a kernel W [I, O]: ``x W + scale (x A) B``.

    With a ``magnitude`` m, DoRA: ``m (x W + scale (x A) B) / |W + scale A B|``, the norm that of each output
    and a constant for the gradient. Stacked layers have arrays with a leading layer axis.

    Attributes:
        a: A [I, R].
        b: B [R, O].
        magnitude: m [O], or None.
        scale: alpha / R; no array, so that it is not trained.
        dropout: share of the inputs of A that is dropped where ``apply`` has the rng ``dropout``.

    Source: Hu et al., "LoRA", 2021; Liu et al., "DoRA", 2024.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.layers import LoRA
        >>> LoRA(jnp.ones((3, 2)), jnp.ones((2, 4)), scale=0.5).update()[0].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    a: Float[Array, "*L I R"]
    b: Float[Array, "*L R O"]
    magnitude: Float[Array, "*L O"] | None = None
    scale: float = struct.field(pytree_node=False, default=1.0)
    dropout: float = struct.field(pytree_node=False, default=0.0)

    def update(self) -> Float[Array, "*L I O"]:
        """``scale A B``, in the dtype of A and B."""
        return self.scale * jnp.matmul(self.a, self.b, precision="highest")

    def merge(self, kernel: Float[Array, "*L I O"]) -> Float[Array, "*L I O"]:
        """The kernel whose product is that of W and this pair, in the kernel's dtype."""
        dtype = jnp.promote_types(kernel.dtype, self.a.dtype)
        pair = jax.tree.map(lambda x: x.astype(dtype), self)
        merged = kernel.astype(dtype) + pair.update()
        if pair.magnitude is not None:
            merged = merged * (pair.magnitude / jnp.linalg.norm(merged, axis=-2))[..., None, :]
        return merged.astype(kernel.dtype)


def add_lora(
    layer: nn.Module, name: str, x: jax.Array, y: jax.Array, axes: Axes, sharding: ActivationSharding
) -> jax.Array:
    """``y = x W`` of the layer's submodule ``name`` with the pair of that name in the collection ``lora``.

    Without such a pair the result is ``y``. ``axes`` are the names of W's.
    """
    if not layer.has_variable("lora", name):
        return y
    lora: LoRA = layer.get_variable("lora", name)
    h = x
    if lora.dropout and layer.has_rng("dropout"):
        drawn = x.shape[0] // sharding.tp, *x.shape[1:]  # one mask for the copies of `to_tp`
        is_kept = sharding.to_tp(jax.random.bernoulli(layer.make_rng("dropout"), 1 - lora.dropout, drawn))
        h = jnp.where(shard_like(is_kept, x, *range(x.ndim)), x / (1 - lora.dropout), 0)
    h = lora.scale * sharding.dot(h, lora.a.astype(x.dtype), (axes[0], "rank"))
    y = y + sharding.dot(h, lora.b.astype(x.dtype), ("rank", axes[1]))
    if lora.magnitude is None:
        return y
    kernel = nn.meta.unbox(layer.get_variable("params", name))["kernel"]
    norms = jax.lax.stop_gradient(_merged_norms(sharding.unshard_for_dot(x, kernel, axes), lora))
    return y * sharding.unshard(lora.magnitude / norms, axes[1:]).astype(y.dtype)


def projection_paths(params: PyTree) -> list[str]:
    """The paths of the layers' dense projections in a model's parameters, such as "blocks_0/att/key"."""
    paths = (path for path in flatten_dict(params, sep="/") if path.startswith("blocks"))
    return [path.removesuffix("/kernel") for path in paths if path.endswith("/kernel")]


def check_lora(lora: PyTree, paths: Collection[str]) -> None:
    """Raises ValueError for a pair beside none of the projections at ``paths``: nothing would read it."""
    for path in flatten_dict(lora, sep="/"):
        if path in paths:
            continue
        is_stacked, hint = any(other.startswith("blocks/") for other in paths), ""
        if is_stacked != path.startswith("blocks/"):
            hint = f": use {'' if is_stacked else 'un'}stack_layers(lora)"
        raise ValueError(f"lora must have pairs for projections of the model, got one for {path}{hint}")


def _merged_norms(kernel: jax.Array, lora: LoRA) -> jax.Array:
    """The norm of each output's weights [O] of ``W + scale A B``, without that matrix."""

    def norms(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        w = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
        cross = jnp.sum((a.T @ w) * b, 0)  # of W and A B
        own = jnp.sum(((a.T @ a) @ b) * b, 0)
        return jnp.sqrt(jnp.sum(w * w, 0) + 2 * lora.scale * cross + lora.scale**2 * own)

    if is_explicit():
        # products of differently sharded operands do not say how their results are
        norms = jax.sharding.auto_axes(norms, out_sharding=jax.sharding.PartitionSpec(spec_of(kernel)[1]))
    return norms(kernel, lora.a, lora.b)
