"""The card of a start: what its program is made of, as JSON."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.jaxprs import (
    Operation,
    body_of,
    hash_strings,
    part_for,
    program_hash,
    source_frames,
    subprogram,
    variables,
    without_addresses,
)
from jstep.core.logs import logger
from jstep.core.meshes import sharding_text
from jstep.core.recorded_calls import as_typed
from jstep.core.trees import T, Tree
from jstep.data.loaders import ReplayedBatches, StateBatches
from jstep.data.sequence import BatchSequence
from jstep.hooks.hook_states import hook_key
from jstep.loop.arguments import Options
from jstep.loop.programs import shapes_of, type_text
from jstep.loop.stages import TrainSteps, lanes_of, name_of_step
from jstep.record.config import as_text, plain
from jstep.record.differences import SETTINGS
from jstep.state.sharding import describe_devices
from jstep.training import apply_gradients
from jstep.training.metrics import LOSS, StepMetrics
from jstep.training.minimize import UpdateStep
from jstep.training.step import step_function

_MAX_ENTRY = 1000


def card(options: Options, stages: TrainSteps, step: int, state: Tree, batches: Tree) -> dict[str, Any]:
    """Return what a start is given, by section, as values of JSON; its programs are added as they are compiled."""
    names: dict[str, str] = {}
    lanes: dict[str, Any] = {}
    for stage in stages.stages():
        names[str(stage.first)] = name_of_step(stage.value)
        lanes[str(stage.first)] = lanes_of(stage.value)
    has_one_kind = len(set(lanes.values())) == 1
    return {
        "step": step,
        "versions": _versions(),
        "environment": _environment(),
        "settings": {name: plain(getattr(jax.config, name, None)) for name in SETTINGS},
        "devices": describe_devices(state),
        "state": _state(state),
        "batches": batches_card(batches),
        "stages": names,
        "lanes": next(iter(lanes.values())) if has_one_kind else lanes,
        "arguments": _arguments(options),
        "programs": [],
    }


def _environment() -> dict[str, Any]:
    variables = [name for name in sorted(os.environ) if name == "XLA_FLAGS" or name.startswith("JAX_")]
    return {name: as_text(os.environ[name], name) for name in variables}


def _arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of a run, without `config`, which has a section of its own."""
    names = [field.name for field in dataclasses.fields(options) if field.name != "config"]
    return {name: _argument(name, getattr(options, name)) for name in names}


def _argument(name: str, value: Any) -> Any:
    with contextlib.suppress(Exception):
        if isinstance(value, Saver):
            return plain(value.directory)
        if name == "hooks":
            return [without_addresses(hook_key(hook)) for hook in value]
        if name == "batch_sharding":
            leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
            texts = [sharding_text(leaf) if isinstance(leaf, jax.sharding.Sharding) else str(leaf) for leaf in leaves]
            return shortened(texts) or None
    return plain(value, name)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "jstep": str(sys.modules["jstep"].__version__)}
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # such as a checkout on the path
            versions[name] = importlib.metadata.version(name)
    return versions


def _state(state: Tree) -> dict[str, Any]:
    leaves = trees.leaves_with_paths(shapes_of(state))
    kinds: list[str] = []
    shardings: list[str] = []
    dtypes = collections.Counter[str]()
    num_params = 0
    for path, leaf in leaves:
        kinds.append(f"{path} {leaf.dtype}{list(leaf.shape)}")
        dtypes[str(leaf.dtype)] += 1
        if path.split("/")[0] == "params":
            num_params += math.prod(leaf.shape)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            place = "anywhere" if leaf.sharding is None else sharding_text(leaf.sharding)
            shardings.append(f"{path} {place}")
    return {
        "hash": hash_strings(*kinds),
        "sharding": hash_strings(*shardings),
        "params": num_params,
        "leaves": len(leaves),
        "dtypes": dict(sorted(dtypes.items())),
        "slots": sorted(state.slots or ()),
    }


