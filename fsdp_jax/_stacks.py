"""Which leading dims of a parameter count layers, and so are never cut.

What lives here: reading it off NNX metadata, and off the layers of Flax. What must not:
where a parameter is cut (`_placement`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from fsdp_jax import _functional

LAYER_NAMES = frozenset({"layer", "layers", "block", "blocks", "stack", "depth"})


def _dims(layer: Any) -> dict[str, int]:
    """Dims of the parameters of a layer of Flax: with more, nnx.vmap made a stack."""
    if isinstance(layer, nnx.Linear):
        return {"kernel": 2, "bias": 1}
    if isinstance(layer, nnx.Embed):
        return {"embedding": 2}
    if isinstance(layer, (nnx.Conv, nnx.ConvTranspose)):
        sizes = layer.kernel_size
        return {"kernel": 2 + (len(sizes) if isinstance(sizes, Sequence) else 1)}
    if isinstance(layer, nnx.LinearGeneral):
        inner, outer = (
            len(sizes) if isinstance(sizes, Sequence) else 1
            for sizes in (layer.in_features, layer.out_features)
        )
        batch = len(layer.batch_axis)
        return {"kernel": batch + inner + outer, "bias": batch + outer}
    if isinstance(layer, nnx.Einsum):
        return {"kernel": len(layer.kernel_shape)}
    norms = nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm
    if isinstance(layer, norms):
        return {"scale": 1, "bias": 1}
    return {}


def named_layer_dims(param: Any) -> int:
    """How many leading dims of a parameter NNX metadata names as layers.

    That is what `nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME: "layers"})`
    writes in front of a parameter's `out_sharding`.
    """
    given = param.get_metadata("out_sharding", None)
    names = getattr(given, "spec", given) or ()  # a NamedSharding has a spec
    count = 0
    for name in names:
        if not isinstance(name, str) or name.lower() not in LAYER_NAMES:
            break
        count += 1
    return count


def layer_dims(module: Any) -> dict[int, int]:
    """Leading layer dims of the parameters below a module, by the id of each Variable.

    Parameters that are not in it have none. Besides those that metadata names: all
    parameters of a module that holds a layer of Flax with more dims than it makes, in
    which every parameter begins with the same sizes, and no layer of Flax is a single
    one.
    """
    found, leads = {}, {}
    nodes = dict(_functional.walk(module))
    params = {p: v for p, v in nodes.items() if isinstance(v, nnx.Param)}
    for path, node in nodes.items():
        for param, lead in _in_layer(node):
            leads[id(param)] = path, lead
    single = {key for key, (_, lead) in leads.items() if not lead}
    for path, lead in leads.values():
        if lead:
            stack = _enclosing(path, params, lead, single)
            found.update({id(v): len(lead) for v in stack})
    for variable in params.values():
        if named := named_layer_dims(variable):
            found[id(variable)] = named
    return found


def _in_layer(node: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The parameters of one of Flax's layers, and the sizes in front of their own."""
    for name, ndim in _dims(node).items():
        param = getattr(node, name, None)
        if isinstance(param, nnx.Param):
            shape = _shape(param)
            yield param, shape[: len(shape) - ndim]


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param.get_raw_value(), "shape", ()))


def _enclosing(
    path: tuple[Any, ...],
    params: dict[tuple[Any, ...], Any],
    lead: tuple[int, ...],
    single: set[int],
) -> list[Any]:
    """The parameters of the outermost module around a path that may be the stack."""
    for end in range(len(path) + 1):
        inside = [v for p, v in params.items() if p[:end] == path[:end]]
        alike = all(_shape(v)[: len(lead)] == lead for v in inside)
        if alike and not any(id(v) in single for v in inside):
            return inside
    return []
