"""The names and forms under which files store the parameters of a family of models.

The path of a parameter is that in a model with scanned layers: "emb/embedding",
"blocks/att/receptance/kernel". Parameters of a layer have no layer axis here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...models import Family, RWKVConfig
from ..files import Json
from ..tensors import StoredTensor, quoted, slice_of


class Transform(NamedTuple):
    """The form of a parameter in a file: ``load`` makes the file's array ours, ``save`` ours the file's.

    Both return views where possible.

    Example:
        >>> import numpy as np
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> transform = OFFICIAL7.ref("blocks/att/receptance/kernel", layer=0).transform
        >>> transform.load(np.zeros((3, 5))).shape  # a projection, [out, in] in files
        (5, 3)
    """

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda x: x, lambda x: x)
TRANSPOSED = Transform(lambda x: x.T, lambda x: x.T)
VECTOR = Transform(lambda x: x.reshape(-1), lambda x: x)
UNIT_AXES = Transform(lambda x: x.reshape(-1), lambda x: x[None, None])  # [1, 1, C]


class TensorRef(NamedTuple):
    """A reference to a tensor of a file: its name, ``{}`` for the layer's number, and its transform.

    Example:
        >>> from fla_jax.checkpoints.param_maps import OFFICIAL7
        >>> OFFICIAL7.ref("emb/embedding").name
        'emb.weight'
    """

    name: str
    transform: Transform = SAME


def norm(path: str, name: str) -> dict[str, TensorRef]:
    """The tensors of a norm."""
    return {
        f"{path}/scale": TensorRef(f"{name}.weight", VECTOR),
        f"{path}/bias": TensorRef(f"{name}.bias", VECTOR),
    }


def dense(path: str, name: str, names: str) -> dict[str, TensorRef]:
    """The tensors of projections, ``"ours=theirs ..."`` or ``"both ..."``; PyTorch has [out, in]."""
    pairs = (both.partition("=") for both in names.split())
    return {
        f"{path}/{ours}/kernel": TensorRef(f"{name}.{theirs or ours}.weight", TRANSPOSED)
        for ours, _, theirs in pairs
    }


def model_refs(
    names: Mapping[str, str], att: Mapping[str, TensorRef], ffn: Mapping[str, TensorRef]
) -> dict[str, TensorRef]:
    """The tensors of a model: ``names`` of embedding, norms and head, and its attention and feed-forward."""
    return {
        "emb/embedding": TensorRef(names["emb"] + ".weight"),
        **norm("ln0", names["ln0"]),
        **norm("blocks/ln1", names["ln1"]),
        **norm("blocks/ln2", names["ln2"]),
        **att,
        **norm("blocks/att/ln_x", names["ln_x"]),
        **ffn,
        **norm("ln_out", names["ln_out"]),
        "head/kernel": TensorRef(names["head"] + ".weight", TRANSPOSED),
    }


def any_shape(shape: tuple[int, ...], config: RWKVConfig) -> None:
    """The check of tensors that are ignored."""


def check_time_state(shape: tuple[int, ...], config: RWKVConfig) -> None:
    """Raises ValueError unless this is the shape of a tuned initial state."""
    want = config.hidden_size // config.head_dim, config.head_dim, config.head_dim
    if shape != want:
        raise ValueError(f"must have shape [H, V, K] = {list(want)}, got {list(shape)}")


def no_config_json(config: RWKVConfig, dtype: np.dtype) -> dict[str, Json]:
    """`ParamMap.config_json` where files have no description of the model."""
    return {}


@dataclasses.dataclass(frozen=True, eq=False)
class ParamMap:
    """The names and forms that a scheme has for the parameters of one family.

    Attributes:
        name: for messages.
        scheme: name of the scheme, ``"official"`` or ``"fla"``: a `Format` is written with the maps of one.
        family: the family of models.
        mark: regular expression of a name that every file of this map has, and no other file.
        layer: regular expression of how names inside a layer begin, its group the layer's number.
        refs: {path of a parameter: tensor}, in the order in which files are written; layers share paths.
        extras: {regular expression: check} of tensors that files may have besides the parameters;
            ``check(shape, config)`` raises ValueError where one does not fit, or is `any_shape`.
        prefix: regular expression of what trainers prepend to names.
        slices: {end of a name: ends of the names of its slices} of tensors that hold several parameters.
            Slices named like ``x_bias[0]`` are written as one tensor, others as separate tensors.
        time_state: name of a layer's tuned initial state [H, V, K], ``{}`` for the layer's number; it is one
            of ``extras``. Empty if files have no place for it.
        can_tie: whether `config_json` can say that the head is the embedding; files then lack the head.
        config_json: the contents of the ``config.json`` of a directory, from a configuration without a size
            that is None, and the dtype of the embedding.

    Example:
        >>> from fla_jax.checkpoints.param_maps import FLA7, OFFICIAL7
        >>> path = "blocks/att/receptance/kernel"
        >>> OFFICIAL7.ref(path, layer=3).name, FLA7.ref(path, layer=3).name
        ('blocks.3.att.receptance.weight', 'model.layers.3.attn.r_proj.weight')
    """

    name: str
    scheme: str
    family: Family
    mark: str
    layer: str
    refs: Mapping[str, TensorRef]
    extras: Mapping[str, Callable[[tuple[int, ...], Any], None]] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    slices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    time_state: str = ""
    can_tie: bool = False
    config_json: Callable[[Any, np.dtype], dict[str, Json]] = no_config_json

    def detect(self, names: Iterable[str]) -> bool:
        """Whether these are the names of a file of this map."""
        mark = re.compile(f"(?:{self.prefix})(?:{self.mark})")
        return any(mark.fullmatch(name) for name in names)

    def ref(self, path: str, layer: int | None = None) -> TensorRef:
        """The tensor of a parameter, of one layer."""
        name, transform = self.refs[path]
        return TensorRef(name.replace("{}", str(layer)), transform)

    def layer_of(self, name: str) -> int | None:
        """The layer that a name belongs to."""
        found = re.match(self.layer, name)
        return int(found[1]) if found else None

    def check_paths(self, paths: Collection[str]) -> None:
        """Raises KeyError where the map lacks a parameter."""
        if missing := set(paths) - self.refs.keys():
            raise KeyError(f"the param map {self.name!r} lacks {min(missing)}")

    def order(self, config: RWKVConfig) -> Iterator[tuple[str, int | None]]:
        """Every parameter, as path and layer, in the order of a file."""
        in_layers = [path for path in self.refs if path.startswith("blocks/")]
        layers_of = self.family.layers_of
        for path in self.refs:
            if path not in in_layers:
                yield path, None
            elif path == in_layers[0]:
                for i in range(config.num_layers):
                    yield from ((path, i) for path in in_layers if i in layers_of(path, config.num_layers))

    def is_extra(self, name: str) -> bool:
        """Whether a file may have the tensor besides the parameters."""
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

    def split(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """A file's tensors by names without prefixes, those that hold several parameters in slices.

        Raises:
            ValueError: a name occurs twice, or a tensor has a wrong number of slices.
        """
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            name = re.sub(f"^(?:{self.prefix})", "", name)
            slices = {name: tensor}
            for whole, ends in self.slices.items():
                if name.endswith("." + whole):
                    if tensor.shape[:1] != (len(ends),):
                        what = f"must have a first axis of {len(ends)}, got shape {list(tensor.shape)}"
                        raise ValueError(f"{quoted(tensor.name)} {what}")
                    owner = name.removesuffix(whole)
                    slices = {owner + end: slice_of(tensor, i) for i, end in enumerate(ends)}
            for name, tensor in slices.items():
                if name in found:
                    both = f"{quoted(found[name].name)} and as {quoted(tensor.name)}"
                    raise ValueError(f"holds {quoted(name)} twice, as {both}")
                found[name] = tensor
        return found

    def joined(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors of a file, those that hold several parameters stacked."""
        stacks: dict[str, list[np.ndarray]] = {}
        for name, x in tensors.items():
            stacks.setdefault(re.sub(r"\[\d+\]$", "", name), []).append(x)
        return {name: x[0] if name in tensors else np.stack(x) for name, x in stacks.items()}
