"""`PendingGradients`: what it holds, where it can go, and what is refused."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import fsdp_jax
from fsdp_jax import MixedPrecisionPolicy, fully_shard
from tests import helpers

ROWS = 8
DEVICES = 4


class Pair(nnx.Module):
    """Two layers; the second one is a group of its own, as is the first."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.gain = nnx.Param(jnp.linspace(1, 2, 8))
        self.last = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)) * self.gain[...])


def pair(mesh: Mesh | None = None, **kwargs: Any) -> Any:
    model: Any = Pair(nnx.Rngs(0))
    mesh = mesh or helpers.mesh_of(DEVICES)
    fully_shard([model.first, model.last], mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def hsdp_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replicate", "fsdp"))


def batch(seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (ROWS, 8))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def traced(model: Any, x: jax.Array, pending: Any = None, **kwargs: Any) -> Any:
    return fsdp_jax.grad(loss, **kwargs)(model, x, pending=pending)


# Compiled once for all tests whose models and settings are the same.
step = nnx.jit(traced, static_argnames=("wrt", "argnums", "reduction"))
twin_gradient = nnx.jit(nnx.grad(loss))


def held(model: Any, x: jax.Array, **kwargs: Any) -> Any:
    """Gradients without sync; it is on again afterwards."""
    model.set_requires_gradient_sync(False)
    found = step(model, x, **kwargs)
    model.set_requires_gradient_sync(True)
    assert isinstance(found, fsdp_jax.PendingGradients)
    return found


def expected(*batches: jax.Array) -> Any:
    grads = [twin_gradient(Pair(nnx.Rngs(0)), x) for x in batches]
    return jax.tree.map(lambda *xs: np.sum(xs, axis=0), *grads)


NAMES = [
    "first.bias",
    "first.kernel",
    "gain",
    "last.bias",
    "last.kernel",
]


# --- what it holds ----------------------------------------------------------------


def test_unreduced_gradients_are_those_of_each_device():
    model, x = pair(), batch()
    found = held(model, x)
    assert sorted(found.unreduced) == NAMES
    assert not found.partial and not found.reduced and found.reduction == "mean"
    each = [
        twin_gradient(Pair(nnx.Rngs(0)), rows)
        for rows in np.split(np.asarray(x), DEVICES)
    ]
    for name, value in found.unreduced.items():
        theirs: list[Any] = list(each)
        for part in name.split("."):
            theirs = [g[part] for g in theirs]
        assert value.shape == (DEVICES, *theirs[0][...].shape)
        assert value.dtype == jnp.float32
        assert value.sharding.is_equivalent_to(
            NamedSharding(helpers.mesh_of(DEVICES), PartitionSpec("fsdp")), value.ndim
        )
        stacked = np.stack([g[...] for g in theirs])
        np.testing.assert_allclose(value, stacked, 1e-5, 1e-6)


def test_partial_gradients_are_those_of_each_replica():
    model, x = pair(hsdp_mesh()), batch()
    model.set_requires_all_reduce(False)
    found = step(model, x)
    assert sorted(found.partial) == NAMES and not found.unreduced
    halves = [
        twin_gradient(Pair(nnx.Rngs(0)), rows) for rows in np.split(np.asarray(x), 2)
    ]
    value = found.partial["last.kernel"]
    theirs = [g["last"]["kernel"][...] for g in halves]
    np.testing.assert_allclose(value, np.stack(theirs), 1e-5, 1e-6)
    assert value.addressable_shards[0].data.shape == (1, 4, 8)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "kept"),
    [
        (None, None, jnp.float32),
        (jnp.bfloat16, None, jnp.bfloat16),
        (jnp.bfloat16, jnp.float32, jnp.float32),
        (None, jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_dtypes_are_those_of_the_reduction(param_dtype, reduce_dtype, kept):
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    model = pair(hsdp_mesh(), mp_policy=policy)
    found = held(model, batch())
    assert {v.dtype for v in found.unreduced.values()} == {jnp.dtype(kept)}
    model.set_requires_all_reduce(False)
    found = step(model, batch())
    assert {v.dtype for v in found.partial.values()} == {jnp.dtype(kept)}
    done = model.synchronize_gradients(found)
    assert {v.dtype for v in jax.tree.leaves(done)} == {jnp.dtype(jnp.float32)}


def test_results_rest_like_parameters():
    model, x = pair(), batch()
    kept = held(model, x)
    params = nnx.state(model, nnx.Param)
    results = model.synchronize_gradients(kept), traced(model, x, kept)
    like = jax.tree.structure(traced(model, x))
    for grads, times in zip(results, (1, 2)):
        assert jax.tree.structure(grads) == like
        for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
            assert (g.shape, g.dtype, g.sharding) == (p.shape, p.dtype, p.sharding)
        helpers.assert_trees_close(grads, expected(*[x] * times))


def test_it_says_what_it_is():
    text = repr(held(pair(), batch()))
    assert text.startswith("PendingGradients(5 unreduced, 0 partial, 0 reduced;")
    assert "not for an optimizer" in text and "synchronize_gradients" in text


def test_whether_groups_are_synchronised_is_their_own_matter():
    model, x = pair(), batch()
    model.set_requires_gradient_sync(False, recurse=False)
    found = step(model, x)
    assert list(found.unreduced) == ["gain"]
    assert sorted(found.reduced) == [n for n in NAMES if n != "gain"]
    helpers.assert_trees_close(model.synchronize_gradients(found), expected(x))
    model.set_requires_gradient_sync(True)
    model.last.set_requires_gradient_sync(False)
    again = step(model, x, found)  # of both kinds, the old root now reduced
    assert sorted(again.unreduced) == ["last.bias", "last.kernel"]
    model.set_requires_gradient_sync(True)
    helpers.assert_trees_close(step(model, x, again), expected(x, x, x))
    helpers.assert_trees_close(
        model.synchronize_gradients(found + again), expected(x, x, x)
    )


def test_parameters_of_no_group_go_with_the_module_around_them():
    model: Any = Pair(nnx.Rngs(0))
    how = {"mesh": helpers.mesh_of(DEVICES), "ignored_params": nnx.PathContains("bias")}
    fully_shard(model.last, **how)
    fully_shard(model, **how)
    model.last.set_requires_gradient_sync(False)
    found = step(model, batch())
    assert sorted(found.unreduced) == ["last.bias", "last.kernel"]
    helpers.assert_trees_close(sync(model, found), expected(batch()))


@pytest.mark.parametrize("offload", [False, True])
def test_finished_gradients_of_one_group_wait_for_the_others(offload):
    policy = fsdp_jax.CPUOffloadPolicy() if offload else fsdp_jax.OffloadPolicy()
    model, x = pair(offload_policy=policy), batch()
    model.first.set_requires_gradient_sync(False)
    found = step(model, x, step(model, x))
    kinds = {v.sharding.memory_kind for v in found.reduced.values()}
    assert kinds == {model.last.kernel.sharding.memory_kind}
    model.set_requires_gradient_sync(True)
    helpers.assert_trees_close(step(model, x, found), expected(x, x, x))
    helpers.assert_trees_close(sync(model, found), expected(x, x))


def test_replicas_may_differ_between_groups():
    model, x = pair(hsdp_mesh()), batch()
    model.first.set_requires_all_reduce(False)
    model.last.set_requires_gradient_sync(False)
    found = step(model, x)
    assert list(map(len, found.stages)) == [2, 2, 1]
    helpers.assert_trees_close(model.synchronize_gradients(found), expected(x))
    model.set_requires_gradient_sync(True)
    helpers.assert_trees_close(step(model, x, found), expected(x, x))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sums_of_different_batches(reduction):
    model, xs = pair(), [batch(i) for i in range(3)]
    kept = [held(model, x, reduction=reduction) for x in xs[:2]]
    grads = step(model, xs[2], kept[0] + kept[1], reduction=reduction)
    times = DEVICES if reduction == "sum" else 1
    wanted = jax.tree.map(lambda g: g * times, expected(*xs))
    helpers.assert_trees_close(grads, wanted)


# --- where it can go --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nnx.jit", "jax.jit"])
def test_it_goes_in_and_out_of_jit(kind):
    model, x = pair(), batch()
    model.set_requires_gradient_sync(False)
    if kind == "nnx.jit":
        accumulate, finish = step, nnx.jit(lambda m, p: sync(m, p))
    else:
        graphdef, state = nnx.split(model)

        def pure(f: Any) -> Any:
            inner = jax.jit(lambda state, *args: f(nnx.merge(graphdef, state), *args))
            return lambda model, *args: inner(state, *args)

        accumulate, finish = pure(traced), pure(sync)
    kept = accumulate(model, x)
    kept = accumulate(model, batch(2), kept)
    assert kept.unreduced["gain"].shape == (DEVICES, 8)
    helpers.assert_trees_close(finish(model, kept), expected(x, batch(2)))


def sync(model: Any, pending: Any) -> Any:
    return model.synchronize_gradients(pending)


@pytest.mark.parametrize(("loop", "mesh"), [("scan", None), ("fori_loop", hsdp_mesh)])
def test_it_can_be_carried_by_a_loop(loop, mesh):
    model = pair(mesh() if mesh else None)
    xs = jnp.stack([batch(i) for i in range(3)])
    model.set_requires_gradient_sync(False)
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, xs):
        def grads(state, x, pending=None):
            return traced(nnx.merge(graphdef, state), x, pending)

        def with_old(carry, x):
            state, kept = carry
            return (state, grads(state, x, kept)), None

        def added(i, carry):
            state, kept = carry
            return state, kept + grads(state, xs[i])

        carry = state, grads(state, xs[0])
        if loop == "scan":
            (state, kept), _ = jax.lax.scan(with_old, carry, xs[1:])
        else:
            state, kept = jax.lax.fori_loop(1, 3, added, carry)
        return nnx.merge(graphdef, state).synchronize_gradients(kept)

    helpers.assert_trees_close(run(state, xs), expected(*xs))


@pytest.mark.parametrize("how", ["numpy", "pickle", "one device", "default device"])
def test_it_comes_back_from_anywhere(how):
    model, x = pair(), batch()
    kept = held(model, x)
    if how == "pickle":
        restored = pickle.loads(pickle.dumps(kept))
    else:
        leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, kept))
        if how == "one device":
            leaves = [jax.device_put(v, jax.devices()[0]) for v in leaves]
        elif how == "default device":
            leaves = [jnp.asarray(v) for v in leaves]
        restored = jax.tree.unflatten(treedef, leaves)
    assert restored.reduction == "mean"
    helpers.assert_trees_close(model.synchronize_gradients(restored), expected(x))
    helpers.assert_trees_close(traced(model, x, restored), expected(x, x))


