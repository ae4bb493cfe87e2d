"""LoRA: a frozen model learns through a pair of small matrices beside each dense projection."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from ..core.arguments import check_integer, check_number, check_share
from ..layers.lora import LoRA, projection_paths
from .next_token import NextTokenLoss


def init_lora(
    params: PyTree,
    key: jax.Array,
    *,
    rank: int = 8,
    targets: str | Sequence[str] = ("*",),
    alpha: float | None = None,
    dropout: float = 0.0,
    dora: bool = False,
) -> dict[str, PyTree]:
    """Pairs for dense projections of the layers, without effect at first: B is zero.

    ``model.apply({"params": params, "lora": lora}, ...)`` computes ``x W + alpha / rank (x A) B`` in every
    projection that has a pair. `lora_loss` is a loss for training.

    Args:
        params: of the model, plain arrays or boxed; shapes are enough unless ``dora``.
        key: from `jax.random.key`.
        rank: R of A [I, R] and B [R, O].
        targets: a shell pattern, or several, of projections, such as ``"*/att/*"``, ``"*/value"`` or
            ``"blocks_3/ffn/key"``; with stacked layers paths begin with ``blocks/``. The low-rank matrices of
            a layer, embedding and head cannot be targets.
        alpha: the scale is ``alpha / rank``; None for ``2 * rank``.
        dropout: share of the inputs of A that is dropped in training.
        dora: whether each pair has a trained magnitude [O] too (DoRA), at first the norm of W.

    Returns:
        A tree like ``params`` with a `fla_jax.layers.LoRA` for each target, in float32.

    Raises:
        ValueError: a pattern matches no projection, or a number is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import init_lora
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(8)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> lora = init_lora(params, jax.random.key(1), rank=4, targets=("*/att/key", "*/att/value"))
        >>> lora["blocks_1"]["att"]["key"].a.shape
        (64, 4)
        >>> logits, _ = model.apply({"params": params, "lora": lora}, tokens)
    """
    rank, dropout = check_integer("rank", rank, 1), check_share("dropout", dropout)
    scale = (2 * rank if alpha is None else check_number("alpha", alpha, 0)) / rank
    kernels = projections(params)
    targets = [targets] if isinstance(targets, str) else targets
    chosen = {path for pattern in targets for path in _matching(pattern, kernels)}
    made = {}
    for path in sorted(chosen):
        kernel, (key, draw) = kernels[path], jax.random.split(key)
        *layers, features, out = kernel.shape
        bound = features**-0.5
        a = jax.random.uniform(draw, (*layers, features, rank), jnp.float32, -bound, bound)
        magnitude = jnp.linalg.norm(kernel.astype(jnp.float32), axis=-2) if dora else None
        b = jnp.zeros((*layers, rank, out), jnp.float32)
        made[path] = LoRA(a, b, magnitude, scale=scale, dropout=dropout)
    return unflatten_dict(made, sep="/")


def merge_lora(params: PyTree, lora: PyTree) -> dict[str, PyTree]:
    """Parameters with the pairs added to their kernels, each in its own dtype: for generation and files.

    Raises:
        ValueError: ``lora`` has a pair for a projection that ``params`` lack.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import init_lora, merge_lora
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.arange(8)[None])["params"]
        >>> merged = merge_lora(params, init_lora(params, jax.random.key(1)))
        >>> jax.tree.structure(merged) == jax.tree.structure(params)
        True
    """
    flat = flatten_dict(nn.meta.unbox(params), sep="/")
    for path, pair in lora_pairs(lora).items():
        name = f"{path}/kernel"
        if name not in flat:
            raise ValueError(f"lora must have pairs for projections of params, got one for {path}")
        flat[name] = pair.merge(flat[name])
    return unflatten_dict(flat, sep="/")


@dataclasses.dataclass(frozen=True)
class LoRALoss:
    """What `lora_loss` returns: the loss, and the `weight` of a batch."""

    of_model: NextTokenLoss

    def __call__(
        self, lora: PyTree, batch: PyTree, *, frozen: PyTree, key: jax.Array | None = None
    ) -> jax.Array:
        """The mean over the labels of a batch; ``frozen`` are the model's parameters."""
        return self.of_model(frozen, batch, lora=lora, key=key)

    def weight(self, batch: PyTree) -> jax.Array:
        """The divisor of the mean."""
        return self.of_model.weight(batch)


def lora_loss(
    model: nn.Module, *, l2wrap: float = 0.0, block_tokens: int = 4096, ignore_index: int | None = None
) -> LoRALoss:
    """`next_token_loss` as a function of LoRA's pairs, for `TrainStep` with ``params=`` and ``frozen=``.

    Args:
        model: an `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        l2wrap, block_tokens, ignore_index: see `chunked_cross_entropy`.

    Returns:
        ``loss(lora, batch, frozen=params, key=None)``; the batch as for `next_token_loss`. The key is that of
        the dropout: `TrainStep` passes one where it has ``rng=``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.parallel import TrainStep, make_mesh
        >>> from fla_jax.training import init_lora, lora_loss, rwkv_optimizer
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=1, head_dim=16))
        >>> tokens = jnp.zeros((jax.device_count(), 9), jnp.int32)
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> lora = init_lora(params, jax.random.key(1))
        >>> optimizer = rwkv_optimizer(1e-3, weight_decay=0.0)
        >>> step = TrainStep(model, optimizer, make_mesh(), lora_loss(model), params=lora, frozen=params)
        >>> state, loss = step(step.start(lora), step.shard(tokens))
    """
    return LoRALoss(NextTokenLoss(model, l2wrap, block_tokens, ignore_index))


def lora_pairs(lora: PyTree) -> dict[str, LoRA]:
    """The pairs by their paths, such as "blocks_0/att/key"."""
    return dict(flatten_dict(lora, sep="/"))


def projections(params: PyTree) -> dict[str, jax.Array]:
    """The kernels of the layers' dense projections by the paths of these."""
    flat = flatten_dict(nn.meta.unbox(params), sep="/")
    return {path: flat[f"{path}/kernel"] for path in projection_paths(params)}


def _matching(pattern: str, kernels: dict[str, jax.Array]) -> list[str]:
    if not (found := fnmatch.filter(kernels, pattern)):
        known = next(iter(kernels), "blocks_0/att/key")
        why = "only projections of layers have pairs, embedding and head do not"
        raise ValueError(f"targets must match projections such as {known}, got {pattern!r}: {why}")
    return found
