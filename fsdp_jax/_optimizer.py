"""`Optimizer`: an NNX optimizer whose state rests where the model does.

What must not live here: how an update is computed, which is optax's and NNX's.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from fsdp_jax import _batch, _functional
from fsdp_jax._param import settle_moment


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` whose state rests on the model's mesh from the first step on.

    Moments are sharded as their parameters; the step counter and other scalars are
    replicated on the mesh, so that a jitted step compiles once instead of twice. On a
    mesh of devices that do not exist (`fsdp_jax.plan`) the state is abstract.

    Args:
        model: a sharded module, or one that contains some.
        tx: an optax gradient transformation.
        wrt: which Variables of the model it updates.

    Raises:
        ValueError: no sharded module in `model`.

    Source: specification, "The optimizer is constructed with the sharded parameters".
    """

    def __init__(
        self, model: Any, tx: optax.GradientTransformation, wrt: Any = nnx.Param
    ) -> None:
        mesh = _batch.mesh_of(
            [model] if _functional.is_node(model) else [], "Optimizer"
        )
        super().__init__(model, _on_shapes(tx) if mesh.compile_only else tx, wrt=wrt)
        self.tx = tx
        for _, variable in _functional.walk(self):
            if isinstance(variable, nnx.Variable):
                settle_moment(variable, mesh)


def _on_shapes(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with an `init` that only computes shapes."""

    def init(params: Any) -> Any:
        return jax.eval_shape(tx.init, params)

    return optax.GradientTransformation(init, tx.update)
