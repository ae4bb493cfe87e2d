"""How the tests run, chosen before JAX and Triton are imported; processes that tests start inherit it.

Each process takes one GPU. On a CPU Triton kernels run in the interpreter, and XLA compiles fast.
"""

import glob
import importlib.metadata
import os

import pytest

if os.path.exists("/dev/nvidiactl"):
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        gpus = len(glob.glob("/dev/nvidia[0-9]*")) or 1
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker.removeprefix("gw")) % gpus))
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # an unknown flag ends the process
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

from harness import garbage, interpreter

interpreter.patch()


def pytest_collection_finish(session):
    garbage.collect_seldom()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file share a process, where they share what they compile; not on a GPU."""
    if os.path.exists("/dev/nvidiactl"):
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
