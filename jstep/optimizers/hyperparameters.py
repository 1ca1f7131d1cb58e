"""Hyperparameters, fixed, scheduled or held in the state, and facts of each leaf: age, axes, masks."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, as_function, kind, shown
from jstep.core.exceptions import setting
from jstep.core.indexed_slices import IndexedSlices, is_slices
from jstep.core.placement import on_devices
from jstep.core.selection import VarList, check_form, flags, is_named, names_of
from jstep.core.slot_roles import Role, Roles, abstractly
from jstep.core.traced_arguments import as_scalar
from jstep.core.trees import Array, Held, Params, ScalarOrSchedule, Slots, Step, Updates

# Hyperparameters stored in the state, which can be changed during training and are saved in checkpoints.

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


def held_roles(hyper: Mapping[str, Any]) -> Roles:
    """The roles of the slots of held hyperparameters, with the arguments that they were given for.

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
    return Roles(dict.fromkeys(owner, Role.HELD), details=owner)


def held_slots(hyper: Mapping[str, Any]) -> Slots:
    """The initial slots of held hyperparameters."""
    held = [value for value in hyper.values() if isinstance(value, Held)]
    return {f"{HELD}/{one.name}": jnp.array(one.value, dtype=jnp.float32, copy=True) for one in held}


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
        whole = np.broadcast_to(np.array(value, np.float32), shape)  # a copy: on a CPU JAX shares the memory
    if not np.all(np.isfinite(whole)):
        raise ValueError(f"value={value!r}: does not fit float32")
    if isinstance(old, jnp.ndarray) and not old.is_fully_addressable:
        fresh = jax.make_array_from_callback(shape, old.sharding, lambda index: whole[index])
    else:
        fresh = jax.device_put(whole, old.sharding if isinstance(old, jnp.ndarray) and old.committed else None)
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
        injected = next((slot for slot in slots if _is_injected(slot, name)), None)
        if injected is not None:
            raise KeyError(
                f"name={name!r}: the state holds it as Optax's inject_hyperparams does, in slots[{injected!r}]; set it "
                f"there: state.replace(slots={{**state.slots, {injected!r}: "
                f"jnp.full_like(state.slots[{injected!r}], value)}})"
            )
        have = f"it holds {sorted(known)}" if known else "it holds none"
        raise KeyError(
            f"name={name!r}: the state holds no such hyperparameter{trees.nearest(name, known)}; {have}. "
            "To hold a hyperparameter in the state, pass jstep.held(name, value) in place of its number."
        )
    return known[name]


LEARNING_RATE = "learning_rate"


def is_learning_rate(name: str) -> bool:
    """Whether a hyperparameter, named with the prefixes of scopes and labels, is a learning rate."""
    return name.rsplit("/", 1)[-1] == LEARNING_RATE


def _is_injected(slot: str, name: str) -> bool:
    """Whether a slot is a hyperparameter of that name in a state of Optax's inject_hyperparams."""
    scope, _, last = name.rpartition("/")
    return slot.startswith(f"{scope}/" if scope else "") and slot.split("/")[-2:] == ["hyperparams", last]


# Checking hyperparameters (numbers, arrays, schedules or `held`) and evaluating them at a step.

Hyper: TypeAlias = dict[str, Any]
"""The values of hyperparameters at a step, by name."""


def checked(name: str, value: ScalarOrSchedule, **bounds: Unpack[Bounds]) -> Any:
    """Check a hyperparameter and return it.

    Args:
        name: The argument's name, for the error.
        value: A number, a scalar array (which may be traced), a schedule, or the result of `held`, whose initial value
            is checked like a number.
        **bounds: The valid range.

    Raises:
        ValueError: The value is not a scalar, not finite, or out of range.
    """
    if isinstance(value, Held):
        return dataclasses.replace(value, value=checked(name, value.value, **bounds))
    given: Any = value
    if isinstance(given, type):
        raise TypeError(f"{name}={given.__name__}: must be a number, an array or a schedule, got a class")
    if callable(given):
        return given
    return as_scalar(given, name, expected="a number, an array or a schedule", **bounds)


