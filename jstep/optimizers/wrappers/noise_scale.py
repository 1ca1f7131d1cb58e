"""The gradient noise scale, averaged over steps."""

import jax.numpy as jnp

from jstep.core.slot_roles import Role, Roles
from jstep.core.trees import Array, GradientNoise, Optimizer, Slots, Updates, require_optimizer
from jstep.optimizers.hyper import constant
from jstep.optimizers.parts import call_update
from jstep.optimizers.wrap_optimizer import Own, StepInputs, wrap_optimizer

SLOTS = {
    "noise/gradient_noise": Role.NOISE,
    "noise/gradient_square": Role.NOISE_SQUARE,
    "noise/weight": Role.NOISE_WEIGHT,
}


def with_noise_scale(optimizer: Optimizer, decay: float = 0.99) -> Optimizer:
    """Average the gradient noise in slots, to report the gradient noise scale: noise_scale = tr Σ/|G|².

    Σ is the covariance of the gradient of one example, G the mean gradient. Progress per step is about
    1/(1 + noise_scale/B) of that with the exact gradient, where B is the batch size: a batch much smaller than the
    noise scale wastes steps, a much larger one wastes examples.
    `minimize(..., num_microbatches=n, metrics=("noise_scale",))` measures both from the gradients of the n
    microbatches, which it computes anyway:

        tr Σ = (small − big)·W/(n − 1),  |G|² = big − tr Σ/W

    big is the squared norm of the mean gradient, small the weighted mean of the squared norms of the microbatch
    gradients, W the number of examples in the batch or the sum of the values of `weight_fn`. Both estimates are
    unbiased, and they are averaged separately, not as a ratio. Gradients are those of the loss: before clipping, noise
    and weight decay, and without the loss scale.

    Args:
        optimizer: The whole optimizer, including chains and partitions. `dynamic_loss_scale` must wrap this wrapper;
            `skip_nonfinite`, `master_weights`, `update_every` and `scope` may. Under a label, or next to another
            element of a chain, the first step raises an error.
        decay: The decay of the averages, in [0, 1): 0.99 leaves a spread of about 5 % at n = 4, 0.999 of 2 %.

    Returns:
        An `Optimizer` with three more scalar slots, `noise/gradient_noise`, `noise/gradient_square` and `noise/weight`,
        which corrects the bias of the averages. Only measurements count: a step that does not request `noise_scale`,
        that a guard skipped, or that has fewer than two microbatches of positive weight, changes no slot.
        A training step's metrics show `gradient_noise` (tr Σ), `gradient_square` (|G|²) and `noise_scale`, in examples
        or in the unit of `weight_fn`. They are NaN before the first measurement, and `noise_scale` is NaN until the
        averaged |G|² is positive.

    Raises:
        TypeError: `optimizer` is not an `Optimizer`, or `decay` is not a plain number.
        ValueError: `decay` is out of its range, or the optimizer already has slots of these names.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> def loss_fn(params, x):
        ...     return -jnp.mean(params["w"] * x)
        >>> train_step = jstep.minimize(loss_fn, optimizer, num_microbatches=2, metrics=("noise_scale",))
        >>> state, metrics = train_step(state, jnp.array([1.0, 3.0]))
        >>> print(metrics["gradient_noise"], metrics["gradient_square"], round(float(metrics["noise_scale"]), 4))
        2.0 3.0 0.6667

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.
    """
    require_optimizer("optimizer", optimizer)
    share = 1 - constant("decay", decay, low=0, high=1, below=True)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, at.params, at.step, at.context, exact=True)
        return updates, inner, own if at.context.noise is None else _averaged(own, at.context.noise, share)

    return wrap_optimizer(
        optimizer,
        "with_noise_scale",
        update,
        Own(dict.fromkeys(SLOTS, lambda params, step: jnp.zeros((), jnp.float32)), SLOTS),
        inner_roles=Roles.without_scale,
        takes_context=True,
    )


def _averaged(slots: Slots, measured: GradientNoise, share: float) -> Slots:
    """Update the averages with a measurement, if it is finite."""
    found = jnp.isfinite(measured.noise) & jnp.isfinite(measured.square)

    def moved(name: str, value: Array) -> Array:
        old = slots[name]
        return jnp.where(found, old + share * (value.astype(old.dtype) - old), old)

    new = (measured.noise, measured.square, jnp.ones((), jnp.float32))
    return {name: moved(name, value) for name, value in zip(SLOTS, new, strict=True)}


def noise_slots(roles: Roles) -> dict[Role, str]:
    """The slots of the averages by role; empty if the optimizer has none.

    Raises:
        ValueError: They are under a label or next to other elements.
    """
    hidden = roles.of(Role.HIDDEN_NOISE)
    if hidden:
        raise ValueError(
            f"with_noise_scale: must wrap the whole optimizer, got the slot {hidden[0]!r} below a label or "
            "beside other elements; it measures the noise of all gradients. Put it around the whole optimizer: "
            "with_noise_scale(partition(...)), with_noise_scale(chain(...))"
        )
    return {role: name for name, role in roles.items() if role in SLOTS.values() and role is not None}


def require_noise_slots(roles: Roles) -> None:
    """Check that an optimizer averages the gradient noise.

    Raises:
        ValueError: It does not; the error suggests `with_noise_scale`.
    """
    if not noise_slots(roles):
        raise ValueError(
            "metrics: 'noise_scale' is averaged over steps in slots of the state, which this optimizer does not have; "
            "create state and step with jstep.with_noise_scale(optimizer)"
        )


def noise_metrics(roles: Roles, slots: Slots) -> dict[str, Array]:
    """The metrics of a step: the bias-corrected averages, and their ratio."""
    names = noise_slots(roles)
    noise, square, weight = (slots[names[role]] for role in SLOTS.values())
    noise, square = noise / weight, square / weight  # NaN before the first measurement, which has weight 0
    scale = jnp.where(square > 0, noise / square, jnp.nan)
    return {"noise_scale": scale, "gradient_noise": noise, "gradient_square": square}
