"""What the tests of kernels in interpreters share."""

import cases
import jax
import pytest


@pytest.fixture(params=cases.OPS)
def op(request):
    """Each of the two."""
    return request.param


@pytest.fixture
def split(monkeypatch):
    """Rows are cut from two chunks on; traces made without are not used again."""
    from fla_jax.pallas.plan import chunked  # Triton may be missing

    monkeypatch.setattr(chunked, "SHORTEST", 16)
    jax.clear_caches()
    cases.runner.cache_clear()
    yield
    jax.clear_caches()
    cases.runner.cache_clear()
