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
from jstep.core.meshes import (
    call_on_auto_axes,
    dims_of,
    explicit_mesh,
    internal_transfers,
    shard_like,
)
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

# The inner optimizer sees float32 parameters and slots. Its results are stored block by block.
# Blocks without a changed value stay bitwise identical, whatever the reason: a missing gradient, a
# guard that skipped the update, or rows that a sparse gradient does not name.

SCALE = "scale"
LARGEST_BLOCK = 1024
_SALT_OF_UPDATE = 0x9E3779B1
"""How far apart the salts of a step's updates are; multiples are far from leaves' small salts."""
_REFUSED = {
    "master_weights": (
        "which keeps masters itself: leave master_weights out, "
        "and convert its states by jstep.repack"
    ),
    "stochastic_rounding": "which loses no update to rounding: leave stochastic_rounding out",
    "compact": "which stores everything compactly already: leave one of them out",
    "Slot(dtype=…)": "which stores the slot in 8 bits: leave the dtype out",
}


@makes_optimizer(1)
def compact(
    optimizer: OptimizerLike, *, keep: VarList = None, min_size: int = 4096, block: int = 128
) -> Optimizer:
    """Compact storage between updates: AdamW takes 7 bytes a bfloat16 parameter instead of 16.

    Slots become codes with a scale for each block: averages and squares in 8 bits, slow averages
    and sums in 16, copies of weights in 24. bfloat16 parameters get the next 8 bits of their
    float32 masters.

    Args:
        optimizer: The optimizer, with its clips and averages. Guards, `update_every`, `lookahead`
            and `with_projection` belong around the result.
        keep: The parameters whose slots stay as they are, as a `var_list`.
        min_size: The number of elements below which the slots of a parameter stay as they are.
        block: The number of elements with a common scale, a power of two from 32 to 1024. Blocks
            lie along the last axis that has a divisor from 32 to 2·block, or else the last axis is
            one block.

    Returns:
        An `Optimizer` with the same hyperparameters. Its slots keep names and shapes. An average or
        square `m` has int8, int16 or uint8 codes, and a slot `m/scale`; weights `z` are bfloat16,
        with a slot `z/remainder`. bfloat16 parameters have the slot `remainder`. The scalar slots
        `drawn/step` and `drawn/count` count the updates of a step, each of which rounds in its own
        way. `get_slot` returns float32 values. Slots without a declared content (`Slot(holds=…)`)
        or of other shapes, and those of float64 parameters, stay as they are.

    Raises:
        ValueError: The optimizer contains `master_weights`, `stochastic_rounding`, `compact` or a
            `Slot` with a dtype; or (at `init`) a parameter is float16, or an entry of `keep`
            matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.compact(jstep.adamw(1e-3))
        >>> state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
        >>> codes, scales = state.slots["m"]["w"], state.slots["v/scale"]["w"]
        >>> codes.dtype, scales.shape, jstep.get_slot(state, "m", "w").dtype
        (dtype('int8'), (64, 1), dtype('float32'))

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021); Zamirai et al.,
    "Revisiting BFloat16 Training" (2020).
    """
    optimizer = as_optimizer("optimizer", optimizer)
    nested.check_formats("compact", optimizer, **_REFUSED)
    smallest = as_int(min_size, "min_size", at_least=0)
    block_size = as_int(block, "block", at_least=SMALLEST_BLOCK)
    if block_size > LARGEST_BLOCK or block_size & (block_size - 1):
        raise ValueError(
            f"block={format_value(block)}: must be a power of two "
            f"from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
        )
    kept = None if keep is None else leaf_values.mask("keep", keep)

    def blocks_of(params: Params) -> list[Blocks | None]:
        """Return the blocks of each parameter's slots; None for slots that stay as they are."""
        leaves = jax.tree.leaves(params)
        are_kept = kept(params) if kept and leaves else [False] * len(leaves)
        blocks: list[Blocks | None] = []
        for leaf, is_kept in zip(leaves, are_kept, strict=True):
            blocks.append(None if is_kept else _blocks(leaf, smallest, block_size))
        return blocks

    def roles(params: Params) -> Roles:
        inner = slot_roles.roles_of(optimizer, params)
        added: dict[str, Role | None] = {}
        halves: dict[str, str] = {}
        if any(blocks_of(params)):
            for name, kind in inner.holds.items():
                if kind == "weight":
                    halves[name] = f"{name}/{REMAINDER}"
                    added[halves[name]] = Role.REMAINDER
                else:
                    halves[name] = f"{name}/{SCALE}"
                    added[halves[name]] = Role.SCALES
        if any(
            p is not None and p.dtype == jnp.bfloat16 for p in _trained_leaves(optimizer, params)
        ):
            added[REMAINDER] = Role.REMAINDER
        if added:
            inner = inner.merge(draws.ROLES)
        return inner.merge(Roles(added, halves=halves, formats={"compact"}))

    def init(params: Params, global_step: Step = 0) -> Slots:
        trained = _trained_leaves(optimizer, params)
        for path, p in zip(trees.leaf_paths(params), trained, strict=True):
            if p is not None and p.dtype == jnp.float16:
                raise ValueError(
                    f"params: {trees.quote_path(path)} must be bfloat16 or float32 for compact, "
                    "got float16; cast it"
                )
        remainders = [
            None if p is None or p.dtype != jnp.bfloat16 else full_like(p, 0, jnp.int8)
            for p in trained
        ]
        leaves, treedef = trees.flatten(params)
        with leaf_values.partial_params(params):
            fresh = optimizer.init(
                treedef.unflatten(map(stored_value, leaves, remainders)), global_step
            )
        all_roles = roles(params)
        if REMAINDER in all_roles:
            fresh |= {REMAINDER: treedef.unflatten(remainders)}
        if all_roles.names_with(*HALVES):
            fresh |= draws.fresh_draws()
        return fresh | _first_slots(fresh, params, all_roles, blocks_of(params))

    def update(updates: Updates, slots: Slots, inputs: nested.StepInputs) -> tuple[Updates, Slots]:
        params = inputs.params
        all_roles = roles(params)
        halves = all_roles.names_with(*HALVES)
        as_slots((*all_roles.halves, *halves), slots)
        others = {name: tree for name, tree in slots.items() if name not in halves}
        stored = StoredState(
            params=params,
            slots=slots,
            halves=all_roles.halves,
            inner_slots=nested.slots_of(optimizer, others, params),
            blocks=blocks_of(params),
            step=inputs.step,
            number=draws.number_in_step(slots, inputs.step) if halves else None,
        )
        inner = functools.partial(nested.update_masters, optimizer, inputs=inputs, rounded=_rounded)
        updates, new = store_updates(stored, inner, updates)
        if halves:
            new |= draws.next_draws(slots, inputs.step)
        return updates, new

    outer_init = nested.wrap_init(optimizer, init, roles)
    return optimizer._replace(init=outer_init, update=nested.unpack_inputs(update, loads=False))


