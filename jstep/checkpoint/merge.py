"""`merge_checkpoints`: the weighted mean of checkpoints that stands for a decay of the rate that was not run."""

import dataclasses
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.checkpoint import leaf_records, match
from jstep.checkpoint.leaf_records import PARAMS, SLOTS
from jstep.checkpoint.manifest import CheckpointError, CorruptedError, Leaf, Manifest
from jstep.checkpoint.names import checked_directory, checked_prefix
from jstep.checkpoint.open_store import open_store
from jstep.checkpoint.reading import CORRUPTED, Reader, short
from jstep.checkpoint.store import Store
from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import as_int, kind, listed, shown
from jstep.optimizers.averages import as_average_names
from jstep.state.train_state import MODEL_STATE, TrainState

CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}
_MASTER = "master"
_RISE = 1e-6
"""The share of its first value by which a schedule may rise: one of float32 may where it is flat."""
_logger = logging.getLogger("jstep")
_Id = tuple[str, int]


def decay_weights(steps: Sequence[int], decay: object) -> list[float]:
    """Return the weight of the checkpoint of each step, ascending: what the curve drops between its two middles.

    Raises:
        TypeError: The decay is neither a name nor a function.
        ValueError: There is no such name, or the curve rises, or is not above 0 at the first step.
    """
    pairs = list(itertools.pairwise(steps))
    if callable(decay):
        first = float(decay(steps[0]))
        if not (math.isfinite(first) and first > 0):
            raise ValueError(
                f"decay: must be above 0 and finite at step {steps[0]}, the first checkpoint, got {first:g}"
            )
        values = [float(decay((a + b) // 2)) / first for a, b in pairs]
    elif isinstance(decay, str) and decay in CURVES:
        begin, end = (3 * steps[0] - steps[1]) / 2, (3 * steps[-1] - steps[-2]) / 2
        values = [CURVES[decay](((a + b) / 2 - begin) / (end - begin)) for a, b in pairs]
    elif isinstance(decay, str):
        raise ValueError(f"decay={decay!r}: must be one of {', '.join(map(repr, CURVES))}, or a schedule of the step")
    else:
        raise TypeError(f"decay={shown(decay)}: must be a name or a schedule of the step, got {kind(decay)}")
    curve = [1.0, *values, 0.0]
    for (a, b), before, value in zip(pairs, curve, values, strict=False):
        if not value <= before + _RISE or value < 0:
            raise ValueError(
                f"decay: must not rise or be negative, got {before:g}, then {value:g} of its value at step {steps[0]} "
                f"at step {(a + b) // 2}: no mean of checkpoints stands for that"
            )
    return [max(0.0, a - b) for a, b in itertools.pairwise(curve)]


def merge_checkpoints(
    directory: str | os.PathLike[str],
    steps: Iterable[int] | None = None,
    *,
    decay: str | Callable[[Any], Any] = "linear",
    prefix: str = "model",
    use_averages: bool | str | Sequence[str] = False,
    target: Tree = None,
) -> Any:
    """Return the parameters of a decay that was not run: the weighted mean of checkpoints of a constant rate.

    Between two checkpoints the curve d has its value at their middle, 1 before the first and 0 after the last; the
    weight of a checkpoint is what the curve drops there. Of checkpoints that are equally far apart `"linear"` is the
    plain mean. Sums are made in float64, in the order of the steps, and rounded once. Nothing is written.

    Args:
        directory: The directory of the checkpoints, or its URL; the run may train on meanwhile.
        steps: Their steps, two or more, in any order; None for all that are kept.
        decay: The curve: `"linear"` 1 − x, `"1-sqrt"` 1 − √x, `"cosine"` (1 + cos πx)/2, or a schedule, a function of
            the step, in proportion to its value at the first checkpoint.
        prefix: The prefix of the checkpoint names.
        use_averages: Whether to merge the moving averages, as in `Saver.restore_params`.
        target: A tree of parameters or shapes, as in `Saver.restore_params`, in any floating dtypes.

    Returns:
        A tree like target; without one nested dicts of NumPy arrays in the dtypes of the parameters. The full precision
        of a parameter is merged where the checkpoint has it: its master, or its remainder.

    Raises:
        CheckpointError: A checkpoint is damaged, or was deleted or replaced while it was read.
        FileNotFoundError: A step is not there.
        TypeError: An argument has the wrong type.
        ValueError: Less than two steps, one of them twice, a curve that rises, parameters that are not finite, have
            other paths, shapes or dtypes, or are integers that differ.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(1.0)
        >>> with jstep.Saver(tempfile.mkdtemp()) as saver:
        ...     for step in (1, 2, 3):
        ...         path = saver.save(jstep.TrainState.create({"w": float(step)}, optimizer, global_step=step))
        >>> jstep.merge_checkpoints(saver.directory)
        {'w': array(2., dtype=float32)}
    """
    if isinstance(target, TrainState):
        raise TypeError("target: must be a tree of parameters, got a TrainState; pass state.params")
    prefix, averages = checked_prefix(prefix), as_average_names(use_averages)
    store = open_store(checked_directory(directory), prefix)
    reader = Reader(store, prefix, verify=True)
    chosen = steps_to_merge(store, prefix, steps)
    weights = decay_weights(chosen, decay)
    opened = [_Opened.of(store, *reader.find(step), averages) for step in chosen]
    newest = opened[-1]
    for one in opened:
        match.check_averages(averages or (), one.manifest.leaves, one.path)
        _check_same(one, newest)
    wanted = None if target is None else _wanted(target, newest)
    for one in opened:
        if not store.contents(one.path, one.manifest).verifies:
            problems = store.find_corruption(one.path, one.manifest)
            if problems:
                raise reader.unusable(one.path, problems, CORRUPTED)
    merged: dict[_Id, Any] = {}
    for key, source in newest.sources.items():
        like = None if wanted is None else wanted.get(key)
        merged[key] = _merged(store, reader, opened, key, weights, source.param.dtype if like is None else like.dtype)
    said = ", ".join(f"{step}: {weight:.6g}" for step, weight in zip(chosen, weights, strict=True))
    _logger.info("merged %d checkpoints of %s, with the weights %s", len(chosen), store.directory, said)
    if any(leaf.keys[:2] == (SLOTS, MODEL_STATE) for leaf in newest.manifest.leaves):
        _logger.warning(
            "%s: model_state is not merged. Statistics such as BatchNorm's belong to the parameters of their step: "
            "compute them anew with the merged ones, or take those of step %d, the newest",
            store.directory,
            chosen[-1],
        )
    if wanted is None:
        return _nested({newest.sources[key].param.keys[1:]: value for key, value in merged.items()})
    values = [
        match.keep_target_leaf(one, chosen[-1]) if one.left_out is not None else match.place_leaf(one, merged[key])
        for key, one in wanted.items()
    ]
    return jax.tree.unflatten(trees.structure(target), values)


def steps_to_merge(store: Store, prefix: str, steps: Any) -> list[int]:
    """Return the steps to merge, ascending; see `merge_checkpoints`."""
    there = dict(store.newest_first(prefix))
    if steps is None:
        given = [step for step, path in there.items() if not store.manifest(path).passing]
        if broken := store.broken(prefix, max(there, default=-1)):
            raise CheckpointError(f"{broken[0][0]} {CORRUPTED}: {broken[0][1]}; give steps= to leave it out")
    elif isinstance(steps, str) or not isinstance(steps, Iterable):
        raise TypeError(f"steps={shown(steps)}: must be integers, got {kind(steps)}")
    else:
        given = [as_int(step, "steps", 0) for step in steps]
    if twice := sorted(step for step, count in Counter(given).items() if count > 1):
        raise ValueError(f"steps: must have each step once, got {listed(list(map(str, twice)), 5)} more than once")
    has = f"{store.directory} has {f'steps {sorted(there)}' if there else 'no checkpoints'}"
    if missing := sorted(set(given) - there.keys()):
        raise FileNotFoundError(f"steps: there are no checkpoints {prefix}-* of steps {missing}; {has}")
    if len(given) < 2:
        raise ValueError(f"steps={sorted(given)}: must be two or more to merge; {has}")
    return sorted(given)


class _Source(NamedTuple):
    """What is merged of a parameter in one checkpoint.

    Attributes:
        param: The record of the parameter.
        leaf: That of what is merged: itself, or its average.
        half: The lower half of that, or None.
        master: What may be its full precision, or None.
    """

    param: Leaf
    leaf: Leaf
    half: Leaf | None
    master: Leaf | None


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A checkpoint to merge: its path, its manifest, and what is merged of each parameter."""

    path: str
    manifest: Manifest
    sources: Mapping[_Id, _Source]

    @classmethod
    def of(cls, store: Store, path: str, manifest: Manifest, averages: Sequence[str] | None) -> "_Opened":
        if not manifest.finite:
            raise ValueError(f"steps: the parameters of {path} are not finite; leave step {manifest.step} out")
        records, arrays = leaf_records.leaves_by_id(manifest.leaves), manifest.by_array
        found = {}
        for key, leaf in records.items():
            if leaf.keys[0] != PARAMS:
                continue
            average = match.average_of(key, records, averages)
            source = records[average] if average is not None and records[average].shape == leaf.shape else leaf
            is_low = source is leaf and leaf.dtype in ("bfloat16", "float16")
            master = next((one for one in manifest.leaves if _is_master(one, leaf)), None) if is_low else None
            found[key] = _Source(leaf, source, arrays.get(source.half or ""), master)
        return cls(path, manifest, found)


def _is_master(one: Leaf, param: Leaf) -> bool:
    """Whether a slot is called as masters are, with the path of a parameter: what it holds decides."""
    rest = param.keys[1:]
    slot = "/".join(one.keys[1 : len(one.keys) - len(rest)])
    is_slot_of = one.keys[0] == SLOTS and one.keys[len(one.keys) - len(rest) :] == rest
    return is_slot_of and slot.split("/")[-1] == _MASTER and (one.shape, one.dtype) == (param.shape, "float32")


def _check_same(one: _Opened, newest: _Opened) -> None:
    """Refuse a checkpoint whose parameters have other paths, shapes or dtypes than those of the newest one."""
    kinds = [
        {key: (tuple(of.param.shape), of.param.dtype, of.param.key_impl) for key, of in opened.sources.items()}
        for opened in (one, newest)
    ]
    differing = sorted({key[0] for key in kinds[0].keys() | kinds[1].keys() if kinds[0].get(key) != kinds[1].get(key)})
    if differing:
        where = listed(list(map(repr, differing)), 5)
        raise ValueError(f"steps: {one.path} and {newest.path} have other parameters: they differ at {where}")


def _wanted(target: Tree, newest: _Opened) -> dict[_Id, Any]:
    """The leaves of a target as they are matched with the checkpoint, in any floating dtypes."""
    saved = leaf_records.leaves_by_id(newest.manifest.leaves)
    flat = jax.tree_util.tree_leaves_with_path({PARAMS: target})
    keys = trees.ids("/".join(leaf_records.keys_of(path)) for path, _ in flat)

    def as_saved(key: _Id, leaf: Any) -> Any:
        record = saved.get(key)
        is_float = record is not None and record.key_impl is None and trees.is_floating(record.dtype)
        has_float = hasattr(leaf, "dtype") and trees.is_floating(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, record.dtype) if record and is_float and has_float else leaf

    shapes = [as_saved(key, leaf) for key, (_, leaf) in zip(keys, flat, strict=True)]
    as_stored = jax.tree.unflatten(trees.structure({PARAMS: target}), shapes)
    found = match.match_params(as_stored, newest.manifest, None, None, newest.path)
    pairs = zip(found.wanted, flat, strict=True)
    leaves = [
        dataclasses.replace(one, leaf=leaf, dtype=str(getattr(leaf, "dtype", one.dtype))) for one, (_, leaf) in pairs
    ]
    return dict(zip(keys, leaves, strict=True))


def _merged(
    store: Store, reader: Reader, opened: Sequence[_Opened], key: _Id, weights: Sequence[float], dtype: Any
) -> np.ndarray[Any, Any]:
    """The weighted sum of one parameter; in memory are it and one leaf of one checkpoint."""
    total: Any = None
    first: Any = None
    for one, weight in zip(opened, weights, strict=True):
        param, leaf, half, master = one.sources[key]
        value = _read(store, reader, one, leaf, half)
        if not (trees.is_floating(param.dtype) or param.dtype.startswith("complex")):
            if first is None:
                first = value
            elif first.tobytes() != value.tobytes():
                raise ValueError(
                    f"steps: {param.path!r} is {param.dtype} and differs between {opened[0].path} and {one.path}; only "
                    "floating-point numbers can be merged"
                )
            continue
        if master is not None:
            whole = _read(store, reader, one, master, None)
            value = whole if (whole.astype(value.dtype) == value).all() else value
        wide = value.astype(np.complex128 if param.dtype.startswith("complex") else np.float64)
        if not np.isfinite(wide).all():
            step = one.manifest.step
            raise ValueError(
                f"steps: {one.path} has values in {param.path!r} that are not finite; leave step {step} out"
            )
        total = weight * wide if total is None else total + weight * wide
    return np.asarray(first if total is None else total.astype(dtype))


def _read(store: Store, reader: Reader, one: _Opened, leaf: Leaf, half: Leaf | None) -> np.ndarray[Any, Any]:
    names = [part.array for part in (leaf, half) if part is not None and part.array is not None]
    gone = CheckpointError(f"{one.path} was deleted or replaced while it was read; nothing was merged")
    try:
        arrays = store.contents(one.path, one.manifest).restore(dict.fromkeys(names))
    except CorruptedError as error:
        if store.is_gone(one.path, one.manifest):
            raise gone from error
        raise reader.unusable(one.path, error.problems, CORRUPTED) from error
    except Exception as error:
        if store.is_gone(one.path, one.manifest):
            raise gone from error
        raise CheckpointError(f"{one.path} could not be read: {short(error)}; nothing was merged") from error
    if store.is_gone(one.path, one.manifest):
        raise gone
    return np.asarray(leaf_records.value_of(leaf, half, arrays))


def _nested(values: Mapping[tuple[str, ...], Any]) -> Any:
    """Nested dicts of leaves by their keys; a single leaf without keys is itself."""
    if list(values) == [()]:
        return values[()]
    nested: dict[str, Any] = {}
    for keys, value in values.items():
        at = nested
        for part in keys[:-1]:
            at = at.setdefault(part, {})
        at[keys[-1]] = value
    return nested
