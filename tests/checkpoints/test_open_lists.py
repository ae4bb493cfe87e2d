"""A format and a param map that the library does not have, each added in a few lines from outside."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import small_models as small
from harness.compare import assert_same_bits as same

from fla_jax.checkpoints import (
    FORMATS,
    PARAM_MAPS,
    Format,
    load_checkpoint,
    load_extras,
    read_pth,
    save_checkpoint,
    stored,
    write_pth,
)
from fla_jax.checkpoints.param_maps import OFFICIAL7


def is_npz(path):
    return path.suffix == ".npz"


def read_npz(path):
    return {name: stored(name, x) for name, x in np.load(path).items()}


def write_npz(path, tensors, config_json):
    np.savez(path, **tensors)


NPZ = Format("an .npz file", is_npz, is_npz, read_npz, write_npz, "official")


@pytest.fixture(autouse=True)
def added():
    before = list(FORMATS), list(PARAM_MAPS)
    FORMATS.append(NPZ)
    yield
    FORMATS[:], PARAM_MAPS[:] = before


@pytest.mark.parametrize("version", small.VERSIONS)
def test_format(version, tmp_path):
    """Saved and loaded like the others, with all that is checked for all formats."""
    model = small.model(version)
    params = small.params(model)
    extras = {"blocks.1.att.time_state": np.ones((2, 16, 16), np.float32)}
    save_checkpoint(tmp_path / "a.npz", model, params, extras=extras)
    got, got_params = load_checkpoint(tmp_path / "a.npz", scan_layers=False)
    assert type(got) is type(model) and got.config.head_dim == 16
    same(got_params, params)
    same(load_extras(tmp_path / "a.npz"), extras)
    # the names are the official ones, so the tensors are those of a .pth file
    save_checkpoint(tmp_path / "a.pth", model, params, extras=extras)
    tensors = dict(np.load(tmp_path / "a.npz"))
    same(read_pth(tmp_path / "a.pth"), tensors)
    np.savez(tmp_path / "a.npz", **tensors | {"emb.weight": tensors["emb.weight"].astype(int)})
    with pytest.raises(ValueError, match=r"a\.npz: 'emb.weight' must have a dtype of float16, .*, got int64"):
        load_checkpoint(tmp_path / "a.npz")
    del tensors["emb.weight"]
    np.savez(tmp_path / "a.npz", **tensors)
    with pytest.raises(ValueError, match=r"a\.npz: lacks the tensor 'emb.weight'"):
        load_checkpoint(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"path must name a folder or a .pth file or an .npz file"):
        save_checkpoint(tmp_path / "a.json", model, params)


def test_param_map(tmp_path):
    """RWKV-7 with other names of layers, in known formats."""
    rename = lambda ref: ref._replace(name=ref.name.replace("blocks.", "h."))
    refs = {path: rename(ref) for path, ref in OFFICIAL7.refs.items()}
    layer = r"h\.([0-9]+)\."
    mine = dataclasses.replace(
        OFFICIAL7, name="mine", scheme="mine", mark=layer + r"att\.r_k", layer=layer, refs=refs, extras={}
    )
    model = small.model(7)
    params = small.params(model)
    save_checkpoint(tmp_path / "a.pth", model, params)
    renamed = {re.sub(r"^blocks\.", "h.", name): x for name, x in read_pth(tmp_path / "a.pth").items()}
    write_pth(tmp_path / "b.pth", renamed)
    with pytest.raises(ValueError, match="its names are not those of a known model"):
        load_checkpoint(tmp_path / "b.pth")
    PARAM_MAPS.append(mine)
    same(load_checkpoint(tmp_path / "b.pth")[1], params)
    # a format that is written with its scheme
    FORMATS.append(dataclasses.replace(NPZ, scheme="mine"))
    save_checkpoint(tmp_path / "b.npz", model, params)
    same(dict(np.load(tmp_path / "b.npz")), dict(renamed))
    lacking = {path: ref for path, ref in refs.items() if path != "head/kernel"}
    PARAM_MAPS.append(dataclasses.replace(mine, refs=lacking))
    with pytest.raises(KeyError, match="the param map 'mine' lacks head/kernel"):
        save_checkpoint(tmp_path / "c.npz", model, params)
