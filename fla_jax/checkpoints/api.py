"""Models from and to checkpoints."""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict

from ..layers.fields import DTYPES
from ..models.causal_lm import RWKVForCausalLM
from ..models.config import RWKVConfig
from . import tree
from .files import as_path
from .formats import FORMATS
from .hub import located
from .param_maps import ParamMap, identify
from .tensors import StoredTensor, quoted, stored

_OPTIONS = ("dtype", "param_dtype", "scan_layers", "remat", "logical_axes", "chunk_size", "implementation")
_NAMED = 8  # tensors in a warning


def load_checkpoint(path: str | os.PathLike[str], **options: Any) -> tuple[RWKVForCausalLM, dict[str, Any]]:
    """Loads RWKV-6 or RWKV-7; version, sizes and low ranks are read from the tensors' names and shapes.

    Nothing in a file is run, and PyTorch is not needed. Tensors are read one by one.

    Args:
        path: an official ``.pth`` file (of RWKV-LM: float32, bfloat16 or float16), or a directory with
            flash-linear-attention's safetensors (the package safetensors must be installed), or one
            ``.safetensors`` file, or what a format in `FORMATS` reads. Or a repository at Hugging Face,
            ``"hf://owner/name"`` for its safetensors, ``"hf://owner/name/file.pth"`` for one of its files,
            ``@revision`` behind the name for another than the newest: the package huggingface_hub (the extra
            ``hub``) fetches what is not in its cache, nothing with ``HF_HUB_OFFLINE=1``.
        **options: fields of the model's configuration that no file tells: ``dtype``, ``param_dtype``,
            ``scan_layers``, ``remat``, ``logical_axes``, ``chunk_size``, ``implementation``; see
            `RWKV7Config`. ``param_dtype`` casts the parameters; by default every one keeps its dtype in the
            file, so that `save_checkpoint` gives the same bits back. Stacked by ``scan_layers``, a parameter
            that has several dtypes in the file takes the widest of its layers. ``dtype``, the one to compute
            in, is float32 by default whatever the file's.

    Returns:
        ``(model, params)``: ``model.apply({"params": params}, tokens)``. Params are JAX arrays on the default
        device, not boxed. Tensors that are no parameters are left out: layer 0's v0, v1, v2, which RWKV-7
        files may have and nothing reads, and tuned initial states (``time_state``); see `load_extras`.

    Raises:
        ValueError: the file is broken, truncated, damaged (``.pth`` files have checksums), no regular file,
            or asks for code to be run; it is of an unknown or newer variant; a tensor is missing, surplus,
            has a wrong shape or dtype, or shares its values with others, as only embedding and head may;
            config.json names another norm_eps or activation. The message names the file and the tensor. Or:
            an option does not fit.
        TypeError: an option is unknown, or one that the file tells, or has another type; ``path`` is no path.
        OSError: the file cannot be opened, or a repository or its file is neither in the cache nor within
            reach. ImportError: it needs safetensors or huggingface_hub, which is not installed.

    FLA normalises heads with other epsilons than every official runtime: RWKV-6 with 1e-5 instead of 64e-5,
    RWKV-7 with head_dim * 1e-5. A model trained with those gives other logits here: differences of some
    percent for RWKV-6, none for RWKV-7 with heads of 64.

    Example:
        >>> import jax, jax.numpy as jnp, tempfile
        >>> from fla_jax.checkpoints import load_checkpoint, save_checkpoint
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
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
            known = f"the options are {', '.join(_OPTIONS)}"
            raise TypeError(f"load_checkpoint takes no option {name!r}: {what}; {known}")
    RWKVConfig(vocab_size=1, hidden_size=1, num_layers=1, head_dim=1, **options)  # checks them before reading
    path = located(path)
    param_map, tensors = _open(path)
    try:
        for tensor in tensors.values():
            if "param_dtype" not in options and jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
                hint = "give param_dtype, or set jax_enable_x64"
                raise ValueError(f"{quoted(tensor.name)} is {tensor.dtype}: {hint}")
        sizes: dict[str, Any] = tree.sizes(param_map, tensors)
        embedding = tensors[param_map.place("emb/embedding").name]
        config = param_map.family.config(**sizes, **{"param_dtype": embedding.dtype, **options})
        planned = tree.plan(param_map, tensors, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    params = tree.read(planned, config.param_dtype if "param_dtype" in options else None)
    return param_map.family.model(config), params


def save_checkpoint(
    path: str | os.PathLike[str],
    model: RWKVForCausalLM,
    params: Mapping[str, Any],
    *,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Saves a model as an official ``.pth`` file or as a directory that flash-linear-attention reads.

    Every parameter keeps its dtype and its bits; a warning names those whose dtype differs from that of most,
    as merged float32 updates of a bfloat16 model do. A file appears, or is replaced, when it is complete; any
    number of threads and processes may save to one path, and a save removes what killed ones have left there.

    Args:
        path: a file that ends in ``.pth``, or a directory, made if need be, for ``model.safetensors`` and
            ``config.json``, or what a format in `FORMATS` writes. A symbolic link to a file is replaced.
        model: `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, stacked layers (``scan_layers``) and boxed arrays included.
        extras: {name in the file: array} of tensors that are no parameters: "blocks.0.att.v0" (v1, v2), which
            other readers of RWKV-7 files may insist on, and "blocks.0.att.time_state" [H, V, K] and so on.
            `load_extras` gives those of a file.

    Raises:
        ValueError: ``params`` are not those of ``model``; an extra is not known in this format, is of a layer
            that the model has not, or has a wrong shape; the model has a ``rate_scale`` other than 1, which
            no format can tell; the directory holds a model in several files; no format is written to such a
            path.
        TypeError: an argument has another type, or a parameter another dtype than float32, bfloat16,
            float16 or float64.
        OSError: a file cannot be written; the error names it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import tempfile
        >>> from fla_jax.checkpoints import load_checkpoint, save_checkpoint
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/fla", model, params)  # model.safetensors and config.json
        ...     loaded, same = load_checkpoint(folder + "/fla")
        >>> all((a == b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same)))
        True
    """
    path = as_path(path)
    if not isinstance(model, RWKVForCausalLM):
        raise TypeError(f"model must be an RWKV6ForCausalLM or RWKV7ForCausalLM, got {type(model).__name__}")
    if not isinstance(params, dict | FrozenDict):
        raise TypeError(f"params must be a dict of the model's parameters, got {type(params).__name__}")
    if not isinstance(extras, Mapping | None):
        raise TypeError(f"extras must be a dict of arrays or None, got {type(extras).__name__}")
    config = model.config
    if getattr(config, "rate_scale", 1.0) != 1.0:
        what = "no checkpoint format can tell it"
        got = f"model.config.rate_scale must be 1, the official models', got {config.rate_scale}"
        raise ValueError(f"{got}: {what}")
    form = next((form for form in reversed(FORMATS) if form.writes(path)), None)
    if form is None:
        known = " or ".join(form.name for form in FORMATS)
        raise ValueError(f"path must name {known}, got {path}")
    param_map = next(param_map for param_map in form.param_maps if isinstance(model, param_map.family.model))
    tensors = tree.from_tree(param_map, params, config)
    sizes: dict[str, Any] = tree.sizes(param_map, {name: stored(name, x) for name, x in tensors.items()})
    embedding = tensors[param_map.place("emb/embedding").name]
    _warn_of_mixed_dtypes(tensors)
    for name, x in (extras or {}).items():
        if not isinstance(name, str) or not param_map.is_extra(name):
            what = f"is no tensor that {form.name} may have beside the parameters"
            raise ValueError(f"extras: {quoted(name)} {what}")
        tensors[name] = tree.as_array(f"extras: {name}", x)
        param_map.check_extra(name, tensors[name].shape, config)
    fields = param_map.fields(dataclasses.replace(config, **sizes), embedding.dtype)
    form.write(path, param_map.joined(tensors), fields)


