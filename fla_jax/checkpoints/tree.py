"""Parameters from the tensors of a file and back, by a param map."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..layers.fields import DTYPES
from ..models import RWKVConfig, family_of
from .param_maps.param_map import ParamMap, Transform
from .tensors import StoredTensor, copy_into, quoted, read_ahead

Array: TypeAlias = np.ndarray | jax.Array
EMBEDDING, HEAD = "emb/embedding", "head/kernel"  # paths of parameters


class Parameter(NamedTuple):
    """The source of a parameter: its shape, and the tensor and transform of each layer (0 without layers)."""

    shape: tuple[int, ...]
    layers: dict[int, tuple[StoredTensor, Transform]]


def sizes(param_map: ParamMap, tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """The fields of the configuration that the shapes of tensors give.

    Raises:
        ValueError: such a tensor is missing or has a wrong number of axes, or a whole layer is missing.
    """
    layers = {layer for name in tensors if (layer := param_map.layer_of(name)) is not None}
    if lost := set(range(len(layers))) - layers:
        raise ValueError(f"has no tensor of layer {min(lost)}, but some of layer {max(layers)}")

    def shape(path: str, layer: int | None = None) -> tuple[int, ...]:
        name, transform = param_map.ref(path, layer)
        tensor = find(tensors, name)
        try:
            shape = transform.load(np.broadcast_to(np.uint8(0), tensor.shape)).shape
        except (ValueError, IndexError):
            shape = ()
        if len(shape) != 2:
            raise ValueError(f"{quoted(tensor.name)} has the wrong shape, {list(tensor.shape)}")
        return shape

    vocab_size, hidden_size = shape(EMBEDDING)
    found = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": len(layers)}
    for field, size in param_map.family.sizes.items():
        if size.layer < len(layers):
            found[field] = shape(f"blocks/{size.path}", size.layer)[size.axis] // size.divisor
    return found


def find(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """A tensor by name.

    Raises:
        ValueError: the file lacks it.
    """
    if name not in tensors:
        raise ValueError(f"lacks the tensor {quoted(name)}")
    return tensors[name]


@functools.lru_cache(16)
def _shapes(config: RWKVConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters; those of a layer, under "blocks/...", without an axis of layers."""
    # the scanned model traces one layer for any number of them; the shapes depend on no implementation
    config = dataclasses.replace(config, remat=False, logical_axes=False, scan_layers=True)
    model = family_of(config).model(dataclasses.replace(config, chunk_size=None, implementation=None))
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    shapes = {path: x.shape for path, x in flatten_dict(tree, sep="/").items()}
    return {path: shape[1:] if path.startswith("blocks/") else shape for path, shape in shapes.items()}


