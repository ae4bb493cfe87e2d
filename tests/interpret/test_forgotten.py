"""What the Triton kernels keep of a large state after strong decays: no more than those decays' own share.

In float32, in Triton's interpreter, against the float64 oracle.
"""

import cases
import jax
import numpy as np
import pytest
from cases import Case

from fla_jax.pallas.backend import triton as run

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not run.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set", allow_module_level=True)

from fla_jax.pallas.common import chunk_host

pytestmark = pytest.mark.one_python  # values: Triton's interpreter makes them
TOLERANCE = 1e-5


def forgotten(case: Case, level=-np.inf, at=(21,), channels=slice(None), written=None) -> cases.Inputs:
    """Mild decays, but ``level`` at the tokens ``at``, and a state of 1e5 before: the initial one or, in its
    place, one that the token ``written`` makes. In RWKV-7 the tokens ``at`` do not write back what they read.
    """
    x = cases.build(case)
    arrays = {name: a.copy() for name, a in x.arrays.items()} | {"w": 0.05 * x.arrays["w"]}
    for t in at:
        arrays["w"][:, t, :, channels] = level
    if case.op == "rwkv7":
        arrays["b"][:, list(at)] = 0
    arrays["initial_state"] *= 1e5 if written is None else 0
    if written is not None:
        arrays["v"][:, written] *= 1e5
    return x._replace(arrays=arrays, ds=x.ds if written is None else np.zeros_like(x.ds))


def check_forgotten(case: Case, **how) -> None:
    """What comes from the forgetting token on is judged by its own size: next to the rest it is nothing."""
    x = forgotten(case, **how)
    (o, final), grads = cases.ask_oracle(case.op, x)
    arrays = dict(x.arrays)
    if "written" in how:
        del arrays["initial_state"], grads["initial_state"]
    got = jax.device_get(cases.runner(case.op, "triton")(arrays, *x[1:]))
    cases.assert_close("final state", got.final, final, TOLERANCE)
    first = min(how.get("at", (21,)))
    of_a_channel = cases.error_of(got.grads["w"], grads["w"], axes=(1,))
    assert of_a_channel <= TOLERANCE, f"dw of a channel: relative error {of_a_channel:.2e}"
    of_tokens = {"o": (got.o, o)}
    of_tokens |= {f"d{name}": (got.grads[name], grads.pop(name)) for name in cases.TOKENS[case.op]}
    for name, (found, want) in of_tokens.items():
        cases.assert_close(f"{name} before", found[:, :first], want[:, :first], TOLERANCE)
        cases.assert_close(f"{name} after", found[:, first:], want[:, first:], TOLERANCE)
    for name, want in grads.items():
        cases.assert_close(f"d{name}", got.grads[name], want, TOLERANCE)


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(level=-17.0),
        dict(level=-20.37),
        dict(level=-40.0),
        dict(written=3),
        dict(at=(16,)),
        dict(at=(31,)),
        dict(at=(20, 22, 23)),
        dict(at=(25, 26, 27)),
        dict(at=(18, 21, 22, 25, 30, 34)),
        dict(at=(19, 20, 21), level=-30.0),
        dict(at=(20, 21, 22), channels=slice(0, None, 2)),
    ],
)
def test_what_is_forgotten_is_gone(op, how):
    """Strong decays in the middle of a chunk leave no more of a large state than their own share."""
    check_forgotten(Case(op, B=1, T=43, H=1, K=16, V=16), **how)


@pytest.mark.parametrize(
    "case",
    [
        dict(K=72, V=24, T=37),  # RWKV-7: the backward in two kernels
        dict(T=48, K=64, V=64),
        dict(layout="segments", lengths=(27, 13), T=40),
        dict(layout="packed", lengths=(3, 37)),
    ],
)
def test_what_is_forgotten_is_gone_everywhere(op, case):
    check_forgotten(Case(op, **(dict(B=1, H=1, K=16, V=16) | case)))


@pytest.mark.parametrize("how", [dict(), dict(at=(9, 37)), dict(written=3), dict(level=-20.37)])
def test_what_is_forgotten_is_gone_from_stretches(op, how, split):
    case = Case(op, B=1, T=70, H=1, K=16, V=16)
    assert chunk_host.num_splits_of(cases.call_of(case)) >= 3
    check_forgotten(case, **how)
