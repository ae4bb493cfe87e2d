"""Triton's interpreter, made faster, and with bfloat16 as a GPU computes it."""

import functools
import importlib.util
import inspect
import os

import ml_dtypes
import numpy as np


def patch() -> None:
    """Patches the interpreter where it will run kernels: nowhere without Triton, which only Linux has."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        _patch_once()
        _correct_bfloat16()


def _correct_bfloat16() -> None:
    """The interpreter adds and multiplies these numbers as 16-bit integers, and truncates to them. Here they
    are numbers, and results are rounded to the nearest.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    from triton.runtime.interpreter import TensorHandle

    dot, cast, binary = Builder.create_dot, Builder.cast_impl, Builder.binary_op

    def is_bfloat16(x):
        return x.dtype.scalar == tl.bfloat16

    def in_float32(x):
        if not is_bfloat16(x):
            return x
        values = np.ascontiguousarray(x.data).view(ml_dtypes.bfloat16)
        return TensorHandle(values.astype(np.float32), tl.float32)

    def rounded(values):
        return TensorHandle(np.asarray(values, ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    def correct_dot(self, a, b, *rest):
        return dot(self, in_float32(a), in_float32(b), *rest)

    def correct_cast(self, x, to):
        wide = in_float32(x)
        if to.scalar == tl.bfloat16 and wide.dtype.scalar.is_floating():
            return rounded(wide.data)
        return cast(self, wide, to)

    def correct_binary(self, x, y, op):
        if not is_bfloat16(x):
            return binary(self, x, y, op)
        values = op(in_float32(x).data, in_float32(y).data)
        return rounded(values) if values.dtype == np.float32 else TensorHandle(values, tl.int1)

    Builder.create_dot, Builder.cast_impl, Builder.binary_op = correct_dot, correct_cast, correct_binary


def _patch_once() -> None:
    """Patches `triton.language` once for a kernel's run; Triton 3.6 does it in every call: a third slower."""
    from triton import language
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set()

    @functools.cache
    def modules(function):
        """What is patched for a function: the modules of the language that it sees, by name."""
        seen = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(module.__name__ for module in seen if module in (language, language.core))

    def begin(kernel):
        patched.clear()
        patched.update(modules(kernel))
        return patch_language(kernel)

    def call(self, *args, **kwargs):
        if not modules(self.fn) <= patched:
            patch_language(self.fn)
            patched.update(modules(self.fn))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = begin
    interpreter.InterpretedFunction.__call__ = call
