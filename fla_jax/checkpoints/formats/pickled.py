"""Pickles of dicts of tensors, read without running anything that they ask for.

Python's unpickler calls whatever a pickle names, so it is not used: `pickletools` splits the pickle into its
opcodes, and the few that a dict of tensors needs act on plain data here. Names of functions stay names;
nothing is imported, and nothing is called.

Source of the format: PyTorch ``torch/serialization.py``, ``torch/_utils.py`` (``_rebuild_tensor_v2``), Python
``pickletools``.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..tensors import quoted

Value = Any  # of a pickle, made of the types that `unpickle` names
_LONGEST = 10**8  # bytes; the pickle of a model with thousands of tensors has less than a million
_MOST_AXES = 8


class Global(NamedTuple):
    """A name that the pickle mentions, "module attribute"; never looked up."""

    name: str


class Storage(NamedTuple):
    """A storage: PyTorch's class of it, its key in the archive, its number of elements."""

    kind: str
    key: str
    size: int


class Tensor(NamedTuple):
    """A tensor, as the pickle says it: only the storage is known to be one. See `check`."""

    storage: Storage
    offset: Any
    shape: Any
    stride: Any
    metadata: tuple[object, ...]

    def check(self) -> None:
        """Raises ValueError unless offset, shape and strides are sizes, and the tensor only its values."""
        _, offset, shape, stride, metadata = self
        sizes = (offset, *shape, *stride) if type(shape) is type(stride) is tuple else (None,)
        # PyTorch has them in 64 bits; larger ones would only make the arithmetic slow
        if not all(type(size) is int and 0 <= size < 2**63 for size in sizes) or len(shape) != len(stride):
            raise ValueError("has a shape or strides that are no sizes")
        if len(shape) > _MOST_AXES:
            raise ValueError(f"has {len(shape)} axes, more than the tensors of any model")
        if any(metadata):  # such as: the values are to be negated
            raise ValueError("has metadata, which would change its values")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
)
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NO_EFFECT = ("PROTO", "FRAME", "STOP")


def unpickle(data: bytes) -> Value:
    """The value, made of dict, tuple, str, int, float, bool, None, `Global`, `Storage` and `Tensor` only.

    Raises:
        ValueError: the pickle is broken, or asks for anything else. Messages print names, cut, and no other
            value: a few bytes can make one with an endless representation.
    """
    if len(data) > _LONGEST:
        raise ValueError(f"its pickle has {len(data)} bytes, more than any dict of tensors needs: refused")
    try:
        return _unpickle(data)
    except (IndexError, KeyError):
        raise ValueError("its pickle is broken (it takes what was not there)") from None


def _unpickle(data: bytes) -> Value:
    stack: list[Value] = []
    marks: list[int] = []
    memo: dict[int, Value] = {}

    def since_mark() -> tuple[Value, ...]:
        start = marks.pop()
        items = tuple(stack[start:])
        if len(stack) < start:
            raise ValueError("its pickle is broken (a mark above the stack)")
        del stack[start:]
        return items

    for opcode, arg in _opcodes(data):
        op = opcode.name
        if op in _NO_EFFECT:
            pass
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _LITERALS:
            stack.append(arg)
        elif op == "EMPTY_DICT":
            stack.append({})
        elif op == "MARK":
            marks.append(len(stack))
        elif op == "TUPLE":
            stack.append(since_mark())
        elif op in _TUPLES:
            stack.append(tuple(stack.pop() for _ in range(_TUPLES[op]))[::-1])
        elif op in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if op == "MEMOIZE" else arg] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif op == "GLOBAL":
            stack.append(Global(str(arg)))
        elif op == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Global(f"{_text(module)} {_text(attribute)}"))
        elif op == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif op == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(_reduce(function, args))
        elif op in ("SETITEM", "SETITEMS"):
            items = (stack.pop(), stack.pop())[::-1] if op == "SETITEM" else since_mark()
            if type(stack[-1]) is not dict or len(items) % 2:
                raise ValueError("its pickle is broken (items for something that is no dict)")
            for name, value in zip(map(_text, items[::2]), items[1::2]):
                if name in stack[-1]:
                    raise ValueError(f"its pickle holds {quoted(name)} twice")
                stack[-1][name] = value
        elif op == "BUILD":  # attributes of a module's state_dict, format versions of its parts: no weights
            stack.pop()
            if type(stack[-1]) is not dict:
                raise ValueError("its pickle sets attributes of something that is no dict: refused")
        else:
            raise ValueError(f"its pickle uses the opcode {op}, which no dict of tensors needs: refused")
    if len(stack) != 1:
        raise ValueError("its pickle is broken (it leaves more or less than one value)")
    return stack[0]


def _opcodes(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Value]]:
    try:
        for opcode, arg, _ in pickletools.genops(data):
            yield opcode, arg
    except ValueError as error:
        raise ValueError(f"its pickle is broken ({error})") from None


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"its pickle is broken (a name of type {type(value).__name__})")
    return value


def _storage(pid: object) -> Storage:
    """From PyTorch's persistent id ``("storage", type, key, location, number of elements)``.

    The location, the device that the tensor lay on, plays no role.
    """
    if type(pid) is tuple and len(pid) == 5 and pid[0] == "storage":
        _, kind, key, _, size = pid
        if type(kind) is Global and type(key) is str and type(size) is int and size >= 0:
            return Storage(kind.name, key, size)
    raise ValueError("its pickle is broken (a persistent id that is no storage)")


def _reduce(function: object, args: object) -> Value:
    """The result of calling ``function``, one of the three that checkpoints name."""
    name = function.name if type(function) is Global else "something that is no function"
    if type(args) is tuple:
        if name == "collections OrderedDict" and not args:
            return {}
        if name == "torch._utils _rebuild_parameter" and args and type(args[0]) is Tensor:
            return args[0]
        if name == "torch._utils _rebuild_tensor_v2" and len(args) in (6, 7) and type(args[0]) is Storage:
            return Tensor(args[0], args[1], args[2], args[3], args[6:])
    called = quoted(name.replace(" ", "."))
    raise ValueError(f"its pickle calls {called}, which no dict of tensors needs: refused")
