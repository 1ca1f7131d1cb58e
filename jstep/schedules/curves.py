"""Schedules by name: decays, cosine, cycles, and schedules with a warmup."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, as_choice, as_number
from jstep.core.trees import Number, Schedule, Step
from jstep.schedules import arithmetic
from jstep.schedules.arithmetic import as_steps
from jstep.schedules.compose import join, linear_warmup, shift

# Decays of `tf.train` (exponential, natural exponential, inverse time, polynomial) and the linear
# schedule.


@arithmetic.makes_schedule()
def exponential_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Exponential decay: learning_rate · decay_rate^(step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The number of steps of one factor `decay_rate`; > 0, may be fractional.
        decay_rate: The factor, ≥ 0.
        staircase: Whether to round step / decay_steps down.

    Raises:
        TypeError: `staircase` is not a bool, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0 or `decay_rate` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.exponential_decay(0.1, 10, 2.0)
        >>> print(schedule(10))
        0.2

    Source: `tf.train.exponential_decay`.
    """
    decay = _as_decay(learning_rate, decay_steps, decay_rate, staircase, low=0, finite=True)

    def schedule(step: Step, /) -> Any:
        periods = arithmetic.divide_steps(as_steps(step), decay.steps)
        return decay.initial * arithmetic.power(decay.rate, periods, staircase=decay.staircase)

    return schedule


