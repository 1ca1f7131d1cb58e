"""`load_weights`: weights from safetensors files, and from the checkpoints of Orbax and jstep."""

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.checkpoint import leaf_records, targets
from jstep.checkpoint.manifest import CheckpointError, Leaf, Manifest
from jstep.checkpoint.open_store import open_store
from jstep.checkpoint.reading import first_problem, read_and_verify, short
from jstep.checkpoint.store import Store
from jstep.core import meshes, placement, trees
from jstep.core.annotations import T
from jstep.core.checks import as_bool, describe_type, format_items, format_value
from jstep.core.tracebacks import shortens_tracebacks
from jstep.distributed import processes
from jstep.stores.files import open_regular
from jstep.weights import match
from jstep.weights.files import FILES, OF_JSTEP, local_path, read_headers, weights_kind
from jstep.weights.match import Names, WantedTensor, WeightsMatch
from jstep.weights.tensors import Read, Tensor, confirm, in_groups

_AT_ONCE = 2**30
"""Bytes to read in one group: while they are cast, they occupy memory in both dtypes."""
_logger = logging.getLogger("jstep")


@shortens_tracebacks
def load_weights(
    path: str | os.PathLike[str],
    target: T,
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    partial: bool = False,
) -> T:
    """Load weights from safetensors files, such as those of the Hugging Face Hub, or from a checkpoint.

    A leaf is `transform(tensors[names(path)])`. Only the necessary bytes are read: each device reads its own part of a
    file, and parts that several devices of a process hold are read once. For a leaf with a transform, however, each
    process reads the whole tensor.

    A checkpoint is a folder that Orbax wrote (`StandardCheckpointer`, `PyTreeCheckpointer`, or a step of a
    `CheckpointManager`, which stands for its default item or its only item), or a checkpoint of jstep, which is
    verified by its checksums. The names of its tensors are their paths, such as `params/dense/kernel`, where `params/`
    may be omitted. It may hold more than weights: if tensors below `params` are loaded, whole groups next to it
    (`opt_state`, `slots`) do not count as unused; if `names` only puts a group before all paths, nothing outside of
    this group does.

    Args:
        path: A file, a folder, an index (`model.safetensors.index.json`) next to its shards, or a checkpoint, on this
            machine.
        target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`), for structure, shapes, dtypes and
            shardings. A leaf without a sharding is placed where JAX places new arrays; a NumPy array is loaded as one;
            typed PRNG keys are made from their stored data; a Python number accepts any integer or float.
        names: Leaves that have another name in the file: a mapping from paths of target (`"layers/0/wq"`), or a
            function of the path, to the name of a tensor, to None for a leaf to keep unchanged, or to a pair
            `(name, transform)`, where `transform` computes the leaf from the stored tensor, a NumPy array
            (`numpy.transpose`). Paths that a mapping does not mention are the names of their tensors. Two leaves may
            share one tensor (tied weights).
        dtype: The dtype to cast floating tensors to, whatever the dtypes of target; None to require the dtypes of
            target. Integers and booleans are never cast.
        partial: Whether to load only what fits: the other leaves of target, which then must have values, are kept, and
            everything missing, unused or mismatched is logged as a warning. Of a corrupted checkpoint of jstep, the
            arrays that can be read are loaded, with a warning that names the others and the corrupted files.

    Returns:
        A tree like target. Its new arrays share no memory with anything and may be donated.

    Raises:
        CheckpointError: A checkpoint of jstep is corrupted.
        FileNotFoundError: There are no weights at path, or an index names a missing file.
        ImportError: The `safetensors` package is not installed: `pip install 'jstep[weights]'`.
        TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
        ValueError: A file is corrupted or malicious; a checkpoint of Orbax is incomplete, or path has several; names
            has a path that is not in target; target does not fit: lists all tensors that are missing, unused or
            mismatched (shapes, dtypes); or a leaf to keep has no value.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jstep
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        >>> names = {"dense/kernel": ("dense.weight", jnp.transpose), "dense/bias": "dense.bias"}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = jstep.save_weights(f"{directory}/model.safetensors", params, names)
        ...     loaded = jstep.load_weights(path, jax.eval_shape(lambda: params), names, dtype=jnp.bfloat16)
        >>> jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", loaded)
        {'dense': {'bias': 'bfloat16(3,)', 'kernel': 'bfloat16(2, 3)'}}

        From a checkpoint:

        >>> state = jstep.TrainState.create(params, jstep.adam())
        >>> with jstep.Saver(tempfile.mkdtemp()) as saver:
        ...     path = saver.save(state)
        >>> loaded = jstep.load_weights(path, jax.eval_shape(lambda: params))
        >>> second_moments = jstep.load_weights(path, params, lambda path: f"slots/v/{path}")
        >>> float(loaded["dense"]["kernel"].sum()), float(second_moments["dense"]["kernel"].sum())
        (6.0, 0.0)

    Source: https://huggingface.co/docs/safetensors
    """
    partial, float_dtype = as_bool(partial, "partial"), _float_dtype(dtype)
    placement.refuse_compile_only(target, "target")
    with open_source(path, partial=partial) as source:
        by_name = match.rules(names, target, "target")
        matched = match.match(target, source.tensors, by_name, float_dtype, with_more=source.is_checkpoint)
        if matched.differences() and not partial:
            raise _misfit(matched, source.path)
        for wanted in matched.wanted:
            if wanted.source is None:
                targets.require_value(wanted)
        leaves = [wanted.leaf for wanted in matched.wanted]
        # Leaves with transforms come first, since the result of a transform may not fit.
        for i, wanted in enumerate(matched.wanted):
            if wanted.source is not None and wanted.transform is not None:
                name = wanted.source.name
                result = match.call_transform(
                    wanted.transform, np.asarray(source.read({name: None})[name]), wanted.path
                )
                with meshes.internal_transfers():
                    array = np.asarray(result)
                problem = wanted.difference(array.shape, array.dtype)
                if not problem:
                    leaves[i] = match.from_host(wanted, array)
                    continue
                matched.wanted[i] = dataclasses.replace(wanted, source=None, problem=problem)
                if not partial:
                    raise _misfit(matched, source.path, i + 1)
                targets.require_value(wanted)
        if matched.differences():
            nothing = "" if any(wanted.source for wanted in matched.wanted) else ", and nothing was loaded"
            _logger.warning(
                "load_weights: %s does not fit target%s%s", source.path, nothing, matched.differences() + matched.hint
            )
        plain = [i for i, w in enumerate(matched.wanted) if w.source is not None and w.transform is None]
        for i, leaf in zip(plain, source.leaves([matched.wanted[i] for i in plain]), strict=True):
            leaves[i] = leaf
    for i, wanted in enumerate(matched.wanted):
        if wanted.is_key and wanted.source is not None:
            leaves[i] = _keys(wanted, leaves[i])
    return jax.tree.unflatten(trees.structure(target), leaves)


