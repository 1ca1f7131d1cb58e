"""Topologies of TPUs and GPUs: names, sizes, memory, and XLA's compilers without such devices."""

import contextlib
import glob
import importlib.resources
import importlib.util
import math
import operator
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_int, as_mapping, as_string, format_value, truncate
from jstep.core.logs import slow
from jstep.core.meshes import mesh_of
from jstep.core.placement import compiles_only, is_compile_only, is_shape
from jstep.state.train_state import TrainState, shard_state
from jstep.training.step import as_pure_step

# TPU generations and NVIDIA GPUs: slice sizes, memory, and specifications for XLA's compilers.

GIB = 2**30


class Tpu(NamedTuple):
    """A generation of TPUs; `memory` is what the compiler makes available to a program.

    `largest` is in chips along each dimension, longest first. Never request a larger slice: the
    compiler aborts the process or takes minutes.
    """

    device_kind: str
    largest: tuple[int, ...]
    memory: int
    options: Mapping[str, Any] = {}
    devices_per_chip: int = 1


TPUS: Mapping[str, Tpu] = {
    "v2": Tpu("TPU v2", (16, 16), int(7.48 * GIB), devices_per_chip=2),
    "v3": Tpu("TPU v3", (32, 32), int(15.48 * GIB), devices_per_chip=2),
    # One device per chip, as on real hardware.
    "v4": Tpu("TPU v4", (16, 16, 16), int(30.75 * GIB), {"chip_config_name": "megacore"}),
    "v5e": Tpu("TPU v5 lite", (16, 16), int(15.75 * GIB)),
    "v5p": Tpu("TPU v5", (28, 20, 16), int(95.74 * GIB)),
    "v6e": Tpu("TPU v6 lite", (16, 16), int(31.25 * GIB)),
    "tpu7x": Tpu("TPU7x", (24, 24, 16), int(94.75 * GIB), devices_per_chip=2),
}
"""Name → generation. Memory is what the compiler reports (libtpu 0.0.42 and 0.0.50)."""

LARGEST_SLICES = 64
"""The compiler accepts more, but takes minutes to create their devices."""

LARGEST_HOST = 16
LARGEST_CLUSTER = 16384
"""Devices per cluster. The compiler accepts more but creates them one at a time."""
SHARE = 0.75
"""The share of a GPU's memory that JAX allocates by default."""


class Gpu(NamedTuple):
    """A GPU, in its largest board (SXM); `description` is its `device_kind`."""

    description: str
    memory: int


# XLA's specifications are in the folder `gpus`, from `xla/backends/gpu/target_config/specs` in
# github.com/openxla/xla, which has more of them.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85100068864),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84942979072),
    "h200": Gpu("NVIDIA H200", 151397597184),
    "b200": Gpu("NVIDIA B200", 191514411008),
}
"""Name → GPU."""


def target_config(name: str) -> str:
    file = importlib.resources.files("jstep.planning").joinpath("gpus", f"{name}.txtpb")
    return file.read_text(encoding="utf-8")


def device_memory(device: Any) -> int | None:
    """Return the bytes that programs may use of a device, real or of a topology; else None."""
    if not is_compile_only(device):
        # A device of another process does not report its memory.
        is_own = device.process_index == device.client.process_index()
        stats = device.memory_stats() if is_own else None
        return None if not stats else stats.get("bytes_limit")
    for tpu in TPUS.values():
        if tpu.device_kind == device.device_kind:
            return tpu.memory
    for gpu in GPUS.values():
        if gpu.description == device.device_kind:
            return int(SHARE * gpu.memory)
    return None


# Parsing and validating topology names such as `v5e:4x4*2`, without loading a compiler.

_FORM = re.compile(r"([A-Za-z0-9_\-]+):([0-9]{1,6}(?:x[0-9]{1,6})*)(?:\*([0-9]{1,6}))?")
_EXAMPLES = "'v5e:2x4', 'v5p:4x4x4', 'v5e:4x4*2' (two slices) or 'h100:4x8' (hosts x devices)"


class Name(NamedTuple):
    """A topology; `sizes` are a TPU slice's chips by dimension, or hosts and GPUs per host."""

    kind: str
    sizes: tuple[int, ...]
    slices: int

    def __str__(self) -> str:
        sizes = self.sizes
        if self.kind in GPUS and sizes[0] == 1:
            # One host of GPUs is not named.
            sizes = sizes[1:]
        slices = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.kind}:{'x'.join(map(str, sizes))}{slices}"

    def device_count(self) -> int:
        devices_per_chip = 1 if self.kind in GPUS else TPUS[self.kind].devices_per_chip
        return math.prod(self.sizes) * self.slices * devices_per_chip


