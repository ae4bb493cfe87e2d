import pytest
from harness import cases


@pytest.fixture(params=cases.OPS)
def op(request):
    return request.param