def test_partial_and_reduced_ones_come_back_too():
    model, x = pair(hsdp_mesh()), batch()
    model.first.set_requires_all_reduce(False)
    kept = jax.tree.map(np.asarray, step(model, x))
    assert kept.partial and kept.reduced
    kept = step(model, x, kept)
    assert kept.reduced["gain"].sharding == model.gain.sharding
    model.set_requires_gradient_sync(True)
    helpers.assert_trees_close(sync(model, kept), expected(x, x))


@pytest.mark.parametrize("jit", [False, True])
def test_axes_may_be_explicit(jit):
    devices = jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), (AxisType.Explicit,), devices=devices)
    model, x = pair(mesh), batch()
    kept = held(model, x)
    run = step if jit else traced
    finish = nnx.jit(sync) if jit else sync
    for pending in (kept, jax.tree.map(np.asarray, kept)):
        helpers.assert_trees_close(run(model, x, pending), expected(x, x))
        helpers.assert_trees_close(finish(model, pending), expected(x))
    helpers.assert_trees_close(finish(model, kept + kept), expected(x, x))


def test_it_can_be_scaled_like_any_pytree():
    model, x = pair(), batch()
    kept = jax.tree.map(lambda g: g / 2, held(model, x))
    helpers.assert_trees_close(step(model, x, kept + kept), expected(x, x))


