"""Products of one token with quantised weights in Triton's interpreter; tests/gpu compiles the kernel."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import quantised_products as products
from harness import tiers, variants

from fla_jax.core.decode_layers import SQUARE
from fla_jax.pallas.backend import triton

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
if not triton.INTERPRET:
    pytest.skip("TRITON_INTERPRET is not set", allow_module_level=True)
from fla_jax.pallas.decode import gemv_host, projections_host

pytestmark = pytest.mark.one_python  # Triton's interpreter computes the values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits, group, K", tiers.first(products.PRODUCTS))
def test_against_float64(bits, group, K, dtype):
    """With programs of one, two and many tiles, at three sizes of the token."""
    for scale in products.SCALES:
        matrix, token = products.operands(bits, group, K, scale, dtype)
        for forced in ((), ("decode: two tiles",), ("decode: many tiles",)):
            with variants.forced(*forced):
                got, _ = projections_host.project(matrix, token)
            assert products.error(got, matrix, token) < products.bound(bits, group, token), (scale, forced)


def test_a_token_of_zeros():
    matrix, token = products.operands(8, 128, 1024, 1.0, "bfloat16")
    add = jnp.arange(192.0)[None]
    got, _ = projections_host.project(matrix, 0 * token, add=add)
    np.testing.assert_array_equal(got, add)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("bits, group", [(8, 128), (4, 32)])
def test_what_is_not_finite_stays_so(bits, group, bad):
    matrix, token = products.operands(bits, group, 1024, 1.0, "bfloat16")
    got, _ = projections_host.project(matrix, token.at[0, 7].set(bad))
    assert not np.isfinite(got).any()


def test_more_than_one_tile():
    """An activation is applied to the sums of every tile."""
    matrix, token = products.operands(4, 32, 768, 1.0, "float32")
    with variants.forced("decode: many tiles"):
        assert gemv_host.tiles_of(192, gemv_host.gemv_launch(768, 192, has_norm=False)) > 2
        got, _ = projections_host.project(matrix.replace(segments=((192, 0, SQUARE),)), token)
    want = np.square(np.maximum(products.exact(matrix, token), 0))
    assert np.max(np.abs(got - want)) < 1e-5 * np.max(want)
