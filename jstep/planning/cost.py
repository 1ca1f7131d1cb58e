"""The cost of a train step before it runs, by XLA's own analyses: operations, memory, and whether it fits."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, format_bytes, format_list, format_scaled
from jstep.core.device_values import arguments_from_host
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

    Figures that the compiler does not report are None, as are most of those of a program that does not fit.

    Attributes:
        flops: Floating-point operations. Loops count as often as they run, or once if that depends on values. Those of
            `estimated` operations are those of the usual algorithms, those of `uncounted` ones are not included.
        bytes_accessed: Bytes read and written by all operations, as estimated by XLA.
        params_bytes: Bytes of the parameters.
        slots_bytes: Bytes of the slots (the optimizer state), without those in host memory.
        argument_bytes: Bytes of all arguments, state and batch, without those in host memory.
        output_bytes: Bytes of all results, without those in host memory.
        alias_bytes: Bytes of the results that reuse the memory of donated arguments.
        temp_bytes: Bytes of the temporaries.
        peak_bytes: Peak memory, or what the program would need: arguments, results and temporaries, without aliased
            results and host memory.
        compile_seconds: Time of the compilation, in seconds.
        devices: Number of devices that the step runs on.
        memory_bytes: Device memory available to programs; None if unknown. JAX's share of a compile-only GPU is 0.75.
        loops_unknown: Number of loops whose length depends on values.
        estimated: Names of factorizations and solves (`eigh`, `svd`, `qr`, `cholesky`, `lu`, ...), which libraries
            compute, so that XLA does not report their operations.
        uncounted: Names of operations whose work is unknown: callbacks, and kernels without a cost estimate.
        host_bytes: Bytes per device of the arguments in host memory (`shard_state(..., slots_memory="pinned_host")`).
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
        return f"a step {where}" if self.topology is None else f"a step {where}, {self.topology} (compiled, not run)"

    def _rows(self) -> list[tuple[str, str]]:
        unknown = f", {self.loops_unknown} loops of unknown length counted once" if self.loops_unknown else ""
        if self.estimated:
            unknown += f", estimated for {', '.join(self.estimated)}"
        if self.uncounted:
            unknown += f", not counted: {', '.join(self.uncounted)}"
        verdict = ""
        if self.memory_bytes is not None:
            problem = ": it does not fit" if self.fits is False else ""
            verdict = f" of {format_bytes(self.memory_bytes, digits=4)}{problem}"
        rows = [
            ("operations", _UNKNOWN if self.flops is None else format_scaled(self.flops, "FLOP") + unknown),
            ("memory traffic", _size(self.bytes_accessed)),
            ("parameters", format_bytes(self.params_bytes)),
            ("slots", format_bytes(self.slots_bytes)),
            ("arguments", _size(self.argument_bytes)),
            ("results", f"{_size(self.output_bytes)}, {_size(self.alias_bytes)} of it aliased to arguments"),
            ("temporaries", _size(self.temp_bytes)),
            ("at its peak", _size(self.peak_bytes) + verdict),
            *([("on the host", format_bytes(self.host_bytes))] if self.host_bytes else []),
            ("compiled in", f"{self.compile_seconds:.1f} s"),
        ]
        if self.output_bytes is None:
            rows = [row for row in rows if row[1] != _UNKNOWN and row[0] != "results"]
        return rows

    def _notes(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.warnings]


@shortens_tracebacks
def cost(train_step: Callable[..., Any], state: Tree, *args: Any, topology: str | None = None) -> Cost:
    """Return the cost of a step on each device: operations and memory. The step is not run.

    The step is compiled for its arguments: arrays or `jax.ShapeDtypeStruct`s, so the model need not fit into memory.

    Args:
        train_step: The result of `minimize` or `scan_steps`, or any function `(state, *args)`.
        state: The state, or its shapes (`jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))`).
        *args: The batch, or its shapes. On a mesh, place it as `train` does with `batch_sharding`, for instance by
            `shard_batch`.
        topology: The name of a topology to compile for, with a replicated state and the rows of the batch split over
            all devices. For other layouts, place state and batch on the mesh of `jstep.topology(name)`.

    Returns:
        A `Cost`, whose `str()` is a table. If the step does not fit into memory, `fits` is False.

    Raises:
        TypeError: `train_step` is not a function, or `state` is not a TrainState.
        ValueError: State and batch are on different devices (JAX's error); or, with a `topology`, they are on a mesh
            already or the rows do not divide over its devices.
        ImportError: The compiler for the topology is not installed, or does not load.

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
    args = arguments_from_host(args)
    as_state(state)
    if topology is not None:
        state, args = topologies.on_topology(topology, train_step, state, args)
    state, args = topologies.shapes_if_elsewhere(state, args)
    name = topologies.topology_name(device_of((state, args)))
    doing = "cost: compiling the step" if name is None else f"cost: compiling the step for {name}"
    with using_mesh(mesh_of((state, args))), slow(doing):
        try:
            return compile_cost(train_step if hasattr(train_step, "lower") else jax.jit(train_step), state, args)
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
    device, devices = device_of((state, args)), device_count((state, args))
    name, memory = topologies.topology_name(device), topologies.device_memory(device)
    start = time.perf_counter()
    lowered = step.lower(state, *args)
    try:
        compiled, needed = lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(error)
        if needed is None:
            raise
    host = bytes_per_device((state, args), on_host=True)
    factorizations = work.factorizations.total()
    figures: dict[str, Any] = {
        "params_bytes": bytes_per_device(state.params, on_host=False),
        "slots_bytes": bytes_per_device(state.slots, on_host=False),
        "host_bytes": host,
        "compile_seconds": time.perf_counter() - start,
        "devices": devices,
        "loops_unknown": work.unknown,
        "estimated": tuple(sorted(work.factorizations)),
        "uncounted": tuple(sorted(work.uncounted)),
        "topology": None if name is None else str(name),
    }
    if needed is not None:
        figures |= dict.fromkeys((*_SIZES, "bytes_accessed"))
        figures |= {
            "flops": work.all / devices + factorizations,
            "peak_bytes": needed[0],
            "memory_bytes": memory or needed[1],
        }
        warned = (*_unplaced_batch(state, args), *_unplaced_activations(state, args, traced))
        return Cost(**figures, fits=False, warnings=warned)
    sizes = _memory(compiled, state, args, host, device.platform)
    peak = sizes["peak_bytes"]
    analysis = compiled.cost_analysis() or {}
    traffic = analysis.get("bytes accessed")
    return Cost(
        **figures,
        **sizes,
        flops=_scaled(analysis.get("flops"), work.once, work.all, devices) + factorizations,
        # The traced program gives the operations, but not which results XLA fuses and so never writes.
        bytes_accessed=None if traffic is None else _scaled(traffic, work.once_bytes, work.all_bytes, devices),
        warnings=(*_unplaced_batch(state, args), *_undonated(compiled, state), *_split_blocks(state)),
        memory_bytes=memory,
        fits=None if memory is None or peak is None else peak <= memory,
    )


def _needed(error: Exception) -> tuple[int, int] | None:
    match = _TOO_LARGE.search(str(error))
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2]]), int(float(match[3]) * _UNITS[match[4]])


