"""TPU generations and NVIDIA GPUs: sizes of slices, memory, peak speeds, and the names of devices."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jstep.core import trees
from jstep.core.checks import as_text, shown
from jstep.core.jaxprs import Product
from jstep.core.placement import is_compile_only

# TPU generations and NVIDIA GPUs: slice sizes, memory, and what XLA's compilers need to know of them.

GIB = 2**30
T = 1e12


def _rates(**rates: float) -> Mapping[str, float]:
    return MappingProxyType({name: rate * T for name, rate in rates.items() if rate})


def _nvidia(half: float, tf32: float, f32: float, f64: float, int8: float, f8: float = 0.0) -> Mapping[str, float]:
    return _rates(bf16=half, f16=half, tf32=tf32, f32=f32, f64=f64, int8=int8, f8=f8)


def _tpu(bf16: float, int8: float = 0.0, f8: float = 0.0) -> Mapping[str, float]:
    return _rates(bf16=bf16, int8=int8 or bf16, f8=f8 or bf16)


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
        device_kind: The value of `device.device_kind`.
        largest: The largest slice, in chips along each dimension, longest first. A larger one must never be requested:
            the compiler aborts the process or takes minutes.
        memory: Bytes of HBM per device that the compiler makes available to a program.
        peaks: Format → operations per second of a device.
        options: Compiler options in addition to the size.
        devices_per_chip: How many devices JAX shows for a chip.
    """

    device_kind: str
    largest: tuple[int, ...]
    memory: int
    peaks: Mapping[str, float]
    options: Mapping[str, Any] = MappingProxyType({})
    devices_per_chip: int = 1


TPUS: Mapping[str, Tpu] = MappingProxyType(
    {
        "v2": Tpu("TPU v2", (16, 16), int(7.48 * GIB), _tpu(46 / 2), devices_per_chip=2),
        "v3": Tpu("TPU v3", (32, 32), int(15.48 * GIB), _tpu(123 / 2), devices_per_chip=2),
        # One device per chip, as on real hardware.
        "v4": Tpu("TPU v4", (16, 16, 16), int(30.75 * GIB), _tpu(275), {"chip_config_name": "megacore"}),
        "v5e": Tpu("TPU v5 lite", (16, 16), int(15.75 * GIB), _tpu(197, int8=393)),
        "v5p": Tpu("TPU v5", (28, 20, 16), int(95.74 * GIB), _tpu(459, int8=918)),
        "v6e": Tpu("TPU v6 lite", (16, 16), int(31.25 * GIB), _tpu(918, int8=1836)),
        "tpu7x": Tpu("TPU7x", (24, 24, 16), int(94.75 * GIB), _tpu(2307 / 2, f8=4614 / 2), devices_per_chip=2),
    }
)
"""Name → generation. Memory is what the compiler reports when a program does not fit (libtpu 0.0.42 and 0.0.50)."""

LARGEST_SLICES = 64
"""The compiler accepts more, but takes minutes to create their devices."""


LARGEST_HOST = 16
LARGEST_CLUSTER = 16384
"""Devices per cluster. The compiler accepts more but creates them one at a time."""
SHARE = 0.75
"""The share of a GPU's memory that JAX allocates by default."""


class Gpu(NamedTuple):
    """Specification of a GPU, with the fields of XLA's `GpuTargetConfigProto`.

    Source: `xla/backends/gpu/target_config/specs` in github.com/openxla/xla.

    Attributes:
        description: The value of `device.device_kind`.
        capability: CUDA's compute capability.
        features: Instruction-set extensions beyond the capability.
        cores: The number of multiprocessors.
        fpus: Floating-point units per multiprocessor.
        shared_memory: Bytes of shared memory per multiprocessor.
        shared_memory_per_block: Bytes of shared memory that a block may request (opt-in).
        bandwidth: Memory bandwidth in bytes per second.
        l2_cache: Size of the L2 cache in bytes.
        clock: Clock rate in GHz.
        memory: Device memory in bytes.
    """

    description: str
    capability: tuple[int, int]
    features: str
    cores: int
    fpus: int
    shared_memory: int
    shared_memory_per_block: int
    bandwidth: int
    l2_cache: int
    clock: float
    memory: int


