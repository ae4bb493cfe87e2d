"""The training steps that train_step.py measures, by name."""

from __future__ import annotations

import dataclasses

PEAK = 989e12  # bfloat16 operations a second of an H200 or H100, without sparsity
FIELDS = ("layers", "width", "tokens", "batch", "vocab")


@dataclasses.dataclass(frozen=True)
class Size:
    """One model and batch. ``model`` is rwkv7 or rwkv6; heads have 64 channels."""

    model: str
    layers: int
    width: int
    batch: int
    tokens: int = 4096
    vocab: int = 32000

    @property
    def shape(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in FIELDS}

    @property
    def name(self) -> str:
        return f"{self.model} {self.layers}x{self.width} B{self.batch} T{self.tokens}"

    def multiplying(self, parameters: int) -> int:
        """N of 6N: all parameters but the embedding, which is looked up."""
        return parameters - self.vocab * self.width


SIZES = {
    "rwkv7-24x1024": Size("rwkv7", 24, 1024, 8),
    "rwkv7-24x2048": Size("rwkv7", 24, 2048, 4),
    "rwkv7-12x768": Size("rwkv7", 12, 768, 16),
    "rwkv6-24x1024": Size("rwkv6", 24, 1024, 8),
}
QUICK = Size("rwkv7", 1, 64, 1, 16, 300)
