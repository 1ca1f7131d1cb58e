"""What a step takes, before it runs."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.memory import is_of_host
from jstep.core.meshes import mesh_of, setting
from jstep.state import TrainState, require_state
from jstep.tools.collectives import Collective, collectives_of
from jstep.tools.flops import work_of
from jstep.tools.nonfinite.sites import body_of
from jstep.tools.table import scaled, size


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step takes on each device.

    Attributes:
        flops: Floating-point operations, loops counted as often as they run (but those whose length depends on
            values, which count once: `loops_unknown`).
        bytes_accessed: Bytes read and written by all operations, by XLA's estimate; loops as above.
        params_bytes: Of the parameters.
        slots_bytes: Of the slots, without those in the memory of the host.
        argument_bytes: Of all arguments, state and batch, without those in the memory of the host.
        output_bytes: Of all results, without those in the memory of the host.
        alias_bytes: Of the results that take over the memory of arguments.
        temp_bytes: Of the temporaries.
        peak_bytes: Arguments, results and temporaries, without what is taken over and what is on the host.
        collectives: Kind → (number, bytes) of what moves between devices, such as `all-reduce`.
        compile_seconds: How long it took to compile.
        devices: On how many devices the step runs.
        memory_bytes: What a device has, None where it does not say.
        loops_unknown: How many loops have a length that depends on values.
        host_bytes: Of the arguments in the memory of the host (`shard_state(..., slots_memory="pinned_host")`), for
            each device.
    """

    flops: float
    bytes_accessed: float
    params_bytes: int
    slots_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    collectives: Mapping[str, Collective]
    compile_seconds: float
    devices: int = 1
    memory_bytes: int | None = None
    loops_unknown: int = 0
    host_bytes: int = 0

    def __str__(self) -> str:
        where = "on one device" if self.devices == 1 else f"on each of {self.devices} devices"
        of = "" if self.memory_bytes is None else f" of {size(self.memory_bytes)}"
        if self.memory_bytes is not None and self.peak_bytes > self.memory_bytes:
            of += ": it does not fit"
        unknown = f", {self.loops_unknown} loops of unknown length counted once" if self.loops_unknown else ""
        rows = [
            ("operations", scaled(self.flops, "FLOP") + unknown),
            ("memory traffic", size(self.bytes_accessed)),
            ("parameters", size(self.params_bytes)),
            ("slots", size(self.slots_bytes)),
            ("arguments", size(self.argument_bytes)),
            ("results", f"{size(self.output_bytes)}, {size(self.alias_bytes)} of it in the memory of arguments"),
            ("in between", size(self.temp_bytes)),
            ("at its peak", size(self.peak_bytes) + of),
            *([("on the host", size(self.host_bytes))] if self.host_bytes else []),
            *((kind, f"{one.number} × per step, {size(one.bytes)} in all") for kind, one in self.collectives.items()),
            ("compiled in", f"{self.compile_seconds:.1f} s"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"a step {where}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def cost(train_step: Callable[..., Any], state: Any, *args: Any) -> Cost:
    """What a step takes on each device: operations, memory, what moves between devices. Nothing is run.

    It compiles the step for the shapes, dtypes and shardings of its arguments, which may be arrays or
    `jax.ShapeDtypeStruct`: a model that fits nowhere can be asked for.

    Args:
        train_step: What `minimize` or `scan_steps` returned, or any function `(state, *args)`.
        state: The state, or its shapes (`jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))`).
        *args: The batch, or its shapes.

    Returns:
        A `Cost`, whose `str()` is a table.

    Raises:
        TypeError: `train_step` is no function, or `state` no TrainState.

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
    with setting(mesh_of((state, args))):
        return _cost(train_step if hasattr(train_step, "lower") else jax.jit(train_step), state, args)


def _cost(step: Any, state: TrainState, args: tuple[Any, ...]) -> Cost:
    work = work_of(body_of(_traced(step, state, args)))
    start = time.perf_counter()
    compiled = step.lower(state, *args).compile()
    seconds = time.perf_counter() - start
    analysis = _analysis(compiled.cost_analysis())
    memory = compiled.memory_analysis()
    arguments, outputs, alias, temporary = (
        int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias", "temp")
    )
    host, host_results = _bytes((state, args), on_host=True), _bytes(compiled.out_info, on_host=True)
    if host and not getattr(memory, "host_argument_size_in_bytes", 0):  # XLA's CPU compiler counts them all as one
        donated = sum(_bytes(leaf, on_host=True) for leaf in _donated(compiled, (state, *args)))
        arguments, outputs = arguments - host, outputs - host_results
        alias -= min(donated, host_results, alias)
    devices = _devices((state, args))
    return Cost(
        flops=_whole(analysis.get("flops"), work.once, work.all, devices),
        bytes_accessed=_whole(analysis.get("bytes accessed"), work.once_bytes, work.all_bytes, devices),
        params_bytes=_bytes(state.params),
        slots_bytes=_bytes(state.slots),
        argument_bytes=arguments,
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=temporary,
        peak_bytes=arguments + outputs - alias + temporary,
        collectives=collectives_of(compiled.as_text()),
        compile_seconds=seconds,
        devices=devices,
        memory_bytes=_limit(),
        loops_unknown=work.unknown,
        host_bytes=host,
    )


def _donated(compiled: Any, args: Any) -> list[Any]:
    positional, _ = compiled.args_info
    flags = jax.tree.leaves(positional, is_leaf=lambda info: hasattr(info, "donated"))
    return [leaf for leaf, info in zip(jax.tree.leaves(args), flags, strict=True) if info.donated]


def _traced(step: Any, state: Any, args: tuple[Any, ...]) -> Any:
    if hasattr(step, "trace"):
        return step.trace(state, *args).jaxpr
    return jax.make_jaxpr(step)(state, *args)


def _analysis(found: Any) -> Mapping[str, float]:
    """XLA's analysis; older versions gave a list, some platforms none."""
    if isinstance(found, list | tuple):
        found = found[0] if found else None
    return found or {}


def _whole(measured: float | None, once: float, total: float, devices: int) -> float:
    """XLA's figure for a device, which counts the inside of a loop once, and what the further iterations add.

    They are shared by the devices, unless XLA's figure says that nothing is. Where XLA does not know what a library
    computes for it (a product of matrices on a GPU), what was traced counts.
    """
    if not measured or measured < 0.2 * once / devices:
        return total / devices
    return measured + (total - once) / (1 if measured > 0.9 * once else devices)


def _devices(tree: Any) -> int:
    counts = [len(sharding.device_set) for leaf in jax.tree.leaves(tree) if (sharding := _sharding(leaf)) is not None]
    return max(counts, default=1)


def _sharding(leaf: Any) -> Any:
    return None if trees.is_traced(leaf) else getattr(leaf, "sharding", None)


def _bytes(tree: Any, *, on_host: bool = False) -> int:
    """The bytes of a tree for each device, by the shardings of its leaves: in its memory, or in that of the host."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        sharding = _sharding(leaf)
        if dtype is None or (sharding is not None and is_of_host(sharding)) != on_host:
            continue
        if sharding is not None:
            shape = sharding.shard_shape(shape)
        here = jax.ShapeDtypeStruct(shape, dtype)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            here = jax.eval_shape(jax.random.key_data, here)
        count = 1
        for length in here.shape:
            count *= length
        total += count * here.dtype.itemsize
    return total


def _limit() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit")
