"""PyTorch's file format: against bytes that PyTorch wrote, PyTorch itself where it is there, and attacks."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import small_models as small

from fla_jax.checkpoints import load_checkpoint, read_pth, save_checkpoint, write_pth

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


def make(path, data=PICKLE, storages=STORAGES, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("gold/data.pkl", data)
        for i, storage in enumerate(storages):
            archive.writestr(f"gold/data/{i}", storage)
        for name, value in {"byteorder": "little", "version": "3\n", **members}.items():
            archive.writestr(f"gold/{name}", value)
    return path


def test_reads_what_pytorch_wrote(tmp_path):
    z = read_pth(make(tmp_path / "gold.pth"))
    assert list(z) == ["first.weight", "second", "shared"]
    np.testing.assert_array_equal(
        z["first.weight"], np.arange(6, dtype=np.float32).reshape(2, 3), strict=True
    )
    np.testing.assert_array_equal(
        z["second"], np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T, strict=True
    )
    np.testing.assert_array_equal(z["shared"], np.array([3, 4, 5], np.float32), strict=True)
    assert not any(x.flags.writeable for x in z.values())


ARRAYS = {
    "float32": np.array([[1.0, np.nan, -0.0], [np.inf, 1e-45, 3.4e38]], np.float32),
    "bfloat16": np.arange(0, 65536, 7, dtype=np.uint16)
    .view(ml_dtypes.bfloat16)
    .reshape(-1, 3, 1),  # NaN payloads and subnormals among them
    "float16": np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, ::2].T,
    "float64": np.array(np.pi),
    "empty": np.zeros((3, 0), np.float32),
    "blöcke.0": np.arange(70000, dtype=np.float32),
}


def same_bits(got, want):
    assert list(got) == list(want)
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
        assert np.ascontiguousarray(got[name]).tobytes() == np.ascontiguousarray(x).tobytes(), name


def test_round_trip(tmp_path):
    write_pth(tmp_path / "a.pth", ARRAYS)
    z = read_pth(tmp_path / "a.pth")
    same_bits(z, ARRAYS)
    write_pth(
        tmp_path / "a.pth", {name: z[name] for name in reversed(z)}
    )  # over the file that the arrays are views of
    same_bits(z, ARRAYS)
    same_bits(read_pth(tmp_path / "a.pth"), {name: ARRAYS[name] for name in reversed(ARRAYS)})
    assert os.listdir(tmp_path) == ["a.pth"]


def test_reading_copies_nothing(tmp_path):
    write_pth(tmp_path / "a.pth", {"x": np.zeros(1000, np.float32), "y": np.ones((50, 20), np.float32)})
    for x in read_pth(tmp_path / "a.pth").values():
        while (base := getattr(x, "base", None)) is not None:
            x = base
        assert isinstance(x, mmap.mmap)


def test_pytorch_reads_it(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'fla-jax[parity]')")
    write_pth(tmp_path / "a.pth", ARRAYS)
    for mapped in (False, True):
        z = torch.load(tmp_path / "a.pth", weights_only=True, mmap=mapped)
        assert list(z) == list(ARRAYS)
        for name, x in ARRAYS.items():
            assert (
                str(z[name].dtype) == f"torch.{x.dtype}"
                and z[name].shape == x.shape
                and z[name].is_contiguous()
            )
            bits = z[name].reshape(-1).view(torch.uint8).numpy().tobytes() if x.size else b""
            assert bits == np.ascontiguousarray(x).tobytes(), name
            assert z[name].data_ptr() % 64 == 0 or not mapped


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_pytorch(tmp_path, protocol):
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'fla-jax[parity]')")
    x = torch.randn(40, 6)
    z = {
        "x": x,
        "half": x.half(),
        "bfloat16": x.bfloat16(),
        "t": x.t(),
        "part": x[3:7, 2:],
        "parameter": torch.nn.Parameter(x),
        "scalar": x[0, 0],
        "none": x[:0],
    }
    torch.save(OrderedDict(z), tmp_path / "x.pth", pickle_protocol=protocol)
    got = read_pth(tmp_path / "x.pth")
    assert list(got) == list(z)
    for name, want in z.items():
        np.testing.assert_array_equal(
            got[name].astype(np.float32), want.detach().float().numpy(), strict=True
        )


def test_old_format(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'fla-jax[parity]')")
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"old\.pth has PyTorch's old format"):
        read_pth(tmp_path / "old.pth")


class Harm:
    """Pickled: a call of a function with arguments, as `__reduce__` orders it."""

    def __init__(self, *order):
        self.order = order

    def __reduce__(self):
        return self.order


def orders(marker):
    code = f"open({str(marker)!r}, 'w').close()"
    return {
        "a function": Harm(exec, (code,)),
        "in a tensor's place": {"emb.weight": Harm(exec, (code,))},
        "a state": Harm(OrderedDict, (), {"update": Harm(exec, (code,))}),
        "an argument": {"x": (OrderedDict, Harm(exec, (code,)))},
        "a key": OrderedDict([(Harm(exec, (code,)), 1)]),
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("case", orders(""))
def test_runs_nothing(tmp_path, case, protocol):
    marker = tmp_path / "marker"
    data = pickle.dumps(orders(marker)[case], protocol)
    path = make(tmp_path / "harm.pth", data)
    for read in (read_pth, load_checkpoint):
        with pytest.raises(ValueError, match=r"harm\.pth cannot be read: its pickle"):
            read(path)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # whatever comes after the deed
        pickle.loads(data)
    assert marker.exists(), "the payload is a dud"


def tensor(
    kind=b"FloatStorage",
    key=b"0",
    size=b"K\x06",
    offset=b"K\x00",
    shape=b"K\x02K\x03\x86",
    stride=b"K\x03K\x01\x86",
    hooks=b"}",
):
    text = lambda s: b"X" + struct.pack("<I", len(s)) + s
    storage = b"(" + text(b"storage") + b"ctorch\n" + kind + b"\n" + text(key) + text(b"cpu") + size + b"tQ"
    return (
        b"\x80\x02}"
        + text(b"emb.weight")
        + b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + offset
        + shape
        + stride
        + b"\x89"
        + hooks
        + b"tRs."
    )


@pytest.mark.parametrize(
    "data, message",
    [
        (tensor(size=b"K\x07"), "'emb.weight' has a storage of 24 bytes instead of 7 x 4"),
        (tensor(key=b"9"), "'emb.weight' has no values: the file lacks 'gold/data/9'"),
        (tensor(key=b"../data.pkl"), "'emb.weight' has no values: the file lacks"),
        (tensor(kind=b"QUInt8Storage"), "'emb.weight' has the element type 'torch.QUInt8Storage'"),
        (tensor(offset=b"K\x01"), "'emb.weight' reaches beyond its storage"),
        (tensor(shape=b"K\x03K\x03\x86"), "'emb.weight' reaches beyond its storage"),
        (tensor(stride=b"K\x04K\x01\x86"), "'emb.weight' reaches beyond its storage"),
        (
            tensor(shape=b"K\x02J\xff\xff\xff\x7f\x86", stride=b"K\x00K\x00\x86"),
            "'emb.weight' reaches beyond its storage",
        ),  # all memory, by strides of 0
        (
            tensor(stride=b"J\xff\xff\xff\xffK\x01\x86"),
            "'emb.weight' has a shape or strides that are no sizes",
        ),
        (tensor(shape=b"K\x06\x85"), "'emb.weight' has a shape or strides that are no sizes"),
        (tensor(shape=b"K\x00\x8a\x10" + b"\xff" * 15 + b"\x01\x86"), "'emb.weight' "),
        (b"\x80\x02X\x01\x00\x00\x00x.", "must hold a dict of tensors, got a str"),
        (
            b"\x80\x02}X\x09\x00\x00\x00_strategyX\x08\x00\x00\x00cpu fp32s.",
            "was converted for one strategy of PyPI rwkv",
        ),
        (
            b"\x80\x02}X\x05\x00\x00\x00_stepG?\xf0\x00\x00\x00\x00\x00\x00s.",
            "'_step' is no tensor (a float)",
        ),
        (b"\x80\x02}K\x01K\x01s.", "a name of type int"),
        (b"\x80\x02}", "pickle exhausted"),
        (b"\x80\x02t.", "its pickle is broken"),
        (b"\x80\x02h\x07.", "its pickle is broken"),
        (b"(" * 100000 + b".", "its pickle is broken"),
        (
            b"\x80\x02)" + b"\x85" * 100000 + b".",
            "must hold a dict of tensors, got a tuple",
        ),  # nested deeper than Python recurses
        (
            b"\x80\x02()q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"t.",
            "must hold a dict of tensors",
        ),  # 2^200 elements if written out
        (b"\x80\x02}()q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"tK\x01s.", "a name of type tuple"),
        (
            b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
            "calls 'os.system', which no dict of tensors needs: refused",
        ),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.", "uses the opcode NEWOBJ_EX"),
        (
            b"\x80\x02cfla_jax.checkpoints\nread_pth\n}b0}.",
            "sets attributes of something that is no dict: refused",
        ),
    ],
)
def test_broken_pickles(tmp_path, data, message):
    path = make(tmp_path / "broken.pth", data)
    with pytest.raises(ValueError, match=r"broken\.pth") as error:
        read_pth(path)
    assert message in str(error.value) and len(str(error.value)) < 1000


def test_the_tensor_of_these_tests_is_one(tmp_path):
    """Or the cases above might fail for another reason."""
    np.testing.assert_array_equal(
        read_pth(make(tmp_path / "x.pth", tensor()))["emb.weight"],
        np.arange(6, dtype=np.float32).reshape(2, 3),
        strict=True,
    )


def test_broken_files(tmp_path):
    path = tmp_path / "x.pth"
    with pytest.raises(FileNotFoundError):
        read_pth(path)
    for data, message in (
        (b"", "is no PyTorch checkpoint"),
        (b"PK", "is no PyTorch checkpoint"),
        (b"\x80\x02}.", "is no PyTorch checkpoint"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"x\.pth {message}"):
            read_pth(path)
    write_pth(path, {"emb.weight": np.ones((30, 20), np.float32)})
    whole = path.read_bytes()
    for end in (4, 100, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"x\.pth is a truncated or broken zip archive"):
            read_pth(path)
    with pytest.raises(
        ValueError,
        match=r"x\.pth: 'emb.weight' has a storage of 20 bytes instead of 600 x 4",
    ):
        make(path, tensor(size=b"M\x58\x02", shape=b"K\x1eK\x14\x86", stride=b"K\x14K\x01\x86"), [b"x" * 20])
        read_pth(path)
    make(path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x\.pth cannot be read: is compressed"):
        read_pth(path)
    make(path, byteorder="big")
    with pytest.raises(ValueError, match=r"x\.pth cannot be read: is not little-endian"):
        read_pth(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing here")
    with pytest.raises(ValueError, match=r"x\.pth is no PyTorch checkpoint: a zip archive without data\.pkl"):
        read_pth(path)


def test_random_damage(tmp_path):
    """Any change of a pickle gives arrays or a ValueError that names the file; the checksums are right."""
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(1000):
        data = bytearray(PICKLE)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(len(data))] = rng.integers(256)
        make(tmp_path / "x.pth", bytes(data))
        try:
            for x in read_pth(tmp_path / "x.pth").values():
                assert x.size <= 6 and x.tobytes() is not None
        except ValueError as error:
            failed += 1
            assert "x.pth" in str(error) and str(error).isprintable()
    assert 300 < failed < 1000


def test_write_errors(tmp_path):
    for tensors, message in (
        ({"x": np.arange(3)}, r"tensors\['x'\] must be an array of float32, .*, got int64"),
        ({"x": [1.0]}, r"tensors\['x'\] must be an array of .*, got list"),
        ({1: np.ones(3)}, "tensors must have names"),
    ):
        with pytest.raises(TypeError, match=message):
            write_pth(tmp_path / "x.pth", tensors)
    assert not os.listdir(tmp_path)


def test_failed_write_leaves_the_old_file(tmp_path):
    write_pth(tmp_path / "x.pth", {"x": np.ones(3, np.float32)})
    before = (tmp_path / "x.pth").read_bytes()

    class Late:
        dtype, shape, ndim, size = np.dtype(np.float32), (3,), 1, 3

        def __array__(self, *args, **kwargs):
            raise RuntimeError("no values")

    with pytest.raises(RuntimeError, match="no values"):
        write_pth(tmp_path / "x.pth", {"x": Late()})
    assert (tmp_path / "x.pth").read_bytes() == before and os.listdir(tmp_path) == ["x.pth"]


def test_many_and_large_numbers(tmp_path, monkeypatch):
    """The zip64 form that storages of over a gigabyte take, at a smaller size."""
    monkeypatch.setattr("fla_jax.checkpoints.formats.pth._LARGE", 1000)
    x = np.arange(1000, dtype=np.float32)
    write_pth(tmp_path / "x.pth", {f"x{i}": x[: 100 * i] for i in range(10)})
    for i in range(10):
        np.testing.assert_array_equal(read_pth(tmp_path / "x.pth")[f"x{i}"], x[: 100 * i])
    with zipfile.ZipFile(io.BytesIO((tmp_path / "x.pth").read_bytes())) as archive:
        assert archive.testzip() is None


def test_needs_neither_torch_nor_safetensors(tmp_path):
    """.pth files do without both; reading directories says what it needs."""
    model = small.model(7, num_layers=1)
    save_checkpoint(tmp_path / "a.pth", model, small.params(model))
    program = """
import sys
sys.modules["torch"] = sys.modules["safetensors"] = None  # importing them fails
from fla_jax.checkpoints import load_checkpoint, save_checkpoint
model, params = load_checkpoint(sys.argv[1] + "/a.pth")
save_checkpoint(sys.argv[1] + "/b.pth", model, params)
save_checkpoint(sys.argv[1] + "/c", model, params)
try:
    load_checkpoint(sys.argv[1] + "/c")
except ImportError as error:
    assert "pip install safetensors" in str(error), error
else:
    raise AssertionError("no error")
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same_bits(read_pth(tmp_path / "b.pth"), read_pth(tmp_path / "a.pth"))
