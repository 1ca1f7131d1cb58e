"""A train step's cost before it runs, by XLA's analyses: operations, memory, whether it fits."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, format_bytes, format_list, format_scaled
from jstep.core.device_values import prepare_arguments
from jstep.core.jaxprs import body_of, is_annotated
from jstep.core.logs import slow
from jstep.core.meshes import dims_of, mesh_axes_of, mesh_of, using_mesh
from jstep.core.placement import device_count, device_of, is_of_host, sharding_of
from jstep.core.tables import Tabular
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.data.batch_placement import mesh_without_batch
from jstep.metering.work import work_of
from jstep.planning import topologies
from jstep.slots.compact_numbers import blocks_between
from jstep.slots.roles import roles_in
from jstep.state.train_state import TrainState, as_state
from jstep.training.explain import note_other_devices

_UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Cost(Tabular):
    """Cost of a step on each device.

    Figures that the compiler does not report are None, as are most of those of a program that does
    not fit.

    Attributes:
        flops: Floating-point operations. Loops count as often as they run, or once if that depends
            on values. Those of `estimated` operations are those of the usual algorithms, those of
            `uncounted` ones are not included.
        bytes_accessed: Bytes read and written by all operations, as estimated by XLA.
        params_bytes: Bytes of the parameters.
        slots_bytes: Bytes of the slots (the optimizer state), without those in host memory.
        argument_bytes: Bytes of all arguments, state and batch, without those in host memory.
        output_bytes: Bytes of all results, without those in host memory.
        alias_bytes: Bytes of the results that reuse the memory of donated arguments.
        temp_bytes: Bytes of the temporaries.
        peak_bytes: Peak memory, or what the program would need: arguments, results and temporaries,
            without aliased results and host memory.
        compile_seconds: Time of the compilation, in seconds.
        devices: Number of devices that the step runs on.
        memory_bytes: Device memory available to programs; None if unknown. JAX's share of a
            compile-only GPU is 0.75.
        loops_unknown: Number of loops whose length depends on values.
        estimated: Names of factorizations and solves (`eigh`, `svd`, `qr`, `cholesky`, `lu`, ...),
            which libraries compute, so that XLA does not report their operations.
        uncounted: Names of operations whose work is unknown: callbacks, and kernels without a cost
            estimate.
        host_bytes: Bytes per device of the arguments in host memory (`shard_state(...,
            slots_memory="pinned_host")`).
        fits: Whether peak memory is within the available memory; None if either is unknown.
        topology: The topology that the step was compiled for; None for the devices of this machine.
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
    compile_seconds: float
    devices: int = 1
    memory_bytes: int | None = None
    loops_unknown: int = 0
    estimated: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    host_bytes: int = 0
    fits: bool | None = None
    topology: str | None = None
    warnings: tuple[str, ...] = ()
    _left = 2

    def _title(self) -> str:
        where = "on one device" if self.devices == 1 else f"on each of {self.devices} devices"
        if self.topology is None:
            return f"a step {where}"
        return f"a step {where}, {self.topology} (compiled, not run)"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("operations", self._operations_text()),
            ("memory traffic", _size(self.bytes_accessed)),
            ("parameters", format_bytes(self.params_bytes)),
            ("slots", format_bytes(self.slots_bytes)),
            ("arguments", _size(self.argument_bytes)),
            (
                "results",
                f"{_size(self.output_bytes)}, {_size(self.alias_bytes)} of it aliased to arguments",
            ),
            ("temporaries", _size(self.temp_bytes)),
            ("at its peak", self._peak_text()),
        ]
        if self.host_bytes:
            rows.append(("on the host", format_bytes(self.host_bytes)))
        rows.append(("compiled in", f"{self.compile_seconds:.1f} s"))
        if self.output_bytes is None:
            # The program does not fit, so that most figures are unknown.
            rows = [(name, text) for name, text in rows if text != _UNKNOWN and name != "results"]
        return rows

    def _operations_text(self) -> str:
        if self.flops is None:
            return _UNKNOWN
        text = format_scaled(self.flops, "FLOP")
        if self.loops_unknown:
            text += f", {self.loops_unknown} loops of unknown length counted once"
        if self.estimated:
            text += f", estimated for {', '.join(self.estimated)}"
        if self.uncounted:
            text += f", not counted: {', '.join(self.uncounted)}"
        return text

    def _peak_text(self) -> str:
        text = _size(self.peak_bytes)
        if self.memory_bytes is not None:
            text += f" of {format_bytes(self.memory_bytes, digits=4)}"
            if self.fits is False:
                text += ": it does not fit"
        return text

    def _notes(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.warnings]


