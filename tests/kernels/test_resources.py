"""Every Triton kernel compiles for every kind of GPU, fits its shared memory, and spills as stated.

README's speeds were measured with Triton 3.6. ``python -m harness.resources --record`` writes what the
installed Triton spills into spills.json; where that is more than with 3.6, find out why before committing it.
"""

import functools
import json

import pytest
from harness import processes, resources
from harness.lowering import Usage

from fla_jax.core.gpu import GPUS

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

pytestmark = pytest.mark.one_python
RWKV6 = {f"rwkv6_{name}_kernel" for name in ("fwd", "chunk_state", "bwd")}
RWKV7 = {f"rwkv7_{name}_kernel" for name in ("chunk_A", "fwd", "chunk_state", "bwd", "bwd_dh", "bwd_grads")}
SPLITS = {"state_passing_kernel", "state_grad_kernel", "add_entry_output_kernel"}
# registers of a thread and bytes of shared memory of a block, a tenth above the worst GPU: they decide how
# many loads are in flight
HEADS = {
    "first_values_kernel": (80, 0),
    "keys_fwd_kernel": (144, 28 << 10),
    "keys_bwd_kernel": (224, 64 << 10),
    "readout_fwd_kernel": (80, 44 << 10),
    "readout_bwd_kernel": (236, 54 << 10),
}
MIXES = {"mix_fwd_kernel", "mix_bwd_kernel", "statistics_kernel", "norm_bwd_kernel"}
DECODE = {
    "gemv_kernel", "mix_kernel", "gemm_kernel", "rwkv7_kernel", "rwkv6_kernel", "mix_delta_kernel",
    "sample_survey_kernel", "sample_draw_kernel", "sample_choose_kernel",
}  # fmt: skip


@functools.cache
def started(name: str):
    return processes.compilers().submit(resources.usages, name)


def counted(*names: str) -> dict[str, tuple[int, list[Usage]]]:
    futures = {name: started(name) for name in names}
    found = {name: future.result(timeout=900) for name, future in futures.items()}
    for reason in found.values():
        if isinstance(reason, str):
            pytest.skip(f"kernels cannot be lowered here: {reason}")
    return found


def used(*names: str) -> dict[str, list[Usage]]:
    return {name: found for name, (_, found) in counted(*names).items()}


def kernels(found: dict[str, list[Usage]]) -> dict[str, set[int]]:
    """The GPUs that each kernel was compiled for."""
    by = {u.kernel: set() for all_used in found.values() for u in all_used}
    for all_used in found.values():
        for u in all_used:
            by[u.kernel].add(u.capability)
    return by


def too_much(found: dict[str, list[Usage]]) -> list[Usage]:
    return [u for one in found.values() for u in one if u.spilled or u.shared > GPUS[u.capability].smem]


def test_recurrences():
    """Where the assembler gives up, a thread gets 32 or 40 of its 255 registers and spills the rest."""
    found = used(*resources.RECURRENCES)
    by = kernels(found)
    assert set(by) == RWKV6 | RWKV7 | SPLITS | {"cotangent_scale_kernel"}
    assert set().union(*by.values()) == {80, 89, 90, 100, 120}
    triton, stated = resources.release(), json.loads(resources.STATED.read_text())
    assert triton in stated, (
        f"spills.json states what kernels spill with Triton {', '.join(stated)}, but {triton} is installed: "
        "see whether kernels are as fast with it, then run python -m harness.resources --record"
    )
    for name, one in found.items():
        for u in one:
            allowed = stated[triton].get(resources.stated_name(name, u.kernel), 0)
            assert u.spilled <= allowed, (name, u, f"spills.json states {allowed} bytes")
            assert u.shared <= GPUS[u.capability].smem and not (u.registers <= 40 and u.spilled), (name, u)


def test_ops_on_heads():
    found = used(*resources.HEADS)
    assert kernels(found) == {name: {80, 86, 90, 120} for name in HEADS} and not too_much(found)
    for name, one in found.items():
        for u in one if "bfloat16" in name else ():
            registers, shared = HEADS[u.kernel]
            assert u.registers <= registers and u.shared <= shared, u


def test_norm_shift_mix():
    found = used(*resources.MIXES)
    by = kernels(found)
    assert set(by) == MIXES and by["mix_fwd_kernel"] == {80, 90, 120} and not too_much(found)
    # a pass is one kernel, and two where tokens go by tiles of channels
    assert {len(one) for one in found.values()} == {2, 4}
    # two programs of the backward of 1024 channels share the registers of a multiprocessor of Hopper's
    for name, one in found.items():
        for u in one if "sm_90" in name and " 1024 " in name else ():
            assert u.kernel != "mix_bwd_kernel" or u.registers * 32 * u.warps <= 65536 // 2, u


@pytest.mark.parametrize(
    "names",
    [resources.DECODES, pytest.param(resources.EVERY_DECODE, marks=pytest.mark.slow)],
    ids=len,
)
def test_decoding(names):
    found = used(*names)
    by = kernels(found)
    assert set(by) == DECODE and set().union(*by.values()) >= {90, 120}
    assert not [u for one in found.values() for u in one if u.spilled or u.shared > 96 << 10]


def test_kernels_of_a_decoded_token():
    """Of two layers: five for RWKV-7 and seven for RWKV-6 with a small batch, one for the head, three to
    choose; with a larger one mixes alone, the library multiplies.
    """
    counts = {name.split(" ", 2)[2]: count for name, (count, _) in counted(*resources.DECODES).items()}
    assert counts["rwkv7 2048 1 []"] == 2 * 5 + 4 and counts["rwkv6 2048 1 []"] == 2 * 7 + 1
    assert counts["rwkv7 2048 32 []"] == 2 * 4 + 3
