"""What a step takes, before it runs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jstep.core.checks import as_function
from jstep.core.meshes import mesh_of, using_mesh
from jstep.state import require_state
from jstep.tools import cost_table
from jstep.tools.collectives import Collective
from jstep.tools.compiled_cost import compiled_cost
from jstep.tools.on_topology import on_topology, refuse_other_devices


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step takes on each device.

    What the compiler does not say is None: of a program that does not fit, all that only a finished one has.

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
        peak_bytes: Arguments, results and temporaries, without what is taken over and what is on the host; of a program
            that does not fit, what it would need.
        collectives: Kind → (number, bytes) of what moves between devices, such as `all-reduce`.
        compile_seconds: How long it took to compile.
        devices: On how many devices the step runs.
        memory_bytes: What a device has for programs, None where nothing says. On GPUs that only compile it is 0.75 of
            the memory, JAX's default share.
        loops_unknown: How many loops have a length that depends on values.
        host_bytes: Of the arguments in the memory of the host (`shard_state(..., slots_memory="pinned_host")`), for
            each device.
        fits: Whether the peak is within the memory; None where one of the two is not known.
        topology: The name of the topology that was compiled for, None for devices of this machine.
        recomputes: Whether the compiler computes some things twice so that the program fits; None where not known.
        warnings: What is probably not meant, each with what mends it.
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
        return cost_table.text_of(self)

    def _repr_html_(self) -> str:
        return cost_table.html_of(self)


def cost(train_step: Callable[..., Any], state: Any, *args: Any, topology: str | None = None) -> Cost:
    """What a step takes on each device: operations, memory, what moves between devices. Nothing is run.

    It compiles the step for the shapes, dtypes and shardings of its arguments, which may be arrays or
    `jax.ShapeDtypeStruct`: a model that fits nowhere can be asked for. On a mesh of `jstep.topology` it compiles for
    TPUs or GPUs that are not there.

    Args:
        train_step: What `minimize` or `scan_steps` returned, or any function `(state, *args)`.
        state: The state, or its shapes (`jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))`).
        *args: The batch, or its shapes.
        topology: The name of a topology (see `jstep.topology`) to compile for data-parallel training: the state on
            every device, rows of the batch split over all. For any other layout place state and batch on its mesh.

    Returns:
        A `Cost`, whose `str()` is a table. Also of a step that does not fit into memory: then `fits` is False.

    Raises:
        TypeError: `train_step` is no function, or `state` no TrainState.
        ValueError: State and batch are on different devices; or with a `topology` they are on a mesh already, or the
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
