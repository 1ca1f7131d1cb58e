"""Targets: their leaves, what was saved of them in a checkpoint or in files of weights, and what is made of that."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import placement, trees
from jstep.core.checks import SHOWN, kind, listing, shown

_GROUPS = 8  # prefixes listed in a message

Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class Wanted(Generic[Source]):
    """A leaf of a target, and what was saved of it.

    Attributes:
        path: Its path.
        leaf: The leaf.
        shape: The shape of the array to read.
        dtype: The dtype of the array to read.
        name: The name of its source; None for a leaf without one.
        source: Its source; None if there is none, or it does not fit.
        problem: Why its source does not fit; the empty string if it does.
    """

    path: str
    leaf: Any
    shape: tuple[int, ...]
    dtype: Any
    name: str | None
    source: Source
    problem: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether no source has the name."""
        return self.name is not None and self.source is None and not self.problem

    @property
    def is_numpy(self) -> bool:
        """Whether the leaf is a NumPy array."""
        return isinstance(self.leaf, np.ndarray | np.generic)


_Wanted = TypeVar("_Wanted", bound=Wanted[Any])


def matched(
    wanted: _Wanted, key: Hashable, sources: Mapping[Any, Source], difference: Callable[[_Wanted, Source], str]
) -> _Wanted:
    """Return a leaf with its source.

    Args:
        wanted: The leaf.
        key: The key of its source; None for a leaf without one.
        sources: All sources.
        difference: Describes why a source does not fit a leaf; the empty string if it fits.
    """
    source = None if key is None else sources.get(key)
    problem = "" if source is None else difference(wanted, source)
    return dataclasses.replace(wanted, source=None if problem else source, problem=problem)


@dataclasses.dataclass(frozen=True)
class Match(Generic[_Wanted]):
    """The result of matching a target to what was saved.

    Attributes:
        wanted: The target's leaves, in its order.
        unused: The names of sources that no leaf uses.
    """

    wanted: list[_Wanted]
    unused: list[str]

    TITLES: ClassVar[tuple[str, str, str]]
    """What sources that are missing, sources that are not used and sources that do not fit are called in a message."""
    MOST: ClassVar[int] = SHOWN
    """Entries of a list in a message."""

    def differences(self) -> str:
        """Describe everything that does not fit; the empty string if everything fits."""
        missing, unused, differing = self.TITLES
        lacking = [one for one in self.wanted if one.is_missing]
        texts = [repr(w.path) if w.name == w.path else f"{w.name!r} (for {w.path!r})" for w in lacking]
        return (
            listing(missing, texts, self.MOST)
            + _by_prefix([one.path for one in lacking], self.MOST)
            + listing(unused, list(map(repr, self.unused)), self.MOST)
            + _by_prefix(self.unused, self.MOST)
            + listing(differing, [one.problem for one in self.wanted if one.problem], self.MOST)
        )


def _by_prefix(paths: Sequence[str], most: int) -> str:
    """Count paths by their common prefixes, for the end of a listing that does not show all of them."""
    if len(paths) <= most:
        return ""
    for depth in (2, 1):  # by entries of a field, or by field
        groups: dict[tuple[str, ...], list[list[str]]] = {}
        for parts in (path.split("/") for path in paths):
            groups.setdefault(tuple(parts[:depth]), []).append(parts)
        if len(groups) <= _GROUPS:
            break
    counted = []
    for some in groups.values():
        columns = zip(*(parts[:-1] for parts in some), strict=False)
        common = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
        of_all = f"'{'/'.join([*common, '*'])}' ({len(some)} leaves)"
        counted.append(repr("/".join(some[0])) if len(some) == 1 else of_all)
    return f", that is, {', '.join(counted)}"


def entries(names: object, known: Sequence[tuple[str, ...]], what: str, form: str) -> dict[str, Any]:
    """Return the entries of the `names` argument by the paths of leaves; other leaves have none.

    Args:
        names: The user's argument: a mapping by path, a function of the path, or None.
        known: The names of each leaf, its path first, as `selection.names_of` returns them.
        what: The name of the tree's argument, for errors.
        form: What `names` must be, for errors.

    Raises:
        TypeError: `names` is neither a mapping nor a function.
        ValueError: `names` has a path that is not in the tree, or has a leaf twice.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        if not callable(names):
            raise TypeError(f"names={shown(names)}: must be {form}, got {kind(names)}")
        return {path: names(path) for path, *_ in known}
    # The full path of a leaf takes precedence over the path of another leaf's container.
    path_of = {other: path for path, *others in known for other in others} | {path: path for path, *_ in known}
    found: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, entry in names.items():
        path = path_of.get(name)
        if path is None:
            near = trees.nearest(str(name), [path for path, *_ in known])
            raise ValueError(f"names: {what} has no leaf at {shown(name)}{near}")
        if path in found:
            raise ValueError(f"names: {named[path]!r} and {name!r} are the same leaf of {what}; keep one of them")
        found[path], named[path] = entry, name
    return found


def has_value(leaf: object) -> bool:
    """Return whether a leaf of a target is an array or number that can be read."""
    return not (isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.is_deleted()))


def require_value(wanted: Wanted[Any]) -> None:
    """Reject a leaf that stays as it is and has no value.

    Raises:
        ValueError: It is a shape, or was deleted.
    """
    if not has_value(wanted.leaf):
        got = "a deleted array" if isinstance(wanted.leaf, jax.Array) else "a shape"
        raise ValueError(
            f"target: {trees.quoted(wanted.path)} stays as it is, since nothing that was saved fits or names maps it "
            f"to None, and must have a value, got {got}; pass an array there"
        )


def kind_of(leaf: Any, path: str, advice: str) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype of a leaf of a target, into which an array is to be read; bytes in native order.

    Raises:
        TypeError: It has none; the error ends with the advice.
    """
    if trees.is_number(leaf):
        return (), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct) or trees.is_array(leaf):
        return tuple(leaf.shape), leaf.dtype.newbyteorder("=") if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    what = kind(leaf) if isinstance(leaf, np.ndarray) else type(leaf).__name__
    raise TypeError(f"target: {trees.quoted(path)} is {what}; {advice}")


def placed(wanted: Wanted[Any], values: np.ndarray[Any, Any]) -> Any:
    """Return the leaf that has these values, in memory of its own: each device gets its part."""
    if wanted.is_numpy:
        return np.array(values)
    sharding = placement.target_sharding(wanted.leaf, wanted.path)
    if sharding is None:
        return placement.place_anywhere(values)
    own = placement.local_parts(values.shape, sharding)
    parts = {part: np.asarray(values[placement.slices(part)]) for part in own}  # that of a scalar is a NumPy scalar
    return placement.place(values.shape, values.dtype, sharding, parts)
