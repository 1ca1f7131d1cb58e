"""Compact storage between updates: `compact`, and `repack`, which converts states."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jstep.core import meshes, trees
from jstep.core.checks import as_int, format_value
from jstep.core.exceptions import setting
from jstep.core.jaxprs import Subprogram, evaluate_on_slices, trace_inlined
from jstep.core.meshes import call_on_auto_axes, dims_of, explicit_mesh, internal_transfers, shard_like
from jstep.core.new_arrays import copy_as, full_like
from jstep.core.placement import is_shape, may_run_on, move_to_devices
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.trees import Array, Optimizer, OptimizerLike, Params, Slots, Step, Tree, Updates
from jstep.optimizers import by_slices, draws, leaf_values, nested
from jstep.optimizers.chains import trained_params
from jstep.optimizers.nested import CONDITIONS, Conditions, report_condition
from jstep.optimizers.updates import Replacement, add, is_update
from jstep.slots import compact_numbers
from jstep.slots import roles as slot_roles
from jstep.slots.compact_numbers import KINDS, SMALLEST_BLOCK, Blocks, Turn
from jstep.slots.indexed_slices import is_slices
from jstep.slots.matching import as_slots
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import HALVES, Role, Roles
from jstep.state.global_step import step_array
from jstep.state.sharding import is_model_state, state_shardings
from jstep.state.slots import master_params, slot_values
from jstep.state.train_state import TrainState, as_state

# The inner optimizer sees float32 parameters and slots. Its results are stored block by block. Blocks without a changed
# value stay bitwise identical, whatever the reason: a missing gradient, a guard that skipped the update, or rows that a
# sparse gradient does not name.

SCALE = "scale"
LARGEST_BLOCK = 1024
_SALT_OF_UPDATE = 0x9E3779B1
"""The difference of the salts of two updates of one step; multiples of it are far from the small salts of leaves."""
_REFUSED = {
    "master_weights": "which keeps masters itself: leave master_weights out, and convert its states by jstep.repack",
    "stochastic_rounding": "which loses no update to rounding: leave stochastic_rounding out",
    "compact": "which stores everything compactly already: leave one of them out",
    "Slot(dtype=…)": "which stores the slot in 8 bits: leave the dtype out",
}


@makes_optimizer(1)
def compact(optimizer: OptimizerLike, *, keep: VarList = None, min_size: int = 4096, block: int = 128) -> Optimizer:
    """Compact storage between updates: AdamW with bfloat16 parameters takes 7 bytes a parameter instead of 16.

    Slots become codes with a scale for each block: averages and squares in 8 bits, slow averages and sums in 16, copies
    of weights in 24. bfloat16 parameters get the next 8 bits of their float32 masters.

    Args:
        optimizer: The optimizer, with its clips and averages. Guards, `update_every`, `lookahead` and `with_projection`
            belong around the result.
        keep: The parameters whose slots stay as they are, as a `var_list`.
        min_size: The number of elements below which the slots of a parameter stay as they are.
        block: The number of elements with a common scale, a power of two from 32 to 1024. Blocks lie along the last
            axis that has a divisor from 32 to 2·block, or else the last axis is one block.

    Returns:
        An `Optimizer` with the same hyperparameters. Its slots keep names and shapes. An average or square `m` has
        int8, int16 or uint8 codes, and a slot `m/scale`; weights `z` are bfloat16, with a slot `z/remainder`. bfloat16
        parameters have the slot `remainder`. The scalar slots `drawn/step` and `drawn/count` count the updates of a
        step, each of which rounds in its own way. `get_slot` returns float32 values. Slots without a declared content
        (`Slot(holds=…)`) or of other shapes, and those of float64 parameters, stay as they are.

    Raises:
        ValueError: The optimizer contains `master_weights`, `stochastic_rounding`, `compact` or a `Slot` with a dtype;
            or (at `init`) a parameter is float16, or an entry of `keep` matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.compact(jstep.adamw(1e-3))
        >>> state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
        >>> state.slots["m"]["w"].dtype, state.slots["v/scale"]["w"].shape, jstep.get_slot(state, "m", "w").dtype
        (dtype('int8'), (64, 1), dtype('float32'))

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021); Zamirai et al., "Revisiting BFloat16
    Training" (2020).
    """
    optimizer = as_optimizer("optimizer", optimizer)
    nested.check_formats("compact", optimizer, **_REFUSED)
    least = as_int(min_size, "min_size", at_least=0)
    near = as_int(block, "block", at_least=SMALLEST_BLOCK)
    if near > LARGEST_BLOCK or near & (near - 1):
        raise ValueError(
            f"block={format_value(block)}: must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
        )
    kept = None if keep is None else leaf_values.mask("keep", keep)

    def blocks_in(params: Params) -> list[Blocks | None]:
        leaves = jax.tree.leaves(params)
        stay = kept(params) if kept and leaves else [False] * len(leaves)
        return [None if flag else _blocks(leaf, least, near) for leaf, flag in zip(leaves, stay, strict=True)]

    def roles(params: Params) -> Roles:
        inner = slot_roles.roles_of(optimizer, params)
        added: dict[str, Role | None] = {}
        halves: dict[str, str] = {}
        if any(blocks_in(params)):
            for name, kind in inner.holds.items():
                halves[name] = f"{name}/{REMAINDER if kind == 'weight' else SCALE}"
                added[halves[name]] = Role.REMAINDER if kind == "weight" else Role.SCALES
        if any(p is not None and p.dtype == jnp.bfloat16 for p in _trained_leaves(optimizer, params)):
            added[REMAINDER] = Role.REMAINDER
        if added:
            inner = inner.merge(draws.ROLES)
        return inner.merge(Roles(added, halves=halves, formats={"compact"}))

    def init(params: Params, global_step: Step = 0) -> Slots:
        trained = _trained_leaves(optimizer, params)
        for path, p in zip(trees.leaf_paths(params), trained, strict=True):
            if p is not None and p.dtype == jnp.float16:
                raise ValueError(
                    f"params: {trees.quote_path(path)} must be bfloat16 or float32 for compact, got float16; cast it"
                )
        lows = [None if p is None or p.dtype != jnp.bfloat16 else full_like(p, 0, jnp.int8) for p in trained]
        leaves, treedef = trees.flatten(params)
        with leaf_values.partial_params(params):
            fresh = optimizer.init(treedef.unflatten(map(stored_value, leaves, lows)), global_step)
        all_roles = roles(params)
        fresh |= {REMAINDER: treedef.unflatten(lows)} if REMAINDER in all_roles else {}
        fresh |= draws.fresh_draws() if all_roles.names_with(*HALVES) else {}
        return fresh | _first_slots(fresh, params, all_roles, blocks_in(params))

    def update(updates: Updates, slots: Slots, at: nested.StepInputs) -> tuple[Updates, Slots]:
        params = at.params
        all_roles = roles(params)
        halves = all_roles.names_with(*HALVES)
        as_slots((*all_roles.halves, *halves), slots)
        others = {name: tree for name, tree in slots.items() if name not in halves}
        inside = nested.slots_of(optimizer, others, params)
        number = draws.number_in_step(slots, at.step) if halves else None
        stored = StoredState(params, slots, all_roles.halves, inside, blocks_in(params), at.step, number)
        inner = functools.partial(nested.update_masters, optimizer, at=at, rounded=_rounded)
        updates, new = store_updates(stored, inner, updates)
        return updates, new | (draws.after_draw(slots, at.step) if halves else {})

    outer_init = nested.wrap_init(optimizer, init, roles)
    return optimizer._replace(init=outer_init, update=nested.with_inputs(update, loads=False))


def _trained_leaves(optimizer: Optimizer, params: Params) -> list[Any]:
    leaves = trees.structure(params).flatten_up_to(trained_params(optimizer, params))
    return [p if p is not None and trees.is_trainable(p) else None for p in leaves]


def _blocks(leaf: Any, least: int, near: int) -> Blocks | None:
    shape = np.shape(leaf)
    small = not shape or np.size(leaf) < max(least, 1)
    if small or not trees.is_trainable(leaf) or trees.compute_dtype(jnp.result_type(leaf)) != np.float32:
        return None
    return compact_numbers.choose_blocks(shape, near)


def _rounded(p: Any, master: Any) -> Any:
    return master if p.dtype == master.dtype else compact_numbers.split_halves(master)[0]


def _first_slots(values: Slots, params: Params, roles: Roles, blocks: list[Blocks | None]) -> Slots:
    slots: Slots = {}
    treedef = trees.structure(params)
    leaves = jax.tree.leaves(params)
    for name, half in roles.halves.items():
        tops = trees.flatten_like(params, values[name], f"slot {name!r}")
        lows: list[Any] = [None] * len(tops)
        for i, (x, leaf_blocks) in enumerate(zip(tops, blocks, strict=True)):
            has_values = x is not None and np.shape(x) == np.shape(leaves[i]) and x.dtype == jnp.float32
            if leaf_blocks is not None and has_values:
                tops[i], lows[i] = round_to_nearest(x, leaf_blocks, KINDS[roles.holds[name]])
        slots[name] = treedef.unflatten(tops)
        slots[half] = treedef.unflatten(lows)
    return slots


# An update of stored slots: they are decoded, updated by the inner optimizer, and encoded again.

REMAINDER = "remainder"
TPU = "tpu"
GPU = "cuda"
Inner: TypeAlias = Callable[[Updates, Slots, Params], tuple[Updates, Slots]]
Row: TypeAlias = dict[str, Any]


class StoredState(NamedTuple):
    """The state before an update, as it is stored.

    Attributes:
        halves: As in `Roles`.
        blocks: The blocks of each parameter's slots; None for others.
        number: The number of the update within its step; None if nothing is stored compactly.
    """

    params: Params
    slots: Slots
    halves: Mapping[str, str]
    inside: Slots
    blocks: Sequence[Blocks | None]
    step: Step
    number: Array | None

    def rows(self, slots: Slots) -> list[Row]:
        rows: list[Row] = [{} for _ in self.blocks]
        for name, tree in slots.items():
            if trees.is_like(self.params, tree):
                for row, leaf in zip(rows, trees.flatten_like(self.params, tree, name), strict=True):
                    row |= {} if leaf is None else {name: leaf}
        return rows

    def trees(self, rows: Sequence[Row], slots: Slots) -> Slots:
        treedef = trees.structure(self.params)
        like = [name for name, tree in slots.items() if trees.is_like(self.params, tree)]
        return slots | {name: treedef.unflatten([row.get(name) for row in rows]) for name in like}

    def turns(self) -> list[dict[str, Turn]]:
        names = (REMAINDER, *self.halves)
        step = jnp.asarray(self.step).astype(jnp.uint32)
        # The updates of one step have sequences of their own.
        offset = np.uint32(0) if self.number is None else self.number.astype(jnp.uint32) * np.uint32(_SALT_OF_UPDATE)
        turns: list[dict[str, Turn]] = []
        for number in leaf_values.leaf_numbers(self.params):
            first = len(names) * number
            turns.append({name: Turn(step, np.uint32(first + i) + offset) for i, name in enumerate(names)})
        return turns

    def large(self) -> list[bool]:
        rows = zip(jax.tree.leaves(self.params), self.blocks, self.rows(self.slots), strict=True)
        return [np.size(p) >= by_slices.LARGE and (blocks is not None or REMAINDER in row) for p, blocks, row in rows]

    def values(self) -> tuple[Slots, Params]:
        rows = self.rows(self.slots)
        leaves, treedef = trees.flatten(self.params)
        masters = [stored_value(p, row.get(REMAINDER)) for p, row in zip(leaves, rows, strict=True)]
        return self.trees([_values(row, self.halves) for row in rows], self.inside), treedef.unflatten(masters)


def stored_value(stored: object, half: object, flat: bool = False) -> Any:
    """The values of a leaf from its two halves, or from the only one."""
    return stored if half is None else _decode(stored, half, flat)


_decode = jax.jit(compact_numbers.decode_leaf, static_argnums=2)  # one trace for all leaves of a shape, as in leafwise


def _values(row: Row, halves: Mapping[str, str], flat: bool = False) -> Row:
    return {name: stored_value(x, row.get(halves.get(name, "")), flat) for name, x in row.items()}


def store_updates(stored: StoredState, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    possible = {TPU: may_run_on("tpu"), GPU: may_run_on("gpu", "cuda")}
    platforms = [platform for platform, is_possible in possible.items() if is_possible and any(stored.large())]
    if not platforms:
        return _update_together(stored, inner, updates)
    conditions = Conditions()
    branches = {name: _collecting(conditions, _update_by_leaf, stored, inner, updates, name) for name in platforms}
    default = _collecting(conditions, _update_together, stored, inner, updates)
    result, values = jax.lax.platform_dependent(default=default, **branches)
    for condition, holds in zip(conditions, values, strict=True):
        report_condition(condition._replace(holds=holds))
    new: tuple[Updates, Slots] = result
    return new


def _collecting(conditions: Conditions, update: Callable[..., Any], *first: object) -> Callable[..., Any]:
    """Let a traced `update` also return its conditions, which replace earlier ones."""

    def traced(*others: object) -> Any:
        conditions.clear()
        with setting(CONDITIONS, (conditions,)):
            result = update(*first, *others)
        return result, [condition.holds for condition in conditions]

    return traced


def _update_together(stored: StoredState, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    before, masters = stored.values()
    return _encode(stored, before, masters, *inner(updates, dict(before), masters), {})


def _encode(
    stored: StoredState, before: Slots, masters: Params, updates: Updates, after: Slots, separate: Mapping[int, Any]
) -> tuple[Updates, Slots]:
    new_updates = trees.flatten_like(stored.params, updates, "updates", is_leaf=is_update)
    rows = stored.rows(stored.slots)
    old = stored.rows(before)
    new = stored.rows(after)
    turns = stored.turns()
    large = stored.large()
    whole = jax.tree.leaves(masters)
    for i, blocks in enumerate(stored.blocks):
        other = {name: x for name, x in new[i].items() if x is not old[i].get(name)}
        u = new_updates[i] if large[i] or REMAINDER in rows[i] else None
        args = rows[i], other, whole[i], u, turns[i], blocks, tuple(stored.halves.items())
        value, row = separate[i] if i in separate else _encode_leaf(*args)
        new_updates[i] = new_updates[i] if value is None else Replacement(value)
        rows[i] = rows[i] | row
    return trees.structure(stored.params).unflatten(new_updates), stored.trees(rows, stored.slots | after)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _encode_leaf(
    row: Row, new: Row, master: Any, u: object, turns: dict[str, Turn], blocks: Blocks | None, halves: Any
) -> tuple[Any, Row]:
    scales = _scales(row, new, blocks, dict(halves))
    at = functools.partial(compact_numbers.fractions_at, np.shape(master))
    value = None if trees.is_none(u) else add(master, u)
    return _encode_slots(row, new, value, scales, lambda name: at(turns[name]), blocks, dict(halves))


def _scales(row: Row, new: Row, blocks: Blocks | None, halves: Mapping[str, str]) -> dict[str, Any]:
    coded = [name for name in new if halves.get(name) in row and row[name].dtype != jnp.bfloat16]
    return {} if blocks is None else {name: compact_numbers.block_scales(new[name], blocks) for name in coded}


def _encode_slots(
    row: Row,
    new: Row,
    value: Any,
    scales: Row,
    fractions: Any,
    blocks: Any,
    halves: Mapping[str, str],
    flat: bool = False,
) -> tuple[Any, Row]:
    stored = dict(row)
    for name, x in new.items():
        half = halves.get(name, "")
        if name in scales:
            stored[half] = scales[name]
            codes = compact_numbers.quantize(x, scales[name], blocks, row[name].dtype, fractions(name), flat)
            # A block without a changed value keeps its scale, too: nothing is rounded again.
            arrays = [compact_numbers.decode(row[name], scales[name], flat), x, row[name], codes]
            before, x, old, codes = arrays if flat else [compact_numbers.split_blocks(a, blocks) for a in arrays]
            stored[name] = jnp.where(before == x, old, codes).reshape(row[name].shape)
        elif half in row:
            # Unchanged values have no bits to drop.
            stored[name], stored[half] = compact_numbers.split_halves(x, fractions(name))
        else:
            stored[name] = x
    if value is not None and REMAINDER in row:
        value, stored[REMAINDER] = compact_numbers.split_halves(value, fractions(REMAINDER))
    return value, stored


class _LeafProgram(NamedTuple):
    """The program of a leaf that is updated separately.

    Attributes:
        slots: Name of a slot of its shape → its variable before the update.
        outputs: The indices, among all results, of its update and of its new slots.
        ending: The operations that compute these.
    """

    row: Row
    turns: dict[str, Turn]
    blocks: Blocks | None
    slice_shape: by_slices.Shape
    master: Any
    slots: Row
    outputs: tuple[Any, Row]
    ending: Subprogram


def _update_by_leaf(stored: StoredState, inner: Inner, updates: Updates, platform: str) -> tuple[Updates, Slots]:
    values = stored.values()
    named = trees.leaves_with_paths(stored.params)
    inputs, treedef = trees.flatten((updates, *values))
    conditions = Conditions()
    traced = _collecting(conditions, lambda *xs: inner(*treedef.unflatten(xs)))
    program, shapes = trace_inlined(traced, platform, *inputs)
    results = program.jaxpr.outvars
    structure = trees.structure(shapes)
    _, slots, masters = treedef.unflatten(program.jaxpr.invars)
    (update_numbers, after), _ = structure.unflatten(range(len(results)))
    nodes = trees.flatten_like(stored.params, update_numbers, "updates", is_leaf=is_update)
    lists = stored.rows(stored.slots), stored.turns(), stored.blocks, jax.tree.leaves(masters), stored.rows(slots)
    large = stored.large()
    after_rows = stored.rows(after)
    leaves: dict[int, _LeafProgram] = {}
    for i, (row, turns, blocks, master, before) in enumerate(zip(*lists, strict=True)):
        path = named[i][0]
        shape = np.shape(named[i][1])
        if large[i] and nodes[i] is not None and not is_slices(nodes[i]):
            of_slice = by_slices.slice_shape(path, shape, blocks) if platform == TPU else shape
            old = {name: var for name, var in before.items() if results[after_rows[i][name]].aval.shape == shape}
            replaced = {n: after_rows[i][n] for n, var in old.items() if results[after_rows[i][n]] is not var}
            outputs = nodes[i], replaced
            wanted = [results[number] for number in jax.tree.leaves(outputs)]
            ending = by_slices.find_ending(program, wanted, functools.partial(by_slices.is_of_leaf, shape))
            leaves[i] = _LeafProgram(row, turns, blocks, of_slice, master, old, outputs, ending)
    separate = {number for leaf in leaves.values() for number in jax.tree.leaves(leaf.outputs)}
    needed = [var for leaf in leaves.values() for var in leaf.ending.jaxpr.invars]
    others = [var for number, var in enumerate(results) if number not in separate]
    computed = iter(by_slices.compute_values(program, inputs, [*others, *needed]))
    outputs_of_others = [None if n in separate else next(computed) for n in range(len(results))]
    (updates, new), reached = structure.unflatten(outputs_of_others)
    for condition, holds in zip(conditions, reached, strict=True):
        report_condition(condition._replace(holds=holds))
    env = dict(zip(needed, computed, strict=True))
    encoded = {i: _update_leaf(named[i][1], leaf, stored.halves, env, platform) for i, leaf in leaves.items()}
    return _encode(stored, *values, updates, new, encoded)


def _update_leaf(
    p: Array, leaf: _LeafProgram, halves: Mapping[str, str], env: Mapping[Any, Any], platform: str
) -> tuple[Array, Row]:
    written = {*leaf.outputs[1], *(halves.get(name) for name in leaf.outputs[1]), REMAINDER}
    only_read = {*leaf.slots, *(halves.get(name) for name in leaf.slots)} - written
    others = [var for var in leaf.ending.jaxpr.invars if var not in (leaf.master, *leaf.slots.values())]

    def values(carried: Any, read: Any) -> tuple[Array, Any, Row]:
        p, row = carried
        inputs, kept = read
        old = _values(row | kept, halves, platform == GPU)
        master = stored_value(p, row.get(REMAINDER))
        env_values = dict(zip(others, inputs, strict=True)) | {var: old[name] for name, var in leaf.slots.items()}
        env_values[leaf.master] = master
        outputs = evaluate_on_slices(
            leaf.ending, [env_values[var] for var in leaf.ending.jaxpr.invars], leaf.slice_shape
        )
        # On TPUs the new slots are not computed again for their codes.
        outputs = jax.lax.optimization_barrier(outputs) if platform == TPU else outputs
        return master, *trees.structure(leaf.outputs).unflatten(outputs)

    def body(position: tuple[Any, ...], carried: Any, read: object) -> Any:
        master, u, new = values(carried, read)
        scales = _scales(carried[1], new, leaf.blocks, halves)
        if platform == GPU:  # everything is computed again in a second kernel, not stored in float32
            carried, read, scales = jax.lax.optimization_barrier((carried, read, scales))
            master, u, new = values(carried, read)

        def fractions(name: str) -> Array:
            return compact_numbers.fractions_at(leaf.slice_shape, leaf.turns[name], position)

        return _encode_slots(carried[1], new, add(master, u), scales, fractions, leaf.blocks, halves, platform == GPU)

    row, kept = ({name: x for name, x in leaf.row.items() if name in names} for names in (written, only_read))
    read = [env[var] for var in others], kept
    result: tuple[Array, Row] = by_slices.over_slices(body, p.shape, leaf.slice_shape, (p, row), read)
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_to_nearest(x: Array, blocks: Blocks, dtype: DTypeLike) -> tuple[Array, Array]:
    """Both halves of values, rounded to nearest; a dtype of None means a bfloat16 and its remainder."""
    return compact_numbers.split_halves(x) if dtype is None else compact_numbers.encode(x, blocks, dtype)


# States between formats: float32 slots, `compact` and `master_weights`.


def repack(state: TrainState, old_optimizer: OptimizerLike, new_optimizer: OptimizerLike) -> TrainState:
    """Convert a state between the formats of an optimizer: float32 slots, `compact`, `master_weights`.

    Args:
        state: A state of the old optimizer.
        new_optimizer: The same optimizer with or without `compact`, with another `keep`, `min_size` or `block`, or in
            `master_weights`.

    Returns:
        A state of the new optimizer at the same step. Codes are rounded to nearest.

    Raises:
        ValueError: The state is not one of the old optimizer, or the new one has other slots.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> old = jstep.master_weights(jstep.adamw(1e-3))
        >>> new = jstep.compact(jstep.adamw(1e-3))
        >>> state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, old)
        >>> sorted(jstep.repack(state, old, new).slots)
        ['drawn/count', 'drawn/step', 'm', 'm/scale', 'remainder', 'start_step', 'v', 'v/scale']
    """
    old_optimizer = as_optimizer("old_optimizer", old_optimizer)
    new_optimizer = as_optimizer("new_optimizer", new_optimizer)
    if any(map(is_shape, jax.tree.leaves(as_state(state)))):
        return jax.eval_shape(lambda state: repack(state, old_optimizer, new_optimizer), state)
    convert = functools.partial(_repacked, old_optimizer=old_optimizer, new_optimizer=new_optimizer)
    with internal_transfers():
        return call_on_auto_axes(convert, state, specs_of=functools.partial(_specs, state))


def _specs(state: TrainState, converted: TrainState) -> TrainState:
    """The specs of a converted state; new slots follow parameters and old slots."""
    treedef = trees.structure(state.params)
    others = [tree for name, tree in state.slots.items() if not is_model_state(name)]
    slots = [treedef.flatten_up_to(tree) for tree in others if trees.is_like(state.params, tree)]

    def spec(*leaves: Any) -> PartitionSpec:
        """The parameter's spec, or one from slots of its shape if only slots are split."""
        placed = [meshes.sharding_on_mesh(leaf) for leaf in leaves if np.shape(leaf) == np.shape(leaves[0])]
        split = (sharding.spec for sharding in placed if sharding is not None and any(dims_of(sharding.spec)))
        return next(split, PartitionSpec())

    specs = treedef.unflatten(list(map(spec, jax.tree.leaves(state.params), *slots)))
    mesh: Any = explicit_mesh(state)
    _, shardings = state_shardings(state.params, converted.slots, mesh, specs, None, slot_roles.roles_in(converted))
    shapes = converted.replace(slots=jax.tree.map(trees.shape_of, converted.slots, shardings))
    return shard_like(shapes, state)(converted)


