"""What benchmarks/ops.py measures: this library's implementations and the peers, each as a function of the
same named arrays.

Nothing of a peer is here but its name and how it is called; a peer takes part if it can be imported. A call
takes arrays by fla_jax's names and gives ``(o, final_state)``; an ``Implementation`` says where the peer's
conventions differ, and `peers_run` converts.
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
    """One measurement: shape is (B, T, H, K, V)."""

    op: str
    form: str
    shape: tuple[int, int, int, int, int]
    passes: str
    decay: str
    dtype: str = "bfloat16"

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
        return " ".join([*words, *([] if self.dtype == "bfloat16" else [self.dtype])])


@dataclasses.dataclass(frozen=True)
class Implementation:
    """How to call one implementation. ``group`` names the process that runs it."""

    name: str
    group: str
    framework: str
    load: Callable[[Task], Call]
    package: str  # what is imported
    distributions: tuple[str, ...] = ()
    prepare: bool = False  # compiles or tunes for long: done before anything is timed
    raw_decay: bool = False  # takes x where the decay is exp(-exp(x))
    value_first: bool = False  # states are [V, K]
    state_dtype: str = "float32"
    backward: bool = True
    final_cotangent: bool = True  # whether its backward knows the final state's cotangent
    states_backward: bool = True  # whether its backward knows states at all
    note: str | None = None


def _tokens(x: dict[str, Any], names: str) -> list[Any]:
    return [x[name] for name in names.split()]


def load_ours(task: Task, implementation: str) -> Call:
    """This library. ``lower_bound`` is passed where the record says "bounded"."""
    from fla_jax import ops

    op = getattr(ops, f"{'chunk' if task.form == 'chunk' else 'fused_recurrent'}_rwkv{task.version}")
    names = "r w k v a b" if task.version == 7 else "r k v w u"
    options: dict[str, Any] = dict(implementation=implementation, output_final_state=True)
    if task.decay == "bounded":
        options["lower_bound"] = LOWER_BOUND
    return lambda x: op(*_tokens(x, names), initial_state=x["initial_state"], **options)


def our_name(task: Task) -> str:
    """The implementation of this library that is measured where the plan says no more: the kernels where they
    run, else what a CPU runs.
    """
    import jax

    from fla_jax.pallas.backend import triton

    gpu = jax.default_backend() == "gpu"
    if task.form == "chunk":
        return "triton" if gpu and triton.why_not("gpu") is None else "xla"
    return "pallas" if gpu else "reference"


def fla(op: str, **options: Any) -> Callable[[Task], Call]:
    """flash-linear-attention; scale is given because some of its functions default to another."""

    def load(task: Task) -> Call:
        import fla.ops.rwkv6
        import fla.ops.rwkv7

        function = getattr(fla.ops.rwkv6 if task.version == 6 else fla.ops.rwkv7, op)
        names = "r w k v a b" if task.version == 7 else "r k v w u"
        return lambda x: function(
            *_tokens(x, names),
            scale=1.0,
            initial_state=x["initial_state"],
            output_final_state=True,
            **options,
        )

    return load


def jla7(bounded: bool) -> Callable[[Task], Call]:
    """jax-linear-attention's Mosaic GPU kernels."""

    def load(task: Task) -> Call:
        from jla.ops.mosaic_gpu import rwkv7

        options: dict[str, Any] = dict(lower_bound=LOWER_BOUND) if bounded else {}
        return lambda x: rwkv7.rwkv7(
            *_tokens(x, "r k v w a b"), initial_state=x["initial_state"], output_final_state=True, **options
        )

    return load


def jla6(task: Task) -> Call:
    """jax-linear-attention's plain JAX."""
    from jla.ops import rwkv6

    return lambda x: rwkv6.chunked(
        *_tokens(x, "r k v w u"), scale=1.0, initial_state=x["initial_state"], output_final_state=True
    )


def rwkv_ops7(kernel: str) -> Callable[[Task], Call]:
    """rwkv-ops in JAX; its package compiles more than asked for at import unless told to be native there."""

    def load(task: Task) -> Call:
        os.environ.update(KERAS_BACKEND="jax", KERNEL_TYPE="native")
        import rwkv_ops

        op, _ = rwkv_ops.get_generalized_delta_rule(HEAD_SIZE=task.shape[3], KERNEL_TYPE=kernel)
        return lambda x: op(
            *_tokens(x, "r w k v a b"), initial_state=x["initial_state"], output_final_state=True
        )

    return load


def rwkv_ops6(task: Task) -> Call:
    """rwkv-ops' CUDA kernel through JAX's FFI: its backward knows no states."""
    os.environ.update(KERAS_BACKEND="jax", KERNEL_TYPE="native")
    import rwkv_ops

    op = rwkv_ops.get_rwkv6_kernel(HEAD_SIZE=task.shape[3], KERNEL_TYPE="cuda", MAX_SEQUENCE_LENGTH=4096)

    def call(x: dict[str, Any]) -> tuple[Any, Any]:
        rows = lambda a: a.reshape(*a.shape[:2], -1)
        r, k, v, w = (rows(a) for a in _tokens(x, "r k v w"))
        if task.backward:
            return op(r, k, v, w, x["u"]).reshape(x["v"].shape), None
        o, final = op(r, k, v, w, x["u"], initial_state=x["initial_state"], output_final_state=True)
        return o.reshape(x["v"].shape), final

    return call


