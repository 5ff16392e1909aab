"""Random programs: a model, a function of it, and how both are run, from plain data.

What lives here: `Program`, which says everything that a program is made of and prints
as Python, and `check`, which runs it sharded and unsharded and compares. What must not:
drawing programs and tests, which `test_random_functions` has. Functions are means or
sums over rows of models that work row by row, so that the unsharded number is the one
right one. Defaults are the simplest choices.
"""

import dataclasses
import functools
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import fsdp_jax
from fsdp_jax import CPUOffloadPolicy, MixedPrecisionPolicy, Shard, fully_shard
from tests.random_layers import Choices, Layer, Part, through

LIBRARY = str(Path(fsdp_jax.__file__).parent)
OURS = (ValueError, TypeError, RuntimeError, FloatingPointError)
NOT_OURS = re.compile(r"open an issue|file a bug|\w*Internal[A-Z]\w*")
ENTRIES = ("value_and_grad", "grad", "train", "shard_map")
OUTSIDE = ("outer shard_map", "outer value", "second", "third")
PRECISE = 2e-4  # of the largest number in an array
BY_ROW = ("none", "input gradient", "nnx.grad", "second input")
INSIDE = ("raw", "raw split", "nnx.grad step", "nested step", "nested norm")
STATEFUL = ("sow", "stat", "counter", "average", "cache", "draw")
CLOSURES = ("checkpoint", "vmap closure", "lax.cond", "linearize", "jvp")
NNX_TRANSFORMS = (
    *("nnx.remat", "nnx.jit", "vmap", "cond", "cond of rows", "switch", "twice"),
)
BY_SLICE = re.compile(r"'(stat|count|rngs)'")  # moves once per slice of a batch


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Choices):
    """A model, a function and how they run. Every field is a choice by name."""

    layers: tuple[Layer, ...] = (Layer(),)
    width: int = 8
    mesh: tuple[int, ...] = (2,)
    entry: str = "value_and_grad"
    run: str = "nnx.jit"
    reduction: str = "mean"
    microbatches: int = 1
    rows: int = 1
    loss: str = "square"
    forward: str = "call"
    around: str = "none"
    penalty: str = "none"
    aux: tuple[str, ...] = ()
    packing: str = "flat"
    extras: tuple[str, ...] = ()
    argnums: str = "model"
    wrt: str = "all"
    reshard: Any = None
    policy: str = "none"
    uneven: str = "auto"
    place: str = "none"
    packed: bool = True
    callback: bool = False

    @property
    def devices(self) -> int:
        return int(np.prod(self.mesh))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    """A batch as a registered dataclass."""

    x: Any
    rest: dict[str, Any]


class Model(nnx.Module):
    """The layers one after the other, and a head outside of their groups."""

    def __init__(self, program: Program) -> None:
        rngs = nnx.Rngs(0)
        rows = program.rows * program.devices * program.microbatches
        self.layers = nnx.List(
            [Part(layer, program.width, rows, rngs) for layer in program.layers]
        )
        self.head = nnx.Linear(program.width, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model(program: Program, sharded: bool) -> Any:
    """The model, and `fully_shard` on it as the program says."""
    model: Any = Model(program)
    if not sharded:
        return model
    names = ("replica", "fsdp")[-len(program.mesh) :]
    devices = np.array(jax.devices()[: program.devices]).reshape(program.mesh)
    kwargs: dict[str, Any] = {"mesh": Mesh(devices, names), "uneven": program.uneven}
    if program.place == "largest":
        kwargs["shard_placement_fn"] = fsdp_jax.largest_dim
    if program.policy == "bfloat16":
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    elif program.policy == "reduce":
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=jnp.bfloat16,
            reduce_dtype=jnp.float32,
            output_dtype=jnp.float32,
        )
    elif program.policy == "offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for part, layer in zip(model.layers, program.layers, strict=True):
        if layer.kind.startswith("scan"):
            asked = {"uneven": "pad", "shard_placement_fn": lambda p: Shard(1)}
            stack = {**kwargs, **asked}
            fully_shard(part.inner.stack, **stack)
        if layer.group:
            fully_shard(part.inner, reshard_after_forward=layer.reshard, **kwargs)
    fully_shard(model, reshard_after_forward=program.reshard, **kwargs)
    if not program.packed:
        model.set_packing_threshold_bytes(0)
    return model