def test_several_models_and_a_batch_in_one_call():
    first, last, x = pair(), pair(), batch()

    def both(first, last, x):
        return jnp.mean((first(x) + 2 * last(x)) ** 2)

    twins = Pair(nnx.Rngs(0)), Pair(nnx.Rngs(0))
    once = nnx.jit(nnx.grad(both, argnums=(0, 1)))(*twins, x)
    make = fsdp_jax.grad(both, argnums=(0, 1))
    first.set_requires_gradient_sync(False)
    kept = make(first, last, x)
    assert len(kept.unreduced) == len(kept.reduced) == 5
    first.set_requires_gradient_sync(True)
    for mine, theirs in zip(make(first, last, x, pending=kept), once, strict=True):
        helpers.assert_trees_close(mine, jax.tree.map(lambda g: 2 * g, theirs))
    text = r"synchronize_gradients: .*'0\.0:first\.bias'.*Use the model"
    with pytest.raises(ValueError, match=text):
        first.synchronize_gradients(kept)


def test_only_the_batch_is_differentiated():
    model, x = pair(), batch()
    model.set_requires_gradient_sync(False)
    found = step(model, x, argnums=1)
    np.testing.assert_allclose(
        found, nnx.grad(loss, argnums=1)(Pair(nnx.Rngs(0)), x), 1e-5, 1e-6
    )