def constant(name: str, value: Any, **bounds: Any) -> float:
    """Check a number that is fixed when the optimizer is created: like `checked`, without schedules or `held`.

    Raises:
        ValueError: It is not finite, or out of range.
    """
    if callable(value) or isinstance(value, Held) or trees.is_traced(value):
        got = "a held value" if isinstance(value, Held) else "a traced array" if trees.is_array(value) else "a function"
        raise TypeError(
            f"{name}={value!r}: must be a plain number, got {got}; it is fixed when the optimizer is created"
        )
    return float(checked(name, value, **bounds))


def low_dtype(argument: str, dtype: Any) -> Any:
    """A floating dtype for a slot, or None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{argument}={shown(dtype)}: must be a floating dtype such as jnp.bfloat16, got {kind(dtype)}")
    return found


def deprecated_m_dtype(dtype: Any) -> Any:
    """The argument `m_dtype` of an optimizer, with a warning if it is given."""
    found = low_dtype("m_dtype", dtype)
    if found is not None:
        text = "m_dtype is deprecated and will be removed: jstep.compact(optimizer) stores m in 8 bits"
        warnings.warn(text, DeprecationWarning, stacklevel=5)  # above both decorators of the optimizer
    return found


def value_at(name: str, value: Any, step: Step, slots: Slots | None = None) -> Any:
    """The value of a hyperparameter at a step: a Python float if it is constant, else a float scalar array.

    Args:
        name: The argument's name, for the error.
        value: The value returned by `checked`.
        step: The step.
        slots: The slots of the optimizer, from which held values are read.

    Raises:
        ValueError: A schedule did not return a scalar, or the slots have no such held value.
    """
    if isinstance(value, float):
        return value
    if isinstance(value, Held):
        slot = f"{HELD}/{value.name}"
        if slots is None or slot not in slots:
            raise ValueError(
                f"{name}=held({value.name!r}, …): the state has no slot {slot!r}, it has {sorted(slots or {})}; create "
                "it with this optimizer: TrainState.create(params, optimizer)"
            )
        return slots[slot].astype(trees.default_float())
    number = value(step) if callable(value) else value
    if isinstance(number, bool | str) or not (isinstance(number, int | float) or trees.is_array(number)):
        raise TypeError(f"{name}: the schedule returned {number!r}; it must return a number")
    if np.ndim(number):
        raise ValueError(f"{name}: the schedule returned shape {np.shape(number)} at one step; it must be a scalar")
    return jnp.asarray(number).astype(trees.default_float())


def values_at(given: Mapping[str, Any], step: Step, slots: Slots | None = None) -> dict[str, Any]:
    """The values of all hyperparameters at a step, by name."""
    return {name: value_at(name, value, step, slots) for name, value in given.items()}


def as_schedule(value: ScalarOrSchedule, name: str = "value") -> Callable[[Step], Any]:
    """Convert a number, an array or a schedule to a function of the step, for hyperparameters of custom optimizers.

    Args:
        value: A number, a scalar array or a schedule.
        name: Its name, for errors.

    Returns:
        `schedule(step)`, a scalar; a plain number stays a Python float, which is exact and free in a compiled step.

    Raises:
        TypeError: It is not a number, an array or a schedule. `held` is not supported, because a held value depends on
            the state.
        ValueError: It is not a scalar, or not finite.

    Example:
        >>> import jstep
        >>> jstep.as_schedule(0.1)(7), float(jstep.as_schedule(jstep.exponential_decay(1.0, 1, 0.5))(2))
        (0.1, 0.25)
    """
    given = checked(name, value)
    if isinstance(given, Held):
        raise TypeError(f"{name}: must be a number, an array or a schedule; held hyperparameters need jstep.leafwise")
    return lambda step: value_at(name, given, step)


def report(given: Mapping[str, Any]) -> Callable[[Step], dict[str, Array]]:
    """The `hyperparameters` function of an optimizer with these hyperparameters, without held ones.

    Under a trace, constants are NumPy scalars. A compiled step then does not return them (an output costs about 2 µs
    per call on a CPU), and `training` adds them outside of it.
    """
    given = {name: value for name, value in given.items() if not isinstance(value, Held)}

    return lambda step, /: as_arrays(values_at(given, step), step)


def reported_names(reported: Callable[[Step], Mapping[str, Any]]) -> dict[str, bool]:
    """The names of the hyperparameters that a function reports, and whether they depend on the step. Uses no device.

    There are none if the function needs a concrete step, which no compiled step gives it.
    """
    found: dict[str, bool] = {}
    with contextlib.suppress(Exception):
        abstractly(lambda step: found.update({key: trees.is_traced(value) for key, value in reported(step).items()}))
    return found


def as_arrays(values: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Convert the numbers among values at a step to scalar arrays, under a trace to those of NumPy; see `report`."""
    make: Any = np.asarray if trees.is_traced(step) else jnp.asarray
    return {
        name: make(value, trees.default_float()) if isinstance(value, int | float | np.generic) else value
        for name, value in values.items()
    }


