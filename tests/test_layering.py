"""The cut of the library: imports in one direction, file length, names, docstrings."""

import ast
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_jax

ROOT = Path(fsdp_jax.__file__).parent
TESTS = Path(__file__).parent

# Every file may import only files that stand before it.
ORDER = [
    "_threads",
    "_policies",
    "_mesh",
    "_local",
    "_layout",
    "_callees",
    "_dependence",
    "_unchanged",
    "_evaluate",
    "_culprit",
    "_compiled",
    "_move",
    "_forward_mode",
    "_annotations",
    "_carry",
    "_functional",
    "_raw_reads",
    "_comm",
    "_collectives",
    "_means",
    "_divergence",
    "_ordering",
    "_cotangents",
    "_gather",
    "_schedule",
    "_layers",
    "_spec",
    "_managed",
    "_param",
    "_moments",
    "_blocks",
    "_param_group",
    "_state",
    "_update",
    "_stages",
    "_pending",
    "_unshard",
    "_bridge",
    "_private",
    "_precision",
    "_call",
    "_scan",
    "_state_dict",
    "_knobs",
    "_generated",
    "_module",
    "_stacks",
    "_placement",
    "_fully_shard",
    "_new_params",
    "_opaque",
    "_arguments",
    "_batch",
    "_norm",
    "_host_update",
    "_optimizer",
    "_rows",
    "_join",
    "_beside_caches",
    "_loss",
    "_user",
    "_streams",
    "_metrics",
    "_microbatch",
    "_program",
    "_one_row",
    "_differing",
    "_execute",
    "_wrt",
    "_prepare",
    "_nested",
    "_transforms",
    "_describe",
    "_linen_names",
    "_linen_units",
    "_linen_program",
    "_linen_model",
    "_linen_shard",
    "linen",
    "_check_report",
    "_check_host",
    "_check_subject",
    "_check_run",
    "_check_join",
    "_check_batch",
    "_check_fit",
    "_check_findings",
    "_check_listing",
    "_check_rules",
    "_check",
    "_hlo",
    "_hlo_buffers",
    "_hlo_collectives",
    "_hlo_schedule",
    "_stablehlo",
    "_stablehlo_origins",
    "_argument_bytes",
    "_figures",
    "_report_data",
    "_report_rows",
    "_report_table",
    "_timeline",
    "report",
    "_topology",
    "_build",
    "_plan",
    "plan",
    "__init__",
]

PUBLIC = {
    "CPUOffloadPolicy",
    "CheckReport",
    "CommReport",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Optimizer",
    "Ordering",
    "PendingGradients",
    "Shard",
    "UnshardHandle",
    "check",
    "comm_report",
    "compiler_options",
    "describe",
    "global_norm",
    "fully_shard",
    "grad",
    "largest_dim",
    "local_shape",
    "make_mesh",
    "register_fsdp_forward_method",
    "scan_layers",
    "shard_batch",
    "shard_map",
    "shard_new_params",
    "share_comm_ctx",
    "synchronize_gradients",
    "unsharded",
    "value_and_grad",
}

METHODS = {
    "load_state_dict",
    "reset_iter_state",
    "reshard",
    "set_gradient_divide_factor",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_ordering",
    "set_packing_threshold_bytes",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "synchronize_gradients",
    "set_reshard_after_forward",
    "state_dict",
    "unshard",
}

