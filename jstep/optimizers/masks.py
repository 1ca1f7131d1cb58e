"""What each leaf is told besides its values: masks, axes, factors; by its path, and known while tracing."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from jstep.core import trees
from jstep.core.types import Params
from jstep.core.var_list import VarList, check_form, flags

Flag: TypeAlias = Callable[[Params], list[Any]]
"""From params to one hashable value for each leaf, in order."""

_WHOLE: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_whole_params", default=None)


@contextlib.contextmanager
def part_of(params: Params) -> Iterator[None]:
    """Within, what is handed on has None for some leaves of `params`; masks go on speaking of all of them."""
    token = _WHOLE.set(params if _WHOLE.get() is None else _WHOLE.get())
    try:
        yield
    finally:
        _WHOLE.reset(token)


def mask(argument: str, var_list: VarList) -> Flag:
    """Whether each leaf is meant: `var_list`'s grammar, None for all.

    An entry that matches no parameter at all raises; inside `partition` it may match only leaves of other labels.

    Args:
        argument: The argument's name, for errors.
        var_list: A predicate `(path, leaf) -> bool`, paths or globs, a tree of bools, or None.

    Raises:
        TypeError: `var_list` is none of these.
    """
    check_form(var_list, argument)
    return lambda params: on_whole(params, lambda whole: flags(whole, var_list, argument))


def by_path(fn: Callable[[str, Any], Any]) -> Flag:
    """For each leaf `fn(path, leaf)`, which must be hashable and may look at shape and dtype, not at values."""

    def values(params: Params) -> list[Any]:
        return [fn(path, leaf) if trees.is_trainable(leaf) else None for path, leaf in trees.leaves_with_paths(params)]

    return values


def on_whole(params: Params, of: Callable[[Params], list[Any]]) -> list[Any]:
    """For each leaf of params what `of` says of it; `of` sees all parameters, also inside `partition`."""
    whole = _WHOLE.get()
    here, treedef = _with_nones(params)
    everywhere, whole_treedef = _with_nones(whole)
    if whole is None or treedef != whole_treedef:
        return of(params)
    values = iter(of(whole))
    by_all = [None if leaf is None else next(values) for leaf in everywhere]
    return [value for value, leaf in zip(by_all, here, strict=True) if leaf is not None]


def _with_nones(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=trees.is_none)


def leaf_numbers(params: Params) -> list[int]:
    """The number of each leaf among all parameters, also inside `partition`: what keys are folded with."""
    return on_whole(params, lambda whole: list(range(len(jax.tree.leaves(whole)))))
