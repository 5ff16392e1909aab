"""`Optimizer`: an NNX optimizer whose state rests where the model does.

What must not live here: how an update is computed, which is optax's and NNX's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer

from fsdp_jax import _batch, _functional
from fsdp_jax._dependence import depends_on
from fsdp_jax._host_update import on_host
from fsdp_jax._managed import install, spec_of
from fsdp_jax._moments import Memory, as_full, settle_moment
from fsdp_jax._move import move
from fsdp_jax._pending import PendingGradients
from fsdp_jax._policies import PINNED_HOST, UNPINNED_HOST
from fsdp_jax._spec import dotted
from fsdp_jax._state import warn_of_new_params
from fsdp_jax._update import whole_or_nothing


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` whose state rests on the model's mesh from the first step on.

    Moments are sharded as their parameters; the step counter and other scalars are
    replicated on the mesh, so that a jitted step compiles once instead of twice. What
    shares memory with the parameters is copied, so that a step can donate both. Where
    parameters rest in host memory their moments do too, and the update runs there
    (what reduces whole arrays, such as a global norm, runs on the devices). On a
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
        warn_of_new_params(model, stacklevel=5)  # past NNX's metaclass
        kinds = _kinds(model)
        made = (
            _on_shapes(tx) if mesh.compile_only else init_elsewhere(tx) if kinds else tx
        )
        with nnx.var_defaults(hijax=False, ref=False):
            super().__init__(model, _on_unpadded(made), wrt=wrt)
        self.tx = on_host(tx) if PINNED_HOST in kinds else tx
        for _, variable in _functional.walk(self):
            if isinstance(variable, nnx.Variable):
                settle_moment(variable, mesh)
        self._own_memory(model)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Update the model and this optimizer's state, as `nnx.Optimizer` does.

        Args:
            model: the model.
            grads: gradients as `value_and_grad` returns them.
            **kwargs: for the optax transformation.

        Returns:
            What was added to the parameters.

        Raises:
            TypeError: gradients that are not reduced yet.
            ValueError: gradients of other shapes. Nothing was changed.
        """
        if isinstance(grads, PendingGradients):
            raise TypeError(
                "Optimizer.update: the gradients are not reduced yet (gradient sync or "
                "all-reduce is off). Reduce them first, with value_and_grad(...)(..., "
                "pending=p) or model.synchronize_gradients(p)."
            )
        params = nnx.state(model, self.wrt, graph=True)
        values = _unpadded_values(params)
        updates, new_state = self.tx.update(
            _unpadded_values(nnx.state(grads, self.wrt), like=params),
            _unpadded_values(self.opt_state),
            values,
            **_unpadded_values(kwargs),
        )
        _check_shapes(updates, values)
        with whole_or_nothing(model, self):
            nnx.update(model, optax.apply_updates(values, updates))
            nnx.update(self.opt_state, nnx.state(new_state))
            self.step[...] += 1
            self._own_memory(model)
        return updates

    def _own_memory(self, model: Any) -> None:
        """Copy state that shares memory with the model, so that both can be donated."""
        memory = Memory(nnx.state(model, graph=True))
        for _, variable in _functional.walk(self):
            if isinstance(variable, nnx.Variable):
                value = variable.get_raw_value()
                if (own := memory.own(value)) is not value:
                    install(variable, own)


def _check_shapes(updates: Any, values: Any) -> None:
    """Raise if an update would change a parameter's shape."""
    if jax.tree.structure(updates) != jax.tree.structure(values):
        return  # optax knows what to say
    for (path, value), update in zip(
        jax.tree_util.tree_leaves_with_path(values),
        jax.tree.leaves(updates),
        strict=True,
    ):
        if value.shape != update.shape:
            name = dotted(tuple(map(_functional.plain_key, path)))
            raise ValueError(
                f"Optimizer.update: parameter {name!r} has shape {value.shape}, and "
                f"its update has shape {update.shape}. Give the gradients that "
                "value_and_grad returned for this model."
            )


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _unpadded_values(tree: Any, like: Any = None) -> Any:
    """A tree of arrays, as `nnx.as_pure` makes it, without padding.

    Args:
        tree: of Variables or arrays.
        like: a tree of the Variables that arrays belong to; None for `tree` itself.
    """

    def unpadded(owner: Any, value: Any) -> Any:
        spec, value = spec_of(value) or spec_of(owner), nnx.as_pure(value)
        # Gradients rest as shards also while the parameters are full.
        return value if spec is None else spec.marked(False).unpadded(value)

    owners = tree if like is None else like
    return jax.tree.map(unpadded, owners, tree, is_leaf=_is_variable)


def _on_unpadded(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with an `init` on parameters without padding."""

    def init(params: Any) -> Any:
        return tx.init(jax.tree.map(as_full, params, is_leaf=_is_variable))

    return optax.GradientTransformation(init, tx.update)


def _kinds(model: Any) -> set[str]:
    """The kinds of host memory in which parameters of a model rest."""
    specs = [spec_of(v) for _, v in _functional.walk(model)]
    return {s.memory_kind for s in specs if s is not None and s.memory_kind}


def init_elsewhere(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with an `init` on arrays that are not in host memory.

    Where a process has one device only: there JAX (0.10.2 to 0.12) cannot make zeros
    like an array in host memory. They are made in the memory of the CPU backend,
    else in device memory. And in device memory where `init` computes with parameters:
    in host memory they do not mix with constants.
    """

    def away(x: Any) -> Any:
        if isinstance(x, Tracer) or not isinstance(x, jax.Array):
            return False
        return x.sharding.memory_kind in (PINNED_HOST, UNPINNED_HOST)

    def init(params: Any) -> Any:
        leaves = list(filter(away, jax.tree.leaves(params)))
        alone = leaves and len(leaves[0].sharding.addressable_devices) == 1
        if not leaves or not (alone or _computes(tx.init, params)):
            return tx.init(params)
        if alone and all(x.is_fully_addressable for x in leaves):
            with contextlib.suppress(RuntimeError):  # there may be no such backend
                cpu = jax.local_devices(backend="cpu")[0]
                with jax.default_device(cpu):
                    return tx.init(jax.tree.map(np.asarray, params))
        device = [x.sharding.with_memory_kind("device") for x in leaves]
        moved = iter(map(move, leaves, device))
        return tx.init(jax.tree.map(lambda x: next(moved) if away(x) else x, params))

    return optax.GradientTransformation(init, tx.update)


def _computes(init: Callable, params: Any) -> bool:
    """Whether an `init` does more with parameters than copying or casting them."""
    leaves, treedef = jax.tree.flatten(params)
    avals = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    def flat(*leaves: Any) -> Any:
        return jax.tree.leaves(init(jax.tree.unflatten(treedef, leaves)))

    try:
        closed = jax.make_jaxpr(flat)(*avals)
    except jax.errors.JAXTypeError:  # it looks at values
        return True
    found = []

    def look(eqn: Any, ins: Sequence[bool], inside: bool = False) -> None:
        found.append(any(ins) and eqn.primitive.name not in _COPIES)

    depends_on(closed, [True] * len(leaves), look=look)
    return any(found)


_COPIES = ("copy", "copy_p", "convert_element_type", "jit", "pjit")


def _on_shapes(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with an `init` that only computes shapes."""

    def init(params: Any) -> Any:
        return jax.eval_shape(tx.init, params)

    return optax.GradientTransformation(init, tx.update)
