"""The collectives of a gradient program, as formulas in the number of groups.

Counted on lowered StableHLO: compilers merge, split and rename them later.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fsdp_jax
from fsdp_jax import fully_shard
from tests import helpers

WIDTH = 8
LINE = 100  # bytes; between a bias of the blocks (32, 64) and a kernel (512)


class Block(nnx.Module):
    """Two kernels and two biases."""

    def __init__(self, rngs: nnx.Rngs, param_dtypes: tuple[Any, Any]) -> None:
        up, down = param_dtypes
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=up, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, param_dtype=down, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Stack(nnx.Module):
    """Blocks, and a head without bias that belongs to the root's group."""

    def __init__(
        self, num_blocks: int, param_dtypes: tuple[Any, Any] = (jnp.float32,) * 2
    ) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs, param_dtypes) for _ in range(num_blocks)])
        self.head = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def sharded(
    num_blocks: int,
    num_devices: int = 8,
    reshard_after_forward: bool | None = None,
    **kwargs: Any,
) -> Any:
    model = Stack(num_blocks, **kwargs)
    mesh = helpers.mesh_of(num_devices)
    return helpers.shard_blocks(
        model, mesh=mesh, reshard_after_forward=reshard_after_forward
    )


def counts_of(f: Any, *args: Any) -> dict[str, int]:
    """Collectives of a function of a sharded model, by name."""
    text = helpers.lowered_text(f, *args)
    for other in ("collective_permute", "collective_broadcast", "all_to_all"):
        assert other not in text
    counts = helpers.count_collectives(text)
    del counts["all_to_all"]
    return counts


def gradient_counts(model: Any, rows: int = 8, **kwargs: Any) -> dict[str, int]:
    x = jnp.ones((rows, WIDTH))
    return counts_of(fsdp_jax.value_and_grad(loss_of, **kwargs), model, x)


def collectives(gathers: int, scatters: int, reductions: int) -> dict[str, int]:
    return {
        "all_gather": gathers,
        "reduce_scatter": scatters,
        "all_reduce": reductions,
    }


@pytest.mark.parametrize(
    ("num_blocks", "reshard_after_forward"),
    [(1, True), (3, None), (3, True), (3, False)],
)
def test_one_gather_and_one_scatter_per_packed_group(num_blocks, reshard_after_forward):
    model = sharded(num_blocks, reshard_after_forward=reshard_after_forward)
    groups = num_blocks + 1
    again = {None: num_blocks, True: groups, False: 0}[reshard_after_forward]
    counts = gradient_counts(model)
    assert counts == collectives(groups + again, groups, 1)


@pytest.mark.parametrize(
    ("num_blocks", "reshard_after_forward"),
    [(1, None), (2, None), (2, True), (2, False)],
)
def test_large_parameters_travel_alone(num_blocks, reshard_after_forward):
    model = sharded(num_blocks, reshard_after_forward=reshard_after_forward)
    model.set_packing_threshold_bytes(LINE)
    all_groups = num_blocks * (2 + 1) + 1  # two kernels, one buffer with both biases
    # Backward reads no bias, and not the kernel next to the batch, which has no
    # gradient: what it does not read is not gathered again.
    blocks_read = num_blocks * 2 - 1
    again = {None: blocks_read, True: blocks_read + 1, False: 0}
    counts = gradient_counts(model)
    gathers = all_groups + again[reshard_after_forward]
    assert counts == collectives(gathers, all_groups, 1)


def test_a_threshold_of_zero_packs_nothing():
    model = sharded(2, reshard_after_forward=False)
    model.set_packing_threshold_bytes(0)
    assert gradient_counts(model) == collectives(2 * 4 + 1, 2 * 4 + 1, 1)


def test_the_threshold_is_a_size_that_already_goes_alone():
    model = sharded(1, reshard_after_forward=False)
    kernel_bytes = WIDTH * 2 * WIDTH * 4
    model.set_packing_threshold_bytes(kernel_bytes)
    assert gradient_counts(model)["reduce_scatter"] == 2 + 1 + 1
    model.set_packing_threshold_bytes(kernel_bytes + 1)
    assert gradient_counts(model)["reduce_scatter"] == 1 + 1


def test_the_threshold_can_be_set_for_one_group():
    model = sharded(2, reshard_after_forward=False)
    model.blocks[0].set_packing_threshold_bytes(0)
    assert gradient_counts(model) == collectives(4 + 1 + 1, 4 + 1 + 1, 1)
    model.set_packing_threshold_bytes(0, recurse=False)
    assert gradient_counts(model) == collectives(4 + 1 + 1, 4 + 1 + 1, 1)


def test_each_dtype_has_a_buffer_of_its_own():
    model = sharded(2, param_dtypes=(jnp.float32, jnp.bfloat16))
    groups = 2 * 2 + 1  # per block one buffer of float32 and one of bfloat16
    # The first of all buffers is not read in backward: the batch has no gradient.
    assert gradient_counts(model) == collectives(groups + 2 * 2 - 1, groups, 1)


def test_the_setter_overrides_the_root_rule():
    model = sharded(2)
    model.set_reshard_after_forward(True)
    assert gradient_counts(model) == collectives(3 + 3, 3, 1)
    model.set_reshard_after_forward(False)
    assert gradient_counts(model) == collectives(3, 3, 1)
    model.blocks[1].set_reshard_after_forward(True)
    assert gradient_counts(model) == collectives(3 + 1, 3, 1)
    model.set_reshard_after_forward(True, recurse=False)
    assert gradient_counts(model) == collectives(3 + 1 + 1, 3, 1)


