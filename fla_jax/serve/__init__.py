"""An HTTP server with OpenAI's API over a `Generator`: ``python -m fla_jax.serve CHECKPOINT``.

Installed with ``pip install "fla-jax[serve]"``.
"""

from .app import Limits, create_app
from .chat import ChatTemplate, JinjaTemplate, Turn, WorldTemplate, chat_template

__all__ = [
    "ChatTemplate",
    "JinjaTemplate",
    "Limits",
    "Turn",
    "WorldTemplate",
    "chat_template",
    "create_app",
]
