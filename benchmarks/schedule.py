"""Memory, traffic and overlap of a step, side by side with automatic partitioning.

    python benchmarks/schedule.py

compiles for TPUs and GPUs that are not here, times on simulated CPU devices, and prints
Markdown tables, or one JSON object a row. What lives here: the command line, and what
is compared by default. What must not: measuring (`measure`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when jax is imported
os.environ["JAX_PLATFORMS"] = "cpu"  # leave the machine's own chips alone

import jax
import measure
import models
import programs
from measure import Case
from rows import Row, compare, markdown, read

# By name: size, model, and the topologies that it is compared on by default.
CONFIGS = {
    "weight-heavy": (models.WEIGHT_HEAVY, models.GPT, ("v5e:4x4", "h100:8")),
    "activation-heavy": (models.ACTIVATION_HEAVY, models.GPT, ("v5e:4x4", "h100:8")),
    "llama-7b": (models.LLAMA_7B, models.Llama, ("v5e:16x16",)),
    "cpu-gpt": (models.CPU_GPT, models.GPT, ("cpu:8", "cpu:2")),
    "nano": (models.NANO_GPT, models.GPT, ()),
    "nano-llama": (models.NANO_LLAMA, models.Llama, ()),
    "tiny-cpu-gpt": (models.TINY_CPU_GPT, models.GPT, ()),
}
# Each policy alone, and those that bound what is alive in both directions.
ORDERINGS = (
    "ours[free,own,free]",
    "ours[own,own,free]",
    "ours[previous,own,free]",
    "ours[first,own,previous]",
    "ours[first,own,own]",
    "ours[first,first,own]",
    "ours[first,each,own]",
    "ours[each,each,own]",
    "ours[each,each,previous]",
    "ours[previous,previous,previous]",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands after the name of the command; None for `sys.argv`.

    Returns:
        0; 1 if a row failed.
    """
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        if asked.tables:
            lines = Path(asked.tables).read_text().splitlines()
            print("\n\n".join(map(markdown, read(lines))))
            return 0
        cases = list(_cases(asked))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not cases:
        parser.error("nothing to compare: these models are for other platforms")
    if any(case.platform == "cpu" for case in cases):
        _simulate_devices()
    minutes = sum(case.estimate_s(asked.rounds) for case in cases) / 60
    count = sum(len(case.programs) for case in cases)
    _tell(f"{count} rows; about {max(1, round(minutes))} minutes on two cores")
    failed = False
    for case in cases:
        rows = _measured(case, asked)
        failed |= any(row.error for row in rows)
        if not asked.json:
            print(f"{markdown(rows)}\n", flush=True)
    return int(failed)


def _measured(case: Case, asked: argparse.Namespace) -> Sequence[Row]:
    """The rows of one case; printed as they come with `--json`."""
    where = f"{case.name} on {case.topology}"
    _tell(f"{where}: {', '.join(p.name for p in case.programs)}")
    if case.platform == "cpu":
        rows = measure.timed_rows(
            case, asked.rounds, lambda text: _tell(f"{where}: {text}")
        )
        if asked.json:
            print("\n".join(row.json() for row in rows), flush=True)
        return rows
    rows: Sequence[Row] = []
    for program in case.programs:
        started = time.perf_counter()
        row = measure.compiled_row(case, program)
        rows = [*rows, row]
        compare(rows)
        if asked.json:
            print(row.json(), flush=True)
        seconds = time.perf_counter() - started
        told = row.error or f"peak {row.peak_mib} MiB\n  {row.schedule}"
        _tell(f"{where}: {program.name} after {seconds:.0f} s: {told}")
    return rows


def _cases(asked: argparse.Namespace) -> Iterator[Case]:
    """What is to be compared where.

    Raises:
        ValueError: a name that does not exist, or does not fit the others.
    """
    for name, (config, make_model, by_default) in CONFIGS.items():
        if asked.config and name not in asked.config:
            continue
        if asked.blocks:
            config = dataclasses.replace(config, num_blocks=asked.blocks)
        topologies = asked.topology
        if not topologies and by_default == () and asked.config:
            raise ValueError(f"--config {name} needs --topology")
        for topology in topologies or by_default:
            platform = measure.platform_of(topology)
            if asked.platform not in ("all", platform):
                continue
            if topologies and not asked.config and not _compared(by_default, platform):
                continue
            names = asked.program or _programs(platform, make_model, topology)
            names = [*names, *(ORDERINGS if asked.orderings else ())]
            chosen = tuple(programs.parse(name) for name in dict.fromkeys(names))
            yield Case(name, config, make_model, topology, chosen)


def _compared(topologies: Sequence[str], platform: str) -> bool:
    return platform in map(measure.platform_of, topologies)


def _programs(platform: str, make_model: type, topology: str) -> list[str]:
    if platform == "cpu":
        return ["unsharded", "auto", "keep", "ours"]
    # compiler_options gives none for v5e.
    options = [] if topology.startswith("v5e") else ["ours+options"]
    ahead = ["ours+ahead"] if make_model is models.Llama else []
    return ["auto", "keep", "ours", *options, *ahead]


def _simulate_devices() -> None:
    """Eight CPU devices, unless XLA_FLAGS already asks for some."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/schedule.py",
        description="Compare fsdp_jax with automatic partitioning: memory, traffic and "
        "overlap on TPUs and GPUs that are only compiled for, step times on simulated "
        "CPU devices. Without arguments: everything, about an hour. Needs fsdp_jax "
        "with the extras [tpu-plan] and [gpu-plan].",
        epilog="programs:\n" + (programs.__doc__ or "").partition("tables.\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--platform",
        choices=("tpu", "gpu", "cpu", "all"),
        default="all",
        help="only what is compared there",
    )
    parser.add_argument(
        "--config",
        action="append",
        choices=tuple(CONFIGS),
        help="only this model; may be repeated",
    )
    parser.add_argument(
        "--program",
        action="append",
        metavar="NAME",
        help="only this program (see below); may be repeated",
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help="on these devices, such as v5e:4x4, h100:8 or cpu:8, instead of the "
        "model's own; may be repeated",
    )
    parser.add_argument(
        "--blocks", type=_positive, metavar="N", help="another depth of the models"
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=9,
        metavar="N",
        help="steps of each program to time on CPU (default 9)",
    )
    parser.add_argument(
        "--orderings",
        action="store_true",
        help="also ours in every fsdp_jax.Ordering",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a row instead of tables",
    )
    parser.add_argument(
        "--tables",
        metavar="FILE",
        help="measure nothing: print the tables of the rows that --json wrote there",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
