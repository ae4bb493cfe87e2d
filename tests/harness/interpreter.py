"""Triton's interpreter, made faster."""

import functools
import inspect
import os


def patch_once() -> None:
    """Patches `triton.language` once for a kernel's run; Triton 3.6 does it in every call: a third slower."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:  # there is no Triton but on Linux
        return

    patch, patched = interpreter._patch_lang, set()

    @functools.cache
    def modules(function):
        """What is patched for a function: the modules of the language that it sees, by name."""
        seen = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(module.__name__ for module in seen if module in (language, language.core))

    def begin(kernel):
        patched.clear()
        patched.update(modules(kernel))
        return patch(kernel)

    def call(self, *args, **kwargs):
        if not modules(self.fn) <= patched:
            patch(self.fn)
            patched.update(modules(self.fn))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = begin
    interpreter.InterpretedFunction.__call__ = call
