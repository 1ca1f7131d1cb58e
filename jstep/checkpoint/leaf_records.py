"""Leaves of a state: one pass over them, their records in a checkpoint, and their stored arrays."""

import dataclasses
import functools
import itertools
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.checkpoint.manifest import CheckpointError, Leaf, LeftOut, Recorded
from jstep.core import device_values, selection, trees
from jstep.core.annotations import Tree
from jstep.core.checks import describe_type
from jstep.slots import compact_numbers
from jstep.slots.roles import Role, roles_in
from jstep.state.fingerprints import as_hexadecimal, leaf_key, stacked_words, start_fingerprints
from jstep.state.slots import owners
from jstep.state.train_state import TrainState

GLOBAL_STEP = "global_step"
PARAMS = "params"
SLOTS = "slots"
WIDTHS = {"int32", "int64"}
"""The dtypes of counts."""

Keys = tuple[str, ...]


class StateLeaves:
    """The leaves of a tree, such as a state, flattened once, with what their places in states say of them.

    Attributes:
        values: The leaves.
        keys: The keys of each leaf's path.
        paths: Keys joined by slashes.
    """

    def __init__(self, tree: Tree) -> None:
        structure: Any
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        typed = [[(key, type(getattr(key, "key", None))) for key in entries] for entries, _ in flat]  # 1 equals True
        names = {key: trees.path_str(key[:1]) for key in {key for keys in typed for key in keys}}
        self.tree, self._structure = tree, structure
        self.values = [leaf for _, leaf in flat]
        self.keys: list[Keys] = [tuple([names[key] for key in keys]) for keys in typed]
        self.paths = ["/".join(keys) for keys in self.keys]

    @functools.cached_property
    def _numbers(self) -> Any:
        """A copy of the tree that holds the indices of the leaves."""
        return self._structure.unflatten(range(len(self.values)))

    @functools.cached_property
    def states(self) -> list[tuple[TrainState, TrainState]]:
        """Each state in the tree, with a copy that holds the indices of its leaves."""
        both = self.tree, self._numbers
        nodes = (jax.tree.leaves(root, is_leaf=lambda node: isinstance(node, TrainState)) for root in both)
        return [pair for pair in zip(*nodes, strict=True) if isinstance(pair[0], TrainState)]

    @functools.cached_property
    def halves(self) -> dict[int, int]:
        """The leaves that `compact` stores in two → their other halves, as indices."""
        halves: dict[int, int] = {}
        for state, numbers in self.states:
            roles = roles_in(state)
            pairs = [(numbers.slots.get(name), numbers.slots.get(half)) for name, half in roles.halves.items()]
            own = (name for name in roles.of(Role.REMAINDER) if name not in roles.halves.values())
            for both in [*pairs, *((numbers.params, numbers.slots.get(name)) for name in own)]:
                if all(trees.is_like(state.params, part) for part in both):
                    places = zip(*(trees.flatten_like(state.params, part, SLOTS) for part in both), strict=True)
                    halves |= {place: half for place, half in places if place is not None and half is not None}
        return halves

    def left_out(self, leave_out: selection.VarList) -> set[int]:
        """Return the indices of the left-out parameters and of their slots."""
        if leave_out is None:
            return set()
        (params, of_params), (slots, of_slots) = (
            (_field(self.tree, name), _field(self._numbers, name)) for name in (PARAMS, SLOTS)
        )
        if params is None:
            raise ValueError(
                f"leave_out: selects among the params of a state, but this {type(self.tree).__name__} has none; save a "
                "TrainState, or a dict with 'params'"
            )
        chosen = selection.resolve(params, leave_out, "leave_out")
        left_out = {i for i, is_chosen in zip(jax.tree.leaves(of_params), chosen, strict=True) if is_chosen}
        for name, tree in slots.items() if isinstance(slots, Mapping) else ():
            places = owners(str(name), tree, params, roles_in(self.tree))
            of_slot = zip(jax.tree.leaves(of_slots[name]), places, strict=True)
            left_out |= {i for i, place in of_slot if place is not None and chosen[place]}
        return left_out

    def records(self) -> list[tuple[Leaf, Any]]:
        """Return what a checkpoint says of each leaf, and its value."""
        # Orbax joins keys with dots.
        quoted = (urllib.parse.quote(path, safe="/", errors="surrogatepass").replace(".", "%2E") for path in self.paths)
        out = []
        for keys, path, array, leaf in zip(self.keys, self.paths, unique(quoted), self.values, strict=True):
            value = _with_value(leaf, path)
            is_key, dtype = trees.is_key(value), str(value.dtype)
            nbytes, impl = int(value.nbytes), None
            if is_key:
                nbytes, impl = int(trees.key_data(value).nbytes), str(jax.random.key_impl(value))
            stored, shape = array if value.size else None, tuple(value.shape)
            out.append((Leaf(path, keys, shape, dtype, nbytes, stored, _CARRIERS.get(dtype), impl), value))
        for i, half in self.halves.items():
            out[i] = dataclasses.replace(out[i][0], half=out[half][0].array), out[i][1]
        return out


def _field(state: Tree, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)


# Records of leaves, and their conversion to and from stored arrays.

# Types that tensorstore lacks are stored as a type with the same values (integers) or the same bits (floats).
_CARRIERS = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "uint8"}

