"""Compiling a step and collecting XLA's figures, including for a step that does not fit."""

import logging
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.flops import work_of
from jstep.core.placement import device_count, device_of, is_of_host, sharding_of
from jstep.core.programs import body_of
from jstep.state import TrainState
from jstep.tools.collectives import collectives_of
from jstep.tools.cost_warnings import unplaced_batch, warnings_of, warnings_without_a_program
from jstep.tools.device_memory import device_peak
from jstep.tools.recomputed import recomputes
from jstep.topologies.compilers import name_of
from jstep.topologies.devices import memory_of

_logger = logging.getLogger("jstep")
_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT]?)B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)B?\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compiled_cost(step: Any, state: TrainState, args: tuple[Any, ...]) -> dict[str, Any]:
    """Compile a step and return the fields of its `Cost`."""
    traced = _traced(step, state, args)
    work = work_of(body_of(traced))
    device, devices = device_of((state, args)), device_count((state, args))
    name = name_of(device)
    start = time.perf_counter()
    lowered = step.lower(state, *args)
    if name is not None:
        _logger.info("Compiling for %s, which can take minutes.", name)
    try:
        compiled = _compiled(lowered, is_there=name is None)
        needed = None
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(error)
        if needed is None:
            raise
    seconds = time.perf_counter() - start
    host = _bytes((state, args), on_host=True)
    memory = memory_of(device)
    known = {
        "params_bytes": _bytes(state.params),
        "slots_bytes": _bytes(state.slots),
        "host_bytes": host,
        "compile_seconds": seconds,
        "devices": devices,
        "loops_unknown": work.unknown,
        "topology": None if name is None else str(name),
    }
    if needed is not None:
        missing = ("bytes_accessed", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "collectives")
        needs = {
            "flops": work.all / devices,
            "peak_bytes": needed[0],
            "memory_bytes": memory or needed[1],
            "fits": False,
        }
        found = (*unplaced_batch(state, args), *warnings_without_a_program(state, args, traced))
        return known | dict.fromkeys(missing) | needs | {"warnings": found}
    figures = _memory(compiled, state, args, host, device.platform)
    peak = figures["peak_bytes"]
    analysis, text = _analysis(compiled.cost_analysis()), compiled.as_text()
    traffic = analysis.get("bytes accessed")
    return (
        known
        | figures
        | {
            "flops": _scaled(analysis.get("flops"), work.once, work.all, devices),
            # The traced program gives the operations, but not which results XLA fuses and so never writes.
            "bytes_accessed": None if traffic is None else _scaled(traffic, work.once_bytes, work.all_bytes, devices),
            "collectives": collectives_of(text),
            "recomputes": recomputes(text),
            "warnings": (*unplaced_batch(state, args), *warnings_of(text, state, args, traced, compiled.out_info)),
            "memory_bytes": memory,
            "fits": None if memory is None or peak is None else peak <= memory,
        }
    )


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
        return dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes"))
    arguments, outputs, alias, temporary = (
        int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias", "temp")
    )
    # XLA's CPU compiler does not count them separately.
    if host and not getattr(memory, "host_argument_size_in_bytes", 0):
        host_results = _bytes(compiled.out_info, on_host=True)
        donated = sum(_bytes(leaf, on_host=True) for leaf in _donated(compiled, (state, *args)))
        arguments, outputs = arguments - host, outputs - host_results
        alias -= min(donated, host_results, alias)
    peak = arguments + outputs - alias + temporary
    return {
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "alias_bytes": alias,
        "temp_bytes": temporary,
        # XLA's CPU compiler does not report the share of the host.
        "peak_bytes": peak if platform == "cpu" else device_peak(memory),
    }


def _donated(compiled: Any, args: Any) -> list[Any]:
    positional, _ = compiled.args_info
    flags = jax.tree.leaves(positional, is_leaf=lambda info: hasattr(info, "donated"))
    return [leaf for leaf, info in zip(jax.tree.leaves(args), flags, strict=True) if info.donated]


def _traced(step: Any, state: Any, args: tuple[Any, ...]) -> Any:
    if hasattr(step, "trace"):
        return step.trace(state, *args).jaxpr
    return jax.make_jaxpr(step)(state, *args)


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


def _bytes(tree: Any, *, on_host: bool = False) -> int:
    """Return the bytes per device of the leaves of a tree that are in device memory, or in host memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        sharding = sharding_of(leaf)
        if dtype is None or (sharding is not None and is_of_host(sharding)) != on_host:
            continue
        if sharding is not None:
            shape = sharding.shard_shape(shape)
        here = jax.ShapeDtypeStruct(shape, dtype)
        if trees.is_key(here):
            here = jax.eval_shape(jax.random.key_data, here)
        count = 1
        for length in here.shape:
            count *= length
        total += count * here.dtype.itemsize
    return total