def test_keeping_for_one_forward_is_resharding():
    model = Stack(1)
    helpers.shard_blocks(model, mesh=helpers.mesh_of(8), reshard_after_forward=1)
    assert gradient_counts(model) == collectives(2 + 2, 2, 1)
    model = Stack(1)
    helpers.shard_blocks(model, mesh=helpers.mesh_of(8), reshard_after_forward=2)
    assert gradient_counts(model) == collectives(2, 2, 1)


def test_several_roots_under_a_plain_parent_gather_once_each():
    model = Stack(3)
    for block in model.blocks:
        fully_shard(block, mesh=helpers.mesh_of(8))
    whole_head = 1  # not managed: its gradient is averaged
    assert gradient_counts(model) == collectives(3, 3, 1 + whole_head)


def test_one_group_for_the_whole_model():
    model = fully_shard(Stack(3), mesh=helpers.mesh_of(8))
    assert gradient_counts(model) == collectives(1, 1, 1)


def test_a_second_call_gathers_and_scatters_again():
    model = sharded(1)

    def twice(model, x):
        return loss_of(model, x) + loss_of(model, x + 1)

    value_and_grad = fsdp_jax.value_and_grad(twice)
    counts = counts_of(value_and_grad, model, jnp.ones((8, WIDTH)))
    assert counts == collectives(2 * (2 + 1), 2 * 2, 1)


def test_a_module_that_is_not_called_is_not_moved():
    model = sharded(3)

    def first_only(model, x):
        return jnp.mean(model.blocks[0](x) ** 2)

    counts = counts_of(fsdp_jax.value_and_grad(first_only), model, jnp.ones((8, WIDTH)))
    assert counts == collectives(1, 1, 1)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_one_device_has_no_collectives(reshard_after_forward):
    model = sharded(2, num_devices=1, reshard_after_forward=reshard_after_forward)
    assert gradient_counts(model) == collectives(0, 0, 0)


def test_two_devices_have_as_many_collectives_as_eight():
    assert gradient_counts(sharded(2, num_devices=2)) == gradient_counts(sharded(2))


def test_a_frozen_group_is_gathered_and_not_reduced():
    model = sharded(3, reshard_after_forward=True)
    trainable = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("head")))
    assert gradient_counts(model, wrt=trainable) == collectives(4 + 4, 3, 1)
    middle = nnx.All(nnx.Param, lambda path, _: path[:2] != ("blocks", 1))
    assert gradient_counts(model, wrt=middle) == collectives(4 + 4, 3, 1)


def test_layers_below_the_first_trainable_one_are_not_gathered_again():
    model = sharded(3, reshard_after_forward=True)
    top = nnx.All(nnx.Param, lambda path, _: path[0] == "head" or path[1] == 2)
    assert gradient_counts(model, wrt=top) == collectives(4 + 2, 2, 1)
    head = nnx.All(nnx.Param, nnx.PathContains("head"))
    assert gradient_counts(model, wrt=head) == collectives(4, 1, 1)


def test_a_group_reduces_its_trainable_members_only():
    model = sharded(2, reshard_after_forward=False)
    model.set_packing_threshold_bytes(LINE)
    biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
    gathers = 2 * 3 + 1
    assert gradient_counts(model, wrt=biases) == collectives(gathers, 2, 1)
    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    assert gradient_counts(model, wrt=kernels) == collectives(gathers, 2 * 2 + 1, 1)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_the_buffer_of_a_reduction_holds_trainable_members_only(reshard_after_forward):
    model = sharded(1, reshard_after_forward=reshard_after_forward)
    biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
    text = helpers.lowered_text(
        fsdp_jax.value_and_grad(loss_of, wrt=biases), model, jnp.ones((8, WIDTH))
    )
    operands = re.findall(
        r'"stablehlo\.reduce_scatter".*?\}\) : \(tensor<8x(\d+)xf32>\)', text, re.DOTALL
    )
    assert [int(size) * 8 for size in operands] == [2 * WIDTH + WIDTH]


def test_whole_parameters_are_averaged_and_never_gathered():
    model = Stack(1)
    fully_shard(model, mesh=helpers.mesh_of(8), ignored_params=nnx.PathContains("bias"))
    assert gradient_counts(model) == collectives(1, 1, 1 + 2)


def test_the_reduction_and_the_batch_size_change_nothing():
    model = sharded(2)
    expected = collectives(3 + 2, 3, 1)
    assert gradient_counts(model, reduction="sum") == expected
    assert gradient_counts(model, rows=64) == expected
    grads_only = counts_of(fsdp_jax.grad(loss_of), model, jnp.ones((8, WIDTH)))
    assert grads_only["all_gather"] == 3 + 2
    assert grads_only["reduce_scatter"] == 3
    assert grads_only["all_reduce"] <= 1


def test_a_float_scalar_in_aux_costs_one_reduction():
    model = sharded(1)

    def with_aux(model, x):
        y = model(x)
        return jnp.mean(y**2), {"largest": y.max(), "rows": y}

    value_and_grad = fsdp_jax.value_and_grad(with_aux, has_aux=True)
    counts = counts_of(value_and_grad, model, jnp.ones((8, WIDTH)))
    assert counts == collectives(2 + 1, 2, 1 + 1)


def test_evaluation_gathers_once_per_group():
    model = sharded(3)
    model.set_reshard_after_forward(True)
    forward = fsdp_jax.shard_map(lambda model, x: model(x))
    counts = counts_of(forward, model, jnp.ones((8, WIDTH)))
    assert counts == collectives(4, 0, 0)


def test_a_jitted_step_with_an_optimizer_adds_nothing():
    model = sharded(2)
    optimizer = fsdp_jax.Optimizer(model, optax.adamw(1e-2))

    def step(model, optimizer, x):
        loss, grads = fsdp_jax.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss

    counts = counts_of(step, model, optimizer, jnp.ones((8, WIDTH)))
    assert counts == collectives(3 + 2, 3, 1)