def parse_topology(name: str, argument: str = "name") -> Name:
    match = _FORM.fullmatch(as_string(name, argument, f"such as {_EXAMPLES}"))
    if match is None or not (match[1] in TPUS or match[1] in GPUS):
        kinds = ", ".join((*TPUS, *GPUS))
        raise ValueError(
            f"{argument}={format_value(name)}: must be KIND:SIZE, such as {_EXAMPLES}; the kinds "
            f"are {kinds}"
        )
    kind = match[1]
    sizes = tuple(map(int, match[2].split("x")))
    slices = int(match[3] or 1)
    if kind in GPUS:
        expected = _expected_gpus(sizes, match[3])
    else:
        expected = _expected_tpus(kind, sizes, slices)
    if expected is not None:
        raise ValueError(f"{argument}={name!r}: must be {expected}")
    if kind in GPUS and len(sizes) == 1:
        sizes = (1, *sizes)
    return Name(kind, sizes, slices)


def _fits_hosts(sizes: tuple[int, ...]) -> bool:
    """Return whether hosts of 2x2 chips fill a slice, or it is a single chip."""
    if set(sizes) == {1}:
        return True
    return 0 not in sizes and sizes[0] % 2 == 0 and sizes[1] % 2 == 0


def _expected_tpus(kind: str, sizes: tuple[int, ...], slices: int) -> str | None:
    """Return what a slice of a kind of TPU must be, for an error; None if it is."""
    largest = TPUS[kind].largest
    has_axes = len(sizes) == len(largest)
    if has_axes and 1 <= slices <= LARGEST_SLICES and _fits_hosts(sizes):
        is_small_enough = all(map(operator.le, sorted(sizes, reverse=True), largest))
        if is_small_enough:
            return None
    bounds = "x".join(map(str, largest))
    single = "x".join(["1"] * len(largest))
    return (
        f"{kind}:{bounds} or smaller, in any order, the first two sizes even (or {kind}:{single}), "
        f"with up to *{LARGEST_SLICES} slices"
    )


def _expected_gpus(sizes: tuple[int, ...], slices: str | None) -> str | None:
    """Return what a cluster of GPUs must be, for an error; None if it is."""
    has_form = slices is None and len(sizes) <= 2
    if has_form and 0 < sizes[-1] <= LARGEST_HOST and 0 < math.prod(sizes) <= LARGEST_CLUSTER:
        return None
    return (
        f"the devices of one host (up to {LARGEST_HOST}), such as 'h100:8', or HOSTSxDEVICES, such "
        f"as 'h100:4x8', with up to {LARGEST_CLUSTER} in all"
    )


# Compile-only meshes of TPU slices and GPU clusters.


