"""Eight simulated devices, strict JAX settings, and the models that tests share."""

import os

from tests.flags import xla_flags

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}"
os.environ["JAX_PLATFORMS"] = "cpu"

import gc
import importlib.util

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests import helpers

gc.set_threshold(50_000, 10, 10)  # traces are many objects, and few of them garbage

OPTIONAL = {
    "needs_tpu_compiler": ("libtpu", "tpu-plan"),
    "needs_gpu_compiler": ("jax_plugins.xla_cuda12", "gpu-plan"),
    "needs_torch": ("torch", "bench"),
}

collect_ignore = ["torch_reference.py"]  # a program for the extra [bench], no tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=["one", "rest", "all"],
        help="of each parametrized test: one case, and nothing that is marked slow "
        "(default in a run of all tests); the rest: the other cases and what is slow; "
        "or all (default where files or tests are named). CI runs the first two.",
    )


_CASES = "FSDP_JAX_CASES"  # as the worker processes are told


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        named = config.getoption("file_or_dir") or config.getoption("keyword")
        cases = config.getoption("cases") or ("all" if named else "one")
        os.environ[_CASES] = cases


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out all but one case of each test and the slow ones, or take those."""
    cases = os.environ[_CASES]
    if cases == "all":
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            groups.setdefault(item.nodeid.split("[")[0], []).append(item)
    chosen = {id(group[len(group) // 2]) for group in groups.values()}
    left = [item for item in items if (id(item) in chosen) != (cases == "one")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if (id(item) in chosen) == (cases == "one")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of what is not installed, and say which extra has it."""
    for marker, (module, extra) in OPTIONAL.items():
        if item.get_closest_marker(marker) and not is_installed(module):
            pytest.skip(f"needs the extra [{extra}]")


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def mesh8() -> Mesh:
    """One Auto axis `fsdp` over all eight devices."""
    return Mesh(np.array(jax.devices()), ("fsdp",))


@pytest.fixture
def mlp() -> helpers.MLP:
    """Linear(16, 32), tanh, Linear(32, 16), tanh, Linear(16, 8); seed 0."""
    return helpers.MLP(nnx.Rngs(0))


@pytest.fixture
def transformer() -> helpers.Transformer:
    """Embed, two blocks of attention and MLP, head; width 16, seed 0."""
    return helpers.Transformer(nnx.Rngs(0))
