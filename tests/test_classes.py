"""Classes of modules with other bases than `nnx.Module`, in any order."""

import abc
import copy
import dataclasses
import pickle
from typing import Any, ClassVar, Generic, Protocol, TypeVar, final

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import FSDPModule, fully_shard, local_shape
from tests import helpers

T = TypeVar("T")


class Layer(nnx.Module):
    """A parameter that multiplies."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(1.0, 9.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x * self.w[...])


class Plain:
    """A mixin with a method that goes on to the next class."""

    def extra_repr(self) -> str:
        return "plain"


class Slotted:
    """A mixin without a dict."""

    __slots__ = ()


class Abstract(abc.ABC):
    """A mixin that asks for a call."""

    @abc.abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array: ...


class Called:
    """A mixin that brings the call."""

    def __call__(self: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x * self.w[...])


@dataclasses.dataclass
class Fields:
    """A dataclass mixin."""

    size: int = 8


class Registry:
    """A mixin that counts its subclasses and asks each for a tag."""

    tags: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registry.tags.append(tag)


class Attributes:
    """A mixin that reads and writes attributes by its own methods."""

    def __getattr__(self, name: str) -> Any:
        if name == "anything":
            return "found"
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Asks(Protocol):
    """A protocol to be met."""

    def __call__(self, x: jax.Array) -> jax.Array: ...


class Closed(type(nnx.Module)):
    """A metaclass without keywords, whose classes do not change once they are used."""

    def __new__(mcs, name: str, bases: Any, namespace: Any) -> Any:
        return super().__new__(mcs, name, bases, namespace)

    def __setattr__(cls, name: str, value: Any) -> None:
        if getattr(cls, "_closed", False):
            raise TypeError("this class does not change any more")
        super().__setattr__(name, value)


class ProtocolMeta(type(nnx.Module), type(Asks)):
    """What makes modules that name their protocol."""


class PlainFirst(Plain, Layer): ...


class PlainBeforeModule(Plain, Called, nnx.Module):
    __init__ = Layer.__init__


class SlottedFirst(Slotted, Layer): ...


class AbstractFirst(Abstract, nnx.Module):
    __init__ = Layer.__init__
    __call__: Any = Layer.__call__


class GenericFirst(Generic[T], Layer): ...


class GenericLast(Layer, Generic[T]): ...


class ProtocolFirst(Asks, Layer, metaclass=ProtocolMeta):
    __call__ = Layer.__call__


class FieldsFirst(Fields, Layer):
    __init__: Any = Layer.__init__


class RegistryFirst(Registry, Layer, tag="first"): ...


class RegistryLast(Layer, Registry, tag="last"): ...


class AttributesFirst(Attributes, Layer): ...


class CalledLast(nnx.Module, Called):
    __init__ = Layer.__init__


class Left(Layer): ...


class Right(Layer): ...


class Diamond(Left, Plain, Right): ...


class DiamondLate(Plain, Left, Right): ...


class ClosedFirst(Plain, Layer, metaclass=Closed): ...


ClosedFirst._closed = True  # type: ignore[attr-defined]


@final
class Final(Plain, Layer): ...


class NoPytree(Plain, Called, nnx.Module, pytree=False):
    __init__ = Layer.__init__


class Stateful(Plain, Layer):
    """Leaves an attribute out of its pickle and makes it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = nnx.static(print)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = nnx.static(repr)


CLASSES: list[Any] = [
    *(PlainFirst, PlainBeforeModule, SlottedFirst, AbstractFirst, GenericFirst),
    *(GenericFirst[int], GenericLast, ProtocolFirst, FieldsFirst, RegistryFirst),
    *(
        RegistryLast,
        AttributesFirst,
        CalledLast,
        Diamond,
        DiamondLate,
        ClosedFirst,
        Final,
    ),
    *(Final, NoPytree, Stateful),
]


class Model(nnx.Module):
    """One layer of each class."""

    def __init__(self) -> None:
        self.layers = nnx.List([cls() for cls in CLASSES])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def test_modules_of_any_bases_are_sharded_and_keep_their_class():
    tags = list(Registry.tags)
    mesh = helpers.mesh_of(4)
    for make in CLASSES:
        plain, module = make(), make()
        original = type(module)
        assert fully_shard(module, mesh=mesh) is module
        cls = type(module)
        assert cls.__name__ == original.__name__ + "FSDPModule"
        assert cls.__bases__ in ((FSDPModule, original), (original, FSDPModule))
        assert cls.__mro__.index(FSDPModule) == 1
        assert [c for c in cls.__mro__ if c in original.__mro__] == [*original.__mro__]
        assert local_shape(module.w) == (2,)
        assert list(vars(module))[: len(vars(plain))] == list(vars(plain))
        for again in (
            nnx.merge(*nnx.split(module)),
            nnx.clone(module),
            copy.copy(module),
            pickle.loads(pickle.dumps(module)),
            cloudpickle.loads(cloudpickle.dumps(module)),
        ):
            assert type(again) is cls
            assert local_shape(again.w) == (2,)
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert isinstance(cls(), original)
        assert not isinstance(cls(), FSDPModule)
    assert Registry.tags == tags
    for plain in (GenericFirst, GenericLast):
        cls: Any = type(fully_shard(plain(), mesh=mesh))
        assert type(cls[int]()) is plain


def test_modules_of_any_bases_have_the_gradients_of_the_unsharded():
    model = helpers.shard_blocks(Model(), mesh=helpers.mesh_of(4))
    x = jnp.linspace(-2, 2, 64).reshape(8, 8)
    found = nnx.jit(fsdp_jax.value_and_grad(loss))(model, x)
    helpers.assert_trees_close(found, nnx.jit(nnx.value_and_grad(loss))(Model(), x))
    np.testing.assert_allclose(model(x), Model()(x), rtol=1e-5)


def test_what_a_class_leaves_out_of_its_pickle_is_made_anew():
    module = fully_shard(Stateful(), mesh=helpers.mesh_of(4))
    again = pickle.loads(pickle.dumps(module))
    assert again.lock is repr
    np.testing.assert_allclose(again(jnp.ones(8)), Stateful()(jnp.ones(8)), rtol=1e-6)


def test_a_failed_call_gives_a_class_back(monkeypatch):
    module = PlainFirst()
    before = dict(vars(module))

    def fail(*args: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr("fsdp_jax._fully_shard.convert", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        fully_shard(module, mesh=helpers.mesh_of(4))
    assert type(module) is PlainFirst
    assert type(module.w) is nnx.Param
    assert vars(module) == before


def test_an_attribute_in_the_place_of_an_added_method_is_refused():
    layer: Any = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    layer.state_dict = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    net: Any = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), layer)
    with pytest.raises(ValueError, match="module 1 of the list, .* 'state_dict' of"):
        fully_shard(list(net.layers), mesh=helpers.mesh_of(4))
    assert not any(isinstance(m, FSDPModule) for m in net.layers)
    fully_shard(net, mesh=helpers.mesh_of(4))  # as an inner module it keeps it
    assert net.layers[1].state_dict is layer.state_dict


def test_a_class_of_a_built_in_one_is_refused_before_anything_changes():
    class Mapping(Layer, dict):
        __hash__: Any = object.__hash__

    module = Mapping()
    with pytest.raises(TypeError, match="Mapping derives from dict"):
        fully_shard([PlainFirst(), module], mesh=helpers.mesh_of(4))
    assert type(module) is Mapping
    assert type(module.w) is nnx.Param