def gradient(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`nnx.value_and_grad` that passes keyword arguments on."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return nnx.value_and_grad(lambda *args: f(*args, **kwargs), **how)(*args)

    return run


class Plain:
    """What the library's functions stand for, without it."""

    Optimizer = nnx.Optimizer
    global_norm = staticmethod(optax.global_norm)

    @staticmethod
    def value_and_grad(
        f: Callable[..., Any],
        *,
        reduction: str = "mean",
        has_aux: bool = False,
        argnums: Any = 0,
        wrt: Any = nnx.Param,
        **_: Any,
    ) -> Callable[..., Any]:
        def whole(*args: Any, **kwargs: Any) -> Any:
            out = f(*args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            if reduction == "weighted":
                loss = loss[0] / loss[1]
            return (loss, aux) if has_aux else loss

        index = [argnums] if isinstance(argnums, int) else list(argnums)
        diff = [nnx.DiffState(i, wrt) if i == 0 else i for i in index]
        argnums = diff[0] if isinstance(argnums, int) else tuple(diff)
        return gradient(whole, argnums=argnums, has_aux=has_aux)

    @classmethod
    def grad(cls, f: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        def second(*args: Any, **keywords: Any) -> Any:
            value, grads = cls.value_and_grad(f, **kwargs)(*args, **keywords)
            return (grads, value[1]) if kwargs.get("has_aux") else grads

        return second

    @staticmethod
    def shard_map(f: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return f


def make_batch(program: Program) -> dict[str, Any]:
    """Everything that a function may be given, by name."""
    n = program.rows * program.devices * program.microbatches
    keys = jax.random.split(jax.random.key(5), 3)
    return {
        "x": jax.random.normal(keys[0], (n, program.width)),
        "y": jax.random.normal(keys[1], (n, 3)),
        "labels": jax.random.randint(keys[2], (n,), 0, 3),
        "mask": (jnp.arange(n) % 3 > 0).astype(jnp.float32) + 0.25,
        "scale": jnp.float32(1.5),
        "key": jax.random.key(11),
        "number": 0.75,
        "weights": jnp.array([0.5, 1.0, 2.0]),
        "nothing": None,
    }


def arguments(program: Program) -> tuple[tuple, dict[str, Any], list[Any]]:
    """Positional arguments, keyword arguments and specs after the model."""
    batch = make_batch(program)
    names = ["y", "labels", "mask", *(e for e in program.extras if e != "weights")]
    rest = {name: batch[name] for name in names}
    x = batch["x"]
    args: tuple[Any, ...] = (x, rest)
    kwargs: dict[str, Any] = {}
    match program.packing:
        case "tuple":
            args = ((x, rest),)
        case "dataclass":
            args = (Batch(x, rest),)
        case "keywords":
            args, kwargs = (x,), rest
    specs: list[Any] = [None] * len(args)
    if "weights" in program.extras and not kwargs:
        args = (*args, batch["weights"])
        specs.append(PartitionSpec())
    return args, kwargs, specs


def unpack(program: Program, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(kwargs)
    if "weights" in program.extras and not kwargs:
        *args, found["weights"] = args  # pyright: ignore
    match program.packing:
        case "tuple":
            ((x, rest),) = args
        case "dataclass":
            (batch,) = args
            x, rest = batch.x, batch.rest
        case "keywords":
            (x,), rest = args, {}
        case _:
            x, rest = args
    return {"x": x, **rest, **found}


def rows_of(program: Program, model: Any, b: dict[str, Any]) -> tuple[Any, Any]:
    """Outputs `(rows, 3)` and losses `(rows,)`."""
    x = b["x"]
    if "scale" in b:
        x = x * b["scale"]
    if "key" in b:
        x = x + jax.random.uniform(b["key"])
    flag = b["scale"] if "scale" in b else jnp.float32(1)
    out = through(program.forward, model, x, flag).astype(jnp.float32)
    if program.loss == "entropy":
        losses = jax.nn.logsumexp(out, -1) - jnp.take_along_axis(
            out, b["labels"][:, None], 1
        ).squeeze(1)
    else:
        losses = ((out - b["y"]) ** 2).mean(-1)
    if "weights" in b:
        losses = losses * b["weights"][b["labels"]]
    if "number" in b:
        losses = losses * b["number"]
    if program.penalty == "input gradient":
        g = jax.grad(lambda x: jnp.tanh(model(x)).sum())(x)
        losses = losses + (g**2).sum(-1)
    elif program.penalty == "nnx.grad":
        g = nnx.grad(lambda m, x: jnp.tanh(m(x)).sum(), argnums=1)(model, x)
        losses = losses + (g**2).sum(-1)
    elif program.penalty == "second input":

        def along(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.tanh(model(x)).sum())(x)[:, 0].sum()

        losses = losses + (jax.grad(along)(x) ** 2).sum(-1)
    return out, losses


def parameter_penalty(program: Program, lib: Any, model: Any, b: dict) -> Any:
    """What is added to a mean: not a sum over rows, so it is there for means only."""
    match program.penalty:
        case "param":
            return 0.1 * (model.layers[0].inner.linear.kernel[...] ** 2).sum()
        case "raw":
            state = nnx.state(model, nnx.Param)
            return 0.1 * sum((a**2).sum() for a in jax.tree.leaves(state))
        case "raw split":
            state = nnx.as_pure(nnx.split(model, nnx.Param, ...)[1])
            return 0.1 * sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(state))
        case "nnx.grad step":
            grads = nnx.grad(lambda m: mean_loss(program, m, b))(model)
            return mean_loss(program, stepped(model, grads), b)
        case "nested step":
            grads = lib.grad(functools.partial(mean_loss, program))(model, b)
            return mean_loss(program, stepped(model, grads), b)
        case "nested norm":
            grads = lib.grad(functools.partial(mean_loss, program))(model, b)
            return 0.1 * lib.global_norm(grads)
    return 0.0


def mean_loss(program: Program, model: Any, b: dict[str, Any]) -> jax.Array:
    """The mean over rows without what is added to it."""
    return rows_of(dataclasses.replace(program, penalty="none"), model, b)[1].mean()


def stepped(model: Any, grads: Any) -> Any:
    """A model that is one step further."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return nnx.merge(graph, params, rest)


def aux_of(program: Program, out: Any, losses: Any) -> Any:
    """What the program's aux names, in a dict with a tuple in it."""
    made = {
        "mean": losses.mean(),
        "rows": out,
        "losses": losses,
        "half": out.astype(jnp.bfloat16),
        "integers": out.argmax(-1),
        "flags": out > 0,
        "constant": jnp.int32(7),
        "number": 7,
        "none": None,
        "deep": (jnp.sin(out).mean(), {"cube": out[:, :, None] * out[:, None]}),
    }
    return {name: made[name] for name in program.aux}


def make_function(program: Program, lib: Any, seen: list[int]) -> Callable[..., Any]:
    """The function, which both libraries are given."""

    def f(model: Any, *args: Any, **kwargs: Any) -> Any:
        b = unpack(program, args, kwargs)
        out, losses = rows_of(program, model, b)
        if program.callback:
            jax.debug.callback(lambda v: seen.append(1), losses[0])
        if program.entry in ("shard_map", "outer shard_map"):
            return {"out": out, "losses": losses, **aux_of(program, out, losses)}
        loss: Any = losses.mean()
        if program.reduction == "sum":
            loss = losses.sum()
        elif program.reduction == "weighted":
            loss = ((losses * b["mask"]).sum(), b["mask"].sum())
        else:
            loss = loss + parameter_penalty(program, lib, model, b)
        return (loss, aux_of(program, out, losses)) if program.aux else loss

    match program.around:
        case "nnx.jit":
            return nnx.jit(f)
        case "nnx.remat":
            return nnx.remat(f)
    return f


def squares(tree: Any) -> jax.Array:
    leaves = jax.tree.leaves(nnx.as_pure(tree))
    return sum((jnp.tanh(a) ** 2).sum() for a in leaves)  # pyright: ignore


def make_entry(program: Program, lib: Any, seen: list[int]) -> Callable[..., Any]:
    """From the function to what runs: `entry(model, *args, **kwargs)`."""
    f = make_function(program, lib, seen)
    specs = tuple(arguments(program)[2])
    if program.entry in ("shard_map", "outer shard_map"):
        mapped = lib.shard_map(f, in_specs=specs)
        if program.entry == "shard_map":
            return mapped

        def contrast(*args: Any, **kwargs: Any) -> jax.Array:
            out = mapped(*args, **kwargs)["out"]
            return jax.nn.logsumexp(out @ out.T, -1).mean() - (out**2).sum(-1).mean()

        return gradient(contrast)
    wrt: Any = nnx.Param
    if program.wrt == "first":
        wrt = nnx.All(nnx.Param, nnx.PathContains("layers"))
    kwargs: dict[str, Any] = {
        "reduction": program.reduction,
        "has_aux": bool(program.aux),
        "argnums": (0, 1) if program.argnums == "model and x" else 0,
        "wrt": wrt,
        "num_microbatches": program.microbatches,
        "in_specs": specs,
    }
    if program.entry == "grad":
        return lib.grad(f, **kwargs)
    step = lib.value_and_grad(f, **kwargs)
    if program.entry == "value_and_grad":
        return step
    if program.entry == "train":

        def train(model: Any, *args: Any, **kwargs: Any) -> Any:
            tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))
            optimizer = lib.Optimizer(model, tx, wrt=wrt)
            out = None
            for _ in range(2):
                out, grads = step(model, *args, **kwargs)
                optimizer.update(model, grads[0] if isinstance(grads, tuple) else grads)
            return out

        return train

    def value(*args: Any, **kwargs: Any) -> jax.Array:
        value = step(*args, **kwargs)[0]
        return (value[0] if program.aux else value) ** 2

    if program.entry == "outer value":
        return gradient(value)

    def norm(*args: Any, **kwargs: Any) -> jax.Array:
        return squares(step(*args, **kwargs)[1])

    if program.entry == "third":
        second = gradient(norm)
        return gradient(lambda *a, **k: squares(second(*a, **k)[1]))
    return gradient(norm)


def execute(program: Program, lib: Any, model: Any) -> tuple[Any, int]:
    """Run the program's entry once; its results, and how often the callback ran."""
    seen: list[int] = []
    entry = make_entry(program, lib, seen)
    args, kwargs, _ = arguments(program)
    if program.run == "nnx.jit":
        out = nnx.jit(entry)(model, *args, **kwargs)
    elif program.run == "jax.jit":
        graph, state = nnx.split(model)

        def pure(state: Any, args: Any, kwargs: Any) -> Any:
            inner = nnx.merge(graph, state)
            out = entry(inner, *args, **kwargs)
            return out, nnx.state(inner)

        out, new = jax.jit(pure)(state, args, kwargs)
        nnx.update(model, new)
    else:
        out = entry(model, *args, **kwargs)
    jax.block_until_ready(jax.tree.leaves(out))
    jax.effects_barrier()
    return out, len(seen)


def named(tree: Any) -> dict[str, Any]:
    """Arrays by path; those of Variables without their padding."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        if is_variable(leaf):
            raw = leaf.get_raw_value()
            leaf = leaf[...] if isinstance(raw, jax.Array) else raw
        if isinstance(leaf, tuple):  # what `sow` kept
            found |= {f"{path}[{i}]": np.asarray(a) for i, a in enumerate(leaf)}
            continue
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


def differences(got: Any, want: Any, limit: float, what: str) -> list[str]:
    got, want = named(got), named(want)
    if list(got) != list(want):
        return [f"{what}: has {sorted(got)}, the unsharded one {sorted(want)}"]
    found = []
    for path, right in want.items():
        value = got[path]
        if value.shape != right.shape:
            found.append(f"{what}{path}: shape {value.shape} for {right.shape}")
            continue
        floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (value, right))
        alike = value.dtype == right.dtype or (floating and limit > PRECISE)
        if not alike and right.dtype != np.int64:  # of a Python number
            found.append(f"{what}{path}: dtype {value.dtype} for {right.dtype}")
        a, b = np.asarray(value, np.float64), np.asarray(right, np.float64)
        off = float(np.abs(a - b).max(initial=0))
        off = np.inf if np.isnan(off) else off
        size = max(float(np.abs(b).max(initial=0)), 1e-2)
        if off > limit * size:
            found.append(
                f"{what}{path}: {value.ravel()[:4]} for {right.ravel()[:4]}, "
                f"{off / size:.3g} of the largest"
            )
    return found


def is_ours(error: BaseException) -> bool:
    """Whether the library raised it, in words of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_here = frames[-1].filename.startswith(LIBRARY)
    raised_here &= isinstance(error, OURS)
    return raised_here and not NOT_OURS.search(f"{type(error).__name__} {error}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a program: "same", "refused", "undefined" or "wrong", and why."""

    kind: str
    text: str = ""


def check(program: Program) -> Outcome:
    """Run a program sharded and unsharded, and compare results and state."""
    filtering = jax.config.jax_traceback_filtering  # pyright: ignore
    jax.config.update("jax_traceback_filtering", "off")  # shows who raised an error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _check(program)
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def _check(program: Program) -> Outcome:
    plain = make_model(program, sharded=False)
    try:
        want, wanted_calls = execute(program, Plain, plain)
        floats = [np.asarray(a, np.float64) for a in named(want).values()]
        if not all(np.isfinite(a).all() for a in floats):
            return Outcome("undefined", "not finite")
    except Exception as e:
        return Outcome("undefined", f"{type(e).__name__}: {e}")
    model: Any = None
    before: dict[str, Any] = {}
    try:
        model = make_model(program, sharded=True)
        before = named(model)
        got, calls = execute(program, fsdp_jax, model)
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        if not is_ours(e):
            tail = "".join(traceback.format_tb(e.__traceback__)[-3:])
            return Outcome("wrong", f"not an error of ours: {text}\n{tail}")
        after = {} if model is None else named(model)
        changed = [
            path
            for path in before
            if path not in after or not np.array_equal(before[path], after[path])
        ]
        if changed or len(after) != len(before):
            return Outcome("wrong", f"refused ({text}), but changed {changed}")
        return Outcome("refused", text)
    # An n-th or n times the number is further off than bfloat16 rounds.
    limit = 0.15 if program.policy in ("bfloat16", "reduce") else PRECISE
    if program.entry in ("second", "third") and limit > PRECISE:
        limit = 0.5
    found = differences(got, want, limit, "result ")
    found += differences(model, plain, limit, "state ")
    if program.microbatches > 1:
        found = [text for text in found if not BY_SLICE.search(text)]
    if program.callback:
        times = program.devices * program.microbatches
        # From outside, what runs again for a derivative of which order is JAX's choice.
        exact = program.entry in ENTRIES
        if calls != times * wanted_calls if exact else calls < times:
            found.append(f"callback: {calls} calls for {times} times {wanted_calls}")
    return Outcome("wrong", "\n".join(found)) if found else Outcome("same")


def defined(program: Program) -> Program:
    """The program without the choices for which no one number is right."""
    p = program
    change: dict[str, Any] = {}
    if p.entry in ("shard_map", "outer shard_map"):
        change |= {"reduction": "mean", "microbatches": 1, "argnums": "model"}
    if p.packing in ("tuple", "dataclass") or p.entry not in ENTRIES:
        change |= {"argnums": "model"}
    p = dataclasses.replace(p, **change)
    change = {}
    if p.packing == "keywords" and p.around == "nnx.remat":
        change["packing"] = "flat"  # Flax resolves no keywords there
    layers = [_defined_layer(p, layer) for layer in p.layers]
    change["layers"] = tuple(layers)
    if p.penalty not in BY_ROW and (p.reduction != "mean" or p.microbatches > 1):
        change["penalty"] = "none"
    if p.policy in ("bfloat16", "reduce"):  # places and signs turn over by rounding
        change["aux"] = tuple(a for a in p.aux if a not in ("integers", "flags"))
    return dataclasses.replace(p, **change)


def _defined_layer(p: Program, layer: Layer) -> Layer:
    """A layer that Flax runs, and of which the unsharded number is the right one."""
    kind, wrap = layer.kind, layer.wrap
    # A fixed gradient depends on how the devices' losses add up.
    if p.reduction != "sum" or p.entry not in ("value_and_grad", "grad", "train"):
        kind = kind.replace("add gradient", "reverse")
    # Flax writes into no object that a transformation of JAX closes over.
    closed = p.forward in CLOSURES or p.penalty in ("input gradient", "second input")
    if closed and wrap in NNX_TRANSFORMS:
        wrap = "none"
    if closed or wrap in (*CLOSURES, "vmap") or p.forward == "vmap":
        kind = "linear" if kind in (*STATEFUL, "scan", "scan_layers") else kind
    return dataclasses.replace(layer, kind=kind, wrap=wrap)
