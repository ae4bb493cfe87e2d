"""The families of models: one row of `FAMILIES` for each version of RWKV, and for others from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
from jaxtyping import PyTree

from ..layers import Attention, FeedForward
from .config import RWKVConfig


class Size(NamedTuple):
    """A configuration field read from a parameter of a layer: ``shape[axis] // divisor``.

    Example:
        >>> from fla_jax.models import FAMILIES
        >>> FAMILIES["rwkv7"].sizes["head_dim"]
        Size(path='att/r_k', axis=1, divisor=1, layer=0)
    """

    path: str
    axis: int
    divisor: int = 1
    layer: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """A family of models: everything in which its models differ from those of other families.

    Attributes:
        name: for messages.
        config: class of its configurations.
        model: class of its language models.
        attention: class of its attention layers.
        feed_forward: class of its feed-forward layers.
        carries_v_first: whether layer 0 makes a ``v_first`` that the layers above read.
        not_in_first_layer: parameters of the attention that layer 0 lacks. Stacked layers have zeros there.
        mark: a parameter of the attention that no other family has; needed with ``not_in_first_layer``.
        sizes: configuration fields that the shapes of a checkpoint's parameters give.
        not_in_checkpoints: configuration fields that no checkpoint stores, with the value that it implies.

    Example:
        >>> from fla_jax.models import FAMILIES
        >>> {name: family.name for name, family in FAMILIES.items()}
        {'rwkv6': 'RWKV-6', 'rwkv7': 'RWKV-7'}
    """

    name: str
    config: type[RWKVConfig]
    model: type[nn.Module]
    attention: type[Attention]
    feed_forward: type[FeedForward]
    carries_v_first: bool = False
    not_in_first_layer: tuple[str, ...] = ()
    mark: str = ""
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    not_in_checkpoints: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def layers_of(self, path: str, num_layers: int) -> range:
        """The layers that have a parameter, by its path in stacked layers, such as "blocks/att/v0"."""
        is_lacking = path.removeprefix("blocks/att/") in self.not_in_first_layer
        return range(1 if is_lacking else 0, num_layers)


FAMILIES: dict[str, Family] = {}


def family_of(config: RWKVConfig) -> Family:
    """The family of a configuration.

    Raises:
        TypeError: no row of `FAMILIES` has the configuration's class.

    Example:
        >>> from fla_jax.models import RWKV7Config, family_of
        >>> family_of(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2)).name
        'RWKV-7'
    """
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES.values())
    raise TypeError(f"config must be one of the families' ({known}), got {type(config).__name__}")


def family_of_block(block: Mapping[str, PyTree]) -> Family | None:
    """The family of a layer's parameters by its `Family.mark`, None if no family has one among them."""
    att = block.get("att", {})
    return next((family for family in FAMILIES.values() if family.mark in att), None)