COLLECTIVES = {
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
    "reduce_scatter",
    "unreduced_psum_scatter",
}

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.stem


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> set[str]:
    """Files of the library that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {
                n[1] if n[1:] else "__init__" for n in names if n[0] == "fsdp_jax"
            }
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports within the library are absolute"
            parts = (node.module or "").split(".")
            if parts == ["fsdp_jax"]:
                names = {alias.name for alias in node.names}
                found |= {n if n in ORDER else "__init__" for n in names}
            elif parts[0] == "fsdp_jax":
                found.add(parts[1])
    return found


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def collectives_in(tree: ast.AST) -> set[str]:
    """Collectives of `jax.lax` that a file names, however it imports them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            if dotted(node.value) in ("jax.lax", "lax"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
            found |= {alias.name for alias in node.names} & COLLECTIVES
    return found


def class_writers(tree: ast.AST) -> set[str]:
    """Names of what a file assigns `__class__` of: the first word of the target."""
    found = set()
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr == "__class__":
                found.add(dotted(target.value) or "?")
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = called or dotted(node.func)
            if called not in ("__setattr__", "setattr"):
                continue
            at = [
                i
                for i, a in enumerate(node.args)
                if isinstance(a, ast.Constant) and a.value == "__class__"
            ]
            found |= {dotted(node.args[i - 1]) or "?" for i in at}
    return found


def test_the_order_names_every_file():
    assert {name_of(p) for p in FILES} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_one_way(path):
    allowed = ORDER[: ORDER.index(name_of(path))]
    assert imported(parse(path)) <= set(allowed)


def test_the_policies_and_the_arithmetic_import_nothing_that_acts():
    assert imported(parse(ROOT / "_policies.py")) == set()
    assert imported(parse(ROOT / "_layout.py")) <= {"_mesh"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize(
    "path", [*FILES, *sorted(TESTS.rglob("*.py"))], ids=lambda p: p.stem
)
def test_every_file_opens_with_a_docstring(path):
    if path.name == "__init__.py" and not path.read_text(encoding="utf-8"):
        return
    text = ast.get_docstring(parse(path))
    assert text
    assert text.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_of_the_library_says_what_lives_there_and_what_must_not(path):
    if name_of(path) == "__init__":
        return
    words = " ".join((ast.get_docstring(parse(path)) or "").split())
    assert "must not" in words or "only file" in words


def test_only_collectives_names_collectives():
    naming = {name_of(p) for p in FILES if collectives_in(parse(p))}
    assert naming == {"_collectives"}


def test_only_module_writes_the_class_of_a_module():
    writers = {name_of(p): class_writers(parse(p)) for p in FILES}
    assert {n: w for n, w in writers.items() if w} == {
        "_module": {"module"},
        "_param": {"variable"},
        "plan": {"this_module"},  # no nnx.Module
    }


@pytest.mark.parametrize(
    "source",
    [
        "x.__class__ = y",
        "object.__setattr__(x, '__class__', y)",
        "setattr(x, '__class__', y)",
        "x.__setattr__('__class__', y)",
    ],
)
def test_every_way_to_write_a_class_is_seen(source):
    assert class_writers(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    ["jax.lax.psum(x, 'i')", "lax.all_gather(x, 'i')", "from jax.lax import ppermute"],
)
def test_every_way_to_name_a_collective_is_seen(source):
    assert collectives_in(ast.parse(source))


# --- public names -----------------------------------------------------------------


def public_names(owner: object) -> set[str]:
    """Names without an underscore that are no files."""
    return {
        name
        for name in vars(owner)
        if not name.startswith("_")
        and not isinstance(getattr(owner, name), types.ModuleType)
    }


def documented() -> Iterator[tuple[str, object]]:
    """Every public function and class, and the methods that classes define."""
    for name in sorted(PUBLIC):
        value = getattr(fsdp_jax, name)
        yield name, value
        if inspect.isclass(value):
            for member, found in vars(value).items():
                if not member.startswith("_") and (
                    inspect.isfunction(found) or isinstance(found, property)
                ):
                    yield f"{name}.{member}", found


DOCUMENTED = list(documented())


def test_the_public_names_are_the_documented_ones():
    assert public_names(fsdp_jax) == PUBLIC


def test_every_public_name_is_told_of_in_the_readme():
    text = (ROOT.parent / "README.md").read_text(encoding="utf-8")
    assert {name for name in PUBLIC if name not in text} == set()


def test_the_public_methods_of_a_sharded_module_are_the_documented_ones():
    own, knobs = fsdp_jax.FSDPModule.__mro__[:2]
    assert public_names(own) | public_names(knobs) == METHODS


def test_the_package_has_no_name_that_lives_elsewhere():
    for name in PUBLIC:
        assert getattr(fsdp_jax, name).__module__.startswith("fsdp_jax.")


@pytest.mark.parametrize(("name", "value"), DOCUMENTED, ids=[n for n, _ in DOCUMENTED])
def test_every_public_name_has_a_docstring(name, value):
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own
    first = own.strip().split("\n\n")[0]
    assert first.endswith((".", ":"))
    assert not first.startswith(f"{name}(")


@pytest.mark.parametrize(
    "name", sorted(n for n in PUBLIC if inspect.isfunction(getattr(fsdp_jax, n)))
)
def test_the_docstring_of_a_function_describes_every_argument(name):
    function = getattr(fsdp_jax, name)
    text = inspect.getdoc(function) or ""
    if "else as `value_and_grad`" in text:
        return
    arguments = inspect.signature(function).parameters
    told = {a for a in arguments if re.search(rf"\n    \*{{0,2}}{a}: ", text)}
    assert set(arguments) - told == set()


def test_the_docstring_of_every_public_name_tells_the_source_of_its_clause():
    missing = {
        name
        for name in PUBLIC
        if "Source:" not in (inspect.getdoc(getattr(fsdp_jax, name)) or "")
    }
    assert missing <= {"grad"}
