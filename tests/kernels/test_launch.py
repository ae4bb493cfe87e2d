"""`triton_call`: parameters and aliases that a kernel does not have are errors."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="Triton is not installed (it exists for Linux only)")

from fla_jax.pallas.backend.call import Launch
from fla_jax.pallas.backend.triton import triton_call
from fla_jax.pallas.common.state_passing import EntryOutput, SplitGrad, state_grad_kernel

OPTIONS = dict(config=None, grid=(1, 1, 1), launch=Launch(1))


def test_number_of_parameters():
    x = jnp.zeros(16)
    with pytest.raises(TypeError, match="state_grad_kernel has 3 parameters, got 4"):
        triton_call(state_grad_kernel, x, x, out=(jax.ShapeDtypeStruct((16,), "float32"),), **OPTIONS)


@pytest.mark.parametrize("aliases", [{"x.v": "dh"}, {"x.o": "dv"}])
def test_aliases_name_an_operand_and_an_output(aliases):
    x = EntryOutput(jnp.zeros(16), jnp.zeros(16), None, 1, 1)
    out = SplitGrad(jax.ShapeDtypeStruct((16,), jnp.float32))
    with pytest.raises(KeyError):
        triton_call(state_grad_kernel, x, out=out, aliases=aliases, **OPTIONS)
