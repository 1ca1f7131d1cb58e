"""Sharding of a training state over a mesh."""

from typing import Any

import jax

from jstep.core.meshes import internal_transfers, require_mesh
from jstep.core.placement import checked_memory
from jstep.core.slot_roles import roles_in
from jstep.sharding.layout import ParamSpecs, in_memory, put, state_shardings
from jstep.state.train_state import TrainState, require_state


def shard_state(
    state: TrainState,
    mesh: Any,
    param_specs: ParamSpecs = None,
    slot_axis: Any = None,
    *,
    slots_memory: str | None = None,
) -> TrainState:
    """Shard a state over a mesh. Compiled steps preserve the sharding of every leaf.

    Args:
        state: Any state; its arrays are not modified. To create a state too large for one device, pass the mesh to
            `TrainState.create` instead. For a state of shapes, from `jax.eval_shape`, the result has shapes with
            shardings: a target for `Saver.restore`.
        mesh: A `jax.sharding.Mesh`. The state keeps its axis types, Explicit or Auto.
        param_specs: Sharding of the parameters: one `PartitionSpec` for all, a tree of them (or a prefix of one), rules
            `[(glob, spec), …]` of which the first match applies, or a function `(path, leaf) -> spec`. Other
            parameters are replicated.
        slot_axis: A mesh axis over which the slots of replicated parameters are split (ZeRO-1). Other slots are
            sharded like their parameters; scalars and model_state are replicated.
        slots_memory: The memory kind of slots with one dimension or more: `"pinned_host"` for host memory, from which
            each step loads them and to which it writes them back; None or `"device"` for device memory.

    Returns:
        A new state.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: A spec names an axis that is not in the mesh, or does not divide its leaf (names the path); or the
            devices do not have that memory kind.

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
    mesh = require_mesh(mesh)
    params, slots, everywhere = state_shardings(
        state.params, state.slots, mesh, param_specs, slot_axis, roles_in(state)
    )
    slots = in_memory(slots, state.slots, checked_memory(slots_memory, mesh, "slots_memory"))
    step: Any = None if state.global_step is None else everywhere
    with internal_transfers():
        return jax.tree.map(put, state, state.replace(params=params, slots=slots, global_step=step))
