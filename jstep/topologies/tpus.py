"""TPU generations: their sizes and their memory, as XLA's compiler knows them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

GIB = 2**30


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
        device_kind: What `device.device_kind` of its devices is.
        largest: The largest slice, in chips along each dimension, the longest first. A larger one makes the compiler
            abort the process, or takes it minutes, so it must never be asked for.
        memory: Bytes of HBM that the compiler gives a program on each device.
        options: What the compiler is told besides the size.
    """

    device_kind: str
    largest: tuple[int, ...]
    memory: int
    options: Mapping[str, Any] = MappingProxyType({})


TPUS: Mapping[str, Tpu] = MappingProxyType(
    {
        "v2": Tpu("TPU v2", (16, 16), int(7.48 * GIB)),
        "v3": Tpu("TPU v3", (32, 32), int(15.48 * GIB)),
        # One device a chip, as on a real one.
        "v4": Tpu("TPU v4", (16, 16, 16), int(30.75 * GIB), MappingProxyType({"chip_config_name": "megacore"})),
        "v5e": Tpu("TPU v5 lite", (16, 16), int(15.75 * GIB)),
        "v5p": Tpu("TPU v5", (28, 20, 16), int(95.74 * GIB)),
        "v6e": Tpu("TPU v6 lite", (16, 16), int(31.25 * GIB)),
        "tpu7x": Tpu("TPU7x", (24, 24, 16), int(94.75 * GIB)),
    }
)
"""Name → generation. The memory is what the compiler says when a program does not fit (libtpu 0.0.42 and 0.0.50)."""

LARGEST_SLICES = 64
"""The compiler takes more, but makes their devices one by one, for minutes."""
