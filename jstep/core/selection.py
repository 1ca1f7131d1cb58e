"""Selection of leaves by path, glob and the four forms of `var_list`."""

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from jstep.core import trees
from jstep.core.checks import as_bool, describe_type, format_value

_BOXED = GetAttrKey("value")


def leaf_names(tree: trees.Tree) -> list[tuple[str, ...]]:
    """Return the path of each leaf, and for a boxed variable (Flax NNX) also the box's."""
    names: list[tuple[str, ...]] = []
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        path = trees.path_str(keys)
        is_boxed = len(keys) > 1 and keys[-1] == _BOXED
        names.append((path, trees.path_str(keys[:-1])) if is_boxed else (path,))
    return names


def is_named(names: tuple[str, ...], entry: str) -> bool:
    return any(name == entry or fnmatch.fnmatchcase(name, entry) for name in names)


def find_leaf(tree: trees.Tree, path: str, what: str) -> int | None:
    indices = [i for i, names in enumerate(leaf_names(tree)) if path in names]
    if len(indices) > 1:
        raise ValueError(ambiguous(what, path, len(indices)))
    return indices[0] if indices else None


def ambiguous(what: str, path: str, leaves: int) -> str:
    return (
        f"{what}: {leaves} leaves share the path {path!r}, because a key of the tree contains a "
        "slash; rename the key to make paths unique"
    )


VarList: TypeAlias = Callable[[str, Any], bool] | str | Sequence[str] | Any | None

_FORMS = "None, a predicate (path, leaf) -> bool, a list of paths or globs, or a tree of bools"


def select_leaves(
    params: trees.Params,
    var_list: VarList,
    argument: str = "var_list",
    frozen: Sequence[bool] | None = None,
) -> list[int]:
    """Return the indices of the floating leaves that a `var_list` selects.

    `frozen` marks leaves of a `partition`.
    """
    wanted = flags(params, var_list, argument)
    indices = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    if frozen:
        indices = [i for i in indices if not frozen[i]]
    if not indices:
        raise ValueError(
            f"No variables to optimize: {argument}={format_value(var_list)} selects no "
            "floating-point leaf, which the optimizer does not freeze, of "
            f"{trees.leaf_paths(params)[:20]}"
        )
    return indices


def flags(params: trees.Params, var_list: VarList, argument: str) -> list[bool]:
    """Return for each leaf whether it is trainable and selected; None selects all."""
    trainable = list(map(trees.is_trainable, jax.tree.leaves(params)))
    chosen = _chosen(params, trainable, var_list, argument)
    return [is_chosen and can for is_chosen, can in zip(chosen, trainable, strict=True)]


def resolve(params: trees.Params, var_list: VarList, argument: str) -> list[bool]:
    """Return for each leaf, of any dtype, whether it is selected; None selects nothing."""
    count = len(jax.tree.leaves(params))
    if var_list is None:
        return [False] * count
    return _chosen(params, [True] * count, var_list, argument)


def check_form(var_list: VarList, argument: str) -> None:
    if isinstance(var_list, int | float | np.number) and not isinstance(var_list, bool):
        raise TypeError(
            f"{argument}={format_value(var_list)}: must be {_FORMS}, got {describe_type(var_list)}"
        )


def _chosen(
    params: trees.Params, trainable: list[bool], var_list: VarList, argument: str
) -> list[bool]:
    if var_list is None:
        return trainable
    named = trees.leaves_with_paths(params)
    if isinstance(var_list, str):
        var_list = [var_list]
    if isinstance(var_list, list | tuple | set | frozenset) and all(
        isinstance(entry, str) for entry in var_list
    ):
        entries = sorted(var_list) if isinstance(var_list, set | frozenset) else var_list
        return _match_globs(params, trainable, entries, argument)
    if callable(var_list) and trees.is_function(var_list):
        _check_predicate(var_list, argument)
        return [_as_bool(var_list(path, leaf), path, argument) for path, leaf in named]
    try:
        # A flag may stand for a whole subtree of params.
        filled = jax.tree.map(
            lambda flag, subtree: jax.tree.map(lambda _: flag, subtree), var_list, params
        )
        flags = trees.structure(params).flatten_up_to(filled)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{argument}={format_value(var_list)}: a tree of bools must have the structure of "
            f"params (or a prefix of it), whose paths are {[path for path, _ in named][:20]}"
        ) from error
    return [_as_bool(flag, path, argument) for flag, (path, _) in zip(flags, named, strict=True)]


def _check_predicate(predicate: Callable[..., Any], argument: str) -> None:
    """Reject Optax's form of a mask, a function of the whole tree."""
    try:
        signature = inspect.signature(predicate)
    except (TypeError, ValueError):  # a function of C has none; calling it will tell
        return
    try:
        signature.bind("", None)
    except TypeError:
        name = getattr(predicate, "__name__", type(predicate).__name__)
        raise TypeError(
            f"{argument}={name}: must be a predicate (path, leaf) -> bool, got a function "
            f"{name}{signature}; of a function of the whole tree, give its result, a tree of bools"
        ) from None


def _match_globs(
    params: trees.Params, trainable: list[bool], entries: Sequence[str], argument: str
) -> list[bool]:
    names = leaf_names(params)
    leaves = jax.tree.leaves(params)
    paths = [path for path, *_ in names]
    chosen = [False] * len(leaves)
    for entry in entries:
        matches = [i for i, aliases in enumerate(names) if is_named(aliases, entry)]
        if not matches:
            hint = trees.suggest_names(entry, paths) or f"; paths are {paths[:20]}"
            raise ValueError(f"{argument}: {entry!r} matches no parameter{hint}")
        if paths.count(entry) > 1:
            raise ValueError(ambiguous(argument, entry, paths.count(entry)))
        if not any(trainable[i] for i in matches):
            raise ValueError(
                f"{argument}: {entry!r} matches only {[paths[i] for i in matches][:20]}, whose "
                f"dtype {leaves[matches[0]].dtype} cannot be trained"
            )
        for i in matches:
            chosen[i] = True
    return chosen


def _as_bool(flag: object, path: str, argument: str) -> bool:
    return as_bool(flag, f"{argument} at {trees.quote_path(path)}")
