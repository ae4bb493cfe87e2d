"""What `fla_jax.show_versions` says, also where something is broken."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import pathlib
import subprocess
import sys
import tomllib
from unittest import mock

import jax
import pytest
from packaging.requirements import Requirement

import fla_jax
from fla_jax.pallas.backend import versions

ROOT = pathlib.Path(__file__).parents[1]


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


def installed(**found):
    """Where these versions are installed, None for none."""

    def version(package):
        if found.get(package) is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found[package]

    return mock.patch.object(importlib.metadata, "version", version)


def test_versions_that_compile_no_kernels_are_refused_by_name(capsys):
    for jax_release, releases in versions.SUPPORTED.items():
        for triton in releases:
            with installed(jax=f"{jax_release}.2", triton=f"{triton}.0"):
                assert versions.why_not_compiled() is None
    with installed(jax="0.12.0.1", triton="3.5.1", **{"jax-cuda12-plugin": "0.12.0.1"}):
        reason = versions.why_not_compiled()
        assert lines(capsys)["Triton"] == f"kernels         {reason}"
    assert reason.startswith(
        'Triton 3.5.1 with jax 0.12.0.1 is not supported: run pip install "fla-jax[cuda12]"'
    )
    assert "jax 0.12: Triton 3.6, 3.7, 3.8, 3.9" in reason


@pytest.mark.parametrize("package", ["triton", "jax"])
def test_the_package_asks_for_supported_versions(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = map(Requirement, itertools.chain(project["dependencies"], *extras))
    pins = [one.specifier for one in wanted if one.name == package]
    table = versions.SUPPORTED
    supported = set(table) if package == "jax" else set.intersection(*map(set, table.values()))
    releases = [f"{major}.{minor}" for major in (0, 3) for minor in range(100)]
    assert pins
    for pin in pins:
        assert {release for release in releases if pin.contains(f"{release}.9")} <= supported


def test_the_matrix_has_every_pair():
    command = [sys.executable, ROOT / ".ci" / "matrix", "--list"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    pairs = {(jax_release, triton) for jax_release, all_of in versions.SUPPORTED.items() for triton in all_of}
    assert {(row["jax"], row["triton"]) for row in rows} == pairs
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {f"Programming Language :: Python :: {row['python']}" for row in rows} <= {*project["classifiers"]}
