"""Directories of Hugging Face's kind: safetensors and a config.json that flash-linear-attention reads."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .config import RWKV6Config, RWKVConfig

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_LAYER_NORM_EPS = 1e-5
_ACTIVATION = "sqrelu"


class Stored(NamedTuple):
    """A tensor of a file, not read yet; ``name`` as the file has it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("directories in the Hugging Face format need the package safetensors: pip install safetensors") from None
    return safetensors


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with weights, and {tensor: file} where an index spreads them over several."""
    if not path.is_dir():
        return [path], None
    if (path / _INDEX).exists():
        where = _load_json(path / _INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) and Path(name).name == name for name in where.values()):
            raise ValueError(f"{path / _INDEX} must have a weight_map of tensors to files beside it")
        return [path / name for name in sorted(set(where.values()))], where
    if (path / _WEIGHTS).exists():
        return [path / _WEIGHTS], None
    raise FileNotFoundError(f"{path} holds neither {_WEIGHTS} nor {_INDEX}")


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a directory, or of one ``.safetensors`` file, to be read one by one.

    Raises:
        ValueError: a file is truncated or broken, or its tensors are not those that the index names, or config.json says that the model is another one.
        OSError: a file cannot be opened. ImportError: there is no safetensors.
    """
    safetensors = _safetensors()
    files, where = _files(path)
    tensors: dict[str, Stored] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist" + (f", though {path / _INDEX} names it" if where else ""))
        try:
            handle = safetensors.safe_open(file, framework="np")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is truncated, or no safetensors file: {error}") from None
        for name in handle.keys():  # noqa: SIM118, this is no dict
            entry = handle.get_slice(name)
            dtype = _DTYPES.get(entry.get_dtype())
            if dtype is None:
                raise ValueError(f"{file}: {name} has the element type {entry.get_dtype()}; known: {', '.join(map(str, _DTYPES.values()))}")
            if name in tensors or (where is not None and where.get(name) != file.name):
                raise ValueError(f"{file}: {name} is in more than one file, or not in that which {_INDEX} names")
            tensors[name] = Stored(name, tuple(entry.get_shape()), dtype, functools.partial(handle.get_tensor, name))
    if where is not None and (lost := sorted(where.keys() - tensors.keys())):
        raise ValueError(f"{path / where[lost[0]]} lacks {lost[0]}, which {_INDEX} puts there")
    if path.is_dir() and (path / _CONFIG).exists():
        config = _load_json(path / _CONFIG)
        for field, want in (("norm_eps", _LAYER_NORM_EPS), ("hidden_act", _ACTIVATION)):
            if config.get(field, want) != want:
                raise ValueError(f"{path / _CONFIG}: {field} must be {want!r}, got {config[field]!r}: the tensors would fit, the results would not")
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Writes ``model.safetensors`` and ``config.json`` into a directory; each appears, or is replaced, when it is complete.

    Raises:
        ValueError: the directory holds an index, which would go on naming other files. OSError, ImportError: as in `read_safetensors`.
    """
    safetensors = _safetensors()
    path.mkdir(parents=True, exist_ok=True)
    if (path / _INDEX).exists():
        raise ValueError(f"{path} already holds a model in several files ({_INDEX}); save into another directory")
    temporary = path / f"{_WEIGHTS}.{os.getpid()}.tmp"
    try:
        # safetensors copies memory as it lies, whatever the strides say; transformers wants to be told the format
        safetensors.numpy.save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, temporary, {"format": "pt"})
        temporary.replace(path / _WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    temporary = path / f"{_CONFIG}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    temporary.replace(path / _CONFIG)


def fla_config(config: RWKVConfig, dtype: np.dtype) -> dict[str, Any]:
    """The fields of ``config.json`` that make FLA build this model; sizes that ``config`` leaves open must be filled in.

    Source: flash-linear-attention ``fla/models/rwkv6/configuration_rwkv6.py`` and ``rwkv7/configuration_rwkv7.py``.
    """
    version = 6 if isinstance(config, RWKV6Config) else 7
    C, L = config.hidden_size, config.num_layers
    assert config.intermediate_size is not None
    fields: dict[str, Any] = {
        "architectures": [f"RWKV{version}ForCausalLM"],
        "model_type": f"rwkv{version}",
        "attn_mode": "chunk",
        "vocab_size": config.vocab_size,
        "hidden_size": C,
        "num_hidden_layers": L,
        "num_heads": C // config.head_dim,
        "hidden_ratio": config.intermediate_size / C,
        "intermediate_size": config.intermediate_size,
        "hidden_act": _ACTIVATION,
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": _LAYER_NORM_EPS,
        "tie_word_embeddings": False,
        "bos_token_id": 0,  # RWKV's documents are separated by token 0
        "eos_token_id": 0,
        "pad_token_id": None,  # with one, PyTorch keeps its row of the embedding from learning
        "torch_dtype": str(dtype),
    }
    if isinstance(config, RWKV6Config):
        # FLA calls the rank of the decay that of a gate
        ranks = {"proj_low_rank_dim": config.proj_low_rank_dim, "gate_low_rank_dim": config.decay_low_rank_dim}
        return {**fields, "expand_k": 1.0, "expand_v": 1.0, **ranks}
    ranks = {f"{name}_low_rank_dim": getattr(config, f"{name}_low_rank_dim") for name in ("decay", "a", "v", "gate")}
    return {**fields, "head_dim": config.head_dim, "value_dim": [C] * L, **ranks}
