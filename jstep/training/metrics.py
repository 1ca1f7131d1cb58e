"""The metrics of a step: constants beside those that its program computes, those of the optimizer, those requested."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import device_values, trees
from jstep.core.calls import typed
from jstep.core.checks import as_function, kind
from jstep.core.exceptions import note
from jstep.core.meshes import Attempts
from jstep.core.placement import on_devices
from jstep.core.trees import Array, Params, Slots, Updates
from jstep.differentiate.clipping import global_norm
from jstep.optimizers import guards
from jstep.optimizers.hyperparameters import shown_name
from jstep.slots.indexed_slices import RowsInOrder, is_slices
from jstep.slots.roles import Role, Roles

# An output of a compiled program costs some 2 µs per call on a CPU, so constants are not outputs. They are a static
# result of the trace, in the tree structure of its return value, which JAX keeps with the compiled program.


@jax.tree_util.register_static
class Constants:
    """Numbers known without running the program; a pytree without leaves that compares by their values.

    Attributes:
        values: Name → NumPy scalar or read-only array; not to be changed. The same objects at each call, because they
            are compared by identity at every step.
        skipped: The name of the metric that reports whether the update was skipped; None without a guard.
    """

    def __init__(self, values: Mapping[str, Any], skipped: str | None = None) -> None:
        self.values = {name: value[()] for name, value in values.items()}
        self.skipped = skipped
        known = ((name, str(value.dtype), value.shape, value.tobytes()) for name, value in self.values.items())
        self._key = (skipped, *known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def repeated(self, k: int) -> "Constants":
        """Return the numbers of K steps, stacked."""
        stacked = {name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.values.items()}
        return Constants(stacked, self.skipped)


class Metrics(NamedTuple):
    """The metrics of a step, as its program returns them.

    Attributes:
        computed: Those that the program computes, usually a dict.
        constants: Those that are constant.
    """

    computed: Any
    constants: Constants

    def whole(self) -> Any:
        """All metrics, as the caller of a step gets them."""
        return {**self.computed, **self.constants.values} if self.constants.values else self.computed


def split(metrics: Any, skipped: str | None = None) -> Metrics:
    """Split metrics into those that a step computes and those that are plain Python or NumPy numbers.

    Args:
        metrics: The metrics of a step. Anything but a dict counts as computed.
        skipped: The name of the metric that reports whether the update was skipped.
    """
    if type(metrics) is not dict:
        return Metrics(metrics, Constants({}, skipped))
    plain = {name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)}
    constants = {name: value for name, value in plain.items() if value is not None}
    computed = {name: value for name, value in metrics.items() if name not in constants}
    return Metrics(computed, Constants(constants, skipped))


def _plain(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a plain number to the dtype that JAX would give it; return None for anything else."""
    is_scalar = isinstance(value, np.ndarray | np.generic) and value.ndim == 0 and value.dtype.kind in "iufcV"
    if not (isinstance(value, bool | np.bool_ | int | float) or is_scalar):
        return None
    if isinstance(value, int) and device_values.first_wide(value) is not None:
        return None
    dtype = value.dtype if is_scalar else jnp.result_type(value)
    return np.asarray(value, jax.dtypes.canonicalize_dtype(dtype))


# What the metrics of a step show of its optimizer: hyperparameters, held values and scales.

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


# The metrics that `minimize(metrics=…)` requests: norms, the noise scale, and functions of gradients and updates.

NORMS = ("grad_norm", "update_norm", "param_norm")
NOISE_SCALE = "noise_scale"

MetricFn: TypeAlias = Callable[[Updates, Updates, Params], Mapping[str, Any]]
"""`fn(gradients, updates, params) -> {name: scalar}`."""
_FORM = "(gradients, updates, params) -> {name: scalar}"


