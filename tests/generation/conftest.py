from __future__ import annotations

import pytest
import small_models as small


@pytest.fixture(scope="session")
def setup():
    model = small.model(7)
    return model, small.params(model)
