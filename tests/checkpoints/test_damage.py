"""Damaged `.pth` files and such as would take memory: errors that name file and tensor, soon."""

from __future__ import annotations

import functools
import struct
import time
import zipfile

import fla_names as fla
import ml_dtypes
import numpy as np
import pytest
import small_models as small
from broken_files import NASTY, entry, pickled_file, refused, text

from fla_jax.checkpoints import load_checkpoint, load_extras, read_pth, save_checkpoint, write_pth

SIX = {"0": np.arange(6)}


def test_no_flipped_bit_changes_a_value(tmp_path):
    want = {"x": np.arange(40, dtype=np.float32).reshape(5, 8), "y": np.ones(7, ml_dtypes.bfloat16)}
    write_pth(tmp_path / "x.pth", want)
    whole = (tmp_path / "x.pth").read_bytes()
    failed, rng = 0, np.random.default_rng(0)
    places = [i for i, byte in enumerate(whole) if byte not in b"\0Z"] + list(range(0, len(whole), 10))
    for i in places:  # seldom in zeros and padding
        data = bytearray(whole)
        data[i] ^= 1 << rng.integers(8)
        (tmp_path / "x.pth").write_bytes(data)
        try:
            got = read_pth(tmp_path / "x.pth")
        except ValueError as error:
            failed += 1
            assert "x.pth" in str(error) and str(error).isprintable()
        else:
            assert {name: x.tobytes() for name, x in got.items()} == {
                name: x.tobytes() for name, x in want.items()
            }
    assert failed > len(places) // 2


def test_damaged_storage(tmp_path):
    """The message names file, tensor and storage; a tensor's checksum is compared when the tensor is read."""
    model = small.model(7)
    states = {f"blocks.{i}.att.time_state": np.full((2, 16, 16), 7, np.float32) for i in range(2)}
    path = tmp_path / "x.pth"
    save_checkpoint(path, model, small.params(model), extras=states)
    whole = path.read_bytes()
    data = bytearray(whole)
    data[whole.index(states["blocks.0.att.time_state"].tobytes()) + 100] ^= 1
    path.write_bytes(data)
    load_checkpoint(path)
    for read in (read_pth, load_extras):
        message = "'blocks.0.att.time_state' cannot be read: its storage 'archive/data/"
        refused(functools.partial(read, path), path, message, "checksum")
    data = bytearray(whole)
    data[whole.index(read_pth(path_of(tmp_path, whole))["head.weight"].tobytes())] ^= 128
    path.write_bytes(data)
    refused(lambda: load_checkpoint(path), path, "'head.weight' cannot be read: its storage", "checksum")


def path_of(folder, data):
    (folder / "copy.pth").write_bytes(data)
    return folder / "copy.pth"


def test_files_without_checksums(tmp_path):
    """PyTorch writes 0 when torch.utils.serialization.config.save.compute_crc32 is off."""
    path = pickled_file(tmp_path / "x.pth", [entry("x", "0", 6, (6,))], SIX)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            data[info.header_offset + 14 : info.header_offset + 18] = bytes(4)
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 16 : at + 20] = bytes(4)
    path.write_bytes(data)
    np.testing.assert_array_equal(read_pth(path)["x"], np.arange(6))


def test_truncated_anywhere(tmp_path):
    write_pth(tmp_path / "x.pth", {"x": np.ones(3, np.float32)})
    fla.save(tmp_path, {"x": np.ones(3, np.float32)}, "x.safetensors")
    for name, read in (("x.pth", read_pth), ("x.safetensors", load_checkpoint)):
        whole = (tmp_path / name).read_bytes()
        for end in range(len(whole)):
            (tmp_path / name).write_bytes(whole[:end])
            refused(functools.partial(read, tmp_path / name), name)


def test_names_that_are_there_twice(tmp_path):
    x = entry("x", "0", 6, (6,))
    refused(
        lambda: read_pth(pickled_file(tmp_path / "x.pth", [x, entry("y", "0", 6, (3,)), x], SIX)),
        "x.pth",
        "holds 'x' twice",
    )
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(pickled_file(tmp_path / "x.pth", [x], SIX), "a") as archive,
    ):
        archive.writestr("a/data/0", bytes(24))
    refused(lambda: read_pth(tmp_path / "x.pth"), "x.pth", "holds 'a/data/0' twice")
    tensor = '"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    for header, name in (
        (f"{{{tensor},{tensor}}}", "x"),
        (f'{{"__metadata__":{{"a":"","a":""}},{tensor}}}', "a"),
    ):
        data = struct.pack("<Q", len(header)) + header.encode() + bytes(8)
        (tmp_path / "x.safetensors").write_bytes(data)
        refused(
            lambda: load_checkpoint(tmp_path / "x.safetensors"), "x.safetensors", f"it holds '{name}' twice"
        )
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a", "x": "b"}}')
    refused(lambda: load_checkpoint(tmp_path), "model.safetensors.index.json", "it holds 'x' twice")