def topology(
    name: str,
    axes: Mapping[str, int] | None = None,
    *,
    axis_types: Sequence[AxisType] | None = None,
) -> Mesh:
    """Return a compile-only mesh: a TPU slice or a GPU cluster that the machine does not have.

    `TrainState.create`, `shard_state`, `shard_batch` and `fsdp_specs` accept such a mesh and return
    shapes, for `cost` and for a step's `lower`, `trace` and `eval_shape`. Nothing can be executed
    on the mesh.

    Args:
        name: For TPUs, generation and chips: `"v5e:16x16"`, `"v5p:4x4x4"`; several slices with a
            star, `"v5e:4x4*2"`. For GPUs, hosts and devices per host, `"h100:4x8"`, or the devices
            of one host, `"b200:8"`. The kinds are v2, v3, v4, v5e, v5p, v6e, tpu7x; a100, h100,
            h200, b200.
        axes: Axis name → size. The sizes must multiply to the number of devices; by default
            `"data"` has all of them. With several slices, the first axis divisible by their number
            spans them.
        axis_types: One type per axis, as in `jax.sharding.Mesh`; Auto by default.

    Returns:
        A `jax.sharding.Mesh`. Equal calls return equal meshes.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The kind is unknown or does not come in this size, or the axes do not multiply
            to its devices.
        ImportError: The compiler is not installed, or does not load: `pip install 'jstep[tpu]'` for
            TPUs, `'jstep[aot-cuda]'` for GPUs.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> mesh = jstep.topology("v5e:4x4", {"data": 8, "model": 2})  # doctest: +SKIP
        >>> optimizer = jstep.adamw(1e-3)
        >>> state = jstep.TrainState.create(make_params, optimizer, mesh=mesh)  # doctest: +SKIP
        >>> print(jstep.cost(train_step, state, jstep.shard_batch(batch, mesh)))  # doctest: +SKIP

    Note:
        Sets some environment variables of these compilers, unless they are set already or the
        machine has such devices. TPUs before v4, and tpu7x, have two devices per chip, all others
        one.
    """
    wanted = parse_topology(name)
    count = wanted.device_count()
    axes = as_mapping(
        {"data": count} if axes is None else axes, "axes", "such as {'data': 64, 'model': 4}"
    )
    sizes = {
        as_string(name, "axes"): as_int(size, f"axes[{name!r}]", 1) for name, size in axes.items()
    }
    if math.prod(sizes.values()) != count:
        raise ValueError(
            f"axes={format_value(axes)}: must multiply to {count}, the devices of {wanted}"
        )
    # The axis that spans the slices is the first one divisible by their number.
    divisible = [dim for dim, size in enumerate(sizes.values()) if size % wanted.slices == 0]
    if not divisible:
        raise ValueError(
            f"axes={sizes}: one axis must be a multiple of the {wanted.slices} slices of {wanted}, "
            "which it spans"
        )
    spanning = divisible[0]
    # The sizes within a slice, and the numbers of slices, along each axis.
    slice_sizes = list(sizes.values())
    slice_sizes[spanning] //= wanted.slices
    slice_counts = [1] * len(sizes)
    slice_counts[spanning] = wanted.slices
    devices = compile_only_devices(wanted)
    if wanted.slices == 1:
        placed = mesh_utils.create_device_mesh(slice_sizes, devices, allow_split_physical_axes=True)
    else:
        placed = mesh_utils.create_hybrid_device_mesh(
            slice_sizes, slice_counts, devices, allow_split_physical_axes=True
        )
    return Mesh(placed, tuple(sizes), axis_types=None if axis_types is None else tuple(axis_types))


# Placing state and batch on the devices of a topology.


def place(
    name: str, train_step: Any, state: TrainState, args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the shapes of a replicated state and of a batch split by rows over a topology."""
    if mesh_of((state, args)) is not None:
        raise ValueError(
            f"topology={name!r}: state and batch are on a mesh already; place them on "
            f"jstep.topology({name!r}, axes)"
        )
    mesh = topology(name)
    (axis,) = mesh.axis_names
    # The rows are behind the axis of `scan_steps`.
    row_axis = as_pure_step(train_step).leading_axes

    def sharded_shape(keys: Any, leaf: Any) -> Any:
        if not trees.is_array(leaf) and not is_shape(leaf):
            return leaf
        shape = np.shape(leaf)
        if len(shape) <= row_axis:
            return trees.shape_of(leaf, NamedSharding(mesh, PartitionSpec()))
        if shape[row_axis] % mesh.size:
            raise ValueError(
                f"topology={name!r}: the batch's leaf {trees.path_str(keys)!r} must have a "
                f"multiple of {mesh.size} rows, got {shape[row_axis]}"
            )
        return trees.shape_of(leaf, NamedSharding(mesh, PartitionSpec(*[None] * row_axis, axis)))

    return shard_state(state, mesh), jax.tree_util.tree_map_with_path(sharded_shape, args)


def shapes_if_elsewhere(state: TrainState, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return shapes for arrays that are not on the mesh of state or batch, if it only compiles."""
    if not any(map(compiles_only, map(mesh_of, (state, *args)))):
        return state, args

    def here(leaf: object) -> Any:
        is_elsewhere = isinstance(leaf, jax.Array) and mesh_of(leaf) is None
        return trees.shape_of(leaf) if is_elsewhere else leaf

    return jax.tree.map(here, state), jax.tree.map(here, args)


# Loading XLA's TPU and GPU compilers on a machine without these devices, and listing compile-only
# devices.

# The devices of each topology are made once, so that equal calls of `topology` return equal meshes.
# A thread that adds some holds the lock.
_lock = threading.Lock()
_made: dict[Name, Sequence[Any]] = {}

_SETTINGS_WITHOUT_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to query
    # This and the next only keep libtpu from writing to stderr.
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several processes may compile together; if they share TPUs this may crash.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SETTINGS_WITHOUT_GPUS = {
    # Otherwise the plugin requires cuDNN, which only running needs.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"
}


def compile_only_devices(name: Name) -> Sequence[Any]:
    with _lock:
        if name not in _made:
            check_compiler(name)
            prepare()
            try:
                with slow(f"topology: loading the compiler of {name}"):
                    devices = _gpus(name) if name.kind in GPUS else _tpus(name)
            except Exception as error:
                # Of Python, of the loader, or of the compiler.
                raise _unusable(name, _compiler_of(name), error) from error
            _made[name] = devices
        return _made[name]


def check_compiler(name: Name) -> None:
    if name.kind not in GPUS:
        if not os.environ.get("TPU_LIBRARY_PATH") and importlib.util.find_spec("libtpu") is None:
            raise _unusable(name, "libtpu")
    elif not _plugins():
        raise _unusable(name, "the CUDA plugin of JAX")
    elif not _has_cuda_compiler():
        raise _unusable(name, "NVIDIA's compiler (ptxas and libdevice)")


def topology_name(device: Any) -> Name | None:
    """Return the topology of a compile-only device; None of any other."""
    # A copy, because another thread may add one.
    for name, devices in _made.copy().items():
        if devices[0].client is device.client:
            return name
    return None


def _tpus(name: Name) -> Sequence[Any]:
    options: dict[str, Any] = dict(TPUS[name.kind].options)
    if set(name.sizes) == {1}:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if name.slices > 1:
        options["num_slices"] = name.slices
    size = "x".join(map(str, name.sizes))
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name.kind}:{size}", **options
    )
    return tuple(description.devices)