# The age of slots, and bias correction by it.


def new_start_step(global_step: Step) -> Array:
    """The scalar slot `start_step` of slots created at a step."""
    return jnp.array(global_step, dtype=trees.default_int(), copy=True)


def age_of(step: Step, start_step: Array) -> Array:
    """The age of slots at the update from `step` to step + 1: 1 at their first update, k at the k-th.

    `start_step` is the step minus the updates that the slots have had. It is constant while each step makes one update.
    """
    # If the step of a state was set back, start_step may be in the future; such slots count as new.
    step = jnp.asarray(step).astype(start_step.dtype)
    return jnp.maximum(step - start_step + 1, 1)


def bias_correction(beta: Any, age: Array) -> Array:
    """1 − beta^age, computed without cancellation for beta near 1."""
    real = trees.default_float()
    if isinstance(beta, float):
        log = jnp.asarray(np.log(beta) if beta > 0 else -np.inf, real)
    else:
        log = jnp.log(beta).astype(real)
    return -jnp.expm1(age.astype(real) * log)


# Slots and skipped updates in the metrics of a step.

SKIPPED = "skipped"


def values_used(reported: Mapping[str, Any], roles: Roles, slots: Slots) -> dict[str, Any]:
    """The hyperparameters that an update uses: schedules that depend on a count in the slots are evaluated at it.

    Args:
        reported: The hyperparameters at the global step.
        roles: The roles of the slots.
        slots: The slots before the update.
    """
    found = dict(reported)
    for one in roles.counted:
        mine = {f"{one.prefix}{name}": name for name in one.names}
        if found.keys().isdisjoint(mine):
            continue  # someone else reports them
        slot = one.slot()
        values = {} if slot is None else one.at(on_devices(slots[f"{one.prefix}{slot}"]))
        known = {name: values[inner] for name, inner in mine.items() if inner in values}
        found = {name: known.get(name, value) for name, value in found.items() if name in known or name not in mine}
    return found


def shown_slots(roles: Roles, slots: Slots) -> dict[str, Array]:
    """The current held hyperparameters and loss scale, by name with the prefixes of scopes and labels."""
    held = {str(shown_name(name)): slots[name] for name in roles.of(Role.HELD)}
    return held | {name: slots[name] for name in roles.of(Role.LOSS_SCALE)}


def skips(left_out: dict[str, Array], unscalable: Array | None, roles: Roles) -> dict[str, Array]:
    """Whether each guard skipped the update, by the name of its metric: `skipped` with its prefix.

    Args:
        left_out: For each guard's slot, whether that guard, or one around it, skipped the update.
        unscalable: Whether the gradients were not finite; None without a loss scale.
        roles: The roles of the slots.
    """
    found = {_metric_name(name): value for name, value in left_out.items()}
    for name in roles.of(Role.LOSS_SCALE):
        if unscalable is not None:
            key = _metric_name(name)
            found[key] = found[key] | unscalable if key in found else unscalable
    return found


