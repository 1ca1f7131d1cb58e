"""Static values of each leaf, from its path, shape and dtype: masks, factors, numbers, axes."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, as_int, describe_type, format_value
from jstep.core.exceptions import setting
from jstep.core.logs import logger
from jstep.core.selection import VarList, check_form, flags, is_named, leaf_names
from jstep.core.trees import Params

Flag: TypeAlias = Callable[[Params], list[Any]]
"""Params → one hashable value per leaf, in order."""


def mask(argument: str, var_list: VarList, *, warns: bool = False) -> Flag:
    """The flag for whether a `var_list` selects each leaf; an entry must match some leaf."""
    check_form(var_list, argument)
    warned: set[str] = set()

    def selected(whole: Params) -> list[Any]:
        if var_list is None:
            chosen = call_on_whole(whole, _trainable_leaves)
        else:
            chosen = flags(whole, var_list, argument)
        if not warns:
            return chosen
        masks = _MASKS.get()
        if masks is not None:  # in a partition, which warns of the masks of all labels together
            masks.append((argument, chosen))
        elif var_list is not None:
            _warn_of_masks([(argument, chosen)], warned)
        return chosen

    return lambda params: call_on_whole(params, selected)


Masks: TypeAlias = list[tuple[str, list[bool]]]
"""Arguments of weight decays, and the leaves that they select."""
_MASKS: contextvars.ContextVar[Masks | None] = contextvars.ContextVar("jstep_masks", default=None)
"""The masks of all labels of a partition; None outside of it."""


def _warn_of_masks(masks: Masks, warned: set[str]) -> None:
    if masks and not warned and not any(any(chosen) for _, chosen in masks):
        argument, chosen = masks[0]
        warned.add(argument)
        logger.warning(
            "%s: it selects none of the %d parameters, so that none decays", argument, len(chosen)
        )


@contextlib.contextmanager
def masks_of_all_labels(warned: set[str]) -> Iterator[None]:
    """Warn of masks that select nothing only if no label's mask selects anything."""
    if _MASKS.get() is not None:  # in a partition inside a label
        yield
        return
    with setting(_MASKS, Masks()) as masks:
        yield
    _warn_of_masks(masks, warned)


def leaf_flag(fn: Callable[[str, Any], Any]) -> Flag:
    """The flag `fn(path, leaf)`, which must be hashable and must not depend on values."""

    def flag(params: Params) -> list[Any]:
        return [
            fn(path, leaf) if trees.is_trainable(leaf) else None
            for path, leaf in own_leaves(params)
        ]

    return flag


def first_match(argument: str, entries: Iterable[Any]) -> Flag:
    """The flag for the first path or glob that matches each leaf, or None.

    Every entry must match some leaf. An entry that is the path of a leaf matches only that leaf,
    even with glob characters.
    """
    globs = list(entries)
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(
                f"{argument}: {format_value(glob)} must be a path or a glob, "
                f"got {describe_type(glob)}"
            )

    def matches(params: Params) -> list[Any]:
        flags(params, globs, argument)  # raises for an entry that matches no leaf
        names_of_leaves = leaf_names(params)
        exact: set[str] = set()
        exact.update(*names_of_leaves)

        def is_match(glob: str, names: tuple[str, ...]) -> bool:
            return glob in names if glob in exact else is_named(names, glob)

        found: list[Any] = []
        for names in names_of_leaves:
            matching = (glob for glob in globs if is_match(glob, names))
            found.append(next(matching, None))
        return found

    return lambda params: call_on_whole(params, matches)


def own_leaves(params: Params) -> list[tuple[str, Any]]:
    """The leaves of params and their paths, in the shapes and dtypes of the state."""
    return call_on_whole(params, trees.leaves_with_paths)


def leaf_numbers(params: Params) -> list[int]:
    """The index of each leaf among all parameters, even in `partition`, to fold into PRNG keys."""
    return call_on_whole(params, _numbers_of_leaves)


def _numbers_of_leaves(params: Params) -> list[int]:
    return list(range(len(jax.tree.leaves(params))))


def _trainable_leaves(params: Params) -> list[bool]:
    return list(map(trees.is_trainable, jax.tree.leaves(params)))


