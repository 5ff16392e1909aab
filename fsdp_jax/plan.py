"""`fsdp_jax.plan`: the call, and the command `python -m fsdp_jax.plan`.

What lives here: the command line, and the module that can be called. What must not:
anything that a plan is made of.

    python -m fsdp_jax.plan MODULE:BUILD --topology v5e:16x16

`fsdp_jax.plan` is this module in every order of imports, and the module can be called,
so `fsdp_jax.plan(build, "v5e:4x4")` and `from fsdp_jax.plan import Plan` both work.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from fsdp_jax._build import Build, BuildError, told
from fsdp_jax._plan import CompileError as CompileError
from fsdp_jax._plan import Plan as Plan
from fsdp_jax._plan import plan as plan
from fsdp_jax._topology import EXAMPLES, PlanError
from fsdp_jax._topology import MissingCompilerError as MissingCompilerError
from fsdp_jax._topology import TopologyError as TopologyError

FITS, DOES_NOT_FIT, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: print the plan, and say in the exit status whether it fits.

    Args:
        arguments: what stands after the name of the command; None for `sys.argv`.

    Returns:
        0 if the step fits, 1 if it does not, 2 if there is no plan.
    """
    asked = _parser().parse_args(arguments)
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # leave the machine's own chips alone
    try:
        folder = Path(asked.timeline or ".").parent
        if not folder.is_dir():
            raise PlanError(
                f"--timeline {asked.timeline}: there is no folder {folder}."
            )
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
            result = plan(
                _load(asked.build),
                asked.topology,
                num_slices=asked.slices,
                compiler_options="measured"
                if asked.measured_options
                else dict(_option(text) for text in asked.option),
            )
        if asked.timeline and result.report.schedule:
            result.report.timeline(asked.timeline)
        elif asked.timeline:
            print("fsdp_jax.plan: no timeline: not compiled", file=sys.stderr)
    except (PlanError, OSError) as error:
        print(f"fsdp_jax.plan: {error}", file=sys.stderr)
        return FAILED
    if asked.json:
        print(result.to_json())
    else:
        result.table()
    if not result.fits:
        print(f"fsdp_jax.plan: {result.verdict}", file=sys.stderr)
    return FITS if result.fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_jax.plan",
        description="Compile a training step for TPUs or GPUs that are not here: does "
        "it fit, and what does it communicate. Exit status: 0 fits, 1 does not, 2 "
        "error.",
    )
    parser.add_argument(
        "build",
        metavar="MODULE:BUILD",
        help="function build(devices) -> (step, args), in a module or a file: "
        "train:build, or path/to/train.py:build",
    )
    parser.add_argument("--topology", required=True, help=f"such as {EXAMPLES}")
    parser.add_argument(
        "--slices", type=int, default=1, help="number of TPU slices (default 1)"
    )
    options = parser.add_mutually_exclusive_group()
    options.add_argument(
        "--measured-options",
        action="store_true",
        help="compile with fsdp_jax.compiler_options for these devices",
    )
    options.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the compiler; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeline", metavar="FILE.svg", help="draw the schedule into this file"
    )
    return parser


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise PlanError(f"--option takes NAME=VALUE, got {text!r}.")
    return name, value


def _load(text: str) -> Build:
    """The function that `MODULE:BUILD` names.

    Raises:
        BuildError: there is none, or importing its module failed.
    """
    name, _, attribute = text.rpartition(":")
    if not name or not attribute:
        raise BuildError(
            f"{text!r} is not MODULE:BUILD, such as train:build or train.py:build."
        )
    try:
        module = _module(name)
    except PlanError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise BuildError(
                f"there is no module {name!r} here ({Path.cwd()}): run the command "
                "where it can be imported, or give the path of its file."
            ) from error
        raise BuildError(f"importing {name} raised {told(error)}") from error
    if not callable(getattr(module, attribute, None)):
        what = "is no function" if hasattr(module, attribute) else "does not exist"
        raise BuildError(f"{attribute!r} {what} in {name}.")
    return getattr(module, attribute)


def _module(name: str) -> types.ModuleType:
    """Import a module by its name, or by the path of its file."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    if not path.is_file():
        raise BuildError(f"there is no file {name}.")
    sys.path.insert(0, str(path.parent))  # as `python FILE` does
    # By its path: there may be another module of this name.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


class _CallableModule(types.ModuleType):
    """The module, which is also the function `plan`."""

    def __call__(
        self,
        build: Build,
        topology: str,
        *,
        num_slices: int = 1,
        compiler_options: Mapping[str, Any] | Literal["measured"] | None = None,
    ) -> Plan:
        return plan(
            build, topology, num_slices=num_slices, compiler_options=compiler_options
        )


this_module = sys.modules[__name__]
this_module.__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
