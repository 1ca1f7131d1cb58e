"""Several steps in one call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.state import TrainState
from jstep.training.step import TrainStep, split_constants


def scan_steps(train_step: Callable[..., Any], length: int | None = None) -> Callable[..., Any]:
    """K steps in one call: `f(state, *stacked) -> (state, stacked metrics)`.

    Args:
        train_step: What `minimize` returned, or any function `(state, *args) -> (state, metrics)`.
        length: K, where train_step takes no args to tell it.

    Returns:
        A function whose args are stacked on a leading axis of size K, and whose metrics come back so. Of a compiled
        step it is a compiled one that donates likewise; of a plain function, a plain one.

    Raises:
        TypeError: `train_step` is no function.
        ValueError: The leading axes of the args differ, or there is none.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state, metrics = jstep.scan_steps(train_step)(state, jnp.ones(3))
        >>> print(state.global_step, metrics["loss"])
        3 [1.     0.25   0.0625]
    """
    if not callable(train_step):
        raise TypeError(f"train_step={train_step!r}: must be a function (state, *args) -> (state, metrics)")
    known: set[str] = set()

    def scanned(step: Callable[..., Any]) -> Callable[..., Any]:
        def scanned_steps(state: TrainState, *stacked: Any) -> tuple[TrainState, Any]:
            k = _leading_size(stacked, length)
            constants: dict[str, Any] = {}

            def body(state: TrainState, args: Any) -> tuple[TrainState, Any]:
                state, metrics = step(state, *args)
                if isinstance(metrics, dict):
                    metrics, fixed = split_constants(metrics)
                    constants.update(fixed)
                return state, metrics

            state, metrics = jax.lax.scan(body, state, stacked, length=k)
            # Computed, since their length is that of the call: the next one may make fewer steps.
            known.update(constants)
            if constants:
                metrics = metrics | {name: jnp.full((k, *np.shape(v)), v, v.dtype) for name, v in constants.items()}
            return state, metrics

        return scanned_steps

    if not isinstance(train_step, TrainStep):
        return scanned(train_step)
    return TrainStep(
        scanned(train_step.__wrapped__),
        donate=train_step.donate,
        known=known,
        placed=lambda stacked: scanned(train_step.placed(jax.tree.map(_without_step_axis, stacked))),
    )


def _without_step_axis(sharding: Any) -> Any:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def last_of(stacked: Any) -> Any:
    """The values of the last of K steps, in one dispatch on this process alone: others may not ask for them."""

    def here(leaf: Any) -> Any:
        is_global = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and leaf.is_fully_replicated
        return leaf.addressable_data(0) if is_global else leaf

    return _last_of(jax.tree.map(here, stacked))


@jax.jit
def _last_of(stacked: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[-1], stacked)


def _leading_size(stacked: Any, length: int | None) -> int:
    sizes = {}
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise TypeError(f"length={length!r}: must be an integer, got {type(length).__name__}")
    if length is not None and length < 1:
        raise ValueError(f"length={length}: must be ≥ 1")
    for path, leaf in trees.leaves_with_paths(stacked):
        if np.ndim(leaf) == 0:
            raise ValueError(f"scan_steps: argument {path} is a scalar; stack the values of K steps on a leading axis")
        sizes[path] = np.shape(leaf)[0]
    if length is not None:
        sizes["length"] = length
    if not sizes:
        raise ValueError("scan_steps: the step takes no args, so say how many: scan_steps(train_step, length=K)")
    (first, k), *rest = sizes.items()
    for path, size in rest:
        if size != k:
            raise ValueError(
                f"scan_steps: the leading axes differ: argument {first} has {k}, argument {path} has {size}"
            )
    return k
