"""Absent accelerators: their names, their memory, and devices to compile for.

What lives here: which topologies `fsdp_jax.plan` knows, what their compilers need, and
the figures of the chips. What must not: anything that knows of steps or models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

_GIB = 1024**3
EXAMPLES = "v5e:4x4, v5p:2x2x1, v6e:16x16 or h100:8"

# What the compilers read when they are loaded. A value that the user has set stays.
_ENVIRONMENT = {
    # Never ask a metadata server what machine this is; and what would be asked for.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several processes may compile at once, also beside one that holds the chips.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    # Compiling for GPUs needs none of the CUDA libraries that JAX would look for.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


class PlanError(Exception):
    """Why there is no plan, in one sentence. Base class of all errors of `plan`."""


class TopologyError(PlanError, ValueError):
    """The topology does not exist, or is not known."""


class MissingCompilerError(PlanError, ImportError):
    """The compiler for the topology is not installed, or does not fit this JAX."""


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU generation.

    Attributes:
        hbm_bytes: memory of one device that a program can use, as the compiler of
            libtpu 0.0.42 says it when a program needs more.
        num_dims: dims of its torus.
        largest_slice: chips of its largest slice.
        options: what `get_topology_desc` must be told besides the name.
    """

    hbm_bytes: int
    num_dims: int
    largest_slice: int
    options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, by the figures that its vendor publishes.

    Attributes:
        name: the vendor's name.
        hbm_bytes: memory. A gigabyte is counted as 10**9 bytes, which leaves the
            driver its part.
        bandwidth: bytes per second of that memory.
        capability: compute capability; `accelerated` if it has a variant such as 9.0a.
        num_cores: streaming multiprocessors.
        fpus_per_core: float32 lanes of each.
        shared_kib_per_core: shared memory of each; a block can have one KiB less.
        l2_bytes: second level cache.
        clock_ghz: boost clock.
        pcie_bandwidth: bytes per second to the host.
    """

    name: str
    hbm_bytes: int
    bandwidth: int
    capability: tuple[int, int]
    accelerated: bool
    num_cores: int
    fpus_per_core: int
    shared_kib_per_core: int
    l2_bytes: int
    clock_ghz: float
    pcie_bandwidth: int

    def config(self) -> str:
        """The `GpuTargetConfigProto` that XLA compiles for, as text."""
        major, minor = self.capability
        feature = "feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared_kib_per_core * 1024,
            "threads_per_core_limit": 2048,
            "core_count": self.num_cores,
            "fpus_per_core": self.fpus_per_core,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.hbm_bytes,
            "shared_memory_per_block_optin": (self.shared_kib_per_core - 1) * 1024,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "device_vendor": '"NVIDIA Corporation"',
            "device_address_bits": 64,
            "pcie_bandwidth": self.pcie_bandwidth,
            "name": f'"{self.name}"',
            # A driver and libraries new enough for every GPU of the table.
            "driver_version": '"12.8.0"',
            "runtime_version": '"12.8.0"',
            "compile_time_toolkit_version": '"12.8.0"',
            "dnn_version": '"9.10.0"',
        }
        fields = " ".join(f"{key}: {value}" for key, value in device.items())
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} "
        return (
            f"gpu_device_info {{ {fields} {capability}{feature} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 } '
            f'device_description_str: "{self.name}"'
        )


TPUS = {
    # Megacore: one device per chip, as JAX shows a v4. tpu7x has two devices per chip.
    "v4": Tpu(int(30.75 * _GIB), 3, 4096, (("chip_config_name", "megacore"),)),
    "v5e": Tpu(int(15.75 * _GIB), 2, 256),
    "v5p": Tpu(int(95.74 * _GIB), 3, 8960),
    "v6e": Tpu(int(31.25 * _GIB), 2, 256),
    "tpu7x": Tpu(int(94.75 * _GIB), 3, 9216),
}

_HOPPER = ((9, 0), True, 132, 128, 228, 50 * 1024**2, 1.98, 64 * 10**9)
GPUS = {
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", 80 * 10**9, 2039 * 10**9),
        *((8, 0), False, 108, 64, 164, 40 * 1024**2, 1.41, 32 * 10**9),
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, 3350 * 10**9, *_HOPPER),
    "h200": Gpu("NVIDIA H200", 141 * 10**9, 4800 * 10**9, *_HOPPER),
}
_GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of absent chips to compile for.

    Attributes:
        name: as the user wrote it, such as `v5e:4x4`.
        chip: its part before the colon.
        shape: its part after the colon.
        num_slices: how many times it is there.
    """

    name: str
    chip: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def is_gpu(self) -> bool:
        """Whether the chips are GPUs."""
        return self.chip in GPUS

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device."""
        return (GPUS if self.is_gpu else TPUS)[self.chip].hbm_bytes

    def __str__(self) -> str:
        return f"{self.num_slices} x {self.name}" if self.num_slices > 1 else self.name

    @property
    def compilers(self) -> dict[str, str]:
        """Packages that can compile for it, and the extra of JAX that pins each."""
        if self.is_gpu:
            return {"jax-cuda12-plugin": "cuda12", "jax-cuda13-plugin": "cuda13"}
        return {"libtpu": "tpu"}

    def versions(self) -> tuple[tuple[str, str], ...]:
        """The installed packages that a compilation depends on, and their versions."""
        packages = ["jax", "jaxlib", "flax", *self.compilers]
        return tuple((p, _version_of(p)) for p in packages if _version_of(p))

    def misfit(self) -> str:
        """How an installed compiler misses the version that this JAX asks for."""
        for package, extra in self.compilers.items():
            found, wanted = _version_of(package), _wanted(package, extra)
            pattern = wanted.replace(".", r"\.").replace("*", ".*")
            if not found or not wanted or _replaced(package):
                continue
            if not re.fullmatch(pattern, found):
                name = "gpu-plan" if self.is_gpu else "tpu-plan"
                return (
                    f"{package} {found} is not the {wanted} that jax {jax.__version__} "
                    f"asks for: pip install 'fsdp_jax[{name}]'."
                )
        return ""

    def devices(self) -> Sequence[Any]:
        """Devices that can be compiled for, no more. Needs `environment`.

        Raises:
            MissingCompilerError: no compiler for these chips, or one that does not fit.
            TopologyError: the compiler does not know such a slice.
        """
        return self._gpus() if self.is_gpu else self._tpus()

    def _tpus(self) -> Sequence[Any]:
        if not os.environ.get("TPU_LIBRARY_PATH") and not _installed("libtpu"):
            raise MissingCompilerError(
                f"no compiler for {self.name}: the package libtpu is not installed. "
                "Run pip install 'fsdp_jax[tpu-plan]'."
            )
        chip, options = TPUS[self.chip], {}
        if _product(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        try:
            return topologies.get_topology_desc(
                self.name, "tpu", **dict(chip.options), **options
            ).devices
        except Exception as error:
            told = " ".join(str(error).split())
            if "INVALID_ARGUMENT: " in told and "opology" in told:
                raise TopologyError(
                    f"the TPU compiler knows no slice {self.name!r}: "
                    f"{told.partition('INVALID_ARGUMENT: ')[2]}"
                ) from error
            raise MissingCompilerError(
                f"the TPU compiler does not start: {told} {self.misfit()}".rstrip()
            ) from error

    def _gpus(self) -> Sequence[Any]:
        if not any(_installed(f"jax_plugins.xla_cuda{n}") for n in (12, 13)):
            raise MissingCompilerError(
                f"no compiler for {self.name}: the CUDA plugin of JAX is not "
                "installed. Run pip install 'fsdp_jax[gpu-plan]'."
            )
        count = self.shape[0]
        hosts = max(1, count // _GPUS_PER_HOST)
        try:
            return topologies.get_topology_desc(
                platform="cuda",
                topology=f"1x{hosts}x{count // hosts}",
                target_config=GPUS[self.chip].config(),
            ).devices
        except NotImplementedError as error:
            raise MissingCompilerError(
                "JAX has started without its CUDA plugin, which found no CUDA here: "
                "set JAX_PLATFORMS=cpu before JAX starts, or use the command."
            ) from error
        except Exception as error:
            told = " ".join(str(error).split())
            raise MissingCompilerError(
                f"the GPU compiler does not start: {told} {self.misfit()}".rstrip()
            ) from error


def parse(name: str, num_slices: int = 1) -> Topology:
    """Read a topology such as `v5e:4x4` or `h100:8`.

    Raises:
        TopologyError: there is none of that name or shape.
    """
    text = name if isinstance(name, str) else ""
    found = re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)", text)
    if found is None or found[1] not in {**TPUS, **GPUS}:
        known = ", ".join([*TPUS, *GPUS])
        raise TopologyError(
            f"unknown topology {name!r}: write CHIP:SHAPE, such as {EXAMPLES}. The "
            f"chips are {known}; after a GPU's colon comes the number of them."
        )
    if not isinstance(num_slices, int) or num_slices < 1:
        raise TopologyError(f"num_slices must be at least 1, got {num_slices!r}.")
    chip, shape = found[1], tuple(int(size) for size in found[2].split("x"))
    if chip in GPUS:
        _check_gpus(name, shape, num_slices)
    else:
        _check_slice(name, shape, TPUS[chip])
    return Topology(name, chip, shape, num_slices)


def _check_gpus(name: str, shape: tuple[int, ...], num_slices: int) -> None:
    count = shape[0]
    whole_hosts = 0 < count < _GPUS_PER_HOST or count % _GPUS_PER_HOST == 0
    if len(shape) > 1 or count == 0 or not whole_hosts:
        raise TopologyError(
            f"no such topology {name!r}: after the colon comes the number of GPUs, up "
            "to 8 for one host or a multiple of 8 for several, such as h100:64."
        )
    if num_slices > 1:
        raise TopologyError(
            f"GPUs have no slices: for {num_slices} times {name} ask for "
            f"{name.split(':')[0]}:{num_slices * count}."
        )


def _check_slice(name: str, shape: tuple[int, ...], chip: Tpu) -> None:
    """Refuse what the compiler would take, and then compile for no real machine."""
    if len(shape) != chip.num_dims or 0 in shape:
        example = {2: "16x16", 3: "4x4x4"}[chip.num_dims]
        raise TopologyError(
            f"no such slice {name!r}: its shape must have {chip.num_dims} dims, such "
            f"as {name.split(':')[0]}:{example}."
        )
    if _product(shape) > chip.largest_slice:
        raise TopologyError(
            f"no such slice {name!r}: the largest has {chip.largest_slice} chips. Ask "
            "for several slices (num_slices, or --slices)."
        )


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _replaced(package: str) -> bool:
    """Whether the user has a TPU compiler used that is not the installed package's."""
    path = os.environ.get("TPU_LIBRARY_PATH", "")  # the package sets it, to its own
    return package == "libtpu" and bool(path) and "/libtpu/libtpu.so" not in path


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _wanted(package: str, extra: str) -> str:
    """Version of a package that the installed JAX asks for in one of its extras."""
    for requirement in importlib.metadata.requires("jax") or []:
        asked, _, marker = requirement.partition(";")
        found = re.match(rf"{package}(?:\[.*\])?(?:==|<=)([\w.*]+)", asked.strip())
        if found and re.search(rf"""['"]{extra}['"]""", marker):
            return found[1]
    return ""


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """What the compilers need in `os.environ`, for as long as the context lasts."""
    added = {k: v for k, v in _ENVIRONMENT.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