def test_members_that_lie_over_one_another(tmp_path):
    """A hundred entries of the directory, one part of the file."""
    many = 100
    path = pickled_file(
        tmp_path / "x.pth", [entry(f"x{i}", str(i), 600, (600,)) for i in range(many)], {"0": np.zeros(600)}
    )
    with zipfile.ZipFile(path, "a") as archive:
        info = archive.getinfo("a/data/0")
        for i in range(1, many):
            copy = zipfile.ZipInfo(f"a/data/{i}")
            copy.header_offset, copy.CRC = info.header_offset, info.CRC
            copy.file_size = copy.compress_size = info.file_size
            archive.filelist.append(copy)
            archive._didModify = True
    refused(lambda: read_pth(path), path, "its members have more bytes than the file")


@pytest.mark.parametrize(
    "tensor, message",
    [
        (entry("x", "0", 6, (6,) * 9), "'x' has 9 axes, more than"),
        (entry("x", "0", 6, (2**63,)), "'x' has a shape or strides that are no sizes"),
        (entry("x", "0", 6, (2, 3), (-3, 1)), "'x' has a shape or strides that are no sizes"),
        (entry("x", "0", 6, (2, 3), (2**62, 1)), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (2, 3), offset=1), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (3, 3)), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (2, 3), (4, 1)), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (2, 2**31 - 1), (0, 0)), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (6,), (3, 1)), "'x' has a shape or strides that are no sizes"),
        (entry("x", "../data.pkl", 6, (6,)), "'x' has no values: the file lacks"),
        (entry("x", "0", 6, (6,)).replace(b"Float", b"QUInt8"), "the element type 'torch.QUInt8Storage'"),
        (entry("x", "0", 6, (2**62, 2**62)), "'x' reaches beyond its storage"),
        (entry("x", "0", 6, (1, 6), (2**62, 1)), "'x' "),
        (entry("x", "0", 6, (2**62, 0)), "'x' "),
        (entry("x", "0", 2**62, (2**62,)), "'x' has a storage of 24 bytes instead of"),
        (entry("x", "0", 6, (6,), metadata=b"}" + text("neg") + b"\x88s"), "'x' has metadata"),
        # the product of these would take minutes
        (entry("x", "0", 6, (2**60,) * 200_000, (0,) * 200_000), "'x' has 200000 axes"),
        (entry(NASTY, "0", 6, (7,)), "reaches beyond its storage"),
        (entry("x", NASTY, 6, (6,)), "'x' has no values"),
        (entry(NASTY * 1000, "0", 6, (7,)), "reaches beyond its storage"),
        (entry(NASTY, "0", 6, (6,)) * 2, "twice"),
        (text("x") + b"c\x1b\nsystem\n)R", "its pickle calls '\\x1b.system'"),
        (text("x") + b"(" * 50_000 + b"t" * 50_000, "'x' is no tensor (a tuple)"),
        (text("x") + b"\x8a\xff" + b"\xff" * 254 + b"\x7f", "'x' is no tensor (a int)"),
        (text("x") + b"X\xff\xff\xff\x7f", "its pickle"),
        (b"X\x01\x00\x00\x00\xff" + b"N", "cannot be read"),
    ],
)
def test_hostile_tensors(tmp_path, tensor, message):
    began = time.process_time()
    path = pickled_file(tmp_path / "x.pth", [tensor], SIX)
    refused(lambda: read_pth(path), path, message)
    assert time.process_time() - began < 5


def test_shared_values(tensors, tmp_path, monkeypatch):
    """Parameters take no more memory than their values in the file, but for a head that is the embedding."""
    path, flat = tmp_path / "x.pth", {name: x.reshape(-1) for name, x in tensors.items()}
    sizes = {name: x.size for name, x in flat.items()}

    def save(key, offset=lambda name: 0):
        storages = {name: np.zeros(1) for name in map(key, tensors)}
        for name, x in flat.items():
            end = offset(name) + x.size
            old = storages[key(name)]
            storages[key(name)] = np.concatenate([old, np.zeros(max(0, end - old.size))])
            storages[key(name)][offset(name) : end] = x
        size = lambda name: storages[key(name)].size
        entries = [
            entry(name, key(name), size(name), x.shape, None, offset(name)) for name, x in tensors.items()
        ]
        return pickled_file(path, entries, storages)

    # side by side in one storage, as some trainers have them
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist()))
    _, params = load_checkpoint(save(lambda name: "0", starts.get))
    np.testing.assert_array_equal(
        params["blocks_1"]["att"]["key"]["kernel"], tensors["blocks.1.att.key.weight"].T
    )
    # all over one another: refused before memory is taken, as a small file of a large model must be
    with monkeypatch.context() as patch:
        patch.setattr("fla_jax.checkpoints.tree.read", None)
        everything = functools.partial(load_checkpoint, save(lambda name: "0"))
        refused(everything, path, "' shares its values with other tensors: ")
    # one matrix of all layers and projections
    square = lambda name: "0" if name.endswith(("key.weight", "value.weight")) and ".att." in name else name
    message = refused(lambda: load_checkpoint(save(square)), path, "4 tensors have 4096 bytes together")
    assert ".att.value.weight'" in message or ".att.key.weight'" in message
    # known: the head is the embedding; and that only
    tied = lambda name: "head.weight" if name == "emb.weight" else name
    _, params = load_checkpoint(save(tied))
    np.testing.assert_array_equal(params["emb"]["embedding"], params["head"]["kernel"].T)
    three = lambda name: "head.weight" if name in ("emb.weight", "blocks.0.att.key.weight") else name
    refused(
        lambda: load_checkpoint(save(three)), path, "' shares its values with other tensors: 3 tensors have"
    )
