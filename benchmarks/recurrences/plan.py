"""The measurements of ops.py, in the order in which they run, and the time of their memory traffic alone."""

from __future__ import annotations

import dataclasses

from peers.ops import IMPLEMENTATIONS, Task

BANDWIDTH = {"NVIDIA H200": 4.3e12}  # bytes a second, read and written, of a device copy
OPS = ("chunk_rwkv7", "chunk_rwkv6", "fused_recurrent_rwkv7", "fused_recurrent_rwkv6")
WIDE, LONG, SMALL, BIG = (
    (8, 4096, 64, 64, 64),
    (1, 32768, 64, 64, 64),
    (1, 4096, 32, 64, 64),
    (4, 8192, 32, 128, 128),
)
DECODE, QUICK, QUICK_DECODE = (512, 1, 64, 64, 64), (1, 64, 2, 64, 64), (2, 1, 2, 64, 64)
PASSES = ("fwd+bwd", "fwd")
Job = tuple[str, Task]  # key of IMPLEMENTATIONS, task
Shape = tuple[int, int, int, int, int]


def chunk(version: int, shapes: list[Shape], *decays: str) -> list[Task]:
    op = f"chunk_rwkv{version}"
    return [Task(op, "chunk", shape, p, decay) for shape in shapes for decay in decays for p in PASSES]


def in_float32(tasks: list[Task]) -> list[Task]:
    return [dataclasses.replace(task, dtype="float32") for task in tasks]


def in_tf32(tasks: list[Task]) -> list[Task]:
    made = in_float32([task for task in tasks if task.backward])
    return [dataclasses.replace(task, precision="tensorfloat32") for task in made]


def recurrent(version: int, shape: Shape, *passes: str) -> list[Task]:
    return [Task(f"fused_recurrent_rwkv{version}", "recurrent", shape, p, "any-weak") for p in passes]


def decode(version: int, shape: Shape) -> list[Task]:
    return [Task(f"fused_recurrent_rwkv{version}", "decode", shape, "fwd", "any-weak")]


def plan(quick: bool) -> tuple[list[Job], list[Job]]:
    """All jobs in order, and the jobs of ours that run again at the end."""
    wide, every, three, step = WIDE, [WIDE, LONG, SMALL, BIG], [WIDE, LONG, SMALL], DECODE
    if quick:
        wide, every, three, step = QUICK, [QUICK], [QUICK], QUICK_DECODE
    others = [s for s in every if s != wide]
    large, small = [s for s in every if s[3] != 64], [s for s in every if s[3] == 64]
    jobs: list[Job] = []

    def add(key: str, *tasks: list[Task]) -> None:
        jobs.extend((key, task) for some in tasks for task in some)

    add("ours", chunk(7, [wide], "bounded", "any-weak", "any-strong"), chunk(7, others, "bounded"))
    add("ours", [task for task in chunk(7, others, "any-strong") if task.backward])
    add("ours", in_float32(chunk(7, [wide], "bounded", "any-strong") + chunk(7, large, "bounded")))
    add("wind", chunk(7, small, "bounded"), chunk(7, large, "bounded"))
    add("jla bounded", chunk(7, every, "bounded"))
    add("jla", chunk(7, every, "any-weak"), chunk(7, [wide], "any-strong"))
    add("rwkv-ops triton", chunk(7, [wide], "any-weak", "any-strong"))
    add("rwkv-ops cuda", chunk(7, small, "any-weak"))
    add("ours", chunk(6, [wide], "any-strong", "any-weak", "bounded"))
    add("ours", chunk(6, [s for s in three if s != wide], "any-strong"))
    add("ours", in_float32(chunk(6, [wide], "bounded", "any-strong")))
    add("ours", in_tf32(chunk(7, [wide], "bounded", "any-strong") + chunk(7, large, "bounded")))
    add("ours", in_tf32(chunk(6, [wide], "bounded", "any-strong")))
    add("jla 6", chunk(6, three, "any-strong"), chunk(6, [wide], "any-weak"))
    add("rwkv-ops cuda 6", chunk(6, [s for s in three if s[1] <= 4096], "any-strong"))
    add("fla 6", chunk(6, three, "any-strong"), chunk(6, [wide], "any-weak"))
    add("fla 6 chunk 64", chunk(6, three, "any-strong"))
    add("ours", recurrent(7, wide, *PASSES), recurrent(6, wide, *PASSES))
    for version in (7, 6):
        for key in ("ours", "ours reference", "ours xla", "copy"):
            add(key, decode(version, step))
    add("wind backstepping", recurrent(7, wide, *PASSES))
    add("fla recurrent 6", recurrent(6, wide, *PASSES), decode(6, step))
    add("fla recurrent 7", recurrent(7, wide, "fwd"), decode(7, step))
    add("fla 7", chunk(7, every, "bounded"))
    add("fla 7 layer", chunk(7, [wide], "bounded"))
    add("fla 7 default", chunk(7, [wide], "any-weak", "any-strong"))
    add("fla 7 safe", chunk(7, [wide], "any-weak"))
    if quick:  # less to compile
        return [
            job for job in jobs if (job[0], job[1].form, job[1].decay) != ("ours", "chunk", "any-weak")
        ], []
    again = []
    for key, task in jobs:
        main = task.decay == ("bounded" if task.version == 7 else "any-strong") and task.dtype == "bfloat16"
        if key == "ours" and task.form == "chunk" and task.backward and main:
            again.append((key, task))
    return jobs, again


def group(job: Job) -> str:
    """The process of a job: one an op of ours; one a head size if extensions are compiled for one size."""
    key, task = job
    implementation = IMPLEMENTATIONS[key]
    if implementation.group == "fla_jax":
        return f"fla_jax {task.op if task.form == 'chunk' else 'recurrent'}"
    return implementation.group + (f" D{task.shape[3]}" if implementation.prepare else "")


def roofline_ms(task: Task, device: str) -> float | None:
    """Milliseconds in which a copy moves the bytes that must move; None without a bandwidth of the device.

    Forward: inputs, o, a state read and one written. Backward: inputs, do, gradients, three states.
    """
    B, T, H, K, V = task.shape
    keys, state = {7: 5, 6: 3}[task.version], 4 * B * H * K * V
    size = {"bfloat16": 2, "float32": 4}[task.dtype]
    inputs, output = size * B * T * H * (keys * K + V), size * B * T * H * V
    moved = inputs + output + 2 * state
    if task.backward:
        moved += 2 * inputs + output + 3 * state
    return None if device not in BANDWIDTH else 1e3 * moved / BANDWIDTH[device]
