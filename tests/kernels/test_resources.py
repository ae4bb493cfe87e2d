"""Every Triton kernel compiles for every kind of GPU, fits its shared memory, and spills as stated.

README's speeds were measured with Triton 3.6. ``python -m harness.resources --record`` writes what the
installed Triton spills into spills.json; where that is more than with 3.6, find out why before committing it.
"""

import functools
import json

import pytest
from harness import cases, processes, resources
from harness.lowering import Usage

from fla_jax.core.gpu import GPUS

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

pytestmark = pytest.mark.one_python
RWKV6 = {f"rwkv6_{name}_kernel" for name in ("fwd", "chunk_state", "bwd")}
RWKV7 = {f"rwkv7_{name}_kernel" for name in ("chunk_A", "fwd", "chunk_state", "bwd", "bwd_dh", "bwd_grads")}
SCANS = {"rwkv6_scan_kernel", "rwkv7_scan_kernel", "state_sums_kernel", "scores_kernel"}
SCANS |= {"rwkv6_pair_grads_kernel", "rwkv7_pair_grads_kernel"}
SPLITS = {"state_passing_kernel", "state_grad_kernel", "add_entry_output_kernel"}
# registers of a thread and bytes of shared memory of a block, a tenth above the worst GPU: they decide how
# many loads are in flight
HEADS = {
    "first_values_kernel": (80, 0),
    "keys_fwd_kernel": (144, 28 << 10),
    "keys_bwd_kernel": (236, 64 << 10),  # 226 with Triton 3.9
    "readout_fwd_kernel": (80, 44 << 10),
    "readout_bwd_kernel": (248, 54 << 10),  # 244 with Triton 3.7
}
MIXES = {"mix_fwd_kernel", "mix_bwd_kernel", "statistics_kernel", "norm_bwd_kernel"}
DECODE = {
    "gemv_kernel", "quantised_gemv_kernel", "mix_kernel", "gemm_kernel", "split_k_sum_kernel",
    "mix_delta_kernel", "low_rank_kernel", "rwkv7_kernel", "rwkv6_kernel",
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


def check_spills(names: list[str]) -> dict[str, set[int]]:
    """Where the assembler gives up, a thread gets 32 or 40 of its 255 registers and spills the rest."""
    found, triton, stated = used(*names), resources.release(), json.loads(resources.STATED.read_text())
    assert triton in stated, (
        f"spills.json states what kernels spill with Triton {', '.join(stated)}, but {triton} is installed: "
        "see whether kernels are as fast with it, then run python -m harness.resources --record"
    )
    for name, one in found.items():
        for u in one:
            allowed = stated[triton].get(resources.stated_name(name, u.kernel), 0)
            assert u.spilled <= allowed, (name, u, f"spills.json states {allowed} bytes")
            assert u.shared <= GPUS[u.capability].smem and not (u.registers <= 40 and u.spilled), (name, u)
    return kernels(found)


@pytest.mark.parametrize("op", cases.OPS)
def test_a_recurrence(op):
    """Of the GPU that README's speeds were measured on."""
    assert f"{op}_bwd_kernel" in check_spills([f"{op} sm_90 64 bfloat16 bounded large"])


@pytest.mark.slow
def test_recurrences():
    by = check_spills(resources.RECURRENCES)
    assert set(by) == RWKV6 | RWKV7 | SPLITS | SCANS | {"cotangent_scale_kernel"}
    assert set().union(*by.values()) == {80, 89, 90, 100, 120}


def check_heads(names: list[str]) -> dict[str, set[int]]:
    found = used(*names)
    assert not too_much(found)
    for name, one in found.items():
        for u in one if "bfloat16" in name else ():
            registers, shared = HEADS[u.kernel]
            assert u.registers <= registers and u.shared <= shared, u
    return kernels(found)


def test_ops_on_heads():
    names = [name for name in resources.HEADS if "sm_90" in name]
    assert check_heads(names) == {name: {90} for name in HEADS}


@pytest.mark.slow
def test_ops_on_heads_on_all_gpus():
    assert check_heads(resources.HEADS) == {name: {80, 86, 90, 120} for name in HEADS}


@pytest.mark.slow
def test_norm_shift_mix():
    found = used(*resources.MIXES)
    by = kernels(found)
    assert set(by) == MIXES and by["mix_fwd_kernel"] == {80, 90, 120} and not too_much(found)
    # two programs of the backward of 1024 channels share the registers of a multiprocessor of Hopper's
    for name, one in found.items():
        for u in one if "sm_90" in name and " 1024 " in name else ():
            assert u.kernel != "mix_bwd_kernel" or u.registers * 32 * u.warps <= 65536 // 2, u


def test_norm_shift_mix_on_one_gpu():
    """A pass is one kernel, and two where tokens go by tiles of channels."""
    whole, tiles = (f"norm_shift_mix sm_90 six {C} bfloat16" for C in (1024, 8192))
    counts = {
        name: (count, {u.kernel for u in used}) for name, (count, used) in counted(whole, tiles).items()
    }
    assert counts[whole] == (2, {"mix_fwd_kernel", "mix_bwd_kernel"}) and counts[tiles] == (4, MIXES)


@pytest.mark.slow
@pytest.mark.parametrize("names", [resources.DECODES, resources.EVERY_DECODE], ids=len)
def test_decoding(names):
    found = used(*names)
    by = kernels(found)
    assert set(by) == DECODE and set().union(*by.values()) >= {90, 120}
    assert not [u for one in found.values() for u in one if u.spilled or u.shared > 96 << 10]


def test_kernels_of_a_decoded_token():
    """Of two layers: six for RWKV-7 and seven for RWKV-6 with one token, one for the head, three to choose.
    With more tokens mixes and what adds split sums are alone; from 17 on the library multiplies.
    """
    counts = {name.split(" ", 2)[2]: count for name, (count, _) in counted(*resources.DECODES).items()}
    assert counts["rwkv7 2048 1 []"] == counts["rwkv7 2048 1 [(8, 128)]"] == 2 * 6 + 4
    assert counts["rwkv6 2048 1 []"] == 2 * 7 + 1
    assert counts["rwkv7 2048 32 []"] == counts["rwkv7 1024 256 []"] == 2 * 4 + 3
    assert counts["rwkv7 2048 32 [(8, 128)]"] == 2 * 9 + 4
