"""Every chunked Triton kernel compiles for every kind of GPU, fits its shared memory, and spills no more than it is known to."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

HERE = pathlib.Path(__file__).parent
# Bytes that a thread may spill: about a third above the worst of the GPUs below, with Triton 3.6 and 3.9
BUDGET = {
    "rwkv6_fwd_kernel": 160,
    "rwkv6_transfer_kernel": 64,
    "rwkv6_bwd_kernel": 480,
    "rwkv7_fwd_kernel": 544,
    "rwkv7_transfer_kernel": 128,
    "rwkv7_bwd_kernel": 1120,
    "rwkv7_carry_kernel": 256,
    "rwkv7_gradients_kernel": 864,
    "combine_kernel": 64,
    "gather_kernel": 0,
}


@functools.cache
def usages() -> list[dict]:
    """Runs resources.py in a process without Triton's interpreter, which the tests' own process may have chosen."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(HERE / "resources.py"), "--ci", "--json"], env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("USAGES ")]
    assert done.returncode == 0 and lines, f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[0].removeprefix("USAGES "))


def wrong(condition, *shown: str) -> list[str]:
    """The launches that do not satisfy ``condition``, readable."""
    return [f"{u['kernel']} sm_{u['call']['target']} {u['call']['head']} {u['call']['dtype']} {[u[n] for n in shown]}" for u in usages() if not condition(u)]


def test_every_kernel_is_compiled_for_every_kind_of_gpu():
    assert {u["kernel"] for u in usages()} == set(BUDGET)
    assert {u["call"]["target"] for u in usages()} == {80, 89, 90, 100, 120}


def test_shared_memory_fits():
    assert not wrong(lambda u: u["shared"] <= u["limit"], "shared", "limit")


def test_spills_stay_within_the_budget():
    assert not wrong(lambda u: u["spilled"] <= BUDGET[u["kernel"]], "spilled", "registers")


def test_the_assembler_did_not_give_up():
    """Where it does, a thread gets 32 or 40 of its 255 registers and spills the rest."""
    assert not wrong(lambda u: u["registers"] > 40 or not u["spilled"], "registers", "spilled")
