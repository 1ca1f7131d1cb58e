"""The setup of a start: what it was given and what it compiled, as JSON without secrets.

Starts and runs are compared by it. It is written to the file `*.card.json`, beside the file of the
start, and again with each program that is compiled.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jstep.checkpoint.saver import Saver
from jstep.compiling.programs import shapes_of, type_text
from jstep.compiling.stages import TrainSteps, lanes_of, name_of_step
from jstep.core import trees
from jstep.core.jaxprs import (
    Operation,
    body_of,
    hash_strings,
    part_for,
    program_hash,
    source_frames,
    strip_addresses,
    subprogram,
    variables,
)
from jstep.core.logs import logger
from jstep.core.meshes import sharding_text
from jstep.core.recorded_calls import as_typed
from jstep.core.trees import T, Tree
from jstep.data.loaders import ReplayedBatches, StateBatches
from jstep.data.sequence import BatchSequence
from jstep.hooks.hook_states import hook_key
from jstep.origin.arguments import Options
from jstep.record.config import as_text, plain
from jstep.record.differences import PATH_OPTIONS, SETTINGS
from jstep.state.sharding import describe_devices
from jstep.training import apply_gradients
from jstep.training.metrics import LOSS, StepMetrics
from jstep.training.minimize import UpdateStep
from jstep.training.step import step_function

_MAX_ENTRY = 1000
"""The number of characters of an entry as JSON, above which it is recorded as a hash."""


def describe_setup(
    options: Options, given: Options, stages: TrainSteps, step: int, state: Tree, batches: Tree
) -> dict[str, Any]:
    """Return the setup of a start from a step, by section; programs are added once compiled."""
    names: dict[str, str] = {}
    lanes: dict[str, Any] = {}
    for stage in stages.stages():
        names[str(stage.first)] = name_of_step(stage.value)
        lanes[str(stage.first)] = lanes_of(stage.value)
    are_equal = len(set(lanes.values())) == 1
    return {
        "step": step,
        "versions": _versions(),
        "environment": _environment(),
        "settings": {name: plain(getattr(jax.config, name, None)) for name in SETTINGS},
        "devices": describe_devices(state),
        "state": _describe_state(state),
        "batches": describe_batches(batches),
        "stages": names,
        "lanes": next(iter(lanes.values())) if are_equal else lanes,
        "arguments": _arguments(options, given),
        "programs": [],
    }


def shortened(value: object) -> Any:
    """Return a value of JSON, or if it is long, its hash."""
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _MAX_ENTRY else f"hash {hash_strings(text)}"


# The process.


def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in sorted(os.environ):
        if name == "XLA_FLAGS" or name.startswith("JAX_"):
            found[name] = as_text(os.environ[name], name)
    return found


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "jstep": str(sys.modules["jstep"].__version__)}
    for name in ("jax", "jaxlib", "orbax-checkpoint"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # It may be a checkout on the path.
            versions[name] = importlib.metadata.version(name)
    return versions


# The arguments of `train`.


def _arguments(options: Options, given: Options) -> dict[str, Any]:
    """Return the arguments of a run, without `config`, which has a section of its own."""
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        if field.name == "config":
            continue
        # Paths as the user spelled them: `record.differences` thereby recognizes the same string in
        # `config` or the environment as a path of the run.
        source = given if field.name in PATH_OPTIONS else options
        arguments[field.name] = _argument(field.name, getattr(source, field.name))
    return arguments


def _argument(name: str, value: Any) -> Any:
    with contextlib.suppress(Exception):
        if isinstance(value, Saver):
            return plain(value.directory)
        if name == "hooks":
            return [strip_addresses(hook_key(hook)) for hook in value]
        if name == "batch_sharding":
            return shortened(_sharding_texts(value)) or None
    return plain(value, name)


def _sharding_texts(shardings: Tree) -> list[str]:
    texts: list[str] = []
    leaves = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    for leaf in leaves:
        texts.append(sharding_text(leaf) if isinstance(leaf, jax.sharding.Sharding) else str(leaf))
    return texts


def _describe_state(state: Tree) -> dict[str, Any]:
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


def describe_batches(batches: Tree) -> dict[str, Any]:
    """Return the definition of batches, with a hash; of a user's loader, its class and length."""
    if isinstance(batches, BatchSequence):
        definition = batches.definition()
    else:
        source = batches.make if isinstance(batches, ReplayedBatches | StateBatches) else batches
        definition = {
            "kind": plain(source if hasattr(source, "__qualname__") else type(source)),
            "length": None,
        }
        with contextlib.suppress(Exception):  # it is endless, or its length is not known
            definition["length"] = len(batches)
    described = {"hash": hash_strings(json.dumps(definition, sort_keys=True))}
    for key, part in definition.items():
        described[key] = shortened(part)
    return described


