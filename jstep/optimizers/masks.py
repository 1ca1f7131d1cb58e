"""What each leaf is told besides its values: masks, axes, factors; by its path, and known while tracing."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax

from jstep.core import paths, trees
from jstep.core.types import Params
from jstep.core.var_list import VarList, check_form, flags

Flag: TypeAlias = Callable[[Params], list[Any]]
"""From params to one hashable value for each leaf, in order."""

_WHOLE: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_whole_params", default=None)


@contextlib.contextmanager
def part_of(params: Params) -> Iterator[None]:
    """Within, what is handed on has None or another dtype for some leaves of `params`, which masks go on to see."""
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
    """
    check_form(var_list, argument)
    return lambda params: on_whole(params, lambda whole: flags(whole, var_list, argument))


def by_path(fn: Callable[[str, Any], Any]) -> Flag:
    """For each leaf `fn(path, leaf)`, which must be hashable and may look at shape and dtype, not at values."""

    def values(params: Params) -> list[Any]:
        return [fn(path, leaf) if trees.is_trainable(leaf) else None for path, leaf in own_leaves(params)]

    return values


def first_match(argument: str, entries: Iterable[str]) -> Flag:
    """For each leaf the first path or glob that means it, or None; each has to match something.

    What is the path of a leaf means that leaf alone, whatever marks of globs it has.
    """
    globs = list(entries)

    def of(params: Params) -> list[Any]:
        flags(params, globs, argument)
        everything = paths.names_of(params)
        exact = {name for names in everything for name in names}

        def means(glob: str, names: tuple[str, ...]) -> bool:
            return glob in names if glob in exact else paths.matches(names, glob)

        return [next((glob for glob in globs if means(glob, names)), None) for names in everything]

    return lambda params: on_whole(params, of)


def own_leaves(params: Params) -> list[tuple[str, Any]]:
    """The leaves of params with their paths, each as the state has it: predicates look at shape and dtype."""
    whole = _whole(params)
    if whole is None:
        return trees.leaves_with_paths(params)
    here = _with_nones(params)[0]
    everywhere = jax.tree_util.tree_leaves_with_path(whole, is_leaf=trees.is_none)
    return [
        (trees.path_str(keys), leaf if true is None else true)
        for (keys, true), leaf in zip(everywhere, here, strict=True)
        if leaf is not None
    ]


def on_whole(params: Params, of: Callable[[Params], list[Any]]) -> list[Any]:
    """For each leaf of params what `of` says of it; `of` sees all parameters, also inside `partition`."""
    whole = _whole(params)
    if whole is None:
        return of(params)
    values = iter(of(whole))
    by_all = [None if leaf is None else next(values) for leaf in _with_nones(whole)[0]]
    return [value for value, leaf in zip(by_all, _with_nones(params)[0], strict=True) if leaf is not None]


def _whole(params: Params) -> Params | None:
    """The parameters of the state, of which these are a part or another form; None if these are all there is."""
    whole = _WHOLE.get()
    return None if whole is None or _with_nones(params)[1] != _with_nones(whole)[1] else whole


def _with_nones(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=trees.is_none)


def leaf_numbers(params: Params) -> list[int]:
    """The number of each leaf among all parameters, also inside `partition`: what keys are folded with."""
    return on_whole(params, lambda whole: list(range(len(jax.tree.leaves(whole)))))
