"""Options of XLA that let communication run beside computation on GPUs."""

from __future__ import annotations

import os

import jax

Options = dict[str, bool | int | str]


def overlap_options() -> Options:
    """XLA options for ``TrainStep(..., compiler_options=overlap_options())``: they act on that program alone.

    On a single device they change nothing.

    * ``latency_hiding_scheduler``: starts every collective early and waits for it late, for more memory. The
      other options rely on it.
    * ``pipeline_*`` (before jax 0.11 ``enable_pipelined_*``): in the loop over layers, gathers the weights of
      the next layer, and sums the gradients of the last one, while the current one computes.
    * ``while_loop_double_buffering``: two layers an iteration, so that prefetched weights are not copied.
    * ``*_combine_threshold_bytes``: combines collectives that are ready together up to 1 GiB. All-reduces
      stay at 30 MB, because XLA copies combined operands into one array and back.

    Example:
        >>> from fla_jax.parallel import overlap_options
        >>> all(name.startswith("xla_gpu") for name in overlap_options())
        True
    """
    collectives = ("all_gather", "reduce_scatter", "all_reduce")  # the first two are combined
    if jax.__version_info__ < (0, 11):
        pipelined: dict[str, bool | int | str] = {
            f"xla_gpu_enable_pipelined_{name}": True for name in collectives
        }
    else:
        pipelined = {f"xla_gpu_pipeline_{name}": "COLLECTIVE_PIPELINING_MODE_ON" for name in collectives}
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        **pipelined,
        "xla_gpu_enable_while_loop_double_buffering": True,
        **{f"xla_gpu_{name}_combine_threshold_bytes": 1 << 30 for name in collectives[:2]},
    }


def overlap_flags() -> str:
    """`overlap_options` in the form of the environment variable XLA_FLAGS.

    Example:
        >>> from fla_jax.parallel import overlap_flags
        >>> overlap_flags().split()[0]
        '--xla_gpu_enable_latency_hiding_scheduler=true'
    """
    spelled = {"COLLECTIVE_PIPELINING_MODE_ON": "on"}  # flags spell it differently
    return " ".join(
        f"--{name}={spelled.get(str(x), str(x).lower())}" for name, x in overlap_options().items()
    )


def set_overlap_flags() -> None:
    """Adds `overlap_flags` to XLA_FLAGS, for every program of this process. Flags set there already stay.

    Raises:
        RuntimeError: JAX has started its devices and no longer reads XLA_FLAGS.

    Example:
        >>> import jax
        >>> from fla_jax.parallel import set_overlap_flags
        >>> device = jax.devices()[0]  # too late from here on
        >>> set_overlap_flags()
        Traceback (most recent call last):
        ...
        RuntimeError: set_overlap_flags must be called before JAX starts its devices...
    """
    from jax._src import xla_bridge  # JAX has no public function for it

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "set_overlap_flags must be called before JAX starts its devices, so before the first array and "
            "before jax.devices(); TrainStep(..., compiler_options=overlap_options()) works at any time"
        )
    before = os.environ.get("XLA_FLAGS", "").split()
    named = {flag.split("=")[0] for flag in before}
    new = [flag for flag in overlap_flags().split() if flag.split("=")[0] not in named]
    os.environ["XLA_FLAGS"] = " ".join(before + new)
