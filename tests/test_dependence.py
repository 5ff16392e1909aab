"""What an output of a traced program depends on, and evaluating it bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from fsdp_jax._dependence import depends_on
from fsdp_jax._evaluate import Asking, evaluate

P = jnp.arange(1.0, 7.0).reshape(2, 3)
Q = jnp.arange(8.0, 0.0, -1.0).reshape(4, 2) / 5
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
    expected = [y for y, w in zip(jax.jit(f)(*args), wanted, strict=True) if w]
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


def test_a_checkpoint_and_custom_derivatives_are_one_equation():
    def mixed(p, x):
        return p.T, p @ x

    with_jvp = jax.custom_jvp(mixed)
    with_jvp.defjvp(lambda primals, tangents: (mixed(*primals), mixed(*tangents)))
    with_vjp = jax.custom_vjp(mixed)
    with_vjp.defvjp(lambda p, x: (mixed(p, x), None), lambda _, cts: cts)
    for f in (jax.checkpoint(mixed), with_jvp, with_vjp):
        assert marks(f, (P, False), (X, True)) == [True, True]
        assert marks(f, (P, True), (X, False)) == [True, True]
        closed = jax.make_jaxpr(f)(P, X)
        assert depends_on(closed, [False, True], into_loops=True) == [False, True]
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


# Programs that ask for their inputs.


def as_it_is(i: int, values: list[Any]) -> list[Any]:
    return values


def asking(
    f: Callable[..., Any], ask: Callable[..., Any] = as_it_is, done: Any = as_it_is
) -> tuple[list[Any], list[Any]]:
    """Evaluate `f(P, Q, X)` while it asks for P and Q.

    Args:
        f: the program.
        ask: what `Asking` gives it, to what to use in place of the other arrays read.
        done: as `Asking` takes it.

    Returns:
        All outputs; and what was asked for and done, in order.
    """
    program = Asking(jax.make_jaxpr(f)(P, Q, X), [0, 1])
    events: list[Any] = []

    def asked(i, besides):
        events.append(("ask", i))
        return (P, Q)[i], ask(i, besides)

    def computed(i, results):
        events.append(("done", i))
        return done(i, results)

    outputs = program([None, None, X], asked, computed)
    assert [i for kind, i in events if kind == "ask"] == program.order
    return outputs, events


def asked_by(f: Callable[..., Any]) -> list[int]:
    """Which of the inputs `f` asks for, in order."""
    return [i for kind, i in asking(f)[1] if kind == "ask"]


def sequence(f: Callable[..., Any]) -> list[str]:
    """Primitives in the order in which `f` is evaluated; "ask" where it asks."""

    def run(p, q, x):
        def ask(i, besides):
            return jax.lax.optimization_barrier((p, q)[i]), besides

        return Asking(closed, [0, 1])([None, None, x], ask, as_it_is)

    closed = jax.make_jaxpr(f)(P, Q, X)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(run)(P, Q, X).eqns]
    return ["ask" if name == "optimization_barrier" else name for name in names]


@jax.custom_vjp
def product(p, x):
    return p @ x


product.defvjp(
    lambda p, x: (p @ x, (p, x)), lambda px, ct: (ct @ px[1].T, px[0].T @ ct)
)


def in_a_jit(p, q, x):
    return jax.jit(lambda p, q, x: p @ x @ q)(p, q, x)


def in_a_scan(p, q, x):
    return jax.lax.scan(lambda sum, row: (sum + (row @ x @ q).sum(), row * 2), 0.0, p)


def in_a_branch(p, q, x):
    branches = lambda p, x: p @ x @ q, lambda p, x: p @ (x + 1) @ q
    return jax.lax.cond(x[0, 0] > 0, *branches, p, x)


def in_a_while_loop(p, q, x):
    def step(state):
        return state[0] + 1, (q @ (p @ state[1] + 1))[:3] / 10

    return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x[:, :3])), q


def in_a_checkpoint(p, q, x):
    return jax.checkpoint(lambda p, q, x: jnp.sin(p @ x) @ q)(p, q, x)


def in_a_custom_vjp(p, q, x):
    return product(p, x), q


def in_a_linearization(p, q, x):
    _, vjp = jax.vjp(lambda p, q, x: jax.nn.gelu(product(p, x)) @ q, p, q, x)
    return vjp(jnp.ones((2, 2)))


def with_activations(p, q, x):
    return jax.nn.relu(jax.nn.gelu(p) @ jax.nn.relu(x - 1)), jax.nn.relu(q - 1)


def with_a_constant(p, q, x):
    return p @ (x + np.arange(4.0)), q * np.ones(2)


def with_a_literal(p, q, x):
    return 1.0, p @ x @ q, 2


def read_twice(p, q, x):
    return p @ x @ q @ p


def derived(p, q, x):
    return (p.T @ q.T).astype(jnp.bfloat16) * x.sum(), p.T + 1, x


PROGRAMS = [
    in_a_jit,
    in_a_scan,
    in_a_branch,
    in_a_while_loop,
    in_a_checkpoint,
    in_a_custom_vjp,
    in_a_linearization,
    with_activations,
    with_a_constant,
    with_a_literal,
    read_twice,
    derived,
]


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_that_asks_gives_the_same_outputs(f):
    got, _ = asking(f)
    for a, b in zip(got, jax.tree.leaves(f(P, Q, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_every_input_that_is_read_is_asked_for_once(f):
    assert sorted(asked_by(f)) == [0, 1]


def test_inputs_are_asked_for_in_the_order_in_which_they_are_read():
    assert asked_by(lambda p, q, x: p @ x @ q) == [0, 1]
    assert asked_by(lambda p, q, x: (x @ q, p @ x)) == [1, 0]
    assert asked_by(lambda p, q, x: p @ (x @ q)) == [1, 0]
    assert asked_by(lambda p, q, x: (p.T @ q.T) * x) == [0, 1]
    assert asked_by(lambda p, q, x: (q @ p) * x[:1, :3]) == [1, 0]


def test_an_input_that_is_not_read_is_not_asked_for():
    assert asked_by(lambda p, q, x: p @ x) == [0]
    assert asked_by(lambda p, q, x: x + 1) == []
    assert asked_by(lambda p, q, x: (jnp.sin(p), p.T)[1] @ jnp.ones(2)) == [0]


def test_an_output_that_is_an_input_is_asked_for_last():
    outputs, events = asking(lambda p, q, x: (p, x, x @ q))
    assert events == [("ask", 1), ("done", 1), ("ask", 0)]
    np.testing.assert_array_equal(outputs[0], P)


def test_what_follows_from_asked_inputs_waits_until_it_is_needed():
    def f(p, q, x):
        cast, turned = q.astype(jnp.bfloat16), p.T
        return jnp.sin(x).T @ turned @ cast.astype(jnp.float32).T

    dot, cast = "dot_general", "convert_element_type"
    first = ["sin", "transpose", "ask", "transpose", dot]
    assert sequence(f) == [*first, "ask", cast, cast, "transpose", dot]


def test_what_follows_from_asked_inputs_is_not_computed_for_nothing():
    assert sequence(lambda p, q, x: (jnp.sin(p), jnp.cos(x))[1]) == ["cos"]


def test_what_follows_from_asked_inputs_is_computed_once():
    def f(p, q, x):
        turned = jnp.sin(p).T
        return x.T @ turned, turned @ x[:2], turned + 1

    assert sequence(f).count("sin") == sequence(f).count("ask") == 1


def test_one_equation_asks_for_all_that_it_reads():
    _, events = asking(lambda p, q, x: jax.jit(lambda *a: a[0] @ a[2] @ a[1])(p, q, x))
    assert events == [("ask", 0), ("ask", 1), ("done", 0), ("done", 1)]
    assert [kind for kind, _ in asking(in_a_scan)[1]] == ["ask", "ask", "done", "done"]


def test_what_is_returned_in_place_of_arrays_is_used_from_there_on():
    def f(p, q, x):
        total = x.sum()
        y = p @ x
        return total, x * 1, y @ q, y

    outputs, _ = asking(f, ask=lambda i, besides: [b * 10 for b in besides])
    expected = X.sum(), 10 * X, 100 * P @ X @ Q, 100 * P @ X
    for a, b in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    outputs, _ = asking(f, done=lambda i, results: [-r for r in results])
    for a, b in zip(outputs, (X.sum(), X, P @ X @ Q, -P @ X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_is_read_besides_follows_from_no_asked_input():
    sizes = []

    def f(p, q, x):
        return jnp.concatenate([a.ravel() for a in (x[0], p, x, q.T, p)])

    def ask(i, besides):
        sizes.append((i, [b.size for b in besides]))
        return besides

    asking(f, ask)
    assert sizes == [(0, [4, 12]), (1, [4, 12])]


@pytest.mark.parametrize("of_an_input", [False, True])
def test_side_effects_keep_their_place(of_an_input):
    def f(p, q, x):
        y = x @ q
        jax.debug.callback(lambda _: None, p if of_an_input else y)
        return jnp.sin(y), p

    first, effect = ["ask", "dot_general"], "debug_callback"
    if of_an_input:
        assert sequence(f) == [*first, "ask", effect, "sin"]
    else:
        assert sequence(f) == [*first, effect, "sin", "ask"]


def test_a_side_effect_happens_once():
    seen = []

    def f(p, q, x):
        jax.debug.callback(lambda p: seen.append(p.shape), p.T)
        return p @ x @ q

    asking(f)
    jax.effects_barrier()
    assert seen == [P.T.shape]


def test_a_program_that_asks_can_be_traced_and_differentiated():
    def f(p, q, x):
        return (jax.nn.relu(product(p, x)) @ q).sum()

    def run(p, q, x):
        program = Asking(jax.make_jaxpr(f)(P, Q, X), [0, 1])
        return program([None, None, x], lambda i, b: ((p, q)[i], b), as_it_is)[0]

    got, expected = (jax.jit(jax.grad(g, (0, 1, 2)))(P, Q, X) for g in (run, f))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_long_chains_of_what_follows_from_an_input():
    def f(p, q, x):
        for _ in range(1500):  # more than Python calls within each other
            p = p + 1
        return p @ x

    assert asked_by(f) == [0]


def scopes(closed: Any) -> list[str]:
    """The named scopes that the matmuls of a program stand in."""
    eqns = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    return [str(eqn.source_info.name_stack) for eqn in eqns]


def test_equations_keep_their_names():
    @jax.jit
    def nested(p, x):
        with jax.named_scope("inside"):
            return p @ x

    def f(p, q, x):
        with jax.named_scope("outer"):
            return nested(p, x), jax.named_scope("other")(lambda: x @ q)()

    closed = jax.make_jaxpr(f)(P, Q, X)

    def part(p, q, x):
        with jax.named_scope("now"):
            return evaluate(closed, [p, q, x], [True, True])

    def asked(p, q, x):
        with jax.named_scope("now"):

            def ask(i, besides):
                return (p, q)[i], besides

            return Asking(closed, [0, 1])([None, None, x], ask, as_it_is)

    assert scopes(jax.make_jaxpr(part)(P, Q, X)) == [
        "now/outer/inside",
        "now/outer/other",
    ]
    assert scopes(jax.make_jaxpr(asked)(P, Q, X)) == ["now/outer/other"]
