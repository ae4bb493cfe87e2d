"""RWKV-6 and RWKV-7 for JAX: exact, fast ops with hand-written gradients, and Flax linen layers and models on
them.
"""

from . import ops
from .core.checked import checked
from .core.names import CHECKPOINT_NAMES, remat_policy
from .versions import show_versions

__version__ = "0.1.0"
__all__ = ["CHECKPOINT_NAMES", "checked", "ops", "remat_policy", "show_versions"]
