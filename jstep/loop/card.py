"""Run cards: a record of the versions, devices, arguments and programs of a run, for comparison with other runs."""

import collections
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.meshes import mesh_of
from jstep.core.programs import ProgramHash, digest_of, mesh_text, program_hash, sharding_text, without_addresses
from jstep.data.batches import definition_of
from jstep.data.prefetch import ReplayedBatches
from jstep.data.sequence import BatchSequence, StateBatches
from jstep.hooks.hook import key_of
from jstep.loop.background_compiler import shapes_of
from jstep.loop.options import Options
from jstep.loop.stages import TrainSteps, lanes_of, name_of_step
from jstep.optimizers.leafwise import RULE

PLACES = ("checkpoint_dir", "logdir", "compile_cache")
"""Arguments that name the directories of a run: recorded, never compared."""

_LONGEST = 1000
"""The maximum length of a part of a definition, in characters of JSON; a longer one is replaced by its hash."""
_MOST_NUMBERS = 200

_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"(\w://)[^/@\s]*@")
_QUERY = re.compile(r"(\w://[^?\s]*)\?\S*")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings of JAX that change numerical results, wherever they were set."""


def card(
    options: Options, stages: TrainSteps, step: int, state: Any, held: Mapping[str, float], batches: Any
) -> dict[str, Any]:
    """Return the card of a run, without its programs, as JSON values.

    Args:
        options: The arguments of `train`.
        stages: The training steps.
        step: The step at which the run begins.
        state: The shapes of its state.
        held: Name → initial value of the held hyperparameters.
        batches: The argument of `train`.
    """
    lanes = {str(stage.first): lanes_of(stage.value) for stage in stages.stages()}
    return {
        "card": 1,
        "step": step,
        "versions": _versions(),
        "environment": environment(),
        "settings": _settings(),
        "devices": _devices(state),
        "state": _state(state, held),
        "batches": _batches(batches),
        "stages": {str(stage.first): name_of_step(stage.value) for stage in stages.stages()},
        "lanes": lanes if len(set(lanes.values())) > 1 else next(iter(lanes.values())),
        "arguments": _arguments(options),
    }


def program_card(traced: Any, constants: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return the record of a program, as JSON values.

    Args:
        traced: Its trace, a `jax.stages.Traced`, or None for a function that is not compiled.
        constants: Metrics that no step computes: the hyperparameters that are plain numbers, by name.
        args: The batch of a call.
    """
    batch = [
        f"{path or 'batch'}: {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
        for path, leaf in trees.leaves_with_paths(args)
    ]
    found: dict[str, Any] = {"batch": short(batch), "hyperparameters": {k: _json(v) for k, v in constants.items()}}
    if traced is None:
        return {"hash": None, **found}
    hashed: ProgramHash = program_hash(traced.jaxpr)
    numbers = dict(sorted(hashed.numbers.items())) if len(hashed.numbers) <= _MOST_NUMBERS else None
    found["optimizer"] = [name.removesuffix(RULE) for name in hashed.functions if name.endswith(RULE)]
    return {"hash": hashed.digest, **found, "operations": dict(sorted(hashed.operations.items())), "numbers": numbers}


def _versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that a run depends on."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "jstep": str(sys.modules["jstep"].__version__),
    }
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as a checkout on the path
            found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables `XLA_FLAGS` and `JAX_*`, and no others; values that look like passwords are omitted."""
    found = {}
    for name in sorted(variables):
        if name == "XLA_FLAGS" or name.startswith("JAX_"):
            found[name] = "(not recorded)" if _SECRET.search(name) else _without_login(variables[name])
    return found


def _without_login(text: str) -> str:
    """A path or an address without the user name, password or signature that a URL may hold."""
    return _QUERY.sub(r"\1", _LOGIN.sub(r"\1", text))


def _settings() -> dict[str, Any]:
    """The settings of JAX that change what is computed."""
    found = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in found.items()}


def _devices(state: Any) -> dict[str, Any]:
    """The devices of a run and the mesh of its state."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)]
    of_state = next((leaf.sharding.device_set for leaf in leaves if leaf.sharding is not None), set())
    first = min(of_state or jax.devices(), key=lambda device: device.id)
    mesh = mesh_of(state)
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(first.platform),
        "of_state": max(len(of_state), 1),
        "processes": jax.process_count(),
        "mesh": None if mesh is None else mesh_text(mesh),
    }


def _state(state: Any, held: Mapping[str, float]) -> dict[str, Any]:
    leaves = trees.leaves_with_paths(shapes_of(state))
    described = [f"{path} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    where = [
        f"{path} {'anywhere' if leaf.sharding is None else sharding_text(leaf.sharding)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    dtypes = collections.Counter(str(leaf.dtype) for _, leaf in leaves)
    return {
        "hash": digest_of(*described),
        "sharding": digest_of(*where),
        "params": sum(math.prod(leaf.shape) for path, leaf in leaves if path.split("/")[0] == "params"),
        "leaves": len(leaves),
        "dtypes": dict(sorted(dtypes.items())),
        "slots": sorted(state.slots or ()),
        "held": {name: _json(value) for name, value in held.items()},
    }


def _batches(batches: Any) -> dict[str, Any]:
    if isinstance(batches, BatchSequence):
        found = definition_of(batches)
    else:
        made = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        named = made if isinstance(getattr(made, "__qualname__", None), str) else type(made)
        # A generator has the name of its function, but no module.
        module = getattr(named, "__module__", None) or type(made).__name__
        found = {"kind": f"{module}.{named.__qualname__}"}
        try:
            found["length"] = len(batches)
        except Exception:  # a user-defined loader: it is endless, or its length is not known
            found["length"] = None
    return {"hash": digest_of(json.dumps(found, sort_keys=True)), **{key: short(part) for key, part in found.items()}}


def _arguments(options: Options) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value: Any = options.end if field.name == "last_step" else getattr(options, field.name)
        if field.name == "hooks":
            found["hooks"] = [without_addresses(key_of(hook)) for hook in value]
        elif isinstance(value, Saver):
            found[field.name] = _without_login(value.directory)
        elif field.name in PLACES:
            is_place = not isinstance(value, bool | None)  # compile_cache=True
            found[field.name] = _without_login(os.fspath(value)) if is_place else value
        elif field.name == "batch_sharding":
            found[field.name] = short([_place_text(one) for one in jax.tree.leaves(value, is_leaf=_is_place)]) or None
        else:
            found[field.name] = _json(value)
    return found


def _is_place(x: Any) -> bool:
    return isinstance(x, Sharding | PartitionSpec)


def _place_text(one: Any) -> str:
    return sharding_text(one) if isinstance(one, Sharding) else str(one)


def short(value: Any) -> Any:
    """Return a JSON value, or its hash if it is long."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _LONGEST else f"hash {digest_of(text)}"


def _json(value: Any) -> Any:
    """Convert a value to JSON: numbers, strings and None unchanged, arrays to lists, other objects to strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.floating):  # float32 0.1 is recorded as 0.1, not 0.10000000149011612
        value = float(str(value))
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_json(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    return value if isinstance(value, bool | int) else without_addresses(str(value))
