"""What the tests of kernels in interpreters share."""

import cases
import pytest


@pytest.fixture(params=cases.OPS)
def op(request):
    """Each of the two."""
    return request.param


@pytest.fixture
def fresh():
    """See `cases.fresh_traces`."""
    with cases.fresh_traces():
        yield


@pytest.fixture
def half(monkeypatch, fresh):
    """RWKV-7's forms for 16 bits, in float32: so that they are compared at float32's accuracy."""
    from fla_jax.pallas.rwkv7 import chunk_host  # Triton may be missing

    monkeypatch.setattr(chunk_host, "has_bf16_dots", lambda x: True)


@pytest.fixture
def split(monkeypatch, fresh):
    """Rows are cut from two chunks on."""
    from fla_jax.pallas.common import chunk_host  # Triton may be missing

    monkeypatch.setattr(chunk_host, "MIN_SPLIT_LEN", 16)
