"""PyTorch's ``.pth`` files without PyTorch, and without running anything that a file asks for.

A ``.pth`` is a zip archive, its members not compressed: ``<folder>/data.pkl`` is a pickle of
``{name: tensor}``, and ``<folder>/data/<key>`` are the bytes of each storage.

Source of the format: PyTorch ``torch/serialization.py``, ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import functools
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from ..files import Json, as_path, check_regular, replacing
from ..tensors import StoredTensor, as_bytes, printable, quoted
from .format import Format
from .pickled import Tensor, unpickle

_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch HalfStorage": np.dtype(np.float16),
    "torch DoubleStorage": np.dtype(np.float64),
}
_STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}
# a pickle of the magic number that files before PyTorch 1.6 begin with
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
# what zipfile raises about archives whose directory is broken: it reads and seeks wherever that says
_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, OSError, struct.error)
_LARGE = 2**30  # storages above have their sizes in 64 bits, as zip64 has it
_ALIGNMENT = 64  # of every storage in the file, as PyTorch writes it: mapped memory can then be read in place


class _Archive:
    """A zip archive whose members are views of the mapped file.

    Raises:
        ValueError: the file is another one, truncated or broken. OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        check_regular(path)
        with path.open("rb") as file:
            start = file.read(len(_LEGACY))
            if start == _LEGACY:
                hint = "torch.save(torch.load(path), path) rewrites it in the present one"
                raise ValueError(f"{path} has PyTorch's old format, from before 1.6; {hint}")
            if not start.startswith(b"PK\x03\x04"):
                raise ValueError(f"{path} is no PyTorch checkpoint: it does not begin as a zip archive does")
            try:
                with zipfile.ZipFile(file) as archive:
                    infos = archive.infolist()
            except _ZIP_ERRORS as error:
                raise ValueError(f"{path} is a truncated or broken zip archive: {printable(error)}") from None
            self.mapped = np.memmap(file, np.uint8, "r").view(np.ndarray)
        self.infos = {info.filename: info for info in infos}
        self.sound: set[str] = set()  # members whose checksum has been compared
        if len(self.infos) < len(infos):
            twice = next(info.filename for info in infos if info is not self.infos[info.filename])
            raise ValueError(f"{path} is a broken zip archive: it holds {quoted(twice)} twice")
        # members that lie over one another would make much of a small file
        if sum(info.file_size for info in infos) > self.mapped.size:
            raise ValueError(f"{path} is a broken zip archive: its members have more bytes than the file")

    def view(self, name: str) -> np.ndarray:
        """The bytes of a member, the checksum not compared.

        Raises:
            KeyError: the archive lacks it. ValueError: its position is wrong.
        """
        info = self.infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError("is compressed or encrypted, which PyTorch's files are not")
        # name and extra field of the local header may be longer than the directory's, which zipfile shows
        header = self.mapped[info.header_offset : info.header_offset + 30].tobytes()
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError("has no header where the archive's directory puts it: the file is broken")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        data = self.mapped[start : start + info.file_size]
        if data.size != info.file_size:
            raise ValueError(f"has {data.size} of its {info.file_size} bytes: the file is truncated")
        return data

    def check(self, name: str) -> None:
        """Compares a member's bytes with its checksum, once; PyTorch writes 0 when told to compute none.

        Raises:
            ValueError: they differ.
        """
        want = self.infos[name].CRC
        if name not in self.sound and want and zlib.crc32(self.view(name).data) != want:
            raise ValueError("differs from its checksum: the file is damaged")
        self.sound.add(name)

    def read(self, name: str) -> bytes:
        """The bytes of a small member, the checksum compared."""
        self.check(name)
        return self.view(name).tobytes()


