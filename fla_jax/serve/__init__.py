"""An HTTP server with OpenAI's API over a `Generator`: ``python -m fla_jax.serve CHECKPOINT``.

Installed with ``pip install "fla-jax[serve]"``.
"""

from .app import Limits, create_app

__all__ = [
    "Limits",
    "create_app",
]
