"""An HTTP server with OpenAI's API over a `Generator`: ``python -m fla_jax.serve CHECKPOINT``.

Installed with ``pip install "fla-jax[serve]"``.
"""

try:
    from .app import Limits, create_app
except ModuleNotFoundError as error:
    what = f"fla_jax.serve needs the package {(error.name or '').partition('.')[0]}"
    raise ImportError(f"{what}: pip install 'fla-jax[serve]'") from error

__all__ = [
    "Limits",
    "create_app",
]
