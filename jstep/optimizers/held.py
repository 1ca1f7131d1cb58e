"""Hyperparameters stored in the state, which can be changed during training and are saved in checkpoints."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.trees import Array, Held, Slots

HELD = "held"
"""The part of a slot's name that marks held hyperparameters: `held/name`, `embed/held/name` under a scope or label."""


def held(name: str, value: Any) -> Held:
    """A hyperparameter stored in the state, given in place of a number or a schedule.

    The value is stored in the scalar slot `held/name` (float32; `embed/held/name` under a scope or label), saved with
    the state and shown in the step's metrics under its name. It stays constant until `set_hyperparameter` changes it,
    which does not recompile. `optimizer.hyperparameters(step)` omits it, because it depends on the step only.

    Args:
        name: Its name; equal names collide like those of slots.
        value: The initial value, a number or a scalar array. Its range is checked by the optimizer that uses it.

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
    """Check that a name can be the prefix of a slot's name.

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
    """The names of the slots of held hyperparameters.

    Raises:
        ValueError: Two of them have the same name, or one has the name of another argument, with which it would clash
            in the metrics.
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
                    f"{argument} holds a hyperparameter named {value.name!r}, which is the name of another argument; "
                    f"give it another name, such as held({argument!r}, …)"
                )
    return tuple(owner)


def held_slots(hyper: Mapping[str, Any]) -> Slots:
    """The initial slots of held hyperparameters."""
    return {
        f"{HELD}/{value.name}": jnp.array(value.value, dtype=jnp.float32, copy=True)
        for value in hyper.values()
        if isinstance(value, Held)
    }


def shown_name(slot: str) -> str | None:
    """The name of a held hyperparameter, from the name of its slot; None for other slots."""
    parts = slot.split("/")
    if HELD not in parts[:-1]:
        return None
    parts.remove(HELD)
    return "/".join(parts)


def held_values(slots: Slots) -> dict[str, Array]:
    """All held hyperparameters among some slots, by name (`embed/learning_rate`).

    They are recognized by the names of the slots, so no optimizer is needed.
    """
    named = ((shown_name(slot), value) for slot, value in slots.items() if trees.is_array(value))
    return {name: value for name, value in named if name is not None}


def get_hyperparameter(state: Any, name: str) -> Any:
    """Return the value of a held hyperparameter. Blocks until the value is ready.

    Args:
        state: A `TrainState`. For a population of states, stacked by `jax.vmap`, the result is an array.
        name: Its name with its prefix, such as `"learning_rate"` or `"embed/learning_rate"`.

    Raises:
        KeyError: The state holds no such hyperparameter; the error lists those it holds.

    Example:
        >>> import jstep
        >>> optimizer = jstep.scope("embed", jstep.adagrad(jstep.held("rate", 0.5)))
        >>> jstep.get_hyperparameter(jstep.TrainState.create({"w": 1.0}, optimizer), "embed/rate")
        0.5
    """
    slot = _slot_of(state, name)
    value = np.asarray(jax.device_get(state.slots[slot]))  # explicit, so that a transfer guard allows it
    return value if value.ndim else float(value)


def set_hyperparameter(state: Any, name: str, value: Any) -> Any:
    """Return a new state with another value of a held hyperparameter. Compiled steps are not recompiled.

    Args:
        state: A `TrainState`.
        name: Its name with its prefix, such as `"learning_rate"` or `"embed/learning_rate"`.
        value: A finite number or a scalar array, which may be traced. For a population of states, stacked by
            `jax.vmap`, one value for all, or an array with one value per state.

    Raises:
        KeyError: The state holds no such hyperparameter; the error lists those it holds.
        ValueError: The value is not finite, or its shape differs from that of the stored value.

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
    """Check that a value can be held: a finite number, or an array of finite numbers of a given shape."""
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
            "To hold a hyperparameter in the state, pass jstep.held(name, value) in place of its number."
        )
    return known[name]
