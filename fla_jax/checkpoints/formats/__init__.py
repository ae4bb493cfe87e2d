"""Formats of checkpoints. `FORMATS` is an open list: an appended format is tried before the others."""

from __future__ import annotations

from .format import Format
from .huggingface import HUGGINGFACE
from .pth import PTH

__all__ = ["FORMATS", "HUGGINGFACE", "PTH", "Format"]

FORMATS: list[Format] = [HUGGINGFACE, PTH]
