"""The implementations that ops.py measures: this library's, and the peers' that can be imported.

A call takes arrays by fla_jax's names and returns ``(o, final_state)``; `recurrences.inputs` converts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

LOWER_BOUND = -0.61
Call = Callable[[dict[str, Any]], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Task:
    """One measurement. ``shape`` is (B, T, H, K, V), ``precision`` the op's argument for float32 inputs."""

    op: str
    form: str
    shape: tuple[int, int, int, int, int]
    passes: str
    decay: str
    dtype: str = "bfloat16"
    precision: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))  # JSON has lists

    @property
    def version(self) -> int:
        return int(self.op[-1])

    @property
    def backward(self) -> bool:
        return self.passes == "fwd+bwd"

    @property
    def label(self) -> str:
        words = (self.op, self.form, "x".join(map(str, self.shape)), self.passes, self.decay)
        words += () if self.dtype == "bfloat16" else (self.dtype,)
        return " ".join([*words, *filter(None, [self.precision])])


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How to call one implementation. ``group`` names the process that runs it."""

    name: str
    group: str
    framework: str
    load: Callable[[Task], Call]
    package: str  # that is imported
    distributions: tuple[str, ...] = ()
    prepare: bool = False  # compiles or tunes for long: done before anything is timed
    # compiled into JAX's cache before anything is timed; not with matrix products, which XLA tunes by timing
    cached: bool = False
    raw_decay: bool = False  # takes x for the decay exp(-exp(x))
    value_first: bool = False  # states are [V, K]
    state_dtype: str = "float32"
    backward: bool = True
    final_cotangent: bool = True  # whether its backward takes the final state's cotangent
    states_backward: bool = True  # whether its backward supports states
    note: str | None = None


def is_cached(job: tuple[str, Task]) -> bool:
    """Whether a job's program is compiled before anything is timed; a loop of decoded tokens is not."""
    key, task = job
    return IMPLEMENTATIONS[key].cached and task.form != "decode"


def arrays(x: dict[str, Any], names: str) -> list[Any]:
    """The arrays with these names, in this order."""
    return [x[name] for name in names.split()]


def token_names(task: Task) -> str:
    """The order of the arguments of this library's and of FLA's functions."""
    return "r w k v a b" if task.version == 7 else "r k v w u"


def load_ours(task: Task, implementation: str) -> Call:
    """This library. The decay "bounded" passes ``lower_bound``."""
    from fla_jax import ops

    op = getattr(ops, f"{'chunk' if task.form == 'chunk' else 'fused_recurrent'}_rwkv{task.version}")
    options: dict[str, Any] = dict(implementation=implementation, output_final_state=True)
    if task.decay == "bounded":
        options["lower_bound"] = LOWER_BOUND
    if task.precision is not None:
        options["precision"] = task.precision
    return lambda x: op(*arrays(x, token_names(task)), initial_state=x["initial_state"], **options)


def our_name(task: Task) -> str:
    """The implementation of this library that is measured by default: kernels if they run."""
    import jax

    from fla_jax.pallas.backend import triton

    if jax.default_backend() == "gpu" and triton.why_not("gpu") is None:
        return "triton"
    return "xla" if task.form == "chunk" else "reference"


def load_fla(task: Task, op: str, **options: Any) -> Call:
    """flash-linear-attention. ``scale`` is passed because some of its functions have another default."""
    import fla.ops.rwkv6
    import fla.ops.rwkv7

    function = getattr(fla.ops.rwkv6 if task.version == 6 else fla.ops.rwkv7, op)
    options |= {"scale": 1.0, "output_final_state": True}
    return lambda x: function(*arrays(x, token_names(task)), initial_state=x["initial_state"], **options)


def load_jla7(task: Task, **options: Any) -> Call:
    """jax-linear-attention's Mosaic GPU kernels."""
    from jla.ops.mosaic_gpu import rwkv7

    options |= {"output_final_state": True}
    return lambda x: rwkv7.rwkv7(*arrays(x, "r k v w a b"), initial_state=x["initial_state"], **options)


def load_jla6(task: Task) -> Call:
    """jax-linear-attention's plain JAX."""
    from jla.ops import rwkv6

    options = {"scale": 1.0, "output_final_state": True}
    return lambda x: rwkv6.chunked(*arrays(x, "r k v w u"), initial_state=x["initial_state"], **options)


def rwkv_ops() -> Any:
    """rwkv-ops; at import its package compiles more than needed unless told to be native."""
    os.environ.update(KERAS_BACKEND="jax", KERNEL_TYPE="native")
    import rwkv_ops

    return rwkv_ops


def load_rwkv_ops7(task: Task, kernel: str) -> Call:
    op, _ = rwkv_ops().get_generalized_delta_rule(HEAD_SIZE=task.shape[3], KERNEL_TYPE=kernel)
    options = {"output_final_state": True}
    return lambda x: op(*arrays(x, "r w k v a b"), initial_state=x["initial_state"], **options)


def load_rwkv_ops6(task: Task) -> Call:
    """rwkv-ops' CUDA kernel through JAX's FFI; its backward supports no states."""
    op = rwkv_ops().get_rwkv6_kernel(HEAD_SIZE=task.shape[3], KERNEL_TYPE="cuda", MAX_SEQUENCE_LENGTH=4096)

    def call(x: dict[str, Any]) -> tuple[Any, Any]:
        r, k, v, w = (a.reshape(*a.shape[:2], -1) for a in arrays(x, "r k v w"))
        if task.backward:
            return op(r, k, v, w, x["u"]).reshape(x["v"].shape), None
        o, final = op(r, k, v, w, x["u"], initial_state=x["initial_state"], output_final_state=True)
        return o.reshape(x["v"].shape), final

    return call