def _metric_name(slot: str) -> str:
    return "/".join([*slot.split("/")[:-1], SKIPPED])


def became_nonfinite(updates: Updates, before: Slots, after: Slots, roles: Roles) -> Array:
    """Whether an update contains values that are not finite, or made a finite value of a slot not finite."""
    values = [u.values if isinstance(u, IndexedSlices) else u for u in jax.tree.leaves(updates, is_leaf=is_slices)]
    bad = [jnp.any(~jnp.isfinite(u)) for u in values]
    for name, tree in after.items():
        if name not in roles or not roles.has_one_value(name):
            both = on_devices((before[name], tree))
            pairs = zip(*map(jax.tree.leaves, both), strict=True)
            inexact = [(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)]
            bad += [jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new)) for old, new in inexact]
    return functools.reduce(jnp.logical_or, bad, jnp.asarray(False))


# Axes of a leaf: those that form a matrix, and those that feed one output.

Axes: TypeAlias = Callable[[str, Any], tuple[Any, Any]]
MatrixAxes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def matrix_axes(axes: Axes | None, purpose: str, label: str, optimizer: str) -> Callable[[str, Any], MatrixAxes]:
    """`(path, leaf) -> (rows, columns)`, the axes of a leaf that form the rows and the columns of its matrix.

    It raises a ValueError if the leaf has fewer than two axes, or lacks an axis that `axes` returns.

    Args:
        axes: The argument `axes`; by default the last two axes are the matrix, (in, out) as in Flax.
        purpose: Why a matrix is needed, for the error.
        label: The label of the matrices in a partition that trains the other leaves with AdamW, for the error.
        optimizer: The code of their optimizer in it.
    """
    as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True)

    def of_leaf(path: str, leaf: Any) -> MatrixAxes:
        shape = np.shape(leaf)
        if len(shape) < 2:
            raise ValueError(
                f"params: the leaf at {trees.quoted(path)} has shape {shape}: must have two axes, a matrix, {purpose}; "
                f"train the rest with another optimizer: jstep.partition({{'{label}': {optimizer}, 'adamw': "
                f"jstep.adamw(1e-3)}}, lambda path, leaf: '{label}' if leaf.ndim == 2 and 'embed' not in path else "
                "'adamw')"
            )
        given = (-2, -1) if axes is None else axes(path, leaf)
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise ValueError(f"axes: must return (in, out) for {path!r} of shape {shape}, got {shown(given)}")
        try:
            parts = [
                tuple(range(len(shape))[axis] for axis in (part if isinstance(part, tuple | list) else (part,)))
                for part in given
            ]
        except (IndexError, TypeError) as error:
            raise ValueError(f"axes: {shown(given)} for {path!r}: must be axes of shape {shape}") from error
        flat = [axis for part in parts for axis in part]
        if not all(parts) or len(set(flat)) != len(flat):
            raise ValueError(f"axes: {shown(given)} for {path!r} of shape {shape}: must be two parts of different axes")
        return parts[0], parts[1]

    return of_leaf


UnitAxes: TypeAlias = tuple[int, ...] | int | Callable[[str, Any], Any] | None


