"""Where implementations run, and the one table of how exact they must be there."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

from .compare import DOUBLE, EXACT, Tolerances


class Place(NamedTuple):
    """An implementation where it runs: on a "cpu", in its "interpreter", on a "gpu"; and which kernels, where
    one name has several.
    """

    implementation: str
    where: str
    kernels: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


REFERENCE, XLA = Place("reference", "cpu"), Place("xla", "cpu")
TRITON_INTERPRETER, TRITON_GPU = Place("triton", "interpreter"), Place("triton", "gpu")
SCAN_INTERPRETER, SCAN_GPU = (Place("triton", where, "scan") for where in ("interpreter", "gpu"))
PALLAS_INTERPRETER, PALLAS_GPU = Place("pallas", "interpreter"), Place("pallas", "gpu")

# The recurrences, by place and dtype. In float32 on top of the rounding of 16-bit results; on a GPU the
# kernels' products have 16-bit operands, so that plain norms count there.
_TOKEN_BY_TOKEN = Tolerances(o=1e-6, state=1e-6, grad=1e-6, dw=2e-6, channel=2e-6)
_BFLOAT16_PRODUCTS = Tolerances(o=4e-3, state=4e-3, grad=6e-3, dw=1e-2, channel=3e-2, rounded=False)
RECURRENCE: dict[Place, dict[str, Tolerances]] = {
    REFERENCE: {"float32": EXACT, "bfloat16": EXACT, "float16": EXACT, "float64": DOUBLE},
    XLA: {"float32": EXACT, "bfloat16": EXACT, "float16": EXACT, "float64": DOUBLE},
    TRITON_INTERPRETER: {"float32": EXACT, "bfloat16": _BFLOAT16_PRODUCTS},
    PALLAS_INTERPRETER: {"float32": _TOKEN_BY_TOKEN, "bfloat16": _TOKEN_BY_TOKEN},
    SCAN_INTERPRETER: dict.fromkeys(("float32", "bfloat16", "float16"), _TOKEN_BY_TOKEN),
    PALLAS_GPU: dict.fromkeys(("float32", "bfloat16", "float16"), _TOKEN_BY_TOKEN),
    SCAN_GPU: dict.fromkeys(("float32", "bfloat16", "float16"), _TOKEN_BY_TOKEN),
    TRITON_GPU: {
        "float32": Tolerances(o=1e-5, state=1e-5, grad=1e-5, dw=1e-5, channel=3e-5, rounded=False),
        "bfloat16": _BFLOAT16_PRODUCTS,
        # three bits of these inputs are rounded away first, which bfloat16 inputs do not have
        "float16": Tolerances(o=6e-3, state=6e-3, grad=9e-3, dw=1.5e-2, channel=4.5e-2, rounded=False),
    },
}
# Float32 with products of TF32 operands: a rounding of 2^-12 each
TF32 = Tolerances(o=6e-4, state=8e-4, grad=1e-3, dw=2e-3, channel=8e-3, rounded=False)
# The ops of the layers, by place and dtype: on a GPU a little more than one rounding.
NORM_MIX: dict[Place, dict[str, float]] = {
    XLA: {"float32": 1e-6, "float64": 1e-12},
    TRITON_INTERPRETER: {"float32": 1e-6},
    TRITON_GPU: {"float32": 1e-6, "bfloat16": 2.5e-3, "float16": 3.2e-4},
}
HEADS: dict[Place, dict[str, float]] = {
    XLA: {"float32": 1e-6, "float64": 1e-13},
    TRITON_INTERPRETER: {"float32": 1e-6},
    TRITON_GPU: {"float32": 1e-6},
}


def here() -> tuple[Place, ...]:
    """The places that this process has. With a GPU they are the GPU's alone."""
    if os.path.exists("/dev/nvidiactl") and os.environ.get("TRITON_INTERPRET") != "1":
        return TRITON_GPU, SCAN_GPU, PALLAS_GPU
    triton = importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"
    return REFERENCE, XLA, PALLAS_INTERPRETER, *((TRITON_INTERPRETER, SCAN_INTERPRETER) if triton else ())
