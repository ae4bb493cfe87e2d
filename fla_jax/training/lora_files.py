"""Files of LoRA's pairs: Hugging Face PEFT's directories and RWKV-PEFT's ``.pth`` files.

PEFT has ``base_model.model.`` before the names of the model that it wraps, which here are those of
flash-linear-attention, and [out, in] where kernels are [in, out].
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import PyTree

from ..checkpoints.files import as_path, load_json, replacing, write_json
from ..checkpoints.formats.huggingface import read_safetensors
from ..checkpoints.formats.pth import read_pth, write_pth
from ..checkpoints.param_maps import map_for
from ..checkpoints.tensors import quoted
from ..core.arguments import check_number, check_share
from ..layers.lora import LoRA, check_lora
from ..models import family_of
from .lora import lora_pairs, projections

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _MAGNITUDE = "base_model.model.", "lora_magnitude_vector"
_TENSOR = re.compile(rf"(.+)\.(lora_A|lora_B|{_MAGNITUDE})(?:\.weight)?")
# PiSSA, OLoRA, CorDA and LoftQ change the base weights, beside which their pairs belong
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_FIXED = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "use_rslora": False,
}


class _Place(NamedTuple):
    """A projection of a model: its path, its layer where layers are stacked, and the kernel's shape."""

    path: str
    layer: int | None
    shape: tuple[int, ...]


def save_lora(path: str | os.PathLike[str], model: nn.Module, lora: PyTree) -> None:
    """Writes pairs in the form of Hugging Face PEFT or of RWKV-PEFT.

    Args:
        path: of a directory, for PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, whose names
            are those of flash-linear-attention's models
            (``base_model.model.model.layers.0.attn.k_proj.lora_A.weight``). Or of a ``.pth`` file, for
            RWKV-PEFT (``blocks.0.att.key.lora_A``), which stores no alpha.
        model: that of the pairs.
        lora: from `init_lora`, trained.

    Raises:
        ValueError: the pairs differ in rank, scale, dropout or kind (PEFT has one of each), one is for no
            projection of the model, or a ``.pth`` file should store DoRA's magnitudes.

    Example:
        >>> import jax, tempfile, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import init_lora, load_lora, save_lora
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.arange(8)[None])["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_lora(folder + "/adapter", model, init_lora(params, jax.random.key(1), rank=4))
        ...     load_lora(folder + "/adapter", model)["blocks_1"]["ffn"]["key"].a.shape
        (64, 4)
    """
    path, pairs = as_path(path), lora_pairs(lora)
    is_pth = path.suffix == ".pth"
    kinds = {
        (pair.a.shape[-1], pair.scale, pair.dropout, pair.magnitude is not None) for pair in pairs.values()
    }
    if len(kinds) != 1:
        raise ValueError(f"lora must have pairs of one rank, scale, dropout and kind, got {len(kinds)}")
    ((rank, scale, dropout, is_dora),) = kinds
    if is_dora and is_pth:
        raise ValueError(f"path must be a directory for DoRA, which .pth files of RWKV-PEFT lack, got {path}")
    places = _places(model, "official" if is_pth else "fla")
    check_lora(lora, {place.path for place in places.values()})
    tensors = {}
    for name, place in places.items():
        if place.path not in pairs:
            continue
        pair, at = pairs[place.path], ... if place.layer is None else place.layer
        of_pair = {"lora_A": pair.a[at].T, "lora_B": pair.b[at].T}
        if pair.magnitude is not None:
            of_pair[_MAGNITUDE] = pair.magnitude[at]
        for kind, x in of_pair.items():
            end = "" if is_pth or x.ndim == 1 else ".weight"
            full = f"{'' if is_pth else _PREFIX}{name}.{kind}{end}"
            tensors[full] = np.ascontiguousarray(jax.device_get(x), np.float32)
    if is_pth:
        write_pth(path, tensors)
        return
    path.mkdir(parents=True, exist_ok=True)
    _write_safetensors(path / _WEIGHTS, tensors)
    targets = [name for name, place in places.items() if place.path in pairs]
    options = {"r": rank, "lora_alpha": scale * rank, "lora_dropout": dropout, "use_dora": is_dora}
    write_json(path / _CONFIG, {**_FIXED, **options, "target_modules": targets})


