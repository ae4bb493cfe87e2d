"""The versions of Triton and JAX that compile the kernels. `.ci/matrix` tests every pair of the table."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

_TRITON = ("3.6", "3.7", "3.8", "3.9")
# releases of Triton by release of JAX
SUPPORTED: Mapping[str, tuple[str, ...]] = {"0.10": _TRITON, "0.11": _TRITON, "0.12": _TRITON}


def triton_release() -> tuple[int, ...]:
    """(3, 6) for 3.6.0; () where Triton is not installed."""
    installed = _version("triton")
    return () if installed is None else tuple(map(int, _release(installed).split(".")))


def why_not_compiled() -> str | None:
    """None where the installed packages compile Triton kernels, else the reason and the command to run."""
    triton, jax = _version("triton"), _version("jax")
    if triton is None:
        return f"Triton is not installed: run {_install_command()}"
    if _release(triton) in SUPPORTED.get(_release(jax or ""), _TRITON):  # pip bounds JAX
        return None
    pairs = "; ".join(f"jax {jax}: Triton {', '.join(tritons)}" for jax, tritons in SUPPORTED.items())
    return (
        f"Triton {triton} with jax {jax} is not supported: run {_install_command()} (supported are {pairs})"
    )


def plugin_missing() -> str:
    """The error where jaxlib has no CUDA plugin, which describes calls of Triton kernels."""
    jax = _version("jax")
    return (
        f"JAX's CUDA plugin is not installed: run {_install_command()}, or without a GPU, to lower programs "
        f"for one, pip install --no-deps jax-cuda13-plugin=={jax}"
    )


def _install_command() -> str:
    extra = "cuda13" if _version("jax-cuda12-plugin") is None else "cuda12"
    return f'pip install "fla-jax[{extra}]"'


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """ "3.6" for 3.6.0."""
    return ".".join(version.split(".")[:2])
