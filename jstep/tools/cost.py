"""Compute, memory and communication cost of a step, without running it."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jstep.core.checks import WIDTH, as_function, html_table, scaled, size
from jstep.core.devices import parsed
from jstep.core.meshes import mesh_of, using_mesh
from jstep.state.train_state import require_state
from jstep.tools.collectives import Collective
from jstep.tools.compiled_cost import compiled_cost
from jstep.tools.on_topology import on_topology, refuse_other_devices
from jstep.topologies.compilers import versions

_UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of a step on each device.

    Figures that the compiler does not report are None. For a program that does not fit, these are all figures of the
    compiled program.

    Attributes:
        flops: Floating-point operations. Loops count as often as they run; those whose length depends on values count
            once (see `loops_unknown`).
        bytes_accessed: Bytes read and written by all operations, as estimated by XLA; loops as above.
        params_bytes: Bytes of the parameters.
        slots_bytes: Bytes of the slots (the optimizer state), without those in host memory.
        argument_bytes: Bytes of all arguments, state and batch, without those in host memory.
        output_bytes: Bytes of all results, without those in host memory.
        alias_bytes: Bytes of the results that reuse the memory of donated arguments.
        temp_bytes: Bytes of the temporaries.
        peak_bytes: Peak memory: arguments, results and temporaries, without aliased results and host memory. For a
            program that does not fit, the memory that it would need.
        collectives: Kind → (number, bytes) of the collectives, such as `all-reduce`.
        compile_seconds: Compilation time in seconds.
        devices: Number of devices that the step runs on.
        memory_bytes: Device memory available to programs; None if unknown. For compile-only GPUs it is 0.75 of the
            memory, JAX's default share.
        loops_unknown: Number of loops whose length depends on values.
        host_bytes: Bytes per device of the arguments in host memory (`shard_state(..., slots_memory="pinned_host")`).
        fits: Whether peak memory is within the available memory; None if either is unknown.
        topology: The name of the topology that the step was compiled for; None for the devices of this machine.
        recomputes: Whether the compiler rematerializes some results so that the program fits; None if unknown.
        warnings: Likely mistakes, each with its remedy.
    """

    flops: float | None
    bytes_accessed: float | None
    params_bytes: int
    slots_bytes: int
    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    peak_bytes: int | None
    collectives: Mapping[str, Collective] | None
    compile_seconds: float
    devices: int = 1
    memory_bytes: int | None = None
    loops_unknown: int = 0
    host_bytes: int = 0
    fits: bool | None = None
    topology: str | None = None
    recomputes: bool | None = None
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = _rows(self)
        width = max(len(name) for name, _ in rows)
        lines = [_title(self), *(f"  {name:<{width}}  {text}" for name, text in rows)]
        for warning in self.warnings:
            lines += textwrap.wrap(
                f"warning: {warning}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(_title(self), _rows(self), notes=[f"warning: {warning}" for warning in self.warnings])


def cost(train_step: Callable[..., Any], state: Any, *args: Any, topology: str | None = None) -> Cost:
    """Return the cost of a step on each device: operations, memory and collectives. The step is not run.

    The step is compiled for the shapes, dtypes and shardings of its arguments. They may be arrays or
    `jax.ShapeDtypeStruct`s, so the model need not fit into memory. On a mesh of `jstep.topology` the step is compiled
    for TPUs or GPUs that the machine does not have.

    Args:
        train_step: The result of `minimize` or `scan_steps`, or any function `(state, *args)`.
        state: The state, or its shapes (`jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))`).
        *args: The batch, or its shapes. On a mesh, place it as `train` does with `batch_sharding`, for instance by
            `shard_batch`.
        topology: The name of a topology (see `jstep.topology`) to compile for data-parallel training: the state is
            replicated and the rows of the batch are split over all devices. For other layouts, place state and batch on
            the mesh of the topology.

    Returns:
        A `Cost`, whose `str()` is a table. If the step does not fit into memory, `fits` is False.

    Raises:
        TypeError: `train_step` is not a function, or `state` is not a TrainState.
        ValueError: State and batch are on different devices; or, with a `topology`, they are on a mesh already or the
            rows do not divide over its devices.
        ImportError: The compiler for the topology is not installed.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.momentum(0.1, 0.9)
        >>> train_step = jstep.minimize(lambda params, x: jnp.sum((x @ params["w"]) ** 2), optimizer)
        >>> state = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.zeros((512, 256))}, optimizer))
        >>> cost = jstep.cost(train_step, state, jax.ShapeDtypeStruct((64, 512), jnp.float32))
        >>> cost.params_bytes, cost.slots_bytes, cost.flops > 2 * 64 * 512 * 256 * 2
        (524288, 524288, True)
    """
    as_function(train_step, "train_step", "(state, *args) -> (state, metrics)")
    require_state(state)
    if topology is not None:
        state, args = on_topology(topology, train_step, state, args)
    state, args = refuse_other_devices(state, args)
    with using_mesh(mesh_of((state, args))):
        step = train_step if hasattr(train_step, "lower") else jax.jit(train_step)
        return Cost(**compiled_cost(step, state, args))


def _rows(cost: Cost) -> list[tuple[str, str]]:
    """Return the rows of the table of a `Cost`: name and figure."""
    unknown = f", {cost.loops_unknown} loops of unknown length counted once" if cost.loops_unknown else ""
    moved = None if cost.collectives is None else cost.collectives.items()
    rows = [
        ("operations", _UNKNOWN if cost.flops is None else scaled(cost.flops, "FLOP") + unknown),
        ("memory traffic", _size(cost.bytes_accessed)),
        ("parameters", size(cost.params_bytes)),
        ("slots", size(cost.slots_bytes)),
        ("arguments", _size(cost.argument_bytes)),
        ("results", f"{_size(cost.output_bytes)}, {_size(cost.alias_bytes)} of it aliased to arguments"),
        ("temporaries", _size(cost.temp_bytes)),
        ("at its peak", _size(cost.peak_bytes) + _verdict(cost)),
        *([("on the host", size(cost.host_bytes))] if cost.host_bytes else []),
        *([("between devices", _UNKNOWN)] if moved is None else []),
        *((kind, f"{one.number} × per step, {size(one.bytes)} in all") for kind, one in moved or ()),
        ("compiled in", f"{cost.compile_seconds:.1f} s"),
    ]
    if cost.output_bytes is None:
        rows = [row for row in rows if row[1] != _UNKNOWN and row[0] != "results"]
    return rows


def _title(cost: Cost) -> str:
    where = "on one device" if cost.devices == 1 else f"on each of {cost.devices} devices"
    if cost.topology is None:
        return f"a step {where}"
    by = ", ".join(f"{package} {version}" for package, version in versions(parsed(cost.topology).kind).items())
    return f"a step {where}, {cost.topology} (compiled, not run; {by})"


def _verdict(cost: Cost) -> str:
    if cost.memory_bytes is None:
        return ""
    fits = cost.fits
    if fits is None and cost.peak_bytes is not None:
        fits = cost.peak_bytes <= cost.memory_bytes
    verdict = ": it does not fit" if fits is False else ", recomputes to fit" if cost.recomputes else ""
    return f" of {size(cost.memory_bytes, digits=4)}{verdict}"


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else size(count)
