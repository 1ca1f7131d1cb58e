"""Optimizers that hold less than Adam: Lion, LAMB and LARS with one norm for each leaf, NovoGrad, Adafactor."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_bool, as_int
from jstep.core.indexed_slices import on_table
from jstep.core.matching import match_gradients
from jstep.core.selection import VarList
from jstep.core.slot_roles import BLOCK, Order
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Step, Updates
from jstep.differentiate.clipping import norm_of
from jstep.optimizers import rules
from jstep.optimizers.adam import M_V, adam_direction, corrections
from jstep.optimizers.compose import element
from jstep.optimizers.hyperparameters import Hyper, checked, constant, deprecated_m_dtype
from jstep.optimizers.leaf_values import mask
from jstep.optimizers.rules import BETA, MEAN, MEAN_IN_ORDER, POSITIVE, Masked, Result, Slot, Values, with_init
from jstep.optimizers.updates import map_updates

# Lion, and other optimizers by the sign of the gradient: Signum, Rprop.


@makes_optimizer()
def lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
    m_dtype: Any = None,
) -> Optimizer:
    """Lion: p −= lr·(sign(β1·m + (1−β1)·g) + weight_decay·p); then m = β2·m + (1−β2)·g.

    Every coordinate moves by lr. Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by
    the same factor.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.
        m_dtype: Deprecated in favor of `compact`. The dtype of m, such as `jnp.bfloat16`; at least float32 by default.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lion(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.75

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023); the results match `optax.lion`.
    """
    slots = {"m": Slot(dtype=deprecated_m_dtype(m_dtype), holds="mean", in_order=True)}
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2}
    hyper |= {"weight_decay": Masked(weight_decay, weight_decay_mask)}
    return rules.from_direction("lion", lion_direction, slots, hyper)


@makes_optimizer()
def scale_by_lion(beta1: ScalarOrSchedule = 0.9, beta2: ScalarOrSchedule = 0.99) -> Optimizer:
    """Lion's direction: sign(β1·m + (1−β1)·g); then m = β2·m + (1−β2)·g.

    Args:
        beta1: The weight of m in the direction, in [0, 1).
        beta2: The decay of m, in [0, 1).

    Returns:
        An element of a chain with the slot `m` (initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.scale_by_lion(), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.75

    Source: Chen et al. (2023); `optax.scale_by_lion`.
    """
    return rules.from_update("scale_by_lion", lion_direction, {"m": MEAN_IN_ORDER}, {"beta1": beta1, "beta2": beta2})


def lion_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The sign of an average that leans more to the gradient than the one that is kept."""
    return jnp.sign(rules.average(s.m, g, h.beta1)), {"m": rules.average(s.m, g, h.beta2)}


@makes_optimizer()
def signum(learning_rate: ScalarOrSchedule = 1e-3, beta: ScalarOrSchedule = 0.9) -> Optimizer:
    """Signum: m = β·m + (1−β)·g; p −= lr·sign(m).

    Args:
        learning_rate: The step size lr ≥ 0.
        beta: The decay of m, in [0, 1); 0 is signSGD.

    Returns:
        An `Optimizer` with the slot `m` (initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.signum(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018); `optax.signum`.
    """
    hyper = {"learning_rate": learning_rate, "beta": checked("beta", beta, **BETA)}
    return rules.from_direction("signum", signum_direction, {"m": MEAN}, hyper)


def signum_direction(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The sign of the average."""
    m = rules.average(s.m, g, h.beta)
    return jnp.sign(m), {"m": m}


@makes_optimizer()
def rprop(
    learning_rate: float = 1e-2,
    eta_minus: ScalarOrSchedule = 0.5,
    eta_plus: ScalarOrSchedule = 1.2,
    min_step_size: ScalarOrSchedule = 1e-6,
    max_step_size: ScalarOrSchedule = 50.0,
) -> Optimizer:
    """Rprop: η *= eta_plus where g keeps its sign, η *= eta_minus and g = 0 where it turns; p −= η·sign(g).

    It uses only the signs of gradients, so it is meant for full-batch gradients.

    Args:
        learning_rate: The initial step size η, > 0; fixed when the optimizer is created.
        eta_minus: The factor on η when the gradient changes its sign, in (0, 1).
        eta_plus: The factor on η when the gradient keeps its sign, > 1.
        min_step_size: The smallest η, ≥ 0.
        max_step_size: The largest η, ≥ 0.

    Returns:
        An `Optimizer` with the slots `step_size` (η, initially learning_rate) and `previous` (the last g, initially 0).

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.rprop(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning" (1993); the results
    match `torch.optim.Rprop`. `optax.rprop` returns the update of the previous step.
    """
    size = constant("learning_rate", learning_rate, **POSITIVE)
    hyper = {"learning_rate": size, "eta_minus": eta_minus, "eta_plus": eta_plus, "min_step_size": min_step_size}
    hyper |= {"max_step_size": max_step_size}
    return rules.from_update("rprop", rprop_update, {"step_size": size, "previous": 0.0}, hyper)


def rprop_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update by step sizes, which depend on whether the gradient keeps its sign."""
    turn = jnp.sign(g) * jnp.sign(s.previous)
    one = jnp.ones_like(g)
    factor = jnp.where(turn > 0, h.eta_plus * one, jnp.where(turn < 0, h.eta_minus * one, one))
    size = jnp.clip(s.step_size * factor, h.min_step_size, h.max_step_size)
    g = jnp.where(turn < 0, jnp.zeros_like(g), g)
    return -size * jnp.sign(g), {"step_size": size, "previous": g}


# Optimizers with one norm for each leaf: LAMB, LARS and their trust ratio, and NovoGrad.


@makes_optimizer()
def lamb(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.999,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LAMB: r = m̂/(√v̂ + ε) + weight_decay·p; p −= lr·r·‖p‖/‖r‖, norms by leaf; lr·r where a norm is 0.

    m̂ and v̂ are those of Adam.

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The decay of the first moment, in [0, 1). A schedule enters the correction as β1(step)^t.
        beta2: The decay of the second moment, in [0, 1). A schedule enters the correction as β2(step)^t.
        epsilon: Added to √v̂, ≥ 0.
        weight_decay: Weight decay ≥ 0, added to the direction before its norm is taken.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0) and the scalar `start_step`. If a leaf stacks several
        layers, they share one norm: keep layers in separate leaves.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lamb(0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019); the results
    match `optax.lamb`. timm also clips by the global norm; Keras decays outside the norm.
    """
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    hyper |= {"weight_decay": Masked(weight_decay, weight_decay_mask)}
    return rules.from_update("lamb", lamb_update, M_V, hyper, prepare=corrections)


def lamb_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """Adam's direction with weight decay, scaled to the norm of the parameter."""
    u, new = adam_direction(g, p, s, h)
    return scale_by_ratio(p, rules.with_decay(u, p, h), -h.learning_rate), new


@makes_optimizer()
def lars(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.9,
    use_nesterov: bool = False,
    trust_coefficient: ScalarOrSchedule = 1e-3,
    epsilon: ScalarOrSchedule = 0.0,
    trust_ratio_mask: VarList = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LARS: g += weight_decay·p; a = momentum·a + lr·g·trust_coefficient·‖p‖/(‖g‖ + ε); p −= a, norms by leaf.

    With Nesterov p −= (the last term of a) + momentum·a. If a norm is 0, the ratio is 1. The learning rate is inside
    the buffer: gradients accumulated at a high rate keep that rate.

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of the old update that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.
        trust_coefficient: The step length at lr = 1 as a fraction of the leaf's norm, ≥ 0.
        epsilon: Added to ‖g‖, ≥ 0.
        trust_ratio_mask: The leaves with a trust ratio, in the grammar of `var_list`; None for all.
        weight_decay: Coupled weight decay ≥ 0, added to the gradient as weight_decay·p.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0).

    Raises:
        ValueError: An argument is out of its range, or a mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lars(1.0, trust_coefficient=0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017); the results match
    `optax.lars`.
    """
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "momentum": momentum}
    hyper |= {"trust_coefficient": trust_coefficient, "epsilon": epsilon}
    hyper |= {"weight_decay": Masked(weight_decay, weight_decay_mask)}
    flags = {"trusts": mask("trust_ratio_mask", trust_ratio_mask)}
    is_ahead = as_bool(use_nesterov, "use_nesterov")

    def update(g: Array, p: Array, s: Values, h: Values) -> Result:
        kept, lr = h.momentum * s.momentum, h.learning_rate
        g = rules.with_decay(g, p, h)
        g = scale_by_ratio(p, g, lr, h.trust_coefficient, h.epsilon) if h.trusts else lr * g
        a = kept + g
        return -(g + h.momentum * a if is_ahead else a), {"momentum": a}

    return rules.from_update("lars", update, {"momentum": MEAN}, hyper, flags=flags)


@makes_optimizer()
def novograd(
    learning_rate: ScalarOrSchedule = 1e-3,
    beta1: ScalarOrSchedule = 0.9,
    beta2: ScalarOrSchedule = 0.25,
    epsilon: ScalarOrSchedule = 1e-6,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """NovoGrad: v averages ‖g‖²; m = β1·m + g/(√v + ε) + weight_decay·p; p −= lr·m; one v for each leaf.

    At the first update of a slot v = ‖g‖².

    Args:
        learning_rate: The step size lr ≥ 0.
        beta1: The fraction of the old direction that is kept, in [0, 1).
        beta2: The decay of the squared norm, in [0, 1).
        epsilon: Added to √v, ≥ 0.
        weight_decay: Weight decay ≥ 0, part of the direction and so multiplied by lr.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slots `m` and `v` (initially 0; v has one scalar per leaf) and the scalar `start_step`.

    Raises:
        ValueError: An argument is out of its range, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.novograd(0.25)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(f'{jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"]:.3f}')
        0.750

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments" (2019); the results match
    `optax.novograd`.
    """
    slots = {"m": MEAN, "v": Slot(shape=lambda path, leaf: ())}
    hyper: dict[str, Any] = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    hyper |= {"weight_decay": Masked(weight_decay, weight_decay_mask)}
    return rules.from_update("novograd", novograd_update, slots, hyper, prepare=share_of_old)


def novograd_update(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The update along the average of normalized gradients."""
    v = rules.average(s.v, jnp.sum(g * g), h.kept)
    m = h.beta1 * s.m + rules.with_decay(g / (jnp.sqrt(v) + h.epsilon), p, h)
    return -h.learning_rate * m, {"m": m, "v": v}


def share_of_old(h: Values) -> dict[str, Any]:
    """The weight of the old squared norm, which is 0 for a new slot."""
    return {"kept": jnp.where(h.age == 1, 0.0, h.beta2)}


@makes_optimizer()
def scale_by_trust_ratio() -> Optimizer:
    """Trust ratio: u·‖p‖/‖u‖ for each leaf, or u if a norm is 0; u is the update from the previous element.

    Returns:
        An element of a chain without slots.

    Example:
        LAMB:

        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(epsilon=1e-6), jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(0.25)
        ... )
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You et al. (2019); `optax.scale_by_trust_ratio`.
    """

    def scaled(u: Array, p: Array) -> Any:
        dtype = trees.compute_dtype(p.dtype)
        return on_table(lambda u: scale_by_ratio(p.astype(dtype), u.astype(dtype)), u)

    def update(updates: Updates, params: Params, step: Step, h: Hyper) -> Updates:
        match_gradients(updates, params)
        return map_updates(scaled, params, updates, jax.tree.leaves(params))

    return element(update, {}, BLOCK)


def scale_by_ratio(p: Array, u: Array, rate: Any = 1.0, coefficient: Any = 1.0, epsilon: Any = 0.0) -> Array:
    """Return rate · ratio · u with ratio = coefficient·‖p‖ / (‖u‖ + epsilon), 1 if either norm is 0.

    It does not overflow or underflow if the result does not, even where the ratio does.
    """
    of_p, of_u = norm_of([p]), norm_of([u])
    neither = (of_p > 0) & (of_u > 0)
    divisor = jnp.where(neither, of_u + epsilon, jnp.full_like(of_u, 0.5))  # whose power of two is 1
    unit = _power_of_two(divisor)
    return rate * jnp.where(neither, coefficient * of_p / (divisor * unit), 1.0) * (u * unit)


def _power_of_two(norm: Array) -> Array:
    """A power of two, whose product with the norm is between 1/2 and 4: multiplying by it is exact."""
    _, exponent = jnp.frexp(jax.lax.stop_gradient(norm))
    return jnp.ldexp(jnp.ones_like(norm), jnp.clip(-exponent, -126, 126))


# Adafactor: factored second moments.

HIGHEST_RELATIVE = 1e-2
"""The upper bound of relative step sizes if no learning_rate is given, as in T5."""


@makes_optimizer()
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
    hyper: dict[str, Any] = {"decay_rate": decay_rate, "epsilon": rules.positive("epsilon", epsilon)}
    hyper |= {"epsilon_scale": epsilon_scale, "weight_decay": Masked(weight_decay, weight_decay_mask)}
    optional = {"learning_rate": learning_rate, "clip_threshold": clip_threshold}
    optional |= {"momentum": None if momentum is None else checked("momentum", momentum, **BETA)}
    hyper |= {name: value for name, value in optional.items() if value is not None}
    relative, scales = as_bool(relative_step, "relative_step"), as_bool(scale_parameter, "scale_parameter")

    def without(path: str, leaf: Any, which: int) -> tuple[int, ...] | None:
        axes = factored_axes(np.shape(leaf), least)
        return None if axes is None else tuple(np.delete(np.shape(leaf), axes[which]).tolist())

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
        "v_row": Slot(shape=functools.partial(without, which=1), keeps="rows"),
        "v_col": Slot(shape=functools.partial(without, which=0), keeps="columns"),
        "v": Slot(shape=whole, holds="square"),
    } | ({} if momentum is None else {"m": MEAN})
    made = rules.from_update("adafactor", adafactor_update, slots, hyper, prepare=prepare)
    return with_init(made, finished=True, order=Order())  # also without a learning_rate


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
        row = new["v_row"] = rules.average(s.v_row, jnp.mean(square, largest), h.beta)
        col = new["v_col"] = rules.average(s.v_col, jnp.mean(square, second), h.beta)
        mean = jnp.mean(row, second - 1 if second > largest else second, keepdims=True)
        u = g * jnp.expand_dims(1 / jnp.sqrt(row / mean), largest) * jnp.expand_dims(1 / jnp.sqrt(col), second)
    else:
        v = new["v"] = rules.average(s.v, square, h.beta)
        u = g / jnp.sqrt(v)
    size = h.step_size
    if "clip_threshold" in h:
        size = size / jnp.maximum(1.0, root_mean_square(u) / h.clip_threshold)
    if h.scales:
        size = size * jnp.maximum(h.epsilon_scale, root_mean_square(p))
    u = size * u
    if "momentum" in h:
        u = new["m"] = rules.average(s.m, u, h.momentum)
    return -(u + h.decay_size * h.weight_decay * p if rules.decays(h) else u), new


def root_mean_square(x: Array) -> Array:
    """The root mean square; 0 for an empty array."""
    return jnp.sqrt(jnp.sum(x * x) / max(1, math.prod(x.shape)))
