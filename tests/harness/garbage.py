"""Python's search for cyclic garbage, made rare."""

import gc


def collect_seldom() -> None:
    """Tracing makes many objects that live long: looking through all of them took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