def _repacked(state: TrainState, old_optimizer: Optimizer, new_optimizer: Optimizer) -> TrainState:
    others = {name: tree for name, tree in state.slots.items() if is_model_state(name)}
    old_slots = {name: move_to_devices(tree) for name, tree in state.slots.items() if name not in others}
    _check("old_optimizer", old_slots, _shapes(state, old_optimizer))
    old = slot_roles.roles_of(old_optimizer, state.params).static_part()
    treedef = trees.structure(state.params)
    old_state = TrainState(state.params, old_slots, state.global_step, roles=old)
    masters = jax.tree.leaves(master_params(old_state))
    wanted = _shapes(state, new_optimizer)
    roles = slot_roles.roles_of(new_optimizer, state.params)
    leaves = [x.astype(p.dtype) for x, p in zip(masters, jax.tree.leaves(state.params), strict=True)]
    slots: Slots = {}
    for name in (n for n in wanted if n not in roles.halves.values()):
        if roles[name] is Role.DRAWN and name not in old_slots:
            slots[name] = jnp.zeros(wanted[name].shape, wanted[name].dtype)
            continue
        if roles[name] not in (Role.MASTER, Role.REMAINDER):
            values = slot_values(old_state, name) if name in old_slots else None
            slots |= _stored(name, values, wanted, roles.halves.get(name), state.params)
            continue
        new_leaves = trees.flatten_like(state.params, wanted[name], f"slot {name!r}")
        for i, like in enumerate(new_leaves):
            if like is not None and roles[name] is Role.REMAINDER:
                leaves[i], new_leaves[i] = round_to_nearest(masters[i].astype(jnp.float32), None, None)
            elif like is not None:
                new_leaves[i] = copy_as(masters[i], like.dtype)
        slots[name] = treedef.unflatten(new_leaves)
    plain = {name for name in old_slots if old.get(name) not in (*HALVES, Role.MASTER)}
    plain -= {name for name in plain if old.get(name) is Role.DRAWN and name not in wanted}
    _check("new_optimizer", slots | {name: old_slots[name] for name in plain - slots.keys()}, wanted)
    of_state = slot_roles.state_roles(new_optimizer, state.params)
    return TrainState(treedef.unflatten(leaves), slots | others, state.global_step, roles=of_state)