# --- what is refused --------------------------------------------------------------


def as_it_was(model: Any, pending: Any) -> None:
    helpers.assert_trees_close(sync(model, pending), expected(batch()))
    helpers.assert_trees_close(step(model, batch(), pending), expected(*[batch()] * 2))
    for value in jax.tree.leaves(nnx.state(model)):
        assert len(value.sharding.device_set) == DEVICES


SETTERS = [
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
]


@pytest.mark.parametrize("name", SETTERS)
@pytest.mark.parametrize("value", [0, 1, None, "True", np.True_])
def test_flags_are_bools(name, value):
    model = pair()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=f"{name}: expected a bool, got "):
        getattr(model, name)(value)
    assert nnx.graphdef(model) == before


@pytest.mark.parametrize("name", SETTERS)
def test_setters_recurse_unless_told_otherwise(name):
    field = name.removeprefix("set_")
    model = pair()
    getattr(model, name)(False)
    states = [vars(m)["_pytree__fsdp"] for m in (model, model.first, model.last)]
    assert [getattr(s, field) for s in states] == [False] * 3
    getattr(model, name)(True, recurse=False)
    states = [vars(m)["_pytree__fsdp"] for m in (model, model.first, model.last)]
    assert [getattr(s, field) for s in states] == [True, False, False]
    with pytest.raises(TypeError):
        getattr(model, name)(True, False)  # by keyword only


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, float("inf"), float("nan"), True, "2", 1j, jnp.ones(())]
)
def test_factors_are_positive_numbers(value):
    model = pair()
    before = nnx.graphdef(model)
    text = "set_gradient_divide_factor: expected a positive number, or None"
    with pytest.raises(ValueError, match=text):
        model.set_gradient_divide_factor(value)
    assert nnx.graphdef(model) == before
    model.set_gradient_divide_factor(np.float32(2))
    model.set_gradient_divide_factor(3)