def _trained_leaves(optimizer: Optimizer, params: Params) -> list[Any]:
    leaves = trees.structure(params).flatten_up_to(trained_params(optimizer, params))
    return [p if p is not None and trees.is_trainable(p) else None for p in leaves]


def _blocks(leaf: Any, min_size: int, block_size: int) -> Blocks | None:
    shape = np.shape(leaf)
    if not shape or np.size(leaf) < max(min_size, 1):
        return None
    # The inner optimizer computes with wider slots of float64 parameters.
    if not trees.is_trainable(leaf) or trees.compute_dtype(jnp.result_type(leaf)) != np.float32:
        return None
    return compact_numbers.choose_blocks(shape, block_size)


def _rounded(p: Any, master: Any) -> Any:
    if p.dtype == master.dtype:
        return master
    high, _ = compact_numbers.split_halves(master)
    return high


def _first_slots(values: Slots, params: Params, roles: Roles, blocks: list[Blocks | None]) -> Slots:
    """Return the slots with a second half, as they are stored, and these halves."""
    slots: Slots = {}
    treedef = trees.structure(params)
    leaves = jax.tree.leaves(params)
    for name, half in roles.halves.items():
        tops = trees.flatten_like(params, values[name], f"slot {name!r}")
        lows: list[Any] = [None] * len(tops)
        for i, (x, leaf_blocks) in enumerate(zip(tops, blocks, strict=True)):
            has_values = (
                x is not None and np.shape(x) == np.shape(leaves[i]) and x.dtype == jnp.float32
            )
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

    Its methods work on rows: a row has the slots of one parameter, by name.

    Attributes:
        halves: As in `Roles`.
        inner_slots: The stored slots of the inner optimizer, without their halves.
        blocks: The blocks of each parameter's slots; None for others.
        number: The number of the update within its step; None if nothing is stored compactly.
    """

    params: Params
    slots: Slots
    halves: Mapping[str, str]
    inner_slots: Slots
    blocks: Sequence[Blocks | None]
    step: Step
    number: Array | None

    def rows(self, slots: Slots) -> list[Row]:
        rows: list[Row] = [{} for _ in self.blocks]
        for name, tree in slots.items():
            if not trees.is_like(self.params, tree):
                continue
            for row, leaf in zip(rows, trees.flatten_like(self.params, tree, name), strict=True):
                if leaf is not None:
                    row[name] = leaf
        return rows

    def trees(self, rows: Sequence[Row], slots: Slots) -> Slots:
        """Return slots with the values of the rows; those that are not like the parameters stay."""
        treedef = trees.structure(self.params)
        new = dict(slots)
        for name, tree in slots.items():
            if trees.is_like(self.params, tree):
                new[name] = treedef.unflatten([row.get(name) for row in rows])
        return new

    def turns(self) -> list[dict[str, Turn]]:
        """Return what the rounding of each array depends on: the step, and a salt of its own."""
        names = (REMAINDER, *self.halves)
        step = jnp.asarray(self.step).astype(jnp.uint32)
        # The updates of one step have sequences of their own.
        offset: Any = np.uint32(0)
        if self.number is not None:
            offset = self.number.astype(jnp.uint32) * np.uint32(_SALT_OF_UPDATE)
        turns: list[dict[str, Turn]] = []
        for number in leaf_values.leaf_numbers(self.params):
            first = len(names) * number
            turns.append(
                {name: Turn(step, np.uint32(first + i) + offset) for i, name in enumerate(names)}
            )
        return turns

    def are_large(self) -> list[bool]:
        """Return for each parameter whether it is large, and it or its slots are compact."""
        flags: list[bool] = []
        for p, blocks, row in zip(
            jax.tree.leaves(self.params), self.blocks, self.rows(self.slots), strict=True
        ):
            is_compact = blocks is not None or REMAINDER in row
            flags.append(np.size(p) >= by_slices.LARGE and is_compact)
        return flags

    def values(self) -> tuple[Slots, Params]:
        """Return what the inner optimizer sees: its slots and the masters, in float32."""
        rows = self.rows(self.slots)
        leaves, treedef = trees.flatten(self.params)
        masters = [stored_value(p, row.get(REMAINDER)) for p, row in zip(leaves, rows, strict=True)]
        slots = self.trees([_values(row, self.halves) for row in rows], self.inner_slots)
        return slots, treedef.unflatten(masters)


def stored_value(stored: object, half: object, flat: bool = False) -> Any:
    """The values of a leaf from its two halves, or from the only one."""
    if half is None:
        return stored
    return _decode(stored, half, flat)


# One trace for all leaves of a shape, as in leafwise.
_decode = jax.jit(compact_numbers.decode_leaf, static_argnums=2)


def _values(row: Row, halves: Mapping[str, str], flat: bool = False) -> Row:
    return {name: stored_value(x, row.get(halves.get(name, "")), flat) for name, x in row.items()}


def store_updates(stored: StoredState, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    """Decode the state, update it with `inner`, encode it: large leaves apart on accelerators."""
    platforms: list[str] = []
    if any(stored.are_large()):
        if may_run_on("tpu"):
            platforms.append(TPU)
        if may_run_on("gpu", "cuda"):
            platforms.append(GPU)
    if not platforms:
        return _update_together(stored, inner, updates)
    conditions = Conditions()
    branches = {
        name: _collecting(conditions, _update_by_leaf, stored, inner, updates, name)
        for name in platforms
    }
    default = _collecting(conditions, _update_together, stored, inner, updates)
    result, values = jax.lax.platform_dependent(default=default, **branches)
    for condition, holds in zip(conditions, values, strict=True):
        report_condition(condition._replace(holds=holds))
    new: tuple[Updates, Slots] = result
    return new


def _collecting(
    conditions: Conditions, update: Callable[..., Any], *first: object
) -> Callable[..., Any]:
    """Let a traced `update` also return its conditions, which replace earlier ones."""

    def traced(*others: object) -> Any:
        conditions.clear()
        with setting(CONDITIONS, (conditions,)):
            result = update(*first, *others)
        return result, [condition.holds for condition in conditions]

    return traced


def _update_together(stored: StoredState, inner: Inner, updates: Updates) -> tuple[Updates, Slots]:
    old_slots, masters = stored.values()
    updates, new_slots = inner(updates, dict(old_slots), masters)
    return _encode(stored, old_slots, masters, updates, new_slots, {})


def _encode(
    stored: StoredState,
    old_slots: Slots,
    masters: Params,
    updates: Updates,
    new_slots: Slots,
    separate: Mapping[int, tuple[Array, Row]],
) -> tuple[Updates, Slots]:
    """Return the updates and slots to store.

    `separate` has the new parameters and rows of leaves that are encoded.
    """
    new_updates = trees.flatten_like(stored.params, updates, "updates", is_leaf=is_update)
    rows = stored.rows(stored.slots)
    old_rows = stored.rows(old_slots)
    new_rows = stored.rows(new_slots)
    turns = stored.turns()
    are_large = stored.are_large()
    master_leaves = jax.tree.leaves(masters)
    for i, blocks in enumerate(stored.blocks):
        if i in separate:
            value, row = separate[i]
        else:
            # What the optimizer returned as it was stays as it is stored.
            changed = {name: x for name, x in new_rows[i].items() if x is not old_rows[i].get(name)}
            u = new_updates[i] if are_large[i] or REMAINDER in rows[i] else None
            halves = tuple(stored.halves.items())
            value, row = _encode_leaf(
                rows[i], changed, master_leaves[i], u, turns[i], blocks, halves
            )
        if value is not None:
            new_updates[i] = Replacement(value)
        rows[i] = rows[i] | row
    updates = trees.structure(stored.params).unflatten(new_updates)
    return updates, stored.trees(rows, stored.slots | new_slots)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _encode_leaf(
    row: Row,
    new: Row,
    master: Any,
    u: object,
    turns: dict[str, Turn],
    blocks: Blocks | None,
    halves: Any,
) -> tuple[Any, Row]:
    scales = _scales(row, new, blocks, dict(halves))
    value = None if trees.is_none(u) else add(master, u)

    def fractions(name: str) -> Array:
        return compact_numbers.fractions_at(np.shape(master), turns[name])

    return _encode_slots(row, new, value, scales, fractions, blocks, dict(halves))


def _scales(row: Row, new: Row, blocks: Blocks | None, halves: Mapping[str, str]) -> dict[str, Any]:
    """Return the scales of the new slots that are stored as codes."""
    scales: dict[str, Any] = {}
    if blocks is None:
        return scales
    for name, values in new.items():
        if halves.get(name) in row and row[name].dtype != jnp.bfloat16:
            scales[name] = compact_numbers.block_scales(values, blocks)
    return scales


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
            codes = compact_numbers.quantize(
                x, scales[name], blocks, row[name].dtype, fractions(name), flat
            )
            # A block without a changed value keeps its scale, too: nothing is rounded again.
            old_codes = row[name]
            old_values = compact_numbers.decode(old_codes, scales[name], flat)
            if not flat:
                old_values = compact_numbers.split_blocks(old_values, blocks)
                x = compact_numbers.split_blocks(x, blocks)
                old_codes = compact_numbers.split_blocks(old_codes, blocks)
                codes = compact_numbers.split_blocks(codes, blocks)
            stored[name] = jnp.where(old_values == x, old_codes, codes).reshape(row[name].shape)
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
        master: The variable of its master.
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


def _update_by_leaf(
    stored: StoredState, inner: Inner, updates: Updates, platform: str
) -> tuple[Updates, Slots]:
    """Update large leaves one after the other, so that no float32 array of theirs is in memory.

    The update of all leaves is traced. The ending of its program that computes a large leaf
    elementwise is cut off, and computed together with the decoding and encoding of this leaf.
    """
    values = stored.values()
    inputs, treedef = trees.flatten((updates, *values))
    conditions = Conditions()
    update = _collecting(conditions, lambda *inputs: inner(*treedef.unflatten(inputs)))
    program, shapes = trace_inlined(update, platform, *inputs)
    results_treedef = trees.structure(shapes)
    leaves = _leaf_programs(stored, program, treedef, results_treedef, platform)

    # All other results, and what the endings read.
    results = program.jaxpr.outvars
    separate: set[int] = set()
    needed: list[Any] = []
    for leaf in leaves.values():
        separate.update(jax.tree.leaves(leaf.outputs))
        needed += leaf.ending.jaxpr.invars
    others = [var for number, var in enumerate(results) if number not in separate]
    computed = iter(by_slices.compute_values(program, inputs, [*others, *needed]))
    other_results = [
        None if number in separate else next(computed) for number in range(len(results))
    ]
    (updates, new_slots), reached = results_treedef.unflatten(other_results)
    for condition, holds in zip(conditions, reached, strict=True):
        report_condition(condition._replace(holds=holds))

    env = dict(zip(needed, computed, strict=True))
    params = jax.tree.leaves(stored.params)
    encoded = {
        i: _update_leaf(params[i], leaf, stored.halves, env, platform) for i, leaf in leaves.items()
    }
    return _encode(stored, *values, updates, new_slots, encoded)


def _leaf_programs(
    stored: StoredState, program: Subprogram, treedef: Any, results_treedef: Any, platform: str
) -> dict[int, _LeafProgram]:
    """Return the programs of large leaves updated separately, from the program of all leaves."""
    results = program.jaxpr.outvars
    _, slots, masters = treedef.unflatten(program.jaxpr.invars)
    (update_numbers, new_slot_numbers), _ = results_treedef.unflatten(range(len(results)))
    updates = trees.flatten_like(stored.params, update_numbers, "updates", is_leaf=is_update)
    rows = stored.rows(stored.slots)
    turns = stored.turns()
    are_large = stored.are_large()
    master_vars = jax.tree.leaves(masters)
    slot_rows = stored.rows(slots)
    number_rows = stored.rows(new_slot_numbers)
    leaves: dict[int, _LeafProgram] = {}
    for i, (path, p) in enumerate(trees.leaves_with_paths(stored.params)):
        # Rows of a table are not elementwise.
        if not are_large[i] or updates[i] is None or is_slices(updates[i]):
            continue
        shape = np.shape(p)
        numbers = number_rows[i]
        old = {
            name: var
            for name, var in slot_rows[i].items()
            if results[numbers[name]].aval.shape == shape
        }
        replaced = {
            name: numbers[name] for name, var in old.items() if results[numbers[name]] is not var
        }
        outputs = (updates[i], replaced)
        wanted = [results[number] for number in jax.tree.leaves(outputs)]
        slice_shape = shape
        if platform == TPU:
            slice_shape = by_slices.slice_shape(path, shape, stored.blocks[i])
        leaves[i] = _LeafProgram(
            row=rows[i],
            turns=turns[i],
            blocks=stored.blocks[i],
            slice_shape=slice_shape,
            master=master_vars[i],
            slots=old,
            outputs=outputs,
            ending=by_slices.find_ending(
                program, wanted, functools.partial(by_slices.is_of_leaf, shape)
            ),
        )
    return leaves


def _update_leaf(
    p: Array, leaf: _LeafProgram, halves: Mapping[str, str], env: Mapping[Any, Any], platform: str
) -> tuple[Array, Row]:
    """Decode, update and encode a leaf; return the new parameter, and its row of stored slots."""
    _, new_numbers = leaf.outputs
    written_names = {*new_numbers, *(halves.get(name) for name in new_numbers), REMAINDER}
    read_names = {*leaf.slots, *(halves.get(name) for name in leaf.slots)} - written_names
    others = [
        var for var in leaf.ending.jaxpr.invars if var not in (leaf.master, *leaf.slots.values())
    ]

    def values(carried: Any, read: Any) -> tuple[Array, Any, Row]:
        """Return the master of a slice, its update, and its new slots."""
        p, row = carried
        inputs, read_row = read
        old = _values(row | read_row, halves, platform == GPU)
        master = stored_value(p, row.get(REMAINDER))
        env_values = dict(zip(others, inputs, strict=True))
        env_values |= {var: old[name] for name, var in leaf.slots.items()}
        env_values[leaf.master] = master
        arguments = [env_values[var] for var in leaf.ending.jaxpr.invars]
        outputs = evaluate_on_slices(leaf.ending, arguments, leaf.slice_shape)
        if platform == TPU:
            # The new slots are not computed again for their codes.
            outputs = jax.lax.optimization_barrier(outputs)
        return master, *trees.structure(leaf.outputs).unflatten(outputs)

    def body(position: tuple[Any, ...], carried: Any, read: object) -> Any:
        master, u, new = values(carried, read)
        _, row = carried
        scales = _scales(row, new, leaf.blocks, halves)
        if platform == GPU:
            # Everything is computed again in a second kernel, not stored in float32.
            carried, read, scales = jax.lax.optimization_barrier((carried, read, scales))
            master, u, new = values(carried, read)
            _, row = carried

        def fractions(name: str) -> Array:
            return compact_numbers.fractions_at(leaf.slice_shape, leaf.turns[name], position)

        return _encode_slots(
            row, new, add(master, u), scales, fractions, leaf.blocks, halves, platform == GPU
        )

    written_row = {name: x for name, x in leaf.row.items() if name in written_names}
    read_row = {name: x for name, x in leaf.row.items() if name in read_names}
    carried = (p, written_row)
    read = ([env[var] for var in others], read_row)
    result: tuple[Array, Row] = by_slices.update_slices(
        body, p.shape, leaf.slice_shape, carried, read
    )
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_to_nearest(x: Array, blocks: Blocks, dtype: DTypeLike | None) -> tuple[Array, Array]:
    """Both halves of values, rounded to nearest; dtype=None means a bfloat16 and its remainder."""
    if dtype is None:
        return compact_numbers.split_halves(x)
    return compact_numbers.encode(x, blocks, dtype)


# States between formats: float32 slots, `compact` and `master_weights`.


def repack(
    state: TrainState, old_optimizer: OptimizerLike, new_optimizer: OptimizerLike
) -> TrainState:
    """Convert a state between an optimizer's formats: float32 slots, `compact`, `master_weights`.

    Args:
        state: A state of the old optimizer.
        new_optimizer: The same optimizer with or without `compact`, with another `keep`, `min_size`
            or `block`, or in `master_weights`.

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

    def spec(p: Any, *slots_of_leaf: Any) -> PartitionSpec:
        """The parameter's spec, or one from slots of its shape if only slots are split."""
        for leaf in (p, *slots_of_leaf):
            sharding = meshes.sharding_on_mesh(leaf) if np.shape(leaf) == np.shape(p) else None
            if sharding is not None and any(dims_of(sharding.spec)):
                return sharding.spec
        return PartitionSpec()

    specs = treedef.unflatten(list(map(spec, jax.tree.leaves(state.params), *slots)))
    mesh: Any = explicit_mesh(state)
    _, shardings = state_shardings(
        state.params, converted.slots, mesh, specs, None, slot_roles.roles_in(converted)
    )
    shapes = converted.replace(slots=jax.tree.map(trees.shape_of, converted.slots, shardings))
    return shard_like(shapes, state)(converted)


