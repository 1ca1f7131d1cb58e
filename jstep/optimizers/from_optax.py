"""Use Optax transformations as jstep optimizers."""

from collections.abc import Callable, Mapping
from typing import Any

from jstep.core.checks import as_function, as_string, format_value
from jstep.core.recorded_calls import has_init_and_update, makes_optimizer
from jstep.core.trees import Held, Optimizer, Step
from jstep.optimizers import hyperparameters as hyper
from jstep.optimizers.rules import replace_init
from jstep.slots import optax_transformations


@makes_optimizer(1)
def from_optax(
    transformation: object,
    hyperparameters: Mapping[str, Any] | Callable[[Step], Mapping[str, Any]] | None = None,
    name: str = "optax",
) -> Optimizer:
    """An optimizer from an Optax transformation's `init` and `update`; Optax is not imported.

    Wherever jstep accepts an optimizer, it accepts a transformation; call the function to report
    hyperparameters or to name the slots. The state becomes slots. The transformation works in at
    least float32 and sees trainable leaves only; a leaf whose gradient is None is a constant for
    it. `IndexedSlices` become dense arrays.

    A train step of `minimize` passes the extra arguments `value`, `grad` and `value_fn` (the loss
    on the batch of the step), as for `optax.lbfgs()`. With `apply_gradients` they come from
    `context=jstep.Context(...)`.

    Optax's schedules see its own count of updates. jstep's see the step:
    `chain(from_optax(optax.scale_by_adam()), scale_by_learning_rate(rate))`.

    Args:
        transformation: An Optax transformation, such as `optax.adam(1e-3)`.
        hyperparameters: The hyperparameters to report at the global step: name → number or
            schedule, or a function of the step that returns such a mapping. Pass the same values to
            the transformation.
        name: The prefix of the slots: `optax/0/mu`.

    Raises:
        TypeError: `transformation` has no `init` and `update`. From `TrainState.create`: it
            contains `optax.lookahead` or `optax.contrib.differentially_private_aggregate`
            (`dpsgd`). From the step: it needs extra arguments that the step does not have.

    Example:
        >>> import jax, jstep
        >>> from typing import NamedTuple
        >>> class Halves(NamedTuple):  # stands for optax.sgd(0.5)
        ...     init = staticmethod(lambda params: ())
        ...     update = staticmethod(
        ...         lambda grads, kept, params: (jax.tree.map(lambda g: -0.5 * g, grads), kept)
        ...     )
        >>> optimizer = jstep.from_optax(Halves(), {"learning_rate": 0.5})
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 1.0}, optimizer).params["w"])
        0.5

    Source: `optax.GradientTransformation`.
    """
    if not has_init_and_update(transformation):
        raise TypeError(
            f"transformation={format_value(transformation)}: must have init and update, "
            "like optax.adam()"
        )
    hyper.check_prefix("name", as_string(name, "name"))
    is_finished = isinstance(hyperparameters, Mapping) and hyper.LEARNING_RATE in hyperparameters
    optimizer = replace_init(
        optax_transformations.from_optax(transformation, name), finished=is_finished
    )
    return optimizer._replace(hyperparameters=_reported(hyperparameters))


def _reported(reported: object) -> Any:
    if reported is None:
        return lambda step: {}
    if isinstance(reported, Mapping):
        if any(isinstance(value, Held) for value in reported.values()):
            raise TypeError("hyperparameters: must not be held, because Optax does not read them")
        return hyper.report(
            {key: hyper.as_hyperparameter(key, value) for key, value in reported.items()}
        )
    function = as_function(
        reported, "hyperparameters", "of the step, or map names to numbers or schedules"
    )
    return lambda step, /: hyper.as_arrays(dict(function(step)), step)
