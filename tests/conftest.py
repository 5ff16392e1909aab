"""Eight simulated devices, strict JAX settings, and the models that tests share."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from tests import helpers


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
