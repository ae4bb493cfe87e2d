"""Models from and to checkpoints: RWKV-LM's ``.pth`` files and flash-linear-attention's directories."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict

from .causal_lm import RWKV6ForCausalLM, RWKV7ForCausalLM, RWKVForCausalLM
from .config import RWKV6Config, RWKV7Config, RWKVConfig
from .files import Stored, as_path, copy_into, quoted
from .hf import fla_config, read_safetensors, write_safetensors
from .names import STACKED, Layout, entry, identify, is_extra, layer_of
from .pth import open_pth, write_pth

Sources = dict[int, tuple[Stored, Layout]]  # by layer, or {0: ...}
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MODELS: dict[int, tuple[Any, Any]] = {6: (RWKV6Config, RWKV6ForCausalLM), 7: (RWKV7Config, RWKV7ForCausalLM)}
_OPTIONS = ("dtype", "param_dtype", "scan_layers", "remat", "logical_axes", "chunk_size", "implementation")
_AHEAD = 4  # tensors that are read while another is used; no more, since reading may copy them
# field of the configuration: (matrix of a layer that tells it, the axis, what to divide by)
_SIZES = {
    6: {
        "head_dim": ("att/time_faaaa", 1, 1),
        "intermediate_size": ("ffn/key/kernel", 1, 1),
        "proj_low_rank_dim": ("att/time_maa_w1", 1, 5),
        "decay_low_rank_dim": ("att/time_decay_w1", 1, 1),
    },
    7: {
        "head_dim": ("att/r_k", 1, 1),
        "intermediate_size": ("ffn/key/kernel", 1, 1),
        "decay_low_rank_dim": ("att/w1", 1, 1),
        "a_low_rank_dim": ("att/a1", 1, 1),
        "gate_low_rank_dim": ("att/g1", 1, 1),
    },
}
_NOT_IN_FIRST = ("att/v0", "att/v1", "att/v2")  # RWKV-7's value residual


def load_checkpoint(path: str | os.PathLike[str], **options: Any) -> tuple[RWKVForCausalLM, dict[str, Any]]:
    """Loads RWKV-6 or RWKV-7; version, sizes and low ranks are read from the tensors' names and shapes.

    Nothing in a file is run, and PyTorch is not needed. Tensors are read one by one.

    Args:
        path: an official ``.pth`` file (of RWKV-LM: float32, bfloat16 or float16), or a directory with flash-linear-attention's safetensors (the package
            safetensors must be installed), or one ``.safetensors`` file.
        **options: fields of the model's configuration that no file tells: ``dtype``, ``param_dtype``, ``scan_layers``, ``remat``, ``logical_axes``,
            ``chunk_size``, ``implementation``; see `RWKV7Config`. ``param_dtype`` casts the parameters; by default every one keeps its dtype in the file, so
            that `save_checkpoint` gives the same bits back. ``dtype``, the one to compute in, is float32 by default whatever the file's.

    Returns:
        ``(model, params)``: ``model.apply({"params": params}, tokens)``. Params are JAX arrays on the default device, not boxed. Tensors that are no parameters
        are left out: layer 0's v0, v1, v2, which RWKV-7 files may have and nothing reads, and tuned initial states (``time_state``); see `load_extras`.

    Raises:
        ValueError: the file is broken, truncated, damaged (``.pth`` files have checksums), no regular file, or
            asks for code to be run; it is of an unknown or newer variant; a tensor is missing, surplus, has a
            wrong shape or dtype, or shares its values with others, as only embedding and head may; config.json
            names another norm_eps or activation. The message names the file and the tensor. Or: an option does
            not fit.
        TypeError: an option is unknown, or one that the file tells, or has another type; ``path`` is no path.
        OSError: the file cannot be opened. ImportError: it needs safetensors, which is not installed.

    FLA normalises heads with other epsilons than every official runtime: RWKV-6 with 1e-5 instead of 64e-5, RWKV-7 with head_dim * 1e-5. A model trained with
    those gives other logits here: differences of some percent for RWKV-6, none for RWKV-7 with heads of 64.

    Sources: RWKV-LM ``RWKV-v7/train_temp/src/model.py``, ``RWKV-v5/src/model.py``; PyPI rwkv ``model.py``; flash-linear-attention ``fla/models/rwkv{6,7}``,
    ``utils/convert_from_rwkv{6,7}.py``.

    Example:
        >>> import jax, jax.numpy as jnp, tempfile
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, load_checkpoint, save_checkpoint
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/model.pth", model, params)
        ...     loaded, loaded_params = load_checkpoint(folder + "/model.pth", dtype="bfloat16")
        >>> loaded.config.head_dim, loaded.config.a_low_rank_dim
        (16, 32)
    """
    for name in options:
        if name not in _OPTIONS:
            what = "the file tells it, or it does not exist"
            options_are = f"the options are {', '.join(_OPTIONS)}"
            raise TypeError(f"load_checkpoint takes no option {name!r}: {what}; {options_are}")
    RWKVConfig(vocab_size=1, hidden_size=1, num_layers=1, head_dim=1, **options)  # checks them before reading
    path = as_path(path)
    tensors = _open(path)
    try:
        style, version = identify(list(tensors))
        sizes = _sizes(tensors, style, version)
        for tensor in tensors.values():
            if "param_dtype" not in options and jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
                hint = "give param_dtype, or set jax_enable_x64"
                raise ValueError(f"{quoted(tensor.name)} is {tensor.dtype}: {hint}")
        config_class, model_class = _MODELS[version]
        config = config_class(**sizes, **{"param_dtype": _find(tensors, *entry(style, version, "emb/embedding", 2))[0].dtype, **options})
        params = _read(_plan(tensors, style, version, config), config.param_dtype if "param_dtype" in options else None)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return model_class(config), params


def save_checkpoint(path: str | os.PathLike[str], model: RWKVForCausalLM, params: Mapping[str, Any], *, extras: Mapping[str, Any] | None = None) -> None:
    """Saves a model as an official ``.pth`` file or as a directory that flash-linear-attention reads.

    Every parameter keeps its dtype and its bits. A file appears, or is replaced, when it is complete.

    Args:
        path: a file that ends in ``.pth``, or a directory, made if need be, for ``model.safetensors`` and ``config.json``.
        model: `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, stacked layers (``scan_layers``) and boxed arrays included.
        extras: {name in the file: array} of tensors that are no parameters: "blocks.0.att.v0" (v1, v2), which other readers of RWKV-7 files may insist on,
            and "blocks.0.att.time_state" [H, V, K] and so on. `load_extras` gives those of a file.

    Raises:
        ValueError: ``params`` are not those of ``model``; an extra is not known in this format, or has a wrong shape; the model has a ``rate_scale`` other than
            1, which neither format can tell; the directory holds a model in several files.
        TypeError: an argument has another type, or a parameter another dtype than float32, bfloat16, float16
            or float64.
        OSError: a file cannot be written; the error names it.
    """
    path = as_path(path)
    if not isinstance(model, RWKV6ForCausalLM | RWKV7ForCausalLM):
        raise TypeError(f"model must be an RWKV6ForCausalLM or RWKV7ForCausalLM, got {type(model).__name__}")
    if not isinstance(params, dict | FrozenDict):
        raise TypeError(f"params must be a dict of the model's parameters, got {type(params).__name__}")
    if not isinstance(extras, Mapping | None):
        raise TypeError(f"extras must be a dict of arrays or None, got {type(extras).__name__}")
    config: Any = model.config
    if path.suffix in (".safetensors", ".pt", ".bin", ".json"):
        raise ValueError(f"path must end in .pth, or be a directory for {path.suffix} files, got {path}")
    style = "official" if path.suffix == ".pth" else "fla"
    version = _version(config)
    if getattr(config, "rate_scale", 1.0) != 1.0:
        raise ValueError(f"model.config.rate_scale must be 1, the official models', got {config.rate_scale}: no checkpoint format can tell it")
    tensors = _arrays(params, config, style, version)
    for name, x in (extras or {}).items():
        if not isinstance(name, str) or not is_extra(style, name):
            where = "a .pth file" if style == "official" else "an FLA directory"
            what = f"is no tensor that {where} may have beside the parameters"
            raise ValueError(f"extras: {quoted(name)} {what}")
        tensors[name] = _array(f"extras: {name}", x)
        _check_state(name, tensors[name].shape, config)
    if style == "official":
        # PyPI rwkv counts RWKV-6's heads when it meets time_faaaa, if it has met a time_maa before: official files have those first
        order = lambda name: (name != "emb.weight", layer_of(style, name) if name.startswith("blocks.") else config.num_layers, "time_maa" not in name)
        return write_pth(path, {name: tensors[name] for name in sorted(tensors, key=order)})
    sizes = _sizes(_as_stored(tensors), style, version)
    for name in [name for name in tensors if name.endswith("[0]")]:
        name = name.removesuffix("[0]")
        tensors[name] = np.stack([tensors.pop(f"{name}[{i}]") for i in range(5)])
    fields = fla_config(dataclasses.replace(config, **sizes), tensors["model.embeddings.weight"].dtype)
    write_safetensors(path, tensors, fields)


def load_extras(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that `load_checkpoint` leaves out: layer 0's v0, v1, v2 and tuned initial states, under their names in the file.

    Args:
        path: as in `load_checkpoint`.

    Returns:
        {name: array}, for `save_checkpoint`; ``blocks.{i}.att.time_state`` are [H, V, K]. Empty where there are none.

    Raises:
        ValueError, OSError, ImportError: as `load_checkpoint`.
    """
    path = as_path(path)
    tensors = _open(path)
    try:
        style, _ = identify(list(tensors))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {name: tensor.read() for name, tensor in tensors.items() if is_extra(style, name)}


def _open(path: Path) -> dict[str, Stored]:
    """A checkpoint's tensors by name, without the prefixes that trainers add, and tensors of several parameters taken apart."""
    stored = read_safetensors(path) if path.is_dir() or path.suffix == ".safetensors" else open_pth(path)
    tensors: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if 0 in tensor.shape:  # the other sizes could be anything
            raise ValueError(f"{path}: {quoted(name)} has no values: its shape is {list(tensor.shape)}")
        name = re.sub(r"^(_forward_module\.)?(model\.(?=(emb|blocks|ln_out|head)\.))?", "", name)
        parts = {name: tensor}
        for whole, names in STACKED.items():
            if name.endswith("." + whole):
                if tensor.shape[:1] != (len(names),):
                    what = f"must have a first axis of {len(names)}, got shape {list(tensor.shape)}"
                    raise ValueError(f"{path}: {quoted(tensor.name)} {what}")
                owner = name.removesuffix(whole)
                parts = {owner + part: _part(tensor, i) for i, part in enumerate(names)}
        for name, tensor in parts.items():
            if name in tensors:
                both = f"{quoted(tensors[name].name)} and as {quoted(tensor.name)}"
                raise ValueError(f"{path}: holds {quoted(name)} twice, as {both}")
            tensors[name] = tensor
    return tensors


def _as_stored(arrays: Mapping[str, np.ndarray]) -> dict[str, Stored]:
    return {name: Stored(name, x.shape, x.dtype, functools.partial(np.asarray, x)) for name, x in arrays.items()}


def _part(tensor: Stored, i: int) -> Stored:
    name = f"{tensor.name}[{i}]"
    return Stored(name, tensor.shape[1:], tensor.dtype, lambda: tensor.read()[i], tensor.storage, tensor.room)


def _find(tensors: Mapping[str, Stored], name: str, layout: Layout) -> tuple[Stored, Layout]:
    if name not in tensors:
        raise ValueError(f"lacks the tensor {quoted(name)}")
    return tensors[name], layout


def _shape(tensor: Stored, layout: Layout) -> tuple[int, ...]:
    """Shape of the parameter that a matrix of a file holds."""
    try:
        shape = layout.load(np.broadcast_to(np.uint8(0), tensor.shape)).shape
    except (ValueError, IndexError):
        shape = ()
    if len(shape) != 2:
        raise ValueError(f"{quoted(tensor.name)} has the wrong shape, {list(tensor.shape)}")
    return shape


def _sizes(tensors: Mapping[str, Stored], style: str, version: int) -> dict[str, int]:
    """The fields of the configuration that tensors tell."""
    layers = {layer for name in tensors if (layer := layer_of(style, name)) is not None}
    if lost := set(range(len(layers))) - layers:
        raise ValueError(f"has no tensor of layer {min(lost)}, but some of layer {max(layers)}")
    shape = lambda leaf, layer=None: _shape(*_find(tensors, *entry(style, version, leaf, 2, layer)))
    sizes = dict(zip(("vocab_size", "hidden_size"), shape("emb/embedding")), num_layers=len(layers))
    for field, (leaf, axis, parts) in _SIZES[version].items():
        sizes[field] = shape(leaf, 0)[axis] // parts
    if version == 7 and len(layers) > 1:
        sizes["v_low_rank_dim"] = shape("att/v1", 1)[1]
    return sizes


def _version(config: RWKVConfig) -> int:
    return 6 if isinstance(config, RWKV6Config) else 7


@functools.lru_cache(16)
def _template(config: RWKVConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters; those of a layer, under "blocks/...", without a layer axis."""
    # the scanned form traces one layer, however many there are; which implementation will run plays no role
    config = dataclasses.replace(config, remat=False, logical_axes=False, scan_layers=True)
    model = _MODELS[_version(config)][1](dataclasses.replace(config, chunk_size=None, implementation=None))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return {name: x.shape[1:] if name.startswith("blocks/") else x.shape for name, x in flatten_dict(shapes, sep="/").items()}


def _layers(leaf: str, config: RWKVConfig) -> range:
    """The layers that have a parameter of the template."""
    return range(leaf.removeprefix("blocks/") in _NOT_IN_FIRST, config.num_layers)


def _check_state(name: str, shape: tuple[int, ...], config: RWKVConfig) -> None:
    want = (config.hidden_size // config.head_dim, config.head_dim, config.head_dim)
    if name.endswith(".time_state") and shape != want:
        raise ValueError(f"{quoted(name)} must have shape [H, V, K] = {list(want)}, got {list(shape)}")


def _plan(tensors: Mapping[str, Stored], style: str, version: int, config: RWKVConfig) -> dict[str, tuple[tuple[int, ...], Sources]]:
    """Where every parameter comes from: {name: (shape, {layer: (tensor, layout)})}, stacked if ``config`` says so. Checks all names and shapes."""
    plan: dict[str, tuple[tuple[int, ...], Sources]] = {}
    used = set()

    def find(leaf: str, shape: tuple[int, ...], layer: int | None) -> tuple[Stored, Layout]:
        name, layout = entry(style, version, leaf, len(shape), layer)
        tensor, _ = _find(tensors, name, layout)
        want = layout.save(np.broadcast_to(np.uint8(0), shape)).shape
        flat = len(shape) == 1 and [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
        if tensor.shape != want and not flat:  # axes of size 1 around vectors come and go between files
            raise ValueError(f"{quoted(tensor.name)} must have shape {list(want)}, got {list(tensor.shape)}")
        used.add(name)
        return tensor, layout

    for leaf, shape in _template(config).items():
        if not leaf.startswith("blocks/"):
            plan[leaf] = shape, {0: find(leaf, shape, None)}
            continue
        inside = leaf.removeprefix("blocks/")
        sources = {i: find(inside, shape, i) for i in _layers(leaf, config)}
        if config.scan_layers:
            plan[leaf] = (config.num_layers, *shape), sources
        else:
            plan |= {f"blocks_{i}/{inside}": (shape, {0: source}) for i, source in sources.items()}
    for name in tensors.keys() - used:
        if not is_extra(style, name):
            what = f"which RWKV-{version} has not: another variant?"
            raise ValueError(f"holds the tensor {quoted(tensors[name].name)}, {what}")
        _check_state(name, tensors[name].shape, config)
    _check_shared(plan)
    return plan


def _check_shared(plan: Mapping[str, tuple[tuple[int, ...], Sources]]) -> None:
    """Raises where parameters would take more memory than their values take in the file.

    Tensors may lie in one storage, side by side. If they lie over one another, a few megabytes can make any
    number of parameters; those of a model are independent, but for a head that is the embedding.
    """
    sharing: dict[Hashable, list[Stored]] = collections.defaultdict(list)
    for _, sources in plan.values():
        for tensor, _ in sources.values():
            if tensor.storage is not None:
                sharing[tensor.storage].append(tensor)
    embedding, head = (plan[name][1][0][0] for name in ("emb/embedding", "head/kernel"))
    for tensors in sharing.values():
        tied = any(tensor is embedding for tensor in tensors)
        taken = 0
        for tensor in tensors:
            taken += 0 if tied and tensor is head else tensor.nbytes
            if taken > tensor.room:
                what = f"{len(tensors)} tensors have {tensor.room} bytes together"
                raise ValueError(f"{quoted(tensor.name)} shares its values with other tensors: {what}")


def _ahead(tensors: Iterable[Stored]) -> Iterator[np.ndarray]:
    """The values of each tensor, read in threads while those before are used: checksums take little time so."""
    with ThreadPoolExecutor(_AHEAD) as pool:
        coming: collections.deque[Any] = collections.deque()
        for tensor in tensors:
            coming.append(pool.submit(tensor.read))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _read(plan: Mapping[str, tuple[tuple[int, ...], Sources]], dtype: Any) -> dict[str, Any]:
    """The parameters; what a file does not have of a stacked one is zero."""
    params = {}
    read = _ahead(tensor for _, sources in plan.values() for tensor, _ in sources.values())
    for name, (shape, sources) in plan.items():
        kinds = [tensor.dtype for tensor, _ in sources.values()] or [np.dtype(np.float32)]
        kind = functools.reduce(jnp.promote_types, kinds) if dtype is None else dtype
        values = np.zeros(shape, kind)
        rows = values if name.startswith("blocks/") else values[None]
        for i, (_, layout) in sources.items():
            copy_into(rows[i], layout.load(next(read)))
        params[name] = jnp.asarray(values)
    return unflatten_dict(params, sep="/")


def _array(name: str, x: Any) -> np.ndarray:
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if x.dtype.name not in _DTYPES:
        raise TypeError(f"{name} must be an array of {', '.join(_DTYPES)}, got {x.dtype}")
    return np.asarray(x)


def _arrays(params: Mapping[str, Any], config: RWKVConfig, style: str, version: int) -> dict[str, np.ndarray]:
    """A file's tensors by name."""
    flat = {"/".join(map(str, path)): nn.meta.unbox(x) for path, x in flatten_dict(params).items()}
    tensors = {}

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in flat:
            raise ValueError(f"params lack {name}, which the model has")
        x = _array(f"params: {name}", flat.pop(name))
        if x.shape != shape:
            raise ValueError(f"params: {name} must have shape {list(shape)}, got {list(x.shape)}")
        return x

    def put(leaf: str, x: np.ndarray, layer: int | None) -> None:
        name, layout = entry(style, version, leaf, x.ndim, layer)
        tensors[name] = layout.save(x)

    for leaf, shape in _template(config).items():
        if not leaf.startswith("blocks/"):
            put(leaf, take(leaf, shape), None)
            continue
        inside = leaf.removeprefix("blocks/")
        stacked = take(leaf, (config.num_layers, *shape)) if config.scan_layers else None
        for i in _layers(leaf, config):
            put(inside, take(f"blocks_{i}/{inside}", shape) if stacked is None else stacked[i], i)
    if flat:
        raise ValueError(f"params hold {min(flat)}, which the model has not")
    return tensors
