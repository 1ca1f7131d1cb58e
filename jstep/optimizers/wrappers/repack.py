"""States between formats: float32 slots, `compact` and `master_weights`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.block_codes import blocks_between
from jstep.core.meshes import on_any_mesh
from jstep.core.placement import is_shape, on_devices
from jstep.core.slot_roles import HALVES, Role, roles_in, roles_of
from jstep.core.trees import Optimizer, Slots, require_optimizer
from jstep.optimizers.wrappers.compact_update import nearest
from jstep.state.train_state import MODEL_STATE, TrainState, masters_of, require_state, step_of, values_of


@on_any_mesh
def repack(state: TrainState, old_optimizer: Optimizer, new_optimizer: Optimizer) -> TrainState:
    """Convert a state between the formats of an optimizer: float32 slots, `compact`, `master_weights`.

    Args:
        state: A state of the old optimizer, for example one that was restored from its checkpoint.
        old_optimizer: The optimizer that the state was created with.
        new_optimizer: The same optimizer with or without `compact`, with another `keep`, `min_size` or `block`, or in
            `master_weights`.

    Returns:
        A state of the new optimizer at the same step, with the dtypes of the parameters. Masters go into parameters and
        remainders, and back. Codes are rounded to nearest.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The state is not one of the old optimizer, or the new one has other slots.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> old = jstep.master_weights(jstep.adamw(1e-3))
        >>> new = jstep.compact(jstep.adamw(1e-3))
        >>> state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, old)
        >>> sorted(jstep.repack(state, old, new).slots)
        ['m', 'm/scale', 'remainder', 'start_step', 'v', 'v/scale']
    """
    for argument, one in (("old_optimizer", old_optimizer), ("new_optimizer", new_optimizer)):
        require_optimizer(argument, one)
    if any(map(is_shape, jax.tree.leaves(require_state(state)))):
        return jax.eval_shape(lambda state: repack(state, old_optimizer, new_optimizer), state)
    others = {MODEL_STATE: state.slots[MODEL_STATE]} if MODEL_STATE in state.slots else {}
    held = {name: on_devices(tree) for name, tree in state.slots.items() if name not in others}
    _check("old_optimizer", held, _shapes(state, old_optimizer))
    known = TrainState(state.params, held, state.global_step, roles=roles_of(old_optimizer, state.params).of_state())
    old, treedef = roles_in(known), trees.structure(state.params)
    masters = jax.tree.leaves(masters_of(known))
    for name in old.of(Role.MASTER):
        kept = trees.flatten_like(state.params, held[name], f"slot {name!r}")
        masters = [p if master is None else master for p, master in zip(masters, kept, strict=True)]

    wanted, roles = _shapes(state, new_optimizer), roles_of(new_optimizer, state.params)
    leaves = [x.astype(p.dtype) for x, p in zip(masters, jax.tree.leaves(state.params), strict=True)]
    slots: Slots = {}
    for name in (n for n in wanted if n not in roles.halves.values()):
        if roles[name] not in (Role.MASTER, Role.REMAINDER):
            made = values_of(known, name) if name in held else None
            slots |= _stored(name, made, wanted, roles.halves.get(name), state.params)
            continue
        found = trees.flatten_like(state.params, wanted[name], f"slot {name!r}")
        for i, like in enumerate(found):
            if like is not None and roles[name] is Role.REMAINDER:
                leaves[i], found[i] = nearest(masters[i].astype(jnp.float32), None, None)
            elif like is not None:
                found[i] = jnp.array(masters[i], like.dtype, copy=True)
        slots[name] = treedef.unflatten(found)
    own = {name for name in held if old.get(name) not in (*HALVES, Role.MASTER)}
    _check("new_optimizer", slots | {name: held[name] for name in own - slots.keys()}, wanted)
    return TrainState(treedef.unflatten(leaves), slots | others, state.global_step, roles=roles.of_state())


def _shapes(state: TrainState, optimizer: Optimizer) -> Slots:
    return jax.eval_shape(lambda params, step: dict(optimizer.init(params, step)), state.params, step_of(state))


def _check(argument: str, have: Slots, wanted: Slots) -> None:
    kinds = [{p: (np.shape(x), str(x.dtype)) for p, x in trees.leaves_with_paths(tree)} for tree in (have, wanted)]
    differing = sorted(path for path in {**kinds[0], **kinds[1]} if kinds[0].get(path) != kinds[1].get(path))
    if differing:
        raise ValueError(
            f"{argument}: must be the optimizer of the state, with or without jstep.compact or jstep.master_weights; "
            f"slots differ at {differing[:5]}, where the state has {kinds[0].get(differing[0])} and the optimizer "
            f"{kinds[1].get(differing[0])}"
        )


def _stored(name: str, tree: Any, wanted: Slots, half: str | None, params: Any) -> Slots:
    """A slot in the new format: its values in the dtype that is wanted, or both halves."""
    fits = tree is not None and trees.structure(tree) == trees.structure(wanted[name])
    if not fits or half is None:
        return {name: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, wanted[name])} if fits else {}
    tops, codes, halves = (trees.flatten_like(params, one, name) for one in (tree, wanted[name], wanted[half]))
    for i, like in enumerate(halves):
        if like is not None:
            blocks = blocks_between(codes[i].shape, like.shape)
            dtype = None if codes[i].dtype == jnp.bfloat16 else codes[i].dtype
            tops[i], halves[i] = nearest(tops[i].astype(jnp.float32), blocks, dtype)
    treedef = trees.structure(params)
    return {name: treedef.unflatten(tops), half: treedef.unflatten(halves)}
