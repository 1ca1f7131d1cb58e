"""An update of what `compact` stores: opened, updated by the optimizer inside, and closed again."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.block_codes import Blocks, Turn, codes_of, encoded, fractions_at, in_blocks, opened, scales_of, split
from jstep.core.placement import may_run_on
from jstep.core.programs import without_calls
from jstep.core.trees import Array, Params, Slots, Step, Updates, is_slices
from jstep.optimizers.apply_updates import add
from jstep.optimizers.masks import leaf_numbers
from jstep.optimizers.projected import Conditions, Projected, collecting_conditions, is_projected, is_update
from jstep.optimizers.projected import report_condition as report
from jstep.optimizers.wrappers import by_slices

REMAINDER = "remainder"
TPU, GPU = "tpu", "cuda"
Inner: TypeAlias = Callable[[Updates, Slots, Params], tuple[Updates, Slots]]
"""`inner(updates, slots, params)`, the update of the optimizer inside, of float32 values."""
Row: TypeAlias = dict[str, Any]
"""The leaves of slots at one parameter, by name; without those that the parameter does not have."""


class Stored(NamedTuple):
    """The stored state before an update.

    Attributes:
        params: The parameters.
        slots: The slots of compact.
        halves: Name of a slot with two halves → the name of the second one.
        names: The names of the slots of the optimizer inside.
        blocks: The blocks of the slots of each parameter, in order; None for slots that stay as they are.
        step: The step.
    """

    params: Params
    slots: Slots
    halves: Mapping[str, str]
    names: Sequence[str]
    blocks: Sequence[Blocks | None]
    step: Step

    def rows(self, slots: Slots) -> list[Row]:
        """The leaves of slots, for each parameter in order."""
        rows: list[Row] = [{} for _ in self.blocks]
        for name, tree in slots.items():
            if trees.is_like(self.params, tree):
                for row, leaf in zip(rows, trees.flatten_like(self.params, tree, name), strict=True):
                    row |= {} if leaf is None else {name: leaf}
        return rows

    def trees(self, rows: Sequence[Row], slots: Slots) -> Slots:
        """The slots, those that are trees like the parameters with other leaves."""
        treedef = trees.structure(self.params)
        like = [name for name, tree in slots.items() if trees.is_like(self.params, tree)]
        return slots | {name: treedef.unflatten([row.get(name) for row in rows]) for name in like}

    def turns(self) -> list[dict[str, Turn]]:
        """The position of the sequence for each leaf and slot; no two have the same."""
        names, step = (REMAINDER, *self.halves), jnp.asarray(self.step).astype(jnp.uint32)
        return [
            {name: Turn(step, np.uint32(len(names) * number + i)) for i, name in enumerate(names)}
            for number in leaf_numbers(self.params)
        ]

    def large(self) -> list[bool]:
        """Whether the program of each leaf depends on the platform."""
        rows = zip(jax.tree.leaves(self.params), self.blocks, self.rows(self.slots), strict=True)
        return [np.size(p) >= by_slices.LARGE and (blocks is not None or REMAINDER in row) for p, blocks, row in rows]

    def values(self) -> tuple[Slots, Params]:
        """The slots and the parameters as the optimizer inside sees them."""
        rows, (leaves, treedef) = self.rows(self.slots), trees.flatten(self.params)
        masters = [value_of(p, row.get(REMAINDER)) for p, row in zip(leaves, rows, strict=True)]
        slots = {name: self.slots[name] for name in self.names}
        return self.trees([_values(row, self.halves) for row in rows], slots), treedef.unflatten(masters)


def value_of(stored: Any, half: Any) -> Any:
    """The values of a leaf from both halves; one without a second half has its values."""
    return stored if half is None else _opened(stored, half)


_opened = jax.jit(opened)  # one trace for all leaves of a shape, as in leafwise


def _values(row: Row, halves: Mapping[str, str]) -> Row:
    return {name: value_of(x, row.get(halves.get(name, ""))) for name, x in row.items()}


def updated(stored: Stored, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    """The updates, with new values of parameters that have a remainder, and the new slots."""
    known = {TPU: may_run_on("tpu"), GPU: may_run_on("gpu", "cuda")}
    ways = [platform for platform, is_possible in known.items() if is_possible and any(stored.large())]
    if not ways:
        return _at_once(stored, inner, updates)
    conditions = Conditions()

    def on(*platform: str) -> Any:
        conditions.clear()
        with collecting_conditions(conditions):
            result = (_by_leaf if platform else _at_once)(stored, inner, updates, *platform)
        return result, [condition for _, condition in conditions]

    made = {platform: functools.partial(on, platform) for platform in ways}
    result, values = jax.lax.platform_dependent(default=on, **made)
    for (params, _), condition in zip(conditions, values, strict=True):
        report(params, condition)
    found: tuple[Updates, Slots] = result
    return found


def _at_once(stored: Stored, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    """The update by whole leaves."""
    before, masters = stored.values()
    return _closed(stored, before, masters, *inner(updates, dict(before), masters), {})


def _closed(
    stored: Stored, before: Slots, masters: Params, updates: Updates, after: Slots, done: Mapping[int, Any]
) -> tuple[Updates, Slots]:
    """The updates and the slots as they are stored.

    There is a new value in place of the update of a parameter that has a remainder, or is large. `done` has this value
    and what is stored for the leaves that were updated by themselves.
    """
    found = trees.flatten_like(stored.params, updates, "updates", is_leaf=is_update)
    rows, old, new = stored.rows(stored.slots), stored.rows(before), stored.rows(after)
    halves, turns, large, whole = tuple(stored.halves.items()), stored.turns(), stored.large(), jax.tree.leaves(masters)
    for i, blocks in enumerate(stored.blocks):
        other = {name: x for name, x in new[i].items() if x is not old[i].get(name)}
        u = found[i] if large[i] or REMAINDER in rows[i] else None
        args = rows[i], old[i], other, whole[i], u, turns[i], blocks, halves
        value, row = done[i] if i in done else _closed_leaf(*args)
        found[i], rows[i] = found[i] if value is None else Projected(value), rows[i] | row
    return trees.structure(stored.params).unflatten(found), stored.trees(rows, stored.slots | after)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _closed_leaf(
    row: Row, old: Row, new: Row, master: Any, u: Any, turns: dict[str, Turn], blocks: Blocks | None, halves: Any
) -> tuple[Any, Row]:
    found = _found(row, old, new, blocks, dict(halves))
    at = functools.partial(fractions_at, np.shape(master))
    return _closed_row(row, new, master, u, found, lambda name: at(turns[name]), blocks, dict(halves))


def _found(row: Row, old: Row, new: Row, blocks: Blocks | None, halves: Mapping[str, str]) -> dict[str, Any]:
    """The scales of new values that become codes, and which blocks have a value that is another one, by name."""
    if blocks is None:
        return {}
    coded = [name for name in new if halves.get(name) in row and row[name].dtype != jnp.bfloat16]
    changed = {name: jnp.any(in_blocks(new[name] != old[name], blocks), axis=blocks.axis + 1) for name in coded}
    return {name: (scales_of(new[name], blocks), changed[name]) for name in coded}


def _closed_row(
    row: Row, new: Row, master: Any, u: Any, found: Any, fractions: Any, blocks: Any, halves: Mapping[str, str]
) -> tuple[Any, Row]:
    """The new value of a parameter, None without an update, and what is stored of it and of its slots."""
    made = dict(row)
    for name, x in new.items():
        half = halves.get(name, "")
        if name in found:
            scales, changed = found[name]
            codes = in_blocks(codes_of(x, scales, blocks, row[name].dtype, fractions(name)), blocks)
            kept = jnp.where(jnp.expand_dims(changed, blocks.axis + 1), codes, in_blocks(row[name], blocks))
            made[name], made[half] = kept.reshape(x.shape), jnp.where(changed, scales, row[half])
        elif half in row:
            made[name], made[half] = split(x, fractions(name))  # values that are unchanged have no bits to drop
        else:
            made[name] = x
    value = None if trees.is_none(u) else add(master, u)
    if value is not None and REMAINDER in row:
        value, made[REMAINDER] = split(value, fractions(REMAINDER))
    return value, made


class _Leaf(NamedTuple):
    """A leaf with a program of its own.

    Attributes:
        row: What is stored of its slots.
        turns: The positions of their sequences.
        blocks: Their blocks.
        part: The shape of its slices.
        ending: The operations that compute its update and its slots of its shape.
        is_value: Whether the update is a new value.
        slots: The names of these slots → their variables before the update.
        master: The variable of the parameter.
    """

    row: Row
    turns: dict[str, Turn]
    blocks: Blocks | None
    part: by_slices.Shape
    ending: by_slices.Ending
    is_value: bool
    slots: Row
    master: Any


def _by_leaf(stored: Stored, inner: Inner, updates: Updates, platform: str) -> tuple[Updates, Slots]:
    """The update with a program of its own for each large leaf: see `by_slices`."""
    values, named = stored.values(), trees.leaves_with_paths(stored.params)
    given, treedef = trees.flatten((updates, *values))
    conditions = Conditions()

    def traced(*xs: Any) -> Any:
        conditions.clear()
        with collecting_conditions(conditions):
            made = inner(*treedef.unflatten(xs))
        return made, [condition for _, condition in conditions]

    program, shapes = without_calls(traced, platform, *given)
    results, structure = program.jaxpr.outvars, trees.structure(shapes)
    _, slots, masters = treedef.unflatten(program.jaxpr.invars)
    (found, after), _ = structure.unflatten(range(len(results)))
    nodes = trees.flatten_like(stored.params, found, "updates", is_leaf=is_update)
    rows = zip(
        stored.rows(stored.slots), stored.turns(), stored.blocks, stored.rows(slots), stored.rows(after), strict=True
    )
    masters, large = jax.tree.leaves(masters), stored.large()
    leaves: dict[int, _Leaf] = {}
    for i, (row, turns, blocks, variables, numbers) in enumerate(rows):
        u, shape = nodes[i], np.shape(named[i][1])
        if large[i] and u is not None and not is_slices(u):
            part = by_slices.slice_shape(named[i][0], shape, blocks) if platform == TPU else shape
            mine = {name: var for name, var in variables.items() if results[numbers[name]].aval.shape == shape}
            wanted = [u.value if is_projected(u) else u, *(numbers[name] for name in mine)]
            ending = by_slices.ending_of(program, wanted, shape)
            leaves[i] = _Leaf(row, turns, blocks, part, ending, is_projected(u), mine, masters[i])
    done = {number for leaf in leaves.values() for number in leaf.ending.numbers}
    rest = [None if number in done else var for number, var in enumerate(results)]
    needed = [var for leaf in leaves.values() for var in leaf.ending.needs]
    env = by_slices.values_of(program, given, [*(var for var in rest if var is not None), *needed])
    (updates, new), reached = structure.unflatten([None if var is None else by_slices.read(env, var) for var in rest])
    for (params, _), condition in zip(conditions, reached, strict=True):
        report(params, condition)
    by_itself = {i: _closed_by_itself(named[i][1], leaf, stored.halves, env, platform) for i, leaf in leaves.items()}
    return _closed(stored, *values, updates, new, by_itself)


def _closed_by_itself(
    p: Array, leaf: _Leaf, halves: Mapping[str, str], env: Mapping[Any, Any], platform: str
) -> tuple[Array, Row]:
    """The new value of a parameter, and what is stored of it and of its slots."""
    own = {*leaf.slots, *(halves.get(name) for name in leaf.slots), REMAINDER}
    others = [var for var in leaf.ending.needs if var not in (leaf.master, *leaf.slots.values())]

    def values(now: Any, read: Any) -> tuple[Array, Row, Any, Row]:
        p, row = now
        old, master = _values(row, halves), value_of(p, row.get(REMAINDER))
        known = dict(zip(others, read, strict=True)) | {var: old[name] for name, var in leaf.slots.items()}
        made = leaf.ending.on_slice(known | {leaf.master: master}, leaf.part)
        # On TPUs the new slots are not computed again for their codes.
        u, *new = jax.lax.optimization_barrier(made) if platform == TPU else made
        return master, old, Projected(u) if leaf.is_value else u, dict(zip(leaf.slots, new, strict=True))

    def body(position: tuple[Any, ...], now: Any, read: Any) -> Any:
        master, old, u, new = values(now, read)
        found = _found(now[1], old, new, leaf.blocks, halves)
        if platform == GPU:  # everything is computed again in a second kernel, not stored in float32
            now, read, found = jax.lax.optimization_barrier((now, read, found))
            master, old, u, new = values(now, read)

        def fractions(name: str) -> Array:
            return fractions_at(leaf.part, leaf.turns[name], position)

        return _closed_row(now[1], new, master, u, found, fractions, leaf.blocks, halves)

    carried = p, {name: x for name, x in leaf.row.items() if name in own}
    made: tuple[Array, Row] = by_slices.over_slices(body, p.shape, leaf.part, carried, [env[var] for var in others])
    return made


@functools.partial(jax.jit, static_argnums=(1, 2))
def nearest(x: Array, blocks: Blocks, dtype: Any) -> tuple[Array, Array]:
    """Both halves of values, rounded to nearest, for codes of a dtype; a bfloat16 and its remainder for None."""
    return split(x) if dtype is None else encoded(x, blocks, dtype)
