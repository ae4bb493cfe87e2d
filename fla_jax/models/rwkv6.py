"""RWKV-6 ("Finch", x060): configuration, model, and the row of `FAMILIES`."""

from __future__ import annotations

import dataclasses

from ..layers import RWKV6Attention, RWKV6FeedForward
from .causal_lm import RWKVForCausalLM
from .config import RWKVConfig
from .families import FAMILIES, Family, Size


@dataclasses.dataclass(frozen=True)
class RWKV6Config(RWKVConfig):
    """RWKV-6 ("Finch", x060). Official widths: ``intermediate_size = floor(3.5 C / 32) * 32``.

    Attributes:
        proj_low_rank_dim, decay_low_rank_dim: ranks of low-rank pairs; None for the official ones, see
            `RWKV6Attention`.

    The other fields: `RWKVConfig`.

    Example:
        >>> from fla_jax.models import RWKV6Config
        >>> RWKV6Config(vocab_size=65536, hidden_size=768, num_layers=12).head_dim
        64
    """

    model_type = "rwkv6"

    proj_low_rank_dim: int | None = None
    decay_low_rank_dim: int | None = None


class RWKV6ForCausalLM(RWKVForCausalLM):
    """RWKV-6 language model, with an `RWKV6Config`. Parameters and methods: `RWKVForCausalLM`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV6Config, RWKV6ForCausalLM
        >>> model = RWKV6ForCausalLM(RWKV6Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> (logits, state), variables = model.init_with_output(jax.random.key(0), jnp.arange(10)[None])
        >>> logits.shape, state.wkv.shape
        ((1, 10, 100), (2, 1, 4, 16, 16))
    """

    config: RWKV6Config


FAMILIES["rwkv6"] = Family(
    "RWKV-6",
    RWKV6Config,
    RWKV6ForCausalLM,
    RWKV6Attention,
    RWKV6FeedForward,
    mark="time_faaaa",
    sizes={
        "head_dim": Size("att/time_faaaa", 1),
        "intermediate_size": Size("ffn/key/kernel", 1),
        "proj_low_rank_dim": Size("att/time_maa_w1", 1, divisor=5),
        "decay_low_rank_dim": Size("att/time_decay_w1", 1),
    },
)
