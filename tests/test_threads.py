"""Eager calls in several threads: outputs, parameters, and what other threads see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, _param, _param_group, fully_shard

POLICIES = {
    "none": MixedPrecisionPolicy(),
    "all": MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32, output_dtype=jnp.float32
    ),
}


class Net(nnx.Module):
    """Two linear layers, 8 wide; the second one may run in a transform."""

    def __init__(self, how: str = "plain", watch: Any = None, width: int = 16) -> None:
        self.first = nnx.Linear(8, width, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(width, 8, rngs=nnx.Rngs(1))
        self.how = how
        self.watch = watch

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.first(x))
        if self.watch is not None:
            self.watch()
        call = {"plain": lambda f: f, "jit": nnx.jit, "remat": nnx.remat}[self.how]
        return call(lambda m, x: m(x))(self.second, x)


def sharded(policy: MixedPrecisionPolicy, asked: Any, **kwargs: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    net = Net(**kwargs)
    how: Any = dict(mesh=mesh, mp_policy=policy, reshard_after_forward=asked)
    fully_shard(net.second, **how)
    return fully_shard(net, **how)


def arrays(net: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in net.state_dict().items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], name)


def layout(net: Any) -> dict[str, Any]:
    """What another thread can learn about a model without calling it."""
    flat = nnx.to_flat_state(nnx.state(net))
    raw = {path: v.get_raw_value() for path, v in flat}
    return {
        "class": type(net.second.kernel),
        "read": (net.first.kernel[...].dtype, net.second.kernel.shape),
        "state": {p: (x.shape, str(x.dtype), x.sharding) for p, x in raw.items()},
        "dict": {n: (x.dtype, x.sharding) for n, x in net.state_dict().items()},
        "described": str(fsdp_jax.describe(net)),
        "static": (net.__dict__["_pytree__fsdp"], net.second.__dict__["_pytree__fsdp"]),
    }


@pytest.mark.parametrize("asked", [None, True, False, 3])
@pytest.mark.parametrize("policy", ["all", "none"])
def test_two_threads_call_one_model(policy, asked):
    net = sharded(POLICIES[policy], asked)
    x = jnp.ones((2, 8))
    before, expected = arrays(net), net(x)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda _: net(x), range(40)))
    for output in outputs:
        np.testing.assert_array_equal(output, expected)
    assert_same(arrays(net), before)
    net.reset_iter_state()
    assert_same(arrays(net), before)
    np.testing.assert_array_equal(net(x), expected)


@pytest.mark.parametrize("how", ["jit", "remat"])
def test_two_threads_call_a_model_with_transforms(how):
    net = sharded(POLICIES["all"], None, how=how)
    x = jnp.ones((2, 8))
    before, expected = arrays(net), net(x)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda _: net(x), range(20)))
    for output in outputs:
        np.testing.assert_array_equal(output, expected)
    assert_same(arrays(net), before)


@pytest.mark.parametrize("called", ["eager", "captured by jax.jit"])
def test_another_thread_sees_the_model_at_rest(called):
    seen: list[Any] = []

    def watch() -> None:
        thread = threading.Thread(target=lambda: seen.append(layout(net)))
        thread.start()
        thread.join()

    net = sharded(POLICIES["all"], None, watch=watch)
    rest, x = layout(net), jnp.ones((2, 8))
    (net if called == "eager" else jax.jit(lambda x: net(x)))(x)
    assert seen == [rest]
    assert layout(net) == rest


def test_threads_call_move_and_read_one_padded_model():
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    net: Any = Net(width=6)
    how: Any = dict(mesh=mesh, uneven="pad", reshard_after_forward=2)
    fully_shard(net.second, **how)
    fully_shard(net, **how)
    x, stop = jnp.ones((2, 8)), threading.Event()
    before, expected = arrays(net), net(x)

    def move() -> None:
        while not stop.is_set():
            handle = net.second.unshard(async_op=True)
            assert handle is not None
            handle.wait()
            net.unshard()
            net.second.reshard()
            net.reshard()

    def read() -> None:
        while not stop.is_set():
            assert_same(arrays(net), before)
            assert net.first.kernel.shape == (8, 6)
            assert net.second.kernel[...].shape == (6, 8)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(move), pool.submit(read)]
        try:
            outputs = list(pool.map(lambda _: net(x), range(20)))
        finally:
            stop.set()
        for other in others:
            other.result()
    for output in outputs:
        np.testing.assert_array_equal(output, expected)
    net.reset_iter_state()
    assert_same(arrays(net), before)


@pytest.mark.parametrize("read", ["value", "shape", "attribute", "state_dict"])
def test_another_thread_waits_for_the_end_of_a_move(read, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    net: Any = fully_shard(Net(width=6), mesh=mesh, uneven="pad")
    seen: list[Any] = []
    readers: list[threading.Thread] = []
    shapes = {
        "value": lambda: net.second.kernel[...].shape,
        "shape": lambda: net.second.kernel.shape,
        "attribute": lambda: net.second.kernel.mT.mT.shape,
        "state_dict": lambda: net.state_dict()["second.kernel"].shape,
    }

    def mark(variable: Any, full: bool) -> None:
        if variable is net.second.kernel:  # its value is in place, nothing says so yet
            readers.append(threading.Thread(target=lambda: seen.append(shapes[read]())))
            readers[-1].start()
            readers[-1].join(0.2)
        _param.mark(variable, full)

    monkeypatch.setattr(_param_group, "mark", mark)
    net.unshard()
    net.reshard()
    for reader in readers:
        reader.join()
    assert seen == [(6, 8), (6, 8)]


class Watched(nnx.Variable):
    """Calls what it was given whenever a transform writes to it."""

    def update_from_state(self, variable_state: Any) -> None:
        super().update_from_state(variable_state)
        if (watch := self.get_metadata("watch")) is not None:
            watch()


class Counting(nnx.Module):
    """Counts its calls."""

    def __init__(self, watch: Any) -> None:
        self.scale = nnx.Param(jnp.ones(8))
        self.count = Watched(jnp.zeros((), jnp.int32), watch=watch)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        return x * self.scale


def test_a_program_that_writes_state_never_empties_the_module():
    seen: list[Any] = []
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    net: Any = fully_shard(Counting(lambda: seen.append(set(vars(net)))), mesh=mesh)
    rest = set(vars(net))
    fsdp_jax.shard_map(lambda m, x: m(x))(net, jnp.ones((4, 8)))
    assert seen and all(names == rest for names in seen)
    assert net.count[...] == 1
