"""`merge_checkpoints`: the weighted mean of checkpoints, in place of a decay of the rate that was not run."""

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
from jstep.checkpoint.manifest import CheckpointError, Leaf, Manifest
from jstep.checkpoint.names import as_prefix, check_directory
from jstep.checkpoint.open_store import open_store
from jstep.checkpoint.reading import CORRUPTED, CheckpointReader, GoneError, read_and_verify, short
from jstep.checkpoint.store import Store
from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import as_int, describe_type, format_list, format_value
from jstep.core.tables import printable
from jstep.optimizers.averages import as_average_names
from jstep.state.train_state import MODEL_STATE, TrainState

CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}
_MASTER = "master"
_RATE = "learning_rate"
_TRIES = 5
"""The number of times that the checkpoints are listed; a living run may replace one while it is read."""
_RISE = 1e-6
"""The fraction of its first value by which a schedule may rise: a flat one in float32 may by rounding."""
_logger = logging.getLogger("jstep")
_Id = tuple[str, int]


def decay_weights(steps: Sequence[int], decay: object) -> list[float]:
    """Return a weight for each of the ascending steps: the drop of the curve between the middles around it."""
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
        raise TypeError(
            f"decay={format_value(decay)}: must be a name or a schedule of the step, got {describe_type(decay)}"
        )
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

    The curve d has its value between two checkpoints at their middle; it is 1 before the first one and 0 after the
    last. The weight of a checkpoint is the drop of the curve there. If all checkpoints are equally far apart,
    `"linear"` is the plain mean. Sums are computed in float64, in the order of the steps, and rounded once. Nothing is
    written.

    Args:
        directory: The directory of the checkpoints, or its URL; the run may train on meanwhile.
        steps: Their steps, two or more, in any order; None for all checkpoints that are kept, which are listed again, a
            few times, if one is deleted or replaced meanwhile.
        decay: The curve: `"linear"` 1 − x, `"1-sqrt"` 1 − √x, `"cosine"` (1 + cos πx)/2, or a schedule, a function of
            the step, in proportion to its value at the first checkpoint.
        prefix: The prefix of the checkpoint names.
        use_averages: Whether to merge the moving averages, as in `Saver.restore_params`.
        target: A tree of parameters or shapes, as in `Saver.restore_params`, in any floating dtypes.

    Returns:
        A tree like target; without one, nested dicts of NumPy arrays in the dtypes of the parameters. A parameter is
        merged in full precision if the checkpoint has it: its master, or its remainder.

    Raises:
        CheckpointError: A checkpoint is corrupted, or was deleted or replaced while it was read.
        FileNotFoundError: There is no checkpoint of a step.
        TypeError: An argument has the wrong type.
        ValueError: There are fewer than two steps, or one of them twice; the curve rises; or parameters are not finite,
            have other paths, shapes or dtypes, or are integers that differ.

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
    prefix, averages = as_prefix(prefix), as_average_names(use_averages)
    store = open_store(check_directory(directory), prefix)
    for left in reversed(range(_TRIES)):
        try:
            return _merge(store, prefix, steps, decay, averages, target)
        except (FileNotFoundError, GoneError):
            # The run may go on: without steps, those that are there now are taken.
            if steps is not None or not left:
                raise
    raise AssertionError("unreachable")


def _merge(
    store: Store,
    prefix: str,
    steps: Iterable[int] | None,
    decay: str | Callable[[Any], Any],
    averages: Sequence[str] | None,
    target: Tree,
) -> Any:
    reader = CheckpointReader(store, prefix, verify=True)
    chosen = steps_to_merge(store, prefix, steps)
    weights = decay_weights(chosen, decay)
    opened = [_Opened.of(store, *reader.find(step), averages) for step in chosen]
    newest = opened[-1]
    for checkpoint in opened:
        match.check_averages(averages or (), checkpoint.manifest.leaves, checkpoint.path)
        _check_same(checkpoint, newest)
    wanted = None if target is None else _wanted(target, newest)
    for checkpoint in opened:
        if not store.contents(checkpoint.path, checkpoint.manifest).verifies:
            problems = store.find_corruption(checkpoint.path, checkpoint.manifest)
            if store.is_gone(checkpoint.path, checkpoint.manifest):
                raise _gone(checkpoint)
            if problems:
                raise reader.unusable(checkpoint.path, problems, CORRUPTED)
    merged: dict[_Id, Any] = {}
    for key, source in newest.sources.items():
        like = None if wanted is None else wanted.get(key)
        merged[key] = _merged(store, reader, opened, key, weights, source.param.dtype if like is None else like.dtype)
    listing = ", ".join(f"{step}: {weight:.6g}" for step, weight in zip(chosen, weights, strict=True))
    _logger.info("merged %d checkpoints of %s, with the weights %s", len(chosen), store.directory, listing)
    if changes := _changes(store.directory, prefix, [checkpoint.manifest for checkpoint in opened]):
        _logger.warning(
            "%s: the merge is an estimate for a constant rate, and %s; give the steps of a stretch without changes",
            store.directory,
            "; ".join(changes),
        )
    if any(leaf.keys[:2] == (SLOTS, MODEL_STATE) for leaf in newest.manifest.leaves):
        _logger.warning(
            "%s: model_state is not merged. Statistics such as BatchNorm's belong to the parameters of their step: "
            "compute them anew with the merged ones, or take those of step %d, the newest",
            store.directory,
            chosen[-1],
        )
    if wanted is None:
        nested = match.nest({newest.sources[key].param.keys: value for key, value in merged.items()})
        return nested[PARAMS]
    values = [
        match.keep_target_leaf(want, chosen[-1]) if want.left_out is not None else match.place_leaf(want, merged[key])
        for key, want in wanted.items()
    ]
    return jax.tree.unflatten(trees.structure(target), values)


