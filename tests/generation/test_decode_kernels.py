"""The kernels of a decoded token compile for every kind of GPU and spill nothing; how many there are."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

pytestmark = pytest.mark.one_python
SCRIPT = pathlib.Path(__file__).parent / "compile_decode.py"


@functools.cache
def found(*options: str) -> dict:
    """Runs compile_decode.py without Triton's interpreter, which the tests' own process may have chosen."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(
        command, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("USAGES ")]
    assert done.returncode == 0 and lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[0].removeprefix("USAGES "))


@pytest.mark.parametrize("options", [(), pytest.param(("--all",), marks=pytest.mark.slow)])
def test_nothing_is_spilled(options):
    usages = found(*options)["usages"]
    assert {u["kernel"] for u in usages} == {
        "gemv_kernel", "mix_kernel", "gemm_kernel", "rwkv7_kernel", "rwkv6_kernel", "mix_delta_kernel",
        "sample_survey_kernel", "sample_draw_kernel", "sample_choose_kernel",
    }  # fmt: skip
    assert {u["call"]["target"] for u in usages} >= {90, 120}
    assert not [u for u in usages if u["spilled"] or u["shared"] > 96 << 10]


def test_kernels_of_a_layer():
    """Five for RWKV-7 and seven for RWKV-6 with few rows, one for the head, three to choose; two layers."""
    launches = found()["launches"]
    assert launches["7 2048 1"] == 2 * 5 + 4 and launches["6 2048 1"] == 2 * 7 + 1
    assert launches["7 2048 32"] == 2 * 4 + 3  # mixes by themselves; what reads one of them is the library's
