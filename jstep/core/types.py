"""The words the package speaks in: what a state, an update, a step and an optimizer are."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
Params: TypeAlias = Any
"""Any pytree of arrays; None and integer leaves pass through untouched."""
Updates: TypeAlias = Any
"""A tree like the parameters; a leaf is an array, an `IndexedSlices`, or None (leave it as it is)."""
Slots: TypeAlias = dict[str, Any]
"""Slot name → tree with the structure of the parameters, or a scalar."""
Step: TypeAlias = int | np.integer[Any] | Array
"""A whole number of applied updates: a Python or NumPy integer, or an integer scalar array."""
Number: TypeAlias = float | int | np.number[Any] | Array


class Schedule(Protocol):
    """A function from the global step to a scalar."""

    def __call__(self, step: Step, /) -> Array:
        """The value in force at `step`."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """A hyperparameter that lives in the scalar slot `held/name`; made by `held`.

    Attributes:
        name: Its name.
        value: What it starts from.
    """

    name: str
    value: Any


ScalarOrSchedule: TypeAlias = Number | Schedule | Callable[[Any], Any] | Held


class InitFn(Protocol):
    """Makes the slots of a fresh optimizer."""

    def __call__(self, params: Params, global_step: Step = 0) -> Slots:
        """Slots for `params`, created at `global_step`."""
        ...


class GradientNoise(NamedTuple):
    """What the microbatches of one step tell of the noise of the gradient; NaN where they tell nothing.

    Attributes:
        noise: The trace of the covariance of the gradient of one example, an unbiased estimate.
        square: The squared norm of the true gradient, an unbiased estimate, which may be negative.
    """

    noise: Array
    square: Array


class Context(NamedTuple):
    """What an update may know of its step besides the gradients; a field is None where it is not known.

    `minimize` makes it, for optimizers with `takes_context=True`; `apply_gradients(..., context=...)` takes it.
    Wrappers pass it on in terms of what their optimizer sees: below a label of `partition`, `value_and_grad` takes the
    parameters of that label; below `master_weights` it evaluates the rounding of the masters.

    Attributes:
        loss: The loss of this step, a scalar; not multiplied by a loss scale.
        value_and_grad: `value_and_grad(params) -> (loss, gradients)`, the same loss on the same batch with the same
            PRNG key, at other parameters. Gradients are as `update` gets them: a leaf may be None or an
            `IndexedSlices`. Evaluating it changes nothing: model_state, aux and summaries are dropped.
        key: A PRNG key, a function of the step alone and another one than the loss gets; None without `rng`.
        noise: What the microbatches of this step tell of the noise of the gradient, for `with_noise_scale`; only with
            `metrics=("noise_scale",)`.

    Example:
        Polyak's step size, which needs the loss:

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
"""`update(updates, slots, params, step) -> (updates, slots)`, a pure function: it turns gradients (or an earlier
element's updates) into updates to add, and new slots. With `takes_context` it gets a `Context` as fifth argument."""


class HyperparametersFn(Protocol):
    """Tells the values in force at a step."""

    def __call__(self, step: Step, /) -> dict[str, Any]:
        """Name → scalar."""
        ...


class Optimizer(NamedTuple):
    """An optimizer as three pure functions; anything with these three composes with jstep.

    `jstep.leafwise` makes one of the rule for one leaf and takes care of what follows; `jstep.map_leaves` and
    `jstep.as_schedule` help those who write the three by hand.

    What an update may meet:

    - updates: the gradients, or an earlier element's updates, a tree like params. A leaf is an array of any floating
      dtype, an `IndexedSlices` (rows of a table), or None: leave the parameter and its slots as they are.
    - slots: those that `init` made, by their names; a custom optimizer may see names of other parties too.
    - params: None and integer leaves among others, which have no gradient; float16 and bfloat16 leaves, whose slots
      and arithmetic belong in float32.
    - step: the number of updates applied so far, an integer scalar, traced or not. A step is compiled: no `if` on
      values, no `float(step)`, nothing that changes from call to call but the arguments.

    What it must return:

    - updates: a tree like params, None where nothing is to be added. They are *added* to the parameters in float32 at
      least; a sign is the optimizer's own.
    - slots: its own alone, the same names, structure, shapes and dtypes as it was given. A slot is a tree like params
      (None where a leaf has none) or a scalar. Arrays made by `init` must be buffers of their own, copies of the
      parameters too: a compiled step takes over the memory of each once.

    Attributes:
        init: `init(params, global_step=0) -> slots`. Names of slots mean nothing to jstep: a slot called `start_step`
            or `loss_scale` is a slot like any other. An integer scalar slot that is the global_step at which the slots
            were made (their age is step + 1 − it) is declared by an attribute of the function,
            `init.ages = ("start_step",)`. A skipped update, or one without any gradient, then moves it one step along,
            so that the age counts applied updates only.
        update: `update(updates, slots, params, step) -> (updates, slots)`; with `takes_context` it gets a `Context` as
            fifth argument.
        hyperparameters: `hyperparameters(step) -> {name: scalar}`, the values in force at a step; what is a plain
            number there is a constant, known without computing. `learning_rate` says that the updates are finished.
        takes_context: Whether `update` takes a `Context`: the loss, its gradients at other parameters, a PRNG key.

    Example:
        A custom sign-descent optimizer, with no slots:

        >>> import jax, jax.numpy as jnp, jstep
        >>> def update(updates, slots, params, step):
        ...     return jax.tree.map(lambda g: -0.5 * jnp.sign(g), updates), {}
        >>> sign = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})
        >>> state = jstep.TrainState.create({"w": 1.0}, sign)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, sign).params["w"])
        0.5

        One that declares an age, so that a skipped update does not count:

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
    """The value, which must be an optimizer."""
    if not isinstance(value, Optimizer):
        hint = f"; call it: {value.__name__}(...)" if callable(value) and hasattr(value, "__name__") else ""
        if hasattr(value, "init") and hasattr(value, "update"):
            hint = "; a transformation of Optax's becomes one by jstep.from_optax(transformation)"
        raise TypeError(f"{name}={value!r:.60}: must be a jstep.Optimizer, got {type(value).__name__}{hint}")
    return value
