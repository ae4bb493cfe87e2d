"""Files of checkpoints made by hand, harmful ones too, and how these must be refused."""

from __future__ import annotations

import struct
import zipfile

import numpy as np
import pytest

# What torch.save of PyTorch 2.13 wrote for a state_dict of three tensors, two in one storage, one transposed.
PICKLE = (
    b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x0c\x00\x00\x00first.weightq\x02ctorch._utils\n_rebuild_tensor_v2\nq\x03((X\x07\x00\x00\x00storage"
    b"q\x04ctorch\nFloatStorage\nq\x05X\x01\x00\x00\x000q\x06X\x03\x00\x00\x00cpuq\x07K\x06tq\x08QK\x00K\x02K\x03\x86q\tK\x03K\x01\x86q\n\x89h\x00)Rq\x0bt"
    b"q\x0cRq\rX\x06\x00\x00\x00secondq\x0eh\x03((h\x04ctorch\nBFloat16Storage\nq\x0fX\x01\x00\x00\x001q\x10h\x07K\x06tq\x11QK\x00K\x03K\x02\x86q\x12K\x01"
    b"K\x03\x86q\x13\x89h\x00)Rq\x14tq\x15Rq\x16X\x06\x00\x00\x00sharedq\x17h\x03((h\x04h\x05h\x06h\x07K\x06tq\x18QK\x03K\x03\x85q\x19K\x01\x85q\x1a\x89h"
    b"\x00)Rq\x1btq\x1cRq\x1du}q\x1eX\t\x00\x00\x00_metadataq\x1fh\x00)Rq "
    b'X\x00\x00\x00\x00q!}q"X\x07\x00\x00\x00versionq#K\x01sssb.'
)
STORAGES = (struct.pack("<6f", *range(6)), b"\x00\x00\x80?\x00@@@\x80@\xa0@")


def pytorch_file(path, data=PICKLE, storages=STORAGES, compression=zipfile.ZIP_STORED, **members):
    """A file in PyTorch's format."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("gold/data.pkl", data)
        for i, storage in enumerate(storages):
            archive.writestr(f"gold/data/{i}", storage)
        for name, value in {"byteorder": "little", "version": "3\n", **members}.items():
            archive.writestr(f"gold/{name}", value)
    return path


# would rename a terminal's window, begin a new line, turn the writing round
NASTY = "\x1b]0;owned\x07\n\u202e\ud800"


def refused(act, *parts):
    """Runs ``act``; its error must hold the parts, be short, and be fit for a terminal."""
    with pytest.raises(ValueError) as error:
        act()
    text = str(error.value)
    assert all(str(part) in text for part in parts), text
    assert text.isprintable() and len(text) < 1000
    return text


def text(s):
    s = s.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(s)) + s


def number(n):
    return (
        b"J" + struct.pack("<i", n)
        if -(2**31) <= n < 2**31
        else b"\x8a\x20" + n.to_bytes(32, "little", signed=True)
    )


def entry(name, key, size, shape, stride=None, offset=0, metadata=b""):
    """A name and a tensor of float32 as PyTorch pickles them."""
    stride = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))] if stride is None else stride
    numbers = lambda ns: b"(" + b"".join(map(number, ns)) + b"t"
    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(size) + b"tQ"
    )
    tensor = b"(" + storage + number(offset) + numbers(shape) + numbers(stride) + b"\x89}" + metadata + b"t"
    return text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n" + tensor + b"R"


def pickled_file(path, entries, storages):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}(" + b"".join(entries) + b"u.")
        for key, values in storages.items():
            archive.writestr(f"a/data/{key}", np.asarray(values, np.float32).tobytes())
    return path
