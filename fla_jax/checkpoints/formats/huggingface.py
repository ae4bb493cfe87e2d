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

from ..files import Json, check_regular, load_json, replacing, unique_names, write_json
from ..tensors import StoredTensor, as_bytes, printable, quoted
from .format import Format

_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
# values of fields that no tensor shows, FLA's default first
_KNOWN = {
    "norm_eps": (1e-5,),
    "hidden_act": ("sqrelu",),
    "norm_first": (True, False),
    "tie_word_embeddings": (False, True),
}


def _safetensors() -> types.ModuleType:
    try:
        import safetensors
    except ImportError:
        what = "reading the Hugging Face format needs the package safetensors"
        raise ImportError(f"{what}: pip install safetensors") from None
    return safetensors


def _is_sibling(name: object) -> bool:
    """Whether a file name of an index is printable and names a file in the same directory."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", "..") and name.isprintable()


def _files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with weights, and the index {tensor: file} if there are several."""
    if not path.is_dir():
        return [path], None
    if (path / _INDEX).exists():
        where = load_json(path / _INDEX).get("weight_map")
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
        json.loads(header, object_pairs_hook=unique_names)
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
            the index names.
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
    return tensors


def _fields(path: Path) -> dict[str, Json]:
    """The configuration fields of a ``config.json`` that no tensor shows.

    Raises:
        ValueError: it describes another model, or is no JSON object.
    """
    if not (path.is_dir() and (path / _CONFIG).exists()):
        return {}
    config = load_json(path / _CONFIG)
    for field, known in _KNOWN.items():
        if config.get(field, known[0]) not in known:
            what = f"{field} must be {' or '.join(map(repr, known))}, got {config[field]!r:.200}"
            raise ValueError(f"{path / _CONFIG}: {what}: the tensors would fit, the results would not")
    tied = config.get("tie_word_embeddings", False)
    return {"norm_first": config.get("norm_first", True), "tie_embeddings": tied}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    config_json: Mapping[str, Json],
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Writes tensors, ``config.json`` and ``generation_config.json`` into a directory.

    The tensors are in ``model.safetensors``, or in ``model-00001-of-0000N.safetensors`` and so on of at most
    ``max_shard_size`` bytes, with an index, if they are larger. Every file is complete when it appears.

    Raises:
        ValueError: the directory has a model in files of other names.
        OSError: a file cannot be written; the error names it.
    """
    path.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_size)
    number = len(shards)
    names = [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
    names = names if number > 1 else [_WEIGHTS]
    present = {file.name for pattern in ("*.safetensors", _INDEX) for file in path.glob(pattern)}
    if others := sorted(present - {*names, *([_INDEX] if number > 1 else [])}):
        raise ValueError(f"{path} already holds a model in other files ({others[0]}); save elsewhere")
    for file, shard in zip(names, shards):
        _write_shard(path / file, {name: tensors[name] for name in shard})
    if number > 1:
        where = {name: file for file, shard in zip(names, shards) for name in shard}
        total = {
            "total_parameters": sum(x.size for x in tensors.values()),
            "total_size": sum(x.nbytes for x in tensors.values()),
        }
        write_json(path / _INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
    write_json(path / _CONFIG, config_json)
    if config_json:
        tokens = {name: config_json[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(path / _GENERATION, {"_from_model_config": True, **tokens})


def _shards(tensors: Mapping[str, np.ndarray], max_shard_size: int) -> list[list[str]]:
    """The names of the tensors of each file, in order; a tensor that is larger than a file has its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if shards[-1] and size + x.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += x.nbytes
    return shards


def _write_shard(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file. One tensor at a time is copied, if its order in memory differs; the library's writer needs
    copies of all.
    """
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
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(as_bytes(tensors[name]))


def _reads(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".safetensors"


def _writes(path: Path) -> bool:
    return False  # a folder alone names the library's own format


HUGGINGFACE = Format(
    "a Hugging Face directory", _reads, _writes, read_safetensors, write_safetensors, "fla", _fields
)