def _gpus(name: Name) -> Sequence[Any]:
    size = "x".join(map(str, name.sizes))

    def make() -> Sequence[Any]:
        options = {"target_config": target_config(name.kind), "topology": f"1x{size}"}
        return tuple(
            topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        )

    try:
        return make()
    except NotImplementedError:
        # JAX was already initialized and discarded the plugin because there is no GPU.
        importlib.import_module(_plugins()[0]).initialize()
        return make()


def prepare() -> None:
    """Set environment variables that the compilers read when loaded, unless devices exist."""
    settings: dict[str, str] = {}
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        settings |= _SETTINGS_WITHOUT_TPUS
    if not glob.glob("/dev/nvidia[0-9]*"):
        settings |= _SETTINGS_WITHOUT_GPUS
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)


def _plugins() -> list[str]:
    """Return the installed CUDA plugins, the newest first."""
    return [
        module
        for module in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
        if _find_spec(module)
    ]


def _find_spec(module: str) -> Any:
    # An error means that the parent package is missing.
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module)
    return None


_COMPILER_FILES = ("bin/ptxas", "nvvm/libdevice")


def _cuda_roots() -> list[str]:
    """Return the directories in which XLA looks for NVIDIA's compiler."""
    roots = [os.environ.get("CUDA_ROOT")]
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        roots += getattr(_find_spec(package), "submodule_search_locations", None) or ()
    roots += [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    ptxas = shutil.which("ptxas")
    if ptxas:
        roots.append(os.path.dirname(os.path.dirname(ptxas)))
    return [root for root in roots if root]


def _has_cuda_compiler() -> bool:
    for root in _cuda_roots():
        if all(os.path.exists(f"{root}/{file}") for file in _COMPILER_FILES):
            return True
    return False


def _compiler_of(name: Name) -> str:
    if name.kind in GPUS:
        return f"the CUDA plugin of JAX ({_plugins()[0]})"
    library = os.environ.get("TPU_LIBRARY_PATH")
    return "libtpu" if library is None else f"libtpu (TPU_LIBRARY_PATH={library!r})"


def _unusable(name: Name, what: str, error: Exception | None = None) -> ImportError:
    extra = "aot-cuda" if name.kind in GPUS else "tpu"
    if error is None:
        return ImportError(f"{name}: {what} is not installed; run: pip install 'jstep[{extra}]'")
    said = truncate(" ".join(str(error).split()), 500)
    return ImportError(
        f"{name}: {what} is installed, but does not work ({type(error).__name__}: {said}); "
        f"run: pip install 'jstep[{extra}]' --force-reinstall"
    )
