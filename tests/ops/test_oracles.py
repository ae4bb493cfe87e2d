"""The float64 oracles, which judge every op: their gradients are the derivatives of their outputs."""

import dataclasses

import numpy as np
import pytest
from harness import cases, oracles
from harness.cases import HEAD_OPS, Case, HeadCase, MixCase

CASES = [
    *(Case(op, T=7, dtype="float64", scale=0.7, layout="segments", lengths=(3, 1, 4)) for op in cases.OPS),
    *(HeadCase("rwkv7_keys", 1, 2, 2, 4, residual, rate_scale=0.7) for residual in (True, False, None)),
    *(HeadCase(op, B=1, T=2, H=2, N=4) for op in HEAD_OPS[1:]),
    MixCase(
        1, 4, 3, 2, mix_delta=True, normalised=True, lengths=(2, 2), dtype="float64", parameters="float64"
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, dataclasses.astuple(case)[:6])))
def test_gradients_by_central_differences(case):
    x = cases.build(case)
    x = x._replace(arrays=oracles.float64(x.arrays))
    grads, rng = case.oracle(x).grads, np.random.default_rng(1)
    assert grads.keys() == x.arrays.keys()

    def loss(arrays):
        outputs = case.oracle(x._replace(arrays=arrays)).outputs
        return sum(np.sum(c * outputs[name]) for name, c in oracles.float64(x.cotangents).items())

    for name, a in x.arrays.items():
        step = 1e-5 * rng.standard_normal(a.shape)
        slope = (loss({**x.arrays, name: a + step}) - loss({**x.arrays, name: a - step})) / 2
        np.testing.assert_allclose(np.sum(grads[name] * step), slope, rtol=1e-7, atol=1e-12, err_msg=name)
