"""RWKV-7 ("Goose", x070): configuration, model, and the row of `FAMILIES`."""

from __future__ import annotations

import dataclasses

from ..layers import RWKV7Attention, RWKV7FeedForward
from .causal_lm import RWKVForCausalLM
from .config import RWKVConfig
from .families import FAMILIES, Family, Size


@dataclasses.dataclass(frozen=True)
class RWKV7Config(RWKVConfig):
    """RWKV-7 ("Goose", x070). Official widths: ``intermediate_size = 4 C``.

    Attributes:
        decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim: ranks of low-rank pairs; None
            for the official ones, see `RWKV7Attention`.
        rate_scale: factor on the in-context rate: 1 official, 2 for state tracking; see `RWKV7Attention`.

    The other fields: `RWKVConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config
        >>> RWKV7Config(vocab_size=65536, hidden_size=768, num_layers=12, dtype=jnp.bfloat16).dtype
        'bfloat16'
    """

    model_type = "rwkv7"

    decay_low_rank_dim: int | None = None
    a_low_rank_dim: int | None = None
    v_low_rank_dim: int | None = None
    gate_low_rank_dim: int | None = None
    rate_scale: float = 1.0

    @property
    def attention(self) -> dict[str, object]:
        """Fields of the attention layers."""
        return {**super().attention, "rate_scale": self.rate_scale}


class RWKV7ForCausalLM(RWKVForCausalLM):
    """RWKV-7 language model, with an `RWKV7Config`. Parameters and methods: `RWKVForCausalLM`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> tokens = jnp.arange(10)[None]
        >>> params = model.init(jax.random.key(0), tokens)["params"]
        >>> logits, state = model.apply({"params": params}, tokens)
        >>> next_logits, state = model.apply({"params": params}, tokens[:, :1], state)
        >>> next_logits.shape, state.wkv.shape
        ((1, 1, 100), (2, 1, 4, 16, 16))
    """

    config: RWKV7Config


FAMILIES["rwkv7"] = Family(
    "RWKV-7",
    RWKV7Config,
    RWKV7ForCausalLM,
    RWKV7Attention,
    RWKV7FeedForward,
    carries_v_first=True,
    not_in_first_layer=("v0", "v1", "v2"),
    mark="r_k",
    sizes={
        "head_dim": Size("att/r_k", 1),
        "intermediate_size": Size("ffn/key/kernel", 1),
        "decay_low_rank_dim": Size("att/w1", 1),
        "a_low_rank_dim": Size("att/a1", 1),
        "v_low_rank_dim": Size("att/v1", 1, layer=1),
        "gate_low_rank_dim": Size("att/g1", 1),
    },
    not_in_checkpoints={"rate_scale": 1.0},
)
