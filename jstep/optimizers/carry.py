"""`carry`: the slots of a state for parameters of other shapes, such as a vocabulary that has grown."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import placement, trees
from jstep.core.annotations import Tree
from jstep.core.checks import describe_type, format_items
from jstep.core.trees import OptimizerLike
from jstep.optimizers.compact import round_to_nearest
from jstep.slots.compact_numbers import blocks_between
from jstep.slots.roles import AGES, COPIES, Role, Roles, roles_in
from jstep.state.copies import follows
from jstep.state.slots import has_one_value, slot_values
from jstep.state.train_state import MODEL_STATE, TrainState, require_state

_FROM_PARAMS = (*COPIES, Role.AVERAGE)
"""Slots whose new numbers come from the parameters."""
_STALE = ". Fresh numbers meet an old age: their first updates are too large; partition gives them an age of their own"
_logger = logging.getLogger("jstep")
_Id = tuple[str, int]
_Rows = Sequence[Any]
"""For each axis of a parameter the old rows of its new rows, −1 for added rows; None for the leading rows."""


def carry(
    state: TrainState, params: Tree, optimizer: OptimizerLike, *, index: Mapping[str, Any] | None = None
) -> TrainState:
    """Return a state of other parameters at the same step, whose slots keep the part that old and new ones share.

    As `TrainState.create(params, optimizer, global_step=…, model_state=…)`, except that a slot keeps its values, by
    its name and the path of its parameter: along each axis the leading part that both have. New numbers of averages,
    copies and masters come from the parameters. Ages, held values and guards stay.

    Args:
        state: The state.
        params: The new parameters, in their final form: only slots are carried over.
        optimizer: The optimizer of the new state.
        index: Path of a parameter → the old row of each new row, −1 for an added one, if these are not the leading
            rows; rows beyond the list are added ones. A tuple has an entry for each axis, None for the leading part.

    Raises:
        TypeError: The state, the optimizer, the index or its rows have the wrong type.
        ValueError: A path of index is not in both, has another rank, or rows that did not exist.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.momentum(0.1, 0.9)
        >>> state = jstep.TrainState.create({"table": jnp.ones((2, 1))}, optimizer)
        >>> state, _ = jstep.minimize(lambda params: jnp.sum(params["table"]), optimizer)(state)
        >>> grown = jstep.carry(state, {"table": jnp.zeros((3, 1))}, optimizer)
        >>> jstep.get_slot(grown, "momentum", "table").tolist(), int(grown.global_step)
        ([[1.0], [1.0], [0.0]], 1)
    """
    require_state(state)
    if any(map(placement.is_shape, jax.tree.leaves((state, params)))):
        return jax.eval_shape(lambda state, params: carry(state, params, optimizer, index=index), state, params)
    step, model_state = state.global_step, state.model_state
    fresh = TrainState.create(params, optimizer, global_step=step, model_state=model_state)
    moved = _Moved(state, fresh, index)
    slots = {name: moved.slot(name) for name in fresh.slots if name not in moved.halves}
    roles = roles_in(fresh)
    new = TrainState(fresh.params, {**fresh.slots, **slots, **moved.stored_halves}, fresh.global_step, roles=roles)
    moved.log(roles)
    return new


class _Moved:
    """The transfer of slots to a fresh state, and its log; `halves` are the slots that complete another slot."""

    def __init__(self, old: TrainState, fresh: TrainState, index: object) -> None:
        self._old, self._fresh = old, fresh
        self._new_ids = trees.ids(trees.leaf_paths(fresh.params))
        self._old_ids = trees.ids(trees.leaf_paths(old.params))
        self._places = {key: i for i, key in enumerate(self._old_ids)}
        self._before, self._now = jax.tree.leaves(old.params), jax.tree.leaves(fresh.params)
        before, now = dict(zip(self._old_ids, self._before, strict=True)), zip(self._new_ids, self._now, strict=True)
        self._rows = _checked_index(index, before, dict(now))
        self._roles = roles_in(fresh)
        self._follow = follows(self._roles)
        self.halves = set(self._roles.halves.values())
        self.stored_halves: dict[str, Any] = {}
        self._in_part: list[str] = []
        self._created: list[str] = []

    def slot(self, name: str) -> Any:
        new, old = self._fresh.slots[name], self._old
        if name == MODEL_STATE:
            return new
        if name not in old.slots:
            self._created.append(name)
            return new
        if has_one_value(name, new, self._fresh.params, self._roles):
            if _kinds(old.slots[name]) == _kinds(new):
                return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), old.slots[name])
            self._created.append(name)
            return new
        half, old_half = self._roles.halves.get(name), roles_in(old).halves.get(name)
        params, fresh = old.params, self._fresh
        was, was_stored = _parts(params, slot_values(old, name)), _parts(params, old.slots[name])
        was_half = _parts(params, old.slots[old_half]) if old_half in old.slots else [None] * len(self._before)
        now, stored = _parts(fresh.params, slot_values(fresh, name)), _parts(fresh.params, new)
        stored_half = [None] * len(self._now) if half is None else _parts(fresh.params, fresh.slots[half])
        for i, key in enumerate(self._new_ids):
            j = self._places.get(key)
            if now[i] is None:
                continue
            path = f"{name}/{key[0]}"
            if j is None or was[j] is None or np.ndim(self._before[j]) != np.ndim(self._now[i]):
                self._created.append(path)
                if self._roles.get(name) in _FROM_PARAMS:
                    stored[i], stored_half[i] = _stored(_as(self._now[i], now[i]), stored[i], stored_half[i])
                continue
            is_same = np.shape(self._before[j]) == np.shape(self._now[i]) and key not in self._rows
            kept = _kinds((was_stored[j], was_half[j])) == _kinds((stored[i], stored_half[i]))
            role = self._roles.get(name)
            is_compared = role in (Role.MASTER, Role.REMAINDER) or name in self._follow
            if is_same and kept and not is_compared:
                pair = (was_stored[j], was_half[j])
                stored[i], stored_half[i] = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), pair)
            else:
                value = self._value(name, was[j], now[i], j, i, is_same=is_same)
                stored[i], stored_half[i] = _stored(value, stored[i], stored_half[i])
            stored[i] = _placed(stored[i], was_stored[j], self._now[i])
        treedef = trees.structure(fresh.params)
        if half is not None:
            self.stored_halves[half] = treedef.unflatten(stored_half)
        return treedef.unflatten(stored)

    def _value(self, name: str, was: Any, now: Any, j: int, i: int, *, is_same: bool) -> Any:
        """The value of a slot for a parameter that was `self._before[j]` and is `self._now[i]`."""
        path, role = f"{name}/{self._new_ids[i][0]}", self._roles.get(name)
        before, param = self._before[j], self._now[i]
        rows: _Rows | None = self._rows.get(self._new_ids[i])
        base = _as(param, now) if role in _FROM_PARAMS else now
        if role is Role.REMAINDER:  # it belongs to the bits of the parameter
            value, _, is_whole = _overlap(was, now, rows)
            bits, inside, _ = _overlap(before, param, rows)
            value = jnp.where(inside & (bits == placement.on_devices(param)), value, now)
        elif np.shape(was) == np.shape(before) and np.shape(base) == np.shape(param):
            value, _, is_whole = _overlap(was, base, rows)
            if role is Role.MASTER:  # it stays where it rounds to the parameter
                value = jnp.where(value.astype(param.dtype) == placement.on_devices(param), value, base)
            elif name in self._follow:
                bits, inside, _ = _overlap(before, param, rows)
                pair = (x.astype(value.dtype) for x in (bits, _unsharded(param)))
                value = jnp.where(inside & (bits != _unsharded(param)), self._follow[name](value, *pair), value)
        elif (axis := _left_out(np.shape(before), np.shape(was))) is not None and axis == _left_out(
            np.shape(param), np.shape(base)
        ):
            value, _, is_whole = _overlap(was, base, None if rows is None else [*rows[:axis], *rows[axis + 1 :]])
        elif is_same and np.shape(was) == np.shape(base):
            value, is_whole = placement.on_devices(was).astype(base.dtype), True
        else:
            self._created.append(path)
            return base
        if not is_whole:
            self._in_part.append(path)
        return value

    def log(self, roles: Roles) -> None:
        dropped = [f"params/{key[0]}" for key in self._old_ids if key not in set(self._new_ids)]
        dropped += [name for name in self._old.slots if name not in self._fresh.slots]
        if not (self._in_part or self._created or dropped):
            return
        corrected = any(name in self._old.slots for name in roles.of(*AGES))
        is_stale = corrected and any(roles.get(path.split("/")[0]) is None for path in [*self._in_part, *self._created])
        parts = {"in part": self._in_part, "new": self._created, "dropped": dropped}
        _logger.log(
            logging.WARNING if is_stale else logging.INFO,
            "carried slots over changed parameters%s%s%s%s",
            *(format_items(what, list(map(repr, names))) for what, names in parts.items()),
            _STALE if is_stale else "",
        )


def _parts(params: Tree, tree: Tree) -> list[Any]:
    return trees.flatten_like(params, tree, "slot")


def _kinds(tree: Tree) -> Any:
    leaves, structure = trees.flatten(tree)
    return structure, [(np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]


def _as(param: Any, like: Any) -> Any:
    """A parameter in the dtype of a slot; the slot's own values if the shapes differ."""
    return placement.on_devices(param).astype(like.dtype) if np.shape(param) == np.shape(like) else like


