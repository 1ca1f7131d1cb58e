"""Hyperparameters that the state holds: values that stay until they are set, and are saved with the state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.types import Array, Held, Slots

HELD = "held"
"""The part of a slot's name that says so: `held/name`, `embed/held/name` under a scope or label."""


def held(name: str, value: Any) -> Held:
    """A hyperparameter that the state holds, for the place of a number or a schedule.

    It lives in the scalar slot `held/name` (float32; under a scope or label `embed/held/name`), is saved with the
    state, shown in the step's metrics under its name, and stays until `set_hyperparameter` sets it, which costs no
    second compilation. `optimizer.hyperparameters(step)`, which knows the step alone, leaves it out.

    Args:
        name: Its name; two of one name collide as slots do.
        value: The first value, a number or a scalar array. What it may be is checked where it is used.

    Raises:
        ValueError: The name is empty, begins or ends with a slash, or has the part `held`; or the value is not
            finite.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(jstep.held("learning_rate", 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.set_hyperparameter(state, "learning_rate", 0.25)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], jstep.get_hyperparameter(state, "learning_rate"))
        0.75 0.25
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a string, got {type(name).__name__}")
    check_prefix("name", name)
    _check_number(value)
    return Held(name, value)


def check_prefix(argument: str, name: str) -> None:
    """Refuses what cannot stand before a slash in the name of a slot.

    Raises:
        ValueError: It is empty, begins or ends with a slash, or has the part `held`.
    """
    if not name or name.strip("/") != name:
        raise ValueError(f"{argument}={name!r}: must be a name without slashes at its ends")
    if HELD in name.split("/"):
        raise ValueError(
            f"{argument}={name!r}: must not have the part {HELD!r}, which marks the slots of held hyperparameters; "
            "take another name"
        )


def held_names(hyper: Mapping[str, Any]) -> tuple[str, ...]:
    """The slots of the held among some hyperparameters.

    Raises:
        ValueError: Two of them have one name, or one has that of another argument, beside which it would be shown.
    """
    owner: dict[str, str] = {}
    for argument, value in hyper.items():
        if isinstance(value, Held):
            slot = f"{HELD}/{value.name}"
            if slot in owner:
                raise ValueError(
                    f"{owner[slot]} and {argument} both hold a hyperparameter named {value.name!r} (slot {slot!r}); "
                    "give one of them another name"
                )
            owner[slot] = argument
            if not isinstance(hyper.get(value.name, value), Held):
                raise ValueError(
                    f"{argument} holds a hyperparameter named {value.name!r}, which is the name of another one here; "
                    f"give it a name of its own, such as held({argument!r}, …)"
                )
    return tuple(owner)


def held_slots(hyper: Mapping[str, Any]) -> Slots:
    """The slots that the held among some hyperparameters start from."""
    return {
        f"{HELD}/{value.name}": jnp.array(value.value, dtype=jnp.float32, copy=True)
        for value in hyper.values()
        if isinstance(value, Held)
    }


def shown_name(slot: str) -> str | None:
    """The name under which a held hyperparameter is known, from its slot's; None for other slots."""
    parts = slot.split("/")
    if HELD not in parts[:-1]:
        return None
    parts.remove(HELD)
    return "/".join(parts)


def held_values(slots: Slots) -> dict[str, Array]:
    """All hyperparameters that some slots hold, by the names they are known under (`embed/learning_rate`).

    For where there is a state and no optimizer: names decide.
    """
    named = ((shown_name(slot), value) for slot, value in slots.items() if trees.is_array(value))
    return {name: value for name, value in named if name is not None}


def get_hyperparameter(state: Any, name: str) -> Any:
    """The value of a held hyperparameter. Waits for the device.

    Args:
        state: A `TrainState`. Of a population of states, stacked by `jax.vmap`, the value is an array.
        name: Its name with its prefix, such as `"learning_rate"` or `"embed/learning_rate"`.

    Raises:
        KeyError: The state holds no such hyperparameter; names those it does.

    Example:
        >>> import jstep
        >>> optimizer = jstep.scope("embed", jstep.adagrad(jstep.held("rate", 0.5)))
        >>> jstep.get_hyperparameter(jstep.TrainState.create({"w": 1.0}, optimizer), "embed/rate")
        0.5
    """
    slot = _slot_of(state, name)
    value = np.asarray(jax.device_get(state.slots[slot]))  # an explicit transfer, which a guard lets pass
    return value if value.ndim else float(value)


def set_hyperparameter(state: Any, name: str, value: Any) -> Any:
    """A new state with another value of a held hyperparameter. No compiled step compiles again.

    Args:
        state: A `TrainState`.
        name: Its name with its prefix, such as `"learning_rate"` or `"embed/learning_rate"`.
        value: A finite number, or a scalar array (traced too). In a population of states, stacked by `jax.vmap`, one
            for all, or an array with one for each.

    Raises:
        KeyError: The state holds no such hyperparameter; names those it does.
        ValueError: The value is not finite, or has another shape than what the state holds.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam(jstep.held("learning_rate", 0.5)))
        >>> jstep.get_hyperparameter(jstep.set_hyperparameter(state, "learning_rate", 0.25), "learning_rate")
        0.25
    """
    slot = _slot_of(state, name)
    old = state.slots[slot]
    shape = np.shape(old)
    _check_number(value, shape)
    if trees.is_traced(old) or trees.is_traced(value):
        fresh: Any = jnp.broadcast_to(jnp.asarray(value).astype(jnp.float32), shape)
        return state.replace(slots={**state.slots, slot: fresh})
    with np.errstate(over="ignore"):
        whole = np.broadcast_to(np.asarray(value, np.float32), shape)
    if not np.all(np.isfinite(whole)):
        raise ValueError(f"value={value!r}: does not fit float32")
    if isinstance(old, jnp.ndarray) and not old.is_fully_addressable:
        fresh = jax.make_array_from_callback(shape, old.sharding, lambda index: whole[index])
    elif isinstance(old, jnp.ndarray) and old.committed:
        fresh = jax.device_put(whole, old.sharding)
    else:
        fresh = jax.device_put(whole)
    return state.replace(slots={**state.slots, slot: fresh})


def _check_number(value: Any, shape: tuple[int, ...] = ()) -> None:
    """Refuses what cannot be the value of a held hyperparameter: one number, or an array of them of a given shape."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or trees.is_array(value)):
        raise TypeError(f"value={value!r}: must be a number or a scalar array, got {type(value).__name__}")
    if np.ndim(value) and np.shape(value) != shape:
        held_shape = f" or an array of shape {shape}" if shape else ""
        raise ValueError(f"value: must be a scalar{held_shape}, got shape {np.shape(value)}")
    number = trees.concrete(value)
    if number is not None and not np.all(np.isfinite(np.asarray(number).astype(np.float64))):
        raise ValueError(f"value={number}: must be finite")


def _slot_of(state: Any, name: str) -> str:
    slots = getattr(state, "slots", None)
    if not isinstance(slots, dict):
        raise TypeError(f"state: must be a TrainState, got {type(state).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be a string, got {type(name).__name__}")
    arrays = (slot for slot, value in slots.items() if trees.is_array(value))
    known = {shown: slot for slot in arrays if (shown := shown_name(slot)) is not None}
    if name not in known:
        have = f"it holds {sorted(known)}" if known else "it holds none"
        raise KeyError(
            f"name={name!r}: the state holds no such hyperparameter{trees.nearest(name, known)}; {have}. "
            "A hyperparameter is held where jstep.held(name, value) stands in the place of its number."
        )
    return known[name]
