"""`FSDPModule`: the class swap, unshard and reshard, the registered forward methods.

The only file that writes `__class__` of a module. What must not live here: validation
of `fully_shard`'s arguments, what a call does (`_call`), and the setters (`_knobs`).
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from fsdp_jax import _state_dict
from fsdp_jax._call import call
from fsdp_jax._generated import builtin_base, generate, original_class
from fsdp_jax._knobs import Knobs
from fsdp_jax._pending import PendingGradients, synchronize_gradients
from fsdp_jax._state import (
    STATE,
    SUFFIX,
    FSDPState,
    check_concrete,
    group_of,
    place_replicated,
    set_state,
    sharded_modules,
    state_of,
)
from fsdp_jax._threads import LOCK, current, original
from fsdp_jax._unshard import (
    STARTED,
    UnshardHandle,
    gather_own_dtype,
    reshard_now,
    take_started,
)


class FSDPModule(Knobs):
    """Methods that `fully_shard` adds to a module.

    Never made directly: `fully_shard(module)` turns `type(module)` into a subclass of
    this class and of the original one.

    Source: specification, "The user contract"; PyTorch `FSDPModule`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the original's own hook: no new class was made in the user's code.
        pytree = original_class(cls)._pytree__is_pytree
        nnx.Module.__init_subclass__.__func__(cls, pytree=pytree, **kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is FSDPModule:
            raise TypeError(
                "FSDPModule cannot be made directly. Make the module, then call "
                "fully_shard(module)."
            )
        original = original_class(cls)
        if original.__new__ is object.__new__:
            return object.__new__(original)
        return original.__new__(original, *args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group; inner groups stay as they are.

        The full arrays have the parameters' own dtype, replicated on every device
        of the mesh; a second call does nothing. They stay until `reshard()` or the end
        of the next forward that frees them, inside a jitted function until it returns.
        What is written into them is kept.

        Args:
            async_op: start the gather and return a handle; the parameters become the
                full arrays in its `wait()`.

        Returns:
            None, or the handle.

        Raises:
            RuntimeError: parameters are abstract, or the module comes from outside of
                the function being traced.

        Source: specification, "Communication grouping"; PyTorch `FSDPModule.unshard`.
        """
        self = current(self)
        state, group = state_of(self), group_of(self)
        check_concrete(self, "unshard")
        handle = STARTED.get(id(original(self)))
        if group.full or state.window:
            handle = UnshardHandle(self, [], [])
            handle.cancel()
        elif handle is None:
            shards = group.values()
            handle = UnshardHandle(self, shards, gather_own_dtype(self, group))
        if async_op:
            if handle.pending and not group.is_traced():
                STARTED[id(original(self))] = handle
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's full parameters; does nothing if it is sharded.

        A gather started by `unshard(async_op=True)` is dropped.

        Raises:
            RuntimeError: called while a forward of the module is running, or it is full
                and comes from outside of the function being traced.

        Source: specification, "Communication grouping"; PyTorch `FSDPModule.reshard`.
        """
        self = current(self)
        if state_of(self).window:
            raise RuntimeError(
                "reshard: a forward of this module is running and needs its "
                "parameters. Call reshard() after it."
            )
        if handle := take_started(self):
            handle.cancel()
        reshard_now(self)

    def reset_iter_state(self) -> None:
        """Bring this module and all inner ones back to rest, after a caught exception.

        Every group is resharded, and forward counts and started gathers are dropped.
        Safe to call at any time outside a forward.

        Raises:
            RuntimeError: called in a forward of the module or of an enclosing one.

        Source: specification, table of knobs; PyTorch `reset_iter_state`.
        """
        state = state_of(current(self))
        if state.window or state.inside:
            raise RuntimeError(
                "reset_iter_state: a forward is running. Call it on the root, outside "
                "of the forward."
            )
        for module in sharded_modules(self):
            if handle := take_started(module):
                handle.cancel()
            reshard_now(module)

    def synchronize_gradients(self, pending: PendingGradients) -> Any:
        """Reduce gradients of this module; see `fsdp_jax.synchronize_gradients`."""
        return synchronize_gradients(self, pending)

    def state_dict(self) -> dict[str, Any]:
        """Dotted names to arrays, for everything that `nnx.state` reports.

        Managed parameters come as sharded arrays also while they are unsharded; the
        module is left as it is. No communication if it is sharded.

        Returns:
            One entry per Variable, in the order of `nnx.state`.

        Source: specification, "names unchanged"; PyTorch `state_dict`.
        """
        return _state_dict.state_dict(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> _state_dict.IncompatibleKeys:
        """Write arrays into the module by dotted name, each in its resting layout.

        Full host arrays, arrays on one device and sharded arrays are all accepted; of a
        host array every process keeps only its slices. Floating values are cast to the
        dtype of the Variable. For random keys their `jax.random.key_data` will do.
        Nothing is written unless everything is valid.

        Args:
            state_dict: names as in `state_dict()`.
            strict: whether names must match exactly; if not, others are left alone.

        Returns:
            The missing and the unexpected names.

        Raises:
            TypeError: `state_dict` is not a mapping, or a value is not an array.
            ValueError: a missing or unexpected name, another shape, or a dtype of
                another kind.

        Source: PyTorch `load_state_dict`.
        """
        return _state_dict.load_state_dict(self, state_dict, strict)

    def __deepcopy__(self, memo: Any = None) -> Any:
        raise RuntimeError(
            "fully_shard: a sharded module does not support deepcopy. Use "
            "model.state_dict() or nnx.state(model) for its values, or "
            "nnx.clone(model) for a second sharded module."
        )

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        original = original_class(type(self))
        return _rebuild_module, (original, state_of(self), self.__getstate__())


# --- the class swap ---------------------------------------------------------------


_GENERATED: dict[type, type] = {}


def fsdp_class(original: type) -> type:
    """The generated subclass of `FSDPModule` and `original`, one per original class."""
    with LOCK:
        if original not in _GENERATED:
            _GENERATED[original] = _generate(original)
        return _GENERATED[original]


def _generate(original: type) -> type:
    namespace = {}
    if any("__call__" in vars(cls) for cls in original.__mro__):
        namespace["__call__"] = _hooked(original.__call__, None)
    generated = generate(original, FSDPModule, SUFFIX, namespace)
    copyreg.pickle(type(generated), _reduce_class)
    return generated


def _reduce_class(cls: type) -> tuple[Any, ...]:
    return fsdp_class, (original_class(cls),)


def check_convertible(module: Any) -> None:
    """See that `convert` will do, and leave the module as it is.

    Raises:
        TypeError: objects of the module's class cannot get a generated class.
    """
    original = type(module)
    name = original.__name__
    if (base := builtin_base(original)) is not None:
        raise TypeError(
            f"fully_shard: {name} derives from {base.__name__}, whose objects NNX "
            "cannot make (nnx.clone and nnx.jit fail on such a module). Hold the "
            f"{base.__name__} in an attribute of the module instead."
        )
    try:
        object.__setattr__(module, "__class__", fsdp_class(original))
    except Exception as error:
        raise TypeError(
            f"fully_shard: no subclass of {name} can be made that its objects can "
            f"take on ({error}). Shard a module whose class Python can subclass, such "
            "as one that holds this one in an attribute."
        ) from error
    object.__setattr__(module, "__class__", original)


def convert(module: Any, state: FSDPState) -> None:
    """Give a module its generated class and its state, in place."""
    generated = fsdp_class(type(module))
    object.__setattr__(module, STATE, state)
    object.__setattr__(module, "__class__", generated)


def revert(module: Any) -> None:
    """Undo `convert`."""
    if isinstance(module, FSDPModule):
        object.__setattr__(module, "__class__", original_class(type(module)))
        vars(module).pop(STATE, None)


def _rebuild_module(original: type, state: FSDPState, attributes: Any) -> Any:
    generated = fsdp_class(original)
    module = object.__new__(generated)
    module.__setstate__(attributes)
    object.__setattr__(module, STATE, state)
    set_state(module, forwards_left=0)  # values come back as shards
    place_replicated(module)
    for name in state.forward_methods:
        _hook_method(generated, name)
    return module


def _hooked(function: Callable, name: str | None) -> Callable:
    """A method that gathers around `function`; `name` must be registered, or None."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name is not None and name not in state_of(self).forward_methods:
            return function(self, *args, **kwargs)
        return call(current(self), function, args, kwargs)

    return method


def _hook_method(generated: type, name: str) -> None:
    if name not in vars(generated):
        function = getattr(original_class(generated), name)
        setattr(generated, name, _hooked(function, name))


def check_own_names(module: Any, what: str) -> None:
    """Raise if a module has attributes in the place of methods of `FSDPModule`.

    A method of its class is replaced by that of the same name, as in PyTorch.

    Raises:
        ValueError: it has.
    """
    cls = type(module)
    for name in dir(FSDPModule):
        if name.startswith("_") or hasattr(nnx.Module, name):
            continue
        if name in vars(module):
            raise ValueError(
                f"fully_shard: {what}, a {cls.__name__}, has an attribute {name!r} of "
                "its own, and a sharded module has a method of that name. Rename the "
                f"attribute: {name}_ or the like."
            )


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Treat a method of a sharded module as a forward: gather, run, free.

    Inputs and outputs are cast as in a call of the module. On a module that is not
    sharded this does nothing, so that model code can call it in any case.

    Args:
        module: a module, sharded or not.
        method_name: name of a method of its class.

    Raises:
        TypeError: the name is not a str, or the attribute is not a plain method; a
            generator runs when its parameters are freed again.
        ValueError: the sharded module has no such method.

    Source: specification, "Calling forward directly"; PyTorch.
    """
    if not isinstance(method_name, str):
        raise TypeError(
            "register_fsdp_forward_method: method_name must be a str, got "
            f"{method_name!r}."
        )
    if not isinstance(module, FSDPModule):
        return
    cls = original_class(type(module))
    found = inspect.getattr_static(cls, method_name, None)
    if found is None:
        raise ValueError(
            f"register_fsdp_forward_method: {cls.__name__} has no method "
            f"{method_name!r}."
        )
    if not callable(found) or isinstance(found, (staticmethod, classmethod, type)):
        raise TypeError(
            f"register_fsdp_forward_method: {cls.__name__}.{method_name} is a "
            f"{type(found).__name__}, not a method of an instance, so there are no "
            "parameters to gather for it."
        )
    runs_later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction)
    if any(later(found) for later in (*runs_later, inspect.isasyncgenfunction)):
        raise TypeError(
            f"register_fsdp_forward_method: {cls.__name__}.{method_name} is a "
            "generator or a coroutine: its body runs after the call has returned, when "
            "its parameters are freed again. Register the method that makes one step, "
            "or keep the module unsharded meanwhile: module.unshard() ... reshard()."
        )
    state = state_of(module)
    if method_name == "__call__" or method_name in state.forward_methods:
        return
    _hook_method(type(module), method_name)
    set_state(module, forward_methods=(*state.forward_methods, method_name))