def load_lora(
    path: str | os.PathLike[str], model: nn.Module, *, alpha: float | None = None
) -> dict[str, PyTree]:
    """Reads pairs that `save_lora`, PEFT or RWKV-PEFT wrote.

    Args:
        path: of a directory, or of a ``.pth`` file.
        model: for which the pairs are.
        alpha: for ``.pth`` files, which do not store it; None for that of a directory's
            ``adapter_config.json``.

    Returns:
        A tree as from `init_lora`, in float32, for the layout of the model's layers.

    Raises:
        ValueError: the files have other tensors than pairs for the model's projections, lack one or all, or
            need what is not supported (ranks that differ, trained biases, modules that are saved whole,
            changed base weights as of PiSSA); ``alpha`` is missing. The message names the tensor or the
            option.
        ImportError: safetensors is not installed.

    Example:
        >>> import jax, tempfile, jax.numpy as jnp
        >>> from fla_jax.models import RWKV7Config, RWKV7ForCausalLM
        >>> from fla_jax.training import init_lora, load_lora, save_lora
        >>> model = RWKV7ForCausalLM(RWKV7Config(vocab_size=100, hidden_size=64, num_layers=2, head_dim=16))
        >>> params = model.init(jax.random.key(0), jnp.arange(8)[None])["params"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_lora(folder + "/lora.pth", model, init_lora(params, jax.random.key(1), rank=4))
        ...     load_lora(folder + "/lora.pth", model, alpha=8)["blocks_0"]["att"]["key"].scale
        2.0
    """
    path = as_path(path)
    if path.is_dir():
        tensors = {name: tensor.read() for name, tensor in read_safetensors(path / _WEIGHTS).items()}
        stored_alpha, rslora, dropout, is_dora = _options(path / _CONFIG)
        alpha = stored_alpha if alpha is None else alpha
    else:
        tensors, rslora, dropout = read_pth(path), False, 0.0
        is_dora = any(_MAGNITUDE in name for name in tensors)
        if alpha is None:
            raise ValueError(f"alpha must be given for {path}: a .pth file does not store it")
    if not tensors:
        raise ValueError(f"{path} has no tensors")
    places = _places(model, "official") | _places(model, "fla")
    found: dict[_Place, dict[str, np.ndarray]] = {}
    for name, x in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None or match[1] not in places:
            raise ValueError(f"{path}: {quoted(name)} is no LoRA of a projection of the model")
        found.setdefault(places[match[1]], {})[match[2]] = x.astype(np.float32)
    made: dict[str, dict[int | None, LoRA]] = {}
    for place, of_pair in found.items():
        pair = _pair(path, place, of_pair, is_dora)
        rank = pair.a.shape[1]
        scale = check_number("alpha", alpha, 0) / (rank**0.5 if rslora else rank)
        made.setdefault(place.path, {})[place.layer] = pair.replace(scale=scale, dropout=dropout)
    return unflatten_dict({place: _stacked(path, place, model, of) for place, of in made.items()}, sep="/")


def _pair(path: Path, place: _Place, tensors: Mapping[str, np.ndarray], is_dora: bool) -> LoRA:
    """The pair of a projection; raises ValueError unless the tensors are one."""
    for name, is_needed in (("lora_A", True), ("lora_B", True), (_MAGNITUDE, is_dora)):
        if is_needed and name not in tensors:
            raise ValueError(f"{path}: {name} of {place.path} is missing")
        if not is_needed and name in tensors:
            raise ValueError(f"{path}: use_dora must be True for {name} of {place.path}, got False")
    a, b, magnitude = tensors["lora_A"].T, tensors["lora_B"].T, tensors.get(_MAGNITUDE)
    inner, out = place.shape
    rank = a.shape[-1]
    if a.shape != (inner, rank) or b.shape != (rank, out):
        raise ValueError(
            f"{path}: lora_A and lora_B of {place.path} must have shapes {[rank, inner]} and {[out, rank]}, "
            f"got {list(a.shape[::-1])} and {list(b.shape[::-1])}"
        )
    if magnitude is not None and magnitude.shape != (out,):
        must = f"{_MAGNITUDE} of {place.path} must have shape {[out]}"
        raise ValueError(f"{path}: {must}, got {list(magnitude.shape)}")
    return LoRA(jnp.asarray(a), jnp.asarray(b), None if magnitude is None else jnp.asarray(magnitude))


def _stacked(path: Path, name: str, model: nn.Module, layers: Mapping[int | None, LoRA]) -> LoRA:
    """The pair of a projection, stacked if the model's layers are."""
    if None in layers:
        return layers[None]
    L = model.config.num_layers
    if len(layers) != L or len({x.a.shape for x in layers.values()}) != 1:
        raise ValueError(
            f"{path}: {name} must have a pair of one rank in each of the {L} layers, which the model stacks"
        )
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[i] for i in range(L)))


def _options(path: Path) -> tuple[float, bool, float, bool]:
    """Alpha, whether the scale is alpha / sqrt(rank), dropout and whether it is DoRA of a configuration."""
    config = load_json(path)
    for name, wanted in {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False}.items():
        if config.get(name, wanted) != wanted:
            raise ValueError(f"{path}: {name} must be {wanted!r}, got {quoted(config[name])}")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise ValueError(f"{path}: {name} must be empty, got {quoted(config[name])}")
    if (init := config.get("init_lora_weights", True)) not in _INITS:
        known = ", ".join(map(repr, _INITS))
        raise ValueError(f"{path}: init_lora_weights must be one of {known}, got {quoted(init)}")
    alpha = check_number(f"{path}: lora_alpha", config.get("lora_alpha", 8), 0)  # PEFT's default values
    dropout = check_share(f"{path}: lora_dropout", config.get("lora_dropout", 0.0))
    return alpha, bool(config.get("use_rslora")), dropout, bool(config.get("use_dora"))


def _places(model: nn.Module, scheme: str) -> dict[str, _Place]:
    """The model's projections by the names that they have in a scheme of files."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    param_map, places = map_for(family_of(model.config), scheme), {}
    for path, kernel in projections(shapes).items():
        block, _, rest = path.partition("/")
        is_stacked = block == "blocks"
        for i in range(kernel.shape[0]) if is_stacked else [int(block.removeprefix("blocks_"))]:
            name = param_map.ref(f"blocks/{rest}/kernel", i).name.removesuffix(".weight")
            places[name] = _Place(path, i if is_stacked else None, kernel.shape[-2:])
    return places


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    try:
        from safetensors.numpy import save
    except ImportError:
        raise ImportError("save_lora needs the package safetensors: pip install safetensors") from None
    with replacing(path) as file:
        file.write(save(tensors, metadata={"format": "pt"}))