_AMPERE = ("NONE", 108, 64, 167936, 166912)
_HOPPER = ("ACCELERATED_FEATURES", 132, 128, 233472, 232448)
_BLACKWELL = ("ACCELERATED_FEATURES", 148, 128, 233472, 232448)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # Name, capability; features, cores and shared memory; bandwidth, L2 cache, clock, memory.
        "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), *_AMPERE, 2039040000000, 41943040, 1.41, 85100068864),
        "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), *_HOPPER, 3352320000000, 52428800, 1.98, 84942979072),
        "h200": Gpu("NVIDIA H200", (9, 0), *_HOPPER, 4800000000000, 52428800, 1.98, 151397597184),
        "b200": Gpu("NVIDIA B200", (10, 0), *_BLACKWELL, 7672320000000, 132644864, 1.965, 191514411008),
    }
)
"""Name → GPU, in its largest board (SXM)."""


def target_config(gpu: Gpu) -> str:
    """Return a `GpuTargetConfigProto` in protobuf's text format."""
    major, minor = gpu.capability
    minor_text = f" minor: {minor}" if minor else ""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major}{minor_text} feature_extension: {gpu.features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.description}"
"""


def memory_of(device: Any) -> int | None:
    """Return the bytes available to programs on a device, real or compile-only; None if unknown."""
    if not is_compile_only(device):
        stats = device.memory_stats() if device.process_index == device.client.process_index() else None
        return None if not stats else stats.get("bytes_limit")
    known = {tpu.device_kind: tpu.memory for tpu in TPUS.values()}
    known |= {gpu.description: int(SHARE * gpu.memory) for gpu in GPUS.values()}
    return known.get(device.device_kind)


# Peak operations per second of a device, by the format of its matrix products.
#
# Figures are for dense products, without structured sparsity, at the clock that the vendor assumes. They are per JAX
# device: TPUs before v4, and tpu7x, have two devices per chip.
#
# Source: for TPUs `docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm` and its pages of v2 to tpu7x, a chip's
# "peak compute". For GPUs NVIDIA's data sheets of V100, T4, A100, A10, L4, L40S, H100, H200, GH200 and Blackwell
# (HGX B200, GB200), halved if they count sparsity. How a device computes a float32 product: `jax.lax.Precision`.

_NEGLIGIBLE = 0.01
"""Products of formats without a figure are ignored below this share of all operations."""

_PRESET = re.compile(r"(BF16|F16|TF32|F32|F64)_\1_\w+?(?:_X(\d))?")
_FORMATS = {"bfloat16": "bf16", "float16": "f16", "float64": "f64", "int8": "int8", "uint8": "int8"}
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}
"""bfloat16 passes that a TPU runs for a float32 product, by precision."""

_HOPPER_PEAKS = _nvidia(989.4, 494.7, 66.9, 66.9, 1978.9, 1978.9)


GPU_PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        **{f"Tesla V100-SXM2-{size}GB": _rates(f16=125, f32=15.7, f64=7.8) for size in (16, 32)},
        **{f"Tesla V100-PCIE-{size}GB": _rates(f16=112, f32=14, f64=7) for size in (16, 32)},
        "Tesla T4": _rates(f16=65, f32=8.1, f64=0.25, int8=130),
        **dict.fromkeys(
            [GPUS["a100"].description, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"],
            _nvidia(312, 156, 19.5, 19.5, 624),
        ),
        "NVIDIA A10": _nvidia(125, 62.5, 31.2, 0.49, 250),
        "NVIDIA L4": _nvidia(121, 60.5, 30.3, 0.47, 242.5, 242.5),
        "NVIDIA L40S": _nvidia(362.05, 183, 91.6, 1.43, 733, 733),
        GPUS["h100"].description: _HOPPER_PEAKS,
        "NVIDIA H100 PCIe": _nvidia(756.5, 378, 51, 51, 1513, 1513),
        "NVIDIA H100 NVL": _nvidia(835.5, 417.5, 60, 60, 1670.5, 1670.5),
        **dict.fromkeys([GPUS["h200"].description, "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"], _HOPPER_PEAKS),
        GPUS["b200"].description: _nvidia(2250, 1125, 75, 37, 4500, 4500),
        "NVIDIA GB200": _nvidia(2500, 1250, 80, 40, 5000, 5000),
    }
)
"""`device_kind` → format → operations per second."""

TPU_PEAKS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {tpu.device_kind: tpu.peaks for tpu in TPUS.values()}
    | {f"TPU {name}": TPUS[name].peaks for name in ("v5e", "v5p", "v6e")}
)
"""`device_kind` → format → operations per second."""


def has_peaks(device_kind: str) -> bool:
    """Whether peak figures are known for a device."""
    return device_kind in TPU_PEAKS or device_kind in GPU_PEAKS


def peak_of(device_kind: str, products: Mapping[Product, float]) -> float | None:
    """Return the peak operations per second of a device for a mix of matrix products.

    Peak = Σ operations / Σ (operations / peak of their format), which for a single format is the peak of that format.

    Args:
        device_kind: The value of `device.device_kind`.
        products: Operations by the format of their operands.

    Returns:
        Operations per second of one device; None if there is no figure for the device or the format, or no product.
    """
    total, known, seconds = sum(products.values()), 0.0, 0.0
    for product, flops in products.items():
        rate = rate_of(device_kind, product)
        if rate is not None:
            known, seconds = known + flops, seconds + flops / rate
    return None if not known or known < (1 - _NEGLIGIBLE) * total else known / seconds


def rate_of(device_kind: str, product: Product) -> float | None:
    """Return the peak operations per second for products of one format; None if there is no figure."""
    preset = _PRESET.fullmatch(product.precision)
    if preset is None and product.precision not in (*_PASSES, "ANY_F8"):
        return None
    on_tpu = device_kind in TPU_PEAKS
    rates = TPU_PEAKS[device_kind] if on_tpu else GPU_PEAKS.get(device_kind, {})
    is_float8 = product.dtype.startswith("float8") or product.precision == "ANY_F8"
    name, passes = "f8" if is_float8 else _FORMATS.get(product.dtype, ""), 1
    if on_tpu and preset is not None:
        name = "bf16" if preset[1] in ("BF16", "F32") else ""
        passes = int(preset[2] or 1) if preset[1] == "BF16" else _PASSES["HIGHEST"]
    elif on_tpu and product.dtype in ("float32", "float16"):
        name, passes = "bf16", _PASSES[product.precision]
    elif preset is not None:
        name, passes = preset[1].lower(), int(preset[2] or 1)
    elif not on_tpu and product.dtype == "float32":
        name = "tf32" if "tf32" in rates and product.precision != "HIGHEST" else "f32"
    return rates[name] / passes if name in rates else None


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
        raise ValueError(f"{argument}={shown(name)}: expected KIND:SIZE, such as {_EXAMPLES}; {kinds}")
    kind, sizes = found[1], tuple(map(int, found[2].split("x")))
    slices = 1 if found[3] is None else int(found[3])
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
        return f"expected 1 to {LARGEST_SLICES} slices, got {slices}"
    return ""


def _of_gpus(sizes: tuple[int, ...], slices: str | None) -> str:
    if slices is not None:
        return "only TPUs have slices; write GPUs as HOSTSxDEVICES, such as 'h100:4x8'"
    if len(sizes) > 2 or 0 in sizes:
        return "expected the devices of one host, such as 'h100:8', or HOSTSxDEVICES, such as 'h100:4x8'"
    if sizes[-1] > LARGEST_HOST:
        return f"a host has at most {LARGEST_HOST} devices; write HOSTSxDEVICES, such as 'h100:{sizes[-1] // 8}x8'"
    if sizes[0] * sizes[-1] > LARGEST_CLUSTER:
        return f"expected at most {LARGEST_CLUSTER} devices"
    return ""
