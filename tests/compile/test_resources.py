"""Every chunked Triton kernel compiles for every kind of GPU, fits its shared memory, spills as stated.

README's speeds were measured with Triton 3.6. ``python tests/compile/resources.py --ci --record`` writes what
the installed Triton spills into spills.json; where that is more than with 3.6, see why before committing it.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

pytestmark = pytest.mark.one_python

HERE = pathlib.Path(__file__).parent
KERNELS = {
    *(f"rwkv6_{name}_kernel" for name in ("fwd", "chunk_state", "bwd")),
    *(f"rwkv7_{name}_kernel" for name in ("chunk_A", "fwd", "chunk_state", "bwd", "bwd_dh", "bwd_grads")),
    *("cotangent_scale_kernel", "state_passing_kernel", "state_grad_kernel", "add_entry_output_kernel"),
}


@functools.cache
def report() -> dict:
    """Runs resources.py in a process without Triton's interpreter, which the tests' own may have chosen."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "resources.py"), "--ci", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if done.returncode or not lines:  # returned, not raised: a cache keeps no exceptions
        return {"error": f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"}
    return json.loads(lines[0].removeprefix("REPORT "))


def usages() -> list[dict]:
    assert "error" not in report(), report()["error"]
    return report()["usages"]


def test_every_kernel_is_compiled_for_every_kind_of_gpu():
    assert {u["kernel"] for u in usages()} == KERNELS
    assert {u["call"]["target"] for u in usages()} == {80, 89, 90, 100, 120}


def test_shared_memory_fits():
    assert not {u["name"]: (u["shared"], u["limit"]) for u in usages() if u["shared"] > u["limit"]}


def test_kernels_spill_what_is_stated():
    found, triton = usages(), report()["triton"]
    stated = json.loads((HERE / "spills.json").read_text())
    assert triton in stated, (
        f"spills.json states what kernels spill with Triton {', '.join(stated)}, but {triton} is installed: "
        "see whether kernels are as fast with it, then run resources.py --ci --record"
    )
    more = {
        u["name"]: f"{u['spilled']} bytes, stated {stated[triton].get(u['name'], 0)}"
        for u in found
        if u["spilled"] > stated[triton].get(u["name"], 0)
    }
    assert not more, f"with Triton {triton} a thread spills more than spills.json states: {more}"


def test_the_assembler_did_not_give_up():
    """Where it does, a thread gets 32 or 40 of its 255 registers and spills the rest."""
    assert not {u["name"]: u["spilled"] for u in usages() if u["registers"] <= 40 and u["spilled"]}
