"""Which arrays are differentiated, and how their gradients are laid out.

What must not live here: differentiating them (`_program`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from fsdp_jax import _functional
from fsdp_jax._join import Request, Slot
from fsdp_jax._param import with_value
from fsdp_jax._spec import by_name, dotted
from fsdp_jax._stages import Entry


@dataclasses.dataclass
class Selection:
    """What `argnums` and `wrt` select in one call.

    Attributes:
        entries: per differentiated array, how its gradient is cut.
        positions: of these among the arrays of the state and of the arguments.
        variables: name by the id of each differentiated Variable.
        layout: from gradients by name to what is returned.
    """

    entries: list[Entry]
    positions: list[int]
    variables: dict[int, str]
    layout: Callable[[dict[str, Any]], Any]


def select(
    request: Request,
    args: Sequence[Any],
    nodes: Sequence[Any],
    slots: Sequence[Slot],
    specs: Sequence[PartitionSpec],
    names: Sequence[str],
) -> Selection:
    """Find what is differentiated.

    Args:
        request: what the user asked for.
        args: positional arguments.
        nodes: all nodes in the arguments.
        slots: of their state.
        specs: of the arrays of the arguments.
        names: of the positional arguments, for error texts.

    Raises:
        TypeError: something selected cannot be differentiated.
        ValueError: nothing, or something twice, is selected.
    """
    slot_of = slots_by_variable(nodes, slots)
    num_args = len(args)
    all_trees = [_functional.take(a) for a in args]
    offsets = [len(slots)]
    for _, _, arrays in all_trees:
        offsets.append(offsets[-1] + len(arrays))
    chosen = Selection([], [], {}, lambda grads: grads)
    layouts = []
    for number, wrt in zip(request.argnums or (), request.wrt):
        if not -num_args <= number < num_args:
            raise ValueError(
                f"{request.who}: argnums names argument {number}, but the call has "
                f"{num_args} positional arguments."
            )
        number %= num_args
        tree, arg_nodes, arrays = all_trees[number]
        predicate = nnx.filterlib.to_predicate(wrt)
        for slot in tree.slots:
            if isinstance(slot, tuple):
                raise TypeError(
                    f"{request.who}: {names[number]} holds {slot[0]!r}, which is "
                    "static and so cannot be differentiated. Pass it as an array "
                    "(jnp.asarray), or leave it out of argnums."
                )
        alone = len(request.wrt) == 1 and len(arg_nodes) == 1 and not arrays
        node_entries = []
        for k, node in enumerate(arg_nodes):
            entries = []
            for path, variable in _functional.walk(node):
                if not isinstance(variable, nnx.Variable):
                    continue
                if not predicate(path, variable):
                    continue
                i = slot_of.get(id(variable))
                if i is None:
                    if variable.get_raw_value() is None:
                        continue  # an absent bias, say
                    raise TypeError(
                        f"{request.who}: {dotted(path)!r} holds a "
                        f"{type(variable.get_raw_value()).__name__}, not an array, so "
                        "it cannot be differentiated. Make it a jnp array, or narrow "
                        "wrt."
                    )
                _check_float(request, dotted(path), variable.dtype)
                if i in chosen.positions:
                    raise ValueError(
                        f"{request.who}: {dotted(path)!r} of {names[number]} is "
                        "already differentiated as part of another argument in "
                        "argnums. Name one of the two."
                    )
                name = dotted(path) if alone else f"{number}.{k}:{dotted(path)}"
                entries.append((path, variable, name))
                chosen.positions.append(i)
                chosen.variables[id(variable)] = name
                slot, shape = slots[i], tuple(variable.shape)
                chosen.entries.append(Entry(name, shape, slot.spec, slot.param))
            by_name(((path, v) for path, v, _ in entries), request.who)
            node_entries.append(entries)
        if arg_nodes and not any(node_entries) and not arrays:
            raise ValueError(
                f"{request.who}: wrt={wrt!r} selects no Variable of {names[number]}, "
                "so there is nothing to differentiate. Give a Variable type such as "
                "nnx.Param, or a filter such as nnx.PathContains('head'); a str is an "
                "nnx tag."
            )
        array_names = []
        for k, x in enumerate(arrays):
            _check_float(request, names[number], x.dtype)
            name, at = f"{number}[{k}]", offsets[number] + k
            array_names.append(name)
            chosen.positions.append(at)
            spec = specs[at - len(slots)]
            chosen.entries.append(Entry(name, tuple(x.shape), spec, None))
        layouts.append((tree, node_entries, array_names))

    def layout(grads: dict[str, Any]) -> Any:
        results = []
        for tree, node_entries, array_names in layouts:
            states = [_grad_state(entries, grads) for entries in node_entries]
            results.append(tree.put(states, [grads[n] for n in array_names]))
        return results[0] if request.single else tuple(results)

    chosen.layout = layout
    return chosen


def slots_by_variable(nodes: Sequence[Any], slots: Sequence[Slot]) -> dict[int, int]:
    """By the id of each Variable, the position of its first array."""
    positions = {slot.path: i for i, slot in reversed(list(enumerate(slots)))}
    found: dict[int, int] = {}
    for root, node in enumerate(nodes):
        for path, variable in _functional.walk(node):
            if (root, *path) in positions:
                found.setdefault(id(variable), positions[(root, *path)])
    return found


def _check_float(request: Request, name: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{request.who}: {name!r} has dtype {dtype}, which cannot be "
            "differentiated. Narrow wrt (or argnums) to floating values."
        )


def _grad_state(entries, grads) -> Any:
    made = {path: with_value(v, grads[name]) for path, v, name in entries}
    return made[()] if () in made else nnx.from_flat_state(made)
