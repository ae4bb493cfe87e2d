"""Formats of checkpoints. `FORMATS` is open: append another one, and it is asked before the others."""

from __future__ import annotations

from .format import Format
from .huggingface import HUGGINGFACE
from .pth import PTH

__all__ = ["FORMATS", "HUGGINGFACE", "PTH", "Format"]

FORMATS: list[Format] = [HUGGINGFACE, PTH]
