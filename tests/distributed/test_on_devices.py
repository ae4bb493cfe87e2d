"""What the programs `*_run.py` of this folder find on eight fake devices; each says what it compares."""

import pytest
from harness import processes, tiers

OPTIMIZERS = processes.load("distributed/optimizers_run.py").OPTIMIZERS


def wrong(found, most):
    return {name: x for name, x in found.items() if isinstance(x, str) or not x < most}


@pytest.mark.parametrize("version", tiers.first([7, 6]))
def test_models_with_explicit_axes(version):
    found = processes.report("distributed/explicit_run.py", version)
    assert len(found) == 22 and not wrong(found, 1e-5), found
    assert found["numbers"] < 1e-11


@pytest.mark.parametrize("version", tiers.first([6, 7]))
@pytest.mark.parametrize("implementation", tiers.first(["triton", "xla"]))
def test_shard_map(version, implementation):
    found = processes.report("distributed/shard_map_run.py", version, implementation)
    assert len(found) == (2 if implementation == "triton" else 14 if version == 6 else 15)
    assert not wrong(found, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.one_python)])
def test_uses(version):
    found = processes.report("distributed/uses_run.py", version)
    assert len(found) == 6 and not wrong(found, 1e-5), found
    assert found["tuned, float64"] < 1e-9
    assert max(found[f"in shard_map, {name}, float64"] for name in ("checked", "unchecked")) < 1e-11


@pytest.mark.parametrize("version", tiers.first([7, 6], 1, (tiers.SLOW, tiers.ONE_PYTHON)))
def test_decoding(version):
    found = processes.report("distributed/decoding_run.py", version)
    want, got, slots = found["tokens"]
    assert got == want and slots == want
    assert found["state"] < 1e-5
    assert found["implementation"] == "model"
    assert "the parameters lie on several devices" in found["refused"]


@pytest.mark.parametrize("name", tiers.first(OPTIMIZERS, 2, (tiers.SLOW, tiers.ONE_PYTHON)))
def test_optimizer(name):
    found = processes.report("distributed/optimizers_run.py", name)
    assert len(found) == 4
    for mesh in found.values():
        assert mesh["error"] < 1e-13 and mesh["moved"] > 1e-4, found
    # what mirrors a parameter is sharded
    stored = {mesh: numbers["stored"] for mesh, numbers in found.items()}
    sharded = max(stored.pop("fsdp"), stored.pop("fsdp and tensor, explicit"))
    assert sharded < stored["data"] == stored["one device"], found


@pytest.mark.slow
def test_losses():
    found = processes.report("distributed/losses_run.py")
    assert len(found["shard_map"]) == 3 and {*found["accumulated"]} == {"auto", "explicit"}
    assert not wrong(found["shard_map"] | found["accumulated"], 1e-12), found
    assert len(found["tuned"]) == 2 and not wrong(found["tuned"], 1e-11), found
    assert len(found["dropped"]) == 6 and not wrong(found["dropped"], 1e-11), found
    for error, spec in found["batch"].values():
        assert error < 1e-12 and spec[0] == "data"


@pytest.mark.slow
@pytest.mark.parametrize("version", [7, pytest.param(6, marks=pytest.mark.one_python)])
def test_tied_embeddings(version):
    found = processes.report("distributed/tied_run.py", version)
    assert len(found) == 6 and not wrong(found, 1e-5), found


@pytest.mark.slow
def test_fp8():
    """A scale follows from the largest value on all devices."""
    found = processes.report("distributed/fp8_run.py")
    assert len(found) == 3 and not wrong(found, 1e-5), found