def _memory(compiled: Any, state: TrainState, args: tuple[Any, ...], host: int, platform: str) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    figures = _figures(memory, "")
    if figures is None:
        return dict.fromkeys(_SIZES)
    arguments, outputs, alias, temporary = figures
    # XLA's CPU compiler does not count them separately.
    if host and not getattr(memory, "host_argument_size_in_bytes", 0):
        host_results = bytes_per_device(compiled.out_info, on_host=True)
        pairs = zip(jax.tree.leaves((state, *args)), _are_donated(compiled), strict=True)
        donated = bytes_per_device([leaf for leaf, is_donated in pairs if is_donated], on_host=True)
        arguments, outputs = arguments - host, outputs - host_results
        alias -= min(donated, host_results, alias)
    # XLA's CPU compiler does not report the share of the host.
    peak = arguments + outputs - alias + temporary if platform == "cpu" else device_peak(memory)
    return dict(zip(_SIZES, (arguments, outputs, alias, temporary, peak), strict=True))


def _scaled(measured: float | None, once: float, total: float, devices: int) -> float:
    """XLA's figure for a device, corrected for loops, whose bodies it counts once."""
    if not measured or measured < 0.2 * once / devices:
        # XLA does not know the cost of a library call (a matrix product on a GPU): use the traced program's figure.
        return total / devices
    # The further iterations are divided among the devices, unless XLA's figure shows that the work is not divided.
    return measured + (total - once) / (1 if measured > 0.9 * once else devices)


# Memory of a program: the bytes of its arguments, and its peak from the memory analysis of XLA's compilers.

PARTS = ("argument", "output", "alias", "temp")