class _Whole:
    """All parameters, of which an optimizer may see some.

    There may be as many optimizers as leaves, and each asks for the same values of all leaves:
    these are kept.
    """

    def __init__(self, params: Params) -> None:
        self.params = params
        self._structure = trees.structure(params)
        self._values: dict[Callable[[Params], list[Any]], list[Any]] = {}

    def values(self, fn: Callable[[Params], list[Any]]) -> list[Any]:
        if fn not in _SHARED:
            return fn(self.params)
        if fn not in self._values:
            self._values[fn] = fn(self.params)
        return self._values[fn]

    def own_indices(self, params: Params) -> list[int] | None:
        """Return the indices of the leaves of `params` among all; None if they are others."""
        try:
            leaves = self._structure.flatten_up_to(params)
        except (ValueError, TypeError):
            return None
        indices = [index for index, leaf in enumerate(leaves) if leaf is not None]
        # A leaf, and not a node with leaves of its own.
        if not jax.tree_util.all_leaves([leaves[index] for index in indices]):
            return None
        return indices


_SHARED = frozenset({trees.leaves_with_paths, _numbers_of_leaves, _trainable_leaves})
"""Functions of all parameters that the optimizers of all labels call."""


def call_on_whole(params: Params, fn: Callable[[Params], list[Any]]) -> list[Any]:
    """Apply `fn` to all parameters, even inside `partition`; return its values for these."""
    whole = _WHOLE.get()
    indices = None if whole is None else whole.own_indices(params)
    if whole is None or indices is None:
        return fn(params)
    values = whole.values(fn)
    return [values[index] for index in indices]


_WHOLE: contextvars.ContextVar[_Whole | None] = contextvars.ContextVar(
    "jstep_whole_params", default=None
)


def partial_params(params: Params) -> contextlib.AbstractContextManager[_Whole | None]:
    """Let masks see `params` in this context, even if inner optimizers get None or other dtypes."""
    return setting(_WHOLE, _WHOLE.get() or _Whole(params))


Axes: TypeAlias = Callable[[str, Any], tuple[Any, Any]]

MatrixAxes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def matrix_axes(axes: Axes | None, purpose: str) -> Callable[[str, Any], MatrixAxes]:
    """`(path, leaf) -> (rows, columns)`, the axes of its matrix, by default the last two."""
    as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True)

    def axes_of(path: str, leaf: Any) -> MatrixAxes:
        shape = np.shape(leaf)
        if len(shape) < 2:
            raise ValueError(
                f"params: the leaf at {trees.quote_path(path)} has shape {shape}: "
                f"must have two axes {purpose}; "
                "use another optimizer by jstep.partition, see docs: help/errors#matrices"
            )
        pair = (-2, -1) if axes is None else axes(path, leaf)
        rows, columns = pair_of_axes(pair, path, len(shape))
        if not (rows and columns):
            raise ValueError(
                f"axes: must return two parts at {trees.quote_path(path)}, got {format_value(pair)}"
            )
        return rows, columns

    return axes_of


def pair_of_axes(pair: object, path: str, ndim: int) -> MatrixAxes:
    """The input and output axes of a leaf, as nonnegative indices.

    Each is given as an axis, several or None.
    """
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise TypeError(
            f"axes: must be (in, out) at {trees.quote_path(path)}, axes or None, "
            f"got {format_value(pair)}"
        )
    ins = _counted(pair[0], ndim, path)
    outs = _counted(pair[1], ndim, path)
    if len({*ins, *outs}) < len(ins) + len(outs):
        raise ValueError(
            f"axes: must name each axis at {trees.quote_path(path)} once, got {format_value(pair)}"
        )
    return ins, outs


def _counted(axes: object, ndim: int, path: str) -> tuple[int, ...]:
    if axes is None:
        return ()
    axis_list = axes if isinstance(axes, tuple | list) else (axes,)
    argument = f"axes at {trees.quote_path(path)}"
    numbers = [as_int(axis, argument) for axis in axis_list]
    if any(not -ndim <= axis < ndim for axis in numbers):
        raise ValueError(
            f"{argument}: must be axes of a leaf that has {ndim}, got {format_value(axes)}"
        )
    return tuple(axis % ndim for axis in numbers)


Ints: TypeAlias = tuple[int, ...]
UnitAxes: TypeAlias = Ints | int | Callable[[str, Any], Any] | None


def unit_axes(axes: UnitAxes, default: Callable[[Ints], Ints]) -> Callable[[str, Any], Ints]:
    """`(path, leaf) -> axes`, the axes to reduce over: `axes`, or `default(shape)`."""

    def axes_of(path: str, leaf: Any) -> Ints:
        if axes is None:
            return default(np.shape(leaf))
        return _counted(axes(path, leaf) if callable(axes) else axes, np.ndim(leaf), path)

    return axes_of
