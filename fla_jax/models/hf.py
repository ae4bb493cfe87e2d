"""Directories of Hugging Face's kind: safetensors and a config.json that flash-linear-attention reads."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .config import RWKV6Config, RWKVConfig
from .files import Stored, as_bytes, check_regular, printable, quoted, replacing

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_JSON = 10**8  # bytes, which safetensors allows its headers too
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_LAYER_NORM_EPS = 1e-5
_ACTIVATION = "sqrelu"


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        what = "reading the Hugging Face format needs the package safetensors"
        raise ImportError(f"{what}: pip install safetensors") from None
    return safetensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Python would take the last of several values of one name, other readers another one."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it holds {quoted(name)} twice")
        values[name] = value
    return values


def _load_json(path: Path) -> dict[str, Any]:
    check_regular(path)
    if path.stat().st_size > _LONGEST_JSON:
        raise ValueError(f"{path} has more than {_LONGEST_JSON} bytes: it describes no model")
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _is_beside(name: Any) -> bool:
    """Whether an index's name of a file is one of a file beside it, and fit to be printed."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and name.isprintable()


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with weights, and {tensor: file} where an index spreads them over several."""
    if not path.is_dir():
        return [path], None
    if (path / _INDEX).exists():
        where = _load_json(path / _INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(map(_is_beside, where.values())):
            raise ValueError(f"{path / _INDEX} must have a weight_map of tensors to files beside it")
        return [path / name for name in sorted(set(where.values()))], where
    if (path / _WEIGHTS).exists():
        return [path / _WEIGHTS], None
    raise FileNotFoundError(f"{path} holds neither {_WEIGHTS} nor {_INDEX}")


def _check_names(file: Path) -> None:
    """Raises if the header of a sound safetensors file holds a name twice, of which the library takes one."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = stream.read(size).decode("utf-8")
    try:
        json.loads(header, object_pairs_hook=_unique)
    except ValueError as error:
        raise ValueError(f"{file} has a broken header: {printable(error)}") from None


def _read(file: Path, handle: Any, name: str) -> np.ndarray:
    try:
        return handle.get_tensor(name)
    except (ValueError, _safetensors().SafetensorError) as error:
        raise ValueError(f"{file}: {quoted(name)} cannot be read: {printable(error)}") from None


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a directory, or of one ``.safetensors`` file, to be read one by one.

    Raises:
        ValueError: a file is no regular file, or is truncated or broken, or its tensors are not those that
            the index names, or config.json says that the model is another one.
        OSError: a file cannot be opened. ImportError: there is no safetensors.
    """
    safetensors = _safetensors()
    files, where = _files(path)
    tensors: dict[str, Stored] = {}
    for file in files:
        if where is not None and not file.exists():
            raise FileNotFoundError(f"{path} lacks {quoted(file.name)}, which {_INDEX} names")
        check_regular(file)
        try:
            handle = safetensors.safe_open(file, framework="np")
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is truncated, or no safetensors file: {printable(error)}") from None
        _check_names(file)
        for name in handle.keys():  # noqa: SIM118, this is no dict
            entry = handle.get_slice(name)
            dtype = _DTYPES.get(entry.get_dtype())
            if dtype is None:
                known = ", ".join(map(str, _DTYPES.values()))
                kind = entry.get_dtype()
                raise ValueError(f"{file}: {quoted(name)} has the element type {kind}; known: {known}")
            if name in tensors or (where is not None and where.get(name) != file.name):
                what = f"is in more than one file, or not in that which {_INDEX} names"
                raise ValueError(f"{file}: {quoted(name)} {what}")
            read = functools.partial(_read, file, handle, name)
            tensors[name] = Stored(name, tuple(entry.get_shape()), dtype, read)
    if where is not None and (lost := sorted(where.keys() - tensors.keys())):
        raise ValueError(f"{path / where[lost[0]]} lacks {quoted(lost[0])}, which {_INDEX} puts there")
    if path.is_dir() and (path / _CONFIG).exists():
        config = _load_json(path / _CONFIG)
        for field, want in (("norm_eps", _LAYER_NORM_EPS), ("hidden_act", _ACTIVATION)):
            if config.get(field, want) != want:
                what = f"{field} must be {want!r}, got {config[field]!r:.200}"
                raise ValueError(f"{path / _CONFIG}: {what}: the tensors would fit, the results would not")
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Writes ``model.safetensors`` and ``config.json`` into a directory, each whole or not at all.

    Only one tensor at a time is copied, where its values do not lie as in the file; the library wants all.

    Raises:
        ValueError: the directory holds an index, which would go on naming other files.
        OSError: a file cannot be written; the error names it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if (path / _INDEX).exists():
        raise ValueError(f"{path} already holds a model in several files ({_INDEX}); save elsewhere")
    # tensors of large elements first, so that every one lies at a multiple of its elements' size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told
    end = 0
    for name in names:
        x = tensors[name]
        offsets = [end, end := end + x.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path / _WEIGHTS) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(as_bytes(tensors[name]))
    with replacing(path / _CONFIG) as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


def fla_config(config: RWKVConfig, dtype: np.dtype) -> dict[str, Any]:
    """The fields of ``config.json`` that make FLA build this model; no size of ``config`` may be None.

    Source: flash-linear-attention ``fla/models/rwkv{6,7}/configuration_rwkv{6,7}.py``.
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
        ranks = {"proj": config.proj_low_rank_dim, "gate": config.decay_low_rank_dim}
        fields |= {"expand_k": 1.0, "expand_v": 1.0}
    else:
        ranks = {name: getattr(config, f"{name}_low_rank_dim") for name in ("decay", "a", "v", "gate")}
        fields |= {"head_dim": config.head_dim, "value_dim": [C] * L}
    return fields | {f"{name}_low_rank_dim": rank for name, rank in ranks.items()}
