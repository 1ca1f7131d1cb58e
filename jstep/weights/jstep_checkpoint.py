"""Reading of weights from the checkpoints of jstep, with their checksums."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.checkpoint import CheckpointError, open_store
from jstep.checkpoint.format.leaves import from_stored, ids, stored_kind, zeros_of
from jstep.checkpoint.format.manifest import Leaf, Manifest
from jstep.checkpoint.reading import short
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.core.contexts import internal_transfers
from jstep.distributed import agreement
from jstep.weights.checkpoints import Array, Checkpoint, named

_SHOWN = 3  # problems in a message


def opened(path: str) -> Checkpoint:
    """Return the arrays of a checkpoint, which is verified before the first is returned.

    Args:
        path: A folder that has a manifest.

    Raises:
        CheckpointError: The checkpoint is corrupted, or another version of jstep wrote it.
    """
    path = os.path.abspath(path)
    store = open_store(os.path.dirname(path))
    manifest = store.manifest(path)
    names = [named(*pair) for pair in ids(leaf.path for leaf in manifest.leaves)]
    saved = dict(zip(names, manifest.leaves, strict=True))
    verified = manifest.is_packed  # verified as it is read

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal verified
        stored = {array: shardings[name] for name in shardings if (array := saved[name].array) is not None}
        arrays = _read(store, path, manifest, stored, not verified)
        verified = True
        return {name: _value(saved[name], arrays) for name in shardings}

    return Checkpoint(path, {name: _array(name, leaf) for name, leaf in saved.items()}, read, f"jstep {manifest.jstep}")


def _read(store: Any, path: str, manifest: Manifest, shardings: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    problems: list[str] = []
    arrays: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        if verify:  # all processes share the work
            problems = store.find_corruption(path, manifest, (jax.process_index(), jax.process_count()))
        if shardings and not problems:
            arrays = store.restore(path, manifest, shardings)
    except CorruptedError as error:
        problems = error.problems
    except Exception as error:
        failure = error
    if agreement.any_process(bool(problems)):
        more = f"; and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN)
        raise CheckpointError(
            f"{path} is corrupted: {'; '.join(problems[:_SHOWN]) or 'another process names the file'}{more}. Nothing "
            "was loaded; copy it again from where it is intact"
        )
    if agreement.any_process(failure is not None):
        reason = "see the error of another process" if failure is None else short(failure)
        raise CheckpointError(f"{path} could not be read: {reason}") from failure
    return arrays


def _array(name: str, leaf: Leaf) -> Array:
    """Return the array of a leaf; that of PRNG keys is their data."""
    shape, dtype = stored_kind(leaf) if leaf.key_impl is not None else (leaf.shape, leaf.dtype)
    return Array(name, leaf.dtype, shape, jnp.dtype(dtype))


def _value(leaf: Leaf, arrays: Mapping[str, Any]) -> Any:
    if leaf.array is None:
        return zeros_of(leaf)
    with internal_transfers():
        return from_stored(leaf, arrays[leaf.array])
