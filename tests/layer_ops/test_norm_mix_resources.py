"""The kernels of norm, shift and mixes compile for every kind of GPU and spill nothing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

HERE = pathlib.Path(__file__).parent
KERNELS = {"mix_fwd_kernel", "mix_bwd_kernel", "statistics_kernel", "norm_bwd_kernel"}


@pytest.mark.one_python
def test_resources():
    """In a process without Triton's interpreter, which the tests' own process may have chosen."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu"
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / "resources.py"), "--ci", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("USAGES ")]
    assert done.returncode == 0 and lines, (
        f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    usages = json.loads(lines[0].removeprefix("USAGES "))
    assert {u["kernel"] for u in usages} == KERNELS and {u["call"]["target"] for u in usages} == {80, 90, 120}
    assert len(usages) == 14  # a pass is one kernel, and two where tokens go by tiles of channels
    wrong = [u for u in usages if u["spilled"] or u["shared"] > u["limit"]]
    assert not wrong, wrong
    # two programs of the backward of 1024 channels share the registers of a multiprocessor of Hopper's
    backward = [u for u in usages if u["kernel"] == "mix_bwd_kernel" and u["call"]["target"] == 90]
    two = [u for u in backward if u["call"]["head"] == 1024]
    assert all(u["registers"] * 32 * u["num_warps"] <= 65536 // 2 for u in two), two
