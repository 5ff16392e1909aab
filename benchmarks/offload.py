"""Device and host memory of a training step, with and without `CPUOffloadPolicy`.

    python benchmarks/offload.py

compiles for a TPU that is not here (the extra [tpu-plan]), and prints a Markdown table.
What must not live here: models, and how a step is written (`programs`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when jax is imported
os.environ["JAX_PLATFORMS"] = "cpu"  # leave the machine's own chips alone

import models
import programs

import fsdp_jax
from fsdp_jax.plan import Plan

CONFIGS: dict[str, tuple[models.Config, Any, str]] = {
    "weight-heavy": (models.WEIGHT_HEAVY, models.GPT, "ours"),
    "weight-heavy, scanned": (models.WEIGHT_HEAVY, models.Llama, "ours+ahead"),
    "nano": (models.NANO_GPT, models.GPT, "ours"),
}
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands after the name of the command; None for `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks/offload.py")
    parser.add_argument("--config", action="append", choices=tuple(CONFIGS))
    parser.add_argument("--topology", default="v5e:4x4", metavar="NAME")
    parser.add_argument("--blocks", type=int, default=4, metavar="N")
    asked = parser.parse_args(arguments)
    print("| model | shards rest | device MiB | host MiB at rest | in a step |")
    print("| --- | --- | ---: | ---: | ---: |")
    for name in asked.config or list(CONFIGS)[:2]:
        for policy in (fsdp_jax.OffloadPolicy(), fsdp_jax.CPUOffloadPolicy()):
            plan = _plan(name, asked.blocks, asked.topology, policy)
            where = "on the host" if policy.memory_kind else "on the device"
            rest = plan.report.memory.host_argument_bytes
            more = plan.host_temporary_bytes or 0
            sizes = " | ".join(
                f"{size / _MIB:,.0f}" for size in (plan.peak_bytes, rest, rest + more)
            )
            print(f"| {name} | {where} | {sizes} |", flush=True)
    return 0


def _plan(
    name: str, num_blocks: int, topology: str, policy: fsdp_jax.OffloadPolicy
) -> Plan:
    config, make_model, program = CONFIGS[name]
    config = dataclasses.replace(config, num_blocks=num_blocks)

    def build(devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        step = programs.build(
            programs.parse(program),
            config,
            make_model,
            devices,
            len(devices) * config.rows,
            policy,
        )
        return step.jitted, step.args

    return fsdp_jax.plan(build, topology)


if __name__ == "__main__":
    sys.exit(main())
