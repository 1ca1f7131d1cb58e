"""`load_weights`: loading of safetensors files, and of weights from checkpoints."""

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.listing import has_data
from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.checkpoint.manifest import CheckpointError
from jstep.core import trees
from jstep.core.checks import as_bool, kind, shown
from jstep.core.meshes import internal_transfers
from jstep.core.placement import refuse_compile_only
from jstep.core.selection import has_value
from jstep.weights.checkpoints import Checkpoint, open_jstep_checkpoint
from jstep.weights.files import INDEX, SUFFIX, Tensor, confirm, find_weights, folder_of, local
from jstep.weights.fit import (
    Fit,
    Names,
    Wanted,
    fit,
    from_host,
    placed,
    read_whole,
    transformed,
    with_transform_problems,
)

_logger = logging.getLogger("jstep")


def load_weights(
    path: str | os.PathLike[str],
    target: Any,
    names: Names | None = None,
    dtype: Any = None,
    partial: bool = False,
) -> Any:
    """Load weights from safetensors files, such as those of the Hugging Face Hub, or from a checkpoint.

    A leaf is `transform(tensors[names(path)])`. Only the necessary bytes are read: each device reads its own part of a
    file, and parts that several devices of a process hold are read once. For a leaf with a transform, however, each
    process reads the whole tensor.

    A checkpoint is a folder that Orbax wrote (`StandardCheckpointer`, `PyTreeCheckpointer`, or a step of a
    `CheckpointManager`, which stands for its default item or its only one), or a checkpoint of jstep, which is verified
    by its checksums. The names of its tensors are their paths, such as `params/dense/kernel`, where `params/` may be
    omitted. It may hold more than weights: if tensors below `params` are loaded, whole groups beside it (`opt_state`,
    `slots`) do not count as unused; if `names` only puts a group before all paths, nothing outside of this group does.

    Args:
        path: A file, a folder, an index (`model.safetensors.index.json`) next to its shards, or a checkpoint, on this
            machine.
        target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`), for structure, shapes, dtypes and
            shardings. A leaf without a sharding is placed where JAX places new arrays; a NumPy array is loaded as one;
            typed PRNG keys are made of the data that is stored for them; a Python number takes any integer or float.
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
    refuse_compile_only(target, "target")
    with open_source(path, partial=partial) as source:
        found = source.fit(target, names, float_dtype)
        if found.problems() and not partial:
            raise _misfit(with_transform_problems(found), source.path)
        for wanted in found.wanted:
            if wanted.tensor is None:
                _check_kept(wanted)
        leaves = [wanted.leaf for wanted in found.wanted]
        # Leaves with transforms come first, since the result of a transform may not fit.
        for i, wanted in enumerate(found.wanted):
            if wanted.tensor is not None and wanted.rule.transform is not None:
                array = _transformed(wanted, source.whole(wanted.tensor))
                problem = wanted.difference(array.shape, array.dtype)
                if problem and not partial:
                    rest = with_transform_problems(dataclasses.replace(found, wanted=found.wanted[i + 1 :]))
                    raise _misfit(dataclasses.replace(rest, mismatched=[problem, *rest.mismatched]), source.path)
                if problem:
                    found.mismatched.append(problem)
                    found.wanted[i] = dataclasses.replace(wanted, tensor=None)
                    _check_kept(wanted)
                else:
                    leaves[i] = from_host(wanted, array)
        if found.problems():
            nothing = "" if any(wanted.tensor for wanted in found.wanted) else ", and nothing was loaded"
            _logger.warning(
                "load_weights: %s does not fit target%s%s", source.path, nothing, found.problems() + found.hint
            )
        plain = [i for i, one in enumerate(found.wanted) if one.tensor is not None and one.rule.transform is None]
        for i, leaf in zip(plain, source.leaves([found.wanted[i] for i in plain]), strict=True):
            leaves[i] = leaf
    for i, wanted in enumerate(found.wanted):
        if wanted.is_key and wanted.tensor is not None:
            leaves[i] = _keys(wanted, leaves[i])
    return jax.tree.unflatten(trees.structure(target), leaves)


def _keys(wanted: Wanted, data: jax.Array) -> jax.Array:
    """Return the PRNG keys of their data."""
    impl: list[Any] = []
    jax.eval_shape(lambda keys: impl.append(jax.random.key_impl(keys)), wanted.leaf)  # it takes no shapes
    return jax.random.wrap_key_data(data, impl=impl[0])


def _transformed(wanted: Wanted, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    assert wanted.rule.transform is not None
    result = transformed(wanted.rule.transform, array, wanted.path)
    with internal_transfers():
        return np.asarray(result)


def _misfit(found: Fit, path: str) -> ValueError:
    return ValueError(
        f"target does not fit {path}{found.problems()}. Nothing was loaded; names= maps leaves to tensors (None: "
        f"none), dtype= casts floating tensors, and partial=True loads what fits{found.hint}"
    )


def _check_kept(wanted: Wanted) -> None:
    """Check that a leaf that is kept has a value."""
    leaf = wanted.leaf
    if not has_value(leaf):
        raise ValueError(
            f"target: {trees.quoted(wanted.path)} stays as it is, since names maps it to None or no tensor fits, "
            f"and must have a value, got {'a deleted array' if isinstance(leaf, jax.Array) else 'a shape'}; pass "
            "an array there"
        )


def _float_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        found = np.dtype(getattr(jnp, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise TypeError(f"dtype={shown(dtype)}: must be a floating dtype, got {kind(dtype)}") from None
    if not trees.is_floating(found):
        raise ValueError(f"dtype={shown(dtype)}: must be a floating dtype; integers and booleans are never cast")
    return found


@contextlib.contextmanager
def open_source(path: Any, *, partial: bool = False) -> "Iterator[_Files | Checkpoint]":
    """Open weights for reading, and check what describes them; no tensor is read.

    Args:
        path: The path of the weights.
        partial: Whether of a corrupted checkpoint of jstep, the arrays that can be read are read.

    Raises:
        CheckpointError: A checkpoint of jstep is corrupted.
        FileNotFoundError: There are no weights at the path.
        ValueError: A file is corrupted, or a folder has several sets of weights.
    """
    checkpoint = _checkpoint(local(path), partial=partial)
    if checkpoint is not None:
        yield checkpoint
        return
    weights = find_weights(path)
    confirm(header.file for header in weights.files)
    with contextlib.ExitStack() as stack:
        yield _Files(weights.path, weights.tensors, stack)


def _checkpoint(path: str, *, partial: bool) -> Checkpoint | None:
    """Return the checkpoint at a path; None if safetensors files are to be looked for there."""
    if not os.path.isdir(path) or any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return None
    if os.path.lexists(os.path.join(path, MANIFEST)):
        try:
            return open_jstep_checkpoint(path, partial=partial)
        except CheckpointError:
            if has_data(path):
                raise  # otherwise it is a file of another program
    folder = folder_of(path)
    if folder is None and has_data(path):
        raise ValueError(
            f"path={path!r}: is a checkpoint of jstep without {MANIFEST}: its save to a bucket was interrupted, or its "
            "copy was; in the latter case, copy it again"
        )
    if folder is None:
        return None
    from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

    return orbax_checkpoint.opened(folder)


class _Files:
    """Safetensors files."""

    def __init__(self, path: str, tensors: Mapping[str, Tensor], stack: contextlib.ExitStack) -> None:
        self.path, self._tensors, self._stack = path, tensors, stack
        self._open: dict[str, io.RawIOBase] = {}

    def fit(self, target: Any, names: Any, float_dtype: Any) -> Fit:
        """Find the tensor of each leaf of a target; see `jstep.weights.fit.fit`."""
        return fit(target, self._tensors, names, float_dtype)

    def whole(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Read a whole tensor into new memory."""
        return read_whole(self._file(tensor), tensor)

    def leaves(self, wanted: Sequence[Wanted]) -> Iterator[Any]:
        """Read leaves that have no transform, in order: each device its own part."""
        for one in wanted:
            yield placed(one, self._file(one.tensor))

    def _file(self, tensor: Any) -> io.RawIOBase:
        if tensor.file not in self._open:
            file = open(tensor.file, "rb", buffering=0)  # noqa: SIM115
            self._open[tensor.file] = self._stack.enter_context(file)
        return self._open[tensor.file]
