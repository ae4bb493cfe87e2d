"""Models from and to checkpoints."""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
from flax.core import FrozenDict
from jaxtyping import Array, Float, PyTree

from ..core.arguments import check_integer
from ..layers.fields import DTYPES
from ..models import RWKVConfig, RWKVForCausalLM, family_of
from . import tree
from .files import as_path
from .formats import FORMATS, HUGGINGFACE, PTH, Format
from .hub import located
from .native import is_native, load_native, load_native_extras, save_native
from .param_maps import ParamMap, identify, map_for
from .tensors import Shardings, StoredTensor, quoted, stored
from .tokenizer_files import find_tokenizer

# configuration fields that no tensor gives
_OPTIONS = (
    "dtype",
    "param_dtype",
    "scan_layers",
    "remat",
    "reshard_after_forward",
    "norm_first",
    "tie_embeddings",
    "logical_axes",
    "fp8",
    "chunk_size",
    "implementation",
)
_FORMATS = {"pth": PTH, "huggingface": HUGGINGFACE}  # by the argument ``format``
_NATIVE = "orbax"  # the argument ``format`` of the library's own
_FILE_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".json")  # of paths that name no folder
_MAX_NAMES = 8  # of tensors in a warning


def load_checkpoint(
    path: str | os.PathLike[str], *, shardings: Shardings | None = None, **options: Any
) -> tuple[RWKVForCausalLM, dict[str, PyTree]]:
    """Loads RWKV-6 or RWKV-7 from any format. No code of a file is run, and PyTorch is not needed.

    A folder that `save_checkpoint` made has the whole configuration. In all other formats version, sizes and
    low ranks come from the names and shapes of the tensors, which are read one by one.

    Args:
        path: a folder of the library's own format (needs the package orbax-checkpoint); an official ``.pth``
            file; a directory with flash-linear-attention's safetensors (needs the package safetensors), in
            one file or in several with an index, or one ``.safetensors`` file; a path that another format in
            `FORMATS` reads; or a repository at Hugging Face, ``"hf://owner/name"`` for its safetensors,
            ``"hf://owner/name/file.pth"`` for one file, with ``@revision`` after the name. The package
            huggingface_hub (the extra ``hub``) downloads files that are not in its cache.
        shardings: a function from the model to the shardings of its parameters, a tree like them, such as
            ``lambda model: fla_jax.parallel.parameter_shardings(model, mesh)``. No device gets more than its
            shards; a folder of the library's own format is also read in shards. None: everything on the
            default device.
        **options: fields of the model's configuration that no tensor gives: ``dtype``, ``param_dtype``,
            ``scan_layers``, ``remat``, ``reshard_after_forward``, ``norm_first``, ``tie_embeddings``,
            ``logical_axes``, ``fp8``, ``chunk_size``, ``implementation``; see `RWKV7Config`. ``param_dtype``
            casts the parameters; by default each has its dtype in the file (stacked layers the widest of
            theirs). ``dtype``, the compute dtype, is float32 by default. ``norm_first`` is that of
            ``config.json`` by default, True without one, and ``tie_embeddings`` its ``tie_word_embeddings``,
            False without one. For the library's own format the defaults are the fields of the saved model.

    Returns:
        ``(model, params)``: ``model.apply({"params": params}, tokens)``. Params are JAX arrays, not boxed.
        Tensors that are no parameters are left out: see `load_extras`.

    Raises:
        ValueError: the file is broken, truncated, damaged (``.pth`` files have checksums), no regular file,
            or contains code; it is of an unknown or newer variant; a tensor is missing, surplus, has a wrong
            shape or dtype, or shares its values with others, as only embedding and head may; the head differs
            from the embedding of a model with ``tie_embeddings``; config.json has another norm_eps or
            activation; an option does not fit. The message names file and tensor.
        TypeError: an option is unknown, is given by the file, or has another type; ``path`` is no path.
        OSError: the file cannot be opened, or neither found in the cache nor downloaded.
        ImportError: safetensors or huggingface_hub is needed and not installed.

    FLA normalises heads with other epsilons than the official runtimes (RWKV-6 with 1e-5 instead of 64e-5):
    the logits of an RWKV-6 trained there differ here by some percent.

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
            what = "the file gives it, or it does not exist"
            known = f"the options are {', '.join(_OPTIONS)}"
            raise TypeError(f"load_checkpoint takes no option {name!r}: {what}; {known}")
    RWKVConfig(vocab_size=1, hidden_size=1, num_layers=1, head_dim=1, **options)  # checks them before reading
    path = located(path)
    if is_native(path):
        return load_native(path, options, shardings)
    form, param_map, tensors = _open(path)
    fields = form.fields(path)
    try:
        for tensor in tensors.values():
            if "param_dtype" not in options and jax.dtypes.canonicalize_dtype(tensor.dtype) != tensor.dtype:
                hint = "give param_dtype, or set jax_enable_x64"
                raise ValueError(f"{quoted(tensor.name)} is {tensor.dtype}: {hint}")
        sizes: dict[str, Any] = tree.sizes(param_map, tensors)
        embedding = tensors[param_map.ref("emb/embedding").name]
        config = param_map.family.config(**sizes, **{"param_dtype": embedding.dtype, **fields, **options})
        planned = tree.plan(param_map, tensors, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if config.tie_embeddings:
        tree.check_tied(path, param_map, tensors)
    model = cast(RWKVForCausalLM, param_map.family.model(config))
    where = None if shardings is None else shardings(model)
    return model, tree.read(planned, config.param_dtype if "param_dtype" in options else None, where)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: RWKVForCausalLM,
    params: Mapping[str, PyTree],
    *,
    format: Literal["orbax", "pth", "huggingface"] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_size: int | None = None,
    states: Float[Array, "L H K V"] | None = None,
    extras: Mapping[str, np.ndarray | jax.Array] | None = None,
) -> None:
    """Saves a model in the library's own format, as an official ``.pth`` file, or for Hugging Face.

    Every parameter is saved in its dtype, bit by bit.

    * ``"orbax"``, the library's own: a folder with ``fla_jax.json`` (every field of the configuration, the
      tokenizer, the version) and ``params``, an Orbax checkpoint to which each device writes its own shards.
      In a run of several processes all of them call this function.
    * ``"pth"``: one file with the official names, for RWKV-LM and PyPI ``rwkv``. It has a head also where
      ``tie_embeddings`` makes that the embedding: load it with ``tie_embeddings=True``.
    * ``"huggingface"``: ``config.json``, ``generation_config.json`` and safetensors, with names, shapes and
      dtypes of flash-linear-attention's `RWKV7ForCausalLM` and `RWKV6ForCausalLM` (0.6.0, which loads them in
      a test) and of rwkv7-hf (0.9.0, likewise, but for ``tie_embeddings``, which it has not). Not compared
      with files that are published at Hugging Face: that needs a network.

    A warning names parameters whose dtype differs from that of most, except in the library's own format. A
    file appears, or is replaced, when it is complete, also where several processes save to one path; a folder
    of the library's own format is replaced when the new one is complete.

    Args:
        path: a file that ends in ``.pth``, a directory, created if necessary, or a path that another format
            in `FORMATS` writes. A symbolic link to a file is replaced, one to a folder stays.
        model: `RWKV6ForCausalLM` or `RWKV7ForCausalLM`.
        params: its parameters, stacked layers (``scan_layers``) and boxed arrays included.
        format: None for ``"pth"`` or a format in `FORMATS` where the path's ending says so, else ``"orbax"``.
        tokenizer: the path of a file of a tokenizer, or of a folder with some, copied into the folder; in the
            library's own format also a name that `fla_jax.generation.load_tokenizer` takes.
        max_shard_size: bytes of tensors in each safetensors file, 5e9 by default.
        states: tuned initial states, one of a layer, saved as ``time_state``; `fla_jax.training.load_states`
            reads them. FLA's code, which has none, warns of them.
        extras: {name in the file: array} of other tensors that are no parameters: "blocks.0.att.v0" (v1, v2),
            which other readers of RWKV-7 files may require.

    Raises:
        ValueError: ``params`` are not those of ``model``; ``states`` or an extra has a wrong shape, or an
            extra is not known in this format or is of a layer that the model lacks; the model has a
            ``rate_scale`` other than 1, which only the library's own format stores; the directory holds
            another model or something else; an argument does not fit the format.
        TypeError: an argument has another type, or a parameter another dtype than float32, bfloat16,
            float16 or float64.
        OSError: a file cannot be written; the error names it.
        ImportError: the format is the library's own, and orbax-checkpoint is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import tempfile
        >>> from fla_jax.checkpoints import load_checkpoint, save_checkpoint
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/fla", model, params, format="huggingface")
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
    config, form = model.config, _form(path, format)
    param_map = map_for(family_of(config), "official" if form is None else form.scheme)
    tuned = tree.time_states(param_map, states, config)
    if twice := sorted(tuned.keys() & (extras or {}).keys()):
        raise ValueError(f"extras must not have {twice[0]}, which states has too")
    extras = {**(extras or {}), **tuned}
    if max_shard_size is not None and form is not HUGGINGFACE:
        raise ValueError(f"max_shard_size is of the format 'huggingface', and {path} is written in another")
    if form is None:
        _check_extras("a checkpoint", param_map, extras, config)
        return save_native(path, config, params, extras, tokenizer)
    if is_native(path):  # which `load_checkpoint` would read instead
        raise ValueError(f"{path} already holds a checkpoint in the library's own format; save elsewhere")
    for name, want in family_of(config).not_in_checkpoints.items():
        if (got := getattr(config, name)) != want:
            what = f"must be {want:g}, that of official models, got {got}: {form.name} does not store it"
            raise ValueError(f"model.config.{name} {what}, format={_NATIVE!r} does")
    if tokenizer is not None and form is not HUGGINGFACE:
        raise ValueError(f"tokenizer must be None for {form.name}, which has no place for it")
    beside = find_tokenizer(tokenizer, names=False)
    tensors = tree.from_tree(param_map, params, config)
    sizes: dict[str, Any] = tree.sizes(param_map, {name: stored(name, x) for name, x in tensors.items()})
    embedding = tensors[param_map.ref("emb/embedding").name]
    _warn_of_mixed_dtypes(tensors)
    _check_extras(form.name, param_map, extras, config)
    tensors |= {name: np.asarray(x) for name, x in extras.items()}
    config_json = param_map.config_json(dataclasses.replace(config, **sizes), embedding.dtype)
    shards = (
        {}
        if max_shard_size is None
        else {"max_shard_size": check_integer("max_shard_size", max_shard_size, 1)}
    )
    form.write(path, param_map.joined(tensors), config_json, **shards)
    beside.copy(path)


