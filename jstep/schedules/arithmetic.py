"""Exact arithmetic of schedules, and the validation of their arguments."""

import inspect
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, as_bool, as_number, describe_type, format_value
from jstep.core.device_values import as_scalar
from jstep.core.meshes import exempts_transfers
from jstep.core.recorded_calls import RecordedCall, RememberedFunction, record_calls
from jstep.core.trees import Array

# Validation of the arguments of schedules: numbers, exact numbers of steps, and steps themselves.


def as_steps(step: object) -> Array:
    """Convert a step (or several) to an integer array; traced negative steps become 0."""
    dtype = trees.default_int()
    step_dtype = step.dtype if hasattr(step, "dtype") else np.asarray(step).dtype
    if not jnp.issubdtype(step_dtype, jnp.integer):
        raise TypeError(
            f"step={step!r}: must be an integer or an array of integers, got dtype {step_dtype}"
        )
    value = trees.concrete(step)
    if value is not None:
        # Independent of the mesh of the step and of the current mesh.
        step = value
        if value.size and value.min() < 0:
            raise ValueError(
                f"step={value.min()}: must be ≥ 0, it counts the training steps completed"
            )
        if value.size and value.max() > np.iinfo(dtype).max:
            raise ValueError(
                f"step={value.max()}: does not fit {np.dtype(dtype).name}; enable jax_enable_x64"
            )
    # Clamp before the cast: an unsigned or wider type would otherwise wrap around.
    array = jnp.asarray(step)
    if array.dtype != dtype and np.iinfo(array.dtype).max > np.iinfo(dtype).max:
        array = jnp.minimum(array, np.iinfo(dtype).max)
    return jnp.maximum(array.astype(dtype), 0)


_P = ParamSpec("_P")
_T = TypeVar("_T")

NO_STEP = (
    "a schedule of jstep is made without the step, and called with it later: "
    "leave out TF's global_step"
)


def _remember(schedule: Any, call: RecordedCall) -> Any:
    for argument in (*call.args, *call.kwargs.values()):
        if schedule is argument:
            # A warmup of 0 steps returns its argument, which has its own `repr`.
            return schedule
    return RememberedFunction(exempts_transfers(schedule), call)


def makes_schedule(positional: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make a decorator of functions, so that the `repr` of their schedules is the call.

    An argument too many is explained: schedules of `tf.train` also accept the step.
    """
    return record_calls(_remember, positional, _explain_order)


def _explain_order(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
) -> NoReturn:
    names = list(inspect.signature(function).parameters)
    has_too_many = len(args) > len(names) > 1
    # An argument that is given by position as well, or TF's name of the step.
    suspicious_names = [*names[: len(args)], "global_step", "x"]
    if has_too_many or not kwargs.keys().isdisjoint(suspicious_names):
        raise TypeError(f"{error}; {NO_STEP}") from None
    raise error


# In `tf.train` the step is the second argument, after the rate. In such a call a number of steps is
# passed for a flag, a rate, a ratio or a fraction.


def check_count(name: str, value: Any, most: float, meaning: str) -> None:
    if isinstance(value, int | np.integer) and value > most:
        raise TypeError(
            f"{name}={format_value(value)}: must be {meaning}, at most {most:g}; {NO_STEP}"
        )


def _refuse_step(name: str, value: object) -> None:
    if isinstance(value, jax.Array | np.ndarray) and jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{name}={format_value(value)}: must be a plain number, "
            f"got {describe_type(value)}; {NO_STEP}"
        )


def flag(name: str, value: object) -> bool:
    try:
        return as_bool(value, name)
    except TypeError as error:
        raise TypeError(f"{error}; {NO_STEP}") from None


def as_fraction(name: str, value: object, *, zero: bool = False, meaning: str = "") -> Fraction:
    """Convert a positive, finite number of steps to a fraction."""
    if trees.is_traced(value):
        raise TypeError(
            f"{name} is traced: must be a plain number, so that steps are divided "
            f"exactly; {NO_STEP}"
        )
    expected = "a number ≥ 0" if zero else "a positive number"
    number = as_number(value, name, low=0, above=not zero, expected=expected, meaning=meaning)
    exact = np.asarray(value).item()
    # The decimal value: 0.1 is exactly 1/10, not the nearest float.
    return Fraction(exact) if isinstance(exact, int) else Fraction(repr(number))


def as_tf_duration(name: str, value: object, schedule: Callable[..., Any]) -> Fraction:
    """Convert the length of a decay of `tf.train`; reject a step or a rate."""
    _refuse_step(name, value)
    length = as_fraction(name, value, meaning=NO_STEP)
    return length if length >= 1 else as_step_count(name, value, schedule)


def as_step_count(
    name: str, value: Any, schedule: Callable[..., Any], *, zero: bool = False
) -> Fraction:
    """Validate a number of steps; a float, as in another library's argument order, is rejected."""
    order = (
        "the arguments are "
        f"{schedule.__name__}({', '.join(inspect.signature(schedule).parameters)})"
    )
    is_float = isinstance(value, float) or (
        trees.is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)
    )
    if is_float:
        raise TypeError(
            f"{name}={format_value(value)}: must be an integer, a number of steps, "
            f"got {describe_type(value)}; {order}"
        )
    try:
        return as_fraction(name, value, zero=zero)
    except TypeError as error:
        raise TypeError(f"{error}; {order}") from None


def numbers(**values: Any) -> list[Any]:
    return [as_float_or_array(name, value) for name, value in values.items()]


