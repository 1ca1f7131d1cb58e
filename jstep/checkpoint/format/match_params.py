"""Matching of parameters alone to a checkpoint, without its slots and step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jstep.checkpoint.format.manifest import Manifest
from jstep.checkpoint.format.match import Match, Names, match
from jstep.core import trees

PARAMS = "params"
_NAMED = 5  # entries of params named in a message


def match_params(
    target: Mapping[str, Any], manifest: Manifest, averages: str | None, names: Names | None, where: str
) -> Match:
    """Find the saved leaves like `match`, for a target `{"params": params}`.

    Args:
        target: The tree to restore into.
        manifest: The manifest of the checkpoint.
        averages: The slot of moving averages that replace params; None to restore params.
        names: Paths in the checkpoint for paths of the target, each with or without `params/` before it.
        where: The name of the checkpoint, for errors.

    Raises:
        TypeError: A leaf of the target has no shape and dtype, or names has values other than paths.
        ValueError: Something does not fit, or the checkpoint has no params; lists it.
    """
    if not manifest.left_out and not any(leaf.keys[0] == PARAMS for leaf in manifest.leaves):
        raise ValueError(
            f"{where} has no params: its leaves are {sorted({leaf.keys[0] for leaf in manifest.leaves})[:20]}; "
            "restore(None) returns them"
        )
    paths = trees.paths_of(target)
    whole = _whole_names(names, set(paths), set(manifest.paths()))
    # A parameter may be restored from any leaf, by name or as its average; only extra params are reported.
    found = match(target, manifest.leaves, averages, True, whole, where, manifest.left_out)
    extra = {leaf.path for leaf in manifest.leaves if leaf.keys[0] == PARAMS}
    found = dataclasses.replace(found, extra=[path for path in found.extra if path in extra])
    if found.differences():
        raise ValueError(
            f"target_params does not fit the params of {where}{found.differences()}. Nothing was restored. names={{…}} "
            "maps leaves with another path; Saver.restore({'params': target_params}, partial=True) restores what fits."
            + _without_absent(target[PARAMS], found)
        )
    return found


def _without_absent(params: Any, found: Match) -> str:
    """Describe how to restore the rest if all that does not fit are entries of params that the checkpoint lacks."""
    if not isinstance(params, Mapping) or found.extra or found.differing:
        return ""
    missing = set(found.missing)
    of_entries = {name: set(trees.paths_of({PARAMS: {name: params[name]}})) for name in params}
    absent = [name for name, paths in of_entries.items() if paths and paths <= missing]
    rest = [name for name, paths in of_entries.items() if paths - missing]
    if not rest or set().union(*(of_entries[name] for name in absent)) != missing:
        return ""
    whole = f" The checkpoint has nothing of {', '.join(map(repr, absent[:_NAMED]))}{', …' * (len(absent) > _NAMED)}: "
    entries = ", ".join(f"{name!r}: …" for name in rest[:_NAMED]) + ", …" * (len(rest) > _NAMED)
    return f"{whole}restore_params({{{entries}}}) restores the rest."


def _whole_names(names: Names | None, paths: set[str], saved: set[str]) -> Names | None:
    """Return the names with `params/` added to the paths that need it."""

    def whole(path: Any, known: set[str]) -> Any:
        with_params = f"{PARAMS}/{path}"
        return with_params if isinstance(path, str) and path not in known and with_params in known else path

    if isinstance(names, Mapping):
        return {whole(path, paths): whole(other, saved) for path, other in names.items()}
    if names is None or not callable(names):
        return names
    given: Callable[[str], str | None] = names

    def renamed(path: str) -> Any:
        other, short = given(path), path.removeprefix(f"{PARAMS}/")
        if other in (None, path) and path not in saved and short != path:
            of_short = given(short)
            other = other if of_short in (None, short) else of_short
        return whole(other, saved)

    return renamed
