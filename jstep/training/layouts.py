"""Shardings for values that are computed per parameter, such as gradients and updates."""

import jax
from jax.sharding import AxisType, NamedSharding

from jstep.core import trees
from jstep.core.placement import Layouts, parts_of, sharding_on_mesh, shardings_of
from jstep.state import TrainState


def layouts_of(state: TrainState) -> Layouts:
    """Map the path of each parameter on a mesh to its sharding, or to that of its most finely sharded slot.

    Under ZeRO-1, parameters are replicated and slots are sharded, and so are the values computed from them. Inside
    `jax.shard_map` the result is empty, because a device sees only its own shard.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return {}
    leaves, treedef = trees.flatten(state)
    known = shardings_of(state) or [sharding_on_mesh(leaf) for leaf in leaves]
    if not any(known):
        return {}
    indices = treedef.unflatten(range(len(leaves)))
    found: dict[str, NamedSharding] = {}
    params = trees.leaves_with_paths(state.params)
    like_params = [indices.slots[name] for name, tree in state.slots.items() if trees.is_like(state.params, tree)]
    for tree in (indices.params, *like_params):
        for (path, param), place in zip(params, trees.flatten_like(state.params, tree, "slots"), strict=True):
            sharding = None if place is None else known[place]
            if sharding is None or leaves[place].shape != param.shape:
                continue
            if path not in found or parts_of(sharding) > parts_of(found[path]):
                found[path] = sharding
    return found
