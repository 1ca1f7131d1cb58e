"""The metrics that `minimize(metrics=…)` requests: norms, the noise scale, and functions of gradients and updates."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jstep.core import device_values, indexed_slices, trees
from jstep.core.calls import typed
from jstep.core.checks import as_function, kind
from jstep.core.exceptions import note
from jstep.core.meshes import Attempts
from jstep.core.trees import Array, Params, Updates
from jstep.differentiate.clipping import global_norm
from jstep.optimizers import guards

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

    def leaf(x: Any) -> Any:
        if trees.is_none(x):
            return None
        return x.to_dense() if isinstance(x, indexed_slices.RowsInOrder) else x

    return jax.tree.map(leaf, updates, is_leaf=indexed_slices.is_slices)


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
        raise TypeError(
            f"metrics={metrics!r}: must be names among {names}, or functions {_FORM}, got {type(metrics).__name__}"
        )
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
        device_values.refuse_wide(dict(found), name)
        return dict(found)

    return functools.partial(Attempts(name), run)
