"""`ShardedModule`: a Linen module that runs on sharded parameters.

What must not live here: sharding them (`linen`), and gathering (`_linen_units`).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core.scope import in_filter, subtract_filters
from flax.errors import ScopeParamShapeError
from jax.core import Tracer

from fsdp_jax import _collectives, _cotangents, _functional
from fsdp_jax._compiled import compiled
from fsdp_jax._linen_names import Path, canonical, joined, named
from fsdp_jax._linen_program import infos_of, program_state
from fsdp_jax._linen_units import READS, Box, Info, call_unit, intercept, unwrap, wrap
from fsdp_jax._mesh import MeshInfo
from fsdp_jax._move import move

_STAND_IN: contextvars.ContextVar[Callable | None]
_STAND_IN = contextvars.ContextVar("stand_in", default=None)


@contextmanager
def standing_in(make: Callable[[Any], Callable] | None) -> Iterator[None]:
    """Within the block `apply` of a model is what `make` makes of the model.

    None: its own again.
    """
    token = _STAND_IN.set(make)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


class ShardedModule:
    """A Linen module whose parameters are sharded; made by `fully_shard`.

    It holds no arrays. `jax.jit` takes one object for the same in every call, as part
    of a `TrainState` (`apply_fn=model.apply`) or in a closure.

    Attributes:
        module: the Linen module.
        collections: the structure of each collection besides the parameters.

    Source: README, "Flax Linen".
    """

    def __init__(self, module: nn.Module, holder: Any, known: dict[str, Any]) -> None:
        self.module = module
        self._graphdef, self._state = nnx.split(holder, graph=True)
        self.collections = known
        self._infos = infos_of(holder)
        self._root = program_state(holder, ())

    @property
    def groups(self) -> Any:
        """The groups, as an NNX module without values.

        The root's, with those of submodules under their names. For
        `describe(model.groups)`, `shard_batch(batch, model.groups)` and the like; to
        change one see `with_groups`.
        """
        state = jax.tree.map(lambda x: x, self._state)  # its own, of this trace
        return nnx.merge(self._graphdef, state)

    @property
    def mesh(self) -> MeshInfo:
        """The mesh and the roles of its axes."""
        return self._root.mesh

    def with_groups(self, change: Callable[[Any], None]) -> ShardedModule:
        """Turn knobs of the groups.

        Args:
            change: given `groups`, calls setters of `FSDPModule` on it or on a module
                in it.

        Returns:
            A model with these groups; this one stays as it is.
        """
        holder = self.groups
        change(holder)
        return ShardedModule(self.module, holder, self.collections)

    def with_module(
        self, module: nn.Module, variables: Mapping[str, Any] | None = None
    ) -> ShardedModule:
        """Run another configuration of the module on the same parameters.

        For decoding, say, where `module.clone(decode=True)` would run the module
        itself. Padded parameters (`uneven="pad"`) can only be shared so.

        Args:
            module: a Linen module whose parameters have the same names and shapes.
            variables: its variables or their shapes, if it has other collections.

        Returns:
            A model with the same groups; this one stays as it is.

        Raises:
            TypeError: `module` is no Linen module.
            ValueError: it is bound.
        """
        check_module("with_module", module)
        known = self.collections if variables is None else structures(variables)
        return ShardedModule(module, self.groups, known)

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: Any = None,
        method: Any = None,
        mutable: Any = False,
        capture_intermediates: Any = False,
        **kwargs: Any,
    ) -> Any:
        """Run the module, as `flax.linen.Module.apply` does.

        In a per-device program the random streams differ from device to device: the
        index of the device is folded into each key.

        Args:
            variables: with the sharded parameters under "params".
            *args: for the method.
            rngs: as in Linen, as are the others.
            method: which method; None for `__call__`.
            mutable: which collections may change. Parameters never do.
            capture_intermediates: what to capture.
            **kwargs: for the method.

        Returns:
            The output, or the output and the changed collections.

        Raises:
            As `flax.linen.Module.apply`.
        """
        if (make := _STAND_IN.get()) is not None:
            kwargs = {
                **kwargs,
                "rngs": rngs,
                "method": method,
                "mutable": mutable,
                "capture_intermediates": capture_intermediates,
            }
            with standing_in(None):
                return make(self)(variables, *args, **kwargs)
        params = canonical(variables.get("params", {}))
        others = {k: v for k, v in variables.items() if k != "params"}
        pieces = {n: self._piece(n, x) for n, x in named(params).items()}
        own = {n: p for n, p in pieces.items() if _is_own(p)}
        names, treedef = list(pieces), jax.tree.structure(params)
        state = next((p[1].state for p in own.values()), self._root)
        changing = mutable
        if mutable is not False:
            changing = subtract_filters(mutable, "params")

        def run(full: Any, args: Any, kwargs: Any, carried: Any) -> Any:
            rest, others, rngs = unwrap(carried)
            by_name = {**dict(zip(own, full, strict=True)), **rest}
            leaves = [by_name[n] for n in names]
            given = {**others, "params": jax.tree.unflatten(treedef, leaves)}
            with _saying_padding(), nn.intercept_methods(intercept):
                output = self.module.apply(
                    given,
                    *args,
                    rngs=rngs,
                    method=method,
                    mutable=changing,
                    capture_intermediates=capture_intermediates,
                    **kwargs,
                )
            output, updates = output if changing is not False else (output, {})
            return output, wrap(updates)

        rest = {}
        for name, piece in pieces.items():
            if name not in own:
                boxed = isinstance(piece, tuple)
                rest[name] = Box(*piece) if boxed else piece
        rngs = self._folded(rngs)
        output, updates = call_unit(
            list(own.values()), state, run, args, kwargs, (rest, others, rngs)
        )
        if mutable is False:
            return output
        if in_filter(mutable, "params") and "params" in variables:
            updates = {**updates, "params": variables["params"]}
        return output, updates

    def _piece(self, name: Path, x: Any) -> Any:
        """What this program holds of a parameter, and its info; or a full array."""
        if (piece := READS.piece(x)) is not None:
            return piece
        info = self._infos.get(name)
        if info is None:
            return x
        spec = info.spec
        if spec.mesh.per_device():
            piece = not spec.cut or spec.is_shard(x)
            return (x, info) if piece else _cotangents.guarded(x, joined(name))
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            x = move(x, spec.sharding(x.ndim))
        return x, info

    def _folded(self, rngs: Any) -> Any:
        """The random streams of this device."""
        mesh = self._root.mesh
        if rngs is None or not mesh.per_device() or mesh.num_devices == 1:
            return rngs
        index = _collectives.device_index(mesh)
        return jax.tree.map(lambda key: jax.random.fold_in(key, index), rngs)

    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Make variables, each array sharded from the start, as Linen's `init` does.

        Args:
            rngs: as in Linen.
            *args: for the module; arrays are traced.
            **kwargs: likewise.

        Returns:
            The variables, as `fully_shard` returns them.
        """
        taken, _, arrays = _functional.take((args, kwargs))

        def make(rngs: Any, arrays: Any) -> Any:
            args, kwargs = taken.put((), arrays)
            # Under no mesh, or Linen asks for the shardings that boxes name.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return self.module.init(rngs, *args, **kwargs)

        shapes = jax.eval_shape(make, rngs, arrays)
        targets = places_of(shapes, self._infos, self._root.mesh)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((rngs, arrays))):
            return jax.tree.map(move, make(rngs, arrays), targets)
        return compiled(make, out_shardings=targets)(rngs, arrays)