def _form(path: Path, name: str | None) -> Format | None:
    """The format to write; None for the library's own."""
    if name is not None and name not in (_NATIVE, *_FORMATS):
        known = ", ".join(map(repr, (_NATIVE, *_FORMATS)))
        raise ValueError(f"format must be one of {known} or None, got {name!r}")
    known_by_path = next((form for form in reversed(FORMATS) if form.writes(path)), None)
    form = known_by_path if name is None else _FORMATS.get(name)
    if form in (None, HUGGINGFACE) and path.suffix in _FILE_SUFFIXES:
        known = " or ".join(("a folder", *(form.name for form in FORMATS if form is not HUGGINGFACE)))
        raise ValueError(f"path must name {known}, got {path}")
    return form


def _check_extras(
    owner: str, param_map: ParamMap, extras: Mapping[str, np.ndarray | jax.Array], config: RWKVConfig
) -> None:
    """Raises unless the extras are known in the map's scheme, and fit the model."""
    for name, x in extras.items():
        if not isinstance(name, str) or not param_map.is_extra(name):
            what = f"is no tensor that {owner} may have besides the parameters"
            raise ValueError(f"extras: {quoted(name)} {what}")
        param_map.check_extra(name, tree.check_array(f"extras: {name}", x).shape, config)


def _warn_of_mixed_dtypes(tensors: Mapping[str, np.ndarray]) -> None:
    """Warns of parameters whose dtype is not that of most."""
    counts = collections.Counter(x.dtype.name for x in tensors.values())
    usual = counts.most_common(1)[0][0]
    others = [f"{name} {x.dtype}" for name, x in tensors.items() if x.dtype.name != usual]
    if others:
        named = ", ".join(others[:_MAX_NAMES]) + (
            f" and {len(others) - _MAX_NAMES} more" if others[_MAX_NAMES:] else ""
        )
        warnings.warn(
            f"params: {len(others)} of {len(tensors)} tensors have another dtype than most, {usual}: "
            f"{named}; cast them with x.astype if this is not intended",
            stacklevel=3,
        )


