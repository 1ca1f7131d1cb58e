"""Rows of data sources: arrays, and objects with a length and items."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jstep.core.checks import describe_type, format_value
from jstep.core.meshes import internal_transfers
from jstep.core.trees import (
    all_native,
    is_key,
    leading_sizes,
    native,
    path_str,
    quote_path,
    stack_trees,
)
from jstep.data.permutation import RowNumbers

_NO_ORDER = "cannot be taken in any order"
_ITERABLE = "; pass an iterable directly to jstep.train or prefetch_to_device"


class ArraySource:
    """Rows of an array, a memory map, or an array of PRNG keys, which stays on its devices."""

    def __init__(self, array: Any, path: str) -> None:
        self.path = path
        self._is_of_keys = isinstance(array, jax.Array) and is_key(array)
        # np.asarray converts a memory map to the base class, so that its rows are plain arrays.
        with internal_transfers():
            self._array: Any = array if self._is_of_keys else np.asarray(array)
        # np.take is the faster gather, but first copies the whole array if that is not contiguous.
        self._takes = (
            not self._is_of_keys and self._array.flags.c_contiguous and self._array.flags.aligned
        )

    def __len__(self) -> int:
        return len(self._array)

    def rows(self, rows: RowNumbers) -> Any:
        if self._is_of_keys:
            with internal_transfers():
                return self._array[rows]
        if isinstance(rows, slice):
            array = self._array[rows].copy()  # not a view, which the caller could write to
        elif self._takes:
            # Rows are in range: "clip" only avoids a check of each
            array = self._array.take(rows, 0, None, "clip")
        else:
            array = self._array[rows]
        return native(array, self.path, "")


class ItemSource:
    """Rows of an object with `__len__` and `__getitem__`: its items, stacked.

    A `__getitem__` for one index may silently do something else with a list. So lists are passed
    only to `__getitems__`, and to a `__getitem__` known to accept them.
    """

    def __init__(self, items: Any, path: str, argument: str) -> None:
        self._items = items
        self.path = path
        self._what = f"{argument}: items of the {type(items).__name__} at {path}"

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, rows: RowNumbers) -> Any:
        return all_native(self._rows_by_index(rows), self._what)

    def _rows_by_index(self, rows: RowNumbers) -> Any:
        if isinstance(rows, slice):
            numbers = list(range(rows.start, rows.stop))
        else:
            numbers = rows.tolist()
        if not numbers:  # this process's part of a small remainder
            return jax.tree.map(lambda leaf: leaf[:0], self.rows(slice(0, 1)))
        if _is_of_same_rows(type(self._items)):
            items = list(self._items.__getitems__(numbers))
            if len(items) != len(numbers):
                raise ValueError(
                    f"{self._what}: __getitems__ gave {len(items)} items for {len(numbers)} indices"
                )
            return self._stack(items, numbers)
        if _takes_lists(type(self._items)):
            with contextlib.suppress(Exception):
                # A library may reject some lists: HDF5 accepts only ascending ones.
                return self._fetch_list(numbers)
        return self._stack([self._items[i] for i in numbers], numbers)

    def _stack(self, items: Sequence[Any], numbers: list[int]) -> Any:
        trees = []
        for i, item in zip(numbers, items, strict=True):
            try:
                trees.append(jax.tree.map(_as_array, item, is_leaf=_is_plain_list))
            except ValueError as error:  # a ragged list
                raise ValueError(f"{self._what}: row {i} is not an array: {error}") from error
        with internal_transfers():
            return stack_trees(trees, self._what, lambda i: f"row {numbers[i]}")

    def _fetch_list(self, numbers: list[int]) -> Any:
        """Return the rows that the object returns for a list; raise if they may be other rows."""
        batch = jax.tree.map(_as_array, self._items[numbers])
        if list(leading_sizes(batch)) != [len(numbers)]:
            raise ValueError
        return batch


Source: TypeAlias = ArraySource | ItemSource


class Rows:
    """Rows of a tree of sources with equal numbers of rows; `name` is its name in a mixture."""

    def __init__(self, sources: list[Source], treedef: Any, name: str) -> None:
        self._sources = sources
        self._treedef = treedef
        self.name = name

    def __len__(self) -> int:
        return len(self._sources[0])

    def take(self, rows: RowNumbers) -> Any:
        return self._treedef.unflatten([source.rows(rows) for source in self._sources])


def open_rows(arrays: object, argument: str = "arrays", name: str = "") -> Rows:
    """Open the rows of a tree of sources, in which a list is one source.

    `name` is the tree's key in the argument, which begins its paths; empty if it is the argument.
    """
    tree = {name: arrays} if name else arrays
    # A list holds examples. JAX warns about iterators in a tree; they are leaves here and rejected
    # as sources.
    leaves, whole = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, list) or hasattr(x, "__next__")
    )
    treedef: Any = whole
    if not leaves:
        raise ValueError(f"{argument}={format_value(tree)}: holds no array to take rows from")
    sources = [_open(leaf, quote_path(path_str(keys)), argument) for keys, leaf in leaves]
    for (_, leaf), source in zip(leaves, sources, strict=True):
        if len(source) == 0:
            raise ValueError(f"{argument}: the {type(leaf).__name__} at {source.path} has no rows")
    if len({len(source) for source in sources}) > 1:
        counts = ", ".join(f"{len(source)} at {source.path}" for source in sources)
        raise ValueError(
            f"{argument}: all sources must have the same number of rows; there are {counts}"
        )
    return Rows(sources, treedef.children()[0] if name else treedef, name)


def _open(leaf: Any, path: str, argument: str) -> Source:
    if hasattr(leaf, "to_numpy") and not hasattr(leaf, "columns"):  # a column of a data frame
        leaf = leaf.to_numpy()
    what = f"{argument}: the {type(leaf).__name__} at {path}"
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{argument}: the source at {path} is {describe_type(leaf)}")
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        if leaf.ndim == 0:
            raise TypeError(f"{what} is a scalar and has no rows")
        return ArraySource(leaf, path)
    if isinstance(leaf, str | bytes):
        raise TypeError(f"{what} is a string, not a source of rows; give a list of strings")
    if isinstance(leaf, Mapping):
        raise TypeError(
            f"{what} is a mapping, not a source of rows; give a dict of sources, such as "
            "`dict(mapping)`"
        )
    if hasattr(leaf, "columns"):
        raise TypeError(
            f"{what} is indexed by column, not by row; give an array, such as `frame.to_numpy()`"
        )
    if not hasattr(leaf, "__getitem__"):
        raise TypeError(f"{what} has no __getitem__, so its rows {_NO_ORDER}{_ITERABLE}")
    try:
        len(leaf)
    except TypeError as error:
        raise TypeError(
            f"{what} has no len(), so its rows {_NO_ORDER} ({error}){_ITERABLE}"
        ) from None
    return ItemSource(leaf, path, argument)


def _is_of_same_rows(cls: type) -> bool:
    """Whether the class that defines `__getitem__` defines `__getitems__` as well.

    A wrapper that forwards other attributes has the `__getitems__` of the wrapped object, which
    knows nothing of the wrapper's items; so has a subclass that overrides `__getitem__` alone.
    """
    for base in cls.__mro__:
        if "__getitems__" in vars(base):
            return callable(getattr(cls, "__getitems__", None))
        if "__getitem__" in vars(base):
            return False
    return False


_LIBRARIES = (
    ("h5py", "Dataset"),
    ("zarr", "Array"),
    ("torch", "Tensor"),
    ("torch.utils.data", "TensorDataset"),
)
"""Classes whose `__getitem__` accepts a list of indices."""


def _takes_lists(cls: type) -> bool:
    """Whether the `__getitem__` of a class is from a library that accepts lists of indices."""
    method = getattr(cls, "__getitem__", None)
    for module, name in _LIBRARIES:
        library_class = getattr(sys.modules.get(module), name, None)
        # A user's module may have the name of a library, and a subclass may override the method.
        is_derived = isinstance(library_class, type) and issubclass(cls, library_class)
        if is_derived and method is getattr(library_class, "__getitem__", 0):
            return True
    return False


def _as_array(leaf: object) -> Any:
    if isinstance(leaf, Mapping):
        raise TypeError(
            "arrays: an item must not have a mapping other than a dict, got "
            f"{describe_type(leaf)}; return dict(item)"
        )
    # Masked arrays are rejected later.
    if isinstance(leaf, jax.Array | np.ma.MaskedArray):
        return leaf
    return np.asarray(leaf)


def _is_plain_list(x: object) -> bool:
    if not isinstance(x, list):
        return False
    while isinstance(x, list) and x:
        x = x[0]
    return isinstance(x, list | bool | int | float | complex | str | bytes | np.generic)
