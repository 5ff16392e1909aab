"""Which arguments of a lowered program its gathers bring together.

What lives here: following values of StableHLO from the arguments to the gathers. What
must not: what a gather costs (`_stablehlo`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_jax._hlo_collectives import GATHER, REGATHER, scopes_of
from fsdp_jax._stablehlo import functions_of, name_of, tensor_of

Origins = frozenset[int]
_NOTHING: Origins = frozenset()
# What a shard goes through on its way to a gather, and what makes another value of it
# that is gathered in its place (an average of two models, say).
_PASSES = {
    f"stablehlo.{name}"
    for name in (
        "add bitcast_convert broadcast_in_dim concatenate convert custom_call "
        "divide dynamic_slice maximum minimum multiply negate pad reshape select slice "
        "subtract transpose"
    ).split()
} | {"sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier"}
_REGIONS = ("sdy.manual_computation", "stablehlo.case", "stablehlo.if")
_ONE_TO_ONE = ("stablehlo.optimization_barrier", "sdy.all_gather", "sdy.all_slice")


def gathered_arguments(module: Any) -> Counter[tuple[tuple[int, ...], int]] | None:
    """Count the arguments that gathers of the library bring together.

    Args:
        module: MLIR module, as `lowered.compiler_ir("stablehlo")` gives it.

    Returns:
        How many of them there are of each shape and number of bytes; None if one of the
        gathers comes from no argument, or there is none.
    """
    functions = functions_of(module)
    main = functions.get("main")
    if main is None:
        return None
    walk = _Walk(functions)
    arguments = main.regions[0].blocks[0].arguments
    walk.region(main, "", [frozenset((i,)) for i in range(len(arguments))], {})
    if not walk.met or not all(walk.met):
        return None
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for i in frozenset().union(*walk.met):
        _, shape, size_bytes = tensor_of(arguments[i].type)
        found[shape, size_bytes] += 1
    return found


class _Walk:
    """Follows values; `met` holds the origins of what each gather brings together."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self.functions = functions
        self.met: list[Origins] = []

    def region(
        self, owner: Any, prefix: str, given: Sequence[Origins], env: dict[Any, Origins]
    ) -> list[Origins]:
        """Walk the regions of an operation, which take the same arguments.

        Returns:
            The origins of what they return, of all regions together.
        """
        results: list[Origins] = []
        for region in owner.regions:
            for block in region.blocks:
                env.update(zip(block.arguments, given))
                returned: list[Origins] = []
                for op in block.operations:
                    ins = [env.get(value, _NOTHING) for value in op.operands]
                    outs = self.operation(op, prefix, ins, env)
                    env.update(zip(op.results, outs))
                    returned = ins  # in the end those of the terminator
                longer = max(len(results), len(returned))
                results = [_union(pair) for pair in _pairs(results, returned, longer)]
        return results

    def operation(
        self, op: Any, prefix: str, ins: list[Origins], env: dict[Any, Origins]
    ) -> list[Origins]:
        """Origins of the results of one operation."""
        kind, count = op.operation.name, len(op.results)
        inner = f"{prefix}/{name_of(op)}"
        if kind == "stablehlo.all_gather":
            if any(d in (GATHER, REGATHER) for _, d in scopes_of(inner)):
                self.met += ins
                return ins
            return [_NOTHING] * count
        if kind in _ONE_TO_ONE:
            return ins
        if kind in _PASSES:
            return [_union(ins)] * count
        if kind in ("func.call", "call"):
            callee = str(op.attributes["callee"]).strip("@").strip('"')
            if callee in self.functions:
                return self.region(self.functions[callee], inner, ins, {})
        elif kind == "stablehlo.while":
            after = self.region(op, inner, ins, env)
            return [_union(pair) for pair in _pairs(ins, after, count)]
        elif kind in _REGIONS:
            return self.region(op, inner, ins, env)
        return [_NOTHING] * count


def _union(sets: Iterable[Origins]) -> Origins:
    return _NOTHING.union(*sets)


def _pairs(
    a: Sequence[Origins], b: Sequence[Origins], length: int
) -> list[tuple[Origins, Origins]]:
    def padded(x: Sequence[Origins]) -> list[Origins]:
        return [*x, *[_NOTHING] * (length - len(x))]

    return list(zip(padded(a), padded(b)))
