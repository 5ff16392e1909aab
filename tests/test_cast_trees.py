"""Which containers a mixed precision policy looks into, in every view of a call."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
VIEWS = ["eager", "jit", "value_and_grad", "shard_map"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    """A dataclass that JAX knows as a tree."""

    x: Any
    z: Any


@flax.struct.dataclass
class Struct:
    """A dataclass of Flax, with a field that is no data."""

    x: Any
    z: Any
    name: str = flax.struct.field(pytree_node=False, default="struct")


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    z: Any


@dataclasses.dataclass
class Plain:
    """A dataclass that JAX takes for a leaf."""

    x: Any
    z: Any
    name: str = "plain"
    checks: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks.append("made")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """One without a `__dict__` that cannot be written."""

    x: Any
    z: Any
    later: Any = dataclasses.field(init=False, default=None)


class Node(nnx.Pytree):
    """An NNX object that holds arrays."""

    def __init__(self, x: Any, z: Any) -> None:
        self.x, self.z = nnx.data(x), nnx.data(z)
        self.zz = nnx.BatchStat(jnp.ones(8))


@nnx.dataclass
class NodeDataclass(nnx.Pytree):
    """The same as a dataclass."""

    x: Any = nnx.data()
    z: Any = nnx.data()


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda x, i: {"x": x, "z": i},
    "ordered dict": lambda x, i: collections.OrderedDict(x=x, z=i),
    "default dict": lambda x, i: collections.defaultdict(list, x=x, z=i),
    "list": lambda x, i: [x, i],
    "tuple": lambda x, i: (x, i),
    "named tuple": Pair,
    "registered dataclass": Registered,
    "flax.struct.dataclass": Struct,
    "plain dataclass": Plain,
    "frozen dataclass": Frozen,
    "plain in plain": lambda x, i: Plain(Frozen(x, None), {"z": i}),
    "plain in dict in registered": lambda x, i: Registered({"p": Plain(x, i)}, None),
    "nnx.Pytree": Node,
    "nnx.dataclass": NodeDataclass,
    "nnx.Dict": lambda x, i: nnx.Dict(x=nnx.data(x), z=nnx.data(i)),
    "nnx.List": lambda x, i: nnx.List([nnx.data(x), nnx.data(i)]),
    "nnx.Pytree in plain": lambda x, i: Plain(Node(x, i), None),
}


# Every container in two views, a global and a per-device one, for inputs and in the
# other two for outputs; with and without freeing parameters by turns.
INPUTS, OUTPUTS = (
    [
        (name, VIEWS[k], (i // 2 + k) % 2 == 0)
        for i, name in enumerate(CONTAINERS)
        for k in ((i + shift) % 2, 2 + (i + shift) % 2)
    ]
    for shift in (0, 1)
)


def arrays_of(tree: Any) -> Iterator[Any]:
    """Every array below a tree, object or Variable, in order."""
    if isinstance(tree, nnx.Variable):
        tree = tree.get_raw_value()
    if isinstance(tree, (nnx.List, nnx.Dict)):
        tree = list(tree) if isinstance(tree, nnx.List) else dict(tree.items())
    if isinstance(tree, (jax.Array, np.ndarray)):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from arrays_of(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from arrays_of(value)
    elif isinstance(tree, nnx.Pytree):
        yield from arrays_of([v for k, v in vars(tree).items() if k[0] != "_"])
    elif dataclasses.is_dataclass(tree):
        yield from arrays_of([getattr(tree, f.name) for f in dataclasses.fields(tree)])


def dtypes_of(tree: Any) -> list[str]:
    return [str(a.dtype) for a in arrays_of(tree)]


class Scale(nnx.Module):
    """Multiplies its parameter into `x`, then gives it to a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.weight = nnx.Param(jnp.ones(8))
        self.function = nnx.static(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight[...], *args, **kwargs)


