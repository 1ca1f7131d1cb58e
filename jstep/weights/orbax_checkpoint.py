"""Reading of checkpoints that Orbax wrote. This module imports Orbax."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jstep.checkpoint.leaf_records import unique
from jstep.checkpoint.targets import parts_of
from jstep.core import meshes, placement, trees
from jstep.weights.tensors import Read, Tensor


def open_checkpoint(directory: str) -> tuple[dict[str, Tensor], Read]:
    try:
        # A checkpoint that misses files fails here, too: Orbax reads shapes and dtypes from the arrays.
        tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(directory)).tree
    except PermissionError:
        raise
    except Exception as error:
        raise _unreadable(directory, error) from error
    structure: Any
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = unique(trees.path_str(keys) for keys, _ in flat)
    arrays: dict[str, Tensor] = {}
    for name, (_, details) in zip(names, flat, strict=True):
        shape, dtype = getattr(details, "shape", None), getattr(details, "dtype", None)
        if shape is not None and dtype is not None:  # not a string
            dtype = jnp.dtype(dtype)
            arrays[name] = Tensor(name, str(dtype), tuple(shape), dtype)

    def read(shardings: Mapping[str, Any]) -> dict[str, Any]:
        item = [0 if name in shardings else ocp.PLACEHOLDER for name in names]
        options: list[Any] = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(names)
        for i, name in enumerate(names):
            sharding = shardings.get(name)
            if sharding is not None and jax.dtypes.canonicalize_dtype(arrays[name].dtype) == arrays[name].dtype:
                shape = arrays[name].shape
                options[i] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, strict=True)
        arguments = ocp.args.PyTreeRestore(structure.unflatten(item), structure.unflatten(options))
        try:
            with meshes.internal_transfers():
                restored = jax.tree.leaves(ocp.PyTreeCheckpointHandler().restore(epath.Path(directory), args=arguments))
                # With a sharding, Orbax returns typed PRNG keys as such.
                pairs = zip(names, restored, strict=True)
                return {name: _owned(trees.key_data(value)) for name, value in pairs if name in shardings}
        except Exception as error:
            raise _unreadable(directory, error) from error

    return arrays, read


def _owned(value: Any) -> Any:
    """Return the parts of an array on CPUs, which may alias the memory that it was read into."""
    return parts_of(value) if isinstance(value, jax.Array) and placement.is_on_cpus(value) else value


def _unreadable(directory: str, error: BaseException) -> ValueError:
    while error.__cause__ is not None:
        error = error.__cause__
    why = str(error).partition(" [tensorstore_spec=")[0]
    return ValueError(f"{directory}: is corrupted, incomplete, or not readable by Orbax {ocp.__version__}: {why:.300}")