def batches_card(batches: Tree) -> dict[str, Any]:
    if isinstance(batches, BatchSequence):
        definition = batches.definition()
    else:
        source = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        definition = {"kind": plain(source if hasattr(source, "__qualname__") else type(source)), "length": None}
        with contextlib.suppress(Exception):  # a user-defined loader: it is endless, or its length is not known
            definition["length"] = len(batches)
    whole = hash_strings(json.dumps(definition, sort_keys=True))
    return {"hash": whole, **{key: shortened(part) for key, part in definition.items()}}


def shortened(value: object) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _MAX_ENTRY else f"hash {hash_strings(text)}"


def program_card(stage: int, step: Any, traced: Any, constants: Mapping[str, Any], args: Any) -> dict[str, Any]:
    closed = (
        None if traced is None else _attempt(lambda: part_for(traced.jaxpr, _results_with_bits(*traced.out_info))[0])
    )
    whole = None if closed is None else _attempt(lambda: program_hash(closed))
    parts = None if closed is None else _attempt(lambda: _hashes_of_parts(closed))
    pure_step = step_function(step)
    leaves = [(path, leaf, getattr(leaf, "weak_type", False)) for path, leaf in trees.leaves_with_paths(args)]
    shapes = [f"{path or 'batch'}: {type_text(leaf)}{' weak' if is_weak else ''}" for path, leaf, is_weak in leaves]
    return {
        "stage": stage,
        "batch": shortened(shapes),
        "hyperparameters": {name: plain(value) for name, value in constants.items()},
        "hash": whole,
        "optimizer": None if pure_step is None else as_text(as_typed(pure_step.optimizer)),
        **(parts or {}),
    }


def _attempt(make: Callable[[], T]) -> T | None:
    try:
        return make()
    except Exception as error:
        logger.debug("an entry of the card could not be made: %s: %s", type(error).__name__, error)
        return None


def _hashes_of_parts(closed: Any) -> dict[str, str]:
    """Return a hash of what gives loss and gradients, and one of the update; {} if they share operations."""
    jaxpr = closed.jaxpr
    parts = dict[bool, list[Any]]({False: [], True: []})
    for operation in body_of(closed).operations:
        parts[_is_of_update(operation)].append(operation.eqn)
        if _has_update(operation) and not _is_of_update(operation):
            return {}
    made = {kind: {var for eqn in eqns for var in eqn.outvars} for kind, eqns in parts.items()}
    is_apart = made[True].isdisjoint(var for eqn in parts[False] for var in variables(eqn.invars))
    if not all(made.values()) or not is_apart:
        return {}
    used = dict.fromkeys(var for eqn in parts[True] for var in variables(eqn.invars) if var not in made[True])
    results = {kind: [var for var in variables(jaxpr.outvars) if var in made[kind]] for kind in parts}
    gradients = [var for var in dict.fromkeys([*used, *results[False]]) if var in made[False]]
    before = subprogram(jaxpr, [*jaxpr.constvars, *jaxpr.invars], gradients, parts[False])
    return {
        "gradients": program_hash(part_for(ClosedJaxpr(before, []), [True] * len(gradients))[0]),
        "update": program_hash(subprogram(jaxpr, list(used), results[True], parts[True])),
    }


def _is_of_update(operation: Operation) -> bool:
    return any(
        frame.file_name == apply_gradients.__file__ or frame.function_name.endswith(UpdateStep.updated.__qualname__)
        for frame in source_frames(operation.eqn)
    )


def _has_update(operation: Operation) -> bool:
    # JAX caches the program of a call, with the source of its first trace.
    bodies = () if operation.kind == "call" else operation.bodies
    return _is_of_update(operation) or any(_has_update(inner) for body in bodies for inner in body.operations)


def _results_with_bits(state: Tree, metrics: Any, *others: object) -> list[bool]:
    """For each result of a program, whether the bits of the run depend on it."""
    parts = metrics.computed if isinstance(metrics, StepMetrics) else metrics
    if isinstance(parts, dict):
        parts = {name: jax.tree.map(lambda _, name=name: name == LOSS, part) for name, part in parts.items()}
    else:
        parts = jax.tree.map(lambda _: True, parts)
    state, others = jax.tree.map(lambda _: True, (state, others))
    return [*jax.tree.leaves(state), *jax.tree.leaves(parts), *jax.tree.leaves(others)]
