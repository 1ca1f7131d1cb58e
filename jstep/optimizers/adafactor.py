"""Adafactor: factored second moments."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_bool, as_int
from jstep.core.selection import VarList
from jstep.core.slot_roles import Init
from jstep.core.trees import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.directions import BETA, Result, Values, average, decay_mask, decays, from_update, positive
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import MEAN, Slot

HIGHEST_RELATIVE = 1e-2
"""The upper bound of relative step sizes if no learning_rate is given, as in T5."""


def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    decay_rate: ScalarOrSchedule = 0.8,
    epsilon: ScalarOrSchedule = 1e-30,
    epsilon_scale: ScalarOrSchedule = 1e-3,
    clip_threshold: ScalarOrSchedule | None = 1.0,
    momentum: ScalarOrSchedule | None = None,
    scale_parameter: bool = True,
    relative_step: bool = False,
    min_dim_size_to_factor: int = 128,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """Adafactor: u = g/√v; u /= max(1, rms(u)/clip_threshold); p −= lr·(max(epsilon_scale, rms(p))·u + weight_decay·p).

    v averages g² + ε with β = 1 − t^(−decay_rate), where t is the age of the slots. If the two largest axes of a leaf
    both have min_dim_size_to_factor elements or more, v is factored: R averages the row means, C the column means, and
    v = R·C/mean(R) is never stored.

    Args:
        learning_rate: The step size lr ≥ 0; None for 1, or for 0.01 with relative_step.
        decay_rate: How fast β approaches 1, ≥ 0.
        epsilon: Added to g², > 0.
        epsilon_scale: The smallest scale of a parameter, ≥ 0.
        clip_threshold: The largest root mean square of a leaf's update before its scale, > 0; None for no bound.
        momentum: The decay of an average of the scaled updates, which is then applied, in [0, 1); None for no
            momentum.
        scale_parameter: Whether to scale steps by the root mean square of the parameter.
        relative_step: Whether the step size is min(lr, 1/√t).
        min_dim_size_to_factor: The smallest size of the two largest axes of a factored leaf.
        weight_decay: Decoupled weight decay, multiplied by lr as in torch and T5; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `v_row` (without the largest axis) and `v_col` (without the second) for factored
        leaves, `v` for the others, `m` with momentum, and the scalar `start_step`. A leaf that stacks several layers
        is also factored along its two largest axes, whichever they are.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adafactor(0.5)
        >>> state = jstep.TrainState.create({"w": jnp.ones((256, 128))}, optimizer)
        >>> print(state.slots["v_row"]["w"].shape, state.slots["v_col"]["w"].shape, state.slots["v"]["w"])
        (128,) (256,) None

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018); the results match
    `optax.adafactor`, except that its weight decay is not multiplied by the learning rate. Its decay_offset is
    start_step here.
    """
    least = as_int(min_dim_size_to_factor, "min_dim_size_to_factor", at_least=1)
    hyper: dict[str, Any] = {
        "decay_rate": decay_rate,
        "epsilon": positive("epsilon", epsilon),
        "epsilon_scale": epsilon_scale,
        "weight_decay": weight_decay,
    }
    if learning_rate is not None:
        hyper["learning_rate"] = learning_rate
    if clip_threshold is not None:
        hyper["clip_threshold"] = clip_threshold
    if momentum is not None:
        hyper["momentum"] = checked("momentum", momentum, **BETA)
    relative, scales = as_bool(relative_step, "relative_step"), as_bool(scale_parameter, "scale_parameter")

    def without(which: int) -> Any:
        def shape(path: str, leaf: Any) -> tuple[int, ...] | None:
            axes = factored_axes(np.shape(leaf), least)
            return None if axes is None else tuple(np.delete(np.shape(leaf), axes[which]).tolist())

        return shape

    def whole(path: str, leaf: Any) -> tuple[int, ...] | None:
        return np.shape(leaf) if factored_axes(np.shape(leaf), least) is None else None

    def prepare(h: Values) -> dict[str, Any]:
        lr = h.learning_rate if "learning_rate" in h else HIGHEST_RELATIVE if relative else 1.0
        age = h.age.astype(jnp.result_type(float))
        return {
            "beta": 1 - jnp.power(age, -h.decay_rate),
            "step_size": jnp.minimum(lr, 1 / jnp.sqrt(age)) if relative else lr,
            "decay_size": lr,
            "scales": scales,
        }

    slots = {
        "v_row": Slot(shape=without(1), keeps="rows"),
        "v_col": Slot(shape=without(0), keeps="columns"),
        "v": Slot(shape=whole, holds="square"),
    } | ({} if momentum is None else {"m": MEAN})
    flags = decay_mask(weight_decay_mask)
    made = from_update("adafactor", adafactor_update, slots, hyper, flags=flags, prepare=prepare)
    assert isinstance(made.init, Init)
    return made._replace(init=dataclasses.replace(made.init, finished=True))  # also without a learning_rate


def factored_axes(shape: tuple[int, ...], least: int) -> tuple[int, int] | None:
    """The second largest and the largest axis; None unless both have at least `least` elements."""
    if len(shape) < 2:
        return None
    second, largest = (int(axis) for axis in np.argsort(shape, kind="stable")[-2:])
    return (second, largest) if shape[second] >= least else None


def adafactor_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update by factored moments, or by whole ones for a leaf that is not factored."""
    square, new = g * g + h.epsilon, {}
    if s.v is None:
        axes = factored_axes(p.shape, 1)
        assert axes is not None
        second, largest = axes
        row = new["v_row"] = average(s.v_row, jnp.mean(square, largest), h.beta)
        col = new["v_col"] = average(s.v_col, jnp.mean(square, second), h.beta)
        mean = jnp.mean(row, second - 1 if second > largest else second, keepdims=True)
        u = g * jnp.expand_dims(1 / jnp.sqrt(row / mean), largest) * jnp.expand_dims(1 / jnp.sqrt(col), second)
    else:
        v = new["v"] = average(s.v, square, h.beta)
        u = g / jnp.sqrt(v)
    size = h.step_size
    if "clip_threshold" in h:
        size = size / jnp.maximum(1.0, root_mean_square(u) / h.clip_threshold)
    if h.scales:
        size = size * jnp.maximum(h.epsilon_scale, root_mean_square(p))
    u = size * u
    if "momentum" in h:
        u = new["m"] = average(s.m, u, h.momentum)
    return -(u + h.decay_size * h.weight_decay * p if decays(h) else u), new


def root_mean_square(x: Array) -> Array:
    """The root mean square; 0 for an empty array."""
    return jnp.sqrt(jnp.sum(x * x) / max(1, math.prod(x.shape)))
