"""What the Triton kernels retain of a large state after strong decays: no more than those decays' share.

In float32, in Triton's interpreter, against the float64 oracle.
"""

import numpy as np
import pytest
from harness import cases, tiers, variants
from harness.cases import Case

from fla_jax.pallas.backend import triton

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not triton.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set", allow_module_level=True)

pytestmark = pytest.mark.one_python  # Triton's interpreter computes the values
TOLERANCE = 1e-5


def forgotten(case: Case, level=-np.inf, at=(21,), channels=slice(None), written=None) -> cases.Inputs:
    """Mild decays, but ``level`` at the tokens ``at``, and a state of 1e5 before: the initial one, or that of
    the token ``written``. In RWKV-7 the tokens ``at`` do not write back what they read.
    """
    x = case.build()
    x.arrays["w"] *= np.float32(0.05)
    for t in at:
        x.arrays["w"][:, t, :, channels] = level
    if case.op == "rwkv7":
        x.arrays["b"][:, list(at)] = 0
    x.arrays["initial_state"] *= 1e5 if written is None else 0
    if written is not None:
        x.arrays["v"][:, written] *= 1e5
        x.cotangents["ht"][:] = 0
    return x


def check(case: Case, at=(21,), **how) -> None:
    """What comes from the forgetting token on is judged by its own size: next to the rest it is nothing."""
    x = forgotten(case, at=at, **how)
    want = case.oracle(x)
    if "written" in how:
        del x.arrays["initial_state"], want.grads["initial_state"]
    got, first = cases.run(case, "triton", x), min(at)
    cases.assert_close("ht", got.outputs["ht"], want.outputs["ht"], TOLERANCE)
    of_a_channel = cases.error_of(got.grads["w"], want.grads["w"], axes=(1,))
    assert of_a_channel <= TOLERANCE, f"dw of a channel: relative error {of_a_channel:.2e}"
    of_tokens = {"o": (got.outputs["o"], want.outputs["o"])}
    for name, exact in want.grads.items():
        if name in cases.TOKENS[case.op]:
            of_tokens[f"d{name}"] = got.grads[name], exact
        else:
            cases.assert_close(f"d{name}", got.grads[name], exact, TOLERANCE)
    for name, (found, exact) in of_tokens.items():
        cases.assert_close(f"{name} before", found[:, :first], exact[:, :first], TOLERANCE)
        cases.assert_close(f"{name} after", found[:, first:], exact[:, first:], TOLERANCE)


@pytest.mark.parametrize(
    "how",
    tiers.first(
        [
            dict(),
            dict(written=3),
            dict(level=-17.0),
            dict(level=-20.37),
            dict(level=-40.0),
            dict(at=(16,)),
            dict(at=(31,)),
            dict(at=(20, 22, 23)),
            dict(at=(25, 26, 27)),
            dict(at=(18, 21, 22, 25, 30, 34)),
            dict(at=(19, 20, 21), level=-30.0),
            dict(at=(20, 21, 22), channels=slice(0, None, 2)),
        ],
        2,
    ),
    ids=str,
)
def test_in_the_middle_of_a_chunk(op, how):
    check(Case(op, B=1, T=43, H=1, K=16, V=16), **how)


@pytest.mark.parametrize(
    "case",
    tiers.first(
        [
            dict(K=72, V=24, T=37),  # RWKV-7: the backward in two kernels
            dict(T=48, K=64, V=64),
            dict(layout="segments", lengths=(27, 13), T=40),
            dict(layout="packed", lengths=(3, 37)),
        ]
    ),
)
def test_head_sizes_and_layouts(op, case):
    check(Case(op, **(dict(B=1, H=1, K=16, V=16) | case)))


@pytest.mark.parametrize(
    "how", tiers.first([dict(), dict(at=(9, 37)), dict(written=3), dict(level=-20.37)]), ids=str
)
def test_splits(op, how):
    case = Case(op, B=1, T=70, H=1, K=16, V=16)
    with variants.forced("splits"):
        assert variants.num_splits(case) >= 3
        check(case, **how)


@pytest.mark.parametrize(
    "case",
    tiers.first(
        [
            dict(H=2, decay=("strong", "weak")),
            dict(decay="layer", V=24),
            dict(decay="mixed"),
            dict(decay="strong", layout="segments", lengths=(90, 390)),
        ],
        2,
    ),
    ids=str,
)
@pytest.mark.parametrize("names", [(), ("bf16 dots", "key-major")], ids=["", "key-major"])
def test_tails_of_splits(op, case, names):
    """Where a split forgets what is before its tail, and where it does not."""
    case = Case(op, **(dict(B=1, T=480, H=1, K=16, V=16) | case))
    with variants.forced("splits of 160", "tail of 4 chunks", *names):
        assert variants.num_splits(case) == 3
        cases.compare(case, cases.run(case, "triton"))


def test_a_split_that_forgets_is_scanned_from_its_tail(op):
    """A NaN before the tail does not reach the next split."""
    case = Case(op, B=1, T=320, H=1, K=16, V=16, decay="strong")
    x = case.build()
    x.arrays["v"][:, 3] = np.nan
    with variants.forced("splits of 160", "tail of 4 chunks"):
        o = cases.run(case, "triton", x).outputs["o"]
    assert np.all(np.isnan(o[:, 3:160])) and np.all(np.isfinite(o[:, 160:]))