def load_extras(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that `load_checkpoint` leaves out, by their names in the file.

    These are layer 0's v0, v1, v2, which nothing computes with but some readers require, and tuned initial
    states, ``time_state`` [H, V, K], for which `fla_jax.training.load_states` is simpler. Arguments and
    errors: `load_checkpoint`.

    Example:
        >>> import tempfile
        >>> from fla_jax.checkpoints import load_extras, save_checkpoint
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM, initial_params
        >>> import jax, jax.numpy as jnp
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = initial_params(model, jax.random.key(0))
        >>> states = jnp.ones((2, 4, 16, 16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder + "/tuned.pth", model, params, states=states)
        ...     sorted(load_extras(folder + "/tuned.pth"))
        ['blocks.0.att.time_state', 'blocks.1.att.time_state']
    """
    path = located(path)
    if is_native(path):
        return load_native_extras(path)
    _, param_map, tensors = _open(path)
    return {name: tensor.read() for name, tensor in tensors.items() if param_map.is_extra(name)}


def _open(path: Path) -> tuple[Format, ParamMap, dict[str, StoredTensor]]:
    """The format and the param map of a checkpoint, and its tensors by the names of the map."""
    path.stat()  # a missing file is reported before its format
    form = next((form for form in reversed(FORMATS) if form.reads(path)), None)
    if form is None:
        raise ValueError(f"{path} is neither {' nor '.join(form.name for form in FORMATS)}")
    tensors = form.read(path)
    try:
        for name, tensor in tensors.items():
            if 0 in tensor.shape:  # its other sizes cannot be trusted
                raise ValueError(f"{quoted(name)} has no values: its shape is {list(tensor.shape)}")
            if tensor.dtype.name not in DTYPES:
                known = ", ".join(DTYPES)
                raise ValueError(f"{quoted(name)} must have a dtype of {known}, got {tensor.dtype}")
        param_map = identify(tensors)
        return form, param_map, param_map.split(tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
