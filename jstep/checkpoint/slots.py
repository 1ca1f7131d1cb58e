"""The leaves of a state as checkpoints describe them: kinds, slots that may be missing, and those left out."""

import collections
import dataclasses
import functools
import itertools
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.manifest import CheckpointError, Leaf, LeftOut, Recorded
from jstep.core import trees
from jstep.core.checks import kind, listed
from jstep.core.compact_numbers import opened
from jstep.core.selection import VarList, resolve
from jstep.core.slot_roles import AGES, COPIES, Role, Roles, roles_in
from jstep.state.fingerprints import as_text, leaf_key, stacked, words_of
from jstep.state.train_state import TrainState, owners

# Records of the leaves of a state, and their conversion to and from stored arrays.

# Types that tensorstore lacks are stored as a type with the same values (integers) or the same bits (floats).
_CARRIERS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}

_Record = TypeVar("_Record", Leaf, LeftOut)


def named_leaves(state: Any) -> list[tuple[Leaf, Any]]:
    """Return every leaf of a state with its record.

    Raises:
        TypeError: A leaf is not an array or a number, or has no value (names its path).
        ValueError: A leaf was donated (names its path).
    """
    flat = jax.tree_util.tree_leaves_with_path(state)
    paths = [trees.path_str(keys) for keys, _ in flat]
    # Orbax joins keys with dots.
    arrays = unique(urllib.parse.quote(path, safe="/", errors="surrogatepass").replace(".", "%2E") for path in paths)
    out = []
    for (keys, leaf), path, array in zip(flat, paths, arrays, strict=True):
        leaf = _with_value(leaf, path)
        nbytes, dtype = int(trees.key_data(leaf).nbytes), str(leaf.dtype)
        impl = str(jax.random.key_impl(leaf)) if trees.is_key(leaf) else None
        stored, carrier = array if leaf.size else None, _CARRIERS.get(dtype)
        out.append((Leaf(path, keys_of(keys), tuple(leaf.shape), dtype, nbytes, stored, carrier, impl), leaf))
    for i, half in halves_in(state).items():
        out[i] = dataclasses.replace(out[i][0], half=out[half][0].array), out[i][1]
    return out


def require_value(leaf: Any, what: str) -> None:
    """Reject a leaf without a value to save, of a state or of weights.

    Raises:
        TypeError: It is traced or masked.
        ValueError: It was donated.
    """
    if trees.is_traced(leaf):
        raise TypeError(f"{what} is traced; save outside of jit, with what a compiled step returned")
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, and masks are not saved; pass leaf.filled(…)")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{what} was donated to a step and deleted; save what the step returned, before passing it on")


def _with_value(leaf: Any, path: str) -> Any:
    require_value(leaf, f"state: {path!r}")
    if isinstance(leaf, jax.Array):
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"state: {path!r} is on only one of {jax.process_count()} processes; a state that all processes save "
                "must be sharded over all of them, for example by jstep.shard_state(state, mesh, param_specs)"
            )
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        return trees.number(leaf, f"state: {path!r}")
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV" and leaf.dtype.names is None:
        # A copy, because the caller may modify the array while it is being saved, in native byte order.
        return np.array(leaf, leaf.dtype.newbyteorder("="))
    what = kind(leaf) if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
    raise TypeError(
        f"state: {path!r} is {what}, which is not an array of numbers, a key or a number, and cannot be saved; "
        "pass it as extra, or remove it from the state"
    )


def to_stored(record: Leaf, leaf: Any) -> Any:
    """Return the array to store for a leaf, of a type that the storage format supports."""
    return trees.key_data(leaf) if record.stored_as is None else _carried(record, leaf, record.stored_as)


def value_of(record: Leaf, half: Leaf | None, arrays: Mapping[str, Any]) -> Any:
    """Return the leaf of what was stored for it; of its two halves, if `compact` stored it in two.

    Args:
        record: The leaf.
        half: The leaf with its other half; None if it has none, or is wanted without it.
        arrays: The stored arrays by name. The value of NumPy arrays is one.
    """
    value = zeros_of(record) if record.array is None else arrays[record.array]
    if record.stored_as is not None:
        value = _carried(record, value, record.dtype)
    if half is None or half.array is None:
        return value
    both = opened(value, arrays[half.array])
    return np.asarray(both) if isinstance(value, np.ndarray) else both