@shortens_tracebacks
def cost(
    train_step: Callable[..., Any], state: Tree, *args: Any, topology: str | None = None
) -> Cost:
    """Return the cost of a step on each device: operations and memory. The step is not run.

    The step is compiled for its arguments: arrays or `jax.ShapeDtypeStruct`s, so the model need not
    fit into memory.

    Args:
        train_step: The result of `minimize` or `scan_steps`, or any function `(state, *args)`.
        state: The state, or its shapes (`jax.eval_shape(lambda: jstep.TrainState.create(params,
            optimizer))`).
        *args: The batch, or its shapes. On a mesh, place it as `train` does with `batch_sharding`,
            for instance by `shard_batch`.
        topology: The name of a topology to compile for, with a replicated state and the rows of the
            batch split over all devices. For other layouts, place state and batch on the mesh of
            `jstep.topology(name)`.

    Returns:
        A `Cost`, whose `str()` is a table. If the step does not fit into memory, `fits` is False.

    Raises:
        TypeError: `train_step` is not a function, or `state` is not a TrainState.
        ValueError: State and batch are on different devices (JAX's error); or, with a `topology`,
            they are on a mesh already or the rows do not divide over its devices.
        ImportError: The compiler for the topology is not installed, or does not load.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.momentum(0.1, 0.9)
        >>> train_step = jstep.minimize(lambda p, x: jnp.sum((x @ p["w"]) ** 2), optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": jnp.zeros((512, 256))}, optimizer)
        >>> state = jax.eval_shape(make_state)
        >>> cost = jstep.cost(train_step, state, jax.ShapeDtypeStruct((64, 512), jnp.float32))
        >>> cost.params_bytes, cost.slots_bytes, cost.flops > 2 * 64 * 512 * 256 * 2
        (524288, 524288, True)
    """
    as_function(train_step, "train_step", "(state, *args) -> (state, metrics)")
    args = prepare_arguments(args)
    as_state(state)
    if topology is not None:
        state, args = topologies.place(topology, train_step, state, args)
    state, args = topologies.shapes_if_elsewhere(state, args)
    name = topologies.topology_name(device_of((state, args)))
    doing = "cost: compiling the step" if name is None else f"cost: compiling the step for {name}"
    step = train_step if hasattr(train_step, "lower") else jax.jit(train_step)
    with using_mesh(mesh_of((state, args))), slow(doing):
        try:
            return compile_cost(step, state, args)
        except ValueError as error:
            note_other_devices(error)
            raise


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)


# Compiling a step and collecting XLA's figures, including for a step that does not fit.

_TOO_LARGE = re.compile(r"\(([\d.]+)([KMGT]?)B?\) exceeds available \w+ \(([\d.]+)([KMGT]?)B?\)")
_SIZES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_cost(step: Any, state: TrainState, args: tuple[Any, ...]) -> Cost:
    traced = step.trace(state, *args).jaxpr
    work = work_of(body_of(traced))
    device = device_of((state, args))
    devices = device_count((state, args))
    name = topologies.topology_name(device)
    memory = topologies.device_memory(device)
    start = time.perf_counter()
    lowered = step.lower(state, *args)
    compiled: Any = None
    too_large: _TooLarge | None = None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        too_large = _parse_too_large(error)
        if too_large is None:
            raise
    host_bytes = bytes_per_device((state, args), host_memory=True)
    factorizations = work.factorizations.total()
    # What does not depend on whether the program fits.
    figures: dict[str, Any] = {
        "params_bytes": bytes_per_device(state.params, host_memory=False),
        "slots_bytes": bytes_per_device(state.slots, host_memory=False),
        "host_bytes": host_bytes,
        "compile_seconds": time.perf_counter() - start,
        "devices": devices,
        "loops_unknown": work.unknown,
        "estimated": tuple(sorted(work.factorizations)),
        "uncounted": tuple(sorted(work.uncounted)),
        "topology": None if name is None else str(name),
    }
    if too_large is not None:
        figures |= dict.fromkeys(_SIZES)
        figures["peak_bytes"] = too_large.needed
        return Cost(
            **figures,
            flops=work.flops / devices + factorizations,
            bytes_accessed=None,
            memory_bytes=memory or too_large.available,
            fits=False,
            warnings=(*_unplaced_batch(state, args), *_unplaced_activations(state, args, traced)),
        )
    sizes = _program_sizes(compiled, state, args, host_bytes, device.platform)
    peak = sizes["peak_bytes"]
    analysis = compiled.cost_analysis() or {}
    traffic = analysis.get("bytes accessed")
    if traffic is not None:
        # The traced program gives the operations, but not which results XLA fuses and never writes.
        traffic = _scaled(traffic, work.nbytes_once, work.nbytes, devices)
    return Cost(
        **figures,
        **sizes,
        flops=_scaled(analysis.get("flops"), work.flops_once, work.flops, devices) + factorizations,
        bytes_accessed=traffic,
        warnings=(
            *_unplaced_batch(state, args),
            *_undonated(compiled, state),
            *_split_blocks(state),
        ),
        memory_bytes=memory,
        fits=None if memory is None or peak is None else peak <= memory,
    )


