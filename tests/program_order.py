"""What comes before what in a traced step, by the names of its collectives.

What lives here: reading a jaxpr. A collective comes before another one if a path of
operands leads from the first to the second; `optimization_barrier` is one step of such
a path, from each of its operands to all of its results. Matmuls are told apart from
each other where a test names them (`matmul_named`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_NAME = re.compile(r"fsdp:(\w+):([\w.]*)")
_LOOPS = ("scan", "while", "cond")


def matmul_named(name: str) -> AbstractContextManager[Any]:
    """The matmuls made in here, in backward too, are listed as `matmul:name`."""
    return jax.named_scope(f"fsdp:matmul:{name}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a module asked for, or a named matmul.

    Attributes:
        kind: `gather`, `regather`, `reduce_scatter`, `all_reduce` or `matmul`.
        group: path of the module, or name of the matmul.
        shape: of its result.
        number: which one of this kind and group, in program order.
    """

    kind: str
    group: str
    shape: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.group}"


class Order:
    """The collectives of a step and what must come before each."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.collectives: list[Collective] = []
        self._before: dict[Collective, frozenset[Collective]] = {}
        self._read(closed.jaxpr, {}, "")

    def before(self, kind: str, group: str, number: int = 0) -> set[str]:
        """What must come before a collective, as `kind:group`."""
        return {str(c) for c in self.ancestors(self.find(kind, group, number))}

    def ancestors(self, found: Collective) -> frozenset[Collective]:
        """All that must come before a collective."""
        return self._before[found]

    def find(self, kind: str, group: str, number: int = 0) -> Collective:
        """A collective by its name."""
        (found,) = [
            c
            for c in self.collectives
            if (c.kind, c.group, c.number) == (kind, group, number)
        ]
        return found

    def of(self, kind: str, group: str) -> list[Collective]:
        """All collectives of a name, in program order."""
        return [c for c in self.collectives if (c.kind, c.group) == (kind, group)]

    def _read(self, jaxpr: Jaxpr, known: dict[Any, frozenset[Collective]], path: str):
        """Returns the ancestors of every result; `known` has those of the inputs."""

        def look(v: Any) -> frozenset[Collective]:
            return frozenset() if isinstance(v, Literal) else known.get(v, frozenset())

        for eqn in jaxpr.eqns:
            stack = f"{path}/{eqn.source_info.name_stack}"
            inputs = [look(v) for v in eqn.invars]
            inner = list(_inner(eqn.params))
            if len(inner) == 1 and len(inner[0].invars) == len(inputs):
                known.update(
                    zip(
                        eqn.outvars,
                        self._read(inner[0], dict(zip(inner[0].invars, inputs)), stack),
                    )
                )
                continue
            result = frozenset().union(*inputs)
            name = eqn.primitive.name
            named = name == "dot_general" and "fsdp:matmul:" in stack
            if named or name in ("all_gather", "reduce_scatter", "psum"):
                result |= {self._note(eqn, stack, result)}
            known.update((v, result) for v in eqn.outvars)
        return [look(v) for v in jaxpr.outvars]

    def _note(self, eqn: Any, stack: str, before: frozenset[Collective]) -> Collective:
        kind, group = _NAME.findall(stack)[-1]
        number = len(self.of(kind, group))
        found = Collective(kind, group, eqn.outvars[0].aval.shape, number)
        self.collectives.append(found)
        self._before[found] = before
        return found


def _inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def order_of(f: Callable[..., Any], *args: Any) -> Order:
    """The order of the collectives in a function of NNX modules and arrays."""
    graphdef, state = nnx.split(args)

    def pure(state: Any) -> Any:
        return nnx.as_pure(f(*nnx.merge(graphdef, state)))

    return Order(jax.make_jaxpr(pure)(state))
