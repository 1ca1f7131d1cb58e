"""Compiling a step and collecting XLA's figures, including for a step that does not fit."""

import logging
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.devices import memory_of
from jstep.core.placement import device_count, device_of
from jstep.core.programs import body_of, work_of
from jstep.state.train_state import TrainState
from jstep.tools.collectives import collectives_of
from jstep.tools.compiled.program import parse_program, recomputes
from jstep.tools.cost_warnings import unplaced_batch, warnings_of, warnings_without_a_program
from jstep.tools.device_memory import bytes_of, device_peak
from jstep.topologies.compilers import name_of

_logger = logging.getLogger("jstep")
_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT]?)B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)B?\)")
_SIZES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compiled_cost(step: Any, state: TrainState, args: tuple[Any, ...]) -> dict[str, Any]:
    """Compile a step and return the fields of its `Cost`."""
    traced = step.trace(state, *args).jaxpr
    work = work_of(body_of(traced))
    device, devices = device_of((state, args)), device_count((state, args))
    name, memory = name_of(device), memory_of(device)
    start = time.perf_counter()
    lowered = step.lower(state, *args)
    if name is not None:
        _logger.info("Compiling for %s, which can take minutes.", name)
    try:
        compiled, needed = _compiled(lowered, is_there=name is None), None
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(error)
        if needed is None:
            raise
    host = bytes_of((state, args), on_host=True)
    known = {
        "params_bytes": bytes_of(state.params, on_host=False),
        "slots_bytes": bytes_of(state.slots, on_host=False),
        "host_bytes": host,
        "compile_seconds": time.perf_counter() - start,
        "devices": devices,
        "loops_unknown": work.unknown,
        "topology": None if name is None else str(name),
    }
    if needed is not None:
        return {
            **known,
            **dict.fromkeys((*_SIZES, "bytes_accessed", "collectives")),
            "flops": work.all / devices,
            "peak_bytes": needed[0],
            "memory_bytes": memory or needed[1],
            "fits": False,
            "warnings": (*unplaced_batch(state, args), *warnings_without_a_program(state, args, traced)),
        }
    sizes = _memory(compiled, state, args, host, device.platform)
    peak = sizes["peak_bytes"]
    analysis, program = _analysis(compiled.cost_analysis()), parse_program(compiled.as_text())
    traffic = analysis.get("bytes accessed")
    return {
        **known,
        **sizes,
        "flops": _scaled(analysis.get("flops"), work.once, work.all, devices),
        # The traced program gives the operations, but not which results XLA fuses and so never writes.
        "bytes_accessed": None if traffic is None else _scaled(traffic, work.once_bytes, work.all_bytes, devices),
        "collectives": collectives_of(program),
        "recomputes": recomputes(program),
        "warnings": (*unplaced_batch(state, args), *warnings_of(program, state, args, traced, compiled.out_info)),
        "memory_bytes": memory,
        "fits": None if memory is None or peak is None else peak <= memory,
    }


def _compiled(lowered: Any, *, is_there: bool) -> Any:
    with warnings.catch_warnings():
        if not is_there:
            # A compile-only client cannot read its own entries of the compilation cache, and recompiles.
            warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
        return lowered.compile()


def _needed(error: Exception) -> tuple[int, int] | None:
    """Parse the bytes that a program needs and those available from XLA's error; None for another error."""
    found = _TOO_LARGE.search(str(error))
    if found is None:
        return None
    return int(float(found[1]) * _UNITS[found[2]]), int(float(found[3]) * _UNITS[found[4]])


def _memory(compiled: Any, state: TrainState, args: tuple[Any, ...], host: int, platform: str) -> dict[str, int | None]:
    """Return the memory figures of each device, without arrays on the host."""
    memory = compiled.memory_analysis()
    if memory is None:
        return dict.fromkeys(_SIZES)
    arguments, outputs, alias, temporary = (
        int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias", "temp")
    )
    # XLA's CPU compiler does not count them separately.
    if host and not getattr(memory, "host_argument_size_in_bytes", 0):
        host_results = bytes_of(compiled.out_info, on_host=True)
        donated = bytes_of(_donated(compiled, (state, *args)), on_host=True)
        arguments, outputs = arguments - host, outputs - host_results
        alias -= min(donated, host_results, alias)
    peak = arguments + outputs - alias + temporary
    # XLA's CPU compiler does not report the share of the host.
    known_peak = peak if platform == "cpu" else device_peak(memory)
    return dict(zip(_SIZES, (arguments, outputs, alias, temporary, known_peak), strict=True))


def _donated(compiled: Any, args: Any) -> list[Any]:
    positional, _ = compiled.args_info
    flags = jax.tree.leaves(positional, is_leaf=lambda info: hasattr(info, "donated"))
    return [leaf for leaf, info in zip(jax.tree.leaves(args), flags, strict=True) if info.donated]


def _analysis(found: Any) -> Mapping[str, float]:
    """Normalize XLA's analysis: older versions return a list, some platforms None."""
    if isinstance(found, list | tuple):
        found = found[0] if found else None
    return found or {}


def _scaled(measured: float | None, once: float, total: float, devices: int) -> float:
    """Correct XLA's figure for a device, which counts the body of a loop once, for the further iterations.

    Their operations are divided among the devices, unless XLA's figure shows that the work is not divided. If XLA does
    not know the cost of a library call (a matrix product on a GPU), the figure of the traced program is used.
    """
    if not measured or measured < 0.2 * once / devices:
        return total / devices
    return measured + (total - once) / (1 if measured > 0.9 * once else devices)
