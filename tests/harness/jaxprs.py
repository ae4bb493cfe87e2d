"""What is in a jaxpr."""

from __future__ import annotations

from typing import Any

import jax


def equations(jaxpr: Any) -> list[Any]:
    """All of a jaxpr's, those of the jaxprs in it included."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(sub, "eqns"):  # a jaxpr, closed or not
                found += equations(sub)
    return found
