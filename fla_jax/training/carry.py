"""States carried between batches, for documents longer than a sequence (truncated backpropagation)."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from ..layers.state import RWKVState
from ..models import head_kernel
from .losses import chunked_cross_entropy, label_mask
from .next_token import over_sequence, variables_of


@dataclasses.dataclass(frozen=True)
class CarriedLoss:
    """The result of `carried_loss`: the loss, and the `weight` of a batch."""

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
    ) -> tuple[jax.Array, RWKVState]:
        """The mean over the labels of a batch, and the states at the ends of its sequences; with LoRA's
        pairs, the scales of FP8 products and the key of a dropout.
        """
        tokens, ids = over_sequence(batch["tokens"]), over_sequence(batch["segment_ids"])
        state = batch_first(kept(batch["carry"], batch["continues"]))
        variables = variables_of(params, lora, fp8_scales)
        rngs = None if key is None else {"dropout": key}
        found: PyTree = self.model.apply(variables, tokens, state, ids, method="hidden", rngs=rngs)
        mean = chunked_cross_entropy(
            found[0],
            head_kernel(params),
            batch["labels"],
            batch["mask"],
            self.l2wrap,
            block_tokens=self.block_tokens,
            ignore_index=self.ignore_index,
        )
        return mean, batch_first(jax.lax.stop_gradient(found[1]))

    def weight(self, batch: PyTree) -> jax.Array:
        """The divisor of the mean: the sum of the mask over the labels that count."""
        mask: PyTree = label_mask(batch["labels"], batch["mask"], self.ignore_index)
        return jnp.sum(mask, dtype=jnp.float32)


def carried_loss(
    model: nn.Module, *, l2wrap: float = 1e-4, block_tokens: int = 4096, ignore_index: int | None = None
) -> CarriedLoss:
    """Next-token loss of documents that continue in the next batch, where their states are carried on.

    The value is that of whole documents. Gradients end at the end of a sequence: the carry is a constant.
    `fla_jax.parallel.TrainStep` with ``carry_sequences=`` uses this loss, and passes the carry on.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        l2wrap, block_tokens, ignore_index: see `fla_jax.training.chunked_cross_entropy`.

    Returns:
        ``loss(params, batch, *, lora=None, fp8_scales=None, key=None) -> (loss, carry)``, with LoRA's pairs
        (`init_lora`), the collection `fla_jax.layers.FP8_SCALES` and the key of a dropout. The batch is one
        of `fla_jax.data.pack_documents` with ``carry_state=True``, and has the carry of the batch before as
        ``carry``, `zero_carry` at first.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import grain
        >>> from fla_jax.data import pack_documents
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import carried_loss, zero_carry
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> documents = grain.MapDataset.source([np.arange(1, 50)])
        >>> loss_of, carry = jax.jit(carried_loss(model)), zero_carry(model, 1)
        >>> for batch in pack_documents(documents, 16, 1, carry_state=True):
        ...     loss, carry = loss_of(params, {**batch, "carry": carry})
    """
    return CarriedLoss(model, l2wrap, block_tokens, ignore_index)


def zero_carry(model: nn.Module, size: int) -> RWKVState:
    """The states before the first batch: `init_state` with the batch axis first, to be sharded like a batch.

    Example:
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import zero_carry
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=32, num_layers=1, head_dim=16))
        >>> zero_carry(model, 8).wkv.shape  # [B, L, H, K, V]
        (8, 1, 2, 16, 16)
    """
    return batch_first(model.init_state(size))


def batch_first(state: RWKVState) -> RWKVState:
    """Arrays [L, B, ...] as [B, L, ...], and back."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), state)


def kept(state: RWKVState, continues: Bool[Array, " B"]) -> RWKVState:
    """Arrays [B, L, ...] of a state, zeros where a sequence does not continue."""
    keep = lambda x: jnp.where(continues.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
    return jax.tree.map(keep, state)
