"""The metrics of a train step: constant, computed and requested."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import device_values, trees
from jstep.core.checks import as_function, describe_type
from jstep.core.exceptions import note
from jstep.core.meshes import AxesFallback
from jstep.core.recorded_calls import as_typed
from jstep.core.trees import Array, Params, Slots, Updates
from jstep.differentiate.clipping import global_norm
from jstep.metrics.totals import MeanOf
from jstep.optimizers import guards
from jstep.optimizers.hyperparameters import display_name
from jstep.slots.indexed_slices import RowsInOrder, is_slices
from jstep.slots.roles import Role, Roles

Metrics: TypeAlias = Mapping[str, Any]

LOSS = "loss"
GRAD_NORM = "grad_norm"

# An output of a compiled program costs some 2 µs per call on a CPU, so constants are not outputs.
# They are a static result of the trace, in the tree structure of its return value, which JAX keeps
# with the compiled program.


@jax.tree_util.register_static
class Constants:
    """Numbers known before the program runs; a pytree without leaves that compares by their values.

    Attributes:
        all: Name → NumPy scalar or read-only array; the same objects at each call.
        values: The hyperparameters among them, which hooks show once.
        skipped: The name of the metric that reports skipped updates; None without a guard.
        has_ratios: Whether a computed metric is a `MeanOf`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        skipped: str | None = None,
        once: Collection[str] = (),
        has_ratios: bool = False,
    ) -> None:
        self.all = {name: value[()] for name, value in values.items()}
        self.values = {name: value for name, value in self.all.items() if name in once}
        self.skipped = skipped
        self.has_ratios = has_ratios
        contents = [
            (name, str(value.dtype), value.shape, value.tobytes())
            for name, value in self.all.items()
        ]
        self._key = (skipped, has_ratios, *self.values, *contents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def repeated(self, k: int) -> "Constants":
        stacked = {
            name: np.broadcast_to(value, (k, *value.shape)) for name, value in self.all.items()
        }
        return Constants(stacked, self.skipped, self.values, self.has_ratios)


class StepMetrics(NamedTuple):
    """The metrics of a step, as its program returns them.

    `computed` is a flat dict, if the step returned a mapping.
    """

    computed: Any
    constants: Constants

    def merged(self) -> Any:
        if not self.constants.all:
            return self.computed
        return {**self.computed, **self.constants.all}


# The metrics that a step returns may be any mapping, and nested. They are flattened only here:
# whatever reads metrics later gets a flat dict.


def flat_metrics(metrics: Any) -> Any:
    """Return a mapping of metrics as a flat dict, `{"world": {"kl": x}}` as `{"world/kl": x}`.

    Anything else is returned unchanged; callers that require metrics reject it.
    """
    if not isinstance(metrics, Mapping):
        return metrics
    # The fast path: steps that are not compiled flatten their metrics at each call.
    if type(metrics) is dict and not any(isinstance(value, Mapping) for value in metrics.values()):
        return metrics
    flat: dict[str, Any] = {}
    _add_flat(flat, "", metrics)
    return flat


def _add_flat(flat: dict[str, Any], prefix: str, metrics: Mapping[Any, Any]) -> None:
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            _add_flat(flat, str(name), value)
            continue
        if name in flat:
            raise ValueError(
                f"metrics: two have the name {name!r}, because nested metrics are named by their "
                "path; rename one"
            )
        flat[name] = value


def losses_in(metrics: Metrics) -> dict[str, Any]:
    """Return the metric `loss`; for a loss that was a mapping, its metrics `loss/…`."""
    if LOSS in metrics:
        return {LOSS: metrics[LOSS]}
    return {name: value for name, value in metrics.items() if name.startswith(f"{LOSS}/")}


def split_metrics(
    metrics: Any, skipped: str | None = None, once: Collection[str] = ()
) -> StepMetrics:
    """Split metrics into computed ones and plain Python or NumPy numbers.

    Anything but a dict counts as computed.
    """
    if type(metrics) is not dict:
        return StepMetrics(metrics, Constants({}, skipped))
    plain = {
        name: _plain(value) for name, value in metrics.items() if not isinstance(value, jax.Array)
    }
    constants = {name: value for name, value in plain.items() if value is not None}
    computed = {name: value for name, value in metrics.items() if name not in constants}
    return StepMetrics(computed, Constants(constants, skipped, once, has_ratios(computed)))


def has_ratios(metrics: Metrics) -> bool:
    return any(isinstance(value, MeanOf) for value in metrics.values())


def _plain(value: Any) -> np.ndarray[Any, Any] | None:
    """Convert a plain number to the dtype that JAX would give it, or return None."""
    if (
        isinstance(value, np.ndarray | np.generic)
        and value.ndim == 0
        and value.dtype.kind in "iufcV"
    ):
        return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
    if not isinstance(value, bool | np.bool_ | int | float):
        return None
    if isinstance(value, int) and device_values.first_wide(value) is not None:
        return None  # too large for an integer of JAX
    return np.asarray(value, jax.dtypes.canonicalize_dtype(jnp.result_type(value)))


# Metrics of the optimizer: hyperparameters, held values and scales.

SKIPPED = "skipped"


def slot_metrics(roles: Roles, slots: Slots) -> dict[str, Array]:
    """The current held hyperparameters and loss scales, with their prefixes."""
    held_values = {str(display_name(name)): slots[name] for name in roles.names_with(Role.HELD)}
    return held_values | {name: slots[name] for name in roles.names_with(Role.LOSS_SCALE)}


# The metrics that `minimize(metrics=…)` requests: norms, the noise scale, and functions of
# gradients and updates.

NORMS = (GRAD_NORM, "update_norm", "param_norm")
NOISE_SCALE = "noise_scale"

MetricFn: TypeAlias = Callable[[Updates, Updates, Params], Mapping[str, Any]]
"""`fn(gradients, updates, params) -> {name: scalar}`."""
_FORM = "(gradients, updates, params) -> {name: scalar}"


@dataclasses.dataclass(frozen=True)
class RequestedMetrics:
    """The metrics requested of a step; `functions` are keyed by description."""

    norms: tuple[str, ...]
    noise: bool
    functions: Mapping[str, Callable[..., dict[str, Any]]]

    def measured(
        self, gradients: Updates, updates: Updates, params: Params, scale: Array | None
    ) -> dict[str, dict[str, Any]]:
        """Return the values of the norms and functions, by a description of their origin.

        `gradients` include the loss scale, `updates` are as added, and `params` are new.
        """

        def norm(name: str) -> Array:
            if name == GRAD_NORM:
                scaled_norm = global_norm(gradients)
                if scale is None:
                    return scaled_norm
                return scaled_norm / scale.astype(scaled_norm.dtype)
            if name == "update_norm":
                return global_norm(updates)
            return global_norm(
                jax.tree.map(lambda leaf: leaf if trees.is_trainable(leaf) else None, params)
            )

        measured: dict[str, dict[str, Any]] = {
            "the norms": {name: norm(name) for name in self.norms}
        }
        if not self.functions:
            return measured
        unscaled = gradients if scale is None else guards.unscale(gradients, scale)
        raw_gradients = _as_public(unscaled)
        public_updates = _as_public(updates)
        for name, fn in self.functions.items():
            measured[name] = fn(raw_gradients, public_updates, params)
        return measured


def _as_public(updates: Updates) -> Updates:
    def leaf(x: object) -> Any:
        if trees.is_none(x):
            return None
        return x.to_dense() if isinstance(x, RowsInOrder) else x

    return jax.tree.map(leaf, updates, is_leaf=is_slices)


def as_requested_metrics(metrics: Any, argument: str, number: int) -> RequestedMetrics:
    """Validate the argument `metrics` of `minimize`.

    `argument=number` divides a batch into the parts to compare.
    """
    is_single = isinstance(metrics, str) or callable(metrics) or not isinstance(metrics, Collection)
    entries = (metrics,) if is_single else tuple(metrics)
    norms: list[str] = []
    functions: dict[str, Callable[..., dict[str, Any]]] = {}
    for i, entry in enumerate(entries):
        if callable(entry):
            argument_name = f"metrics[{i}]"
            as_function(entry, argument_name, _FORM, takes=3)
            name = f"{argument_name}={as_typed(entry)}"
            functions[name] = _check_result_of(entry, name)
        elif entry in NORMS:
            norms.append(entry)
        elif entry != NOISE_SCALE:
            raise ValueError(
                f"metrics: {entry!r} must be one of {(*NORMS, NOISE_SCALE)}, or a function {_FORM}"
            )
    has_noise = NOISE_SCALE in entries
    if has_noise and number == 1:
        raise ValueError(
            f"{argument}=1: must be at least 2 for metrics={metrics!r}, "
            "which compares parts of a batch"
        )
    return RequestedMetrics(tuple(norms), has_noise, functions)


def _check_result_of(fn: MetricFn, name: str) -> Callable[..., dict[str, Any]]:
    """Return a function that calls `fn` and checks what it returns."""

    def checked(gradients: Updates, updates: Updates, params: Params) -> dict[str, Any]:
        # New containers, so that a function that changes its dicts affects neither the state nor
        # the next function.
        arguments = jax.tree.map(lambda leaf: leaf, (gradients, updates, params))
        try:
            result = fn(*arguments)
        except Exception as error:
            note(
                error, f"This error was raised in {name}, a function that minimize traces: {_FORM}."
            )
            raise
        must = f"{name}: must return a mapping of names to scalars, got"
        if not isinstance(result, Mapping):
            raise TypeError(f"{must} {describe_type(result)}")
        for key, value in result.items():
            if not (isinstance(key, str) and _is_scalar(value)):
                raise TypeError(f"{must} {describe_type(value)} for {key!r}")
        return device_values.prepare_for_device(dict(result), name)

    # The function may combine trees that are sharded in different ways, which JAX rejects on
    # Explicit axes.
    return functools.partial(AxesFallback(name), checked)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, MeanOf):
        return True
    return trees.is_array_or_number(value) and not trees.is_key(value) and np.ndim(value) == 0
