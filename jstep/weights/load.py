"""`load_weights`: weights from safetensors files, and from the checkpoints of Orbax and jstep."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.array_store import leaf_records
from jstep.array_store.listing import first_missing_file
from jstep.array_store.manifest import MANIFEST_FILE, CheckpointError, Leaf
from jstep.checkpoint import targets
from jstep.checkpoint.names import open_store
from jstep.checkpoint.reading import LeafRead, OpenCheckpoint
from jstep.core import meshes, placement, trees
from jstep.core.checks import as_bool
from jstep.core.device_values import floating_dtype
from jstep.core.logs import logger
from jstep.core.tables import printable
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import T
from jstep.state.leaves import PARAMS
from jstep.weights.matching_tensors import Names, WantedTensor, call_transform, match_tensors, rules
from jstep.weights.search import arrays_directory, local_path, read_tensors, weights_file
from jstep.weights.tensors import Read, Tensor, group_by_bytes, read_parts

_MAX_GROUP_BYTES = 2**30


@shortens_tracebacks
def load_weights(
    path: str | os.PathLike[str],
    target: T,
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    *,
    partial: bool = False,
) -> T:
    """Load weights from safetensors files, such as the Hugging Face Hub's, or from a checkpoint.

    A leaf is `transform(tensors[names(path)])`. Each device reads only its own part of a file, but
    for a leaf with a transform each process reads the whole tensor. A checkpoint is a directory
    that Orbax wrote, or a checkpoint of jstep. The names of its tensors are their paths, such as
    `params/dense/kernel`, where `params/` may be omitted. Groups from which nothing is loaded, such
    as `slots`, do not count as unused.

    Args:
        path: A local file, directory, index (`model.safetensors.index.json`) next to its shards, or
            checkpoint.
        target: A tree of arrays or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`), for
            structure, shapes, dtypes and shardings. A NumPy array is loaded as one.
        names: Path in target (`"layers/0/wq"`) → the name of its tensor, None to keep the leaf, or
            a pair `(name, transform)`, where `transform` computes the leaf from the stored tensor,
            a NumPy array (`numpy.transpose`). A mapping, in which missing paths are the names, or a
            function of the path.
        dtype: The dtype to cast floating tensors to; None to require the dtypes of target. Integers
            and booleans are never cast.
        partial: Whether to keep the leaves of target that do not fit, which then must have values,
            and log everything missing, unused or mismatched as a warning.

    Returns:
        A tree like target.

    Raises:
        CheckpointError: A checkpoint of jstep is corrupted.
        FileNotFoundError: There are no weights at path, or an index names a missing file.
        ImportError: The `safetensors` package is not installed: `pip install 'jstep[weights]'`.
        TypeError: A leaf of target has no shape and dtype, or an argument is of the wrong type.
        ValueError: A file is corrupted or malicious; a checkpoint of Orbax is incomplete, or path
            has several; names has a path that is not in target; target does not fit: lists all
            tensors that are missing, unused or mismatched (shapes, dtypes); or a leaf to keep has
            no value.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, jstep
        >>> params = {"kernel": jnp.ones((2, 3))}
        >>> names = {"kernel": ("dense.weight", jnp.transpose)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = jstep.save_weights(f"{directory}/model.safetensors", params, names)
        ...     target = jax.eval_shape(lambda: params)
        ...     loaded = jstep.load_weights(path, target, names, dtype=jnp.bfloat16)
        >>> jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", loaded)
        {'kernel': 'bfloat16(2, 3)'}

    Source: https://huggingface.co/docs/safetensors
    """
    partial = as_bool(partial, "partial")
    float_dtype: Any = None if dtype is None else floating_dtype(dtype, "dtype")
    placement.check_not_compile_only(target, "target")
    source = open_source(path)
    rules_of_leaves = rules(names, target, "target")
    is_checkpoint = source.is_checkpoint
    matched = match_tensors(
        target, source.tensors, rules_of_leaves, float_dtype, is_checkpoint=is_checkpoint
    )
    leaves = [wanted.leaf for wanted in matched.wanted]
    # Leaves with transforms come first, because only the result of a transform shows if it fits.
    if partial or not matched.differences():
        for i, wanted in enumerate(matched.wanted):
            if wanted.source is None or wanted.transform is None:
                continue
            name = wanted.source.name
            stored = np.asarray(source.read({name: None})[name])
            array = call_transform(wanted.transform, stored, wanted.path)
            problem = wanted.difference(array.shape, array.dtype)
            if problem:
                matched.wanted[i] = dataclasses.replace(wanted, source=None, problem=problem)
            else:
                leaves[i] = targets.place_leaf(wanted, array)
    differences = matched.differences()
    if differences:
        if not partial:
            raise ValueError(
                f"target does not fit {printable(source.path)}{differences}; map them in names, "
                "see docs: help/errors#load-weights"
            )
        is_any_loaded = any(wanted.source for wanted in matched.wanted)
        nothing = "" if is_any_loaded else ", and nothing was loaded"
        logger.warning(
            "load_weights: %s does not fit target%s%s", source.path, nothing, differences
        )
    plain: list[int] = []
    for i, wanted in enumerate(matched.wanted):
        if wanted.source is None:
            targets.check_has_value(wanted)
        elif wanted.transform is None:
            plain.append(i)
    for i, leaf in zip(plain, source.leaves([matched.wanted[i] for i in plain]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(trees.structure(target), leaves)


# Sources of weights.


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Weights in a file or checkpoint; `tensors` describes them by name, and `read` reads them."""

    path: str
    tensors: Mapping[str, Tensor]
    read: Read
    is_checkpoint: bool

    def leaves(self, wanted: Sequence[WantedTensor]) -> Iterator[Any]:
        """Yield leaves. A checkpoint is read in groups of leaves, and a file leaf by leaf."""
        sized = ((leaf.source.name, leaf.source.nbytes, leaf) for leaf in wanted)
        max_bytes = _MAX_GROUP_BYTES if self.is_checkpoint else 0
        for group in group_by_bytes(sized, max_bytes):
            arrays = self.read({name: leaf.sharding_of_data for name, leaf in group.items()})
            for name, leaf in group.items():
                yield targets.place_leaf(leaf, arrays.pop(name))


def open_source(path: object) -> TensorSource:
    resolved = local_path(path)
    file = weights_file(resolved)
    if file is not None:
        tensors = read_tensors(file)
        read = functools.partial(_read_files, tensors)
        return TensorSource(file, tensors, read, is_checkpoint=False)
    checkpoint = os.path.abspath(resolved)
    if first_missing_file(checkpoint) != MANIFEST_FILE:
        # It has a manifest, which is not one of another program.
        return TensorSource(checkpoint, *_checkpoint_of_jstep(checkpoint), is_checkpoint=True)
    checkpoint = arrays_directory(checkpoint)
    return TensorSource(checkpoint, *_checkpoint_of_orbax(checkpoint), is_checkpoint=True)


def _read_files(tensors: Mapping[str, Tensor], shardings: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, sharding in shardings.items():
        parts = read_parts(tensors[name], placement.local_parts(tensors[name].shape, sharding))
        if sharding is None:
            (arrays[name],) = parts.values()
        else:
            arrays[name] = parts
    return arrays


# The arrays of checkpoints that jstep wrote.


def _checkpoint_of_jstep(path: str) -> tuple[dict[str, Tensor], Read]:
    """Return a checkpoint's arrays, and a function that reads and verifies them.

    Slots that `compact` stores in two arrays are one: the numbers that the loss sees.
    """
    parent, name = os.path.split(path)
    store = open_store(parent)
    manifest = store.manifest(path)
    checkpoint = OpenCheckpoint(store, name.rpartition("-")[0] or name, path, manifest)
    leaves_by_array = manifest.leaves_by_array
    # Array of a slot → the leaf with the second half of its numbers.
    halves: dict[str | None, Leaf] = {}
    for leaf in manifest.leaves:
        if leaf.keys[0] != PARAMS and leaf.half is not None and leaf.half in leaves_by_array:
            halves[leaf.array] = leaves_by_array[leaf.half]
    second_halves = {half.array for half in halves.values()}
    saved: dict[str, Leaf] = {}
    for name, leaf in leaf_records.named_records(manifest.leaves).items():
        if leaf.array not in second_halves:
            saved[name] = leaf

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        reads = [
            LeafRead(saved[name], halves.get(saved[name].array), sharding)
            for name, sharding in shardings.items()
        ]
        with meshes.internal_transfers():
            values = checkpoint.read_leaves(reads)
        return dict(zip(shardings, values, strict=True))

    arrays: dict[str, Tensor] = {}
    for name, leaf in saved.items():
        try:
            arrays[name] = _as_tensor(name, leaf, is_half=leaf.array in halves)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is corrupted: {leaf.path!r:.50} is not what jstep writes: {error}"
            ) from None
    return arrays, read


def _as_tensor(name: str, leaf: Leaf, *, is_half: bool) -> Tensor:
    if leaf.key_impl is not None:
        # PRNG keys are stored as their data.
        shape, dtype = leaf_records.shape_and_dtype(leaf)
        return Tensor(name, leaf.dtype, shape, jnp.dtype(dtype))
    if is_half:
        return Tensor(name, "float32", leaf.shape, np.dtype(np.float32))
    return Tensor(name, leaf.dtype, leaf.shape, jnp.dtype(leaf.dtype))


# The arrays of checkpoints that Orbax wrote.


def _checkpoint_of_orbax(directory: str) -> tuple[dict[str, Tensor], Read]:
    import orbax.checkpoint as ocp  # slow

    # What the module has is checked, and not its version: Orbax has announced that the functions of
    # `orbax.checkpoint.v1` become its own at 1.0, in place of the handlers.
    has_handlers = hasattr(ocp, "PyTreeCheckpointHandler")
    read_metadata = _metadata_by_handler if has_handlers else _metadata_by_function
    restore = _restore_by_handler if has_handlers else _restore_by_function
    try:
        # A checkpoint that lacks files fails here, too: Orbax reads shapes and dtypes from arrays.
        tree = read_metadata(ocp, directory)
    except PermissionError:
        raise
    except Exception as error:
        raise _unreadable(directory, error, ocp.__version__) from None
    structure: Any
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = leaf_records.unique(trees.path_str(keys) for keys, _ in flat)
    arrays: dict[str, Tensor] = {}
    for name, (_, details) in zip(names, flat, strict=True):
        shape = getattr(details, "shape", None)
        dtype = getattr(details, "dtype", None)
        if shape is not None and dtype is not None:  # not a string
            dtype = jnp.dtype(dtype)
            arrays[name] = Tensor(name, str(dtype), tuple(shape), dtype)

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        wanted: list[_Wanted | None] = []
        for name in names:
            if name not in shardings:
                wanted.append(None)
                continue
            array = arrays[name]
            # Orbax cannot place an array whose dtype JAX lacks without `jax_enable_x64`, and reads
            # it as a NumPy array.
            has_dtype = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
            sharding = shardings[name] if has_dtype else None
            wanted.append(_Wanted(array.shape, array.dtype, sharding))
        try:
            with meshes.internal_transfers():
                found: dict[str, Any] = {}
                restored = restore(ocp, directory, structure, wanted)
                for name, value in zip(names, restored, strict=True):
                    if name in shardings:
                        # With a sharding, Orbax returns typed PRNG keys as such.
                        found[name] = _as_parts_on_cpus(trees.key_data(value))
                return found
        except Exception as error:
            raise _unreadable(directory, error, ocp.__version__) from None

    return arrays, read


class _Wanted(NamedTuple):
    """An array to read; without a sharding, as a NumPy array."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any


def _metadata_by_handler(ocp: Any, directory: str) -> Any:
    from etils import epath

    return ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory)).tree


def _restore_by_handler(
    ocp: Any, directory: str, structure: Any, wanted: Sequence[_Wanted | None]
) -> list[Any]:
    from etils import epath

    items = [ocp.PLACEHOLDER if target is None else 0 for target in wanted]
    options: list[Any] = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(wanted)
    for i, target in enumerate(wanted):
        if target is not None and target.sharding is not None:
            options[i] = ocp.ArrayRestoreArgs(
                sharding=target.sharding, global_shape=target.shape, strict=True
            )
    arguments = ocp.args.PyTreeRestore(structure.unflatten(items), structure.unflatten(options))
    return jax.tree.leaves(
        ocp.PyTreeCheckpointHandler().restore(epath.Path(directory), args=arguments)
    )


def _metadata_by_function(ocp: Any, directory: str) -> Any:
    return ocp.metadata(directory).metadata


def _restore_by_function(
    ocp: Any, directory: str, structure: Any, wanted: Sequence[_Wanted | None]
) -> list[Any]:
    targets_of_leaves: list[Any] = []
    for target in wanted:
        if target is None:
            targets_of_leaves.append(ocp.PLACEHOLDER)
        elif target.sharding is None:
            # An array of this shape and dtype that takes no memory.
            targets_of_leaves.append(np.broadcast_to(np.zeros((), target.dtype), target.shape))
        else:
            targets_of_leaves.append(
                jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)
            )
    return jax.tree.leaves(ocp.load(directory, structure.unflatten(targets_of_leaves)))


def _as_parts_on_cpus(value: Any) -> Any:
    """Return the parts of an array on CPUs: it may alias the memory that it was read into."""
    if isinstance(value, jax.Array) and placement.is_on_cpus(value):
        return targets.parts_of(value)
    return value


def _unreadable(directory: str, error: BaseException, version: str) -> ValueError:
    """Return the error to raise `from None`.

    Orbax's error and its causes must not be shown: they have names of the checkpoint, which may not
    be printable.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    why = str(error).partition(" [tensorstore_spec=")[0]
    what = f"{printable(directory)}: is corrupted, incomplete, or not readable by Orbax {version}"
    return ValueError(f"{what}: {printable(why):.300}")