def _shapes(state: TrainState, optimizer: Optimizer) -> Slots:
    return jax.eval_shape(lambda params, step: dict(optimizer.init(params, step)), state.params, step_array(state))


def _check(argument: str, have: Slots, wanted: Slots) -> None:
    kinds = [{p: (np.shape(x), str(x.dtype)) for p, x in trees.leaves_with_paths(tree)} for tree in (have, wanted)]
    differing = sorted(path for path in {**kinds[0], **kinds[1]} if kinds[0].get(path) != kinds[1].get(path))
    if differing:
        raise ValueError(
            f"{argument}: must be the optimizer of the state, with or without jstep.compact or jstep.master_weights; "
            f"slots differ at {differing[:5]}"
        )


def _stored(name: str, tree: Tree, wanted: Slots, half: str | None, params: Tree) -> Slots:
    fits = tree is not None and trees.structure(tree) == trees.structure(wanted[name])
    if not fits or half is None:
        return {name: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, wanted[name])} if fits else {}
    tops, codes, halves = (trees.flatten_like(params, slot, name) for slot in (tree, wanted[name], wanted[half]))
    for i, like in enumerate(halves):
        if like is not None:
            blocks = compact_numbers.blocks_between(codes[i].shape, like.shape)
            dtype = None if codes[i].dtype == jnp.bfloat16 else codes[i].dtype
            tops[i], halves[i] = round_to_nearest(tops[i].astype(jnp.float32), blocks, dtype)
    treedef = trees.structure(params)
    return {name: treedef.unflatten(tops), half: treedef.unflatten(halves)}