def load_wind(task: Task, kernel: str) -> Call:
    """wind_rwkv; its loaders compile at first use, one head size a process."""
    from wind_rwkv import rwkv7

    getattr(rwkv7, f"load_{kernel}")(task.shape[3])
    op = getattr(rwkv7, f"attn_{kernel}")
    return lambda x: op(*arrays(x, "r w k v a b"), x["initial_state"])


def load_copy(task: Task) -> Call:
    """The least that a decoding step does: read and write the state."""
    return lambda x: (x["r"][0, 0, 0], 0.999 * x["initial_state"])


OURS = ("jax", "jaxlib", "triton")
FLA = ("flash-linear-attention", "fla-core", "torch", "triton")
JLA = ("jax-linear-attention", "jax", "jaxlib")
RWKV_OPS = ("rwkv-ops", "keras", "jax", "jaxlib", "jax-triton", "triton")
WIND = ("wind_rwkv", "torch")
LOG = "takes log(-w)"


def _ours(name: str, implementation: str | None = None) -> Implementation:
    load = lambda task: load_ours(task, implementation or our_name(task))
    return Implementation(name, "fla_jax", "jax", load, "fla_jax", OURS, cached=implementation is None)


def _fla(
    variant: str, op: str, group: str, options: dict[str, Any] | None = None, **rest: Any
) -> Implementation:
    load = lambda task: load_fla(task, op, **(options or {}))
    return Implementation(f"FLA {variant}", group, "torch", load, "fla", FLA, prepare=True, **rest)


def _jla(name: str, load: Callable[[Task], Call], version: int = 7, **rest: Any) -> Implementation:
    group = "jax-linear-attention" + " 6" * (version == 6)
    return Implementation(f"jax-linear-attention{name}", group, "jax", load, "jla", JLA, **rest)


def _rwkv_ops(
    name: str, group: str, load: Callable[[Task], Call], note: str = LOG, **rest: Any
) -> Implementation:
    rest |= {"raw_decay": True, "note": note}
    return Implementation(f"rwkv-ops {name}", f"rwkv-ops{group}", "jax", load, "rwkv_ops", RWKV_OPS, **rest)


def _wind(name: str, group: str, kernel: str, note: str, **rest: Any) -> Implementation:
    rest |= {"prepare": True, "raw_decay": True, "value_first": True, "note": f"{note}; {LOG}"}
    load = lambda task: load_wind(task, kernel)
    return Implementation(f"wind_rwkv {name}", f"wind_rwkv{group}", "torch", load, "wind_rwkv", WIND, **rest)


IMPLEMENTATIONS = {
    "ours": _ours("fla_jax"),
    "ours reference": _ours("fla_jax", "reference"),
    "ours xla": _ours("fla_jax", "xla"),
    "copy": Implementation("copy of the state", "fla_jax", "jax", load_copy, "jax", OURS),
    "wind": _wind(
        "chunked", "", "chunked_cuda", "states and their gradients in bfloat16", state_dtype="bfloat16"
    ),
    "wind backstepping": _wind(
        "backstepping small head",
        " backstepping",
        "backstepping_smallhead",
        "divides by the decay in its backward: needs w >= about -0.6",
    ),
    "rwkv-ops triton": _rwkv_ops("Triton", "", lambda task: load_rwkv_ops7(task, "triton"), value_first=True),
    "rwkv-ops cuda": _rwkv_ops(
        "CUDA", " CUDA", lambda task: load_rwkv_ops7(task, "cuda"), prepare=True, value_first=True
    ),
    "rwkv-ops cuda 6": _rwkv_ops(
        "CUDA",
        " CUDA 6",
        load_rwkv_ops6,
        "forward+backward without initial and final state: its gradient has none; forward with both in "
        f"bfloat16; {LOG}",
        prepare=True,
        state_dtype="bfloat16",
        states_backward=False,
    ),
    "jla bounded": _jla(" bounded", lambda task: load_jla7(task, lower_bound=LOWER_BOUND)),
    "jla": _jla(" any decay", load_jla7),
    "jla 6": _jla("", load_jla6, 6, note="plain JAX: it has no kernel of RWKV-6"),
    "fla 6": _fla("chunk_rwkv6", "chunk_rwkv6", "FLA 6"),
    "fla 6 chunk 64": _fla("chunk_rwkv6, chunk 64", "chunk_rwkv6", "FLA 6", {"chunk_size": 64}),
    "fla recurrent 6": _fla(
        "fused_recurrent_rwkv6",
        "fused_recurrent_rwkv6",
        "FLA recurrent",
        final_cotangent=False,
        note="ignores the final state's cotangent; errors without it",
    ),
    "fla recurrent 7": _fla(
        "fused_recurrent_rwkv7",
        "fused_recurrent_rwkv7",
        "FLA recurrent",
        note="has no backward",
        backward=False,
    ),
    "fla 7": _fla(
        "lower_bound, chunk 64, no recompute",
        "chunk_rwkv7",
        "FLA 7",
        {"lower_bound": LOWER_BOUND, "chunk_size": 64, "disable_recompute": True},
    ),
    "fla 7 layer": _fla(
        "as its layer calls it",
        "chunk_rwkv7",
        "FLA 7",
        {"safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64},
        note="safe_gate, lower_bound, chunk 64, recompute",
    ),
    "fla 7 default": _fla("default arguments", "chunk_rwkv7", "FLA 7 default"),
    "fla 7 safe": _fla(
        "safe_gate, chunk 32, no recompute",
        "chunk_rwkv7",
        "FLA 7 safe",
        {"safe_gate": True, "chunk_size": 32, "disable_recompute": True},
    ),
}