# Programs.


def describe_program(
    stage: int, step: Any, traced: Any, constants: Mapping[str, Any], args: Any
) -> dict[str, Any]:
    """Return what a stage was compiled for, with a hash of all that the bits of the run depend on.

    Args:
        step: The train step of the stage.
        traced: The step as JAX has traced it; None if it is a plain function, which then has no
            hash.
        constants: Its metrics that are constants of the program, such as a learning rate.
        args: The batch of one step.
    """
    shapes: list[str] = []
    for path, leaf in trees.leaves_with_paths(args):
        suffix = " weak" if getattr(leaf, "weak_type", False) else ""
        shapes.append(f"{path or 'batch'}: {type_text(leaf)}{suffix}")
    # In separate attempts, so that if one entry fails the others are still recorded.
    closed = None
    if traced is not None:
        closed = _attempt(lambda: part_for(traced.jaxpr, _results_with_bits(*traced.out_info))[0])
    whole: str | None = None
    parts: dict[str, str] | None = None
    if closed is not None:
        whole = _attempt(lambda: program_hash(closed))
        parts = _attempt(lambda: _hashes_of_parts(closed))
    pure_step = step_function(step)
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
        logger.debug("an entry of the setup could not be made: %s: %s", type(error).__name__, error)
        return None


def _results_with_bits(state: Tree, metrics: Any, *others: object) -> list[bool]:
    """For each result of a program, whether the bits of the run depend on it.

    Of its metrics, they depend only on the loss.
    """
    parts = metrics.computed if isinstance(metrics, StepMetrics) else metrics
    if isinstance(parts, dict):
        parts = {
            name: jax.tree.map(lambda _, name=name: name == LOSS, part)
            for name, part in parts.items()
        }
    else:
        parts = jax.tree.map(lambda _: True, parts)
    state, others = jax.tree.map(lambda _: True, (state, others))
    return [*jax.tree.leaves(state), *jax.tree.leaves(parts), *jax.tree.leaves(others)]


def _hashes_of_parts(closed: Any) -> dict[str, str]:
    """Return a hash of the operations of loss and gradients, and a hash of the update's.

    It is {} if they cannot be separated: in a step with two updates, with a loss after the update,
    or with an update in a branch. Hashes of such parts could hide a change.
    """
    jaxpr = closed.jaxpr
    gradient_eqns: list[Any] = []
    update_eqns: list[Any] = []
    for operation in body_of(closed).operations:
        if _is_of_update(operation):
            update_eqns.append(operation.eqn)
        elif _has_update(operation):
            return {}
        else:
            gradient_eqns.append(operation.eqn)
    gradient_results = _results_of(gradient_eqns)
    update_results = _results_of(update_eqns)
    if (
        not gradient_results
        or not update_results
        or not update_results.isdisjoint(_inputs_of(gradient_eqns))
    ):
        return {}
    results = variables(jaxpr.outvars)
    # In the order of their use in the program; a set would have another order in each process.
    update_inputs = [
        var for var in dict.fromkeys(_inputs_of(update_eqns)) if var not in update_results
    ]
    used_later = [*update_inputs, *(var for var in results if var in gradient_results)]
    gradients = [var for var in dict.fromkeys(used_later) if var in gradient_results]
    gradient_program = subprogram(
        jaxpr, [*jaxpr.constvars, *jaxpr.invars], gradients, gradient_eqns
    )
    update = subprogram(
        jaxpr, update_inputs, [var for var in results if var in update_results], update_eqns
    )
    gradient_part = part_for(ClosedJaxpr(gradient_program, []), [True] * len(gradients))[0]
    return {
        "gradients": program_hash(gradient_part),
        "update": program_hash(update),
    }


def _results_of(eqns: list[Any]) -> set[Any]:
    return {var for eqn in eqns for var in eqn.outvars}


def _inputs_of(eqns: list[Any]) -> Iterator[Any]:
    for eqn in eqns:
        yield from variables(eqn.invars)


def _is_of_update(operation: Operation) -> bool:
    """Whether an operation was traced in `apply_gradients`, or after it in `minimize`'s step."""
    for frame in source_frames(operation.eqn):
        if frame.file_name == apply_gradients.__file__:
            return True
        if frame.function_name.endswith(UpdateStep.apply.__qualname__):
            return True
    return False


def _has_update(operation: Operation) -> bool:
    if _is_of_update(operation):
        return True
    if operation.kind == "call":
        # Not the body of a call: JAX caches it with the source of its first trace, which may be an
        # update.
        return False
    return any(_has_update(inner) for body in operation.bodies for inner in body.operations)
