"""What is no file, folders that are broken, names that would harm a terminal: errors that name them, soon."""

from __future__ import annotations

import functools
import json
import os
import struct

import fla_names as fla
import ml_dtypes
import numpy as np
import pytest
from broken_files import NASTY, refused

from fla_jax.checkpoints import load_checkpoint, read_pth, write_pth


def test_what_is_no_file(tensors, tmp_path):
    """FIFOs and devices are not waited for; links to files are files."""
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "link.pth").symlink_to("fifo")
    (tmp_path / "device.pth").symlink_to("/dev/zero")
    for name, kind in (
        ("fifo", "FIFO"),
        ("fifo.safetensors", "FIFO"),
        ("link.pth", "FIFO"),
        ("device.pth", "device"),
    ):
        refused(
            functools.partial(load_checkpoint, tmp_path / name),
            tmp_path / name,
            f"must be a regular file, got a {kind}",
        )
    refused(lambda: read_pth(tmp_path), f"{tmp_path} must be a regular file, got a directory")
    names = fla.tensors(7, tensors, 2)
    for i, name in enumerate(("model.safetensors", "config.json", "model.safetensors.index.json")):
        fla.save(tmp_path / str(i), names)
        if name == "model.safetensors":
            (tmp_path / str(i) / name).unlink()
        os.mkfifo(tmp_path / str(i) / name)
        refused(
            functools.partial(load_checkpoint, tmp_path / str(i)),
            tmp_path / str(i) / name,
            "must be a regular file, got a FIFO",
        )
    (tmp_path / "2" / "model.safetensors.index.json").unlink()
    (tmp_path / "2" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "part")})
    )
    os.mkfifo(tmp_path / "2" / "part")
    refused(
        lambda: load_checkpoint(tmp_path / "2"), tmp_path / "2" / "part", "must be a regular file, got a FIFO"
    )

    write_pth(tmp_path / "x.pth", tensors)
    (tmp_path / "to.pth").symlink_to("x.pth")
    (tmp_path / "to").symlink_to("0")
    (tmp_path / "0" / "model.safetensors").unlink()
    fla.save(tmp_path, names, "blob")
    (tmp_path / "0" / "model.safetensors").symlink_to("../blob")
    load_checkpoint(tmp_path / "to.pth")
    load_checkpoint(tmp_path / "to")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        load_checkpoint(tmp_path / "loop")


@pytest.mark.parametrize("name", ["..", "", "/etc/passwd", NASTY, 3])
def test_indices(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    message = "must have a weight_map of tensors to files in the same directory"
    refused(lambda: load_checkpoint(tmp_path), tmp_path, message)


@pytest.mark.parametrize(
    "data",
    [b"[" * 10**6, b'{"norm_eps": ' + b"1" * 10_000 + b"}", b"\xff", b"[]", b'{"norm_eps": "\\u001b"}'],
)
def test_broken_json(tensors, tmp_path, data):
    fla.save(tmp_path, fla.tensors(7, tensors, 2))
    (tmp_path / "config.json").write_bytes(data)
    refused(lambda: load_checkpoint(tmp_path), tmp_path / "config.json")


def test_nasty_names_in_safetensors(tensors, tmp_path):
    nasty = NASTY.replace("\ud800", "")
    for change in (
        {nasty: np.ones(3, np.float32)},
        {nasty: np.ones(3, np.int8)},
        {f"model.layers.0.attn.q_proj.{nasty}": np.ones(3, np.float32)},
    ):
        fla.save(tmp_path, fla.tensors(7, tensors, 2) | change)
        refused(lambda: load_checkpoint(tmp_path), tmp_path, "x1b]0;owned")
    header = '{"x":{"dtype":"\\u001b[31m","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    refused(lambda: load_checkpoint(tmp_path / "x.safetensors"), "x.safetensors")


def test_zeros_and_mixtures(tensors, tmp_path):
    """Sizes without values could be anything; bfloat16 beside float16 in stacked layers needs float32."""
    for name, shape in (("blocks.0.att.w1", (0, 2**40)), ("blocks.0.att.time_state", (2, 0, 16))):
        write_pth(tmp_path / "x.pth", tensors | {name: np.empty((0,), np.float32).reshape((0,) * len(shape))})
        refused(lambda: load_checkpoint(tmp_path / "x.pth"), f"{name!r} has no values")
    mixed = tensors | {"blocks.0.ln1.bias": tensors["blocks.0.ln1.bias"].astype(np.float16)}
    mixed["blocks.1.ln1.bias"] = mixed["blocks.1.ln1.bias"].astype(ml_dtypes.bfloat16)
    write_pth(tmp_path / "x.pth", mixed)
    _, params = load_checkpoint(tmp_path / "x.pth", scan_layers=True)
    bias = params["blocks"]["ln1"]["bias"]
    assert bias.dtype == np.float32
    for i in range(2):
        np.testing.assert_array_equal(bias[i], mixed[f"blocks.{i}.ln1.bias"].astype(np.float32))


def test_options_are_checked_first(tmp_path):
    with pytest.raises(ValueError, match=r"^chunk_size must be a power of two"):
        load_checkpoint(tmp_path / "missing.pth", chunk_size=3)
