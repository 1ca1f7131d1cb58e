"""Exponential moving averages of parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_int
from jstep.core.meshes import on_any_mesh
from jstep.core.types import Array, Held, Params, ScalarOrSchedule, Step
from jstep.optimizers.held import check_prefix
from jstep.optimizers.hyper import checked, value_at

NAME = "ExponentialMovingAverage"


@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage:
    """Moving average: avg −= (1 − d) · (avg − p), d = decay, or min(decay, (1 + n) / (10 + n)) with num_updates.

    Attributes:
        decay: The decay in [0, 1], usually close to 1, such as 0.999; a schedule, read at the step before the update;
            or `held`, for `with_moving_average` only.
        num_updates: Whether the decay starts low and grows with the number n of updates, so that averages
            move faster early in training.
        zero_debias: Whether averages start from zero and are bias-corrected: the rate 1 − d becomes
            (1 − d) / (1 − dⁿ), where n is their age, so that the first average equals the first value.
        name: The name of the slot, and the last part of `average_name`.
        start_step: The averages equal the parameters up to and including this step.
        every: After start_step, the averages move only at the steps start_step + every, start_step + 2·every, ….
            With decay=1.0 and zero_debias they are then the mean of the parameters at those steps:
            stochastic weight averaging.

    Raises:
        TypeError: `decay` is not a number or a schedule, `name` is not a string, or start_step or every is not an
            integer.
        ValueError: A number is out of range, or `name` is empty.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> ema = jstep.ExponentialMovingAverage(0.5)
        >>> averages = ema.init({"w": jnp.float32(0.0)})
        >>> print(ema.apply(averages, {"w": jnp.float32(1.0)})["w"])
        0.5

    Source: Polyak and Juditsky (1992); Kingma and Ba, "Adam" (2014), section 3, for the bias;
    `tf.train.ExponentialMovingAverage`.
    """

    decay: ScalarOrSchedule
    num_updates: bool = False
    zero_debias: bool = False
    name: str = NAME
    start_step: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", checked("decay", self.decay, low=0, high=1))
        for flag in ("num_updates", "zero_debias"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(
                    f"{flag}={getattr(self, flag)!r}: must be True or False; pass the number of updates to "
                    "apply(averages, params, num_updates=n)"
                )
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: must be a string")
        check_prefix("name", self.name)
        object.__setattr__(self, "start_step", as_int(self.start_step, "start_step", at_least=0))
        object.__setattr__(self, "every", as_int(self.every, "every", at_least=1))

    @on_any_mesh
    def init(self, params: Params) -> Any:
        """The initial averages: copies of the parameters, or zeros with zero_debias and start_step=0.

        Args:
            params: Any tree. float16 and bfloat16 leaves are averaged in float32.

        Returns:
            A tree with the structure of params; None for leaves that cannot be averaged, such as integers.
        """

        def leaf(p: Any) -> Any:
            if not trees.is_trainable(p):
                return None
            dtype = trees.compute_dtype(jnp.result_type(p))
            return (
                jnp.zeros_like(p, dtype=dtype)
                if self.zero_debias and not self.start_step
                else jnp.array(p, dtype=dtype, copy=True)
            )

        return jax.tree.map(leaf, params)

    @on_any_mesh
    def apply(self, averages: Any, params: Params, num_updates: Step | None = None, *, age: Step | None = None) -> Any:
        """Update the averages with new values of the parameters.

        Args:
            averages: The averages returned by `init` or `apply`.
            params: The new values.
            num_updates: The number n of updates after which params have these values, ≥ 1 for the first.
            age: The number of values averaged so far, including this one; by default derived from `num_updates`.

        Returns:
            New averages.

        Raises:
            TypeError: `decay` is held.
            ValueError: num_updates is required but missing, or is negative; or the structures differ.
        """
        waits = self.start_step > 0 or self.every > 1
        needed = self.num_updates or waits or callable(self.decay) or (self.zero_debias and age is None)
        if num_updates is None and needed:
            raise ValueError(
                "num_updates=None: an average with num_updates, zero_debias, start_step, every or a schedule needs the "
                "number of updates, as in ema.apply(averages, params, num_updates=state.global_step)"
            )
        if isinstance(self.decay, Held):
            raise TypeError(
                f"decay=held({self.decay.name!r}, …): its value is in the state: use "
                "jstep.with_moving_average(optimizer, ema), which reads it, or a number or a schedule"
            )
        for name, value in (("num_updates", num_updates), ("age", age)):
            if value is not None:
                _count(name, value)
        rate = self._rate(num_updates, self.age_at(num_updates) if age is None and self.zero_debias else age)
        if waits:
            since = jnp.asarray(num_updates) - self.start_step
            still = jnp.where(since % self.every == 0, jnp.asarray(rate, trees.default_float()), 0.0)
            rate = jnp.where(since <= 0, 1.0, still)
        old = trees.flatten_like(params, averages, "averages")
        leaves, treedef = trees.flatten(params)
        return treedef.unflatten(
            [avg if avg is None else _moved(avg, p, rate) for avg, p in zip(old, leaves, strict=True)]
        )

    def age_at(self, num_updates: Step | None, start_step: Step = 0) -> Step:
        """The number of values in the averages after an update, including the value from that update.

        Args:
            num_updates: The number n of updates, ≥ 1 for the first.
            start_step: The number of updates when the averages were created.
        """
        if num_updates is None:
            raise ValueError("num_updates=None: the number of updates is required")
        after = jnp.asarray(num_updates)
        first = jnp.asarray(start_step).astype(after.dtype)
        if self.start_step:  # else, several updates in a step make start_step negative
            first = jnp.maximum(first, self.start_step)
        moves = (after - self.start_step) // self.every - (first - self.start_step) // self.every
        return jnp.maximum(moves, 1)

    def _rate(self, num_updates: Step | None, age: Step | None) -> Any:
        # In terms of 1 − d, because computing 1 − d for d near 1 would lose digits.
        decay: Any = self.decay
        if callable(decay):
            decay = value_at("decay", decay, jnp.asarray(num_updates) - 1)
        rate: Any = 1 - decay
        if self.num_updates:
            rate = jnp.maximum(jnp.asarray(rate, trees.default_float()), 9 / (10 + _count("num_updates", num_updates)))
        if self.zero_debias:
            n = jnp.maximum(_count("age", age), 1.0)
            rate = jnp.asarray(rate, n.dtype)
            # 1 − dⁿ; for d = 1 the limit of the quotient is 1/n, the plain mean.
            passed = -jnp.expm1(n * jnp.log1p(-rate))
            rate = jnp.where(rate > 0, rate / jnp.where(rate > 0, passed, 1.0), 1 / n)
        return rate

    def average_name(self, path: str) -> str:
        """The name of the average of a parameter: `path/name`.

        Example:
            >>> import jstep
            >>> jstep.ExponentialMovingAverage(0.9).average_name("dense/kernel")
            'dense/kernel/ExponentialMovingAverage'
        """
        return f"{path}/{self.name}" if path else self.name


def _count(name: str, value: Any) -> Array:
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise TypeError(f"{name}={value!r}: must be an integer")
    number = trees.concrete(value)
    if number is not None and number < 0:
        raise ValueError(f"{name}={number}: must be ≥ 0")
    return jnp.asarray(value).astype(trees.default_float())


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def _moved(average: Array, p: Array, rate: Array) -> Array:
    rate, p = jnp.asarray(rate).astype(average.dtype), p.astype(average.dtype)
    moved = average - rate * (average - p)
    # Exactly the parameter or exactly the average, without rounding or 0 · ∞.
    return jnp.where(rate >= 1, p, jnp.where(rate > 0, moved, average))
