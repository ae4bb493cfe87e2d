"""The kernels on tokens and heads compile for every kind of GPU, fit it, spill nothing, lower for CUDA."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

SCRIPT = pathlib.Path(__file__).parent / "compile_heads.py"
# Registers of a thread and bytes of shared memory of a block, about a tenth above the worst of the GPUs
# below: what decides how many loads are in flight
MOST = {
    "first_values_kernel": (80, 0),
    "keys_fwd_kernel": (144, 28 << 10),
    "keys_bwd_kernel": (224, 64 << 10),
    "readout_fwd_kernel": (80, 44 << 10),
    "readout_bwd_kernel": (236, 54 << 10),
}


@functools.cache
def found(*options: str) -> dict:
    """Runs compile_heads.py without Triton's interpreter, which the tests' own process may have chosen."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu"
    }
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("USAGES ")]
    assert done.returncode == 0 and lines, (
        f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return json.loads(lines[0].removeprefix("USAGES "))


def test_registers_and_spills():
    usages = found()["usages"]
    assert {u["kernel"] for u in usages} == set(MOST)
    assert {u["call"]["target"] for u in usages} == {80, 90, 120}
    for u in usages:
        registers, shared = MOST[u["kernel"]]
        assert not u["spilled"] and u["registers"] <= registers and u["shared"] <= shared, u


def test_float32_fits_small_gpus():
    """The shared memory of compute capability 8.6, the least of those that are served."""
    usages = found("--targets", "86", "--dtypes", "float32", "--heads", "64")["usages"]
    assert {u["kernel"] for u in usages} == set(MOST)
    for u in usages:
        assert not u["spilled"] and u["shared"] <= 99 << 10, u


def test_programs_call_one_kernel_forward_and_one_backward():
    calls = found()["calls"]
    if None in calls.values():
        pytest.skip("kernels cannot be lowered here: JAX's CUDA plugin or jax-triton is missing")
    assert calls == {"rwkv7_keys": 2, "rwkv7_readout": 2, "rwkv6_readout": 2}
