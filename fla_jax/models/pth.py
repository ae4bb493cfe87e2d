"""PyTorch's ``.pth`` files without PyTorch, and without running anything that a file asks for.

A ``.pth`` is a zip archive, its members not compressed: ``<folder>/data.pkl``, a pickle of ``{name: tensor}``, and ``<folder>/data/<key>``, the bytes of each
storage. Python's unpickler calls whatever a pickle names, so it is not used: `pickletools` splits the pickle into its opcodes, and the few that a dict of
tensors needs act on plain data here. Names of functions stay names; nothing is imported and nothing is called.

Source of the format: PyTorch ``torch/serialization.py``, ``torch/_utils.py`` (``_rebuild_tensor_v2``), Python ``pickletools``.
"""

from __future__ import annotations

import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch HalfStorage": np.dtype(np.float16),
    "torch DoubleStorage": np.dtype(np.float64),
}
_STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # a pickle of the magic number that files before PyTorch 1.6 begin with
_LARGE = 2**30  # storages above have their sizes in 64 bits, as zip64 has it
_ALIGNMENT = 64  # of every storage in the file, as PyTorch writes it: mapped memory can then be read in place


class _Global(NamedTuple):
    """A name that the pickle mentions, "module attribute"; never looked up."""

    name: str


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NO_EFFECT = ("PROTO", "FRAME", "STOP")


def _unpickle(data: bytes) -> Any:
    """The pickled value, made of dict, tuple, str, int, float, bool, None, `_Global`, `_Storage` and `_Tensor` only.

    Raises:
        ValueError: the pickle is broken, or asks for anything else. Messages never print a value: a few bytes can make one with an endless representation.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> tuple[Any, ...]:
        start = marks.pop()
        items = tuple(stack[start:])
        if len(stack) < start:
            raise ValueError("its pickle is broken (a mark above the stack)")
        del stack[start:]
        return items

    for opcode, arg, _ in pickletools.genops(data):
        op = opcode.name
        if op in _NO_EFFECT:
            pass
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _LITERALS:
            stack.append(arg)
        elif op == "EMPTY_DICT":
            stack.append({})
        elif op == "MARK":
            marks.append(len(stack))
        elif op == "TUPLE":
            stack.append(since_mark())
        elif op in _TUPLES:
            stack.append(tuple(stack.pop() for _ in range(_TUPLES[op]))[::-1])
        elif op in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if op == "MEMOIZE" else arg] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif op == "GLOBAL":
            stack.append(_Global(str(arg)))
        elif op == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Global(f"{_text(module)} {_text(attribute)}"))
        elif op == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif op == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(_reduce(function, args))
        elif op in ("SETITEM", "SETITEMS"):
            items = (stack.pop(), stack.pop())[::-1] if op == "SETITEM" else since_mark()
            if type(stack[-1]) is not dict or len(items) % 2:
                raise ValueError("its pickle is broken (items for something that is no dict)")
            stack[-1].update(zip(map(_text, items[::2]), items[1::2]))
        elif op == "BUILD":  # the attributes of a module's state_dict, format versions of its parts: no weights
            stack.pop()
            if type(stack[-1]) is not dict:
                raise ValueError("its pickle sets attributes of something that is no dict: refused")
        else:
            raise ValueError(f"its pickle uses the opcode {op}, which no dict of tensors needs: refused")
    if len(stack) != 1:
        raise ValueError("its pickle is broken (it leaves more or less than one value)")
    return stack[0]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"its pickle is broken (a name of type {type(value).__name__})")
    return value


def _storage(pid: Any) -> _Storage:
    """PyTorch's persistent id ``("storage", type, key, location, number of elements)``; the device that the tensor lay on plays no role."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not _Global or type(pid[4]) is not int:
        raise ValueError("its pickle is broken (a persistent id that is no storage)")
    return _Storage(pid[1].name, _text(pid[2]), pid[4])


