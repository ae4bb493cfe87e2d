"""Checkpoints: the library's own, official ``.pth`` files, flash-linear-attention's, and custom formats.

A format (`formats`) stores tensors by name in files; a param map (`param_maps`) has names and forms of a
family's parameters there. Both are values in open lists, `FORMATS` and `PARAM_MAPS`.
"""

from .api import load_checkpoint, load_extras, save_checkpoint
from .formats import FORMATS, Format
from .formats.pth import read_pth, write_pth
from .param_maps import PARAM_MAPS, ParamMap
from .tensors import StoredTensor, stored

__all__ = [
    "FORMATS",
    "PARAM_MAPS",
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