def _carried(record: Leaf, array: Any, dtype: str) -> Any:
    """Convert a leaf to the type that carries it, or back: floats by their bits, integers by their values."""
    if not record.dtype.startswith("float"):
        return array.astype(dtype)
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def as_integers(array: np.ndarray[Any, Any], dtype: Any, path: str) -> np.ndarray[Any, Any]:
    """Convert a stored array to the integer dtype of the leaf at a path of the target.

    Raises:
        ValueError: The dtype cannot represent a number of it.
    """
    converted = array.astype(dtype)
    if (converted != array).any():
        raise ValueError(
            f"target: {path!r} is {converted.dtype} and cannot represent {array.max()}; enable jax_enable_x64"
        )
    return converted


def stored_kind(record: Leaf) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of the array that is stored for a leaf."""
    if record.key_impl is not None:
        key = _key_data(record.key_impl)
        return (*record.shape, *key.shape), str(key.dtype)
    return record.shape, record.stored_as or record.dtype


def zeros_of(record: Leaf) -> np.ndarray[Any, Any]:
    """Return the array of a leaf without elements, of which nothing is stored."""
    try:
        shape, dtype = stored_kind(record)
        return np.zeros(shape, jnp.dtype(dtype))
    except (TypeError, ValueError, MemoryError) as error:  # a malicious manifest
        raise CheckpointError(
            f"the manifest is not what jstep writes: {record.path!r} is {record.dtype} of shape {record.shape!s:.50} "
            f"({error!s:.100})"
        ) from None


@functools.cache
def _key_data(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def leaves_by_id(saved: Sequence[_Record]) -> dict[tuple[str, int], _Record]:
    """Return the leaves by path and number, which distinguishes leaves with the same path."""
    return dict(zip(ids(leaf.path for leaf in saved), saved, strict=True))


def ids(paths: Iterable[str]) -> list[tuple[str, int]]:
    """Return each path with its number among equal paths: the leaves of {'a': {'b': x}, 'a/b': y} share one."""
    numbers: dict[str, Iterator[int]] = collections.defaultdict(lambda: itertools.count(1))
    return [(path, next(numbers[path])) for path in paths]


def unique(paths: Iterable[str]) -> list[str]:
    """Return a name for each path, all different: the path, followed by a number from its second occurrence on."""
    paths = list(paths)
    names, taken = [], set(paths)
    for path, number in ids(paths):
        numbered = (f"{path}#{n}" for n in itertools.count(number))
        names.append(path if number == 1 else next(name for name in numbered if name not in taken))
        taken.add(names[-1])
    return names


# Leaves that `Saver(leave_out=…)` does not save, and their fingerprints.


def left_out_indices(state: Any, leave_out: VarList) -> set[int]:
    """Return the indices, among the leaves of a state, of the parameters that are left out and of their slots.

    Raises:
        TypeError: `leave_out` has none of the forms of `var_list`.
        ValueError: An entry matches no parameter, or the state has no params.
    """
    if leave_out is None:
        return set()
    params, slots = _field(state, PARAMS), _field(state, SLOTS)
    if params is None:
        raise ValueError(
            f"leave_out: selects among the params of a state, but this {type(state).__name__} has none; save a "
            "TrainState, or a dict with 'params'"
        )
    chosen = resolve(params, leave_out, "leave_out")
    roles, numbers = roles_in(state), _numbers(state)
    left_out = {i for i, is_chosen in zip(jax.tree.leaves(_field(numbers, PARAMS)), chosen, strict=True) if is_chosen}
    for name, tree in slots.items() if isinstance(slots, Mapping) else ():
        places = owners(str(name), tree, params, roles)
        of_slot = zip(jax.tree.leaves(_field(numbers, SLOTS)[name]), places, strict=True)
        left_out |= {i for i, place in of_slot if place is not None and chosen[place]}
    return left_out


def _field(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


def started_slots(named: Sequence[tuple[Recorded, Any]]) -> Callable[[], tuple[LeftOut, ...]]:
    """Start computing the fingerprints of leaves on their devices; the returned function waits for them."""
    keys = [leaf_key(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in named]
    begun = stacked([value for _, value in named], np.stack(keys)) if keys else []

    def records() -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(leaf.path, leaf.keys, leaf.shape, leaf.dtype, as_text(words))
            for (leaf, _), words in zip(named, words_of(begun), strict=True)
        )

    return records


def changed_leaves(pairs: Sequence[tuple[LeftOut, Any]]) -> list[LeftOut]:
    """Return those left-out leaves whose values in a target differ from the fingerprint."""
    return [leaf for (leaf, _), now in zip(pairs, started_slots(pairs)(), strict=True) if now != leaf]


# Slots in checkpoints: steps, guards, copies of parameters, and fresh slots that meet an old age.

GLOBAL_STEP = "global_step"
PARAMS = "params"
SLOTS = "slots"
_WIDTHS = {"int32", "int64"}
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)
_AVERAGING = "with_moving_average"

Keys = tuple[str, ...]
Kind = tuple[tuple[int, ...], str]


def keys_of(path: Any) -> Keys:
    """Return the keys of a leaf as strings."""
    return tuple(trees.path_str((key,)) for key in path)


def converts(keys: Keys, saved: Kind, wanted: Kind, steps: Sequence[int]) -> bool:
    """Return whether a leaf is a step count, which may convert between 32 and 64 bits.

    These are the global step and integer scalars among the slots, never parameters.

    Args:
        keys: The keys of the leaf in the target.
        saved: Its shape and dtype in the checkpoint.
        wanted: Its shape and dtype in the target.
        steps: The shape of the target's global step: a population has a step for each of its members.
    """
    if saved[0] != wanted[0] or {saved[1], wanted[1]} != _WIDTHS or PARAMS in keys:
        return False
    return keys[-1] == GLOBAL_STEP or (keys[0] == SLOTS and saved[0] in ((), tuple(steps)))


def is_of_guard(keys: Keys, roles: Roles) -> bool:
    """Return whether a leaf of a target is a slot of `skip_nonfinite` or `dynamic_loss_scale`."""
    return len(keys) == 2 and keys[0] == SLOTS and roles.get(keys[1]) in _GUARDS


def halves_in(tree: Any) -> dict[int, int]:
    """Return the leaves that `compact` stores in two → those with their other halves: indices among all leaves."""
    found: dict[int, int] = {}
    for state, numbers in _states_in(tree):
        roles = roles_in(state)
        pairs = [(numbers.slots.get(name), numbers.slots.get(half)) for name, half in roles.halves.items()]
        own = (name for name in roles.of(Role.REMAINDER) if name not in roles.halves.values())
        for both in [*pairs, *((numbers.params, numbers.slots.get(name)) for name in own)]:
            if all(trees.is_like(state.params, one) for one in both):
                places = zip(*(trees.flatten_like(state.params, one, SLOTS) for one in both), strict=True)
                found |= {place: half for place, half in places if place is not None and half is not None}
    return found


def copied(target: Any) -> dict[int, list[int]]:
    """Return the leaves of slots that begin as copies → the leaves they are copies of, in order of preference.

    A slot inside `master_weights` begins as a copy of the master, or without one in the checkpoint, of the parameter.
    Both are indices among the leaves of the target. Only a `TrainState` knows the roles of its slots.
    """
    found: dict[int, list[int]] = {}
    for state, numbers in _states_in(target):
        params, roles = jax.tree.leaves(numbers.params), roles_in(state)
        mine = [
            (roles[name], place, number)
            for name in roles.of(*COPIES)
            if name in state.slots
            for place, number in zip(
                owners(name, state.slots[name], state.params, roles), jax.tree.leaves(numbers.slots[name]), strict=True
            )
            if place is not None
        ]
        masters = {place: number for role, place, number in mine if role is Role.MASTER}
        for role, place, number in mine:
            inside = [masters[place]] if role is Role.MASTER_COPY and place in masters else []
            found[number] = [*inside, params[place]]
    return found


def _states_in(tree: Any) -> list[tuple[TrainState, TrainState]]:
    """Return each state in a tree, with a copy whose leaves are their indices among all leaves of the tree."""
    both = tree, _numbers(tree)
    nodes = (jax.tree.leaves(one, is_leaf=lambda node: isinstance(node, TrainState)) for one in both)
    return [both for both in zip(*nodes, strict=True) if isinstance(both[0], TrainState)]


def _numbers(tree: Any) -> Any:
    """Return a tree with the numbers of its leaves in their places."""
    return jax.tree.unflatten(trees.structure(tree), range(len(jax.tree.leaves(tree))))


def is_ageless(keys: Keys, leaf: Any, roles: Roles) -> bool:
    """Return whether a slot is not subject to bias correction: a count, a guard's scalar or a held value."""
    if keys[1] in roles:
        return roles.has_one_value(keys[1]) and roles[keys[1]] is not Role.SHARED
    return str(getattr(leaf, "dtype", "")) in _WIDTHS and not getattr(leaf, "shape", (0,))


