"""Options of XLA that let communication run beside computation on GPUs."""

from __future__ import annotations

import jax

from ..core.arguments import check_integer

Options = dict[str, bool | int | str]


def overlap_options(collectives_in_flight: int = 1) -> Options:
    """XLA options for ``TrainStep(..., compiler_options=overlap_options())``: they act on that program alone.

    On a single device they change nothing.

    Args:
        collectives_in_flight: how many collectives may run at a time; 1 is XLA's default. With 16, data
            parallelism without a scan over layers needs about a third less memory, since each layer's
            gradients are summed soon after they exist. The schedules of FSDP and of scans hardly change.
            More than 1 is an experimental option of XLA, and ran on meshes of one axis only.

    * ``latency_hiding_scheduler``: starts every collective early and waits for it late, for more memory. The
      other options rely on it.
    * ``pipeline_*`` (before jax 0.11 ``enable_pipelined_*``): in the loop over layers, gathers the weights of
      the next layer, and sums the gradients of the last one, while the current one computes.
    * ``while_loop_double_buffering``: two layers an iteration, so that prefetched weights are not copied.
    * ``*_combine_threshold_bytes``: combines collectives that are ready together up to 1 GiB. All-reduces
      stay at 30 MB, because XLA copies combined operands into one array and back.

    Raises:
        ValueError: ``collectives_in_flight`` is not a positive integer.

    Example:
        >>> from fla_jax.parallel import overlap_options
        >>> all(name.startswith("xla_gpu") for name in overlap_options())
        True
    """
    in_flight = check_integer("collectives_in_flight", collectives_in_flight, 1)
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
        **({"xla_gpu_experimental_parallel_collective_overlap_limit": in_flight} if in_flight > 1 else {}),
    }


def overlap_flags(collectives_in_flight: int = 1) -> str:
    """`overlap_options` in the form of the environment variable XLA_FLAGS, for every program of a process.

    Set it before JAX starts its devices, which is the only time that it is read.

    Example:
        >>> from fla_jax.parallel import overlap_flags
        >>> overlap_flags().split()[0]
        '--xla_gpu_enable_latency_hiding_scheduler=true'
    """
    spelled = {"COLLECTIVE_PIPELINING_MODE_ON": "on"}  # flags spell it differently
    options = overlap_options(collectives_in_flight)
    return " ".join(f"--{name}={spelled.get(str(x), str(x).lower())}" for name, x in options.items())
