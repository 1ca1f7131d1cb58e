"""TPU generations: slice sizes and memory, as defined by XLA's compiler."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

GIB = 2**30


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
        device_kind: The value of `device.device_kind`.
        largest: The largest slice, in chips along each dimension, longest first. A larger one must never be requested:
            the compiler aborts the process or takes minutes.
        memory: Bytes of HBM per device that the compiler makes available to a program.
        options: Compiler options in addition to the size.
    """

    device_kind: str
    largest: tuple[int, ...]
    memory: int
    options: Mapping[str, Any] = MappingProxyType({})


TPUS: Mapping[str, Tpu] = MappingProxyType(
    {
        "v2": Tpu("TPU v2", (16, 16), int(7.48 * GIB)),
        "v3": Tpu("TPU v3", (32, 32), int(15.48 * GIB)),
        # One device per chip, as on real hardware.
        "v4": Tpu("TPU v4", (16, 16, 16), int(30.75 * GIB), MappingProxyType({"chip_config_name": "megacore"})),
        "v5e": Tpu("TPU v5 lite", (16, 16), int(15.75 * GIB)),
        "v5p": Tpu("TPU v5", (28, 20, 16), int(95.74 * GIB)),
        "v6e": Tpu("TPU v6 lite", (16, 16), int(31.25 * GIB)),
        "tpu7x": Tpu("TPU7x", (24, 24, 16), int(94.75 * GIB)),
    }
)
"""Name → generation. Memory is what the compiler reports when a program does not fit (libtpu 0.0.42 and 0.0.50)."""

LARGEST_SLICES = 64
"""The compiler accepts more, but takes minutes to create their devices."""
