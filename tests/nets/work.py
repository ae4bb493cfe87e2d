"""The processes that run the nets: each net has its own environment, chosen before JAX starts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent
Task = tuple[str, str, "list[str] | None", bool]


def environment(net: str) -> dict[str, str]:
    """Of the processes of a net, before JAX starts there."""
    here = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    if net == "ptx":
        return here | {"JAX_PLATFORMS": "cpu"}
    if net == "hlo":
        return here | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    # XLA compiles fast rather than well; one thread, so that NumPy's products have one order of sums
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    if net == "params":
        return here | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    interpreters = {"TRITON_INTERPRET": "1", "FLA_JAX_PALLAS_INTERPRET": "1", "XLA_FLAGS": flags}
    return here | interpreters | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start(net: str) -> None:
    """Begins a process of a net."""
    if net == "interpret":
        from nets import adapter

        adapter.patch_interpreter()


def keys(net: str, quick: bool) -> list[str]:
    """The descriptions of a net's calls."""
    if net in ("ptx", "hlo"):
        return importlib.import_module({"ptx": "nets.launches", "hlo": "nets.programs"}[net]).keys_of(quick)
    from nets import values

    return values.keys_of(values.parameters() if net == "params" else values.interpreted(), quick)


def work(task: Task) -> tuple[str, list[str], dict[str, str], float]:
    """Description, what to record, texts, seconds of one call."""
    net, key, known, texts = task
    begin = time.perf_counter()
    try:
        if net in ("ptx", "hlo"):
            module = importlib.import_module({"ptx": "nets.launches", "hlo": "nets.programs"}[net])
            found, text = module.run(key, known)
        else:
            from nets import values

            found, text = (values.parameters() if net == "params" else values.interpreted())[key]()
    except Exception as error:  # one that cannot run differs, and the others go on
        line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        found, text = [f"error {line}"], {"error": traceback.format_exc()}
    return key, found, text if texts else {}, time.perf_counter() - begin


@contextlib.contextmanager
def processes(net: str, workers: int) -> Iterator[concurrent.futures.Executor]:
    """Those of a net; what Triton compiles is kept for the time of the run."""
    before = dict(os.environ)
    for name in ("TRITON_INTERPRET", "FLA_JAX_PALLAS_INTERPRET", "XLA_FLAGS", "JAX_ENABLE_X64"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(environment(net) | {"TRITON_CACHE_DIR": folder})
        spawn = multiprocessing.get_context("spawn")
        try:
            with concurrent.futures.ProcessPoolExecutor(workers, spawn, start, (net,)) as pool:
                yield pool
        finally:
            os.environ.clear()
            os.environ.update(before)
