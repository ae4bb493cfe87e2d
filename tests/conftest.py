"""How the tests run on a CPU, chosen before JAX and Triton are imported; processes that tests start inherit
it.

Triton kernels run in Triton's interpreter. XLA compiles fast rather than well, a program in one piece: the
suite compiles thousands of small programs and runs each once.
"""

import gc
import importlib.metadata
import os

import pytest

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # an unknown flag ends the process
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

import interpreter

interpreter.patch_once()


def pytest_collection_finish(session):
    """Tracing makes many objects that live long: looking through all of them took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file run in one process, where they share what they make and compile; files in their
    order, whose last ones are short, so that no process waits long for another at the end.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)