class Model(nnx.Module):
    """A sharded `Scale`, called with what `build` makes of activations."""

    def __init__(self, build: Callable[..., Any], function: Callable, **how: Any):
        self.first = fully_shard(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
        self.scale = fully_shard(Scale(function), **how)
        self.build = nnx.static(build)

    def __call__(self, x: jax.Array) -> Any:
        x = self.first(x)  # so that its gradient passes the call
        return self.build(self.scale, x, jnp.arange(x.shape[0]))


def run(view: str, model: Any) -> None:
    """Call a model once, in the given view, with a loss where there is one."""
    x = jnp.ones((8, 4))
    if view == "eager":
        model(x)
    elif view == "jit":
        nnx.jit(lambda m, x: m(x))(model, x)
    elif view == "shard_map":
        fsdp_jax.shard_map(lambda m, x: m(x))(model, x)
    else:
        loss = fsdp_jax.value_and_grad(lambda m, x: m(x).astype(F32).mean())
        _, grads = loss(model, x)
        # The gradient of x * weight reaches what made x.
        np.testing.assert_allclose(np.abs(grads["first"]["bias"][...]).sum(), 1.0)


@pytest.mark.parametrize(("name", "view", "free"), INPUTS)
def test_inputs_are_cast_in_every_container(name, view, free):
    seen = []

    def function(weight, container, *, again):
        seen.append((dtypes_of(container), dtypes_of(again), type(container)))
        return next(arrays_of(container)) * weight

    def build(scale, x, index):
        first, again = (CONTAINERS[name](x, index) for _ in range(2))
        before = [id(a) for a in arrays_of(first)]
        y = scale(first, again=again)
        # The caller's container is as it was.
        assert [id(a) for a in arrays_of(first)] == before
        assert dtypes_of(first) == dtypes_of(again)
        assert y.dtype == BF16
        return y

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    how = {"mp_policy": policy, "reshard_after_forward": free}
    run(view, Model(build, function, **how))
    assert seen
    expected = ["bfloat16", "int32"]
    if "nnx.Pytree" in name:
        expected.append("float32")  # a Variable keeps its dtype
    for first, again, kind in seen:
        assert first == again == expected
        assert kind is type(CONTAINERS[name](1, 2))


@pytest.mark.parametrize(("name", "view", "free"), OUTPUTS)
def test_outputs_are_cast_in_every_container(name, view, free):
    called = []

    def function(weight, x, index):
        assert (weight * x).dtype == BF16
        called.append(1)
        return {"y": CONTAINERS[name](weight * x, index), "n": 3}

    def build(scale, x, index):
        y = scale(x, index)
        assert y["n"] == 3 and type(y["y"]) is type(CONTAINERS[name](1, 2))
        extra = ["float32"] if "nnx.Pytree" in name else []
        assert dtypes_of(y["y"]) == ["float16", "int32", *extra]
        return next(arrays_of(y["y"]))

    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F16)
    how = {"mp_policy": policy, "reshard_after_forward": free}
    run(view, Model(build, function, **how))
    assert called


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", [Plain, Node], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("policy", "free"), [({}, True), ({"param_dtype": BF16}, False)], ids=str
)
def test_what_a_module_writes_into_an_object_reaches_the_caller(
    policy, make, view, free
):
    def function(weight, data):
        data.z = data.x * weight
        if isinstance(data, Plain):
            data.checks.append("called")
            data.__dict__["extra"] = 3
        return data.x

    def build(scale, x, index):
        data = make(x=x, z=index)
        scale(data)
        assert data.x is x
        assert data.z.dtype == policy.get("param_dtype", F32)
        if isinstance(data, Plain):
            assert data.checks == ["made", "called"]  # and not made once more
            assert data.__dict__["extra"] == 3
        return data.z

    policy_given = MixedPrecisionPolicy(**policy)
    how = {"mp_policy": policy_given, "reshard_after_forward": free}
    run(view, Model(build, function, **how))


