"""What `fla_jax.show_versions` says, also where something is broken."""

from __future__ import annotations

import importlib.metadata

import jax

import fla_jax


def lines(capsys):
    assert fla_jax.show_versions() is None
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_versions_devices_and_reasons(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "somewhere")
    said = lines(capsys)
    assert said["fla_jax"] == fla_jax.__version__ and said["jax"] == jax.__version__
    assert said["optax"] == importlib.metadata.version("optax")
    assert said["TRITON_CACHE_DIR"] == "somewhere"
    kinds = {device.device_kind for device in jax.local_devices()}
    assert all(kind in said["devices"] for kind in kinds)
    for op in ("chunk_rwkv6", "fused_recurrent_rwkv6", "chunk_rwkv7", "fused_recurrent_rwkv7"):
        assert said[op].count("(selected)") == 1 and "reference" in said[op]
        if jax.default_backend() == "cpu":
            assert "not pallas: it needs an NVIDIA GPU" in said[op]
    assert all("xla" in said[op] for op in ("rwkv7_keys", "rwkv7_readout", "rwkv6_readout", "norm_shift_mix"))


def test_a_broken_driver_is_said_and_not_raised(capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the driver does not fit")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert lines(capsys)["devices"] == "none: the driver does not fit"