@pytest.mark.parametrize(
    ("ours", "tx"),
    [(True, optax.adamw(0.1)), (False, optax.sgd(0.1))],
    ids=["ours", "nnx"],
)
def test_an_optimizer_does_not_take_it_and_stays_as_it_was(tx, ours):
    model, x = pair(), batch()
    make = fsdp_jax.Optimizer if ours else nnx.Optimizer
    optimizer = make(model, tx, wrt=nnx.Param)
    kept = held(model, x)
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state((model, optimizer))))
    kind, text = (TypeError, "not reduced yet") if ours else (ValueError, "structure")
    with pytest.raises(kind, match=text):
        optimizer.update(model, kept)
    after = jax.tree.map(np.asarray, nnx.as_pure(nnx.state((model, optimizer))))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    optimizer.update(model, model.synchronize_gradients(kept))


def test_gradients_that_are_reduced_are_not_pending():
    model, x = pair(), batch()
    grads, kept = step(model, x), held(model, x)
    text = r"grad: pending must be a PendingGradients, .* got State"
    with pytest.raises(TypeError, match=text):
        step(model, x, grads)
    text = r"synchronize_gradients: pending must be a PendingGradients, .* got State"
    with pytest.raises(TypeError, match=text):
        model.synchronize_gradients(grads)
    with pytest.raises(TypeError, match="PendingGradients.*and 'int'"):
        _ = kept + 1
    as_it_was(model, kept)


def test_reductions_do_not_mix():
    model, x = pair(), batch()
    kept, sums = held(model, x), held(model, x, reduction="sum")
    text = r"reduction='sum', and this call is of reduction='mean'\. Use the same"
    with pytest.raises(ValueError, match=text):
        step(model, x, sums)
    text = r"reduction='mean' and of reduction='sum'.*synchronize_gradients"
    with pytest.raises(ValueError, match=text):
        _ = kept + sums
    as_it_was(model, kept)


def test_names_must_be_differentiated():
    model, x = pair(), batch()
    kept = held(model, x)
    text = r"grad: there is a pending gradient of 'gain'.*wrt and argnums"
    with pytest.raises(ValueError, match=text):
        step(model, x, kept, wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("gain"))))
    text = r"synchronize_gradients: there is a pending gradient of 'first"
    with pytest.raises(ValueError, match=text):
        model.last.synchronize_gradients(kept)
    part = held(model, x, wrt=nnx.All(nnx.Param, nnx.PathContains("gain")))
    assert list(part.unreduced) == ["gain"]
    both = step(model, x, part)  # fewer are fine
    np.testing.assert_allclose(both["gain"], 2 * expected(x)["gain"][...], 1e-5, 1e-6)
    np.testing.assert_allclose(
        both["last"]["bias"], expected(x)["last"]["bias"][...], 1e-5, 1e-6
    )
    as_it_was(model, kept)


def test_shapes_must_fit_the_mesh():
    model, x = pair(), batch()
    kept, other = held(model, x), held(pair(helpers.mesh_of(2)), x)
    other = jax.tree.map(np.asarray, other)
    text = r"of 'first.bias' has shape \(2, 8\), and \(4, 8\) would fit 4 devices"
    for call in (lambda: step(model, x, other), lambda: sync(model, other)):
        with pytest.raises(ValueError, match=text):
            call()
    single = jax.tree.map(np.asarray, held(pair(helpers.mesh_of(1)), x))
    text = r"the shapes \(4, [8, ]+\) and \(1, [8, ]+\).*same mesh"
    with pytest.raises(ValueError, match=text):
        _ = kept + single  # would broadcast
    as_it_was(model, kept)


def test_it_is_reduced_outside_of_per_device_programs():
    model, x = pair(), batch()
    kept = held(model, x)
    text = "synchronize_gradients: called inside a per-device program"
    with pytest.raises(RuntimeError, match=text):
        fsdp_jax.shard_map(lambda model, x: sync(model, kept) and x)(model, x)
    as_it_was(model, kept)


