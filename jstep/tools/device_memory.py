"""Peak device memory, from what XLA's compilers report."""

from typing import Any

PARTS = ("argument", "output", "alias", "temp")


def device_peak(memory_analysis: Any) -> int | None:
    """The peak memory of a program on each device, without what it keeps in the memory of the host.

    `peak_memory_in_bytes` counts every memory: that of the device, the one inside of a TPU's core (128 MiB of VMEM on
    v5e) and, in full, that of the host. Arguments + results − aliased + temporaries counts the device alone, but
    several of the temporaries twice. Both are upper bounds; the smaller one was within 2 % of what the TPU's compiler
    allocates, for programs of 50 MB to 12 GB. Newer versions of JAX report that figure itself.

    XLA's CPU compiler counts arrays in the memory of the host with all others: its caller subtracts them.

    Args:
        memory_analysis: What `compiled.memory_analysis()` returned.

    Returns:
        The number of bytes; None if the compiler does not report it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(256)).compile()
        >>> device_peak(compiled.memory_analysis())
        2048
    """
    device, host = (_bytes(memory_analysis, f"{prefix}{{}}_size_in_bytes") for prefix in ("", "host_"))
    if device is None:
        return None
    bounds = [device["argument"] + device["output"] - device["alias"] + device["temp"]]
    allocated = getattr(memory_analysis, "total_allocation_bytes", 0)
    live = getattr(memory_analysis, "peak_memory_in_bytes", 0)
    if allocated > 0:
        bounds.append(allocated)
    elif live > 0 and host is not None:
        # Temporaries on the host may be gone at the peak; its arguments and results are there from start to end.
        bounds.append(live - (host["argument"] + host["output"] - host["alias"]))
    return min(bounds)


def _bytes(memory_analysis: Any, name: str) -> dict[str, int] | None:
    found = {part: getattr(memory_analysis, name.format(part), None) for part in PARTS}
    known = {part: value for part, value in found.items() if isinstance(value, int)}
    return known if len(known) == len(PARTS) else None
