"""Several training steps in one call, compiled as a loop."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_function, as_int
from jstep.core.meshes import dims_of
from jstep.core.placement import Unroll, as_unroll, scan
from jstep.state.train_state import TrainState
from jstep.training.constants import Constants
from jstep.training.step import PureStep, TrainStep, pure


def scan_steps(train_step: Callable[..., Any], length: int | None = None, unroll: Unroll = None) -> Callable[..., Any]:
    """Return a function that runs K steps in one call: `f(state, *stacked) -> (state, stacked metrics)`.

    Args:
        train_step: A step of `minimize`, or any function `(state, *args) -> (state, metrics)`.
        length: K, required if train_step takes no args.
        unroll: Number of steps per iteration of the compiled loop, as in `jax.lax.scan`; True to unroll it entirely.
            None chooses automatically: 1, or all K if XLA runs an operation on a slow path inside a loop, as with
            convolutions on a CPU (10 to 30 times slower; unrolled, they take as long to compile as K steps).

    Returns:
        A function whose args and metrics are stacked on a leading axis of size K. If train_step is compiled, so is
        the function, and it donates the state in the same way; otherwise it is a plain function.

    Raises:
        TypeError: `train_step` is not a function, or `length` or `unroll` is not an integer.
        ValueError: The leading axes of the args differ, are missing, or are empty.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state, metrics = jstep.scan_steps(train_step)(state, jnp.ones(3))
        >>> print(state.global_step, metrics["loss"])
        3 [1.     0.25   0.0625]
    """
    as_function(train_step, "train_step", "(state, *args) -> (state, metrics)")
    length = None if length is None else as_int(length, "length", 1)
    unroll = as_unroll(unroll)
    step = pure(train_step)

    def parts(state: TrainState, stacked: tuple[Any, ...], batch_specs: Any) -> tuple[TrainState, Any, Constants]:
        k = _leading_size(stacked, length)
        batch_specs = None if batch_specs is None else jax.tree.map(without_step_axis, batch_specs)

        def body(state: TrainState, args: Any) -> tuple[TrainState, Any]:
            state, computed, constants = step.parts(state, args, batch_specs)
            return state, (computed, constants)

        state, (computed, constants) = scan(body, state, stacked, k, unroll)
        return state, computed, constants.repeated(k)

    scanned = PureStep(
        parts,
        name=f"{step.__name__}s",
        looks_at_rows=step.looks_at_rows,
        leading_axes=step.leading_axes + 1,
        lanes=step.lanes,
    )
    return TrainStep(scanned, donate=train_step.donate) if isinstance(train_step, TrainStep) else scanned


def without_step_axis(sharding: Any) -> Any:
    """The sharding of one row of an argument that is stacked over steps."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*dims_of(sharding.spec)[1:]))
    return sharding


def _leading_size(stacked: Any, length: int | None) -> int:
    sizes = {}
    for path, leaf in trees.leaves_with_paths(stacked):
        if np.ndim(leaf) == 0:
            raise ValueError(f"scan_steps: argument {path} is a scalar; stack the values of K steps on a leading axis")
        sizes[path] = np.shape(leaf)[0]
    if length is not None:
        sizes["length"] = length
    if not sizes:
        raise ValueError("scan_steps: the step takes no args, so give the number: scan_steps(train_step, length=K)")
    (first, k), *rest = sizes.items()
    for path, size in rest:
        if size != k:
            raise ValueError(
                f"scan_steps: the leading axes differ: argument {first} has {k}, argument {path} has {size}"
            )
    if k == 0:
        raise ValueError(f"scan_steps: the leading axis of argument {first} is empty; there is no step to run")
    return k