def check_module(who: str, module: Any) -> None:
    """Raise unless something is a Linen module that is not bound.

    Raises:
        TypeError: it is no Linen module.
        ValueError: it is bound.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{who}: expected a Linen module, got {type(module).__name__}. For NNX "
            "modules there is fsdp_jax.fully_shard."
        )
    if module.scope is not None:
        raise ValueError(
            f"{who}: the module is bound to variables. Pass the unbound one, and the "
            "variables next to it."
        )


def structures(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The structure of each collection besides the parameters."""
    return {
        name: jax.tree.structure(canonical(tree))
        for name, tree in variables.items()
        if name != "params"
    }


@contextmanager
def _saying_padding() -> Iterator[None]:
    """Say where the padding of another model's parameters may have come from."""
    try:
        yield
    except ScopeParamShapeError as error:
        text = str(error).split(" (https://")[0]
        raise ValueError(
            f"apply: {text} If they are another model's, with the padding of "
            "uneven='pad', run this module as model.with_module(module) of that model, "
            "whose apply knows their own sizes."
        ) from error


def _is_own(piece: Any) -> bool:
    """Whether a parameter is of the root's group."""
    return isinstance(piece, tuple) and not piece[1].unit


def places_of(variables: Any, infos: Mapping[Path, Info], mesh: MeshInfo) -> Any:
    """Where each array of the variables rests."""

    def place(name: str, tree: Any) -> Any:
        targets = []
        for path, x in named(tree).items():
            info = infos.get(path) if name == "params" else None
            whole = info is None
            targets.append(mesh.whole_like(x) if whole else info.spec.sharding(x.ndim))
        return jax.tree.unflatten(jax.tree.structure(tree), targets)

    return {name: place(name, tree) for name, tree in variables.items()}
