"""Hyperparameters: numbers, schedules, or values held in the state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, as_string, describe_type
from jstep.core.device_values import as_scalar
from jstep.core.meshes import exempts_transfers
from jstep.core.new_arrays import copy_as
from jstep.core.trees import Array, Held, P, ScalarOrSchedule, Slots, Step, Tree
from jstep.slots.roles import Role, Roles, abstractly
from jstep.state.train_state import TrainState

# Hyperparameters stored in the state, which can be changed during training and are saved in
# checkpoints.

HELD_PART = "held"
"""The part of a slot's name that marks held hyperparameters."""


def held(name: str, value: object) -> Held:
    """A hyperparameter stored in the state, given in place of a number or a schedule.

    It is saved in the scalar slot `held/name` (`embed/held/name` under a scope or label), a
    float32, or float64 under `jax_enable_x64`; a restore converts it. It is shown in the step's
    metrics under its name. `set_hyperparameter` changes it without recompiling.

    Args:
        name: Its name; equal names collide, as for slots.
        value: The initial value, a number or a scalar array.

    Raises:
        ValueError: The name begins or ends with a slash, or has the part `held`; or the value is
            not finite.

    Example:
        >>> import jstep
        >>> optimizer = jstep.gradient_descent(jstep.held("learning_rate", 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.75
    """
    check_prefix("name", as_string(name, "name"))
    _check_number(value)
    return Held(name, value)


def check_prefix(argument: str, name: str) -> None:
    if not name or name.strip("/") != name:
        raise ValueError(f"{argument}={name!r}: must be a name without slashes at its ends")
    if HELD_PART in name.split("/"):
        raise ValueError(
            f"{argument}={name!r}: must not have the part {HELD_PART!r}, "
            "which marks slots of held hyperparameters"
        )


def held_roles(hyper: Mapping[str, Any]) -> Roles:
    """Return the roles of held hyperparameters' slots, and the arguments they were passed for."""
    arguments: dict[str, str] = {}
    for argument, value in hyper.items():
        if not isinstance(value, Held):
            continue
        slot = f"{HELD_PART}/{value.name}"
        # Metrics show a held one under its name, and others under that of their argument.
        if slot in arguments or not isinstance(hyper.get(value.name, value), Held):
            raise ValueError(
                f"{argument}=held({value.name!r}, …): another one has this name; "
                f"use held({argument!r}, …)"
            )
        arguments[slot] = argument
    return Roles(dict.fromkeys(arguments, Role.HELD), arguments=arguments)


def held_slots(hyper: Mapping[str, Any]) -> Slots:
    entries = [value for value in hyper.values() if isinstance(value, Held)]
    dtype = trees.default_float()
    return {f"{HELD_PART}/{entry.name}": copy_as(entry.value, dtype) for entry in entries}


def display_name(slot: str) -> str | None:
    """The name of a held hyperparameter, from the name of its slot; None for other slots."""
    parts = slot.split("/")
    if HELD_PART not in parts[:-1]:
        return None
    parts.remove(HELD_PART)
    return "/".join(parts)


def held_values(slots: Slots) -> dict[str, Array]:
    """All held hyperparameters among some slots, by name (`embed/learning_rate`).

    No optimizer is needed.
    """
    named = ((display_name(slot), value) for slot, value in slots.items() if trees.is_array(value))
    return {name: value for name, value in named if name is not None}


def get_hyperparameter(state: Tree, name: str) -> Any:
    """Return the value of a held hyperparameter; outside of a trace, block until it is ready.

    Args:
        state: A `TrainState`.
        name: Its name with its prefix, such as `"learning_rate"` or `"embed/learning_rate"`.

    Returns:
        A float. For states stacked by `jax.vmap`, a NumPy array with one value per state. In a
        function that JAX traces, such as a train step, a scalar array, from which the next value
        may be computed.

    Raises:
        KeyError: The state holds no such hyperparameter; the error lists the names of the others.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adam(jstep.held("learning_rate", 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> jstep.get_hyperparameter(state, "learning_rate")
        0.5
    """
    slot = _slot_of(state, name)
    held_value = state.slots[slot]
    if trees.is_traced(held_value):
        return held_value
    value = np.asarray(jax.device_get(held_value))  # explicit, so that a transfer guard allows it
    return value if value.ndim else float(value)


@exempts_transfers
def set_hyperparameter(state: TrainState[P], name: str, value: object) -> TrainState[P]:
    """Return a new state with another value of a held hyperparameter.

    Compiled steps are not recompiled.

    Args:
        state: A `TrainState`.
        name: As in `get_hyperparameter`.
        value: A finite number or a scalar array, which may be traced. For states stacked by
            `jax.vmap`, one value for all, or an array with one value per state.

    Raises:
        KeyError: The state holds no such hyperparameter.
        ValueError: The value is not finite, or has another shape than the stored one.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adam(jstep.held("learning_rate", 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
        >>> jstep.get_hyperparameter(state, "learning_rate")
        0.25
    """
    slot = _slot_of(state, name)
    old = state.slots[slot]
    shape = np.shape(old)
    dtype = old.dtype
    _check_number(value, shape)
    if trees.is_traced(old) or trees.is_traced(value):
        fresh: Any = jnp.broadcast_to(jnp.asarray(value).astype(dtype), shape)
        return state.replace(slots={**state.slots, slot: fresh})
    with np.errstate(over="ignore"):
        # This is a copy, because on a CPU JAX shares the memory.
        whole = np.broadcast_to(np.array(value, dtype), shape)
    if not np.all(np.isfinite(whole)):
        raise ValueError(f"value={value!r}: does not fit {dtype}")
    if isinstance(old, jnp.ndarray) and not old.is_fully_addressable:
        fresh = jax.make_array_from_callback(shape, old.sharding, lambda index: whole[index])
    else:
        sharding = old.sharding if isinstance(old, jnp.ndarray) and old.committed else None
        fresh = jax.device_put(whole, sharding)
    return state.replace(slots={**state.slots, slot: fresh})


