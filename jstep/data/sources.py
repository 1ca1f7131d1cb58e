"""Data sources: arrays, and objects with a length and items."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jstep.core.checks import shown
from jstep.core.meshes import internal_transfers
from jstep.core.trees import flatten, is_key, path_str, quoted, stack_trees
from jstep.data._permutation import RowNumbers


class ArraySource:
    """Rows of an array in memory, or of a memory-mapped one; PRNG keys, which exist only on a device, stay there."""

    def __init__(self, array: Any, path: str) -> None:
        self.path = path
        self._is_of_keys = isinstance(array, jax.Array) and is_key(array)
        # np.asarray converts a memory map to the base class, so that its rows are plain arrays.
        with internal_transfers():
            self._array: Any = array if self._is_of_keys else np.asarray(array)
        # np.take is the faster gather, but it first copies the whole array if that is not contiguous.
        self._takes = not self._is_of_keys and self._array.flags.c_contiguous and self._array.flags.aligned

    def __len__(self) -> int:
        return len(self._array)

    def rows(self, rows: RowNumbers) -> Any:
        """Return a new array of these rows."""
        is_range = isinstance(rows, slice)
        if self._takes and not is_range:
            return self._array.take(rows, 0, None, "clip")  # rows are in range: "clip" only avoids a check of each
        if self._is_of_keys:
            with internal_transfers():
                return self._array[rows]
        return self._array[rows].copy() if is_range else self._array[rows]


class ItemSource:
    """Items of an object with `__len__` and `__getitem__`, stacked."""

    def __init__(self, items: Any, path: str, argument: str) -> None:
        self._items = items
        self.path = path
        # Whether `__getitem__` takes a list of indices; None until it has been tried.
        self._takes_list: bool | None = False if isinstance(items, list | range) else None
        self._what = f"{argument}: items of the {type(items).__name__} at {path}"

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, rows: RowNumbers) -> Any:
        """Return the items at these rows, stacked leaf by leaf.

        Raises:
            TypeError: The source can only be iterated over; its `__getitem__` is not implemented.
        """
        try:
            return self._rows(rows)
        except NotImplementedError as error:  # raised by __getitem__ of PyTorch's IterableDataset
            raise TypeError(
                f"{self._what} cannot be taken in any order: its __getitem__ is not implemented; pass the iterable "
                "directly to jstep.train or prefetch_to_device"
            ) from error

    def _rows(self, rows: RowNumbers) -> Any:
        numbers = list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()
        if not numbers:  # this process's part of a small remainder
            return jax.tree.map(lambda leaf: leaf[:0], self.rows(slice(0, 1)))
        if hasattr(self._items, "__getitems__"):
            return self._stack(self._items.__getitems__(numbers), len(numbers))
        if self._takes_list is None:
            self._takes_list = self._list_gives_rows(numbers)
        if self._takes_list:
            try:
                return _from_columns(self._items[numbers])
            except Exception:  # for example HDF5, which takes only sorted lists
                self._takes_list = False
        return self._stack([self._items[i] for i in numbers], len(numbers))

    def _stack(self, items: Iterable[Any], count: int) -> Any:
        trees = [_as_item(item) for item in items]
        if len(trees) != count:
            raise ValueError(f"{self._what}: __getitems__ gave {len(trees)} items for {count} indices")
        with internal_transfers():
            return stack_trees(trees, self._what)

    def _list_gives_rows(self, numbers: list[int]) -> bool:
        """Return whether a list of indices gives the same rows as its entries do individually.

        A `__getitem__` written for a single index may do something else with a list, without an error.
        """
        try:
            batch = _from_columns(self._items[numbers])
        except Exception:
            return False  # an error that is not caused by the list is raised again with single indices
        leaves, treedef = flatten(batch)
        if not leaves or any(np.ndim(leaf) == 0 or len(leaf) != len(numbers) for leaf in leaves):
            return False
        for i in (0, len(numbers) - 1):
            try:
                item, item_treedef = flatten(_as_item(self._items[numbers[i]]))
            except Exception:
                return True  # it takes only lists
            if item_treedef != treedef:
                return False
            for leaf, row in zip(item, leaves, strict=True):
                if not _same(leaf, row, i):
                    return False
        return True


Source: TypeAlias = ArraySource | ItemSource


def as_source(leaf: Any, keys: Sequence[Any], argument: str) -> Source:
    """Return a leaf of `arrays`, or of another argument, as a source.

    Raises:
        TypeError: The leaf has no length or no items. The message contains its path.
        ValueError: The leaf is empty.
    """
    path = quoted(path_str(keys))
    source = _open(leaf, path, argument)
    if len(source) == 0:
        raise ValueError(f"{argument}: the {type(leaf).__name__} at {path} has no rows")
    return source


class Rows:
    """Rows of a tree of sources with equal numbers of rows.

    Args:
        sources: The sources, in the order of the tree's leaves.
        treedef: The tree.
    """

    def __init__(self, sources: list[Source], treedef: Any) -> None:
        self._sources, self._treedef = sources, treedef

    def __len__(self) -> int:
        return len(self._sources[0])

    def take(self, rows: RowNumbers) -> Any:
        """Return these rows as a tree of new arrays."""
        return self._treedef.unflatten([source.rows(rows) for source in self._sources])


def open_rows(arrays: Any, argument: str = "arrays", name: str = "") -> Rows:
    """Open the rows of a tree of sources.

    Args:
        arrays: The tree; a list in it is one source.
        argument: The name of the user's argument, for error messages.
        name: The key of the tree in that argument, which begins the paths of its leaves; empty if the tree is the
            argument itself.

    Raises:
        ValueError: There are no sources, one is empty, or they have different numbers of rows.
        TypeError: A leaf has no length or no items.
    """
    tree = {name: arrays} if name else arrays
    leaves, whole = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_source)
    treedef: Any = whole
    if not leaves:
        raise ValueError(f"{argument}={shown(tree)}: holds no array to take rows from")
    sources = [as_source(leaf, keys, argument) for keys, leaf in leaves]
    if len({len(source) for source in sources}) > 1:
        each = ", ".join(f"{len(source)} at {source.path}" for source in sources)
        raise ValueError(f"{argument}: all sources must have the same number of rows; there are {each}")
    return Rows(sources, treedef.children()[0] if name else treedef)


def _is_source(x: Any) -> bool:
    # A list holds examples. JAX warns about iterators in a tree; they are leaves here and rejected as sources.
    return isinstance(x, list) or hasattr(x, "__next__")


def _open(leaf: Any, path: str, argument: str) -> Source:
    if hasattr(leaf, "to_numpy") and not hasattr(leaf, "columns"):  # a column of a data frame
        leaf = leaf.to_numpy()
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        if leaf.ndim == 0:
            raise TypeError(f"{argument}: the {type(leaf).__name__} at {path} is a scalar and has no rows")
        return ArraySource(leaf, path)
    name = type(leaf).__name__
    if isinstance(leaf, str | bytes):
        raise TypeError(f"{argument}: the {name} at {path} is a string, not a source of rows; give a list of strings")
    if hasattr(leaf, "columns"):
        raise TypeError(
            f"{argument}: the {name} at {path} is indexed by column, not by row; give its columns, such as "
            "`dict(frame)`, or an array, such as `frame.to_numpy()`"
        )
    if not hasattr(leaf, "__getitem__"):
        raise TypeError(
            f"{argument}: the {name} at {path} has no __getitem__; batches need rows that can be taken in any "
            "order. Pass an iterator directly to jstep.train or prefetch_to_device"
        )
    try:
        len(leaf)
    except TypeError as error:
        raise TypeError(
            f"{argument}: the {name} at {path} has no len(), so its rows cannot be taken in any order ({error}); pass "
            "an iterable directly to jstep.train or prefetch_to_device"
        ) from None
    return ItemSource(leaf, path, argument)


def _as_item(item: Any) -> Any:
    """Return an item as a tree of arrays; a list of numbers or strings becomes an array."""
    return jax.tree.map(_as_array, item, is_leaf=_is_plain_list)


def _from_columns(batch: Any) -> Any:
    """Return a source's value for a list of indices as arrays; its lists are columns, with one entry per row."""
    return jax.tree.map(_as_array, batch, is_leaf=lambda x: isinstance(x, list))


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _is_plain_list(x: Any) -> bool:
    if not isinstance(x, list):
        return False
    while isinstance(x, list) and x:
        x = x[0]
    return isinstance(x, list | bool | int | float | complex | str | bytes | np.generic)


def _same(item: Any, rows: Any, i: int) -> bool:
    with internal_transfers():
        a, b = np.asarray(item), np.asarray(rows[i])
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
