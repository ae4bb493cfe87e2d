"""What the tests on several devices share."""

import pytest


def _pair(op, implementation, *marks):
    return pytest.param((op, implementation), id=f"{op}-{implementation}", marks=marks)


@pytest.fixture(
    params=[
        _pair("rwkv6", "xla"),
        _pair("rwkv7", "triton"),
        # with another JAX, each op and each implementation once: ops have one rule of sharding for all
        _pair("rwkv6", "triton", pytest.mark.one_python),
        _pair("rwkv7", "xla", pytest.mark.one_python),
    ]
)
def pair(request):
    """(op, implementation)."""
    return request.param
