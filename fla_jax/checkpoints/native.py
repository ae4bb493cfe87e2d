"""The library's own checkpoints: parameters as Orbax writes them, each sharded as it is, and a description.

In the folder, ``fla_jax.json`` has every field of the configuration, the tokenizer and the library's
version; ``params`` and, if there are any, ``extras`` are checkpoints of `orbax.checkpoint`, which its
``StandardCheckpointer`` also restores without this library.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental.multihost_utils import sync_global_devices
from jaxtyping import PyTree

from ..models import RWKVConfig, RWKVForCausalLM, family_of, stack_layers, unstack_layers
from . import tree
from .files import Json, load_json, write_json
from .tensors import Shardings
from .tokenizer_files import find_tokenizer

_DESCRIPTION, _PARAMS, _EXTRAS = "fla_jax.json", "params", "extras"


def is_native(path: Path) -> bool:
    """Whether a path is a folder of this format."""
    return (path / _DESCRIPTION).is_file()


def save_native(
    path: Path,
    config: RWKVConfig,
    params: PyTree,
    extras: Mapping[str, np.ndarray | jax.Array],
    tokenizer: str | os.PathLike[str] | None,
) -> None:
    """Writes a checkpoint; in a run of several processes each of them calls this and writes its shards.

    A checkpoint that is there is replaced when the new one is complete. Beside PATH, the new one is called
    ``.NAME.fla_jax-new`` until then, and the one before ``.NAME.fla_jax-old`` until it is deleted. A symbolic
    link stays, and the folder that it names is replaced.

    Raises:
        ValueError: parameters are not those of the model, the folder holds something else or is the current
            one, or Orbax cannot write. TypeError: see `tree.checked`. ImportError: orbax-checkpoint is not
            installed.
    """
    ocp, found = orbax(), find_tokenizer(tokenizer, names=True)
    items = {_PARAMS: unflatten_dict(tree.checked(params, config), sep="/")} | (
        {_EXTRAS: dict(extras)} if extras else {}
    )
    if path.exists() and not is_native(path) and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} holds something that is no checkpoint of fla_jax; save elsewhere")
    real = Path(os.path.realpath(path))
    if path.exists() and Path.cwd().is_relative_to(real):
        raise ValueError(f"{path} is the current folder or one above it, and is replaced; save elsewhere")
    first, new = jax.process_index() == 0, _beside(real, "new")
    if first:
        if is_native(new) and not real.exists():  # a save was killed before its last step
            new.rename(real)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    sync_global_devices("fla_jax: folder of a checkpoint")
    try:
        with ocp.StandardCheckpointer() as writer:
            for name, item in items.items():
                writer.save(new / name, item)
                writer.wait_until_finished()
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise ValueError(f"{path} cannot be written: {reason(error)}") from error
    if first:
        description = {
            "version": sys.modules["fla_jax"].__version__,
            "tokenizer": found.name,
            "config": config.to_dict(),
        }
        found.copy(new)
        write_json(new / _DESCRIPTION, description)
        old = _beside(real, "old")
        shutil.rmtree(old, ignore_errors=True)
        if real.exists():
            real.rename(old)
        new.rename(real)
        shutil.rmtree(old, ignore_errors=True)
    sync_global_devices("fla_jax: complete checkpoint")


def _beside(path: Path, what: str) -> Path:
    """The folder that is the new or the old checkpoint while one replaces the other."""
    return path.with_name(f".{path.name}.fla_jax-{what}")


def load_native(
    path: Path, options: Mapping[str, Json], shardings: Shardings | None
) -> tuple[RWKVForCausalLM, dict[str, PyTree]]:
    """Model and parameters. A device reads the shards that it gets, on any mesh, and nothing else.

    Layers that are stacked in the folder, and not in the model that is asked for, are converted, and the
    other way round. A head that is the embedding can be left out (``tie_embeddings``).

    Raises:
        ValueError: the folder is broken, or of another version with other fields or parameters.
        ImportError: orbax-checkpoint is not installed.
    """
    saved, version = _described(path)
    config = dataclasses.replace(saved, **options)
    wanted = cast(RWKVForCausalLM, family_of(config).model(config))
    if saved.tie_embeddings and not config.tie_embeddings:
        raise ValueError(f"{path} has no head: it was saved with tie_embeddings=True")
    as_saved = {name: getattr(saved, name) for name in ("scan_layers", "tie_embeddings")}
    stored = wanted.clone(config=dataclasses.replace(config, **as_saved))
    found = _metadata(path / _PARAMS)
    shapes = {name: list(x.shape) for name, x in found.items()}
    if text := mismatch(shapes, {name: list(x) for name, x in tree.model_shapes(stored.config).items()}):
        raise ValueError(f"{path}, saved by fla_jax {version}: {text}")
    places = {} if shardings is None else flatten_dict(shardings(stored), sep="/")
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {}
    for name, x in found.items():
        dtype = jnp.dtype(config.param_dtype if "param_dtype" in options else x.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"{path}: {name} is {dtype}: give param_dtype, or set jax_enable_x64")
        target[name] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=places.get(name, default))
    params = _restored(path / _PARAMS, unflatten_dict(target, sep="/"))
    if config.tie_embeddings and not saved.tie_embeddings:
        head = params.pop("head")["kernel"]
        tree.check_same(path, tree.HEAD, head.T, params["emb"]["embedding"])
    if bool(config.scan_layers) != bool(saved.scan_layers):
        convert = functools.partial(_stacked, config=config) if config.scan_layers else unstack_layers
        out = None if shardings is None else shardings(wanted)
        params = jax.jit(convert, out_shardings=out)(params)
    return wanted, params


def _stacked(params: dict[str, PyTree], config: RWKVConfig) -> dict[str, PyTree]:
    """`stack_layers`, also of a single layer of RWKV-7, which has no v0, v1, v2 that show their shapes."""
    flat = flatten_dict(params, sep="/")
    if config.num_layers == 1:
        dtype = flat[tree.EMBEDDING].dtype
        shapes = {path: shape[1:] for path, shape in tree.model_shapes(config).items() if "blocks/" in path}
        zeros = {tree.layer_path(path, 0): jnp.zeros(shape, dtype) for path, shape in shapes.items()}
        flat = zeros | flat
    return stack_layers(unflatten_dict(flat, sep="/"))


def load_native_extras(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that are no parameters."""
    if not (path / _EXTRAS).exists():
        return {}
    found = _metadata(path / _EXTRAS)
    return _restored(path / _EXTRAS, {name: np.empty(x.shape, x.dtype) for name, x in found.items()})


