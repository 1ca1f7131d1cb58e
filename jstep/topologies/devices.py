"""TPU generations and NVIDIA GPUs: slice sizes, memory, and what XLA's compilers need to know of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jstep.core.placement import is_compile_only

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
    options: Mapping[str, Any] = MappingProxyType({})
    devices_per_chip: int = 1


TPUS: Mapping[str, Tpu] = MappingProxyType(
    {
        "v2": Tpu("TPU v2", (16, 16), int(7.48 * GIB), devices_per_chip=2),
        "v3": Tpu("TPU v3", (32, 32), int(15.48 * GIB), devices_per_chip=2),
        # One device per chip, as on real hardware.
        "v4": Tpu("TPU v4", (16, 16, 16), int(30.75 * GIB), MappingProxyType({"chip_config_name": "megacore"})),
        "v5e": Tpu("TPU v5 lite", (16, 16), int(15.75 * GIB)),
        "v5p": Tpu("TPU v5", (28, 20, 16), int(95.74 * GIB)),
        "v6e": Tpu("TPU v6 lite", (16, 16), int(31.25 * GIB)),
        "tpu7x": Tpu("TPU7x", (24, 24, 16), int(94.75 * GIB), devices_per_chip=2),
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


_HOPPER = ("ACCELERATED_FEATURES", 132, 128, 233472, 232448)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100": Gpu(
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            "NONE",
            *(108, 64, 167936, 166912),
            bandwidth=2039040000000,
            l2_cache=41943040,
            clock=1.41,
            memory=85100068864,
        ),
        "h100": Gpu(
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            *_HOPPER,
            bandwidth=3352320000000,
            l2_cache=52428800,
            clock=1.98,
            memory=84942979072,
        ),
        "h200": Gpu(
            "NVIDIA H200",
            (9, 0),
            *_HOPPER,
            bandwidth=4800000000000,
            l2_cache=52428800,
            clock=1.98,
            memory=151397597184,
        ),
        "b200": Gpu(
            "NVIDIA B200",
            (10, 0),
            "ACCELERATED_FEATURES",
            *(148, 128, 233472, 232448),
            bandwidth=7672320000000,
            l2_cache=132644864,
            clock=1.965,
            memory=191514411008,
        ),
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
