"""Sharded parameters saved and loaded on eight devices. For test_native.py.

``report(folder)`` returns, for each way to load, the shapes of what JAX was given to put on a device, and
those of the shards that the model has there.
"""

from __future__ import annotations

from unittest import mock

import jax
import numpy as np
import small_models as small

from fla_jax.checkpoints import load_checkpoint, save_checkpoint
from fla_jax.parallel import make_mesh, parameter_shardings

MESHES = {"the same": {"fsdp": 4, "tensor": 2}, "another": {"fsdp": 8}, "one device": None}


def report(folder):
    model = small.model(7, rate_scale=2.0)
    params = small.params(model)
    on = lambda sizes: lambda model: parameter_shardings(model, make_mesh(**sizes))
    sharded = jax.device_put(params, on(MESHES["the same"])(model))
    for path in ("native", "model.pth"):
        save_checkpoint(f"{folder}/{path}", model if path == "native" else small.model(7), sharded)
    found = {}
    for name, sizes in MESHES.items():
        shardings = None if sizes is None else on(sizes)
        loaded, got, put = _recorded(f"{folder}/native", shardings)
        assert loaded.config == model.config
        found[name] = put, _shards(got)
        _compare(got, params, None if shardings is None else shardings(loaded))
    _, got = load_checkpoint(f"{folder}/native", shardings=on(MESHES["another"]), scan_layers=True)
    wanted = parameter_shardings(small.model(7, scan_layers=True), make_mesh(fsdp=8))
    assert jax.tree.map(lambda x, s: x.sharding == s, got, wanted) == jax.tree.map(lambda _: True, wanted)
    loaded, got = load_checkpoint(f"{folder}/model.pth", shardings=on(MESHES["another"]))
    _compare(got, params, parameter_shardings(loaded, make_mesh(fsdp=8)))
    return found


def _recorded(path, shardings):
    put, device_put = [], jax.device_put

    def recorded(x, *args, **options):
        put.extend(np.shape(leaf) for leaf in jax.tree.leaves(x))
        return device_put(x, *args, **options)

    with mock.patch.object(jax, "device_put", recorded):
        model, params = load_checkpoint(path, shardings=shardings)
    return model, params, set(put)


def _shards(params):
    return {shard.data.shape for x in jax.tree.leaves(params) for shard in x.addressable_shards}


def _compare(got, want, shardings):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))
    if shardings is not None:
        assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, got, shardings)))