def model_shapes(config: RWKVConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path in the tree of a model, such as "blocks_0/ln1/scale"."""
    shapes, family = {}, family_of(config)
    for path, shape in _shapes(config).items():
        if not path.startswith("blocks/"):
            shapes[path] = shape
        elif config.scan_layers:
            shapes[path] = (config.num_layers, *shape)
        else:
            shapes |= {layer_path(path, i): shape for i in family.layers_of(path, config.num_layers)}
    return shapes


def checked(params: PyTree, config: RWKVConfig) -> dict[str, Array]:
    """The parameters by path, without boxes.

    Raises:
        ValueError: a parameter is missing, surplus or of a wrong shape. TypeError: one has another type or
            dtype.
    """
    flat = {"/".join(map(str, path)): nn.meta.unbox(x) for path, x in flatten_dict(params).items()}
    shapes = model_shapes(config)
    if surplus := flat.keys() - shapes.keys():
        raise ValueError(f"params hold {min(surplus)}, which the model has not")
    for path, shape in shapes.items():
        if path not in flat:
            raise ValueError(f"params lack {path}, which the model has")
        x = check_array(f"params: {path}", flat[path])
        if x.shape != shape:
            raise ValueError(f"params: {path} must have shape {list(shape)}, got {list(x.shape)}")
    return flat


def plan(
    param_map: ParamMap, tensors: Mapping[str, StoredTensor], config: RWKVConfig
) -> dict[str, Parameter]:
    """The source of every parameter, by its path in the tree of ``config``. Reads no values.

    Raises:
        ValueError: a tensor is missing, surplus, of a wrong shape, or shares its values where it may not.
    """
    shapes, used = _shapes(config), set()
    param_map.check_paths(shapes)
    if config.tie_embeddings:
        used.add(param_map.ref(HEAD).name)  # see `check_tied`

    def source(path: str, layer: int | None = None) -> tuple[StoredTensor, Transform]:
        (name, transform), shape = param_map.ref(path, layer), shapes[path]
        if path.startswith("ln0/") and name not in tensors:
            hint = "norm_first=False loads a model that does not normalise its embeddings"
            raise ValueError(f"lacks the tensor {quoted(name)}; {hint}")
        if path == HEAD and name not in tensors:
            hint = "tie_embeddings=True loads a model whose head is its embedding"
            raise ValueError(f"lacks the tensor {quoted(name)}; {hint}")
        tensor = find(tensors, name)
        want = transform.save(np.broadcast_to(np.uint8(0), shape)).shape
        # files differ in axes of size 1 around vectors
        flat = len(shape) == 1 and _without_ones(tensor.shape) == _without_ones(shape)
        if tensor.shape != want and not flat:
            raise ValueError(f"{quoted(tensor.name)} must have shape {list(want)}, got {list(tensor.shape)}")
        used.add(name)
        return tensor, transform

    planned = {}
    for path, shape in shapes.items():
        if not path.startswith("blocks/"):
            planned[path] = Parameter(shape, {0: source(path)})
            continue
        layers = {i: source(path, i) for i in param_map.family.layers_of(path, config.num_layers)}
        if config.scan_layers:
            planned[path] = Parameter((config.num_layers, *shape), layers)
        else:
            planned |= {layer_path(path, i): Parameter(shape, {0: x}) for i, x in layers.items()}
    for name in tensors.keys() - used:
        if not param_map.is_extra(name):
            what = f"which {param_map.family.name} has not: another variant?"
            raise ValueError(f"holds the tensor {quoted(tensors[name].name)}, {what}")
        param_map.check_extra(name, tensors[name].shape, config)
    _check_shared(planned)
    return planned


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def layer_path(path: str, i: int) -> str:
    """The path of a layer's parameter in the tree of a model without scanned layers."""
    return path.replace("blocks/", f"blocks_{i}/", 1)


def _check_shared(planned: Mapping[str, Parameter]) -> None:
    """Raises ValueError where parameters would take more memory than their values take in the file.

    Tensors may share a storage without overlap. A few megabytes of overlapping tensors could make any number
    of parameters; the only ones of a model that may overlap are embedding and head.
    """
    sharing: dict[Hashable, list[StoredTensor]] = collections.defaultdict(list)
    for parameter in planned.values():
        for tensor, _ in parameter.layers.values():
            if tensor.storage is not None:
                sharing[tensor.storage].append(tensor)
    embedding, head = (planned[path].layers[0][0] if path in planned else None for path in (EMBEDDING, HEAD))
    for tensors in sharing.values():
        tied = any(tensor is embedding for tensor in tensors)
        taken = 0
        for tensor in tensors:
            taken += 0 if tied and tensor is head else tensor.nbytes
            if taken > tensor.storage_nbytes:
                what = f"{len(tensors)} tensors have {tensor.storage_nbytes} bytes together"
                raise ValueError(f"{quoted(tensor.name)} shares its values with other tensors: {what}")


def check_tied(path: Path, param_map: ParamMap, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises ValueError unless a file's head, if it has one, is the embedding."""
    refs = {name: param_map.ref(name) for name in (EMBEDDING, HEAD)}
    if refs[HEAD].name in tensors:
        embedding, head = (ref.transform.load(tensors[ref.name].read()) for ref in refs.values())
        check_same(path, refs[HEAD].name, head.T, embedding)


def check_same(path: Path, name: str, head: Array, embedding: Array) -> None:
    """Raises ValueError unless the head [V, C] of a model with ``tie_embeddings`` is the embedding."""
    must = f"{path}: {quoted(name)} must be the embedding of a model with tie_embeddings=True"
    if head.shape != embedding.shape:
        raise ValueError(f"{must}, got shapes {list(head.shape)} and {list(embedding.shape)}")
    differ = int((head != embedding).sum())
    if differ:
        wide = jnp.promote_types(head.dtype, jnp.float32)
        largest = float(abs(head.astype(wide) - embedding.astype(wide)).max())
        got = f"{differ} of {head.size} values that differ, by up to {largest:.3g}"
        raise ValueError(f"{must}, got {got}; tie_embeddings=False loads both")


def read(
    planned: Mapping[str, Parameter], dtype: DTypeLike | None, shardings: PyTree = None
) -> dict[str, PyTree]:
    """The parameters in ``dtype``, None for the file's, each put where ``shardings`` says, a tree like them.

    Layers that a file lacks are zero, of the embedding's dtype where it has none.
    """
    params, usual = {}, planned[EMBEDDING].layers[0][0].dtype
    where = {} if shardings is None else flatten_dict(shardings, sep="/")
    values = read_ahead(tensor for parameter in planned.values() for tensor, _ in parameter.layers.values())
    for path, (shape, layers) in planned.items():
        dtypes = [tensor.dtype for tensor, _ in layers.values()] or [usual]
        x = np.zeros(shape, functools.reduce(jnp.promote_types, dtypes) if dtype is None else dtype)
        target = x if path.startswith("blocks/") else x[None]
        for i, (_, transform) in layers.items():
            copy_into(target[i], transform.load(next(values)))
        params[path] = jax.device_put(x, where[path]) if where else jnp.asarray(x)
    return unflatten_dict(params, sep="/")


def from_tree(param_map: ParamMap, params: PyTree, config: RWKVConfig) -> dict[str, np.ndarray]:
    """The tensors that hold the parameters, by name, in the order of a file; views where possible.

    Raises:
        ValueError, TypeError: see `checked`.
    """
    flat = {path: np.asarray(x) for path, x in checked(params, config).items()}
    shapes = _shapes(config)
    param_map.check_paths(shapes)
    if config.tie_embeddings and not param_map.can_tie:
        flat[HEAD] = flat[EMBEDDING].T
        shapes = {**shapes, HEAD: flat[HEAD].shape}
    tensors = {}
    for path, layer in param_map.order(config):
        if path not in shapes:  # the norm of the embedding and the head, which not every model has
            continue
        if layer is None:
            x = flat[path]
        else:
            x = flat[path][layer] if config.scan_layers else flat[layer_path(path, layer)]
        name, transform = param_map.ref(path, layer)
        tensors[name] = transform.save(x)
    return tensors


def time_states(param_map: ParamMap, states: Array | None, config: RWKVConfig) -> dict[str, np.ndarray]:
    """The tensors of tuned initial states [L, H, K, V], by name.

    Raises:
        ValueError: the states have another shape, or the map no name for them. TypeError: see `check_array`.
    """
    if states is None:
        return {}
    N = config.head_dim
    want, got = (config.num_layers, config.hidden_size // N, N, N), check_array("states", states).shape
    if got != want:
        raise ValueError(f"states must have shape [L, H, K, V] = {list(want)}, got {list(got)}")
    if not param_map.time_state:
        raise ValueError(f"states must be None: {param_map.name} has no name for them")
    layers = np.asarray(states).swapaxes(2, 3)  # [H, V, K] in files
    return {param_map.time_state.replace("{}", str(i)): np.ascontiguousarray(x) for i, x in enumerate(layers)}


def check_array(name: str, x: object) -> Array:
    """Raises TypeError unless ``x`` is an array of a dtype that files may hold; the message has ``name``."""
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype.name not in DTYPES or not x.dtype.isnative:
        raise TypeError(f"{name} must be an array of {', '.join(DTYPES)}, got {x.dtype}")
    return x