def _reduce(function: Any, args: Any) -> Any:
    """What calling ``function`` would give, for the three functions that checkpoints name."""
    name = function.name if type(function) is _Global else "something that is no function"
    if type(args) is tuple:
        if name == "collections OrderedDict" and not args:
            return {}
        if name == "torch._utils _rebuild_parameter" and args and type(args[0]) is _Tensor:
            return args[0]
        if name == "torch._utils _rebuild_tensor_v2" and len(args) in (6, 7) and type(args[0]) is _Storage:
            storage, offset, shape, stride = args[:4]
            sizes = (offset, *shape, *stride) if type(shape) is type(stride) is tuple else (None,)
            if all(type(size) is int and size >= 0 for size in sizes) and len(shape) == len(stride):
                return _Tensor(storage, offset, shape, stride)
            raise ValueError("its pickle is broken (a tensor whose shape or strides are no sizes)")
    raise ValueError(f"its pickle calls {name.replace(' ', '.')!r:.200}, which no dict of tensors needs: refused")


def _member(archive: zipfile.ZipFile, mapped: np.ndarray, name: str) -> np.ndarray:
    """The bytes of a member, as a view of the mapped file."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError("is compressed or encrypted, which PyTorch's files are not")
    # name and extra field of the local header may be longer than those of the central directory, which zipfile shows
    header = mapped[info.header_offset : info.header_offset + 30].tobytes()
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError("has no header where the archive's directory puts it: the file is broken or truncated")
    start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    data = mapped[start : start + info.file_size]
    if data.size != info.file_size:
        raise ValueError(f"has {data.size} of its {info.file_size} bytes: the file is truncated")
    return data


def _array(archive: zipfile.ZipFile, mapped: np.ndarray, folder: str, value: Any) -> np.ndarray:
    """A tensor's values, as a view of the mapped file."""
    if type(value) is not _Tensor:
        raise ValueError(f"is no tensor (a {type(value).__name__})")
    storage, offset, shape, stride = value
    if storage.kind not in _STORAGES:
        raise ValueError(f"has the element type {storage.kind.replace(' ', '.')!r:.200}; known: {', '.join(map(str, _STORAGES.values()))}")
    dtype = _STORAGES[storage.kind]
    try:
        data = _member(archive, mapped, f"{folder}/data/{storage.key}")
    except KeyError:
        raise ValueError(f"has no values: the file lacks {folder}/data/{storage.key:.200}") from None
    except ValueError as error:
        raise ValueError(f"cannot be read: its storage {error}") from None
    if data.size != storage.size * dtype.itemsize:
        raise ValueError(f"has a storage of {data.size} bytes instead of {storage.size} x {dtype.itemsize}")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride)) if count else 0
    # a few bytes can claim any number of elements with a stride of 0
    if count > storage.size or (count and last >= storage.size):
        raise ValueError(f"reaches beyond its storage: shape {list(shape)}, strides {list(stride)}, offset {offset}, {storage.size} elements")
    elements = data.view(dtype)[offset:] if count else np.empty(0, dtype)
    return np.lib.stride_tricks.as_strided(elements, shape, [step * dtype.itemsize for step in stride], writeable=False)