def unit_axes(
    axes: UnitAxes, default: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Callable[[str, Any], tuple[int, ...]]:
    """`(path, leaf) -> axes`, the axes to reduce over at a leaf; a ValueError if it has no such axis.

    Args:
        axes: The argument `axes`.
        default: The axes for a shape, if `axes` is None.
    """

    def as_axes(given: Any, where: str) -> tuple[int, ...]:
        some = (given,) if isinstance(given, int) else given
        if not isinstance(some, tuple | list) or not all(isinstance(a, int) and not isinstance(a, bool) for a in some):
            raise TypeError(f"{where}={shown(given)}: must be a tuple of axes, or a function (path, leaf) -> tuple")
        return tuple(some)

    fixed = () if axes is None or callable(axes) else as_axes(axes, "axes")

    def of_leaf(path: str, leaf: Any) -> tuple[int, ...]:
        shape = np.shape(leaf)
        if axes is None:
            return default(shape)
        some = as_axes(axes(path, leaf), f"axes at {trees.quoted(path)}") if callable(axes) else fixed
        for axis in some:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(f"axes={some}: the leaf at {trees.quoted(path)} of shape {shape} has no axis {axis}")
        return some

    return of_leaf


# Static values per leaf (masks, axes, factors), computed from paths, shapes and dtypes.

Flag: TypeAlias = Callable[[Params], list[Any]]
"""Maps params to one hashable value per leaf, in order."""

_WHOLE: contextvars.ContextVar[Any] = contextvars.ContextVar("jstep_whole_params", default=None)


def partial_params(params: Params) -> contextlib.AbstractContextManager[Params]:
    """Make masks see `params` in this context, even if inner optimizers get None or another dtype for some leaves."""
    return setting(_WHOLE, params if _WHOLE.get() is None else _WHOLE.get())


IN_PART: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_in_part", default=False)
"""Whether the optimizer is that of a label of a `partition`: its masks may select leaves of other labels alone."""


def mask(argument: str, var_list: VarList) -> Flag:
    """The flag for whether each leaf is selected, in the grammar of `var_list`; None for all.

    An entry that matches no parameter raises; inside `partition` it may match leaves of other labels only.

    Args:
        argument: The argument's name, for errors.
        var_list: A predicate `(path, leaf) -> bool`, paths or globs, a tree of bools, or None.
    """
    check_form(var_list, argument)
    return lambda params: on_whole(params, lambda whole: flags(whole, var_list, argument))


def decay_mask(argument: str, var_list: VarList) -> Flag:
    """As `mask`, for a weight decay; it logs a warning once if it selects nothing, but not below a label."""
    flag = mask(argument, var_list)
    has_warned = False

    def selected(params: Params) -> list[bool]:
        nonlocal has_warned
        found = flag(params)
        is_empty = not any(found) and any(flags(params, None, argument))
        if is_empty and not has_warned and not IN_PART.get():
            has_warned = True
            text = "%s=%s: selects none of the parameters %s, so that nothing decays"
            log_warning(text, argument, shown(var_list), trees.paths_of(params)[:20])
        return found

    return selected


def log_warning(text: str, *args: Any) -> None:
    """Log a warning about an optimizer, on process 0. It starts no backend, as asking for the process would."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        _logger.warning(text, *args)


_logger = logging.getLogger("jstep")


def by_path(fn: Callable[[str, Any], Any]) -> Flag:
    """The flag `fn(path, leaf)`, which must be hashable and may depend on shape and dtype, not on values."""
    return lambda params: [fn(path, leaf) if trees.is_trainable(leaf) else None for path, leaf in own_leaves(params)]


def first_match(argument: str, entries: Iterable[str]) -> Flag:
    """The flag for the first path or glob that matches each leaf, or None; every entry must match some leaf.

    An entry that is the path of a leaf matches only that leaf, even if it contains glob characters.
    """
    globs = list(entries)

    def of(params: Params) -> list[Any]:
        flags(params, globs, argument)
        everything = names_of(params)
        exact = {name for names in everything for name in names}

        def means(glob: str, names: tuple[str, ...]) -> bool:
            return glob in names if glob in exact else is_named(names, glob)

        return [next((glob for glob in globs if means(glob, names)), None) for names in everything]

    return lambda params: on_whole(params, of)


def own_leaves(params: Params) -> list[tuple[str, Any]]:
    """The leaves of params with their paths, with the shapes and dtypes that they have in the state."""
    return on_whole(params, trees.leaves_with_paths)


def on_whole(params: Params, of: Callable[[Params], list[Any]]) -> list[Any]:
    """Apply `of` to all parameters, even inside `partition`, and return its values for the leaves of params."""
    whole = _WHOLE.get()
    everything, structure_of_all = trees.flatten(whole, is_leaf=trees.is_none)
    leaves, structure = trees.flatten(params, is_leaf=trees.is_none)
    if whole is None or structure != structure_of_all:  # params are no part, or other form, of others
        return of(params)
    values = iter(of(whole))
    by_all = [None if leaf is None else next(values) for leaf in everything]
    return [value for value, leaf in zip(by_all, leaves, strict=True) if leaf is not None]


def leaf_numbers(params: Params) -> list[int]:
    """The index of each leaf among all parameters, even inside `partition`, for folding into PRNG keys."""
    return on_whole(params, lambda whole: list(range(len(jax.tree.leaves(whole)))))


# New values of parameters in place of updates: what p + u cannot represent exactly.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projected:
    """A leaf of updates that replaces the parameter by `value`, whose difference from the parameter may be rounded.

    Only wrappers that pass updates on see it, by `call_update(…, exact=True)`; others see the difference.

    Attributes:
        value: The new value of the parameter, with its dtype.
    """

    value: Any


def is_update(x: Any) -> bool:
    """Whether a node of a tree of updates is an `IndexedSlices` or a `Projected`, for `is_leaf`."""
    return isinstance(x, IndexedSlices | Projected)


def moves(params: Params, updates: Updates) -> Updates:
    """Return the updates with the difference from the parameter for each `Projected`."""
    if not any(isinstance(u, Projected) for u in jax.tree.leaves(updates, is_leaf=is_update)):
        return updates
    found = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    leaves, treedef = trees.flatten(on_devices(params))

    def move(p: Any, u: Any) -> Any:
        if not isinstance(u, Projected):
            return u
        dtype = trees.compute_dtype(jnp.result_type(p))
        return u.value.astype(dtype) - jnp.asarray(p).astype(dtype)

    return treedef.unflatten(map(move, leaves, found))


class Condition(NamedTuple):
    """A condition of the updates of some parameters.

    Attributes:
        params: The parameters: a tree with None in place of the others.
        holds: Whether they were updated: if not, their updates are zero.
        is_guard: Whether the update is otherwise skipped, by a guard; not if it was not due.
    """

    params: Params
    holds: Array
    is_guard: bool


Conditions = list[Condition]

CONDITIONS: contextvars.ContextVar[tuple[Conditions, ...]] = contextvars.ContextVar("jstep_conditions", default=())
"""Where the conditions of the updates that are made are collected: by each wrapper around them that asks for them."""


def observing_conditions(into: Conditions) -> contextlib.AbstractContextManager[Any]:
    """Collect the conditions of the updates made in a context, for those outside as well."""
    return setting(CONDITIONS, (*CONDITIONS.get(), into))


def report_condition(condition: Condition) -> None:
    """Report that some parameters are updated only if a condition holds."""
    for collected in CONDITIONS.get():
        collected.append(condition)


def conditions_of(params: Params, collected: Conditions) -> list[Array | None]:
    """The condition under which each leaf was updated, in order; None if it was in any case.

    Args:
        params: The parameters.
        collected: Conditions of some of them.
    """
    found: dict[Any, Array] = {}
    for part, condition, _ in collected:
        for keys, _ in jax.tree_util.tree_leaves_with_path(part):
            found[keys] = found[keys] & condition if keys in found else condition
    return [found.get(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def unless_skipped_by_guards(collected: Conditions, gradients: list[Any], params: Params) -> Array | bool:
    """Whether guards let an update through, for one leaf with a gradient at least.

    Args:
        collected: The conditions of the update.
        gradients: The gradients, in order; None for a leaf without one.
        params: The parameters.
    """
    conditions = conditions_of(params, [one for one in collected if one.is_guard])
    mine = [one for one, gradient in zip(conditions, gradients, strict=True) if gradient is not None]
    known = [one for one in mine if one is not None]
    return functools.reduce(jnp.logical_or, known) if known and len(known) == len(mine) else True


# Whether an update advances the global step, for what follows steps.

ADVANCES: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_advances", default=True)
"""Whether the update that is being computed advances the global step."""
