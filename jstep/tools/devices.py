"""TPU generations and NVIDIA GPUs: sizes of slices, memory, and the names of topologies."""

import importlib.resources
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.core import trees
from jstep.core.checks import as_text, shown
from jstep.core.placement import is_compile_only

# TPU generations and NVIDIA GPUs: slice sizes, memory, and what XLA's compilers need to know of them.

GIB = 2**30


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
        device_kind: The value of `device.device_kind`.
        largest: The largest slice, in chips along each dimension, longest first. A larger one must never be requested:
            the compiler aborts the process or takes minutes.
        memory: Bytes of HBM per device that the compiler makes available to a program.
        options: Compiler options in addition to the size.
        devices_per_chip: How many devices JAX shows for a chip.
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
"""Name → generation. Memory is what the compiler reports when a program does not fit (libtpu 0.0.42 and 0.0.50)."""

LARGEST_SLICES = 64
"""The compiler accepts more, but takes minutes to create their devices."""

LARGEST_HOST = 16
LARGEST_CLUSTER = 16384
"""Devices per cluster. The compiler accepts more but creates them one at a time."""
SHARE = 0.75
"""The share of a GPU's memory that JAX allocates by default."""


class Gpu(NamedTuple):
    """A GPU, in its largest board (SXM). What XLA's compiler must know of it is in a file of the folder `gpus`.

    Attributes:
        description: The value of `device.device_kind`.
        memory: Device memory in bytes.
    """

    description: str
    memory: int


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85100068864),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84942979072),
    "h200": Gpu("NVIDIA H200", 151397597184),
    "b200": Gpu("NVIDIA B200", 191514411008),
}
"""Name → GPU."""


def target_config(name: str) -> str:
    """Return XLA's specification of a GPU, a `GpuTargetConfigProto` in protobuf's text format.

    Source: `xla/backends/gpu/target_config/specs` in github.com/openxla/xla, which has more of them.
    """
    return importlib.resources.files("jstep.tools").joinpath("gpus", f"{name}.txtpb").read_text(encoding="utf-8")


def memory_of(device: Any) -> int | None:
    """Return the bytes available to programs on a device, real or compile-only; None if unknown."""
    if not is_compile_only(device):
        stats = device.memory_stats() if device.process_index == device.client.process_index() else None
        return None if not stats else stats.get("bytes_limit")
    known = {tpu.device_kind: tpu.memory for tpu in TPUS.values()}
    known |= {gpu.description: int(SHARE * gpu.memory) for gpu in GPUS.values()}
    return known.get(device.device_kind)


# Parsing and validating topology names such as `v5e:4x4*2`, without loading a compiler.

_FORM = re.compile(r"([A-Za-z0-9_\-]+):([0-9]{1,6}(?:x[0-9]{1,6})*)(?:\*([0-9]{1,6}))?")
_EXAMPLES = "'v5e:2x4', 'v5p:4x4x4', 'v5e:4x4*2' (two slices) or 'h100:4x8' (hosts x devices)"


class Name(NamedTuple):
    """A topology.

    Attributes:
        kind: The kind of its devices, such as `"v5e"`.
        sizes: For TPUs, the chips of a slice along each dimension; for GPUs, the hosts and the devices per host.
        slices: The number of TPU slices.
    """

    kind: str
    sizes: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        sizes = self.sizes[1:] if self.kind in GPUS and self.sizes[0] == 1 else self.sizes
        return f"{self.kind}:{'x'.join(map(str, sizes))}{f'*{self.slices}' if self.slices > 1 else ''}"

    def device_count(self) -> int:
        """Return the number of its devices, without a compiler."""
        per_chip = 1 if self.kind in GPUS else TPUS[self.kind].devices_per_chip
        return math.prod(self.sizes) * self.slices * per_chip


def parsed(name: str, argument: str = "name") -> Name:
    """Parse a topology name.

    Raises:
        TypeError: It is not a string.
        ValueError: The kind is unknown (the message lists the kinds) or does not come in this size.
    """
    as_text(name, argument, f"such as {_EXAMPLES}")
    kinds = f"the kinds are {', '.join((*TPUS, *GPUS))}"
    found = _FORM.fullmatch(name)
    if found is None:
        raise ValueError(f"{argument}={shown(name)}: must be KIND:SIZE, such as {_EXAMPLES}; {kinds}")
    kind, sizes = found[1], tuple(map(int, found[2].split("x")))
    slices = int(found[3] or 1)
    if kind not in TPUS and kind not in GPUS:
        raise ValueError(f"{argument}={name!r}: unknown kind {kind!r}{trees.nearest(kind, (*TPUS, *GPUS))}; {kinds}")
    problem = _of_gpus(sizes, found[3]) if kind in GPUS else _of_tpus(kind, sizes, slices)
    if problem:
        raise ValueError(f"{argument}={name!r}: {problem}")
    return Name(kind, (1, *sizes) if kind in GPUS and len(sizes) == 1 else sizes, slices)


def _of_tpus(kind: str, sizes: tuple[int, ...], slices: int) -> str:
    largest = TPUS[kind].largest
    dims = len(largest)
    example = f"{kind}:{'x'.join(['2', '2', '1'][:dims])}"
    most = f"{kind}:{'x'.join(map(str, sorted(largest)))}"
    if len(sizes) != dims:
        return f"a slice of {kind} has {dims} dimensions, got {len(sizes)}; write one such as {example!r}"
    if any(size > bound for size, bound in zip(sorted(sizes, reverse=True), largest, strict=True)):
        return f"a slice of {kind} has at most {'x'.join(map(str, largest))} chips; for more write slices, '{most}*2'"
    # A host has 2x2 chips, except in a slice of a single chip.
    if set(sizes) != {1} and (sizes[0] % 2 or sizes[1] % 2 or 0 in sizes):
        one = f"{kind}:{'x'.join(['1'] * dims)}"
        return f"hosts have 2x2 chips, so the first two sizes must be even and none 0 (or all 1: {one!r})"
    if not 1 <= slices <= LARGEST_SLICES:
        return f"must have 1 to {LARGEST_SLICES} slices, got {slices}"
    return ""


def _of_gpus(sizes: tuple[int, ...], slices: str | None) -> str:
    if slices is not None:
        return "only TPUs have slices; write GPUs as HOSTSxDEVICES, such as 'h100:4x8'"
    if len(sizes) > 2 or 0 in sizes:
        return "must be the devices of one host, such as 'h100:8', or HOSTSxDEVICES, such as 'h100:4x8'"
    if sizes[-1] > LARGEST_HOST:
        return f"a host has at most {LARGEST_HOST} devices; write HOSTSxDEVICES, such as 'h100:{sizes[-1] // 8}x8'"
    if sizes[0] * sizes[-1] > LARGEST_CLUSTER:
        return f"must have at most {LARGEST_CLUSTER} devices"
    return ""
