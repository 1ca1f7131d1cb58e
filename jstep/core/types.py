"""Core types: optimizers, schedules, and type aliases of parameters, updates, slots and steps."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
Params: TypeAlias = Any
"""Any pytree of arrays; None and integer leaves are passed through unchanged."""
Updates: TypeAlias = Any
"""A tree like the parameters; a leaf is an array, an `IndexedSlices`, or None (no update)."""
Slots: TypeAlias = dict[str, Any]
"""Slot name → tree with the structure of the parameters, or a scalar."""
Step: TypeAlias = int | np.integer[Any] | Array
"""A number of applied updates: a Python or NumPy integer, or an integer scalar array."""
Number: TypeAlias = float | int | np.number[Any] | Array


class Schedule(Protocol):
    """A function from the global step to a scalar."""

    def __call__(self, step: Step, /) -> Array:
        """Return the value at `step`."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """A mutable hyperparameter, stored in the scalar slot `held/name`; created by `held`.

    Attributes:
        name: Its name.
        value: Its initial value.
    """

    name: str
    value: Any


ScalarOrSchedule: TypeAlias = Number | Schedule | Callable[[Any], Any] | Held


class InitFn(Protocol):
    """Function that creates the slots of an optimizer."""

    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """Return slots for `params`, created at `global_step`."""
        ...


class GradientNoise(NamedTuple):
    """Gradient noise, estimated from the microbatches of one step; NaN if it cannot be estimated.

    Attributes:
        noise: The trace of the covariance of the gradient of one example, an unbiased estimate.
        square: The squared norm of the true gradient, an unbiased estimate, which may be negative.
    """

    noise: Array
    square: Array


class Context(NamedTuple):
    """Additional inputs of an optimizer's update, such as the loss; unknown fields are None.

    `minimize` creates it for optimizers with `takes_context=True`; `apply_gradients(..., context=...)` accepts it.
    Wrappers adapt it to the inner optimizer: below a label of `partition`, `value_and_grad` takes the parameters of
    that label; below `master_weights` it is evaluated at the rounded master weights.

    Attributes:
        loss: The loss of this step, a scalar; not multiplied by a loss scale.
        value_and_grad: `value_and_grad(params) -> (loss, gradients)`, the same loss on the same batch with the same
            PRNG key, at other parameters. The gradients are like those passed to `update`: a leaf may be None or an
            `IndexedSlices`. The evaluation has no side effects: model_state, aux and summaries are dropped.
        key: A PRNG key that depends only on the step, and differs from the key of the loss; None without `rng`.
        noise: The gradient noise estimated from the microbatches of this step, for `with_noise_scale`; only with
            `metrics=("noise_scale",)`.

    Example:
        Polyak's step size, which depends on the loss:

        >>> import jax, jax.numpy as jnp, jstep
        >>> def update(updates, slots, params, step, context):
        ...     squares = sum(jnp.sum(g * g) for g in jax.tree.leaves(updates))
        ...     return jax.tree.map(lambda g: -context.loss / squares * g, updates), {}
        >>> polyak = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {}, takes_context=True)
        >>> state = jstep.TrainState.create({"w": 4.0}, polyak)
        >>> state, _ = jstep.minimize(lambda params: params["w"] ** 2, polyak)(state)
        >>> print(state.params["w"])
        2.0
    """

    loss: Array | None = None
    value_and_grad: Callable[[Any], tuple[Array, Any]] | None = None
    key: Array | None = None
    noise: GradientNoise | None = None


UpdateFn: TypeAlias = Callable[..., tuple[Updates, Slots]]
"""`update(updates, slots, params, step) -> (updates, slots)`, a pure function: it maps gradients (or the updates of the
previous element of a chain) to updates to add, and to new slots. With `takes_context` it takes a `Context` as its fifth
argument."""


class HyperparametersFn(Protocol):
    """Function that returns the hyperparameters at a step."""

    def __call__(self, step: Step, /) -> dict[str, Any]:
        """Return name → scalar."""
        ...


class Optimizer(NamedTuple):
    """An optimizer: three pure functions, `init`, `update` and `hyperparameters`.

    Most custom optimizers are easier to write with `jstep.leafwise`, from a rule for a single leaf, which fulfills the
    requirements below. `jstep.map_leaves` and `jstep.as_schedule` help to write the three functions by hand.

    Arguments of `update`:

    - updates: the gradients, or the updates of the previous element of a chain, a tree like params. A leaf is an array
      of any floating dtype, an `IndexedSlices` (rows of a table), or None: keep the parameter and its slots.
    - slots: the slots created by `init`, by name; slots of other optimizers may be included.
    - params: may include None and integer leaves, which have no gradient, and float16 and bfloat16 leaves, whose slots
      and arithmetic should be in float32.
    - step: the number of updates applied so far, an integer scalar, traced or not. A step is compiled: do not use `if`
      on values, `float(step)`, or any state outside the arguments.

    Results of `update`:

    - updates: a tree like params, with None for no update. They are *added* to the parameters in float32 or wider; the
      optimizer applies the sign.
    - slots: only its own slots, with the same names, structure, shapes and dtypes. A slot is a tree like params (None
      for a leaf without a slot) or a scalar. Arrays created by `init` must be distinct buffers, also if they are copies
      of the parameters, because a compiled step donates each buffer once.

    Attributes:
        init: `init(params, global_step=0) -> slots`. The names of slots have no special meaning, not even `start_step`
            or `loss_scale`. An integer scalar slot that holds the global_step at which the slots were created (their
            age is step + 1 − it) is declared by an attribute of the function, `init.ages = ("start_step",)`. It then is
            incremented by a skipped update, one without any gradient, and `increment_global_step(state)`, and
            decremented by an update that leaves the global step as it is: the age counts applied updates.

            A slot that is a copy of the parameters at first, in any dtype, is recognized when `init` is traced; an
            `init` that cannot be traced declares it, `init.copies = ("slow",)`. If `Saver.restore(…, partial=True)`
            restores the parameters from a checkpoint without this slot, it is a copy of the restored ones.
        update: `update(updates, slots, params, step) -> (updates, slots)`; with `takes_context` it takes a `Context` as
            its fifth argument.
        hyperparameters: `hyperparameters(step) -> {name: scalar}`, the values at a step; plain numbers are constants.
            The name `learning_rate` indicates that the updates are final.
        takes_context: Whether `update` takes a `Context`: the loss, its gradients at other parameters, a PRNG key.

    Example:
        A custom sign-descent optimizer without slots:

        >>> import jax, jax.numpy as jnp, jstep
        >>> def update(updates, slots, params, step):
        ...     return jax.tree.map(lambda g: -0.5 * jnp.sign(g), updates), {}
        >>> sign = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})
        >>> state = jstep.TrainState.create({"w": 1.0}, sign)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, sign).params["w"])
        0.5

        An optimizer that declares an age, so that skipped updates do not count:

        >>> def init(params, global_step=0):
        ...     return {"start_step": jnp.array(global_step, jnp.int32)}
        >>> init.ages = ("start_step",)
        >>> def update(updates, slots, params, step):
        ...     age = jnp.float32(step + 1 - slots["start_step"])
        ...     return jax.tree.map(lambda g: -g / age, updates), slots
        >>> guarded = jstep.skip_nonfinite(jstep.Optimizer(init, update, lambda step: {}))
        >>> state = jstep.TrainState.create({"w": 4.0}, guarded)
        >>> for g in (1.0, jnp.nan, 1.0):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(g)}, guarded)
        >>> print(state.params["w"])
        2.5
    """

    init: InitFn
    update: UpdateFn
    hyperparameters: HyperparametersFn
    takes_context: bool = False


def require_optimizer(name: str, value: Any) -> Optimizer:
    """Return the value, which must be an optimizer."""
    if not isinstance(value, Optimizer):
        hint = f"; call it: {value.__name__}(...)" if callable(value) and hasattr(value, "__name__") else ""
        if hasattr(value, "init") and hasattr(value, "update"):
            hint = "; convert an Optax transformation with jstep.from_optax(transformation)"
        elif type(value).__module__.startswith("flax.nnx"):
            hint = "; pass jstep.from_optax(tx), and the parameters of nnx.split: see the page 'From Flax'"
        raise TypeError(f"{name}={value!r:.60}: must be a jstep.Optimizer, got {type(value).__name__}{hint}")
    return value