def _warn_of_mixed_dtypes(tensors: Mapping[str, np.ndarray]) -> None:
    """Names the parameters whose dtype is not that of most."""
    counts = collections.Counter(x.dtype.name for x in tensors.values())
    usual = counts.most_common(1)[0][0]
    others = [f"{name} {x.dtype}" for name, x in tensors.items() if x.dtype.name != usual]
    if others:
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if others[_NAMED:] else "")
        warnings.warn(
            f"params: {len(others)} of {len(tensors)} tensors have another dtype than most, {usual}: "
            f"{named}; cast them with x.astype where this is not meant",
            stacklevel=3,
        )


def load_extras(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that `load_checkpoint` leaves out, under their names in the file.

    Those are layer 0's v0, v1, v2 and tuned initial states.

    Args:
        path: as in `load_checkpoint`.

    Returns:
        {name: array}, for `save_checkpoint`; ``blocks.{i}.att.time_state`` are [H, V, K]. Empty where there
        are none.

    Raises:
        ValueError, TypeError, OSError, ImportError: as `load_checkpoint`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import tempfile
        >>> from fla_jax.checkpoints import load_extras, save_checkpoint
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> states = {f"blocks.{i}.att.time_state": jnp.ones((4, 16, 16)) for i in range(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/tuned.pth", model, params, extras=states)
        ...     sorted(load_extras(folder + "/tuned.pth"))
        ['blocks.0.att.time_state', 'blocks.1.att.time_state']
    """
    param_map, tensors = _open(located(path))
    return {name: tensor.read() for name, tensor in tensors.items() if param_map.is_extra(name)}


def _open(path: Path) -> tuple[ParamMap, dict[str, StoredTensor]]:
    """A checkpoint's naming, and its tensors by plain name."""
    path.stat()  # whether there is anything does not depend on its format
    form = next((form for form in reversed(FORMATS) if form.reads(path)), None)
    if form is None:
        raise ValueError(f"{path} is neither {' nor '.join(form.name for form in FORMATS)}")
    tensors = form.read(path)
    try:
        for name, tensor in tensors.items():
            if 0 in tensor.shape:  # the other sizes could be anything
                raise ValueError(f"{quoted(name)} has no values: its shape is {list(tensor.shape)}")
            if tensor.dtype.name not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{quoted(name)} must have a dtype of {known}, got {tensor.dtype}")
        param_map = identify(tensors)
        return param_map, param_map.plain(tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
