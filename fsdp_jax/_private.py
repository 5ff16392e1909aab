"""A private copy of a module for the length of a call, and what returns from it.

A call holds gathered parameters, and other threads must not see them in the caller's
module: it runs on a copy of the module's objects and of its managed parameters. All
other Variables are shared. What must not live here: what a call does (`_call`).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from flax import nnx

from fsdp_jax import _functional
from fsdp_jax._managed import METADATA, WRITTEN, ManagedVariable, install
from fsdp_jax._spec import ParamSpec
from fsdp_jax._state import STATE, group_of, is_sharded, set_state, state_of
from fsdp_jax._threads import LOCK, OPEN


class PrivateCopy:
    """A module's copy, and what it was made from.

    Attributes:
        module: the copy.
    """

    def __init__(self, module: Any) -> None:
        self.originals: dict[int, Any] = {}
        self.copies: dict[int, Any] = {}
        self._nodes: list[tuple[Any, Any, dict[str, Any]]] = []
        self._variables: list[tuple[Any, Any, Any, dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._of_linen = {
            id(v)
            for _, node in _functional.walk(module)
            if isinstance(node, nnx.bridge.ToNNX)
            for _, v in _functional.walk(node)
            if isinstance(v, nnx.Variable) and not isinstance(v, nnx.RngState)
        }
        with LOCK:
            self.module = self._copied(module)
        for _, copy, given in self._nodes:
            for name, value in given.items():
                bound = isinstance(value, types.MethodType)
                if bound and id(value.__self__) in self.copies:
                    own = self.copies[id(value.__self__)]
                    given[name] = types.MethodType(value.__func__, own)
                    _set(copy, name, given[name])

    def _copied(self, value: Any) -> Any:
        """The copy of a node, Variable, or container of them; other values as is."""
        if isinstance(value, nnx.Variable):
            return self._copied_variable(value)
        if _functional.is_node(value):
            return self._copied_node(value)
        if isinstance(value, (str, int, float, jax.Array)):
            return value
        if id(value) in self._containers:
            return self._containers[id(value)][1]
        leaves, treedef = _flatten(value)
        if not any(map(_functional.is_node, leaves)):
            return value
        made = treedef.unflatten(map(self._copied, leaves))
        self._containers[id(value)] = value, made
        return made

    def _copied_node(self, node: Any) -> Any:
        if id(node) in self.copies:
            return self.copies[id(node)]
        copy = object.__new__(type(node))
        self._pair(node, copy)
        given = _attributes(node)
        for name, value in given.items():
            looks_in = not name.startswith("_pytree__")
            if looks_in and _functional.is_data(node, name):
                given[name] = self._copied(value)
            _set(copy, name, given[name])
        self._nodes.append((node, copy, given))
        return copy

    def _copied_variable(self, variable: Any) -> Any:
        managed = isinstance(variable, ManagedVariable)
        if not managed and id(variable) not in self._of_linen:
            return variable
        if id(variable) in self.copies:
            return self.copies[id(variable)]
        copy = object.__new__(type(variable))
        self._pair(variable, copy)
        given = _attributes(variable) | {"_var_metadata": dict(variable._var_metadata)}
        for name, value in given.items():
            object.__setattr__(copy, name, value)
        metadata = dict(variable._var_metadata)
        self._variables.append((variable, copy, variable.get_raw_value(), metadata))
        return copy

    def _pair(self, node: Any, copy: Any) -> None:
        self.copies[id(node)], self.originals[id(copy)] = copy, node

    def inward(self, tree: Any) -> Any:
        """A tree with copies in the places of the objects that have one."""
        leaves, treedef = _flatten(tree)
        if not any(id(leaf) in self.copies for leaf in leaves):
            return tree
        return treedef.unflatten(self.copies.get(id(leaf), leaf) for leaf in leaves)

    def outward(self, value: Any) -> Any:
        """A tree, or object, with the caller's objects in the places of the copies."""
        return self._outward(value, set())

    def _outward(self, value: Any, seen: set[int]) -> Any:
        if id(value) in self.originals:
            return self.originals[id(value)]
        if isinstance(value, (nnx.Variable, str, int, float, jax.Array, type)):
            return value
        if _functional.is_node(value) or dataclasses.is_dataclass(value):
            if id(value) not in seen:  # a new object: what it holds is put in place
                seen.add(id(value))
                for name, held in _attributes(value).items():
                    if (new := self._outward(held, seen)) is not held:
                        _set(value, name, new)
            return value
        if isinstance(value, types.MethodType) and id(value.__self__) in self.originals:
            return types.MethodType(value.__func__, self.originals[id(value.__self__)])
        leaves, treedef = _flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        new = [self._outward(leaf, seen) for leaf in leaves]
        same = all(a is b for a, b in zip(new, leaves, strict=True))
        return value if same else treedef.unflatten(new)

    def carry_back(self) -> None:
        """Put into the caller's objects what changed in the copies."""
        with LOCK:
            for module, copy, given in self._nodes:
                self._carry_attributes(module, copy, given)
            before = {id(v): (raw, data) for v, _, raw, data in self._variables}
            for module, copy, given in self._nodes:
                if is_sharded(module) and STATE in given:
                    self._carry_group(module, copy, given[STATE], before)
            for variable, copy, raw, metadata in self._variables:
                self._carry_value(variable, copy, raw, metadata)
                # Whatever kept the copy has a module at rest, as `nnx.clone` makes one.
                install(copy, variable.get_raw_value())
                object.__setattr__(copy, "_var_metadata", dict(variable._var_metadata))

    def _carry_attributes(self, node: Any, copy: Any, given: dict[str, Any]) -> None:
        made = {id(new): old for old, new in self._containers.values()}
        after = _attributes(copy)
        for name, value in after.items():
            same = name in given and value is given[name]
            if same and id(value) in made:
                new = self.outward(value)
                same = _is_same(new, made[id(value)])
            if not same and name != STATE:
                _set(node, name, self.outward(value))
        for name in set(given) - set(after):
            vars(node).pop(name, None)

    def _carry_group(self, module: Any, copy: Any, given: Any, before: dict) -> None:
        """Carry the state of a sharded module, and whether its group is full.

        Not if another thread has moved the group meanwhile: then it is as that left it.
        """
        state = state_of(copy)
        names = [f.name for f in dataclasses.fields(state)]
        changes = {n: getattr(state, n) for n in names}
        changes = {n: v for n, v in changes.items() if v != getattr(given, n)}
        pairs = [
            (v, self.copies[id(v)], *before[id(v)])
            for v in group_of(module).variables
            if id(v) in before
        ]
        moved = [
            pair for pair in pairs if _spec(pair[1]).full != pair[3][METADATA].full
        ]
        here = all(v.get_raw_value() is raw for v, _, raw, _ in pairs)
        here = here and state_of(module).forwards_left == given.forwards_left
        if not here:
            changes.pop("forwards_left", None)
        if changes:
            set_state(module, **changes)
        for variable, own, _, _ in moved if here else ():
            full = _spec(own).full
            _hold(variable, own.get_raw_value(), _spec(variable).marked(full))
        object.__setattr__(copy, STATE, state_of(module))

    def _carry_value(self, variable: Any, copy: Any, raw: Any, given: dict) -> None:
        value, after = copy.get_raw_value(), dict(copy._var_metadata)
        own = variable._var_metadata
        if _plain(after) != _plain(given):
            kept = {n: own[n] for n in (METADATA, WRITTEN) if n in own}
            object.__setattr__(variable, "_var_metadata", _plain(after) | kept)
        if value is raw or value is variable.get_raw_value():
            return
        spec, theirs = own.get(METADATA), after.get(METADATA)
        if spec is None or theirs is None or spec == theirs:
            install(variable, value)
        elif theirs.full == given[METADATA].full:  # written, not moved
            install(variable, spec.settled(theirs.unpadded(value)))


