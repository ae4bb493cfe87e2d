"""Jitted public ops lower for CUDA without a GPU and call each Triton kernel as often as they should.

Needs jax-triton and JAX's CUDA plugin of the same version as jaxlib:
``pip install --no-deps jax-cuda13-plugin==<version of jax>`` (8 MB, only lowers). It is no part of an extra:
with the 380 MB that pip would install along, JAX tries to start CUDA in every process and complains.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

HERE = pathlib.Path(__file__).parent
# calls of the forward kernel in the program of a gradient: a scan over layers has one in its body
FORWARDS = {
    "gradient": 1,
    "checkpoint": 2,
    "checkpoint with the policy": 1,
    "scan": 1,
    "scan of checkpoint": 2,
    "scan of checkpoint with the policy": 1,
    "few rows and heads": 1,
}


@functools.cache
def _lowered() -> dict:
    """Runs lower.py in a process without Triton's interpreter, which the tests' own process may have
    chosen.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "lower.py")]
    with tempfile.TemporaryDirectory() as folder:  # kernels are compiled here, whatever was compiled before
        env |= dict(JAX_PLATFORMS="cpu", PYTHONPATH=path, TRITON_CACHE_DIR=folder)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    # returned, not raised: a cache keeps no exceptions, and every test would run it again
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"}
    return json.loads(lines[0].removeprefix("REPORT "))


def report() -> dict:
    assert "error" not in _lowered(), _lowered()["error"]
    if "skip" in _lowered():
        pytest.skip(f"kernels cannot be lowered here: {_lowered()['skip']}")
    return _lowered()


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
def test_a_value_runs_the_forward_kernel_once(op):
    assert report()[op]["value"] == {f"{op}_fwd_kernel": 1}


@pytest.mark.parametrize("op, last", [("rwkv6", "rwkv6_fwd_kernel"), ("rwkv7", "add_entry_output_kernel")])
def test_a_value_of_few_rows_and_heads(op, last):
    """RWKV-7's are walked once."""
    want = {f"{op}_chunk_state_kernel": 1, "state_passing_kernel": 1, last: 1}
    assert report()[op]["value of few rows and heads"] == want


@pytest.mark.parametrize("op", ["rwkv6", "rwkv7"])
@pytest.mark.parametrize("name", FORWARDS)
def test_gradients(op, name):
    """The policy keeps what the forward kernel made: without it, `jax.checkpoint` runs that kernel again."""
    want = {f"{op}_fwd_kernel": FORWARDS[name], f"{op}_bwd_kernel": 1}
    # cut into stretches: what they do to the state, then the states between them, forward and backward
    if name.startswith("few"):
        want |= {f"{op}_chunk_state_kernel": 1, "state_passing_kernel": 2, "state_grad_kernel": 1}
    assert report()[op][name] == want


def test_large_heads_take_two_backward_kernels():
    assert report()["rwkv7"]["large heads"] == {
        "rwkv7_fwd_kernel": 1,
        "rwkv7_bwd_dh_kernel": 1,
        "rwkv7_bwd_grads_kernel": 1,
    }


def test_gradients_of_the_recurrent_form_come_from_the_chunked_kernel():
    """Where all of them have 16 bits."""
    want = {"cotangent_scale_kernel": 1, "rwkv7_bwd_grads_kernel": 1}
    assert report()["rwkv7"]["token by token"] == want
    assert report()["rwkv7"]["token by token, float32 decays"] == {}


@pytest.mark.parametrize("op, results", [("rwkv6", [0, 1, 2, 3]), ("rwkv7", [0, 2, 4, 5])])
def test_gradients_take_over_the_memory_of_states(op, results):
    """A state of 64 values in four gradients, one of 32 in two; none where the last chunk is not whole, so
    that its state does not fit there.
    """
    four, two, none = report()["taken over"][op]
    assert none["operands"] == none["results"] == []
    for found, n in ((four, 4), (two, 2)):
        first = found["operands"][0]
        assert found["operands"] == list(range(first, first + n))
        assert found["results"] == results[:n]


def test_large_heads_take_over_the_memory_of_gradients_of_states():
    """dr, dk, da, db lie where those of the states were, one for two chunks; not where these are odd."""
    whole, odd = report()["taken over, large"]
    assert odd["operands"] == []
    assert len(whole["operands"]) == 4
    assert whole["results"] == [0, 2, 3, 4]


def test_kernels_are_compiled_once():
    """A later process reads what an earlier one compiled, but for another kind of GPU."""
    assert report()["kept"] == {"again": True, "missed": True, "targets": [["sm_80"], ["sm_90a"]]}


def test_kernels_can_be_recorded():
    """They have the name that XLA can put into CUDA graphs. It fuses such calls with slices, and forgets that
    some results take over the memory of operands: those must come from a barrier.
    """
    found = report()["recorded"]
    assert found["names"] == ['"triton_kernel_call_ffi"']
    assert found["taken"] == 4 + 1  # a state of 16 keys lies in one gradient
    assert found["makers"] == ["stablehlo.optimization_barrier"]
