"""What a naming of tensors is: where files hold each parameter of a kind of model, and how.

A parameter's path is that in the tree of a model with scanned layers, where it has no axis of layers:
"emb/embedding", "blocks/att/receptance/kernel".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...models.causal_lm import RWKVForCausalLM
from ...models.config import RWKVConfig
from ...models.stacking import NOT_IN_FIRST
from ..tensors import StoredTensor, quoted, row_of


class Transform(NamedTuple):
    """How a file holds a parameter: ``load`` makes the file's array ours, ``save`` ours the file's.

    They give views where possible.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> layout = OFFICIAL7.place("blocks/att/receptance/kernel", layer=0).layout
        >>> layout.load(np.zeros((3, 5))).shape  # a projection, [out, in] in files
        (5, 3)
    """

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda x: x, lambda x: x)
TRANSPOSED = Transform(lambda x: x.T, lambda x: x.T)
VECTOR = Transform(lambda x: x.reshape(-1), lambda x: x)
UNIT_AXES = Transform(lambda x: x.reshape(-1), lambda x: x[None, None])  # [1, 1, C]


class TensorRef(NamedTuple):
    """Where a file holds a parameter: its name, ``{}`` for the number of the layer, and its layout.

    Example:
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> OFFICIAL7.place("emb/embedding").name
        'emb.weight'
    """

    name: str
    transform: Transform = SAME


class Size(NamedTuple):
    """Where a field of the configuration comes from: ``shape[axis] // parts`` of a parameter in a layer.

    Example:
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> OFFICIAL7.family.sizes["head_dim"]
        Size(path='blocks/att/r_k', axis=1, parts=1, layer=0)
    """

    path: str
    axis: int
    parts: int = 1
    layer: int = 0


class Family(NamedTuple):
    """A kind of model: its classes, and where the sizes in its configuration come from.

    Example:
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> OFFICIAL7.family.name, OFFICIAL7.family.model.__name__
        ('RWKV-7', 'RWKV7ForCausalLM')
    """

    name: str
    config: type[RWKVConfig]
    model: type[RWKVForCausalLM]
    sizes: Mapping[str, Size]


def norm(path: str, name: str) -> dict[str, TensorRef]:
    """The places of a normalisation."""
    return {
        f"{path}/scale": TensorRef(f"{name}.weight", VECTOR),
        f"{path}/bias": TensorRef(f"{name}.bias", VECTOR),
    }


def dense(path: str, name: str) -> dict[str, TensorRef]:
    """The place of a projection; PyTorch has [out, in]."""
    return {f"{path}/kernel": TensorRef(f"{name}.weight", TRANSPOSED)}


def any_shape(shape: tuple[int, ...], config: RWKVConfig) -> None:
    """The check of tensors that nothing reads."""


def no_fields(config: RWKVConfig, dtype: np.dtype) -> dict[str, Any]:
    """`ParamMap.fields` where files of this naming come without a description of the model."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class ParamMap:
    """One way to name the tensors of one family.

    Attributes:
        name: for messages.
        family: the kind of model.
        mark: regular expression of a name that is in every file of this naming, and of no other.
        layer: regular expression of how names inside a layer begin, its number the group.
        places: {path of a parameter: place}, in the order in which files are written; the paths of layers
            together.
        extras: {regular expression: check} of tensors that files may have beside the parameters;
            ``check(shape, config)`` raises ValueError where one does not fit, or is `any_shape`.
        prefix: regular expression of what trainers put in front of names.
        parts: {end of a name: ends of the names of its rows} of tensors that hold several parameters. Rows
            that are named like ``x_bias[0]`` are written as one tensor, others as tensors of their own.
        fields: what a ``config.json`` beside the tensors says, from the configuration, no size None, and the
            embedding's dtype.

    Example:
        >>> from fla_jax.checkpoints.param_maps import FLA7, OFFICIAL7
        >>> path = "blocks/att/receptance/kernel"
        >>> OFFICIAL7.place(path, layer=3).name, FLA7.place(path, layer=3).name
        ('blocks.3.att.receptance.weight', 'model.layers.3.attn.r_proj.weight')
    """

    name: str
    family: Family
    mark: str
    layer: str
    places: Mapping[str, TensorRef]
    extras: Mapping[str, Callable[[tuple[int, ...], Any], None]] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    parts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    fields: Callable[[Any, np.dtype], dict[str, Any]] = no_fields

    def detect(self, names: Iterable[str]) -> bool:
        """Whether these are the names of a file of this naming."""
        mark = re.compile(f"(?:{self.prefix})(?:{self.mark})")
        return any(mark.fullmatch(name) for name in names)

    def place(self, path: str, layer: int | None = None) -> TensorRef:
        """The place of a parameter, of one layer."""
        name, layout = self.places[path]
        return TensorRef(name.replace("{}", str(layer)), layout)

    def layer_of(self, name: str) -> int | None:
        """The layer that a name belongs to."""
        found = re.match(self.layer, name)
        return int(found[1]) if found else None

    def layers_of(self, path: str, config: RWKVConfig) -> range:
        """The layers that have the parameter."""
        return range(path.removeprefix("blocks/att/") in NOT_IN_FIRST, config.num_layers)

    def order(self, config: RWKVConfig) -> Iterator[tuple[str, int | None]]:
        """Every parameter, as path and layer, in the order of the places."""
        inside = [path for path in self.places if path.startswith("blocks/")]
        for path in self.places:
            if path not in inside:
                yield path, None
            elif path == inside[0]:
                for i in range(config.num_layers):
                    yield from ((path, i) for path in inside if i in self.layers_of(path, config))

    def is_extra(self, name: str) -> bool:
        """Whether a tensor may be there or not."""
        return any(re.fullmatch(pattern, name) for pattern in self.extras)

    def check_extra(self, name: str, shape: tuple[int, ...], config: RWKVConfig) -> None:
        """Raises ValueError where such a tensor does not fit the model."""
        layer = self.layer_of(name)
        if layer is not None and layer >= config.num_layers:
            raise ValueError(f"{quoted(name)} is of layer {layer}, and the model has {config.num_layers}")
        for pattern, check in self.extras.items():
            if re.fullmatch(pattern, name):
                try:
                    check(shape, config)
                except ValueError as error:
                    raise ValueError(f"{quoted(name)} {error}") from None

    def plain(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """A file's tensors without prefixes, those of several parameters taken apart.

        Raises:
            ValueError: a name is there twice, or a tensor has not the rows that it should have.
        """
        plain: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            name = re.sub(f"^(?:{self.prefix})", "", name)
            rows = {name: tensor}
            for whole, ends in self.parts.items():
                if name.endswith("." + whole):
                    if tensor.shape[:1] != (len(ends),):
                        what = f"must have a first axis of {len(ends)}, got shape {list(tensor.shape)}"
                        raise ValueError(f"{quoted(tensor.name)} {what}")
                    owner = name.removesuffix(whole)
                    rows = {owner + end: row_of(tensor, i) for i, end in enumerate(ends)}
            for name, tensor in rows.items():
                if name in plain:
                    both = f"{quoted(plain[name].name)} and as {quoted(tensor.name)}"
                    raise ValueError(f"holds {quoted(name)} twice, as {both}")
                plain[name] = tensor
        return plain

    def joined(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors as files have them: rows of one tensor put together."""
        joined: dict[str, Any] = {}
        for name, x in tensors.items():
            if name.endswith("]"):
                joined.setdefault(name[: name.rindex("[")], []).append(x)
            else:
                joined[name] = x
        return {name: np.stack(x) if isinstance(x, list) else x for name, x in joined.items()}