def _spec(variable: Any) -> ParamSpec:
    return variable._var_metadata[METADATA]


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata without what the library keeps there."""
    return {n: v for n, v in metadata.items() if n not in (METADATA, WRITTEN)}


def _hold(variable: Any, value: Any, spec: Any) -> None:
    """Put value and spec into a Variable, such that reading between is right.

    A full value is read alike by both specs, one with padding only by that at rest.
    """
    metadata = variable._var_metadata
    if spec.full:
        install(variable, value)
        metadata[METADATA] = spec
    else:
        metadata[METADATA] = spec
        install(variable, value)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; what JAX cannot flatten (keys of two types) is a leaf."""
    try:
        return jax.tree.flatten(tree, is_leaf=_functional.is_node)
    except (TypeError, ValueError):
        return jax.tree.flatten(tree, is_leaf=lambda _: True)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects."""
    (leaves, tree), (others, other) = _flatten(a), _flatten(b)
    return tree == other and all(x is y for x, y in zip(leaves, others, strict=True))


def _attributes(x: Any) -> dict[str, Any]:
    """Attributes of an object, of its slots too."""
    found: dict[str, Any] = {}
    for cls in type(x).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with suppress(AttributeError):  # not set, as may be
                    found[name] = object.__getattribute__(x, name)
    with suppress(AttributeError):  # a Variable has none
        found |= object.__getattribute__(x, "__dict__")
    return found


def _set(x: Any, name: str, value: Any) -> None:
    """Set an attribute as it is stored: past properties and checks."""
    slot = inspect.getattr_static(type(x), name, None)
    if isinstance(slot, types.MemberDescriptorType):
        object.__setattr__(x, name, value)
    else:
        vars(x)[name] = value


@contextmanager
def private_copy(module: Any) -> Iterator[PrivateCopy]:
    """Within the block, a copy that this thread's calls run on.

    Afterwards, also after an error, what changed in it is in the caller's objects.
    """
    private = PrivateCopy(module)
    token = OPEN.set((*OPEN.get(), (private.originals, private.copies)))
    try:
        yield private
    finally:
        OPEN.reset(token)
        private.carry_back()