_Record = TypeVar("_Record", Leaf, LeftOut)


def require_value(leaf: object, what: str) -> None:
    """Raise an error for a leaf of a state or of weights that is traced, masked or donated."""
    if trees.is_traced(leaf):
        raise TypeError(f"{what} is traced; save outside of jit, with what a compiled step returned")
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, and masks are not saved; pass leaf.filled(…)")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f"{what} was donated to a step and deleted; save what the step returned, before passing it on")


def _with_value(leaf: object, path: str) -> Any:
    require_value(leaf, f"state: {path!r}")
    if isinstance(leaf, jax.Array):
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise ValueError(
                f"state: {path!r} is on only one of {jax.process_count()} processes; a state that all processes save "
                "must be sharded over all of them, for example by jstep.shard_state(state, mesh, param_specs)"
            )
        return leaf
    if trees.is_python_number(leaf):
        return device_values.number(leaf, f"state: {path!r}")
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufcV" and leaf.dtype.names is None:
        # A copy, because the caller may modify the array while it is being saved, in native byte order.
        return np.array(leaf, leaf.dtype.newbyteorder("="))
    what = describe_type(leaf) if isinstance(leaf, np.ndarray | np.generic) else type(leaf).__name__
    raise TypeError(
        f"state: {path!r} is {what}, which is not an array of numbers, a key or a number, and cannot be saved; "
        "pass it as extra, or remove it from the state"
    )


def to_stored(record: Leaf, leaf: object) -> Any:
    return trees.key_data(leaf) if record.stored_as is None else _carried(record, leaf, record.stored_as)


def leaf_value(record: Leaf, half: Leaf | None, arrays: Mapping[str, Any]) -> Any:
    """Return a leaf's value from its stored array, or from both halves if `compact` stored it in two."""
    value = zero_leaf(record) if record.array is None else arrays[record.array]
    if record.stored_as is not None:
        value = _carried(record, value, record.dtype)
    if half is None or half.array is None:
        return value
    both = compact_numbers.decode_leaf(value, arrays[half.array])
    return np.asarray(both) if isinstance(value, np.ndarray) else both


def _carried(record: Leaf, array: Any, dtype: str) -> Any:
    """Convert a leaf to the dtype that carries it, or back: floats by their bits, integers by their values."""
    if not record.dtype.startswith("float"):
        return array.astype(dtype)
    if isinstance(array, np.ndarray):
        return array.view(dtype)
    return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))


def as_integers(array: np.ndarray[Any, Any], dtype: DTypeLike, path: str) -> np.ndarray[Any, Any]:
    """Convert a stored array to the integer dtype of a target's leaf, if it can represent all numbers."""
    converted = array.astype(dtype)
    if (converted != array).any():
        raise ValueError(
            f"target: {path!r} is {converted.dtype} and cannot represent {array.max()}; enable jax_enable_x64"
        )
    return converted


def shape_and_dtype(record: Leaf) -> tuple[tuple[int, ...], str]:
    if record.key_impl is not None:
        key = _key_data(record.key_impl)
        return (*record.shape, *key.shape), str(key.dtype)
    return record.shape, record.stored_as or record.dtype


def zero_leaf(record: Leaf) -> np.ndarray[Any, Any]:
    try:
        shape, dtype = shape_and_dtype(record)
        return np.zeros(shape, jnp.dtype(dtype))
    except (TypeError, ValueError, MemoryError) as error:  # a malicious manifest
        raise CheckpointError(f"the manifest is not what jstep writes: {record.path!r:.50}: {error!s:.100}") from None


@functools.cache
def _key_data(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def leaves_by_id(saved: Sequence[_Record]) -> dict[tuple[str, int], _Record]:
    """Return the leaves by path and number, which distinguishes leaves with the same path."""
    return dict(zip(trees.ids(leaf.path for leaf in saved), saved, strict=True))


def unique(paths: Iterable[str]) -> list[str]:
    """Return different names for all paths: numbered from a path's second occurrence on."""
    paths = list(paths)
    names, taken = [], set(paths)
    for path, number in trees.ids(paths):
        numbered = (f"{path}#{n}" for n in itertools.count(number))
        names.append(path if number == 1 else next(name for name in numbered if name not in taken))
        taken.add(names[-1])
    return names


# Fingerprints of leaves that `Saver(leave_out=…)` does not save.


def start_leaf_fingerprints(named: Sequence[tuple[Recorded, Any]]) -> Callable[[], tuple[LeftOut, ...]]:
    """Start computing fingerprints on the leaves' devices; the returned function waits."""
    keys = [leaf_key(leaf.path, leaf.dtype, leaf.shape) for leaf, _ in named]
    begun = start_fingerprints([value for _, value in named], np.stack(keys)) if keys else []

    def records() -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(leaf.path, leaf.keys, leaf.shape, leaf.dtype, as_hexadecimal(words))
            for (leaf, _), words in zip(named, stacked_words(begun), strict=True)
        )

    return records


def find_changed_leaves(pairs: Sequence[tuple[LeftOut, Any]]) -> list[LeftOut]:
    """Return the left-out leaves whose values in a target differ from the fingerprint."""
    return [leaf for (leaf, _), now in zip(pairs, start_leaf_fingerprints(pairs)(), strict=True) if now != leaf]
