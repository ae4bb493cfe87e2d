"""Broken and harmful files in PyTorch's format: errors that name the file, and nothing is run."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
from broken_files import PICKLE, pytorch_file

from fla_jax.checkpoints import load_checkpoint, read_pth, write_pth


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
    path = pytorch_file(tmp_path / "harm.pth", data)
    for read in (read_pth, load_checkpoint):
        with pytest.raises(ValueError, match=r"harm\.pth cannot be read: its pickle"):
            read(path)
    assert not marker.exists()
    with contextlib.suppress(Exception):  # whatever comes after the deed
        pickle.loads(data)
    assert marker.exists(), "the payload is a dud"


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\x80\x02X\x01\x00\x00\x00x.", "must hold a dict of tensors, got a str"),
        (b"\x80\x02}X\x09\x00\x00\x00_strategyX\x08\x00\x00\x00cpu fp32s.", "converted for one strategy"),
        (
            b"\x80\x02}X\x05\x00\x00\x00_stepG?\xf0\x00\x00\x00\x00\x00\x00s.",
            "'_step' is no tensor (a float)",
        ),
        (b"\x80\x02}K\x01K\x01s.", "a name of type int"),
        (b"\x80\x02}", "pickle exhausted"),
        (b"\x80\x02t.", "its pickle is broken"),
        (b"\x80\x02h\x07.", "its pickle is broken"),
        (b"(" * 100000 + b".", "its pickle is broken"),
        # nested deeper than Python recurses, and 2^200 elements if written out
        (b"\x80\x02)" + b"\x85" * 100000 + b".", "must hold a dict of tensors, got a tuple"),
        (b"\x80\x02()q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"t.", "must hold a dict of tensors"),
        (b"\x80\x02}()q\x00" + b"h\x00h\x00\x86q\x00" * 200 + b"tK\x01s.", "a name of type tuple"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "calls 'os.system', which no dict of tensors"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93)}\x92.", "uses the opcode NEWOBJ_EX"),
        (b"\x80\x02cfla_jax.checkpoints\nread_pth\n}b0}.", "sets attributes of something that is no dict"),
    ],
)
def test_broken_pickles(tmp_path, data, message):
    path = pytorch_file(tmp_path / "broken.pth", data)
    with pytest.raises(ValueError, match=r"broken\.pth") as error:
        read_pth(path)
    assert message in str(error.value) and len(str(error.value)) < 1000


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
    pytorch_file(path, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x\.pth cannot be read: is compressed"):
        read_pth(path)
    pytorch_file(path, byteorder="big")
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
        pytorch_file(tmp_path / "x.pth", bytes(data))
        try:
            for x in read_pth(tmp_path / "x.pth").values():
                assert x.size <= 6 and x.tobytes() is not None
        except ValueError as error:
            failed += 1
            assert "x.pth" in str(error) and str(error).isprintable()
    assert 300 < failed < 1000