def open_pth(path: Path) -> dict[str, StoredTensor]:
    """Like `read_pth`, but checks each storage only when its tensors are read."""
    archive = _Archive(path)
    pickles = [name for name in archive.infos if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{path} is no PyTorch checkpoint: a zip archive without data.pkl in its one folder")
    folder = pickles[0].split("/")[0]
    try:
        if f"{folder}/byteorder" in archive.infos and archive.read(f"{folder}/byteorder") != b"little":
            raise ValueError("is not little-endian")
        values = unpickle(archive.read(pickles[0]))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {printable(error)}") from None
    if type(values) is not dict:
        raise ValueError(f"{path} must hold a dict of tensors, got a {type(values).__name__}")
    if "_strategy" in values:
        hint = "take the file that it was made from"
        raise ValueError(f"{path} was converted for one strategy of PyPI rwkv (it holds _strategy); {hint}")
    tensors = {}
    for name, value in values.items():
        try:
            x = _array(archive, folder, value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: {quoted(name)} {printable(error)}") from None
        member = f"{folder}/data/{value.storage.key}"
        read = functools.partial(_read, path, name, archive, member, x)
        tensors[name] = StoredTensor(name, x.shape, x.dtype, read, member, archive.infos[member].file_size)
    return tensors


def _array(archive: _Archive, folder: str, value: object) -> np.ndarray:
    """A tensor's values, as a view of the mapped file, not checked yet."""
    if type(value) is not Tensor:
        raise ValueError(f"is no tensor (a {type(value).__name__})")
    value.check()
    storage, offset, shape, stride, _ = value
    if storage.kind not in _STORAGES:
        known = ", ".join(map(str, _STORAGES.values()))
        raise ValueError(f"has the element type {quoted(storage.kind.replace(' ', '.'))}; known: {known}")
    dtype = _STORAGES[storage.kind]
    member = f"{folder}/data/{storage.key}"
    try:
        data = archive.view(member)
    except KeyError:
        raise ValueError(f"has no values: the file lacks {quoted(member)}") from None
    except ValueError as error:
        raise ValueError(f"cannot be read: its storage {quoted(member)} {error}") from None
    if data.size != storage.size * dtype.itemsize:
        raise ValueError(f"has a storage of {data.size} bytes instead of {storage.size} x {dtype.itemsize}")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride)) if count else 0
    # a few bytes can claim any number of elements with a stride of 0
    if count > storage.size or (count and last >= storage.size):
        what = f"shape {list(shape)}, strides {list(stride)}, offset {offset}, {storage.size} elements"
        raise ValueError(f"reaches beyond its storage: {what}")
    elements = data.view(dtype)[offset:] if count else np.empty(0, dtype)
    strides = [step * dtype.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(elements, shape, strides, writeable=False)


def _read(path: Path, name: str, archive: _Archive, member: str, x: np.ndarray) -> np.ndarray:
    try:
        archive.check(member)
    except ValueError as error:
        what = f"{quoted(name)} cannot be read: its storage {quoted(member)}"
        raise ValueError(f"{path}: {what} {error}") from None
    return x


def read_pth(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a flat ``.pth`` checkpoint (``torch.save`` of ``{name: tensor}``), safely and without PyTorch.

    No code from the file runs, and all values are compared with the file's checksums. The file is mapped into
    memory, read-only: do not change it in place meanwhile.

    Args:
        path: of a file that PyTorch 1.6 or newer wrote (a zip archive).

    Returns:
        {name: read-only array}, in the file's order, dtypes and shapes: float32, float16, float64, or
        ``ml_dtypes.bfloat16``. Tensors that share their values in the file share them here.

    Raises:
        ValueError: it is no regular file, is truncated, damaged or broken, of PyTorch's older format,
            compressed, or holds anything but tensors. The message names the file and the tensor.
        TypeError: ``path`` is no path. OSError: the file cannot be opened.

    Example:
        >>> import numpy as np, tempfile
        >>> from fla_jax.checkpoints import read_pth, write_pth
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_pth(folder + "/a.pth", {"blocks.0.att.time_state": np.zeros((2, 64, 64), np.float32)})
        ...     read_pth(folder + "/a.pth")["blocks.0.att.time_state"].shape
        (2, 64, 64)
    """
    tensors = open_pth(as_path(path))
    with ThreadPoolExecutor() as pool:  # checksums are computed without the interpreter's lock
        return dict(zip(tensors, pool.map(lambda tensor: tensor.read(), tensors.values())))


def write_pth(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray | jax.Array]) -> None:
    """Writes a flat ``.pth`` checkpoint, without PyTorch.

    ``torch.load(path, weights_only=True)`` reads it, with ``mmap=True`` too. The file appears, or is
    replaced, when it is complete; any number of processes and threads may write to one path.

    Args:
        path: of the file. A symbolic link is replaced, and what it points to stays.
        tensors: {name: array} of float32, bfloat16, float16 or float64, NumPy's or JAX's.

    Raises:
        TypeError: an argument has another type, or an array another dtype; the message names the tensor.
        ValueError: a name is no valid Unicode.
        OSError: the file cannot be written; the error names it.

    Example:
        >>> import ml_dtypes, numpy as np, tempfile
        >>> from fla_jax.checkpoints import read_pth, write_pth
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_pth(folder + "/a.pth", {"x": np.ones(3, ml_dtypes.bfloat16)})
        ...     print(read_pth(folder + "/a.pth")["x"].dtype)
        bfloat16
    """
    path = as_path(path)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a dict of arrays, got {type(tensors).__name__}")
    for name, x in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors must have names (str), got {quoted(name)}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"tensors must have names of Unicode characters, got {quoted(name)}") from None
        if getattr(x, "dtype", None) not in _STORAGE_NAMES:
            known = ", ".join(map(str, _STORAGE_NAMES))
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"tensors[{quoted(name)}] must be an array of {known}, got {kind}")
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        _add(archive, "data.pkl", _pickle(tensors))
        _add(archive, "byteorder", b"little")
        for i, x in enumerate(tensors.values()):
            _add(archive, f"data/{i}", as_bytes(x))
        _add(archive, "version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    """A member whose bytes begin at a multiple of 64, made so by an extra field that readers skip."""
    info = zipfile.ZipInfo(f"archive/{name}")
    large = len(data) > _LARGE
    assert archive.fp is not None
    used = archive.fp.tell() + 30 + len(info.filename) + 4 + (20 if large else 0)
    padding = -used % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as member:
        member.write(data)


def _pickle(tensors: Mapping[str, np.ndarray | jax.Array]) -> bytes:
    """A pickle of protocol 2 like ``torch.save``'s: a dict of contiguous tensors, storages "0", "1", ..."""
    text = lambda s: b"X" + struct.pack("<I", len(s.encode())) + s.encode()
    name_of = lambda s: b"c" + s.replace(" ", "\n").encode() + b"\n"
    # BININT is signed, four bytes; LONG1 takes the rest
    number = lambda n: b"J" + struct.pack("<i", n) if n < 2**31 else b"\x8a\x08" + struct.pack("<q", n)
    numbers = lambda ns: b"(" + b"".join(map(number, ns)) + b"t"
    parts = [b"\x80\x02}("]
    for i, (name, x) in enumerate(tensors.items()):
        stride = [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.ndim)]
        kind = name_of(_STORAGE_NAMES[np.dtype(x.dtype)])
        storage = b"(" + text("storage") + kind + text(str(i)) + text("cpu") + number(x.size) + b"tQ"
        no_gradient, no_hooks = b"\x89", name_of("collections OrderedDict") + b")R"
        tensor = storage + number(0) + numbers(x.shape) + numbers(stride) + no_gradient + no_hooks
        parts += [text(name), name_of("torch._utils _rebuild_tensor_v2"), b"(", tensor, b"tR"]
    return b"".join([*parts, b"u."])


def _reads(path: Path) -> bool:
    return not path.is_dir() and path.suffix != ".safetensors"  # PyTorch's files have all kinds of names


def _writes(path: Path) -> bool:
    return path.suffix == ".pth"


def _write(path: Path, tensors: Mapping[str, np.ndarray], config_json: Mapping[str, Json]) -> None:
    write_pth(path, tensors)


PTH = Format("a .pth file", _reads, _writes, open_pth, _write, "official")