def stale_warning(target: Any, values: Sequence[Any], left: Sequence[int]) -> str:
    """Return a warning about slots that stayed fresh while their state was restored to an old age; "" if none did.

    An optimizer corrects its slots by their age, global_step + 1 − start_step: fresh zeros that count as 10 000
    steps old make its first updates several times too large.

    Args:
        target: The tree that was restored into.
        values: Its leaves after the restore.
        left: The indices of the leaves that nothing was restored into.
    """
    leaves = jax.tree_util.tree_leaves_with_path(target)
    keys = [keys_of(path) for path, _ in leaves]
    before = dict(zip(keys, (leaf for _, leaf in leaves), strict=True))
    after = dict(zip(keys, values, strict=True))
    roles = roles_in(target)
    names = [key[1] for key in keys if len(key) == 2 and key[0] == SLOTS]
    starts = [name for name in names if roles.get(name) in AGES]
    stale: dict[str, list[str]] = {}
    for index in left:
        key = keys[index]
        if len(key) < 2 or key[0] != "slots" or key[1] in starts or is_ageless(key, leaves[index][1], roles):
            continue
        of_scope = max((s for s in starts if key[1].startswith(_scope(s))), key=len, default=None)
        averaging = f"{_scope(key[1])}{_AVERAGING}/"
        own = f"{averaging}{key[1].rpartition('/')[2]}/"
        role = roles.get(key[1])
        first = [s for s in starts if s.startswith(own) or (role is Role.AVERAGE and s.startswith(averaging))]
        # A copy has no bias correction, but by an age of its own.
        start = min(
            first, default=None if role in (*COPIES, Role.REMAINDER) else of_scope, key=lambda s: not s.startswith(own)
        )
        if start is not None and (_age(after, start) or 0) > 0 and _age(before, start) != _age(after, start):
            stale.setdefault(start, []).append("/".join(key))
    return " ".join(_text(start, paths, after) for start, paths in stale.items())


def _age(values: dict[tuple[str, ...], Any], start: str) -> int | None:
    step, born = _number(values.get(("global_step",))), _number(values.get(("slots", start)))
    return None if step is None or born is None else step - born


def _number(leaf: Any) -> int | None:
    if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and not leaf.is_deleted() and not leaf.ndim:
        return int(np.asarray(leaf.addressable_data(0)))
    return int(leaf) if isinstance(leaf, np.ndarray | np.generic | int) and not np.ndim(leaf) else None


def _scope(slot: str) -> str:
    return slot[: slot.rfind("/") + 1]


def _text(start: str, paths: Sequence[str], values: dict[tuple[str, ...], Any]) -> str:
    age, step = _age(values, start), _number(values["global_step",])
    shown = listed(list(map(repr, paths)), 5)
    return (
        f"Fresh slots meet an old age: {shown} were left as they were, and slots/{start} makes them {age} steps old, "
        "so that the bias correction does not treat them as fresh and their first updates are too large. Give them "
        'their own age: use the optimizer partition({"old": …, "new": …}, labels), which keeps a start_step for '
        f"each label, and a target from TrainState.create(params, optimizer, global_step={step}); names= maps "
        "leaves that were saved under other slots."
    )