def _changes(directory: str, prefix: str, manifests: Sequence[Manifest]) -> list[str]:
    """Describe where the rate fell between checkpoints, by the run's timeline, and where its options changed."""
    rates: dict[str, dict[int, float]] = {}
    changes: list[str] = []
    for name, by_step in rates.items():
        known = [(of.step, by_step[of.step]) for of in manifests if of.step in by_step]
        falls = [(a, b) for a, b in itertools.pairwise(known) if b[1] < a[1] * (1 - _RISE)]
        if falls:
            (first, before), (last, after) = falls[0][0], falls[-1][1]
            changes.append(f"{printable(name)} fell from {before:.4g} at step {first} to {after:.4g} at step {last}")
    for older, newer in itertools.pairwise(manifests):
        a, b = (of.extra.get("config") if isinstance(of.extra, dict) else None for of in (older, newer))
        if isinstance(a, dict) and isinstance(b, dict):
            pairs = {name: (a.get(name), b.get(name)) for name in {**a, **b}}
            # A value may be "(not recorded)" or "(not ready)".
            differ = [name for name, pair in pairs.items() if pair[0] != pair[1] and "(not " not in f"{pair}"]
            names = printable(format_list(differ, 5))
            changes += [f"options changed between the steps {older.step} and {newer.step}: {names}"] * bool(differ)
    return changes


def steps_to_merge(store: Store, prefix: str, steps: Any) -> list[int]:
    there = dict(store.newest_first(prefix))
    if steps is None:
        chosen = [step for step, path in there.items() if not store.manifest(path).temporary]
        if broken := store.broken(prefix, max(there, default=-1)):
            raise CheckpointError(f"{broken[0][0]} {CORRUPTED}: {broken[0][1]}; give steps= to leave it out")
    elif isinstance(steps, str) or not isinstance(steps, Iterable):
        raise TypeError(f"steps={format_value(steps)}: must be integers, got {describe_type(steps)}")
    else:
        chosen = [as_int(step, "steps", 0) for step in steps]
    if twice := sorted(step for step, count in Counter(chosen).items() if count > 1):
        raise ValueError(f"steps: must have each step once, got {format_list(list(map(str, twice)), 5)} more than once")
    has = f"{store.directory} has {f'steps {sorted(there)}' if there else 'no checkpoints'}"
    if missing := sorted(set(chosen) - there.keys()):
        raise FileNotFoundError(f"steps: there are no checkpoints {prefix}-* of steps {missing}; {has}")
    if len(chosen) < 2:
        raise ValueError(f"steps={sorted(chosen)}: must be two or more to merge; {has}")
    return sorted(chosen)


class _Source(NamedTuple):
    """The leaves of one checkpoint to merge for one parameter.

    Attributes:
        leaf: The parameter itself, or its average.
        half: The lower half of `leaf`, or None.
        master: A leaf that may hold the full precision, or None.
    """

    param: Leaf
    leaf: Leaf
    half: Leaf | None
    master: Leaf | None


@dataclasses.dataclass(frozen=True)
class _Opened:
    path: str
    manifest: Manifest
    sources: Mapping[_Id, _Source]

    @classmethod
    def of(cls, store: Store, path: str, manifest: Manifest, averages: Sequence[str] | None) -> "_Opened":
        if not manifest.finite:
            raise ValueError(f"steps: the parameters of {path} are not finite; leave step {manifest.step} out")
        records, arrays = leaf_records.leaves_by_id(manifest.leaves), manifest.by_array
        sources = {}
        for key, leaf in records.items():
            if leaf.keys[0] != PARAMS:
                continue
            average = match.find_average(key, records, averages)
            source = records[average] if average is not None and records[average].shape == leaf.shape else leaf
            is_low = source is leaf and leaf.dtype in ("bfloat16", "float16")
            master = next((slot for slot in manifest.leaves if _is_master(slot, leaf)), None) if is_low else None
            sources[key] = _Source(leaf, source, arrays.get(source.half or ""), master)
        return cls(path, manifest, sources)


