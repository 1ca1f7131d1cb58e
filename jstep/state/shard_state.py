"""One program over a mesh: where states and batches lie."""

from typing import Any

import jax

from jstep.core.contexts import internal_transfers
from jstep.core.memory import checked_memory
from jstep.core.meshes import require_mesh
from jstep.sharding.layout import ParamSpecs, in_memory, put, state_shardings
from jstep.state.require import require_state
from jstep.state.train_state import TrainState


def shard_state(
    state: TrainState,
    mesh: Any,
    param_specs: ParamSpecs = None,
    slot_axis: Any = None,
    *,
    slots_memory: str | None = None,
) -> TrainState:
    """The same state, sharded over a mesh. Compiled steps keep the sharding of every leaf.

    Args:
        state: Any state, whose arrays stay as they are. To make one that no single device could hold, give the mesh
            to `TrainState.create`. Of a state of shapes, from `jax.eval_shape`, come shapes with their shardings: a
            target for `Saver.restore`.
        mesh: A `jax.sharding.Mesh`. The state keeps the types of its axes, Explicit or Auto.
        param_specs: How parameters lie: a `PartitionSpec` for all, a tree of them (or a prefix of one), rules
            `[(glob, spec), …]` of which the first match counts, or a function `(path, leaf) -> spec`. What none
            speaks of is replicated.
        slot_axis: An axis of the mesh over which the slots of replicated parameters are split (ZeRO-1); other
            slots lie as their parameters do, scalars and model_state on every device.
        slots_memory: The memory that slots of one dimension or more are in: `"pinned_host"` for that of the host, from
            where a step brings them in and sends them back; None or `"device"` for that of the devices.

    Returns:
        A new state.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A spec names an axis that the mesh has not, or does not divide its leaf (names the path); or the
            devices do not have that memory.

    Example:
        >>> import jax, jstep
        >>> from jax.sharding import PartitionSpec as P
        >>> state = jstep.TrainState.create({"w": jax.numpy.ones((8, 4))}, jstep.adam())
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tuple(jstep.shard_state(state, mesh, [("w", P("data"))]).slots["m"]["w"].sharding.spec)
        ('data',)

    Source: Rajbhandari et al., "ZeRO" (2019), stage 1, for `slot_axis`.
    """
    require_state(state)
    params, slots, everywhere = state_shardings(state.params, state.slots, require_mesh(mesh), param_specs, slot_axis)
    slots = in_memory(slots, state.slots, checked_memory(slots_memory, mesh, "slots_memory"))
    step: Any = None if state.global_step is None else everywhere
    with internal_transfers():
        return jax.tree.map(put, state, TrainState(params, slots, step))
