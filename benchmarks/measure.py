"""Measuring the rows: compiling for chips that are not here, timing on simulated CPUs.

What must not live here: what the programs are (`programs`), and the command line.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import models
import programs
from programs import Program
from rows import Row, compare

import fsdp_jax
from fsdp_jax import _topology

_CPU_BATCH = 8  # rows on all devices together, times `Config.rows`


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a set of devices, and the programs to compare there.

    Attributes:
        name: of the configuration.
        config: size of the model.
        make_model: from a size and random numbers to the model.
        topology: such as `v5e:4x4`, `h100:8` or `cpu:8`.
        programs: in the order of the table.
    """

    name: str
    config: models.Config
    make_model: Callable[..., Any]
    topology: str
    programs: tuple[Program, ...]

    @property
    def platform(self) -> str:
        """`tpu`, `gpu` or `cpu`."""
        return platform_of(self.topology)

    def row(self, program: Program) -> Row:
        """An empty row."""
        blocks = self.config.num_blocks
        return Row(self.name, self.platform, self.topology, program.name, blocks)

    def estimate_s(self, rounds: int) -> float:
        """About how long it takes on two cores, all programs together."""
        blocks, big = self.config.num_blocks, self.config.width >= 1024
        if self.platform == "cpu":
            each = (20 + 2.5 * rounds) if self.config.width >= 512 else 5.0
        elif self.platform == "gpu":
            each = 20.0 if big else 7.0
        elif self.make_model is models.Llama:
            each = 150.0 if big else 10.0
        else:
            each = 15.0 * blocks if big else 10.0
        return each * len(self.programs)


def platform_of(topology: str) -> str:
    """Platform of a topology.

    Raises:
        ValueError: there is none of that name.
    """
    chip, _, count = topology.partition(":")
    if chip == "cpu":
        if not count.isdecimal() or not 0 < int(count) <= _CPU_BATCH:
            raise ValueError(
                f"unknown topology {topology!r}: write cpu:N, N from 1 to {_CPU_BATCH}"
            )
        return "cpu"
    return "gpu" if _topology.parse(topology).is_gpu else "tpu"


def compiled_row(case: Case, program: Program) -> Row:
    """Compile one program for a topology that is not here."""
    row = case.row(program)

    def build(devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        step = programs.build(
            program,
            case.config,
            case.make_model,
            devices,
            len(devices) * case.config.rows,
        )
        return step.jitted, step.args

    try:
        target = _topology.parse(case.topology)
        with _topology.environment():
            options = program.compiler_options(target.devices())
        plan = fsdp_jax.plan(build, case.topology, compiler_options=options)
    except Exception as error:
        row.error = _one_line(error)
        return row
    if plan.report.schedule is None:  # refused for its memory
        row.error = plan.verdict
    else:
        row.fill(plan.report, plan.compile_seconds)
        row.error = None if plan.fits else plan.verdict
    return row


def timed_rows(
    case: Case, rounds: int, progress: Callable[[str], None]
) -> Sequence[Row]:
    """Time the programs on simulated devices of this machine, step by step in turn.

    Args:
        case: its topology is `cpu:N`.
        rounds: steps of each program that count; one more comes before.
        progress: told of what is done.
    """
    devices = jax.devices("cpu")[: int(case.topology.partition(":")[2])]
    rows, runs = [], {}
    for program in case.programs:
        row = case.row(program)
        rows.append(row)
        try:
            runs[program.name] = _prepare(case, program, devices, row)
        except Exception as error:
            row.error = _one_line(error)
        progress(f"{program.name}: {row.error or f'compiled in {row.compile_s} s'}")
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            loss = float(run())
            if number > 0:
                seconds[name].append(time.perf_counter() - started)
            losses[name].append(loss)
        progress(f"round {number} of {rounds}")
    for row in rows:
        if row.program in runs:
            row.step_ms = round(1e3 * statistics.median(seconds[row.program]), 1)
            row.loss = losses[row.program][-1]
            pairs = zip(losses[row.program], next(iter(losses.values())))
            row.losses_equal = all(abs(a - b) < 5e-5 for a, b in pairs)
    compare(rows)
    return rows


def _prepare(
    case: Case, program: Program, devices: Sequence[Any], row: Row
) -> Callable[[], Any]:
    """Compile, fill in what the compiler says, and return what takes a step."""
    step = programs.build(
        program,
        case.config,
        case.make_model,
        devices,
        _CPU_BATCH * case.config.rows,
    )
    started = time.perf_counter()
    compiled = step.jitted.lower(*step.args).compile()
    seconds = time.perf_counter() - started
    row.fill(fsdp_jax.comm_report(step.jitted, *step.args, compiled=compiled), seconds)
    return step.runner(compiled)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    if isinstance(error, _topology.PlanError):
        return text
    return f"{type(error).__name__}: {text}"
