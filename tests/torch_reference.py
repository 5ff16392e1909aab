"""Losses and gradients of PyTorch's own `fully_shard`, on four CPU processes.

A script for `test_torch.py`: `python torch_reference.py FOLDER` reads `cases.json` and
`inputs.npz` in the folder and writes `outputs.npz`. It imports nothing of fsdp_jax.
"""
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 4
TIME_LIMIT = datetime.timedelta(seconds=60)  # of one collective
LOCALHOST = "127.0.0.1"


class Block(nn.Module):
    """Two linear layers around a skip connection, 8 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class MLP(nn.Module):
    """Two blocks, a scale and a head, 8 in, 4 out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.empty(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def sharded_model(case: dict[str, Any], mesh: Any, weights: dict[str, Any]) -> Any:
    """The model of a case, a group for each block and one for what is left."""
    model = MLP() if case["model"] == "mlp" else nn.Linear(4, 4, bias=False)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
    dtypes = {k: getattr(torch, v) for k, v in case["policy"].items()}
    policy = MixedPrecisionPolicy(**dtypes)
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for path, factor in case["factors"].items():
        group: Any = model.get_submodule(path)
        group.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        group.set_gradient_divide_factor(factor)
    return model


def run(case: dict[str, Any], mesh: Any, weights: Any, x: Any, y: Any) -> Any:
    """Mean loss of the last micro-batch and the full gradients after all of them."""
    model = sharded_model(case, mesh, weights)
    loss = torch.zeros(())
    for i in range(len(x)):
        if case["held"]:
            getattr(model, case["held"])(i == len(x) - 1)
        loss = (model(own_rows(x[i])) * own_rows(y[i])).sum()
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    grads = {k: p.grad.full_tensor().numpy() for k, p in model.named_parameters()}
    return {"loss": loss.numpy() / RANKS, **grads}


def own_rows(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.split(array, RANKS)[dist.get_rank()])


def worker(rank: int, port: int, folder: Path) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore(LOCALHOST, port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=TIME_LIMIT
    )
    line = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases = json.loads((folder / "cases.json").read_text())
    inputs = dict(np.load(folder / "inputs.npz"))
    outputs = {}
    for name, case in cases.items():
        prefix = f"{case['model']}/"
        weights = {
            k.removeprefix(prefix): v for k, v in inputs.items() if k.startswith(prefix)
        }
        mesh = grid if case["hsdp"] else line
        results = run(case, mesh, weights, inputs[f"{name}.x"], inputs[f"{name}.y"])
        outputs |= {f"{name}/{k}": v for k, v in results.items()}
    if rank == 0:
        np.savez(folder / "outputs.npz", **outputs)
    dist.destroy_process_group()


def main() -> None:
    """Run every rank; a failure in one ends all."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # Port 0: any free one.
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(
        worker, args=(store.port, Path(sys.argv[1])), nprocs=RANKS
    )


if __name__ == "__main__":
    main()
