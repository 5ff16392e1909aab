"""`plan`: compile a user's step for chips that are absent, and say whether it fits.

What lives here: building, compiling, and the `Plan` that comes out. What must not: what
a topology is, how a compiled program is read, and the command line.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdp_jax import _build, _ordering, _topology
from fsdp_jax._build import BuildError, told
from fsdp_jax._report_table import human
from fsdp_jax._topology import PlanError, Topology
from fsdp_jax.report import CommReport, comm_report

_WIDTH = 100
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


class CompileError(PlanError, RuntimeError):
    """The compiler refused the step, for another reason than memory."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step needs of each device of a topology; prints as a table.

    Attributes:
        topology: the chips, as they were asked for.
        num_slices: how many slices of them.
        num_devices: devices of all slices together.
        device_kind: what JAX calls such a device.
        fits: whether the step fits the memory of a device.
        hbm_bytes: that memory.
        peak_bytes: memory in use at the fullest moment. If `fits` is false on a TPU,
            what the compiler says is needed at least.
        parameter_bytes: one device's pieces of all parameters in device memory.
        moment_bytes: one device's pieces of the optimizer's state there.
        other_argument_bytes: the same of all other arguments: batch, random state, ...
        host_parameter_bytes: one device's share of the parameters in host memory
            (`CPUOffloadPolicy`).
        host_moment_bytes: the same of the optimizer's state.
        host_other_argument_bytes: the same of all other arguments.
        host_temporary_bytes: what the step needs of the host besides, such as
            gradients; None if nothing was compiled.
        working_bytes: the rest of the peak: activations, gathered parameters,
            gradients, and results whose arguments were not donated.
        gathered_bytes: most bytes of gathered parameters alive at one time, an estimate
            from the schedule; None if nothing was compiled.
        gradient_bytes: the same of gradients that are still to be reduced.
        async_share: share of gather bytes in flight beside a matmul; None if nothing
            was compiled.
        hidden_share: share of gather bytes that compute covers; None likewise.
        compile_seconds: time that the compiler took here.
        versions: package and version, of what it was compiled with.
        notes: sentences on what to change.
        report: the collectives, and their schedule if the step was compiled.

    Source: README, "Planning".
    """

    topology: str
    num_slices: int
    num_devices: int
    device_kind: str
    fits: bool
    hbm_bytes: int
    peak_bytes: int
    parameter_bytes: int
    moment_bytes: int
    other_argument_bytes: int
    host_parameter_bytes: int
    host_moment_bytes: int
    host_other_argument_bytes: int
    host_temporary_bytes: int | None
    working_bytes: int
    gathered_bytes: int | None
    gradient_bytes: int | None
    async_share: float | None
    hidden_share: float | None
    compile_seconds: float
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    report: CommReport

    @property
    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        where = f"{self.num_slices} x " if self.num_slices > 1 else ""
        where += f"{self.topology} ({self.num_devices} devices)"
        peak, hbm = human(self.peak_bytes, 2), human(self.hbm_bytes, 2)
        if self.fits:
            return f"fits {where}: needs {peak} of the {hbm} of a device."
        least = "" if self.report.schedule else "at least "
        return f"does not fit {where}: needs {least}{peak}, a device has {hbm}."

    def table(self, file: IO[str] | None = None) -> None:
        """Print the verdict, memory by kind, and the table of the report.

        Args:
            file: where to; standard output by default.
        """
        console = Console(file=file, highlight=False)
        if not console.is_terminal:
            console.width = _WIDTH
        versions = ", ".join(" ".join(pair) for pair in self.versions)
        did = "compiled in" if self.report.schedule else "refused after"
        lines = [f"{did} {self.compile_seconds:.1f} s, with {versions}"]
        lines += [f"note: {note}" for note in self.notes]
        console.print(Text(self.verdict, style="bold"))
        console.print(self._memory())
        if self.report.memory.host_argument_bytes:
            console.print(self._host_memory())
        console.print(Text("\n".join(lines)), end="\n\n")
        self.report.table(file)

    def _memory(self) -> Table:
        table = Table()
        table.add_column("memory of one device")
        table.add_column("size", justify="right")
        table.add_column("of its HBM", justify="right")

        def add(name: str, size_bytes: int | None) -> None:
            if size_bytes is not None:
                share = f"{size_bytes / self.hbm_bytes:.1%}"
                table.add_row(name, human(size_bytes, 2), share)

        add("parameters", self.parameter_bytes)
        add("optimizer state", self.moment_bytes)
        add("other arguments", self.other_argument_bytes)
        add("everything else at the peak", self.working_bytes)
        add("  gathered parameters at one time, at most", self.gathered_bytes)
        add("  of it gradients to reduce, at most", self.gradient_bytes)
        table.add_section()
        add("peak", self.peak_bytes)
        return table

    def _host_memory(self) -> Table:
        table = Table()
        table.add_column("memory of the host, for one device")
        table.add_column("size", justify="right")
        for name, size_bytes in (
            ("parameters", self.host_parameter_bytes),
            ("optimizer state", self.host_moment_bytes),
            ("other arguments", self.host_other_argument_bytes),
            ("everything else in a step, at most", self.host_temporary_bytes),
        ):
            if size_bytes is not None:
                table.add_row(name, human(size_bytes, 2))
        return table

    def to_json(self) -> str:
        """Everything as one JSON object, the report under `report`."""
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        fields["versions"] = dict(self.versions)
        fields["report"] = json.loads(self.report.to_json())
        return json.dumps(fields)

    def __str__(self) -> str:
        file = io.StringIO()
        self.table(file)
        return file.getvalue()


def plan(
    build: _build.Build,
    topology: str,
    *,
    num_slices: int = 1,
    compiler_options: Mapping[str, Any] | Literal["measured"] | None = None,
) -> Plan:
    """Compile a step for chips that this machine does not have, from shapes alone.

    No array is made and nothing runs. TPUs need the extra `fsdp_jax[tpu-plan]`, GPUs
    `fsdp_jax[gpu-plan]`.

    The compilers read `os.environ` when they are loaded; what they need there is set
    while `plan` runs, without touching what is set already. A process keeps the
    compiler that it loaded, so on a machine with TPUs plan in a process of its own:
    `python -m fsdp_jax.plan`, which also leaves the chips of the machine alone.

    Args:
        build: makes the step for the devices that it is given:
            `build(devices) -> (step, args)`. `step` is jitted (`nnx.jit`, `jax.jit`),
            `args` are its arguments with a `jax.ShapeDtypeStruct` in place of every
            array: a model from `nnx.eval_shape`, sharded by `fully_shard` over a mesh
            of `devices`, a `fsdp_jax.Optimizer` of it, a batch from `shard_batch`.
        topology: a TPU slice such as `v5e:4x4`, `v5p:2x2x1` or `v6e:16x16`, or a number
            of GPUs such as `h100:8` or `h100:64`.
        num_slices: number of such TPU slices, connected by the data centre network.
        compiler_options: options of XLA by name, as in `jax.jit`; "measured" for what
            `fsdp_jax.compiler_options` gives for these devices.

    Returns:
        The plan. A step that does not fit is one with `fits` false, not an error.

    Raises:
        TopologyError: there is no such topology.
        MissingCompilerError: the extra is not installed, or does not fit this JAX.
        BuildError: `build` failed or returned something else, or the step cannot be
            traced.
        CompileError: the compiler refused the step or an option.

    Source: README, "Planning".
    """
    target = _topology.parse(topology, num_slices)
    with _topology.environment():
        devices = target.devices()
        step, args = _build.call(build, devices)
        if compiler_options == "measured":
            compiler_options = _ordering.compiler_options(devices)
        return _compiled(target, devices, step, args, compiler_options or {})


def _compiled(
    target: Topology,
    devices: Sequence[Any],
    step: Any,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Plan:
    """Compile, measure, report."""
    try:
        lowered = step.lower(*args)
    except Exception as error:
        raise BuildError(f"the step cannot be traced: {told(error)}") from error
    notes = [target.misfit()] if target.misfit() else []
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=_options(target, options))
    except Exception as error:
        hbm, peak = _overflow(target, error)
        seconds = time.perf_counter() - started
        report, fits = comm_report(step, *args, compiled=False), False
    else:
        seconds = time.perf_counter() - started
        report = comm_report(step, *args, compiled=compiled)
        hbm, peak = target.hbm_bytes, report.memory.peak_bytes or 0
        fits = peak <= hbm
    memory = report.memory
    held = memory.moment_bytes + memory.host_moment_bytes
    if report.schedule and held and not memory.alias_bytes:
        notes.append(
            "nothing is donated, so old and new parameters are alive together: pass "
            "donate_argnums to nnx.jit, such as (0, 1) for (model, optimizer)."
        )
    rest = memory.parameter_bytes + memory.moment_bytes + memory.other_argument_bytes
    return Plan(
        topology=target.name,
        num_slices=target.num_slices,
        num_devices=len(devices),
        device_kind=devices[0].device_kind,
        fits=fits,
        hbm_bytes=hbm,
        peak_bytes=peak,
        parameter_bytes=memory.parameter_bytes,
        moment_bytes=memory.moment_bytes,
        other_argument_bytes=memory.other_argument_bytes,
        host_parameter_bytes=memory.host_parameter_bytes,
        host_moment_bytes=memory.host_moment_bytes,
        host_other_argument_bytes=memory.host_other_argument_bytes,
        host_temporary_bytes=memory.host_temporary_bytes,
        working_bytes=max(0, peak - rest),
        gathered_bytes=memory.gathered_peak_bytes,
        gradient_bytes=memory.gradient_peak_bytes,
        async_share=report.async_share,
        hidden_share=report.hidden_share,
        compile_seconds=seconds,
        versions=target.versions(),
        notes=tuple(notes),
        report=report,
    )


def _overflow(target: Topology, error: Exception) -> tuple[int, int]:
    """Memory of a device and what is needed of it, as the compiler's error says.

    Raises:
        CompileError: the error is about something else.
    """
    text = " ".join(str(error).split())
    size = r"([\d.]+)([KMGT]?)"
    for pattern in (
        rf"required for HLO temporaries \({size}\) exceeds available HBM \({size}\)",
        rf"memory space hbm\. Used {size} of {size} hbm",
    ):
        found = re.search(pattern, text)
        if found:
            needed, there = (
                int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3)
            )
            return there, needed
    raise CompileError(
        f"the compiler refused the step: {told(error)} {target.misfit()}".rstrip()
    ) from error


def _options(target: Topology, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options in the types that the compiler takes: on a TPU text, else typed."""

    def typed(value: Any) -> Any:
        if not target.is_gpu:
            return str(value).lower() if isinstance(value, bool) else str(value)
        if value in ("true", "false"):
            return value == "true"
        is_number = isinstance(value, str) and re.fullmatch(r"-?\d+", value)
        return int(value) if is_number else value

    return {name: typed(value) for name, value in options.items()} or None