def in_shard_map(model: Any, x: jax.Array) -> Any:
    """Gradients by `nnx.grad` in a `jax.shard_map` of the user's own."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda v: v.sharding.spec, state)

    def local(state, x):
        return nnx.grad(loss)(nnx.merge(graphdef, state), x)

    mapped = jax.shard_map(
        local,
        mesh=helpers.mesh_of(DEVICES),
        in_specs=(specs, PartitionSpec("fsdp")),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(mapped)(state, x)


@pytest.mark.parametrize("keep", [False, True])
def test_programs_without_a_place_for_it_refuse_to_differentiate(keep):
    model, x = pair(reshard_after_forward=not keep), batch()
    kept = held(model, x)
    ours = fsdp_jax.shard_map(lambda model, x: fsdp_jax.grad(loss)(model, x))
    model.set_requires_gradient_sync(False)
    text = r"module .* not to be reduced .*fsdp_jax.value_and_grad.*sync to True"
    for run in (in_shard_map, ours):
        with pytest.raises(RuntimeError, match=text):
            run(model, x)
    out = fsdp_jax.shard_map(lambda model, x: model(x))(model, x)  # forward is fine
    np.testing.assert_allclose(out, Pair(nnx.Rngs(0))(x), 1e-5, 1e-6)
    model.set_requires_gradient_sync(True)
    helpers.assert_trees_close(in_shard_map(model, x), expected(x))
    as_it_was(model, kept)


def test_roots_under_a_plain_parent_are_reduced_without_a_batch():
    model, mesh = Pair(nnx.Rngs(0)), helpers.mesh_of(DEVICES)
    fully_shard([model.first, model.last], mesh=mesh)
    want = step(model, batch())
    for layer in (model.first, model.last):
        assert isinstance(layer, fsdp_jax.FSDPModule)
        layer.set_requires_gradient_sync(False)
    pending = step(model, batch())
    assert set(pending.reduced) == {"gain"}  # of no group
    found = fsdp_jax.synchronize_gradients(model, pending)
    same_trees(found, want)
    with pytest.raises(ValueError, match="synchronize_gradients.*fully_shard"):
        fsdp_jax.synchronize_gradients(Pair(nnx.Rngs(0)), pending)


def test_names_are_the_same_for_one_argument_and_a_tuple_of_one():
    model = pair()
    want = step(model, batch())
    model.set_requires_gradient_sync(False)
    pending = step(model, batch(), argnums=(0,))
    assert "first.kernel" in pending.unreduced
    same_trees(model.synchronize_gradients(pending), want)


def test_pending_gradients_are_compared_as_objects():
    model = pair()
    pending = held(model, batch())
    assert pending == pending
    assert pending != held(model, batch())
    assert len({pending, pending}) == 1


@pytest.mark.parametrize("free", [True, False])
def test_gradients_of_parameters_inside_the_loss_are_refused(free):
    def squares(model, x):
        return fsdp_jax.global_norm(fsdp_jax.grad(loss)(model, x)) ** 2

    def of_inputs(model, x):
        return jnp.sum(jax.grad(lambda x: loss(model, x))(x) ** 2)

    model = pair(reshard_after_forward=free)
    fsdp_jax.grad(squares)(model, batch())
    want = fsdp_jax.grad(of_inputs)(model, batch())
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="differentiates.*parameter .*sync to True"):
        fsdp_jax.grad(squares)(model, batch())
    pending = fsdp_jax.grad(of_inputs)(model, batch())
    same_trees(model.synchronize_gradients(pending), want)


def same_trees(found: Any, want: Any) -> None:
    pairs = zip(
        jax.tree.leaves(nnx.as_pure(found)),
        jax.tree.leaves(nnx.as_pure(want)),
        strict=True,
    )
    for a, b in pairs:
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)