def _left_out(shape: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The only axis without which `shape` is `part`."""
    axes = [axis for axis in range(len(shape)) if shape[:axis] + shape[axis + 1 :] == tuple(part)]
    return axes[0] if len(axes) == 1 else None


def _overlap(old: Any, fresh: Any, rows: _Rows | None) -> tuple[Any, Any, bool]:
    """Return an old array where it overlaps a fresh one, a mask, and whether it overlaps everywhere."""
    old, fresh = (_unsharded(x) for x in (old, fresh))
    if np.ndim(old) != np.ndim(fresh) or 0 in np.shape(old):
        return fresh, jnp.zeros(np.shape(fresh), bool), False
    inside: Any = jnp.ones(np.shape(fresh), bool)
    is_whole = True
    for axis, (size, had) in enumerate(zip(np.shape(fresh), np.shape(old), strict=True)):
        old_rows = None if rows is None else rows[axis]
        at = np.arange(size) if old_rows is None else np.concatenate([old_rows, np.full(size - len(old_rows), -1)])
        at = np.where(at < had, at, -1).astype(int)
        is_whole &= bool((at >= 0).all())
        if not np.array_equal(at, np.arange(had)):
            old = jnp.take(old, np.maximum(at, 0), axis=axis)
        inside &= jnp.expand_dims(jnp.asarray(at >= 0), [other for other in range(np.ndim(fresh)) if other != axis])
    return jnp.where(inside, old.astype(fresh.dtype), fresh), inside, is_whole


def _unsharded(x: Any) -> Any:
    """An array that can be indexed; on a mesh with Explicit axes JAX refuses that."""
    is_sharded = not trees.is_traced(x) and isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding)
    return jnp.asarray(np.asarray(x)) if is_sharded else placement.on_devices(x)


def _stored(value: Any, code: Any, half: Any) -> tuple[Any, Any]:
    """A value in the format of the slot: unchanged, or as codes and their other half."""
    if half is None:
        return value.astype(code.dtype), None
    blocks = blocks_between(code.shape, half.shape)
    return round_to_nearest(value.astype(jnp.float32), blocks, None if code.dtype == jnp.bfloat16 else code.dtype)


def _placed(new: Any, old: Any, param: Any) -> Any:
    """A slot placed like the old one, or like its parameter, if its shape allows it."""
    for like in (old, param):
        sharding = getattr(like, "sharding", None)
        if (
            trees.is_traced(new)
            or not isinstance(sharding, jax.sharding.NamedSharding)
            or np.ndim(new) != np.ndim(like)
        ):
            continue
        try:
            sharding.shard_shape(np.shape(new))
        except ValueError:
            continue
        return jax.device_put(new, sharding)
    return new


def _checked_index(index: object, old: Mapping[_Id, Any], new: Mapping[_Id, Any]) -> dict[_Id, list[Any]]:
    """Id of a parameter → for each axis the old rows of the new ones, or None."""
    if index is None:
        return {}
    if not isinstance(index, Mapping):
        raise TypeError(f"index: must be a mapping from paths of parameters to rows, got {describe_type(index)}")
    checked = {}
    for path, entry in index.items():
        key = (path, 1) if (path, 1) in new else (path, 0)
        if key not in new or key not in old:
            near = trees.suggest_names(str(path), [each[0] for each in new])
            raise ValueError(f"index: {path!r} must be a path of the parameters before and after{near}")
        before, after = np.shape(old[key]), np.shape(new[key])
        if len(before) != len(after):
            raise ValueError(f"index: {path!r} must keep its rank, was {before} and is {after}: its slots are new")
        axes = list(entry) if isinstance(entry, tuple) else [entry]
        if len(axes) > len(before):
            raise ValueError(f"index: {path!r} must have at most {len(before)} entries, one an axis, got {len(axes)}")
        axes += [None] * (len(before) - len(axes))
        checked[key] = [
            None if rows is None else _checked_rows(path, axis, rows, before[axis], after[axis])
            for axis, rows in enumerate(axes)
        ]
    return checked


def _checked_rows(path: object, axis: int, rows: Any, before: int, after: int) -> Any:
    array = np.asarray(rows)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"index: {path!r}: must be a list of row numbers, got {describe_type(rows)}")
    if len(array) > after:
        raise ValueError(f"index: {path!r}: must be at most the {after} rows of axis {axis}, got {len(array)}")
    if (bad := array[(array < -1) | (array >= before)]).size:
        raise ValueError(f"index: {path!r}: rows of axis {axis} must be −1 or below {before}, got {bad[0]}")
    return array.astype(np.int64)
