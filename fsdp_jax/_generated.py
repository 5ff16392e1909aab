"""Making a class that an object of another class can take on.

What lives here: the generated subclass of a module's class and of one that adds
methods, whatever stands among the bases of the first. What must not: which methods
those are, and the objects (`_module`).
"""

from __future__ import annotations

import types
from typing import Any

from flax import nnx

_ORIGINAL = "_pytree__original"  # in the namespace of a generated class
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


class _Hookless:
    """Ends the chain of `__init_subclass__` before bases that stand after NNX's."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class _GeneratedMeta(type(nnx.Module)):
    """Metaclass of the generated classes, which change whatever the original's says."""

    __setattr__ = type.__setattr__

    def mro(cls) -> list[type]:
        """What is added before the original, in whichever order the bases stand."""
        original = vars(cls).get(_ORIGINAL)
        if original is None:
            return super().mro()
        (added,) = (base for base in cls.__bases__ if base is not original)
        rest = list(original.__mro__)
        rest.insert(rest.index(nnx.Pytree) + 1, _Hookless)
        return [cls, *(c for c in added.__mro__ if c not in rest), *rest]


def generate(original: type, added: type, suffix: str, namespace: dict) -> type:
    """Make a subclass of two NNX classes that objects of the first can take on.

    Args:
        original: the class of the objects.
        added: a class whose methods go before those of the original.
        suffix: of the name.
        namespace: attributes of the new class.
    """
    meta: Any = type(original)
    if issubclass(_GeneratedMeta, meta):
        meta = _GeneratedMeta
    else:
        meta = types.new_class(_GeneratedMeta.__name__, (_GeneratedMeta, meta))
    bases = (added, original)
    if not _has_layout_of_nnx(original):
        bases = (original, added)
    named = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__ + suffix,
        "__doc__": original.__doc__,
        _ORIGINAL: original,
    }
    generated = meta(
        original.__name__ + suffix,
        bases,
        namespace | named,
    )
    generated._pytree__nodes = original._pytree__nodes
    return generated


def original_class(generated: type) -> type:
    """The class that `generate` was given."""
    for cls in generated.__mro__:
        if _ORIGINAL in vars(cls):
            return vars(cls)[_ORIGINAL]
    raise TypeError(f"{generated.__name__} was not made by fully_shard")


def builtin_base(cls: type) -> type | None:
    """The built-in class, other than `object`, that makes the objects of a class.

    NNX makes objects with `object.__new__`, which Python refuses for these.
    """
    for base in cls.__mro__:
        made_in_c = not base.__flags__ & _HEAP_TYPE and "__new__" in vars(base)
        if made_in_c and base is not object:
            return base
    return None


def _has_layout_of_nnx(cls: type) -> bool:
    """Whether the memory of instances is laid out as an `nnx.Module`, then extended.

    Python lets an object change its class only between classes that extend the same
    layout, and gives a class that of its first base, unless another one needs more.
    """
    line: type | None = cls
    while line not in (nnx.Module, None):
        line = line.__base__
    return line is nnx.Module