@dataclasses.dataclass(frozen=True)
class Requested:
    """The metrics requested of a step.

    Attributes:
        norms: The names among `NORMS`.
        noise: Whether the noise scale is requested.
        functions: Description → `fn(gradients, updates, params) -> {name: scalar}`, which checks its result.
    """

    norms: tuple[str, ...]
    noise: bool
    functions: Mapping[str, Callable[..., dict[str, Any]]]

    def measured(
        self, gradients: Updates, updates: Updates, params: Params, scale: Array | None
    ) -> dict[str, dict[str, Any]]:
        """Return the values of the norms and functions, by a description of their origin.

        Args:
            gradients: The gradients of the loss, times the loss scale if there is one.
            updates: The updates as added to the parameters.
            params: The new parameters.
            scale: The loss scale.
        """

        def norm(name: str) -> Array:
            if name == "grad_norm":
                found = global_norm(gradients)
                return found if scale is None else found / scale.astype(found.dtype)
            if name == "update_norm":
                return global_norm(updates)
            return global_norm(jax.tree.map(lambda leaf: leaf if trees.is_trainable(leaf) else None, params))

        found: dict[str, dict[str, Any]] = {"the norms": {name: norm(name) for name in self.norms}}
        if not self.functions:
            return found
        raw = gradients if scale is None else guards.unscaled(gradients, scale)
        given = _public(raw), _public(updates), params
        return found | {name: fn(*given) for name, fn in self.functions.items()}


def _public(updates: Updates) -> Updates:
    """Gradients or updates as users know them: arrays, `IndexedSlices` and None."""

    def leaf(x: object) -> Any:
        if trees.is_none(x):
            return None
        return x.to_dense() if isinstance(x, RowsInOrder) else x

    return jax.tree.map(leaf, updates, is_leaf=is_slices)


def requested(metrics: Any, argument: str, number: int) -> Requested:
    """Check the argument `metrics` of `minimize`.

    Args:
        metrics: The argument.
        argument: The argument of `minimize` that divides a batch into parts, whose gradients are compared.
        number: Its value.

    Raises:
        TypeError: `metrics` does not consist of names and functions of three arguments.
        ValueError: A name is unknown, or the noise scale is requested without microbatches.
    """
    names = (*NORMS, NOISE_SCALE)
    if not (callable(metrics) or isinstance(metrics, str | list | tuple | set | frozenset)):
        raise TypeError(f"metrics={metrics!r}: must be names among {names}, or functions {_FORM}, got {kind(metrics)}")
    entries = (metrics,) if callable(metrics) or isinstance(metrics, str) else tuple(metrics)
    functions: dict[str, Callable[..., dict[str, Any]]] = {}
    for i, entry in enumerate(entries):
        if callable(entry):
            place = f"metrics[{i}]"
            as_function(entry, place, _FORM, takes=3)
            name = f"{place}={typed(entry)}"
            functions[name] = _checked(entry, name)
        elif entry not in names:
            raise ValueError(
                f"metrics: {entry!r} is unknown{trees.nearest(str(entry), names)}; it takes any of {names}, and "
                f"functions {_FORM}"
            )
    chosen = tuple(entry for entry in entries if not callable(entry))
    if NOISE_SCALE in chosen and number == 1:
        raise ValueError(
            f"{argument}=1: must be at least 2 for metrics={metrics!r}, which compares the gradients of parts of "
            f"a batch with their mean; give minimize {argument}=2 or more"
        )
    return Requested(tuple(name for name in chosen if name != NOISE_SCALE), NOISE_SCALE in chosen, functions)


def _checked(fn: MetricFn, name: str) -> Callable[..., dict[str, Any]]:
    """Wrap a function of metrics: its result is checked, and its errors name it.

    On a mesh with Explicit axes it may combine trees that are sharded in different ways, which JAX refuses there; it is
    then traced with Auto axes.
    """

    def run(gradients: Updates, updates: Updates, params: Params) -> dict[str, Any]:
        # New containers: what a function does to a dict of its own changes neither the state nor the next function.
        given = jax.tree.map(lambda leaf: leaf, (gradients, updates, params))
        try:
            found = fn(*given)
        except Exception as error:
            note(error, f"This error was raised in {name}, a function that minimize traces: {_FORM}.")
            raise
        if not isinstance(found, Mapping):
            raise TypeError(
                f"{name}: must return a mapping of names to scalars, got {kind(found)}; return a dict such as "
                '{"grad_max": …}'
            )
        for key, value in found.items():
            if not isinstance(key, str):
                raise TypeError(f"{name}: must return a mapping of names to scalars, got the name {key!r}")
            is_number = trees.is_array_or_number(value) and not trees.is_key(value)
            if not (is_number and np.ndim(value) == 0):
                raise TypeError(
                    f"{name}: must return a mapping of names to scalars, got {kind(value)} for {key!r}; reduce it, for "
                    "example by jnp.mean"
                )
        return device_values.from_host(dict(found), name)

    return functools.partial(Attempts(name), run)
