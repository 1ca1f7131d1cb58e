"""Device memory that is available to programs."""

from typing import Any

from jstep.core.placement import is_compile_only
from jstep.topologies.gpus import GPUS, SHARE
from jstep.topologies.tpus import TPUS


def memory_of(device: Any) -> int | None:
    """Return the bytes available to programs on a device, real or compile-only; None if unknown."""
    if not is_compile_only(device):
        stats = device.memory_stats() if device.process_index == device.client.process_index() else None
        return None if not stats else stats.get("bytes_limit")
    known = {tpu.device_kind: tpu.memory for tpu in TPUS.values()}
    known |= {gpu.description: int(SHARE * gpu.memory) for gpu in GPUS.values()}
    return known.get(device.device_kind)
