"""Compact storage between updates: slots as 8- or 16-bit codes, bfloat16 parameters with an 8-bit remainder.

The optimizer inside sees float32 parameters and slots. What it returns is stored block by block, except for blocks of
which no value has changed: these keep their bits, whatever the reason, such as a missing gradient, a guard that skipped
the update, or rows that a sparse gradient does not name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.block_codes import KINDS, SMALLEST_BLOCK, Blocks, blocks_of, split
from jstep.core.checks import as_int, shown
from jstep.core.selection import VarList
from jstep.core.slot_roles import Init, Labels, Role, Roles, labels_of, roles_of
from jstep.core.trees import Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.element import wide_updates
from jstep.optimizers.masks import mask, partial_params
from jstep.optimizers.match_gradients import missing_slot
from jstep.optimizers.parts import (
    EMPTY_CONTEXT,
    call_update,
    inner_context,
    is_guarded,
    makes_finished_updates,
    refuse_formats,
    slot_names,
)
from jstep.optimizers.wrap_optimizer import trained
from jstep.optimizers.wrappers.compact_update import REMAINDER, Stored, nearest, updated, value_of

SCALE = "scale"
LARGEST_BLOCK = 1024
_REFUSED = {
    "master_weights": "which keeps masters itself: leave master_weights out, and convert its states by jstep.repack",
    "stochastic_rounding": "which loses no update to rounding: leave stochastic_rounding out",
    "compact": "which stores everything compactly already: leave one of them out",
    "m_dtype": "which stores m in 8 bits: leave m_dtype (or the dtype of the Slot) out",
}


def compact(optimizer: Optimizer, *, keep: VarList = None, min_size: int = 4096, block: int = 128) -> Optimizer:
    """Compact storage between updates: AdamW with bfloat16 parameters takes 7 bytes a parameter instead of 16.

    Slots become codes with a scale for each block: averages in 8 bits, slow averages and sums in 16, squares in 8,
    copies of weights in 24. bfloat16 parameters get the next 8 bits of their float32 masters. Updates are computed in
    float32; what is stored is rounded up or down by a fixed sequence, so that errors cancel over the steps.

    Args:
        optimizer: The optimizer, with its clips and averages. Guards, `update_every`, `lookahead` and `with_projection`
            belong around the result.
        keep: The parameters whose slots stay as they are, in the grammar of `var_list`.
        min_size: The number of elements below which the slots of a parameter stay as they are.
        block: The number of elements with a common scale, a power of two from 32 to 1024. Blocks lie along the last
            axis that has a divisor from 32 to 2·block, and have the size of the one that is nearest to it; without such
            an axis the last axis is one block.

    Returns:
        An `Optimizer` with the same hyperparameters. Its slots keep names and shapes. A slot `m` that holds averages or
        squares has int8, int16 or uint8 codes, and a slot `m/scale`; a slot `z` that holds weights is bfloat16, and has
        a slot `z/remainder`. bfloat16 parameters have the slot `remainder`: each is its master, rounded half up; if you
        change it, the master follows, to half a unit in the last place. `get_slot` and other functions of a state
        return float32 values. Slots without a declared content (`Slot(holds=…)`), of other shapes, of float64
        parameters, ages, scalars and held values stay as they are.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `min_size` or `block` is out of its range; the optimizer contains `master_weights`,
            `stochastic_rounding`, `compact` or an `m_dtype`; or (at `init`) a parameter is float16, or an entry of
            `keep` matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.compact(jstep.adamw(1e-3))
        >>> state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
        >>> state.slots["m"]["w"].dtype, state.slots["v/scale"]["w"].shape, jstep.get_slot(state, "m", "w").dtype
        (dtype('int8'), (64, 1), dtype('float32'))
        >>> state
        TrainState(global_step=0, params: 8,192 numbers in 1 leaf (16 KiB), slots: m (8 KiB), m/scale (256 B), \
remainder (8 KiB), start_step (4 B), v (8 KiB), v/scale (256 B))

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021), for blocks; Zamirai et al.,
    "Revisiting BFloat16 Training" (2020), for split weights.
    """
    require_optimizer("optimizer", optimizer)
    refuse_formats("compact", optimizer, _REFUSED)
    least = as_int(min_size, "min_size", at_least=0)
    near = as_int(block, "block", at_least=SMALLEST_BLOCK)
    if near > LARGEST_BLOCK or near & (near - 1):
        raise ValueError(f"block={shown(block)}: must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}")
    kept = None if keep is None else mask("keep", keep)

    def blocks_in(params: Params) -> list[Blocks | None]:
        leaves = jax.tree.leaves(params)
        stay = kept(params) if kept and leaves else [False] * len(leaves)
        return [None if flag else _blocks(leaf, least, near) for leaf, flag in zip(leaves, stay, strict=True)]

    def roles(params: Params) -> Roles:
        inner, own, halves = roles_of(optimizer, params), dict[str, Role | None](), dict[str, str]()
        if any(blocks_in(params)):
            for name, what in inner.holds.items():
                halves[name] = f"{name}/{REMAINDER if what == 'weight' else SCALE}"
                own[halves[name]] = Role.REMAINDER if what == "weight" else Role.SCALES
        if any(p is not None and p.dtype == jnp.bfloat16 for p in _trained_leaves(optimizer, params)):
            own[REMAINDER] = Role.REMAINDER
        return inner.joined(Roles(own, halves=halves, formats=("compact",)))

    def init(params: Params, global_step: Step = 0) -> Slots:
        owned = _trained_leaves(optimizer, params)
        for path, p in zip(trees.paths_of(params), owned, strict=True):
            if p is not None and p.dtype == jnp.float16:
                raise ValueError(
                    f"params: {trees.quoted(path)} is float16, whose range compact cannot extend: must be bfloat16 or "
                    "float32; cast it, or use jstep.master_weights"
                )
        lows = [None if p is None or p.dtype != jnp.bfloat16 else jnp.zeros_like(p, jnp.int8) for p in owned]
        leaves, treedef = trees.flatten(params)
        with partial_params(params):
            fresh = optimizer.init(treedef.unflatten(map(value_of, leaves, lows)), global_step)
        known = roles(params)
        fresh |= {REMAINDER: treedef.unflatten(lows)} if REMAINDER in known else {}
        return fresh | _first_slots(fresh, params, known, blocks_in(params))

    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        known = roles(params)
        for name in (*known.halves, *known.halves.values(), *([REMAINDER] if REMAINDER in known else [])):
            if name not in slots:
                raise missing_slot(name, slots)
        names = slot_names(optimizer, params)
        halves = {*known.halves.values(), REMAINDER}
        names = [name for name in slots if name not in halves] if names is None else [n for n in names if n in slots]
        stored = Stored(params, slots, known.halves, names, blocks_in(params), step)
        at_params = inner_context(context, lambda masters: jax.tree.map(_rounded, params, masters), wide_updates)

        def inner(updates: Updates, values: Slots, masters: Params) -> tuple[Updates, Slots]:
            with partial_params(params):
                return call_update(optimizer, wide_updates(updates), values, masters, step, at_params, exact=True)

        return updated(stored, inner, updates)

    def labels(params: Params) -> Labels | None:
        with partial_params(params):
            return labels_of(optimizer, params)

    return Optimizer(
        Init(init, roles, makes_finished_updates(optimizer), guarded=is_guarded(optimizer), labels=labels),
        update,
        optimizer.hyperparameters,
        optimizer.takes_context,
    )


def _trained_leaves(optimizer: Optimizer, params: Params) -> list[Any]:
    """The leaves of params in order, with None for those that are not updated."""
    with partial_params(params):
        found = trees.structure(params).flatten_up_to(trained(optimizer, params))
    return [p if p is not None and trees.is_trainable(p) else None for p in found]


def _blocks(leaf: Any, least: int, near: int) -> Blocks | None:
    """The blocks of the slots of a parameter; None if they stay as they are."""
    shape = np.shape(leaf)
    small = not shape or np.size(leaf) < max(least, 1)
    if small or not trees.is_trainable(leaf) or trees.compute_dtype(jnp.result_type(leaf)) != np.float32:
        return None
    return blocks_of(shape, near)


def _rounded(p: Any, master: Any) -> Any:
    return master if p.dtype == master.dtype else split(master)[0]


def _first_slots(values: Slots, params: Params, known: Roles, blocks: list[Blocks | None]) -> Slots:
    """Both halves of the slots that compact stores, from their values."""
    made: Slots = {}
    treedef, leaves = trees.structure(params), jax.tree.leaves(params)
    for name, half in known.halves.items():
        tops = trees.flatten_like(params, values[name], f"slot {name!r}")
        lows: list[Any] = [None] * len(tops)
        for i, (x, one) in enumerate(zip(tops, blocks, strict=True)):
            if one is not None and _is_stored(x, leaves[i]):
                tops[i], lows[i] = nearest(x, one, KINDS[known.holds[name]])
        made[name], made[half] = treedef.unflatten(tops), treedef.unflatten(lows)
    return made


def _is_stored(x: Any, p: Any) -> bool:
    """Whether a leaf of a slot has the form of values of its parameter."""
    return x is not None and np.shape(x) == np.shape(p) and x.dtype == jnp.float32
