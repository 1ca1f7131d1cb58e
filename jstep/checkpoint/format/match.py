"""Matching of the leaves of a target to the leaves of a checkpoint."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jstep.checkpoint.format import counts
from jstep.checkpoint.format.former_names import former_paths
from jstep.checkpoint.format.leaves import by_id, dtype_name, ids
from jstep.checkpoint.format.manifest import Leaf, LeftOut
from jstep.core import trees
from jstep.core.checks import kind, shown
from jstep.core.slot_roles import roles_in

STEP = counts.GLOBAL_STEP
_SHOWN = 20  # paths listed in a message
_GROUPS = 8  # prefixes listed in a message

Names = Mapping[str, str] | Callable[[str], str | None]
"""Path in the target → path in the checkpoint; leaves that are not mentioned (None) have the same path in both."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A leaf of a target, and the saved leaf to restore into it.

    Attributes:
        path: The path of the leaf.
        leaf: The leaf.
        source: The saved leaf; None if no saved leaf fits.
        is_guard: Whether it belongs to a guard that the saved state did not have.
        left_out: The record of a leaf that was left out of the checkpoint, so that the target's value is used.
    """

    path: str
    leaf: Any
    source: Leaf | None
    is_guard: bool = False
    left_out: LeftOut | None = None


@dataclasses.dataclass(frozen=True)
class Match:
    """The result of matching a target to a checkpoint.

    Attributes:
        wanted: The target's leaves, in its order.
        missing: Paths of the target that the checkpoint lacks.
        extra: Paths of the checkpoint that the target does not use.
        differing: Descriptions of leaves that differ in shape or dtype.
    """

    wanted: list[Wanted]
    missing: list[str]
    extra: list[str]
    differing: list[str]

    def differences(self) -> str:
        """Describe everything that does not fit; the empty string if everything fits."""
        return (
            listing("missing in the checkpoint", [repr(path) for path in self.missing])
            + _by_prefix(self.missing)
            + listing("extra in the checkpoint", [repr(path) for path in self.extra])
            + _by_prefix(self.extra)
            + listing("differing", self.differing)
        )


def match(
    target: Any,
    saved: Sequence[Leaf],
    averages: str | None,
    partial: bool,
    names: Names | None,
    where: str,
    left_out: Sequence[LeftOut] = (),
) -> Match:
    """Find the saved leaf of each leaf of a target.

    Args:
        target: A tree of arrays, numbers or `jax.ShapeDtypeStruct`.
        saved: The leaves of the checkpoint.
        averages: The slot of moving averages that replace params; None to restore params.
        partial: Whether leaves that do not fit are skipped.
        names: Paths in the checkpoint for paths of the target; None if all are the same.
        where: The name of the checkpoint, for errors.
        left_out: The leaves that were left out of the checkpoint.

    Raises:
        TypeError: A leaf of the target has no shape and dtype, or names has values other than paths.
        ValueError: Something does not fit, or names has a path that does not exist; lists it.
    """
    records, absent = by_id(saved), dict(zip(ids(leaf.path for leaf in left_out), left_out, strict=True))
    flat = trees.leaves_with_paths(target)
    paths = [path for path, _ in flat]
    saved_paths = {leaf.path for leaf in saved} | {leaf.path for leaf in left_out}
    all_keys = [keys_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(target)]
    renamed = _renamed(names, paths, saved_paths, where)
    former = former_paths(dict(zip(paths, all_keys, strict=True)), saved_paths)
    renamed |= {path: other for path, other in former.items() if renamed.get(path, path) == path}
    found = Match([], [], [], [])
    used: set[tuple[str, int]] = set()
    kinds = [_kind(leaf, path) for path, leaf in flat]
    steps = next((shape for keys, (shape, _) in zip(all_keys, kinds, strict=True) if keys == (STEP,)), ())
    missing = {}
    for (path, leaf), (_, number), keys, wanted_kind in zip(flat, ids(paths), all_keys, kinds, strict=True):
        key = (renamed.get(path, path), number)
        used.add(key)
        source, average = records.get(key), average_of(key, records, averages)
        kept = absent.get(key) if source is None and average is None else None
        if average is not None and records[average].shape == wanted_kind[0]:
            used.add(average)
            source = records[average]
        elif kept is not None and (kept.shape, kept.dtype) != wanted_kind:
            found.differing.append(
                f"{path!r} (left out as {as_text(kept.shape, kept.dtype)}, and {as_text(*wanted_kind)} in target)"
            )
            kept = None
        elif source is None and kept is None:
            found.missing.append(path)
            missing[keys] = wanted_kind
        elif (
            source is not None
            and (source.shape, source.dtype) != wanted_kind
            and not counts.converts(keys, (source.shape, source.dtype), wanted_kind, steps)
        ):
            found.differing.append(
                f"{path!r} ({as_text(source.shape, source.dtype)}, and {as_text(*wanted_kind)} in target)"
            )
            source = None
        found.wanted.append(Wanted(path, leaf, source, left_out=kept))
    extra = (key[0] for key in records if key not in used)
    found.extra.extend(path for path in extra if not _is_average(path, averages) and path not in _ages_of(averages))
    guards = counts.guards(missing, steps, roles_in(target))
    for i, keys in enumerate(all_keys):
        if found.wanted[i].source is None and keys in guards:
            found.wanted[i] = dataclasses.replace(found.wanted[i], is_guard=True)
            found.missing.remove(found.wanted[i].path)
    if not partial and found.differences():
        raise ValueError(
            f"target does not fit {where}{found.differences()}. Nothing was restored; "
            "Saver.restore(target, partial=True) restores what fits, and names={…} maps leaves that have another path."
        )
    if flat and all(wanted.source is None for wanted in found.wanted):
        raise ValueError(
            f"target has nothing in common with {where}"
            + listing("differing", found.differing)
            + listing("target has", [repr(path) for path in paths])
            + listing("the checkpoint has", [repr(leaf.path) for leaf in saved])
            + listing("left out of it", [repr(leaf.path) for leaf in left_out])
        )
    left = [
        wanted for keys, wanted in zip(all_keys, found.wanted, strict=True) if keys == (STEP,) and not wanted.source
    ]
    if left:
        raise ValueError(
            f"partial=True: {where} has no global_step that fits{found.differences()}; a trained state whose step "
            "starts at 0 would repeat its schedule and its data. To restore parameters alone, pass a target without "
            "a step, such as {'params': params}."
        )
    _check_left_out(found, where)
    return found


def _check_left_out(found: Match, where: str) -> None:
    """Check that the target has the values that the checkpoint lacks."""
    without = [repr(one.path) for one in found.wanted if one.left_out is not None and not has_value(one.leaf)]
    if without:
        raise ValueError(
            f"target: some leaves were left out of {where} by Saver(leave_out=…), so target must have their values, "
            f"which has only shapes, or arrays that were donated{listing('without values', without)}. Pass the values "
            "that the run started with, such as the pretrained parameters, or restore the other parameters alone: "
            "restore_params takes a part of them."
        )


def has_value(leaf: Any) -> bool:
    """Return whether a leaf of a target is an array or number that can be read."""
    return not (isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.is_deleted()))


def keys_of(path: Any) -> tuple[str, ...]:
    """Return the keys of a leaf as strings."""
    return tuple(trees.path_str((key,)) for key in path)


def _renamed(names: Names | None, paths: Sequence[str], saved: set[str], where: str) -> dict[str, str]:
    """Return path in the target → path in the checkpoint, for paths that differ."""
    if names is None:
        return {}
    if isinstance(names, Mapping):
        given = dict(names)
        for path in given:
            if path not in paths:
                raise ValueError(f"names: target has no leaf at {path!r}{trees.nearest(str(path), paths)}")
    elif callable(names):
        given = {path: other for path in paths if (other := names(path)) is not None}
    else:
        raise TypeError(
            f"names={shown(names)}: must be a mapping from paths of the target to paths in the checkpoint, or a "
            f"function (path) -> path or None, got {kind(names)}"
        )
    for path, other in given.items():
        if not isinstance(other, str):
            raise TypeError(f"names: for {path!r} it has {shown(other)}: must be a path, got {kind(other)}")
        # A function that returns a path unchanged does not imply that the checkpoint has it.
        if other not in saved and (other != path or isinstance(names, Mapping)):
            raise ValueError(
                f"names: {path!r} should be restored from {other!r}, which {where} does not have"
                + trees.nearest(other, sorted(saved))
            )
    return given


def average_of(key: tuple[str, int], known: Mapping[tuple[str, int], Any], slot: str | None) -> Any:
    """Return the key of the moving average of a parameter, or None."""
    path, number = key
    if slot is None or (path != "params" and not path.startswith("params/")):
        return None
    average = (f"slots/{slot}{path.removeprefix('params')}", number)
    return average if average in known else None


def _is_average(path: str, slot: str | None) -> bool:
    return slot is not None and (path == f"slots/{slot}" or path.startswith(f"slots/{slot}/"))


def _ages_of(slot: str | None) -> tuple[str, ...]:
    """Return the paths that the age of averages with zero_debias may have: that of their optimizer, or their own."""
    scope = "" if slot is None else slot.rpartition("/")[0] + "/" * ("/" in slot)
    return () if slot is None else (f"slots/{scope}start_step", f"slots/{scope}with_moving_average/start_step")


def check_averages(slot: str, saved: Sequence[Leaf], where: str) -> None:
    """Check that the slot of averages exists.

    Raises:
        ValueError: There is no such slot; lists the existing slots.
    """
    if not any(_is_average(leaf.path, slot) for leaf in saved):
        slots = sorted({leaf.keys[1] for leaf in saved if leaf.keys[0] == "slots" and len(leaf.keys) > 1})
        raise ValueError(
            f"use_averages: {where} has no slot {slot!r}{trees.nearest(slot, slots)}; it has {slots}. Use "
            "jstep.with_moving_average(optimizer, ema) to keep averages; use_averages also takes the name of a slot."
        )


def _kind(leaf: Any, path: str) -> tuple[tuple[int, ...], str]:
    if isinstance(leaf, bool | int | float | complex):
        return (), str(jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
    if isinstance(leaf, jax.ShapeDtypeStruct) or trees.is_array(leaf):
        return tuple(leaf.shape), dtype_name(leaf.dtype)
    raise TypeError(
        f"target: {trees.quoted(path)} is {type(leaf).__name__}; pass an array or a shape for each leaf, such as "
        "jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))"
    )


def as_text(shape: Sequence[int], dtype: Any) -> str:
    """Format the shape and dtype of an array, such as `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def listing(title: str, items: Sequence[str], most: int = _SHOWN) -> str:
    """Format a part of a message: title, number of items, first items; the empty string if there are no items."""
    if not items:
        return ""
    more = f", … and {len(items) - most} more" if len(items) > most else ""
    return f"; {title} ({len(items)}): " + ", ".join(items[:most]) + more


def _by_prefix(paths: Sequence[str]) -> str:
    """Count paths by their common prefixes, for the end of a listing that does not show all of them."""
    if len(paths) <= _SHOWN:
        return ""
    split = [path.split("/") for path in paths]
    by_entry, by_field = (_groups(split, depth) for depth in (2, 1))
    chosen = by_entry if len(by_entry) <= _GROUPS else by_field
    return f", that is, {', '.join(map(_counted, chosen))}"


def _groups(split: Sequence[list[str]], depth: int) -> list[list[list[str]]]:
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in split:
        groups.setdefault(tuple(parts[:depth]), []).append(parts)
    return list(groups.values())


def _counted(split: Sequence[list[str]]) -> str:
    if len(split) == 1:
        return repr("/".join(split[0]))
    return f"'{'/'.join([*split[0][: _common(split)], '*'])}' ({len(split)} leaves)"


def _common(split: Sequence[list[str]]) -> int:
    """Return the number of leading parts that all paths share, not counting the last part of a path."""
    columns = zip(*(parts[:-1] for parts in split), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
