"""Static values per leaf (masks, axes, factors), computed from paths, shapes and dtypes."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax

from jstep.core import trees
from jstep.core.checks import setting
from jstep.core.selection import VarList, check_form, flags, is_named, names_of
from jstep.core.trees import Params

Flag: TypeAlias = Callable[[Params], list[Any]]
"""Maps params to one hashable value per leaf, in order."""

_WHOLE: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_whole_params", default=None)


def partial_params(params: Params) -> contextlib.AbstractContextManager[Params]:
    """Make masks see `params` in this context, even if inner optimizers get None or another dtype for some leaves."""
    return setting(_WHOLE, params if _WHOLE.get() is None else _WHOLE.get())


def mask(argument: str, var_list: VarList) -> Flag:
    """The flag for whether each leaf is selected, in the grammar of `var_list`; None for all.

    An entry that matches no parameter raises; inside `partition` it may match leaves of other labels only.

    Args:
        argument: The argument's name, for errors.
        var_list: A predicate `(path, leaf) -> bool`, paths or globs, a tree of bools, or None.
    """
    check_form(var_list, argument)
    return lambda params: on_whole(params, lambda whole: flags(whole, var_list, argument))


def by_path(fn: Callable[[str, Any], Any]) -> Flag:
    """The flag `fn(path, leaf)`, which must be hashable and may depend on shape and dtype, not on values."""

    def values(params: Params) -> list[Any]:
        return [fn(path, leaf) if trees.is_trainable(leaf) else None for path, leaf in own_leaves(params)]

    return values


def first_match(argument: str, entries: Iterable[str]) -> Flag:
    """The flag for the first path or glob that matches each leaf, or None; every entry must match some leaf.

    An entry that is the path of a leaf matches only that leaf, even if it contains glob characters.
    """
    globs = list(entries)

    def of(params: Params) -> list[Any]:
        flags(params, globs, argument)
        everything = names_of(params)
        exact = {name for names in everything for name in names}

        def means(glob: str, names: tuple[str, ...]) -> bool:
            return glob in names if glob in exact else is_named(names, glob)

        return [next((glob for glob in globs if means(glob, names)), None) for names in everything]

    return lambda params: on_whole(params, of)


def own_leaves(params: Params) -> list[tuple[str, Any]]:
    """The leaves of params with their paths, with the shapes and dtypes that they have in the state."""
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
    """Apply `of` to all parameters, even inside `partition`, and return its values for the leaves of params."""
    whole = _whole(params)
    if whole is None:
        return of(params)
    values = iter(of(whole))
    by_all = [None if leaf is None else next(values) for leaf in _with_nones(whole)[0]]
    return [value for value, leaf in zip(by_all, _with_nones(params)[0], strict=True) if leaf is not None]


def _whole(params: Params) -> Params | None:
    """The parameters of the state, if params are a part or another form of them; otherwise None."""
    whole = _WHOLE.get()
    return None if whole is None or _with_nones(params)[1] != _with_nones(whole)[1] else whole


def _with_nones(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=trees.is_none)


def leaf_numbers(params: Params) -> list[int]:
    """The index of each leaf among all parameters, even inside `partition`, for folding into PRNG keys."""
    return on_whole(params, lambda whole: list(range(len(jax.tree.leaves(whole)))))
