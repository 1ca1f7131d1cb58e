"""Reading of the arrays of checkpoints that jstep wrote."""

import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint import leaf_records
from jstep.checkpoint.leaf_records import PARAMS
from jstep.checkpoint.manifest import CheckpointError, Leaf, Manifest
from jstep.checkpoint.names import open_store
from jstep.checkpoint.reading import first_of, read_and_verify, short
from jstep.checkpoint.store import Store
from jstep.core.checks import listing
from jstep.core.meshes import internal_transfers
from jstep.distributed import processes
from jstep.weights.tensors import Read, Tensor

_logger = logging.getLogger("jstep")
_Halves = tuple[Leaf, Leaf | None]
"""A leaf of a checkpoint, and the leaf with its other half, if `compact` stores it in two."""


def opened(path: str, *, partial: bool = False) -> tuple[dict[str, Tensor], Read]:
    """Return the arrays of a checkpoint, and a function that reads them, after the checkpoint was verified.

    A slot that `compact` stores in two is one array of its float32 values. A parameter is what the loss sees.

    Args:
        path: A folder that has a manifest.
        partial: Whether to leave out the arrays that cannot be read, with a warning, if the checkpoint is corrupted.

    Raises:
        CheckpointError: The checkpoint is corrupted, or another version of jstep wrote it.
    """
    store = open_store(os.path.dirname(path))
    manifest = store.manifest(path)
    known = manifest.by_array
    halved = [leaf for leaf in manifest.leaves if leaf.half in known and leaf.keys[0] != PARAMS]
    halves = {leaf.array: known[leaf.half] for leaf in halved if leaf.half is not None}
    given = zip(leaf_records.unique(leaf.path for leaf in manifest.leaves), manifest.leaves, strict=True)
    saved = {name: (leaf, halves.get(leaf.array)) for name, leaf in given if leaf not in halves.values()}
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
        found = _read(store, path, manifest, stored, not verified)
        verified = True
        with internal_transfers():
            return {name: leaf_records.value_of(*saved[name], found) for name in shardings}

    arrays: dict[str, Tensor] = {}
    for name, (leaf, half) in saved.items():
        # That of PRNG keys is their data.
        shape, stored = leaf_records.stored_kind(leaf) if leaf.key_impl is not None else (leaf.shape, leaf.dtype)
        code, dtype = (leaf.dtype, jnp.dtype(stored)) if half is None else ("float32", np.dtype(np.float32))
        arrays[name] = Tensor(name, code, shape, dtype)
    return arrays, read


def _arrays_of(leaf: Leaf, half: Leaf | None) -> list[str]:
    """The names of the arrays that a leaf, and its other half, are stored in."""
    return [one.array for one in (leaf, half) if one is not None and one.array is not None]


def _readable(store: Store, path: str, manifest: Manifest, saved: dict[str, _Halves]) -> dict[str, _Halves]:
    """Return the leaves whose arrays can be read; if the checkpoint is corrupted, warn and name the others."""
    problems = store.find_corruption(path, manifest)
    if not problems:
        return saved
    lost = []
    for name, halves in saved.items():
        try:
            store.restore(path, manifest, dict.fromkeys(_arrays_of(*halves)))
        except Exception:  # tensorstore has no error types
            lost.append(name)
    _logger.warning(
        "load_weights: %s is corrupted: %s. The arrays that can be read are loaded%s%s",
        path,
        first_of(problems),
        " unverified: their values may be wrong" if not manifest.is_packed else "",
        listing("cannot be read", [repr(name) for name in lost]),
    )
    return {name: halves for name, halves in saved.items() if name not in lost}


def _read(store: Store, path: str, manifest: Manifest, shardings: Mapping[str, Any], verify: bool) -> dict[str, Any]:
    arrays, problems, failure = read_and_verify(store, path, manifest, shardings, verify)
    if processes.any_process(bool(problems)):
        raise CheckpointError(
            f"{path} is corrupted: {first_of(problems) or 'another process names the file'}. Nothing was loaded; copy "
            "it again from where it is intact"
        )
    if processes.any_process(failure is not None):
        reason = "see the error of another process" if failure is None else short(failure)
        raise CheckpointError(f"{path} could not be read: {reason}") from failure
    return arrays
