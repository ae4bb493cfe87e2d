"""The training steps that train_step.py measures, by name."""

from __future__ import annotations

import dataclasses

PEAK = 989e12  # bfloat16 products of an H200 without sparsity, operations a second
SIZES = ("layers", "width", "tokens", "batch", "vocab")


@dataclasses.dataclass(frozen=True)
class Row:
    """One model and batch. ``model`` is rwkv7 or rwkv6; heads have 64 channels."""

    model: str
    layers: int
    width: int
    batch: int
    tokens: int = 4096
    vocab: int = 32000

    @property
    def shape(self) -> dict[str, int]:
        """As records have it."""
        return {name: getattr(self, name) for name in SIZES}

    @property
    def name(self) -> str:
        return f"{self.model} {self.layers}x{self.width} B{self.batch} T{self.tokens}"

    def parameters_that_multiply(self, parameters: int) -> int:
        """N of 6N: all parameters but the embedding, which is looked up."""
        return parameters - self.vocab * self.width


ROWS = {
    "rwkv7-24x1024": Row("rwkv7", 24, 1024, 8),
    "rwkv7-24x2048": Row("rwkv7", 24, 2048, 4),
    "rwkv7-12x768": Row("rwkv7", 12, 768, 16),
    "rwkv6-24x1024": Row("rwkv6", 24, 1024, 8),
}
QUICK = Row("rwkv7", 1, 64, 1, 16, 300)


def low_ranks(width: int) -> dict[str, int]:
    """RWKV-7's official ranks, for a library whose default values are others. The formula stands here so that
    its process needs no JAX.
    """

    def rank(factor: float) -> int:
        return max(32, round(factor * width**0.5 / 32) * 32)

    return {
        "decay_low_rank_dim": rank(2.5),
        "a_low_rank_dim": rank(2.5),
        "v_low_rank_dim": rank(1.7),
        "gate_low_rank_dim": rank(5),
    }