def as_tf_number(name: str, value: object, **bounds: Unpack[Bounds]) -> Any:
    """Convert a number of a schedule of `tf.train`; reject integer arrays, which are steps."""
    _refuse_step(name, value)
    return as_float_or_array(name, value, **bounds)


def as_float_or_array(name: str, value: object, **bounds: Unpack[Bounds]) -> Any:
    # Infinities are allowed, unless the bounds say otherwise.
    all_bounds: Bounds = {"finite": False, **bounds}
    number = as_scalar(value, name, **all_bounds)
    if isinstance(number, float):
        return number
    return jnp.asarray(number).astype(trees.default_float())


# Exact step arithmetic: steps are split into whole and fractional periods before conversion to
# float.
#
# float32 cannot distinguish 16 777 216 from 16 777 217, so `step / decay_steps` in floats is
# inexact, and a staircase changes at the wrong step. Here a step is divided by a rational period in
# integers.


def progress(step: Array, start: Fraction, end: Fraction) -> tuple[Array, Array]:
    """The fractions of an interval that have passed and remain, each precise near 0."""
    largest = int(np.iinfo(step.dtype).max)
    # Steps are multiplied by the denominator of the start, so that their distance from it is an
    # integer.
    scale = start.denominator if math.ceil(end) * start.denominator <= largest else 1
    first = max(min(round(start * scale), largest), -largest)
    steps = jnp.minimum(step, min(math.ceil(end), largest // scale)) * scale
    periods = divide_steps(jnp.maximum(steps, max(first, 0)) - first, (end - start) * scale)
    is_over = periods.whole > 0
    return jnp.where(is_over, 1.0, periods.fraction), jnp.where(is_over, 0.0, periods.remaining)


def interpolate(first: Any, last: Any, weights: tuple[Array, Array]) -> Array:
    """Interpolate from `first` to `last` by their weights; both ends are exact."""
    first_weight, last_weight = weights
    # From the nearer end, so that values near a small end keep full precision.
    near_last = last + (first - last) * first_weight
    near_first = first + (last - first) * last_weight
    value = jnp.where(first_weight < last_weight, near_last, near_first)
    return jnp.where(last_weight == 0, first, jnp.where(first_weight == 0, last, value))


def ramp(step: Array, length: Fraction) -> Array:
    """Linear warmup: min(1, (step + 1) / length), for a length of at least 1."""
    # The largest integer plus 1 would wrap around.
    update = jnp.minimum(step, int(np.iinfo(step.dtype).max) - 1) + 1
    passed, _ = progress(update, Fraction(0), length)
    return passed


def half_cosine(remaining: Array) -> Array:
    """(1 + cos π(1 − remaining)) / 2 as sin²(π·remaining / 2), which is accurate near the end."""
    return jnp.square(jnp.sin(remaining * (math.pi / 2)))


def _linear_weights(passed: Array, left: Array) -> tuple[Array, Array]:
    return left, passed


def _cosine_weights(passed: Array, left: Array) -> tuple[Array, Array]:
    return half_cosine(left), half_cosine(passed)


def _sqrt_weights(passed: Array, left: Array) -> tuple[Array, Array]:
    # 1 − √x without the cancellation near x = 1.
    return left / (1 + jnp.sqrt(passed)), jnp.sqrt(passed)


SHAPES: Mapping[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "linear": _linear_weights,
    "cosine": _cosine_weights,
    "sqrt": _sqrt_weights,
}
"""Name → weights of the first and the last value of a curve, for `interpolate`."""


class Periods(NamedTuple):
    """A step in units of a period, in floats: `whole + fraction`, `remaining = 1 - fraction`."""

    whole: Array
    fraction: Array
    remaining: Array

    def passed(self, *, staircase: bool) -> Array:
        return self.whole if staircase else self.whole + self.fraction


def divide_steps(step: Array, length: Fraction) -> Periods:
    """Divide an integer step by a period, in integers: step / length = whole + fraction."""
    largest = int(np.iinfo(step.dtype).max)
    dtype = trees.default_float()
    if length > largest:
        # No step reaches the end of the first period.
        fraction = step.astype(dtype) / jnp.asarray(float(length), dtype)
        return Periods(jnp.zeros_like(fraction), fraction, 1 - fraction)
    if length.numerator * length.denominator > largest:
        # The nearest fraction whose products fit the dtype of the step.
        length = length.limit_denominator(max(1, min(largest, math.isqrt(int(largest / length)))))
        length = max(length, Fraction(1, largest))
    # With length = n/d and step = u·n + v: step / length = u·d + v·d/n, and every product fits the
    # dtype of the step.
    n = length.numerator
    d = length.denominator
    # lax.div rounds towards zero: for steps ≥ 0 the result of //, in fewer operations.
    divisor = jnp.full_like(step, n)
    u = jax.lax.div(step, divisor)
    v = jax.lax.rem(step, divisor)
    carry = jax.lax.div(v * d, divisor)
    remainder = jax.lax.rem(v * d, divisor)
    float_n = jnp.asarray(n, dtype)
    return Periods(
        whole=u.astype(dtype) * d + carry.astype(dtype),
        fraction=remainder.astype(dtype) / float_n,
        remaining=(n - remainder).astype(dtype) / float_n,
    )


def power(base: Any, periods: Periods, *, staircase: bool) -> Array:
    """The power base^passed; the logarithm of a number is computed in double precision."""
    exponent = periods.passed(staircase=staircase)
    if isinstance(base, float) and 0 < base < math.inf:
        return jnp.exp(exponent * jnp.asarray(math.log(base), exponent.dtype))
    return jnp.power(base, exponent)