def _keys(wanted: WantedTensor, data: jax.Array) -> jax.Array:
    impl: list[Any] = []
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), wanted.leaf)  # it takes no shapes
    return jax.random.wrap_key_data(data, impl=impl[0])


def _misfit(matched: WeightsMatch, path: str, begin: int = 0) -> ValueError:
    """Return the error for a target that does not fit; the transforms from leaf `begin` on were not called yet."""
    matched.wanted[begin:] = map(match.with_problem_of_ones, matched.wanted[begin:])
    return ValueError(
        f"target does not fit {path}{matched.differences()}. Nothing was loaded; names= maps leaves to tensors (None: "
        f"none), dtype= casts floating tensors, and partial=True loads what fits{matched.hint}"
    )


def _float_dtype(dtype: DTypeLike | None) -> Any:
    if dtype is None:
        return None
    try:
        resolved = np.dtype(getattr(jnp, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise TypeError(f"dtype={format_value(dtype)}: must be a floating dtype, got {describe_type(dtype)}") from None
    if not trees.is_floating(resolved):
        raise ValueError(f"dtype={format_value(dtype)}: must be a floating dtype; integers and booleans are never cast")
    return resolved


# Sources of weights.


@dataclasses.dataclass(frozen=True)
class TensorSource:
    path: str
    tensors: Mapping[str, Tensor]
    read: Read
    is_checkpoint: bool

    def leaves(self, wanted: Sequence[WantedTensor]) -> Iterator[Any]:
        """Read leaves that have no transform, in order: each device its own part."""
        sized = ((leaf.source.name, leaf.source.nbytes, leaf) for leaf in wanted)
        for group in in_groups(sized, _AT_ONCE if self.is_checkpoint else 0):
            arrays = self.read({name: self._sharding(leaf) for name, leaf in group.items()})
            for name, leaf in group.items():
                yield match.place_leaf(leaf, arrays.pop(name))

    def _sharding(self, wanted: WantedTensor) -> Any:
        """Return the sharding to read a tensor with; None to read all of it into a NumPy array."""
        dtype = wanted.source.dtype
        if self.is_checkpoint and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return None  # an array on devices would need jax_enable_x64
        return placement.target_sharding(wanted.leaf, wanted.path)


@contextlib.contextmanager
def open_source(path: object, *, partial: bool = False) -> Iterator[TensorSource]:
    """Open weights for reading, and check their description; no tensor is read.

    `partial`: of a corrupted checkpoint of jstep, read the readable arrays.
    """
    kind, place = weights_kind(local_path(path))
    if kind == FILES:
        weights = read_headers(place)
        confirm(weights.files)
        with contextlib.ExitStack() as stack:
            opened = functools.cache(lambda file: stack.enter_context(open_regular(file, buffered=False)))

            def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
                tensors = [weights.tensors[name] for name in shardings]
                return {
                    tensor.name: read_shards(opened(tensor.file), tensor, shardings[tensor.name]) for tensor in tensors
                }

            yield TensorSource(weights.path, weights.tensors, read, is_checkpoint=False)
        return
    place = os.path.abspath(place)
    if kind == OF_JSTEP:
        contents = _checkpoint_of_jstep(place, partial)
    else:
        from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

        contents = orbax_checkpoint.open_checkpoint(place)
    yield TensorSource(place, *contents, is_checkpoint=True)


# The parts of a tensor that the devices of this process hold: each byte of a file is read once.

_SHORT = 4096
"""Bytes of a run below which separate reads cost more than also reading the bytes between runs."""


def read_shards(file: io.RawIOBase, tensor: Tensor, sharding: object) -> Any:
    """Read the parts of a tensor that the devices of this process hold; the whole tensor without sharding."""
    parts = placement.local_parts(tensor.shape, sharding)
    arrays = read_parts(file, tensor, parts)
    return arrays[0] if sharding is None else dict(zip(parts, arrays, strict=True))


def read_parts(
    file: io.RawIOBase, tensor: Tensor, parts: Sequence[placement.ShardBounds]
) -> list[np.ndarray[Any, Any]]:
    """Read disjoint parts of a tensor, each into new memory, from an unbuffered file; each byte is read once."""
    dtype = tensor.dtype
    assert dtype is not None
    sizes = [math.prod(placement.lengths(part)) for part in parts]
    if len(parts) > 1 and sum(sizes) * dtype.itemsize == tensor.nbytes and _run(tensor.shape, parts[0])[1] < _SHORT:
        whole = read_shards(file, tensor, None)
        return [whole[placement.slices(part)].copy() for part in parts]
    return [_part(file, tensor, dtype, part) for part in parts]


def _part(
    file: io.RawIOBase, tensor: Tensor, dtype: np.dtype[Any], part: placement.ShardBounds
) -> np.ndarray[Any, Any]:
    array = np.empty(placement.lengths(part), dtype)
    view = array.reshape(-1).view(np.uint8).data
    axes, count = _run(tensor.shape, part)
    strides = [math.prod(tensor.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(part))]
    length = count * dtype.itemsize
    begins = [range(*bounds) if axis < axes else bounds[:1] for axis, bounds in enumerate(part)]
    for number, at in enumerate(itertools.product(*begins) if view.nbytes else ()):
        start = tensor.start + sum(i * stride for i, stride in zip(at, strides, strict=True))
        _fill(file, view[number * length : (number + 1) * length], start, tensor)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"{tensor.file}: corrupted: the tensor {tensor.name!r} has bools that are neither 0 nor 1")
    return array


def _fill(file: io.RawIOBase, view: memoryview, start: int, tensor: Tensor) -> None:
    file.seek(start)
    done = 0
    while done < view.nbytes:
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(
                f"{tensor.file}: is truncated: it ends inside the tensor {tensor.name!r}; did the file change?"
            )
        done += count


def _run(shape: Sequence[int], part: placement.ShardBounds) -> tuple[int, int]:
    """Return the number of axes before the contiguous elements of a part, and the number of these elements."""
    axes = len(shape)
    while axes and part[axes - 1] == (0, shape[axes - 1]):
        axes -= 1
    axes = max(axes - 1, 0)
    return axes, math.prod(placement.lengths(part[axes:]))


# The arrays of checkpoints that jstep wrote.

_Halves = tuple[Leaf, Leaf | None]
"""A leaf of a checkpoint, and the leaf with its other half, if `compact` stores it in two."""


def _checkpoint_of_jstep(path: str, partial: bool) -> tuple[dict[str, Tensor], Read]:
    """Return the arrays of a checkpoint, and a function that verifies it and reads them.

    A slot that `compact` stores in two arrays is one array of its float32 values. A parameter is the value that the
    loss sees.
    """
    store = open_store(os.path.dirname(path))
    manifest = store.manifest(path)
    by_array = manifest.by_array
    halved = [leaf for leaf in manifest.leaves if leaf.half in by_array and leaf.keys[0] != leaf_records.PARAMS]
    halves = {leaf.array: by_array[leaf.half] for leaf in halved if leaf.half is not None}
    named = zip(leaf_records.unique(leaf.path for leaf in manifest.leaves), manifest.leaves, strict=True)
    saved = {name: (leaf, halves.get(leaf.array)) for name, leaf in named if leaf not in halves.values()}
    verified = partial and jax.process_count() == 1
    if verified:
        saved = _readable(store, path, manifest, saved)

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal verified
        stored: dict[str, Any] = {}
        for name, sharding in shardings.items():
            leaf, half = saved[name]
            of_both = None if half is not None and half.shape != leaf.shape else sharding  # scales have fewer numbers
            stored |= dict.fromkeys(_arrays_of(leaf, half), of_both)
        values = _read(store, path, manifest, stored, not verified)
        verified = True
        with meshes.internal_transfers():
            return {name: leaf_records.leaf_value(*saved[name], values) for name in shardings}

    arrays: dict[str, Tensor] = {}
    for name, (leaf, half) in saved.items():
        # PRNG keys are stored as their data.
        shape, stored = leaf_records.shape_and_dtype(leaf) if leaf.key_impl is not None else (leaf.shape, leaf.dtype)
        code, dtype = (leaf.dtype, jnp.dtype(stored)) if half is None else ("float32", np.dtype(np.float32))
        arrays[name] = Tensor(name, code, shape, dtype)
    return arrays, read


def _arrays_of(leaf: Leaf, half: Leaf | None) -> list[str]:
    return [part.array for part in (leaf, half) if part is not None and part.array is not None]


def _readable(store: Store, path: str, manifest: Manifest, saved: dict[str, _Halves]) -> dict[str, _Halves]:
    """Return the leaves whose arrays can be read; if the checkpoint is corrupted, warn and name the others."""
    problems = store.find_corruption(path, manifest)
    if not problems or store.is_gone(path, manifest):
        return saved  # `_read` reports it
    lost, contents = [], store.contents(path, manifest)
    for name, halves in saved.items():
        try:
            contents.restore(dict.fromkeys(_arrays_of(*halves)))
        except Exception:  # tensorstore has no error types
            lost.append(name)
    _logger.warning(
        "load_weights: %s is corrupted: %s. The arrays that can be read are loaded%s%s",
        path,
        first_problem(problems),
        " unverified: their values may be wrong" if not contents.verifies else "",
        format_items("cannot be read", [repr(name) for name in lost]),
    )
    return {name: halves for name, halves in saved.items() if name not in lost}


def _read(store: Store, path: str, manifest: Manifest, shardings: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    arrays, problems, failure = read_and_verify(store, path, manifest, shardings, verify)
    is_bad = processes.any_process(bool(problems) or failure is not None)
    if is_bad and processes.any_process(store.is_gone(path, manifest)):
        raise CheckpointError(f"{path} was deleted or replaced while it was read. Nothing was loaded; load another one")
    if processes.any_process(bool(problems)):
        raise CheckpointError(
            f"{path} is corrupted: {first_problem(problems) or 'another process names the file'}. Nothing was loaded; "
            "copy it again from where it is intact"
        )
    if processes.any_process(failure is not None):
        reason = "see the error of another process" if failure is None else short(failure)
        raise CheckpointError(f"{path} could not be read: {reason}") from failure
    return arrays