@pytest.mark.parametrize("view", VIEWS)
def test_a_dataclass_in_which_nothing_is_cast_is_handed_on_itself(view):
    @dataclasses.dataclass
    class Config:
        width: int
        parent: Any = None

    given = []

    def function(weight, x, config, names):
        given.append((config, names))
        return x * weight

    config = Config(8)
    config.parent = Config(4, config)  # a ring
    names = Plain(None, ("a", "b"))
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    run(view, Model(lambda s, x, i: s(x, config, names), function, mp_policy=policy))
    assert given and all(c is config and n is names for c, n in given)


@pytest.mark.parametrize("view", ["eager", "jit"])
def test_a_dataclass_of_what_needs_no_cast_is_handed_on_itself(view):
    def function(weight, x, *data):
        given.extend(data)
        return x * weight

    def build(scale, x, index):
        data = Plain(index, x.astype(BF16)), Plain({"i": [index]}, Frozen(1, 2))
        y = scale(x, *data)
        assert all(a is b for a, b in zip(given, data, strict=True))
        return y

    given = []
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    run(view, Model(build, function, mp_policy=policy))


@pytest.mark.parametrize("view", ["eager", "jit", "shard_map"])
def test_an_object_made_in_a_trace_is_looked_into(view):
    class Undeclared(nnx.Pytree):
        def __init__(self, x):
            self.x = x  # to NNX static, where it is traced

    def function(weight, data):
        assert data.x.dtype == BF16
        return data.x * weight

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    how = {"mp_policy": policy, "reshard_after_forward": False}
    run(view, Model(lambda s, x, i: s(Undeclared(x)), function, **how))


@pytest.mark.parametrize("view", VIEWS)
def test_modules_and_variables_among_the_arguments_keep_their_dtype(view):
    class Table(nnx.Module):
        def __init__(self):
            self.array = nnx.data(jnp.ones(8))
            self.variable = nnx.Variable(jnp.ones(8))

    given = []

    def function(weight, x, table, modules, variable):
        assert modules[0] is not None
        given.append(dtypes_of([table, modules[0], variable]))
        return x * weight

    def build(scale, x, index):
        return scale(x, Table(), nnx.List([Table()]), nnx.Variable(x))

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    run(view, Model(build, function, mp_policy=policy))
    assert given and all(set(dtypes) == {"float32"} for dtypes in given)


@pytest.mark.parametrize("view", VIEWS)
def test_an_object_holds_its_own_arrays_again_after_an_error(view):
    def function(weight, node):
        assert node.x.dtype == BF16
        raise ZeroDivisionError

    def build(scale, x, index):
        node = Node(x, index)
        with pytest.raises(ZeroDivisionError):
            scale(node)
        assert node.x is x
        return x

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    run(view, Model(build, function, mp_policy=policy))


@pytest.mark.parametrize("view", VIEWS)
def test_integers_flags_random_keys_and_what_is_no_array_pass(view):
    seen = []

    def function(weight, x, *rest, **kwargs):
        seen.append(jax.tree.map(lambda a: str(getattr(a, "dtype", a)), (rest, kwargs)))
        return x * weight

    def build(scale, x, index):
        return scale(
            x,
            index,
            index > 3,
            jax.random.key(0),
            jax.random.PRNGKey(0),
            index.astype(jnp.uint8),
            (x + 1j),
            None,
            "text",
            3,
            2.5,
            flag=True,
            numpy=np.ones(2, np.float64),
            scalar=np.float32(2),
            integer=np.int64(3),
        )

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    run(view, Model(build, function, mp_policy=policy))
    same = ["int32", "bool", "key<fry>", "uint32", "uint8", "complex64"]
    for rest, kwargs in seen:
        assert list(rest) == [*same, None, "text", "3", "2.5"]
        integer = kwargs.pop("integer")
        assert integer in ("int64", "int32")  # JAX's own, where it is traced
        assert kwargs == {"flag": "True", "numpy": "bfloat16", "scalar": "bfloat16"}
