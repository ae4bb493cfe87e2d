"""Hugging Face directories: safetensors, and a config.json that flash-linear-attention reads."""

from __future__ import annotations

import functools
import json
import struct
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..files import check_regular, replacing
from ..tensors import StoredTensor, as_bytes, printable, quoted
from .format import Format, Json

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_JSON = 10**8  # bytes, also the limit of safetensors for its headers
_WEIGHTS, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_MUST_BE = {"norm_eps": 1e-5, "hidden_act": "sqrelu"}  # not visible in any tensor


def _safetensors() -> types.ModuleType:
    try:
        import safetensors
    except ImportError:
        what = "reading the Hugging Face format needs the package safetensors"
        raise ImportError(f"{what}: pip install safetensors") from None
    return safetensors


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A JSON object; Python takes the last of several values of one name, other readers another one."""
    values: dict[str, Json] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it holds {quoted(name)} twice")
        values[name] = value
    return values


def _load_json(path: Path) -> dict[str, Json]:
    check_regular(path)
    if path.stat().st_size > _MAX_JSON:
        raise ValueError(f"{path} has more than {_MAX_JSON} bytes, too many for a description of a model")
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def _is_sibling(name: object) -> bool:
    """Whether a file name of an index is printable and names a file in the same directory."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and name.isprintable()


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with weights, and the index {tensor: file} if there are several."""
    if not path.is_dir():
        return [path], None
    if (path / _INDEX).exists():
        where = _load_json(path / _INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(map(_is_sibling, where.values())):
            raise ValueError(
                f"{path / _INDEX} must have a weight_map of tensors to files in the same directory"
            )
        return [path / name for name in sorted(set(where.values()))], where
    if (path / _WEIGHTS).exists():
        return [path / _WEIGHTS], None
    raise FileNotFoundError(f"{path} holds neither {_WEIGHTS} nor {_INDEX}")


def _check_names(file: Path) -> None:
    """Raises ValueError if a safetensors header has a name twice, of which the library takes one."""
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


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory, or of one ``.safetensors`` file, to be read one by one.

    Raises:
        ValueError: a file is no regular file, or is truncated or broken, or its tensors are not those that
            the index names, or config.json describes another model.
        OSError: a file cannot be opened. ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    files, where = _files(path)
    tensors: dict[str, StoredTensor] = {}
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
            tensors[name] = StoredTensor(name, tuple(entry.get_shape()), dtype, read)
    if where is not None and (lost := sorted(where.keys() - tensors.keys())):
        raise ValueError(f"{path / where[lost[0]]} lacks {quoted(lost[0])}, which {_INDEX} puts there")
    if path.is_dir() and (path / _CONFIG).exists():
        config = _load_json(path / _CONFIG)
        for field, want in _MUST_BE.items():
            if config.get(field, want) != want:
                what = f"{field} must be {want!r}, got {config[field]!r:.200}"
                raise ValueError(f"{path / _CONFIG}: {what}: the tensors would fit, the results would not")
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], config_json: Mapping[str, Json]) -> None:
    """Writes ``model.safetensors`` and ``config.json`` into a directory, each completely or not at all.

    One tensor at a time is copied, if its order in memory differs; the library's writer needs copies of all.

    Raises:
        ValueError: the directory has an index, which names other files.
        OSError: a file cannot be written; the error names it.
    """
    path.mkdir(parents=True, exist_ok=True)
    if (path / _INDEX).exists():
        raise ValueError(f"{path} already holds a model in several files ({_INDEX}); save elsewhere")
    # large elements first: every tensor then begins at a multiple of its elements' size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Json] = {"__metadata__": {"format": "pt"}}  # transformers requires it
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
        file.write((json.dumps(config_json, indent=2) + "\n").encode())


def _reads(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".safetensors"


def _writes(path: Path) -> bool:
    return path.suffix not in (".pth", ".pt", ".bin", ".safetensors", ".json")


HUGGINGFACE = Format("an FLA directory", _reads, _writes, read_safetensors, write_safetensors, "fla")