def _repacked(state: TrainState, old_optimizer: Optimizer, new_optimizer: Optimizer) -> TrainState:
    others = {name: tree for name, tree in state.slots.items() if is_model_state(name)}
    old_slots = {
        name: move_to_devices(tree) for name, tree in state.slots.items() if name not in others
    }
    _check("old_optimizer", old_slots, _shapes(state, old_optimizer))
    old = slot_roles.roles_of(old_optimizer, state.params).static_part()
    treedef = trees.structure(state.params)
    old_state = TrainState(state.params, old_slots, state.global_step, roles=old)
    masters = jax.tree.leaves(master_params(old_state))
    wanted = _shapes(state, new_optimizer)
    roles = slot_roles.roles_of(new_optimizer, state.params)
    leaves = [
        x.astype(p.dtype) for x, p in zip(masters, jax.tree.leaves(state.params), strict=True)
    ]
    slots: Slots = {}
    for name in wanted:
        if name in roles.halves.values():  # made with the slot that it completes
            continue
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
                leaves[i], new_leaves[i] = round_to_nearest(
                    masters[i].astype(jnp.float32), None, None
                )
            elif like is not None:
                new_leaves[i] = copy_as(masters[i], like.dtype)
        slots[name] = treedef.unflatten(new_leaves)
    # Of the old slots the new optimizer may lack those that a format adds, and no other.
    remaining: Slots = {}
    for name in old_slots.keys() - slots.keys():
        is_of_format = old.get(name) in (*HALVES, Role.MASTER, Role.DRAWN)
        if not is_of_format or (old.get(name) is Role.DRAWN and name in wanted):
            remaining[name] = old_slots[name]
    _check("new_optimizer", slots | remaining, wanted)
    new_roles = slot_roles.state_roles(new_optimizer, state.params)
    return TrainState(treedef.unflatten(leaves), slots | others, state.global_step, roles=new_roles)


