"""Next-token losses of a language model, for every form of batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ..core.mesh import is_explicit, reshard, spec_of
from ..layers.fp8 import FP8_SCALES
from ..models import head_kernel
from .losses import chunked_cross_entropy, label_mask

Loss = Callable[..., PyTree]  # of parameters and a batch


@runtime_checkable
class WeightedLoss(Protocol):
    """A loss that says how `fla_jax.parallel.TrainStep` weighs several batches."""

    def weight(self, batch: PyTree) -> jax.Array:
        """The divisor of the mean over a batch."""


def packed_loss(
    model: nn.Module,
    params: PyTree,
    tokens: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Shaped[Array, "B T"] | None = None,
    *,
    l2wrap: float = 1e-4,
    block_tokens: int = 4096,
    ignore_index: int | None = None,
    lora: PyTree = None,
    fp8_scales: PyTree = None,
    dropout_key: jax.Array | None = None,
) -> Float[Array, ""]:
    """Next-token loss of packed documents: mean cross-entropy with L2Wrap, without all logits in memory.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters.
        tokens: [B, T].
        labels: [B, T], the token that follows each one.
        segment_ids: [B, T]; the state restarts where the number changes. None for one document a sequence.
        mask: [B, T] booleans, or weights of the labels; None for all.
        l2wrap, block_tokens, ignore_index: see `chunked_cross_entropy`, also for the result and errors.
        lora: see `init_lora`; None for the parameters alone.
        fp8_scales: the collection `fla_jax.layers.FP8_SCALES` of a model with ``fp8=True``; None for products
            in the compute dtype.
        dropout_key: of LoRA's dropout; None for none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import packed_loss
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(8)[None]
        >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        >>> loss = lambda params: packed_loss(model, params, tokens, tokens + 1, tokens // 4)
        >>> jax.eval_shape(loss, params).shape
        ()
    """
    ids = None if segment_ids is None else over_sequence(segment_ids)
    variables = variables_of(params, lora, fp8_scales)
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    hidden, _ = model.apply(variables, over_sequence(tokens), segment_ids=ids, method="hidden", rngs=rngs)
    head = head_kernel(params)
    return chunked_cross_entropy(
        hidden, head, labels, mask, l2wrap, block_tokens=block_tokens, ignore_index=ignore_index
    )


def variables_of(params: PyTree, lora: PyTree, fp8_scales: PyTree = None) -> dict[str, PyTree]:
    """What ``model.apply`` takes: the parameters, and other collections that are not None."""
    collections = {"params": params, "lora": lora, FP8_SCALES: fp8_scales}
    return {name: x for name, x in collections.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class NextTokenLoss:
    """What `next_token_loss` returns: the loss, and the `weight` of a batch."""

    model: nn.Module
    l2wrap: float
    block_tokens: int
    ignore_index: int | None

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        lora: PyTree = None,
        fp8_scales: PyTree = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The mean over the labels of a batch, with LoRA's pairs and the key of their dropout, and with the
        scales of FP8 products.
        """
        return packed_loss(
            self.model,
            params,
            *_fields(batch),
            l2wrap=self.l2wrap,
            block_tokens=self.block_tokens,
            ignore_index=self.ignore_index,
            lora=lora,
            fp8_scales=fp8_scales,
            dropout_key=key,
        )

    def weight(self, batch: PyTree) -> jax.Array:
        """The divisor of the mean: the sum of the mask, or the number of labels."""
        _, labels, _, mask = _fields(batch)
        mask = label_mask(labels, mask, self.ignore_index)
        if mask is None:
            return jnp.float32(np.prod(labels.shape))
        return jnp.sum(mask, dtype=jnp.promote_types(mask.dtype, jnp.float32))


def next_token_loss(
    model: nn.Module, *, l2wrap: float = 1e-4, block_tokens: int = 4096, ignore_index: int | None = None
) -> NextTokenLoss:
    """`packed_loss` as a function of parameters and a batch, the default loss of `TrainStep`.

    A batch is one of:

    * tokens [B, T + 1] integers: each predicts the next one;
    * a pair of those and a mask [B, T] of the labels ``tokens[:, 1:]``: booleans or weights;
    * a dict as `fla_jax.data.batches` yields it: ``tokens`` [B, T], ``labels`` [B, T] and, if present,
      ``segment_ids`` [B, T], where the state restarts, and ``mask`` [B, T].

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        l2wrap, block_tokens, ignore_index: see `chunked_cross_entropy`.

    Returns:
        ``loss(params, batch)``. It raises a TypeError or ValueError for a batch of another form.
        ``loss.weight(batch)`` is the divisor of the mean, which `TrainStep` weighs several batches with.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import next_token_loss
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(9)[None]
        >>> params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]  # shapes are enough here
        >>> jax.eval_shape(next_token_loss(model), params, tokens).shape
        ()
    """

    return NextTokenLoss(model, l2wrap, block_tokens, ignore_index)


def _fields(batch: PyTree) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Tokens [B, T], labels, segment_ids and mask, the last two or None, of a batch in any form."""
    if isinstance(batch, Mapping):
        if not {"tokens", "labels"} <= set(batch) <= {"tokens", "labels", "segment_ids", "mask"}:
            raise ValueError(
                "batch must be a dict of tokens, labels and optionally segment_ids and mask, got one of "
                f"{', '.join(map(str, batch))}"
            )
        return batch["tokens"], batch["labels"], batch.get("segment_ids"), batch.get("mask")
    if isinstance(batch, tuple | list):
        if len(batch) != 2:
            raise ValueError(f"batch must be a pair of tokens and a mask, got {len(batch)} arrays")
        tokens, mask = batch
    else:
        tokens, mask = batch, None
    if np.ndim(tokens) != 2:
        raise TypeError(
            "batch must be tokens [B, T + 1], a pair of them and a mask, or a dict of arrays, got "
            f"{type(tokens).__name__}"
        )
    return tokens[:, :-1], tokens[:, 1:], None, mask


def check_segment_ids(tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> None:
    """Raises ValueError unless ``segment_ids``, or None, have the shape of ``tokens``."""
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(
            f"segment_ids must have the shape of tokens, {list(tokens.shape)}, got {list(segment_ids.shape)}"
        )


def over_sequence(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    """Shards T of an array [B, T, ...] over the mesh axis ``sequence``; for custom losses.

    It acts on meshes with explicit axes, where the model follows the types of its tokens; elsewhere the model
    follows the axis rules.

    Raises:
        ValueError: T is not a multiple of the axis' size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.parallel import make_mesh, over_sequence
        >>> with jax.set_mesh(make_mesh(sequence=1, explicit=True)):
        ...     over_sequence(jnp.zeros((2, 8), jnp.int32)).shape
        (2, 8)
    """
    size = jax.sharding.get_abstract_mesh().shape.get("sequence", 1)
    if not is_explicit() or size == 1:
        return x
    if x.shape[1] % size:  # the model would not shard T, and every device compute all of it
        raise ValueError(
            "tokens must have a number of tokens T that is a multiple of mesh axis 'sequence' = "
            f"{size}, got T = {x.shape[1]}"
        )
    batch, _, *others = spec_of(x)
    return reshard(x, batch, "sequence", *others)