@arithmetic.makes_schedule()
def natural_exp_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Natural exponential decay: learning_rate · exp(−decay_rate · step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time.
        staircase: Whether to round step / decay_steps down.

    Raises:
        TypeError: `staircase` is not a bool, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> print(jstep.natural_exp_decay(1.0, 10, 0.5)(20))
        0.36787945

    Source: `tf.train.natural_exp_decay`.
    """
    decay = _as_decay(learning_rate, decay_steps, decay_rate, staircase)

    def schedule(step: Step, /) -> Any:
        periods = arithmetic.divide_steps(as_steps(step), decay.steps)
        return decay.initial * jnp.exp(-decay.rate * periods.passed(staircase=decay.staircase))

    return schedule


@arithmetic.makes_schedule()
def inverse_time_decay(
    learning_rate: Number, decay_steps: float, decay_rate: Number, staircase: bool = False
) -> Schedule:
    """Inverse time decay: learning_rate / (1 + decay_rate · step / decay_steps).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The unit of time in steps; > 0, may be fractional.
        decay_rate: The rate of decay per unit of time, ≥ 0.
        staircase: Whether to round step / decay_steps down.

    Raises:
        TypeError: `staircase` is not a bool, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0 or `decay_rate` < 0.

    Example:
        >>> import jstep
        >>> print(jstep.inverse_time_decay(1.0, 10, 0.5)(20))
        0.5

    Source: `tf.train.inverse_time_decay`.
    """
    decay = _as_decay(learning_rate, decay_steps, decay_rate, staircase, low=0, finite=True)

    def schedule(step: Step, /) -> Any:
        periods = arithmetic.divide_steps(as_steps(step), decay.steps)
        return decay.initial / (1 + decay.rate * periods.passed(staircase=decay.staircase))

    return schedule


class _Decay(NamedTuple):
    """The checked arguments of a decay: its value at step 0, unit of time and rate per unit."""

    initial: Any
    steps: Fraction
    rate: Any
    staircase: bool


def _as_decay(
    learning_rate: object,
    decay_steps: object,
    decay_rate: object,
    staircase: object,
    **bounds: Unpack[Bounds],
) -> _Decay:
    decay = _Decay(
        initial=arithmetic.as_tf_number("learning_rate", learning_rate),
        steps=arithmetic.as_fraction("decay_steps", decay_steps, meaning=arithmetic.NO_STEP),
        rate=arithmetic.as_tf_number("decay_rate", decay_rate, **bounds),
        staircase=arithmetic.flag("staircase", staircase),
    )
    arithmetic.check_count("decay_rate", decay_rate, 100, "a rate")
    return decay


@arithmetic.makes_schedule()
def polynomial_decay(
    learning_rate: Number,
    decay_steps: float,
    end_learning_rate: Number = 0.0001,
    power: Number = 1.0,
    cycle: bool = False,
) -> Schedule:
    """Polynomial decay: (learning_rate − end) · (1 − step / decay_steps)^power + end.

    It is constant from decay_steps.

    Args:
        learning_rate: The value at step 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        end_learning_rate: The value at the end.
        power: The exponent, ≥ 0; 1 is a linear decay.
        cycle: Whether to repeat the decay: decay_steps is extended to its smallest multiple ≥ step.

    Raises:
        TypeError: `cycle` is not a bool, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0 or `power` < 0.

    Example:
        >>> import jstep
        >>> print(jstep.polynomial_decay(1.0, 100, end_learning_rate=0.0)(25))
        0.75

    Source: `tf.train.polynomial_decay`.
    """
    start = arithmetic.as_tf_number("learning_rate", learning_rate)
    end = arithmetic.as_tf_number("end_learning_rate", end_learning_rate)
    length = arithmetic.as_tf_duration("decay_steps", decay_steps, polynomial_decay)
    exponent = arithmetic.as_tf_number("power", power, low=0, finite=True)
    cycle = arithmetic.flag("cycle", cycle)
    largest = max(1.0, abs(start)) if isinstance(start, float) else 1.0
    arithmetic.check_count("end_learning_rate", end_learning_rate, largest, "a rate")

    def schedule(step: Step, /) -> Any:
        step = as_steps(step)
        _, left = arithmetic.progress(step, Fraction(0), length)
        if cycle:
            # 1 − step / (decay_steps · ⌈step / decay_steps⌉); the ceiling is 1 at step 0, as in TF.
            periods = arithmetic.divide_steps(step, length)
            is_end = (periods.fraction == 0) & (step > 0)
            left = jnp.where(is_end, 0.0, periods.remaining / (periods.whole + 1))
        is_linear = isinstance(exponent, float) and exponent == 1.0
        raised = left if is_linear else jnp.power(left, exponent)
        return (start - end) * raised + end

    return schedule


@arithmetic.makes_schedule()
def linear(init_value: Number, end_value: Number, steps: int) -> Schedule:
    """Linear schedule: init_value + (end_value − init_value) · step / steps; constant from `steps`.

    Args:
        init_value: The value at step 0.
        end_value: The value at step `steps` and later.
        steps: The number of steps, > 0.

    Raises:
        ValueError: `steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear(0.0, 1.0, 4)
        >>> print([float(schedule(n)) for n in (0, 1, 4, 9)])
        [0.0, 0.25, 1.0, 1.0]

    Source: `optax.linear_schedule`, `torch.optim.lr_scheduler.LinearLR`. As a warmup from 0, unlike
    `linear_warmup`, its first update has rate 0.
    """
    start, end = arithmetic.numbers(init_value=init_value, end_value=end_value)
    return _curve(start, end, arithmetic.as_step_count("steps", steps, linear), "linear")


def _curve(
    first: object, last: object, length: Fraction, shape: str, start: Fraction = Fraction(0)
) -> Schedule:
    def schedule(step: Step, /) -> Any:
        weights = arithmetic.SHAPES[shape](
            *arithmetic.progress(as_steps(step), start, start + length)
        )
        return arithmetic.interpolate(first, last, weights)

    return schedule


# Cosine decays of `tf.train`: single, with restarts, and linear cosine.
#
# (1 + cos πx) / 2 is computed as sin²(π(1 − x) / 2), with 1 − x exact: the first form loses all
# precision near the end of a decay.


def _fraction(name: str, value: object) -> Any:
    number = arithmetic.as_tf_number(name, value)
    if isinstance(number, float) and number > 1:
        raise TypeError(f"{name}={value!r}: must be a fraction, at most 1; {arithmetic.NO_STEP}")
    return number


@arithmetic.makes_schedule()
def cosine_decay(learning_rate: Number, decay_steps: float, alpha: Number = 0.0) -> Schedule:
    """Cosine decay: learning_rate · ((1 − alpha) · (1 + cos(π · x)) / 2 + alpha).

    Here x = min(step / decay_steps, 1).

    Args:
        learning_rate: The value at step 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        alpha: The value at the end, as a fraction of `learning_rate`; ≤ 1.

    Raises:
        TypeError: `alpha` > 1, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cosine_decay(1.0, 100)
        >>> print(f"{schedule(0):.2f} {schedule(50):.2f} {schedule(100):.2f}")
        1.00 0.50 0.00

    Source: Loshchilov and Hutter, "SGDR" (2016); `tf.train.cosine_decay`.
    """
    start = arithmetic.as_tf_number("learning_rate", learning_rate)
    length = arithmetic.as_tf_duration("decay_steps", decay_steps, cosine_decay)
    floor = _fraction("alpha", alpha)

    def schedule(step: Step, /) -> Any:
        _, left = arithmetic.progress(as_steps(step), Fraction(0), length)
        return start * ((1 - floor) * arithmetic.half_cosine(left) + floor)

    return schedule


@arithmetic.makes_schedule()
def cosine_decay_restarts(
    learning_rate: Number,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: Number = 0.0,
) -> Schedule:
    """Cosine decay with warm restarts: period i lasts first_decay_steps · t_mul^i, from m_mul^i.

    value = learning_rate · ((1 − alpha) · m_mul^i · (1 + cos(π · x)) / 2 + alpha), where x is the
    elapsed fraction of period i.

    Args:
        learning_rate: The value at step 0.
        first_decay_steps: The length of the first period in steps; ≥ 1, may be fractional.
        t_mul: The ratio of the length of each period to the previous one, ≥ 1.
        m_mul: The ratio of the initial value of each period to the previous one, in [0, 1].
        alpha: The value at the end of a period, as a fraction of `learning_rate`; ≤ 1.

    Raises:
        TypeError: `alpha` or `m_mul` > 1, or the arguments are in TF's order, with the step.
        ValueError: `first_decay_steps` ≤ 0, `t_mul` < 1 (or so close to 1 that 100 000 periods are
            possible), or `m_mul` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cosine_decay_restarts(1.0, 10)
        >>> print([round(float(schedule(n)), 2) for n in (0, 5, 10, 20, 30)])
        [1.0, 0.5, 1.0, 0.5, 1.0]

    Source: Loshchilov and Hutter, "SGDR" (2016); `tf.train.cosine_decay_restarts`.
    """
    start = arithmetic.as_tf_number("learning_rate", learning_rate)
    length = arithmetic.as_tf_duration(
        "first_decay_steps", first_decay_steps, cosine_decay_restarts
    )
    floor = _fraction("alpha", alpha)
    stretch = arithmetic.as_fraction("t_mul", t_mul)
    height = as_number(_fraction("m_mul", m_mul), "m_mul", low=0, expected="a plain number")
    arithmetic.check_count("t_mul", t_mul, 8, "a ratio")
    if stretch < 1:
        raise ValueError(f"t_mul={t_mul}: must be ≥ 1, or the periods would shrink to nothing")

    def periodic(step: Step, /) -> Any:
        periods = arithmetic.divide_steps(as_steps(step), length)
        peak = 1.0 if height == 1.0 else arithmetic.power(height, periods, staircase=True)
        return start * ((1 - floor) * peak * arithmetic.half_cosine(periods.remaining) + floor)

    def growing(step: Step, /) -> Any:
        step = as_steps(step)
        real = trees.default_float()
        last = int(np.iinfo(step.dtype).max)
        begins = _restarts(length, stretch, last)
        firsts = [math.ceil(begin) for begin in begins[1:-1]]
        index = jnp.searchsorted(jnp.asarray(np.array(firsts, step.dtype)), step, side="right")
        # remaining = (end − step) / length; the whole part of the end is subtracted in integers.
        whole_ends = [min(math.floor(end), last) for end in begins[1:]]
        rests = [float(end - whole) for end, whole in zip(begins[1:], whole_ends, strict=True)]
        lengths = [float(end - begin) for begin, end in itertools.pairwise(begins)]
        left = (jnp.asarray(np.array(whole_ends, step.dtype))[index] - step).astype(real)
        remaining = (left + jnp.asarray(rests, real)[index]) / jnp.asarray(lengths, real)[index]
        peaks = jnp.asarray(np.power(height, np.arange(len(lengths))), real)[index]
        return start * ((1 - floor) * peaks * arithmetic.half_cosine(remaining) + floor)

    if stretch == 1:
        return periodic
    _restarts(length, stretch, int(np.iinfo(trees.default_int()).max))
    return growing


def _restarts(length: Fraction, stretch: Fraction, last: int) -> list[Fraction]:
    """Return the starts of the periods, up to the first beyond `last`."""
    begins = [Fraction(0)]
    while begins[-1] <= last:
        if len(begins) > 100_000:
            raise ValueError(
                f"t_mul={float(stretch)}: more than 100 000 periods in {last} steps; use t_mul=1.0"
            )
        begins.append(begins[-1] + length)
        # A millionth of a step is enough; the exact fraction would grow without bound.
        length = Fraction(round(length * stretch * 2**20), 2**20)
    return begins


@arithmetic.makes_schedule()
def linear_cosine_decay(
    learning_rate: Number,
    decay_steps: float,
    num_periods: Number = 0.5,
    alpha: Number = 0.0,
    beta: Number = 0.001,
) -> Schedule:
    """Linear cosine decay: learning_rate · ((alpha + 1 − x) · (1 + cos(2π · n · x)) / 2 + beta).

    Here x = min(step / decay_steps, 1), and n = num_periods.

    Args:
        learning_rate: The value at step 0 if `alpha` and `beta` are 0.
        decay_steps: The length of the decay in steps; ≥ 1, may be fractional.
        num_periods: The number of cosine periods in the decay.
        alpha: Added to the linear factor; ≤ 1.
        beta: Added to the product; ≤ 1.

    Raises:
        TypeError: `alpha` or `beta` > 1, or the arguments are in TF's order, with the step.
        ValueError: `decay_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> print(jstep.linear_cosine_decay(1.0, 100)(50))
        0.251

    Source: Bello et al., "Neural Optimizer Search with Reinforcement Learning" (2017);
    `tf.train.linear_cosine_decay`.
    """
    start = arithmetic.as_tf_number("learning_rate", learning_rate)
    count = arithmetic.as_tf_number("num_periods", num_periods)
    length = arithmetic.as_tf_duration("decay_steps", decay_steps, linear_cosine_decay)
    linear_floor = _fraction("alpha", alpha)
    floor = _fraction("beta", beta)
    arithmetic.check_count("num_periods", num_periods, 100, "a few")

    def schedule(step: Step, /) -> Any:
        passed, left = arithmetic.progress(as_steps(step), Fraction(0), length)
        cosine = 0.5 * (1 + jnp.cos(2 * math.pi * count * passed))
        return start * ((linear_floor + left) * cosine + floor)

    return schedule


# Cyclical schedules: one-cycle and triangular.


@arithmetic.makes_schedule()
def one_cycle(
    max_value: Number,
    total_steps: int,
    pct_start: float = 0.3,
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
    anneal: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """One-cycle schedule: max/div_factor up to max, then down to max/div_factor/final_div_factor.

    The maximum is at step pct_start·total − 1, the end at step total − 1.

    Args:
        max_value: The highest value.
        total_steps: The number of updates; > 0.
        pct_start: The fraction of updates in the increasing phase, in [0, 1].
        div_factor: The first value is max_value / div_factor; > 0.
        final_div_factor: The last value is the first value / final_div_factor; > 0.
        anneal: "cos" or "linear".

    Returns:
        A function of the step; constant from step total_steps − 1.

    Raises:
        TypeError: A value is not a number, or `total_steps` not an integer.
        ValueError: `total_steps` or a factor is not positive, or `pct_start` is not in [0, 1].

    Example:
        >>> import jstep
        >>> schedule = jstep.one_cycle(1.0, 100)
        >>> print([round(float(schedule(n)), 6) for n in (0, 29, 64, 99)])
        [0.04, 1.0, 0.500002, 4e-06]

    Source: Smith and Topin, "Super-Convergence" (2017); `torch.optim.lr_scheduler.OneCycleLR`.
    """
    top = arithmetic.as_float_or_array("max_value", max_value)
    length = arithmetic.as_step_count("total_steps", total_steps, one_cycle)
    divisor = arithmetic.as_float_or_array("div_factor", div_factor, low=0, above=True, finite=True)
    first = top / divisor
    divisor = arithmetic.as_float_or_array(
        "final_div_factor", final_div_factor, low=0, above=True, finite=True
    )
    last = first / divisor
    share = arithmetic.as_fraction("pct_start", pct_start, zero=True)
    if share > 1:
        raise ValueError(f"pct_start={pct_start}: must be ≤ 1, a fraction of total_steps")
    shape = "cosine" if as_choice(anneal, "anneal", ["cos", "linear"]) == "cos" else "linear"
    # The steps of the maximum and of the end.
    peak = share * length - 1
    end = length - 1
    if end > peak:
        falling = _curve(top, last, end - peak, shape, peak)
    else:
        # The increasing phase has all updates, and the maximum stays.
        falling = _curve(top, top, Fraction(1), shape)
    if peak <= 0:
        return falling
    rising = _curve(first, top, peak, shape)
    return lambda step, /: jnp.where(
        as_steps(step) <= math.floor(peak), rising(step), falling(step)
    )


@arithmetic.makes_schedule()
def cyclical(
    base: Number, peak: Number, step_size_up: int, step_size_down: int | None = None
) -> Schedule:
    """Triangular cyclical schedule: from `base` up to `peak`, and down again.

    It rises in step_size_up steps, and falls in step_size_down steps.

    Args:
        base: The lowest value of each cycle.
        peak: The highest value of each cycle.
        step_size_up: The number of increasing steps, > 0.
        step_size_down: The number of decreasing steps, > 0; None for step_size_up.

    Raises:
        ValueError: A length is ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.cyclical(0.0, 1.0, 4)
        >>> print([float(schedule(n)) for n in (0, 2, 4, 6, 8, 10)])
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks" (2015);
    `torch.optim.lr_scheduler.CyclicLR` with mode="triangular".
    """
    foot, top = arithmetic.numbers(base=base, peak=peak)
    up = arithmetic.as_step_count("step_size_up", step_size_up, cyclical)
    down = up
    if step_size_down is not None:
        down = arithmetic.as_step_count("step_size_down", step_size_down, cyclical)
    length = up + down

    def schedule(step: Step, /) -> Any:
        periods = arithmetic.divide_steps(as_steps(step), length)
        real = periods.fraction.dtype
        # The triangle is the minimum of two lines.
        rising = periods.fraction * jnp.asarray(float(length / up), real)
        falling = periods.remaining * jnp.asarray(float(length / down), real)
        height = jnp.minimum(jnp.minimum(rising, falling), 1.0)
        return foot + (top - foot) * height

    return schedule


# Schedules with a warmup: cosine, warmup-stable-decay, inverse square root, and AdEMAMix's
# schedules.


@arithmetic.makes_schedule()
def warmup_cosine_decay(
    peak: Number,
    warmup_steps: int,
    decay_steps: int,
    init_value: Number = 0.0,
    end_value: Number = 0.0,
) -> Schedule:
    """Linear warmup, then cosine decay to end_value.

    The warmup is init_value + (peak − init_value) · step / warmup_steps.

    Args:
        peak: The value at step `warmup_steps`.
        warmup_steps: The number of warmup steps, ≥ 0.
        decay_steps: The length of the whole schedule, warmup included; > warmup_steps.
        init_value: The value at step 0. With 0 the first update is zero, unlike with
            `linear_warmup`, whose first value is peak / warmup_steps.
        end_value: The value from step `decay_steps`.

    Raises:
        TypeError: A number of steps is not an integer.
        ValueError: `warmup_steps` < 0, or `decay_steps` ≤ `warmup_steps`.

    Example:
        >>> import jstep
        >>> schedule = jstep.warmup_cosine_decay(1.0, 10, 110)
        >>> print([round(float(schedule(n)), 3) for n in (0, 5, 10, 60, 110)])
        [0.0, 0.5, 1.0, 0.5, 0.0]

    Source: `optax.warmup_cosine_decay_schedule`.
    """
    top, begin, end = arithmetic.numbers(peak=peak, init_value=init_value, end_value=end_value)
    warm = arithmetic.as_step_count("warmup_steps", warmup_steps, warmup_cosine_decay, zero=True)
    length = arithmetic.as_step_count("decay_steps", decay_steps, warmup_cosine_decay)
    if length <= warm:
        raise ValueError(
            f"decay_steps={decay_steps}: must be > warmup_steps={warmup_steps}, which it includes"
        )

    falling = _curve(top, end, length - warm, "cosine")
    if not warm:
        return falling
    return join([_curve(begin, top, warm, "linear"), falling], [int(warm)])


@arithmetic.makes_schedule()
def warmup_stable_decay(
    peak: Number,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    end_value: Number = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Warmup-stable-decay (WSD): a warmup to peak, then peak, then a decay to end_value.

    The warmup is peak · min(1, (step + 1) / warmup_steps). With
    x = (step − warmup_steps − stable_steps) / decay_steps the decay is
    end_value + (peak − end_value) · s(x), s(x) = 1 − x, (1 + cos πx) / 2 or 1 − √x. Changing
    `stable_steps` changes no earlier value.

    Args:
        peak: The value of the plateau.
        warmup_steps: The number of warmup steps, ≥ 0; the first update has a rate above zero.
        stable_steps: The number of steps at the peak, ≥ 0.
        decay_steps: The number of decay steps, > 0.
        end_value: The value after the decay.
        shape: "linear", "cosine", or "sqrt" for 1 − √x.

    Raises:
        TypeError: A number of steps is not an integer.
        ValueError: A length is out of range, or `shape` is not one of the three.

    Example:
        >>> import jstep
        >>> schedule = jstep.warmup_stable_decay(1.0, 4, 4, 10)
        >>> print([round(float(schedule(n)), 3) for n in (0, 3, 8, 13, 18)])
        [0.25, 1.0, 1.0, 0.5, 0.0]

    Source: Hu et al., "MiniCPM" (2024); Hägele et al., "Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations" (2024), for 1 − √x; `get_wsd_schedule` of Hugging Face, with
    another warmup.
    """
    top, end = arithmetic.numbers(peak=peak, end_value=end_value)
    warm = arithmetic.as_step_count("warmup_steps", warmup_steps, warmup_stable_decay, zero=True)
    stable = arithmetic.as_step_count("stable_steps", stable_steps, warmup_stable_decay, zero=True)
    length = arithmetic.as_step_count("decay_steps", decay_steps, warmup_stable_decay)
    falling = _curve(top, end, length, as_choice(shape, "shape", list(arithmetic.SHAPES)))
    return linear_warmup(shift(falling, int(warm + stable)), int(warm))


@arithmetic.makes_schedule()
def inverse_sqrt_decay(peak: Number, warmup_steps: int) -> Schedule:
    """Warmup and inverse square root decay: peak · min(1, (step + 1) / w) · √(w / max(step, w)).

    Here w = warmup_steps.

    Args:
        peak: The highest value, at the updates number w and w + 1.
        warmup_steps: The number of warmup steps, and the time scale of the decay; > 0.

    Raises:
        TypeError: `warmup_steps` is not an integer.
        ValueError: `warmup_steps` ≤ 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.inverse_sqrt_decay(1.0, 100)
        >>> print([round(float(schedule(n)), 3) for n in (0, 99, 100, 400, 10_000)])
        [0.01, 1.0, 1.0, 0.5, 0.1]

    Source: Vaswani et al., "Attention Is All You Need" (2017); `get_inverse_sqrt_schedule` of
    Hugging Face, with another warmup.
    """
    top = arithmetic.as_float_or_array("peak", peak)
    length = arithmetic.as_step_count("warmup_steps", warmup_steps, inverse_sqrt_decay)

    def schedule(step: Step, /) -> Any:
        step = as_steps(step)
        decayed = jnp.maximum(step.astype(trees.default_float()), float(length))
        return (
            top
            * arithmetic.ramp(step, length)
            * jnp.sqrt(jnp.asarray(float(length), decayed.dtype) / decayed)
        )

    return schedule


@arithmetic.makes_schedule()
def ademamix_alpha(alpha: Number, steps: int) -> Schedule:
    """Warmup of AdEMAMix's alpha: min(t · alpha / steps, alpha) at the update t = step + 1.

    Args:
        alpha: The final weight of the slow average, ≥ 0.
        steps: The number of warmup steps, > 0.

    Returns:
        A function of the step, for `ademamix(alpha=…)`.

    Raises:
        ValueError: `steps` ≤ 0, or `alpha` < 0.

    Example:
        >>> import jstep
        >>> schedule = jstep.ademamix_alpha(5.0, 100)
        >>> print(f"{schedule(0):.3g} {schedule(99):.3g} {schedule(1000):.3g}")
        0.05 5 5

    Source: Pagliardini et al., "The AdEMAMix Optimizer" (2024).
    """
    height = arithmetic.as_float_or_array("alpha", alpha, low=0, finite=True)
    return linear_warmup(height, int(arithmetic.as_step_count("steps", steps, ademamix_alpha)))


@arithmetic.makes_schedule()
def ademamix_beta3(beta1: Number, beta3: Number, steps: int) -> Schedule:
    """Warmup of AdEMAMix's β3: min(exp(ln β1 · ln β3 / ((1 − x) ln β3 + x ln β1)), β3).

    Here x = (step + 1) / steps. The half-life of the slow average grows linearly from β1's to β3's.

    Args:
        beta1: The initial value, in (0, 1).
        beta3: The final value, in (0, 1).
        steps: The number of warmup steps, > 0.

    Returns:
        A function of the step, for `ademamix(beta3=…)`.

    Raises:
        ValueError: `steps` ≤ 0, or a β outside (0, 1).

    Example:
        >>> import jstep
        >>> schedule = jstep.ademamix_beta3(0.9, 0.9999, 100)
        >>> print(f"{schedule(0):.4f} {schedule(98):.4f} {schedule(99):.4f}")
        0.9909 0.9999 0.9999

    Source: Pagliardini et al., "The AdEMAMix Optimizer" (2024).
    """
    first = arithmetic.as_float_or_array("beta1", beta1, low=0, above=True, high=1, below=True)
    last = arithmetic.as_float_or_array("beta3", beta3, low=0, above=True, high=1, below=True)
    length = arithmetic.as_step_count("steps", steps, ademamix_beta3)
    log_first = _log(first)
    log_last = _log(last)

    def schedule(step: Step, /) -> Any:
        x = arithmetic.ramp(as_steps(step), length)
        grown = jnp.exp(log_first * log_last / ((1 - x) * log_last + x * log_first))
        return jnp.where(x >= 1, last, jnp.minimum(grown, last))

    return schedule


def _log(number: Any) -> Any:
    # In double precision, unless it is an array.
    return math.log(number) if isinstance(number, float) else jnp.log(number)