def _check_number(value: Any, shape: tuple[int, ...] = ()) -> None:
    """Check that a value can be held: finite, and a scalar or of the given shape."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(
            f"value={value!r}: must be a number or a scalar array, got {describe_type(value)}"
        )
    if np.ndim(value) and np.shape(value) != shape:
        held_shape = f" or an array of shape {shape}" if shape else ""
        raise ValueError(f"value: must be a scalar{held_shape}, got shape {np.shape(value)}")
    number = trees.concrete(value)
    if number is not None and not np.all(np.isfinite(np.asarray(number).astype(np.float64))):
        raise ValueError(f"value={number}: must be finite")


def _slot_of(state: Tree, name: str) -> str:
    slots = getattr(state, "slots", None)
    if not isinstance(slots, dict):
        raise TypeError(f"state: must be a TrainState, got {describe_type(state)}")
    as_string(name, "name")
    slot_of: dict[str, str] = {}
    for slot, value in slots.items():
        shown = display_name(slot)
        if shown is not None and trees.is_array(value):
            slot_of[shown] = slot
    if name not in slot_of:
        names = sorted(
            slot for slot in slots if slot.endswith(f"/hyperparams/{name.rpartition('/')[2]}")
        )
        remedy = "pass jstep.held(name, value) to the optimizer in place of its number"
        if names:  # of optax.inject_hyperparams
            remedy = (
                f"Optax holds {names}: "
                f"state.replace(slots={{**state.slots, {names[0]!r}: jnp.asarray(value)}})"
            )
        raise KeyError(
            f"name={name!r}: the state holds no such hyperparameter"
            f"{trees.suggest_names(name, slot_of)}, it holds {sorted(slot_of)}; {remedy}"
        )
    return slot_of[name]


LEARNING_RATE = "learning_rate"


def is_learning_rate(name: str) -> bool:
    """Whether a hyperparameter is a learning rate, under any prefixes of scopes and labels."""
    return name.rsplit("/", 1)[-1] == LEARNING_RATE


# Checking hyperparameters (numbers, arrays, schedules or `held`) and evaluating them at a step.

Hyper: TypeAlias = dict[str, Any]


def as_hyperparameter(name: str, value: ScalarOrSchedule, **bounds: Unpack[Bounds]) -> Any:
    """Check a number, an array or the initial value of a held one; return schedules as they are."""
    if isinstance(value, Held):
        return dataclasses.replace(value, value=as_hyperparameter(name, value.value, **bounds))
    if callable(value):
        return value
    return as_scalar(value, name, expected="a number, an array or a schedule", **bounds)


def constant(name: str, value: Any, **bounds: Any) -> float:
    """Check a number that is fixed when the optimizer is created: no schedules and no `held`."""
    if callable(value) or isinstance(value, Held) or trees.is_traced(value):
        raise TypeError(
            f"{name}={value!r}: must be a plain number; it is fixed when the optimizer is created"
        )
    return float(as_hyperparameter(name, value, **bounds))


def value_at(name: str, value: Any, step: Step, slots: Slots | None = None) -> Any:
    """The value at a step: a Python float if constant, else a float scalar array."""
    if isinstance(value, float):
        return value
    if isinstance(value, Held):
        slot = f"{HELD_PART}/{value.name}"
        if slots is None or slot not in slots:
            raise ValueError(
                f"{name}: no slot {slot!r} in {sorted(slots or {})}; "
                "create the state with this optimizer"
            )
        return slots[slot].astype(trees.default_float())
    number = value(step) if callable(value) else value
    if isinstance(number, bool) or not trees.is_array_or_number(number) or np.ndim(number):
        raise TypeError(
            f"{name}: the schedule must return a number at each step, got {describe_type(number)}"
        )
    return jnp.asarray(number).astype(trees.default_float())


def values_at(hyper: Mapping[str, Any], step: Step, slots: Slots | None = None) -> dict[str, Any]:
    return {name: value_at(name, value, step, slots) for name, value in hyper.items()}


def report(hyper: Mapping[str, Any]) -> Callable[[Step], dict[str, Array]]:
    """The `hyperparameters` function of an optimizer with these hyperparameters but held ones."""
    hyper = {name: value for name, value in hyper.items() if not isinstance(value, Held)}

    return exempts_transfers(lambda step, /: as_arrays(values_at(hyper, step), step))


def report_names(reported: Callable[[Step], Mapping[str, Any]]) -> dict[str, bool]:
    """The hyperparameters that a function reports, and whether they depend on the step.

    This uses no device.
    """
    names: dict[str, bool] = {}
    with contextlib.suppress(Exception):
        # The function may need a concrete step, which no compiled step provides.
        abstractly(
            lambda step: names.update(
                {key: trees.is_traced(value) for key, value in reported(step).items()}
            )
        )
    return names


def as_arrays(values: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Convert the numbers among values to scalar arrays, of NumPy under a trace; see `report`."""
    make: Any = np.asarray if trees.is_traced(step) else jnp.asarray
    numbers = {
        name: value for name, value in values.items() if isinstance(value, int | float | np.generic)
    }
    arrays = {name: make(number, trees.default_float()) for name, number in numbers.items()}
    return {**values, **arrays}