def _shapes(state: TrainState, optimizer: Optimizer) -> Slots:
    return jax.eval_shape(
        lambda params, step: dict(optimizer.init(params, step)), state.params, step_array(state)
    )


def _check(argument: str, have: Slots, wanted: Slots) -> None:
    types = _types(have)
    wanted_types = _types(wanted)
    differing = sorted(
        path for path in types | wanted_types if types.get(path) != wanted_types.get(path)
    )
    if differing:
        raise ValueError(
            f"{argument}: must be the optimizer of the state, with or without jstep.compact "
            f"or jstep.master_weights; slots differ at {differing[:5]}"
        )


def _types(slots: Slots) -> dict[str, tuple[Any, str]]:
    return {path: (np.shape(x), str(x.dtype)) for path, x in trees.leaves_with_paths(slots)}


def _stored(name: str, tree: Tree, wanted: Slots, half: str | None, params: Tree) -> Slots:
    """Return a slot as the new optimizer stores it, with its half; {} if it does not fit."""
    if tree is None or trees.structure(tree) != trees.structure(wanted[name]):
        return {}
    if half is None:
        return {name: jax.tree.map(lambda x, y: x.astype(y.dtype), tree, wanted[name])}
    tops = trees.flatten_like(params, tree, name)
    codes = trees.flatten_like(params, wanted[name], name)
    halves = trees.flatten_like(params, wanted[half], name)
    for i, like in enumerate(halves):
        if like is not None:
            blocks = compact_numbers.blocks_between(codes[i].shape, like.shape)
            dtype = None if codes[i].dtype == jnp.bfloat16 else codes[i].dtype
            tops[i], halves[i] = round_to_nearest(tops[i].astype(jnp.float32), blocks, dtype)
    treedef = trees.structure(params)
    return {name: treedef.unflatten(tops), half: treedef.unflatten(halves)}
