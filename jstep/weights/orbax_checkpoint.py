"""Reading of checkpoints that Orbax wrote, through Orbax, which is imported here."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jstep.checkpoint.leaf_records import GLOBAL_STEP, path_keys, unique
from jstep.checkpoint.manifest import MANIFEST_FILE
from jstep.core import meshes, trees
from jstep.weights.tensors import Read, Tensor

_MAX_ERROR_LENGTH = 300  # characters of an error of Orbax
_SHOWN = 20  # arrays named in a message


def open_checkpoint(folder: str) -> tuple[dict[str, Tensor], Read]:
    """Return the arrays of a checkpoint, from its metadata, and a function that reads them."""
    folder = os.path.abspath(folder)  # Orbax rejects relative paths
    try:
        # A checkpoint that misses files fails here, too: Orbax reads shapes and dtypes from the arrays.
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder)).tree
    except PermissionError:
        raise
    except Exception as error:
        raise _unreadable(folder, _short(error)) from error
    structure: Any
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = unique(trees.path_str(keys) for keys, _ in flat)
    if all(len(keys) == 1 for keys, _ in flat) and GLOBAL_STEP in names:
        raise ValueError(
            f"{folder}: jstep wrote it, and its {MANIFEST_FILE} is missing, "
            "so that it cannot be verified: copy it again"
        )
    arrays: dict[str, Tensor] = {}
    for name, (_, details) in zip(names, flat, strict=True):
        shape, dtype = getattr(details, "shape", None), getattr(details, "dtype", None)
        if shape is not None and dtype is not None:  # not a string
            dtype = jnp.dtype(dtype)
            arrays[name] = Tensor(name, str(dtype), tuple(shape), dtype)
    sharing = _sharing({name: ".".join(path_keys(keys)) for name, (keys, _) in zip(names, flat, strict=True)})

    def values(wanted: Mapping[str, Any]) -> dict[str, Any]:
        item = [0 if name in wanted else ocp.PLACEHOLDER for name in names]
        options: list[Any] = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(names)
        for i, name in enumerate(names):
            if name in arrays and (sharding := wanted.get(name)) is not None:
                shape = arrays[name].shape
                options[i] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=True)
        arguments = ocp.args.PyTreeRestore(structure.unflatten(item), structure.unflatten(options))
        with meshes.internal_transfers():
            restored = jax.tree.leaves(ocp.PyTreeCheckpointHandler().restore(epath.Path(folder), args=arguments))
            # With a sharding, Orbax returns typed PRNG keys as such.
            return {name: trees.key_data(value) for name, value in zip(names, restored, strict=True) if name in wanted}

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        if lost := [others for name, others in sharing.items() if name in shardings]:
            raise ValueError(
                f"{folder}: Orbax stored {' and '.join(map(repr, lost[0]))} in the same place, so that only one is "
                "there, and which one is not known; save the checkpoint again without dots in these names, or load the "
                "other leaves with names= and partial=True"
            )
        try:
            return values(shardings)
        except Exception as error:
            problems = {name: _problem(values, name, sharding) for name, sharding in shardings.items()}
            details = [f"{name!r}: {problem}" for name, problem in problems.items() if problem]
            raise _unreadable(folder, "; ".join(details[:_SHOWN]) or _short(error)) from error

    return arrays, read


def _sharing(places: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each array that shares its place in the checkpoint → all arrays in that place.

    Orbax joins keys with dots, so that {"a": {"b": x}, "a.b": y} has one place.
    """
    names: dict[str, list[str]] = {}
    for name, place in places.items():
        names.setdefault(place, []).append(name)
    return {name: names[place] for name, place in places.items() if len(names[place]) > 1}


def _problem(values: Any, name: str, sharding: Any) -> str:
    """Return why an array cannot be read, or ""."""
    try:
        values({name: sharding})
    except Exception as error:
        return _short(error)
    return ""


def _short(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).partition(" [tensorstore_spec=")[0]
    return text[:_MAX_ERROR_LENGTH] + "…" * (len(text) > _MAX_ERROR_LENGTH)


def _unreadable(folder: str, why: str) -> ValueError:
    return ValueError(
        f"{folder}: Orbax {ocp.__version__} cannot read it: {why}. It is corrupted, its copy is incomplete, or another "
        "version of Orbax wrote it: read it with that version"
    )
