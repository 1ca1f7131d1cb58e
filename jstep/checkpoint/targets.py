"""Matching the leaves of a restore target to saved arrays, in a checkpoint or in files of weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import placement, trees
from jstep.core.checks import SHOWN, describe_type, format_items, format_value

Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class TargetLeaf(Generic[Source]):
    """A leaf of a target, and the array that was saved for it.

    Attributes:
        source: None if there is none, or it does not fit.
        problem: Why its source does not fit, or "".
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
        return self.name is not None and self.source is None and not self.problem

    @property
    def is_numpy(self) -> bool:
        return isinstance(self.leaf, np.ndarray | np.generic)


_Wanted = TypeVar("_Wanted", bound=TargetLeaf[Any])


@dataclasses.dataclass(frozen=True)
class TargetMatch(Generic[_Wanted]):
    """The result of matching a target to a checkpoint or to files of weights.

    Attributes:
        unused: The names of sources that no leaf uses.
    """

    wanted: list[_Wanted]
    unused: list[str]

    TITLES: ClassVar[tuple[str, str, str]]
    """Titles in a message for missing, unused and differing sources."""
    MAX_SHOWN: ClassVar[int] = SHOWN
    """Entries of a list in a message."""

    def differences(self) -> str:
        """Describe everything that does not fit; "" if everything fits."""
        missing, unused, differing = self.TITLES
        lacking = [want for want in self.wanted if want.is_missing]
        texts = [repr(w.path) if w.name == w.path else f"{w.name!r} (for {w.path!r})" for w in lacking]
        return (
            format_items(missing, texts, self.MAX_SHOWN)
            + format_items(unused, list(map(repr, self.unused)), self.MAX_SHOWN)
            + format_items(differing, [want.problem for want in self.wanted if want.problem], self.MAX_SHOWN)
        )


def entries(names: object, leaves: Sequence[tuple[str, ...]], what: str, form: str) -> dict[str, Any]:
    """Return the entries of a `names` argument by the paths of leaves; other leaves have none.

    Args:
        names: A mapping by path, or a function of it.
        leaves: The names of each leaf, its path first (`selection.leaf_names`).
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        if not callable(names):
            raise TypeError(f"names={format_value(names)}: must be {form}, got {describe_type(names)}")
        return {path: names(path) for path, *_ in leaves}
    # The full path of a leaf takes precedence over the path of another leaf's container.
    path_of = {other: path for path, *others in leaves for other in others} | {path: path for path, *_ in leaves}
    result: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, entry in names.items():
        path = path_of.get(name)
        if path is None:
            near = trees.suggest_names(str(name), [path for path, *_ in leaves])
            raise ValueError(f"names: {what} has no leaf at {format_value(name)}{near}")
        if path in result:
            raise ValueError(f"names: {named[path]!r} and {name!r} are the same leaf of {what}; keep one of them")
        result[path], named[path] = entry, name
    return result


def has_value(leaf: object) -> bool:
    return not (isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.is_deleted()))


def require_value(wanted: TargetLeaf[Any]) -> None:
    """Reject a leaf that stays as it is, but has no value."""
    if not has_value(wanted.leaf):
        got = "a deleted array" if isinstance(wanted.leaf, jax.Array) else "a shape"
        raise ValueError(
            f"target: {trees.quote_path(wanted.path)} stays as it is, since nothing that was saved fits or names maps "
            f"it to None, and must have a value, got {got}; pass an array there"
        )


def target_kind(leaf: Any, path: str, advice: str) -> tuple[tuple[int, ...], Any]:
    """Return the shape and dtype (in native byte order) of a target's leaf; an error ends with the advice."""
    if trees.is_python_number(leaf):
        return (), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct) or trees.is_array(leaf):
        return tuple(leaf.shape), leaf.dtype.newbyteorder("=") if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    what = describe_type(leaf) if isinstance(leaf, np.ndarray) else type(leaf).__name__
    raise TypeError(f"target: {trees.quote_path(path)} is {what}; {advice}")


def place_values(wanted: TargetLeaf[Any], values: np.ndarray[Any, Any]) -> Any:
    """Return a leaf with these values, in its own memory: each device gets its part."""
    if wanted.is_numpy:
        return np.array(values)
    sharding = placement.target_sharding(wanted.leaf, wanted.path)
    if sharding is None:
        return placement.place_anywhere(values)
    own = placement.local_parts(values.shape, sharding)
    parts = {part: np.asarray(values[placement.slices(part)]) for part in own}  # indexing a scalar gives a NumPy scalar
    return placement.place(values.shape, values.dtype, sharding, parts)