class _TooLarge(NamedTuple):
    """The bytes that a program needs, and those that the compiler may use."""

    needed: int
    available: int


def _parse_too_large(error: Exception) -> _TooLarge | None:
    match = _TOO_LARGE.search(str(error))
    if match is None:
        return None
    needed, needed_unit, available, available_unit = match.groups()
    return _TooLarge(
        int(float(needed) * _UNITS[needed_unit]), int(float(available) * _UNITS[available_unit])
    )


def _program_sizes(
    compiled: Any, state: TrainState, args: tuple[Any, ...], host_bytes: int, platform: str
) -> dict[str, Any]:
    """Name in `_SIZES` → bytes of device memory; None for each if the compiler reports none."""
    memory = compiled.memory_analysis()
    reported = _reported_sizes(memory, "")
    if reported is None:
        return dict.fromkeys(_SIZES)
    arguments, outputs, alias, temporary = reported
    if host_bytes and not getattr(memory, "host_argument_size_in_bytes", 0):
        # XLA's CPU compiler does not count host memory separately.
        host_results = bytes_per_device(compiled.out_info, host_memory=True)
        pairs = zip(jax.tree.leaves((state, *args)), _are_donated(compiled), strict=True)
        donated = bytes_per_device(
            [leaf for leaf, is_donated in pairs if is_donated], host_memory=True
        )
        arguments -= host_bytes
        outputs -= host_results
        alias -= min(donated, host_results, alias)
    if platform == "cpu":
        # Not from `device_peak`: XLA's CPU compiler does not report the share of the host.
        peak: int | None = arguments + outputs - alias + temporary
    else:
        peak = device_peak(memory)
    return dict(zip(_SIZES, (arguments, outputs, alias, temporary, peak), strict=True))


def _scaled(measured: float | None, once: float, total: float, devices: int) -> float:
    """XLA's figure for a device, corrected for loops, whose bodies it counts once.

    Args:
        measured: XLA's figure; None or 0 if there is none.
        once: The traced program's figure for all devices, with each loop counted once.
        total: The same, with each loop counted as often as it runs.
        devices: The number of devices.
    """
    if not measured or measured < 0.2 * once / devices:
        # XLA does not know the cost of a library call (a matrix product on a GPU): use the traced
        # program's figure.
        return total / devices
    # The further iterations are divided among the devices, unless XLA's figure shows that the work
    # is not divided.
    is_divided = measured <= 0.9 * once
    return measured + (total - once) / (devices if is_divided else 1)


# Memory of a program: the bytes of its arguments, and its peak by the analysis of XLA's compilers.


def device_peak(memory_analysis: object) -> int | None:
    """Return a program's peak memory on each device, without host memory; None if not reported.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(256)).compile()
        >>> device_peak(compiled.memory_analysis())
        2048
    """
    # `peak_memory_in_bytes` counts all memories: device memory, the memory inside a TPU core (128
    # MiB of VMEM on v5e) and host memory in full. Arguments + results − aliased + temporaries
    # counts device memory only, but some temporaries twice. Both are upper bounds; the smaller one
    # was within 2 % of what the TPU compiler allocates, for programs of 50 MB to 12 GB. Newer
    # versions of JAX report that figure directly. XLA's CPU compiler does not count host memory
    # separately; the caller subtracts it.
    device = _reported_sizes(memory_analysis, "")
    if device is None:
        return None
    bounds = [device.argument + device.output - device.alias + device.temp]
    allocated = getattr(memory_analysis, "total_allocation_bytes", 0)
    live = getattr(memory_analysis, "peak_memory_in_bytes", 0)
    host = _reported_sizes(memory_analysis, "host_")
    if allocated > 0:
        bounds.append(allocated)
    elif live > 0 and host is not None:
        # Host temporaries may be freed before the peak; host arguments and results exist from start
        # to end.
        bounds.append(live - (host.argument + host.output - host.alias))
    return min(bounds)


class _ReportedSizes(NamedTuple):
    """Bytes of a program by field of XLA's memory analysis, such as `argument_size_in_bytes`."""

    argument: int
    output: int
    alias: int
    temp: int