def tokenizer_of(path: Path) -> str | None:
    """The tokenizer of a checkpoint: a name, or the path of a file in the folder; None if it has none."""
    name = load_json(path / _DESCRIPTION).get("tokenizer")
    if not isinstance(name, str):
        return None
    return str(path / name) if (path / name).is_file() else name


def _described(path: Path) -> tuple[RWKVConfig, str]:
    """The configuration of a checkpoint, and the version of the library that saved it."""
    description = load_json(path / _DESCRIPTION)
    version = str(description.get("version"))
    try:
        return RWKVConfig.from_dict(description.get("config", {})), version
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / _DESCRIPTION}, written by fla_jax {version}: {error}") from None


def _metadata(path: Path) -> dict[str, Json]:
    """Shapes and dtypes of an item's arrays, by path."""
    try:
        return flatten_dict(orbax().StandardCheckpointHandler().metadata(path.absolute()).tree, sep="/")
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def _restored(path: Path, target: PyTree) -> PyTree:
    try:
        with orbax().StandardCheckpointer() as reader:
            return reader.restore(path.absolute(), target)
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error


def orbax() -> types.ModuleType:
    """The package orbax.checkpoint.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        what = "checkpoints in folders and of training runs need Orbax"
        raise ImportError(f"{what}: pip install 'fla-jax[orbax]'") from error
    return ocp


def mismatch(saved: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> str | None:
    """A message about the first array that has another name or shape than wanted; None if there is none."""
    for name in (*wanted, *saved):
        if saved.get(name) != wanted.get(name):
            got, want = saved.get(name, "none"), wanted.get(name, "none")
            return f"{name} must have shape {want}, got {got}"
    return None


def reason(error: Exception) -> str:
    """The cause of an error of Orbax or TensorStore, in one line."""
    if code := re.search(r"(?:os_error_code='|OS error )(\d+)", str(error)):  # TensorStore's form
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = (line.partition(" [tensorstore_spec")[0].strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
