"""NVIDIA GPU specifications, for XLA's compiler on machines without a GPU."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

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