def wind(kernel: str) -> Callable[[Task], Call]:
    """wind_rwkv; its loaders compile at first use. One head size a process."""

    def load(task: Task) -> Call:
        from wind_rwkv import rwkv7

        getattr(rwkv7, f"load_{kernel}")(task.shape[3])
        op = getattr(rwkv7, f"attn_{kernel}")
        return lambda x: op(*_tokens(x, "r w k v a b"), x["initial_state"])

    return load


FLA = ("flash-linear-attention", "fla-core", "torch", "triton")
JLA = ("jax-linear-attention", "jax", "jaxlib")
RWKV_OPS = ("rwkv-ops", "keras", "jax", "jaxlib", "jax-triton", "triton")
WIND = ("wind_rwkv", "torch")
OURS = ("jax", "jaxlib", "jax-triton", "triton")


def _ours(name: str, implementation: str | None = None) -> Implementation:
    load = lambda task: load_ours(task, implementation or our_name(task))
    return Implementation(name, "fla_jax", "jax", load, "fla_jax", OURS)


def _fla(variant: str, op: str, group: str, **rest: Any) -> Implementation:
    options = rest.pop("options", {})
    return Implementation(
        f"FLA {variant}", group, "torch", fla(op, **options), "fla", FLA, prepare=True, **rest
    )


def copy_of_the_state(task: Task):
    """What a step must at least do: read and write the state."""
    return lambda x: (x["r"][0, 0, 0], 0.999 * x["initial_state"])


IMPLEMENTATIONS = {
    "ours": _ours("fla_jax"),
    "ours reference": _ours("fla_jax", "reference"),
    "ours xla": _ours("fla_jax", "xla"),
    "copy": Implementation("copy of the state", "fla_jax", "jax", copy_of_the_state, "jax", OURS),
    "wind": Implementation(
        "wind_rwkv chunked",
        "wind_rwkv",
        "torch",
        wind("chunked_cuda"),
        "wind_rwkv",
        WIND,
        prepare=True,
        raw_decay=True,
        value_first=True,
        state_dtype="bfloat16",
        note="states and their gradients in bfloat16; takes log(-w)",
    ),
    "wind backstepping": Implementation(
        "wind_rwkv backstepping small head",
        "wind_rwkv backstepping",
        "torch",
        wind("backstepping_smallhead"),
        "wind_rwkv",
        WIND,
        prepare=True,
        raw_decay=True,
        value_first=True,
        note="divides by the decay in its backward: needs w >= about -0.6; takes log(-w)",
    ),
    "rwkv-ops triton": Implementation(
        "rwkv-ops Triton",
        "rwkv-ops",
        "jax",
        rwkv_ops7("triton"),
        "rwkv_ops",
        RWKV_OPS,
        raw_decay=True,
        value_first=True,
        note="takes log(-w)",
    ),
    "rwkv-ops cuda": Implementation(
        "rwkv-ops CUDA",
        "rwkv-ops CUDA",
        "jax",
        rwkv_ops7("cuda"),
        "rwkv_ops",
        RWKV_OPS,
        prepare=True,
        raw_decay=True,
        value_first=True,
        note="takes log(-w)",
    ),
    "rwkv-ops cuda 6": Implementation(
        "rwkv-ops CUDA",
        "rwkv-ops CUDA 6",
        "jax",
        rwkv_ops6,
        "rwkv_ops",
        RWKV_OPS,
        prepare=True,
        raw_decay=True,
        state_dtype="bfloat16",
        states_backward=False,
        note="forward+backward without initial and final state: its gradient has none; forward with both in "
        "bfloat16; takes log(-w)",
    ),
    "jla bounded": Implementation(
        "jax-linear-attention bounded", "jax-linear-attention", "jax", jla7(True), "jla", JLA
    ),
    "jla": Implementation(
        "jax-linear-attention any decay", "jax-linear-attention", "jax", jla7(False), "jla", JLA
    ),
    "jla 6": Implementation(
        "jax-linear-attention",
        "jax-linear-attention 6",
        "jax",
        jla6,
        "jla",
        JLA,
        note="plain JAX: it has no kernel of RWKV-6",
    ),
    "fla 6": _fla("chunk_rwkv6", "chunk_rwkv6", "FLA 6"),
    "fla 6 chunk 64": _fla("chunk_rwkv6, chunk 64", "chunk_rwkv6", "FLA 6", options=dict(chunk_size=64)),
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
        options=dict(lower_bound=LOWER_BOUND, chunk_size=64, disable_recompute=True),
    ),
    "fla 7 layer": _fla(
        "as its layer calls it",
        "chunk_rwkv7",
        "FLA 7",
        options=dict(safe_gate=True, lower_bound=-0.6065306597126334, chunk_size=64),
        note="safe_gate, lower_bound, chunk 64, recompute",
    ),
    "fla 7 default": _fla("default arguments", "chunk_rwkv7", "FLA 7 default"),
    "fla 7 safe": _fla(
        "safe_gate, chunk 32, no recompute",
        "chunk_rwkv7",
        "FLA 7 safe",
        options=dict(safe_gate=True, chunk_size=32, disable_recompute=True),
    ),
}
