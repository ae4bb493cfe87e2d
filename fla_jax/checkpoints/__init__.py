"""Checkpoints: official ``.pth`` files, flash-linear-attention's directories, and formats of your own.

A format (`formats`) is how tensors lie in files, a naming (`param_maps`) what they are called there. Both are
values in open lists, `FORMATS` and `NAMINGS`.
"""

from .api import load_checkpoint, load_extras, save_checkpoint
from .formats import FORMATS, Format
from .formats.pth import read_pth, write_pth
from .param_maps import NAMINGS, ParamMap
from .tensors import StoredTensor, stored

__all__ = [
    "FORMATS",
    "NAMINGS",
    "Format",
    "ParamMap",
    "StoredTensor",
    "load_checkpoint",
    "load_extras",
    "read_pth",
    "save_checkpoint",
    "stored",
    "write_pth",
]
