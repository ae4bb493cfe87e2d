"""PyTorch's file format: against bytes that PyTorch wrote, and PyTorch itself where it is there."""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import small_models as small
from broken_files import pytorch_file
from harness.compare import assert_same_bits

from fla_jax.checkpoints import read_pth, save_checkpoint, write_pth


def test_reads_what_pytorch_wrote(tmp_path):
    z = read_pth(pytorch_file(tmp_path / "gold.pth"))
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
    assert_same_bits(got, want)


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


def test_write_errors(tmp_path):
    for tensors, message in (
        ({"x": np.arange(3)}, r"tensors\['x'\] must be an array of float32, .*, got int64"),
        ({"x": [1.0]}, r"tensors\['x'\] must be an array of .*, got list"),
        ({1: np.ones(3)}, "tensors must have names"),
    ):
        with pytest.raises(TypeError, match=message):
            write_pth(tmp_path / "x.pth", tensors)
    assert not os.listdir(tmp_path)


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
    model = small.model(7, num_layers=1)
    save_checkpoint(tmp_path / "a.pth", model, small.params(model))
    program = """
import sys
sys.modules["torch"] = sys.modules["safetensors"] = None  # importing them fails
from fla_jax.checkpoints import load_checkpoint, save_checkpoint
model, params = load_checkpoint(sys.argv[1] + "/a.pth")
save_checkpoint(sys.argv[1] + "/b.pth", model, params)
save_checkpoint(sys.argv[1] + "/c", model, params, format="huggingface")
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
