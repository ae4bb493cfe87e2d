import pytest
from harness.places import PALLAS_INTERPRETER


@pytest.fixture(autouse=True)
def interpreter(request, monkeypatch):
    """Pallas' interpreter runs what a test's parameter says belongs there."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    place = parameters.get("place", getattr(parameters.get("entry"), "place", None))
    if place is PALLAS_INTERPRETER:
        monkeypatch.setenv("FLA_JAX_PALLAS_INTERPRET", "1")
