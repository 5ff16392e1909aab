"""What an output of a traced program depends on, and evaluating a part of one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from fsdp_jax._dependence import depends_on, evaluate

P = jnp.arange(1.0, 7.0).reshape(2, 3)
X = jnp.arange(1.0, 13.0).reshape(3, 4) / 7


def marks(f: Callable[..., Any], *inputs: tuple[Any, bool]) -> list[bool]:
    """Which outputs of `f` depend on the inputs that are paired with True."""
    closed = jax.make_jaxpr(f)(*[x for x, _ in inputs])
    return depends_on(closed, [mark for _, mark in inputs])


def primitives(closed: Any) -> set[str]:
    """Names of all primitives of a traced program, nested ones too."""
    found = set()
    for eqn in closed.jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                found |= primitives(value)
    return found


def assert_evaluates(
    f: Callable[..., Any], args: Sequence[Any], wanted: Sequence[bool]
) -> None:
    """The wanted outputs are those of `f`, from the arguments they depend on alone."""
    closed = jax.make_jaxpr(f)(*args)
    needed = []
    for i in range(len(args)):
        reached = depends_on(closed, [j == i for j in range(len(args))])
        needed.append(any(r and w for r, w in zip(reached, wanted, strict=True)))
    given = [a if n else None for a, n in zip(args, needed)]
    got = evaluate(closed, given, wanted)
    expected = [y for y, w in zip(f(*args), wanted, strict=True) if w]
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_an_output_depends_on_what_reaches_it():
    def f(p, x):
        return p * 2, x + 1, p @ x, p.T.astype(jnp.bfloat16), jnp.ones(3)

    assert marks(f, (P, False), (X, True)) == [False, True, True, False, False]
    assert marks(f, (P, True), (X, False)) == [True, False, True, True, False]
    assert marks(f, (P, False), (X, False)) == [False] * 5


def test_an_input_returned_as_it_is_carries_its_own_mark():
    assert marks(lambda p, x: (x, p, x), (P, False), (X, True)) == [True, False, True]


def test_a_literal_depends_on_nothing():
    assert marks(lambda x: (1.0, x, 2), (X, True)) == [False, True, False]


def test_a_nested_jit_is_looked_into():
    @jax.jit
    def mixed(p, x):
        return p.T, jax.jit(lambda q: (q + 1, q @ x))(p), x * 2

    got = marks(lambda p, x: jax.tree.leaves(mixed(p, x)), (P, False), (X, True))
    assert got == [False, False, True, True]


def test_an_einsum_does_not_taint_what_only_the_parameter_gives():
    def f(p, x):
        return jnp.einsum("ab,bc->ac", p, x), jnp.einsum("ab->ba", p)

    assert marks(f, (P, False), (X, True)) == [True, False]


def test_a_saved_cast_of_the_parameter_depends_on_the_parameter_alone():
    def f(p, x):
        product = jax.jit(lambda q: jnp.einsum("ab,bc->ac", q.astype(x.dtype), x))
        y, vjp = jax.vjp(lambda q, x: product(q) + (q.astype(x.dtype) @ x), p, x)
        return [y, *[leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == P.shape]]

    output, *saved = marks(f, (P, False), (X.astype(jnp.bfloat16), True))
    assert output
    assert saved and not any(saved)


def test_a_checkpoint_and_custom_derivatives_are_looked_into():
    def mixed(p, x):
        return p.T, p @ x

    with_jvp = jax.custom_jvp(mixed)
    with_jvp.defjvp(lambda primals, tangents: (mixed(*primals), mixed(*tangents)))
    with_vjp = jax.custom_vjp(mixed)
    with_vjp.defvjp(lambda p, x: (mixed(p, x), None), lambda _, cts: cts)
    for f in (jax.checkpoint(mixed), with_jvp, with_vjp):
        assert marks(f, (P, False), (X, True)) == [False, True]
        assert_evaluates(f, [P, X], [True, False])


def test_a_scan_passes_any_dependence_to_all_its_outputs():
    def f(p, x):
        def body(carry, row):
            return carry + x.sum(), row * 2

        return jax.lax.scan(body, 0.0, p)

    assert marks(f, (P, False), (X, True)) == [True, True]
    assert marks(f, (P, False), (X, False)) == [False, False]


def test_a_branch_passes_any_dependence_to_all_its_outputs():
    def f(p, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: (p * 2, p + 1), lambda: (p, p - 1))

    assert marks(f, (P, False), (X, True)) == [True, True]
    assert marks(f, (P, True), (X, False)) == [True, True]


def test_an_effect_marks_its_outputs():
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def f(p):
        return p + 1, io_callback(lambda: np.float32(3), shape, ordered=False)

    assert marks(f, (P, False)) == [False, True]


def test_decide_overrides_what_the_inputs_say():
    def decide(eqn):
        return {"sin": False, "cos": True}.get(eqn.primitive.name)

    def f(p, x):
        return jnp.sin(x), jnp.cos(p), jax.jit(jnp.sin)(x) + 1, jnp.tanh(x)

    closed = jax.make_jaxpr(f)(P, X)
    assert depends_on(closed, [False, True], decide) == [False, True, False, True]


def test_a_constant_that_is_traced_counts_as_marked():
    seen = []

    @jax.jit
    def outer(traced):
        closed = jax.make_jaxpr(lambda p: (p + traced, p + np.ones(3)))(P)
        seen.append(depends_on(closed, [False]))
        return traced

    outer(jnp.ones(3))
    assert seen == [[True, False]]


def test_evaluate_gives_the_wanted_outputs_in_order():
    def f(p, x):
        q = p.T * 3
        return q + 1, q.T @ x, x.sum(), q, 2.5

    for wanted in (
        [True, False, False, True, False],
        [False, True, True, False, True],
        [True] * 5,
        [False] * 5,
    ):
        assert_evaluates(f, [P, X], wanted)


def test_evaluate_passes_inputs_through():
    assert_evaluates(lambda p, x: (x, p, p * 1), [P, X], [False, True, True])


@pytest.mark.parametrize("wanted", [[True, False, True], [False, True, False]])
def test_evaluate_looks_into_a_nested_jit(wanted):
    @jax.jit
    def mixed(p, x):
        return p.T, jnp.einsum("ab,bc->ac", p, x), jnp.tanh(p)

    assert_evaluates(lambda p, x: mixed(p, x), [P, X], wanted)


def test_evaluate_runs_only_what_the_wanted_outputs_need():
    @jax.jit
    def mixed(p, x):
        return p.T, p @ x

    closed = jax.make_jaxpr(lambda p, x: (*mixed(p, x), jnp.sin(p)))(P, X)
    part = jax.make_jaxpr(lambda p: evaluate(closed, [p, None], [True, False, False]))(
        P
    )
    names = primitives(part)
    assert "transpose" in names
    assert not names & {"dot_general", "sin"}


def test_evaluate_runs_equations_that_hold_programs():
    def f(p, x):
        _, doubled = jax.lax.scan(lambda c, row: (c, row * 2), 0.0, p)
        branch = jax.lax.cond(p[0, 0] > 0, jnp.sin, jnp.cos, p)
        loop = jax.lax.fori_loop(0, 3, lambda i, v: v + i, p)
        return doubled, jax.nn.relu(p - 2), branch, loop, jax.nn.gelu(p) @ x

    assert_evaluates(f, [P, X], [True, True, True, True, False])
    assert_evaluates(f, [P, X], [False, True, False, False, True])


def test_evaluate_uses_the_constants_of_the_program():
    table = np.arange(3.0)
    assert_evaluates(lambda p, x: (p + table, x + 1), [P, X], [True, False])


def test_evaluate_can_be_traced_and_differentiated():
    closed = jax.make_jaxpr(lambda p, x: (jnp.sin(p), p @ x))(P, X)

    @jax.jit
    def gradient(p):
        return jax.grad(lambda q: evaluate(closed, [q, None], [True, False])[0].sum())(
            p
        )

    np.testing.assert_allclose(gradient(P), jnp.cos(P), rtol=1e-6)