def read_pth(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a flat ``.pth`` checkpoint (``torch.save`` of ``{name: tensor}``), safely and without PyTorch.

    No code from the file runs. The values stay in the file until they are used (it is mapped into memory, read-only): do not change it meanwhile; replacing it,
    as `write_pth` does, is fine.

    Args:
        path: of a file that PyTorch 1.6 or newer wrote (a zip archive).

    Returns:
        {name: read-only array}, in the file's order, dtypes and shapes as stored: float32, float16, float64, or ``ml_dtypes.bfloat16``.

    Raises:
        ValueError: the file is truncated or broken, of PyTorch's older format, compressed, asks for anything but tensors, or holds something else. The message
            names the file and, where there is one, the tensor.
        OSError: the file cannot be opened.

    Example:
        >>> import numpy as np, tempfile
        >>> from fla_jax.models import read_pth, write_pth
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_pth(folder + "/states.pth", {"blocks.0.att.time_state": np.zeros((2, 64, 64), np.float32)})
        ...     read_pth(folder + "/states.pth")["blocks.0.att.time_state"].shape
        (2, 64, 64)
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(len(_LEGACY))
        if start.startswith(b"PK\x03\x04"):
            try:
                archive = zipfile.ZipFile(file)
            except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
                raise ValueError(f"{path} is a truncated or broken zip archive: {error}") from None
        elif start == _LEGACY:
            raise ValueError(f"{path} has PyTorch's old format, from before 1.6; torch.save(torch.load(path), path) rewrites it in the present one")
        else:
            raise ValueError(f"{path} is no PyTorch checkpoint: it does not begin as a zip archive does")
        with archive:
            pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise ValueError(f"{path} is no PyTorch checkpoint: a zip archive without data.pkl in its one folder")
            folder = pickles[0].split("/")[0]
            mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
            try:
                if f"{folder}/byteorder" in archive.namelist() and _member(archive, mapped, f"{folder}/byteorder").tobytes() != b"little":
                    raise ValueError("is not little-endian")
                values = _unpickle(_member(archive, mapped, pickles[0]).tobytes())
            except (ValueError, IndexError, KeyError) as error:
                reason = error if type(error) is ValueError else "its pickle is broken (it takes what was not there)"
                raise ValueError(f"{path} cannot be read: {reason}") from None
            if type(values) is not dict:
                raise ValueError(f"{path} must hold a dict of tensors, got a {type(values).__name__}")
            if "_strategy" in values:
                raise ValueError(f"{path} was converted for one strategy of PyPI rwkv (it holds _strategy); take the file that it was made from")
            arrays = {}
            for name, value in values.items():
                try:
                    arrays[name] = _array(archive, mapped, folder, value)
                except (ValueError, OverflowError) as error:
                    raise ValueError(f"{path}: {name:.200} {error}") from None
            return arrays


def write_pth(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Writes a flat ``.pth`` checkpoint, without PyTorch; ``torch.load(path, weights_only=True)`` reads it, with ``mmap=True`` too.

    The file appears, or is replaced, when it is complete.

    Args:
        path: of the file.
        tensors: {name: array} of float32, bfloat16, float16 or float64, NumPy's or JAX's.

    Raises:
        TypeError: a name is no string, or an array has another dtype; the message names the tensor.
        OSError: the file cannot be written.
    """
    path = Path(path)
    for name, x in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors must have names (str), got {name!r}")
        if getattr(x, "dtype", None) not in _STORAGE_NAMES:
            known = ", ".join(map(str, _STORAGE_NAMES))
            raise TypeError(f"tensors[{name!r}] must be an array of {known}, got {getattr(x, 'dtype', type(x).__name__)}")
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            add = lambda name, data: _add(archive, f"archive/{name}", data)
            add("data.pkl", _pickle(tensors))
            add("byteorder", b"little")
            for i, x in enumerate(tensors.values()):
                add(f"data/{i}", np.ascontiguousarray(x).reshape(-1).view(np.uint8))
            add("version", b"3\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _add(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    """A member whose bytes begin at a multiple of 64, made so by an extra field that readers skip."""
    info = zipfile.ZipInfo(name)
    size = len(data)
    large = size > _LARGE
    assert archive.fp is not None
    used = archive.fp.tell() + 30 + len(name) + 4 + (20 if large else 0)
    padding = -used % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as member:
        member.write(data)


def _pickle(tensors: Mapping[str, Any]) -> bytes:
    """A pickle of protocol 2 that says what ``torch.save`` says: a dict of contiguous tensors, storages "0", "1", ..."""
    text = lambda s: b"X" + struct.pack("<I", len(s.encode())) + s.encode()
    name_of = lambda s: b"c" + s.replace(" ", "\n").encode() + b"\n"
    # BININT is signed, four bytes; LONG1 takes the rest
    number = lambda n: b"J" + struct.pack("<i", n) if n < 2**31 else b"\x8a\x08" + struct.pack("<q", n)
    numbers = lambda ns: b"(" + b"".join(map(number, ns)) + b"t"
    parts = [b"\x80\x02}("]
    for i, (name, x) in enumerate(tensors.items()):
        stride = [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim)]
        storage = b"(" + text("storage") + name_of(_STORAGE_NAMES[np.dtype(x.dtype)]) + text(str(i)) + text("cpu") + number(x.size) + b"tQ"
        no_hooks = name_of("collections OrderedDict") + b")R"
        tensor = b"(" + storage + number(0) + numbers(x.shape) + numbers(stride) + b"\x89" + no_hooks + b"t"  # \x89: requires no gradient
        parts += [text(name), name_of("torch._utils _rebuild_tensor_v2"), tensor, b"R"]
    return b"".join([*parts, b"u."])
