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
    return lambda params: _on_whole(params, lambda whole: flags(whole, var_list, argument))


def by_path(fn: Callable[[str, Any], Any]) -> Flag:
    """For each leaf `fn(path, leaf)`, which must be hashable and may look at shape and dtype, not at values."""

    def values(params: Params) -> list[Any]:
        return [fn(path, leaf) if trees.is_trainable(leaf) else None for path, leaf in trees.leaves_with_paths(params)]

    return values


def _on_whole(params: Params, of: Callable[[Params], list[Any]]) -> list[Any]:
    whole = _WHOLE.get()
    if whole is None:
        return of(params)
    by_all = trees.structure(whole).unflatten(of(whole))
    here = trees.structure(params).flatten_up_to(by_all) if trees.structure(params) != trees.structure(whole) else None
    return list(jax.tree.leaves(by_all)) if here is None else here
