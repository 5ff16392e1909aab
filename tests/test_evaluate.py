"""Evaluating a program again changes nothing: one kind of equation after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend import source_info_util

from fsdp_jax._callees import equations_inside, is_plain
from fsdp_jax._evaluate import Asking, bind, evaluate

P = jnp.arange(1.0, 7.0).reshape(2, 3)
X = jnp.arange(1.0, 13.0).reshape(3, 4) / 7
SHAPE = jax.ShapeDtypeStruct((), jnp.float32)


def note(*values: Any) -> None:
    seen.append(len(values))


def noted(x: Any) -> Any:
    note(x)
    return np.float32(3)


seen: list[int] = []


@jax.custom_jvp
def by_jvp(p):
    return jnp.sin(p)


by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), -7 * tangents[0]))


@jax.custom_vjp
def by_vjp(p):
    return jnp.sin(p)


by_vjp.defvjp(lambda p: (by_vjp(p), None), lambda _, ct: (-3 * ct,))


def in_a_while_loop(p, x):
    def step(state):
        return state[0] + 1, jnp.cos(state[1])

    return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, p))


def in_a_scope(p, x):
    with jax.named_scope("outer"), jax.named_scope("inner"):
        return jnp.sin(p)


def told(p, x):
    jax.debug.print("{p}", p=p[0, 0])
    jax.debug.callback(note, p)
    return p * 2


def asked(p, x):
    return jax.pure_callback(noted, SHAPE, p), io_callback(noted, SHAPE, x) + 1


def branch(p, x):
    return jax.lax.cond(p[0, 0] > 0, by_vjp, lambda p: told(p, p), p)


KINDS: dict[str, Callable[..., Any]] = {
    "jit": lambda p, x: jax.jit(lambda p, x: (p @ x, by_jvp(p)))(p, x),
    "nested jit": lambda p, x: jax.jit(jax.jit(lambda p: by_vjp(p) + 1))(p),
    "cond": branch,
    "while": in_a_while_loop,
    "scan": lambda p, x: jax.lax.scan(lambda c, r: (c + r.sum(), by_vjp(r)), 0.0, p),
    "custom_jvp": lambda p, x: (by_jvp(p), x),
    "custom_vjp": lambda p, x: (by_vjp(p), x),
    "checkpoint": lambda p, x: jax.checkpoint(lambda p, x: by_vjp(p) @ x)(p, x),
    "callbacks": asked,
    "debugging": told,
    "constants": lambda p, x: (1, 2.5, np.float32(3), jnp.arange(3), jnp.zeros(2) == 1),
    "inputs": lambda p, x: (x, p, x),
    "scope": in_a_scope,
}


def lines(closed: Any) -> list[Any]:
    """Every equation, nested ones too, with its scopes and its line of code."""
    return [
        (
            e.primitive.name,
            str(e.source_info.name_stack),
            source_info_util.summarize(e.source_info),
            sorted(map(str, e.effects)),
        )
        for e in equations_inside(closed)
    ]


def again(closed: Any, way: str) -> Any:
    """The program as one way to evaluate it leaves it."""

    def run(p, x):
        if way == "asking":
            program = Asking(closed, [0, 1])
            return program([p, x], lambda i, b: ((p, x)[i], b), lambda i, r: r)
        wanted = [True] * len(values_of) if way == "wanted" else None
        return evaluate(closed, [p, x], wanted)

    values_of = closed.jaxpr.outvars
    return jax.make_jaxpr(run)(P, X)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_stays_the_same(kind):
    closed = jax.make_jaxpr(KINDS[kind])(P, X)
    got = again(closed, "whole")
    assert lines(got) == lines(closed)
    assert [a.str_short() for a in got.out_avals] == [
        a.str_short() for a in closed.out_avals
    ]


@pytest.mark.parametrize("way", ["whole", "wanted", "asking"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_derivatives_and_effects_stay_the_same(kind, way):
    f = KINDS[kind]
    closed = jax.make_jaxpr(f)(P, X)
    program = again(closed, way)

    def evaluated(p, x):
        return evaluate(program, [p, x])

    def results(of):
        seen.clear()
        found = jax.tree.leaves(jax.jit(of)(P, X))
        jax.effects_barrier()
        return found, list(seen)

    (got, told), (want, expected) = results(evaluated), results(f)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_allclose(a, b, rtol=1e-6)
    if way != "wanted":
        assert told == expected
    if kind in ("while", "callbacks", "constants"):
        return

    def gradient(of):
        return jax.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(of(p, X)))))

    gradients = (jax.jit(gradient(of))(P) for of in (evaluated, f))
    np.testing.assert_allclose(*gradients, rtol=1e-6)


def test_wanted_outputs_need_no_other_effects():
    def f(p, x):
        jax.debug.callback(note, x)
        return jax.jit(told)(p, x), p + 1

    def run(wanted):
        return jax.make_jaxpr(lambda p: evaluate(closed, [p, None], wanted))(P)

    closed = jax.make_jaxpr(f)(P, X)
    names = [e.primitive.name for e in equations_inside(run([True, False]))]
    assert names == ["mul"]


def test_rules_and_checkpoints_are_bound_whole_where_only_a_part_is_wanted():
    def f(p, x):
        return jax.jit(lambda p: (by_jvp(by_vjp(p)), jnp.tan(p)))(p), jnp.cos(x)

    closed = jax.make_jaxpr(lambda p, x: jax.tree.leaves(f(p, x)))(P, X)
    run = jax.make_jaxpr(lambda p: evaluate(closed, [p, None], [True, False, False]))(P)
    names = [eqn.primitive.name for eqn in run.jaxpr.eqns]
    assert names == ["custom_vjp_call", "custom_jvp_call"]


def test_a_call_is_looked_into_where_it_is_said_so():
    closed = jax.make_jaxpr(KINDS["jit"])(P, X)

    def twice(eqn, values):
        return bind(
            eqn, [2 * v if eqn.primitive.name == "dot_general" else v for v in values]
        )

    got = evaluate(closed, [P, X], into=is_plain, apply=twice)
    np.testing.assert_allclose(got[0], 4 * P @ X, rtol=1e-6)
    run = jax.make_jaxpr(lambda p, x: evaluate(closed, [p, x], into=is_plain))(P, X)
    names = [eqn.primitive.name for eqn in run.jaxpr.eqns]
    assert names == ["dot_general", "custom_jvp_call"]