def _reported_sizes(memory_analysis: object, prefix: str) -> _ReportedSizes | None:
    """Return the sizes in device memory, or with prefix "host_" in host memory, or None.

    None means that one is missing.
    """
    sizes: list[int] = []
    for part in _ReportedSizes._fields:
        size = getattr(memory_analysis, f"{prefix}{part}_size_in_bytes", None)
        if size is None:
            return None
        sizes.append(size)
    return _ReportedSizes(*sizes)


def bytes_per_device(tree: Tree, *, host_memory: bool | None = None) -> int:
    """The bytes per device of leaves; with True or False, of those in host or device memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            continue
        sharding = sharding_of(leaf)
        is_in_host_memory = sharding is not None and is_of_host(sharding)
        if host_memory is not None and host_memory != is_in_host_memory:
            continue
        shape = np.shape(leaf) if sharding is None else sharding.shard_shape(np.shape(leaf))
        total += math.prod(shape) * dtype.itemsize
    return total


def _are_donated(compiled: Any) -> list[bool]:
    infos = jax.tree.leaves(compiled.args_info[0], is_leaf=lambda info: hasattr(info, "donated"))
    return [info.donated for info in infos]


# Warnings about likely mistakes, each with its remedy.


def _unplaced_batch(state: Tree, args: Sequence[Any]) -> list[str]:
    mesh = mesh_without_batch(state, args)
    if mesh is None:
        return []
    return [
        f"the batch is not on the mesh of the state, so each of its {mesh.size} devices gets all "
        "of it, as in train without batch_sharding; place it, such as "
        "jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))"
    ]


def _unplaced_activations(state: TrainState, args: Sequence[Any], traced: object) -> list[str]:
    axis = _batch_axis(args)
    if axis is None or is_annotated(traced):
        return []
    if not any(_is_split(leaf, axis) for leaf in jax.tree.leaves(state.params)):
        return []
    spec = f'"{axis}"' if isinstance(axis, str) else repr(axis).replace("'", '"')
    return [
        "parameters are split over the axis of the batch, and the loss does not place its "
        "activations; if XLA reshards them, temporaries grow with the number of devices. Keep "
        "their rows on their devices with, after the embedding, "
        f"x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P({spec})))"
    ]


def _batch_axis(args: Sequence[Any]) -> Any:
    """Return the mesh axis, or tuple of axes, over which the batch is split; None if it is not."""
    for leaf in jax.tree.leaves(args):
        for axis in _spec(leaf):
            if axis is not None:
                return axis
    return None


def _is_split(leaf: Any, axis: object) -> bool:
    axes = set(mesh_axes_of(axis))
    return np.ndim(leaf) >= 2 and any(axes & set(mesh_axes_of(part)) for part in _spec(leaf))


def _spec(leaf: object) -> tuple[Any, ...]:
    sharding = sharding_of(leaf)
    return dims_of(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else ()


def _undonated(compiled: Any, state: TrainState) -> list[str]:
    # A step returns a new state: a tree of the same structure, alone or as the first of a tuple.
    result = compiled.out_info
    possible_states = [result, result[0]] if isinstance(result, tuple) and result else [result]
    if jax.tree.structure(state) not in map(jax.tree.structure, possible_states):
        return []
    # Not strict: the state is the first argument, and there are donations of all arguments.
    pairs = zip(jax.tree.leaves(state), _are_donated(compiled), strict=False)
    undonated = bytes_per_device([leaf for leaf, is_donated in pairs if not is_donated])
    if not undonated:
        return []
    return [
        f"{format_bytes(undonated)} of the state is not donated, so that the old and the new state "
        "are both in memory: use jstep.minimize(..., donate=True) or "
        "jax.jit(step, donate_argnums=0)"
    ]


def _split_blocks(state: TrainState) -> list[str]:
    split: list[str] = []
    paths = trees.leaf_paths(state.params)
    for codes_slot, scales_slot in roles_in(state).halves.items():
        codes_leaves = trees.flatten_like(state.params, state.slots[codes_slot], codes_slot)
        scales_leaves = trees.flatten_like(state.params, state.slots[scales_slot], scales_slot)
        for path, codes, scales in zip(paths, codes_leaves, scales_leaves, strict=True):
            sharding = sharding_of(codes)
            if scales is None or sharding is None:
                continue
            axis, size = blocks_between(codes.shape, scales.shape)
            if sharding.shard_shape(codes.shape)[axis] % size:
                split.append(f"{codes_slot}/{path}")
    if not split:
        return []
    return [
        f"blocks of slots are split between devices ({format_list(split)}), which exchange codes "
        "for common scales in each update: split these parameters along another axis, or give "
        "compact a smaller block"
    ]