def _is_master(leaf: Leaf, param: Leaf) -> bool:
    """Return whether a slot has the name of a master and the path of a parameter; its values decide later."""
    rest = param.keys[1:]
    slot = "/".join(leaf.keys[1 : len(leaf.keys) - len(rest)])
    is_slot_of = leaf.keys[0] == SLOTS and leaf.keys[len(leaf.keys) - len(rest) :] == rest
    return is_slot_of and slot.split("/")[-1] == _MASTER and (leaf.shape, leaf.dtype) == (param.shape, "float32")


def _check_same(older: _Opened, newest: _Opened) -> None:
    kinds = [
        {key: (tuple(of.param.shape), of.param.dtype, of.param.key_impl) for key, of in opened.sources.items()}
        for opened in (older, newest)
    ]
    differing = sorted({key[0] for key in kinds[0].keys() | kinds[1].keys() if kinds[0].get(key) != kinds[1].get(key)})
    if differing:
        where = format_list(list(map(repr, differing)), 5)
        raise ValueError(f"steps: {older.path} and {newest.path} have other parameters: they differ at {where}")


def _wanted(target: Tree, newest: _Opened) -> dict[_Id, Any]:
    saved = leaf_records.leaves_by_id(newest.manifest.leaves)
    flat = jax.tree_util.tree_leaves_with_path({PARAMS: target})
    keys = trees.ids("/".join(leaf_records.path_keys(path)) for path, _ in flat)

    def as_saved(key: _Id, leaf: Any) -> Any:
        record = saved.get(key)
        is_float = record is not None and record.key_impl is None and trees.is_floating(record.dtype)
        has_float = hasattr(leaf, "dtype") and trees.is_floating(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, record.dtype) if record and is_float and has_float else leaf

    shapes = [as_saved(key, leaf) for key, (_, leaf) in zip(keys, flat, strict=True)]
    as_stored = jax.tree.unflatten(trees.structure({PARAMS: target}), shapes)

    def refused(differences: str) -> ValueError:
        return ValueError(
            f"target does not fit the parameters of {newest.path}{differences}. Nothing was merged; "
            "merge_checkpoints without target returns all of them as nested dicts of NumPy arrays."
        )

    matched = match.match_params(as_stored, newest.manifest, None, None, newest.path, refused)
    pairs = zip(matched.wanted, flat, strict=True)
    leaves = [
        dataclasses.replace(want, leaf=leaf, dtype=str(getattr(leaf, "dtype", want.dtype))) for want, (_, leaf) in pairs
    ]
    return dict(zip(keys, leaves, strict=True))


def _merged(
    store: Store, reader: CheckpointReader, opened: Sequence[_Opened], key: _Id, weights: Sequence[float], dtype: Any
) -> np.ndarray[Any, Any]:
    """Return the weighted sum of one parameter; memory holds it and one leaf of one checkpoint."""
    total: Any = None
    first: Any = None
    for checkpoint, weight in zip(opened, weights, strict=True):
        param, leaf, half, master = checkpoint.sources[key]
        value = _read(store, reader, checkpoint, leaf, half)
        if not (trees.is_floating(param.dtype) or param.dtype.startswith("complex")):
            if first is None:
                first = value
            elif first.tobytes() != value.tobytes():
                raise ValueError(
                    f"steps: {param.path!r} is {param.dtype} and differs between {opened[0].path} and "
                    f"{checkpoint.path}; only floating-point numbers can be merged"
                )
            continue
        if master is not None:
            whole = _read(store, reader, checkpoint, master, None)
            value = whole if (whole.astype(value.dtype) == value).all() else value
        wide = value.astype(np.complex128 if param.dtype.startswith("complex") else np.float64)
        if not np.isfinite(wide).all():
            step = checkpoint.manifest.step
            raise ValueError(
                f"steps: {checkpoint.path} has values in {param.path!r} that are not finite; leave step {step} out"
            )
        total = weight * wide if total is None else total + weight * wide
    return np.asarray(first if total is None else total.astype(dtype))


def _gone(checkpoint: _Opened) -> GoneError:
    return GoneError(f"{checkpoint.path} was deleted or replaced while it was read; nothing was merged")


def _read(
    store: Store, reader: CheckpointReader, checkpoint: _Opened, leaf: Leaf, half: Leaf | None
) -> np.ndarray[Any, Any]:
    path, manifest = checkpoint.path, checkpoint.manifest
    names = [part.array for part in (leaf, half) if part is not None and part.array is not None]
    arrays, problems, failure = read_and_verify(store, path, manifest, dict.fromkeys(names), verify=False)
    if store.is_gone(path, manifest):
        raise _gone(checkpoint) from failure
    if problems:
        raise reader.unusable(path, problems, CORRUPTED)
    if failure is not None:
        raise CheckpointError(f"{path} could not be read: {short(failure)}; nothing was merged") from failure
    return np.asarray(leaf_records.leaf_value(leaf, half, arrays))