def device_peak(memory_analysis: object) -> int | None:
    """Return the peak memory of a program on each device, without host memory; None if it is not reported.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.zeros(256)).compile()
        >>> device_peak(compiled.memory_analysis())
        2048
    """
    # `peak_memory_in_bytes` counts all memories: device memory, the memory inside a TPU core (128 MiB of VMEM on v5e)
    # and host memory in full. Arguments + results − aliased + temporaries counts device memory only, but some
    # temporaries twice. Both are upper bounds; the smaller one was within 2 % of what the TPU compiler allocates, for
    # programs of 50 MB to 12 GB. Newer versions of JAX report that figure directly. XLA's CPU compiler does not count
    # host memory separately; the caller subtracts it.
    device, host = (_figures(memory_analysis, prefix) for prefix in ("", "host_"))
    if device is None:
        return None
    arguments, results, aliased, temporaries = device
    bounds = [arguments + results - aliased + temporaries]
    allocated = getattr(memory_analysis, "total_allocation_bytes", 0)
    live = getattr(memory_analysis, "peak_memory_in_bytes", 0)
    if allocated > 0:
        bounds.append(allocated)
    elif live > 0 and host is not None:
        # Host temporaries may be freed before the peak; host arguments and results exist from start to end.
        bounds.append(live - (host[0] + host[1] - host[2]))
    return min(bounds)


def _figures(memory_analysis: object, prefix: str) -> list[int] | None:
    figures: list[Any] = [getattr(memory_analysis, f"{prefix}{part}_size_in_bytes", None) for part in PARTS]
    return None if None in figures else figures


def bytes_per_device(tree: Tree, *, on_host: bool | None = None) -> int:
    """The bytes per device of the leaves of a tree, perhaps only in host or in device memory."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = np.shape(leaf)
        dtype = getattr(leaf, "dtype", None)
        sharding = sharding_of(leaf)
        if dtype is None or on_host not in (None, sharding is not None and is_of_host(sharding)):
            continue
        total += math.prod(shape if sharding is None else sharding.shard_shape(shape)) * dtype.itemsize
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
        f"the batch is not on the mesh of the state, so each of its {mesh.size} devices gets all of it, as in train "
        "without batch_sharding; place it, such as jstep.cost(train_step, state, jstep.shard_batch(batch, mesh))"
    ]


def _unplaced_activations(state: TrainState, args: Sequence[Any], traced: object) -> list[str]:
    axis = next((axis for leaf in jax.tree.leaves(args) for axis in _spec(leaf) if axis is not None), None)
    if axis is None or is_annotated(traced) or not any(_is_split(leaf, axis) for leaf in jax.tree.leaves(state.params)):
        return []
    spec = f'"{axis}"' if isinstance(axis, str) else repr(axis).replace("'", '"')
    return [
        "parameters are split over the axis of the batch, and the loss does not place its activations; if XLA reshards "
        "them, temporaries grow with the number of devices. Keep their rows on their devices with, after the "
        f"embedding, x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P({spec})))"
    ]


def _is_split(leaf: Any, axis: object) -> bool:
    axes = set(mesh_axes_of(axis))
    return np.ndim(leaf) >= 2 and any(axes & set(mesh_axes_of(part)) for part in _spec(leaf))


def _spec(leaf: object) -> tuple[Any, ...]:
    sharding = sharding_of(leaf)
    return dims_of(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else ()


def _undonated(compiled: Any, state: TrainState) -> list[str]:
    # A step returns a new state: a tree of the same structure, alone or as the first element of a tuple.
    result, structure = compiled.out_info, jax.tree.structure(state)
    if structure not in map(jax.tree.structure, [result, *(result[:1] if isinstance(result, tuple) else ())]):
        return []
    pairs = zip(jax.tree.leaves(state), _are_donated(compiled), strict=False)
    left = bytes_per_device([leaf for leaf, is_donated in pairs if not is_donated])
    if not left:
        return []
    return [
        f"{format_bytes(left)} of the state is not donated, so that the old and the new state are both in memory: use "
        "jstep.minimize(..., donate=True) or jax.jit(step, donate_argnums=0)"
    ]


def _split_blocks(state: TrainState) -> list[str]:
    split = []
    for slot, half in roles_in(state).halves.items():
        both = (trees.flatten_like(state.params, state.slots[name], name) for name in (slot, half))
        for path, codes, scales in zip(trees.leaf_paths(state.params), *both, strict=True):
            if scales is None or (sharding := sharding_of(codes)) is None:
                continue
            axis, size = blocks_between(codes.shape, scales.shape)
            if sharding.shard_shape(codes.shape)[axis] % size:
                split.append(f"{slot}/{path}")
    if not split:
        return []
    return [
        f"blocks of slots are split between devices ({format_list(split)}), which exchange codes for common scales in "
        "each update: split these parameters along another axis, or give compact a smaller block"
    ]
