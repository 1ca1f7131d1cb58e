"""`minimize`: train steps from a loss function, or several, and an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from jstep.core import device_values, placement, processes, trees
from jstep.core.checks import as_bool, as_string, format_value
from jstep.core.exceptions import note
from jstep.core.logs import logger
from jstep.core.meshes import shard_like
from jstep.core.selection import VarList
from jstep.core.trees import (
    EMPTY_CONTEXT,
    Array,
    Context,
    Optimizer,
    OptimizerLike,
    Params,
    ScalarOrSchedule,
    Updates,
)
from jstep.differentiate.lanes import Lanes, as_lanes, call_on_lanes
from jstep.differentiate.loss_gradients import (
    GATE_NONE,
    GATE_OP,
    LossGradients,
    LossInputs,
    apply_gate,
)
from jstep.differentiate.microbatches import (
    AggregationMethod,
    LossResult,
    estimate_noise,
    together_squared,
)
from jstep.differentiate.reproducible import evaluate_reproducibly
from jstep.optimizers import guards
from jstep.optimizers.averages import averaged_params, move_model_state
from jstep.optimizers.chains import frozen_leaves
from jstep.optimizers.hyperparameters import value_at
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import roles_of
from jstep.state.global_step import step_array
from jstep.state.slots import as_average_names
from jstep.state.train_state import MODEL_STATE, TrainState, as_state
from jstep.training import metrics as step_metrics
from jstep.training.apply_gradients import (
    apply_update,
    keep_if_skipped,
    parameter_layouts,
    skip_metrics,
)
from jstep.training.explain import explain_arguments
from jstep.training.metrics import (
    LOSS,
    SKIPPED,
    MetricFn,
    RequestedMetrics,
    StepMetrics,
    slot_metrics,
    split_metrics,
)
from jstep.training.step import Body, PureStep, TrainStep, makes_step

CONTEXT_KEY_SALT = 0x6A73
"""Folded into the key of a `Context`, so that it differs from the key of the loss."""

Losses: TypeAlias = Mapping[str, tuple[Callable[..., Any], VarList]]
"""Name → the loss and its var_list."""
_LOSS_FORM = "(loss, var_list), such as (critic_loss, 'critic/*')"


@makes_step()
def minimize(
    loss_fn: Callable[..., Any] | Losses,
    optimizer: OptimizerLike,
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    max_rows_per_device: int | None = None,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    has_model_state: bool = False,
    use_averages: bool | str | Sequence[str] = False,
    rng: Array | None = None,
    pass_step: bool = False,
    sharpness: ScalarOrSchedule | None = None,
    adaptive: bool = False,
    unroll: placement.Unroll = None,
    lanes: int | None = None,
    metrics: str | MetricFn | Collection[str | MetricFn] = (),
    increment_global_step: bool = True,
    jit: bool = True,
    donate: bool = True,
) -> TrainStep:
    """Return a compiled train step `train_step(state, *args) -> (state, metrics)`.

    It donates the state.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar. With has_aux, it returns
            `(loss, aux)`; with has_model_state, it is
            `loss_fn(params, model_state, *args) -> (loss, model_state)`; with both, it returns
            `(loss, (model_state, aux))`. With rng, it also takes `rng=key`; with pass_step,
            `step=global_step`; with use_averages, `averages=params`. Alternatively several losses,
            `{"critic": (critic_loss, "critic/*"), "actor": (actor_loss, "actor/*")}`: each is
            differentiated with respect to its own var_list, all at the same parameters, and all
            gradients are applied in one update. Other parameters do not change.
        optimizer: The optimizer that the state was created with, or an Optax transformation.
        var_list: The parameters to train, as in `compute_gradients`. The others, and those that a
            `partition` freezes, are neither changed nor differentiated.
        has_aux: Whether loss_fn returns auxiliary values, for the metrics.
        num_microbatches: Number of microbatches for gradient accumulation, as in
            `compute_gradients`. Microbatch i of n has the rows i, i + n, i + 2n, …. A loss that
            compares rows with each other (contrastive losses, BatchNorm) sees one microbatch only.
        max_rows_per_device: The maximum number of rows of a microbatch on each device. The number
            of microbatches is then the smallest one that satisfies this, divides the batch and is
            at least num_microbatches; it depends on the number of devices that the rows are sharded
            over, and is logged. Rows of unknown sharding count as being on one device.
        weight_fn: As in `compute_gradients`.
        gate_gradients: As in `compute_gradients`.
        aggregation_method: As in `compute_gradients`.
        adaptive: As in `compute_gradients`.
        has_model_state: Whether loss_fn takes and returns non-trained variables,
            `state.slots["model_state"]`. They are updated once per microbatch, and keep their
            dtypes.
        use_averages: Whether to pass the moving averages of the parameters,
            `averaged_params(state)`, to loss_fn; they are not differentiated. A string, or a list,
            names their slots, as in `averaged_params`.
        rng: A PRNG key; loss_fn gets `fold_in(rng, global_step)`, so a resumed run draws the same
            numbers. With several losses, loss i gets `fold_in(key, i)` of that key. Microbatch i
            gets `fold_in(key, i)` of the key of its loss. These are keys of the step: if it makes
            several updates, each of them gets the same one. Such a step passes keys of its own as
            an argument, one for each update.
        pass_step: Whether loss_fn gets `step`, the global step before the update.
        sharpness: The radius of sharpness-aware minimization, as in `compute_gradients`, or a
            schedule of it.
        unroll: How to unroll the loop over microbatches, as in `scan_steps`; None to choose
            automatically.
        lanes: Makes the results bitwise identical on any number of devices that divides L, this
            power of two. The batch is cut into L contiguous blocks of rows, the *lanes*; each is
            computed by one device, and sums over elements are computed in one binary tree. Loss,
            gradients and floating leaves of aux are means over the lanes, weighted by `weight_fn`;
            integers and bools of aux are sums. Lane i gets `fold_in(key, i)` of the key of its
            loss, and microbatch j `fold_in(key, j)` of its lane's. `num_microbatches` and
            `max_rows_per_device` divide each lane. The page "What the bits depend on" has the
            conditions and limits.
        metrics: Additional metrics to compute: `"grad_norm"` (of the raw gradients of the trained
            parameters), `"update_norm"` (of the updates as added), `"param_norm"` (of all new
            parameters), and `"noise_scale"` (requires microbatches or lanes, and
            `with_noise_scale`). Also functions `fn(gradients, updates, params) -> {name: scalar}`,
            whose values become metrics. They get the raw gradients, None for parameters that are
            not trained; the updates as added, zero if the update is skipped; and the new
            parameters. A leaf may be an `IndexedSlices`.
        increment_global_step: Whether to increment `global_step`.
        jit: Whether to compile the step; if False, the pure function is returned.
        donate: Whether the compiled step donates the state passed in.

    Returns:
        A `TrainStep`, or the pure function if jit=False. Its metrics contain `loss`, each
        hyperparameter used in the update (including those stored in the state), the requested
        norms, and the entries of aux if that is a mapping (nested ones by their path, `world/kl`),
        else `aux`. With several losses they contain `critic/loss` and `critic/<aux>` for each, and
        their sum as `loss`. Metrics are scalars on the device; hyperparameters that are plain
        numbers are NumPy scalars. Summaries that the loss creates but does not return are in
        `summaries`. With a guard (`skip_nonfinite`, `dynamic_loss_scale`), `skipped` is 1.0 if it
        skipped the update and nothing non-finite was applied, else 0.0.

    Raises:
        TypeError: An argument, the loss or a gradient has the wrong type, a key of aux is not a
            string, a function in metrics returns anything but a mapping of names to scalars, or
            model_state changes its structure, a shape or a kind of number, or cannot be merged over
            the lanes.
        ValueError: An argument is out of range; var_list matches nothing, or only frozen
            parameters; num_microbatches, max_rows_per_device or lanes do not fit the batch; lanes
            do not fit the devices, or the loss names their mesh axes; the state does not fit the
            optimizer; names of metrics collide; two losses train one parameter; or the optimizer
            keeps no averages.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 10, 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] * x) ** 2, optimizer)
        >>> state, metrics = train_step(state, jnp.float32(2.0))
        >>> print(state.params["w"], state.global_step, metrics["loss"], metrics["learning_rate"])
        0.19999999 1 4.0 0.1

    Source: `tf.train.Optimizer.minimize`.
    """
    if isinstance(loss_fn, Optimizer):
        raise TypeError(
            f"loss_fn={loss_fn!r}: must be a loss; the arguments are minimize(loss_fn, optimizer)"
        )
    optimizer = as_optimizer("optimizer", optimizer)
    lanes = as_lanes(lanes)
    if lanes is None:
        wanted = step_metrics.as_requested_metrics(metrics, "num_microbatches", num_microbatches)
    else:
        wanted = step_metrics.as_requested_metrics(metrics, "lanes", lanes)
    as_bool(increment_global_step, "increment_global_step")
    as_bool(jit, "jit")
    as_bool(donate, "donate")
    make_differentiation = functools.partial(
        LossGradients,
        has_aux=has_aux,
        has_model_state=has_model_state,
        num_microbatches=num_microbatches,
        max_rows_per_device=max_rows_per_device,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
        sharpness=sharpness,
        adaptive=adaptive,
        unroll=unroll,
        lanes=lanes,
        collect=True,
        squares=wanted.noise,
        frozen=functools.partial(frozen_leaves, optimizer),
    )
    differentiate: LossGradients | SeveralLosses
    if isinstance(loss_fn, Mapping):
        if var_list is not None or has_model_state:
            raise ValueError(
                "var_list, has_model_state: must not be given beside a mapping of losses"
            )
        differentiate = several_losses(loss_fn, make_differentiation)
    else:
        differentiate = make_differentiation(loss_fn, var_list)
    if rng is not None:
        rng = device_values.as_key(rng, "rng")
    update_step = UpdateStep(
        optimizer,
        differentiate,
        wanted,
        has_aux=has_aux,
        has_model_state=has_model_state,
        rng=rng,
        pass_step=as_bool(pass_step, "pass_step"),
        averages=as_average_names(use_averages),
        schedule=sharpness if callable(sharpness) else None,
        increments=increment_global_step,
    )
    body: Body = update_step
    if lanes is not None:
        body = _make_lanes_body(lanes, update_step)
    pure_step = PureStep(
        body,
        title=_title_of(loss_fn),
        depends_on_rows=differentiate.depends_on_rows,
        lanes=lanes,
        optimizer=optimizer,
        increments=increment_global_step,
    )
    if jit:
        return TrainStep(pure_step, donate=donate)
    # A `PureStep` is called in the same way; its own type would need a second signature of all
    # arguments.
    return cast(TrainStep, pure_step)


def _title_of(loss_fn: object) -> str:
    """Return the name of the loss or losses; `train_step` without a name."""
    if isinstance(loss_fn, Mapping):
        return "+".join(loss_fn)
    name = getattr(loss_fn, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else "train_step"


@dataclasses.dataclass(frozen=True, eq=False)
class UpdateStep:
    """The body of a train step of `minimize`: the gradients of one or more losses, and one update.

    `schedule` is the schedule of the radius of sharpness-aware minimization, or None.
    """

    optimizer: Optimizer
    differentiate: LossGradients | SeveralLosses
    wanted: RequestedMetrics
    _: dataclasses.KW_ONLY
    has_aux: bool
    has_model_state: bool
    rng: Array | None
    pass_step: bool
    averages: tuple[str, ...] | None
    schedule: Callable[[Any], Any] | None
    increments: bool

    def __call__(
        self,
        state: TrainState,
        args: tuple[Any, ...],
        batch_specs: trees.Tree,
        lanes: Lanes | None = None,
    ) -> tuple[TrainState, StepMetrics]:
        step = step_array(as_state(state))
        if self.has_model_state and MODEL_STATE not in state.slots:
            raise ValueError(
                "has_model_state=True, but the state has none: "
                "create it with TrainState.create(..., model_state=…)"
            )
        key = None if self.rng is None else jax.random.fold_in(self.rng, step)
        roles = roles_of(self.optimizer, state.params)
        scale = guards.current_loss_scale(roles, state.slots)
        if self.wanted.noise:
            guards.check_noise_slots(roles)
        kwargs: dict[str, Any] = {}
        if self.pass_step:
            kwargs["step"] = step
        if self.averages is not None:
            averages_for = functools.partial(_averages_for, names=self.averages)
            kwargs["averages"] = evaluate_reproducibly(lanes, averages_for, state)
        # Without has_model_state, and with several losses, the model state is not passed and stays
        # unchanged.
        model_state = state.slots[MODEL_STATE] if self.has_model_state else None
        inputs = LossInputs(state.params, model_state, args, kwargs, key, batch_specs, scale, lanes)
        differentiate = self.differentiate
        if self.schedule is not None:
            sharpness_at = functools.partial(value_at, "sharpness", self.schedule)
            sharpness = evaluate_reproducibly(lanes, sharpness_at, step)
            differentiate = replace_losses(differentiate, sharpness=sharpness)
        try:
            result = differentiate(inputs)
        except Exception as error:
            explain_arguments(error, args, state, has_model_state=self.has_model_state)
            raise
        return evaluate_reproducibly(lanes, functools.partial(self.apply, inputs), state, result)

    def apply(
        self, inputs: LossInputs, state: TrainState, result: LossResult
    ) -> tuple[TrainState, StepMetrics]:
        """Return the state after the update by these gradients, and all metrics of the step."""
        scale = guards.current_loss_scale(roles_of(self.optimizer, state.params), state.slots)
        context = self._context(inputs, result, scale)
        update = apply_update(state, result.gradients, self.optimizer, self.increments, context)
        new_state = update.state
        skipped = skip_metrics(update, state, result.gradients, self.optimizer)
        if self.has_model_state:
            model_state = result.model_state
            if skipped:
                # One bad row would ruin the statistics of a batch normalization permanently.
                model_state = keep_if_skipped(
                    skipped[SKIPPED], state.slots[MODEL_STATE], model_state
                )
            new_state = new_state.replace(slots={**new_state.slots, MODEL_STATE: model_state})
        new_state = move_model_state(new_state, update.roles)

        hyperparameters = self.optimizer.hyperparameters(step_array(state))
        # Metrics by their origin, which an error about two of one name shows.
        named: dict[str, Mapping[str, Any]] = {"the optimizer's hyperparameters": hyperparameters}
        named["the optimizer's slots"] = slot_metrics(update.roles, state.slots) | skipped
        is_several = isinstance(self.differentiate, SeveralLosses)
        named |= loss_metrics(result, self.has_aux, is_several=is_several)
        if self.wanted.noise:
            named["the noise scale"] = guards.noise_metrics(update.roles, update.slots)
        named |= self.wanted.measured(result.gradients, update.updates, new_state.params, scale)

        def describe_collision(name: str, first: str, second: str) -> str:
            return f"metrics: {second} and {first} both have {name!r}; rename it in {second}"

        metrics = trees.merge_dicts(named.items(), describe_collision)
        return new_state, split_metrics(metrics, SKIPPED if skipped else None, hyperparameters)

    def _context(self, inputs: LossInputs, result: LossResult, scale: Array | None) -> Context:
        """Return the loss, the gradients at other parameters, a key and the gradient noise."""
        noise = None if result.squares is None else estimate_noise(result.squares)
        if not self.optimizer.takes_context:
            return EMPTY_CONTEXT._replace(noise=noise)
        plain = replace_losses(self.differentiate, sharpness=None, adaptive=False, squares=False)

        def value_and_grad(params: Params) -> tuple[Array, Updates]:
            other = plain(inputs._replace(params=params))
            if scale is None:
                return other.loss, other.gradients
            return other.loss, guards.unscale(other.gradients, scale)

        return Context(result.loss, value_and_grad, inputs.part_inputs(CONTEXT_KEY_SALT).key, noise)


def _make_lanes_body(number: int, update_step: Callable[..., Any]) -> Body:
    """Return the body of a step that runs in this number of lanes."""
    has_warned = False

    def step_in_lanes(lanes: Lanes, state: TrainState, args: tuple[Any, ...]) -> Any:
        nonlocal has_warned
        if lanes.other_axes and not has_warned and processes.is_process_0():
            has_warned = True
            logger.warning(
                "lanes=%d: arrays are also split over %s, "
                "and the rows of the batch are not (tensor parallelism): "
                "the bits of this run are not promised to be the same on another number of devices",
                number,
                ", ".join(map(repr, lanes.other_axes)),
            )
        return update_step(state, args, None, lanes)

    def body(state: TrainState, args: tuple[Any, ...], batch_specs: trees.Tree) -> Any:
        layouts = parameter_layouts(as_state(state))
        leaves = trees.leaves_with_paths(state.params)
        specs = {np.shape(leaf): layouts[path].spec for path, leaf in leaves if path in layouts}
        new, metrics = call_on_lanes(
            number, step_in_lanes, state, args, batch_specs, specs, shard_like((state,))
        )
        return jax.tree.map(placement.place_like_old, new, state), metrics

    return body


def _averages_for(state: TrainState, names: Sequence[str]) -> Params:
    try:
        averages = averaged_params(state, names)
    except ValueError as error:
        raise ValueError(f"use_averages: {error}") from None
    return jax.tree.map(
        lambda leaf: jax.lax.stop_gradient(leaf) if trees.is_trainable(leaf) else leaf, averages
    )


# Several losses in one train step, each with its own parameters.


@dataclasses.dataclass(frozen=True)
class SeveralLosses:
    """Losses with one gate, each differentiated with respect to a part of the parameters."""

    losses: Mapping[str, LossGradients]
    gate_gradients: int

    @property
    def depends_on_rows(self) -> bool:
        return any(loss.depends_on_rows for loss in self.losses.values())

    def __call__(self, inputs: LossInputs) -> LossResult:
        chosen = _choose_leaves(inputs.params, self.losses)
        leaves, treedef = trees.flatten(inputs.params)
        gradients: list[Any] = [None] * len(leaves)
        results: dict[str, LossResult] = {}
        for i, (name, differentiate) in enumerate(self.losses.items()):
            try:
                results[name] = differentiate(inputs.part_inputs(i))
            except Exception as error:
                note(error, f"This error was raised while the loss {name!r} was differentiated.")
                raise
            grads = treedef.flatten_up_to(results[name].gradients)
            trained = [grads[index] for index in chosen[name]]
            if all(gradient is None for gradient in trained):
                raise ValueError(
                    f"loss_fn: the loss {name!r} depends on none of the parameters that it trains"
                )
            gradients = trees.replace_leaves(gradients, chosen[name], trained)
        total = functools.reduce(operator.add, [result.loss for result in results.values()])
        gated = apply_gate(gradients, self.gate_gradients)
        created = [result.summaries for result in results.values() if result.summaries is not None]
        summaries = created[0]._merged(created) if created else None
        return LossResult(
            loss=total,
            model_state=None,
            aux={name: (result.loss, result.aux) for name, result in results.items()},
            gradients=treedef.unflatten(gated),
            summaries=summaries,
            squares=together_squared([result.squares for result in results.values()]),
        )


def several_losses(losses: Losses, make: Callable[[Any, VarList], LossGradients]) -> SeveralLosses:
    """Check the losses, and make each by `make(loss_fn, var_list)`, ungated: all have one gate."""
    if not losses:
        raise ValueError(
            f"loss_fn={format_value(losses)}: must have at least one loss, name -> {_LOSS_FORM}"
        )
    ungated: dict[str, LossGradients] = {}
    for name, entry in losses.items():
        as_string(name, "a name in loss_fn")
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and callable(entry[0])):
            raise TypeError(f"loss_fn[{name!r}]={format_value(entry)}: must be {_LOSS_FORM}")
        loss = make(*entry)
        ungated[name] = dataclasses.replace(loss, gate_gradients=GATE_NONE)
    return SeveralLosses(ungated, loss.gate_gradients)


def replace_losses(
    differentiate: LossGradients | SeveralLosses, **changes: Any
) -> LossGradients | SeveralLosses:
    if not isinstance(differentiate, SeveralLosses):
        return dataclasses.replace(differentiate, **changes)
    losses = {
        name: dataclasses.replace(loss, **changes) for name, loss in differentiate.losses.items()
    }
    return dataclasses.replace(differentiate, losses=losses)


def loss_metrics(
    result: LossResult, has_aux: bool, *, is_several: bool
) -> dict[str, Mapping[str, Any]]:
    """Return where metrics come from, for errors, and the metrics by name."""
    if is_several:
        named = _metrics_of_losses(result, has_aux)
        summaries = result.summaries
    else:
        aux, summaries = _aux_and_summaries(result)
        named = {"the loss": {LOSS: result.loss}, "aux": aux if has_aux else {}}
    if summaries is not None:
        named["the summaries of the loss"] = {"summaries": summaries}
    return named


def _metrics_of_losses(result: LossResult, has_aux: bool) -> dict[str, Mapping[str, Any]]:
    named: dict[str, Mapping[str, Any]] = {"the sum of the losses": {LOSS: result.loss}}
    for name, (loss, aux) in result.aux.items():
        named[f"the loss {name!r}"] = {f"{name}/{LOSS}": loss}
        if has_aux:
            named[f"aux of {name!r}"] = {
                f"{name}/{key}": value for key, value in _name_aux(aux).items()
            }
    return named


def _aux_and_summaries(result: LossResult) -> tuple[Mapping[str, Any], Any]:
    aux = _name_aux(result.aux)
    if result.summaries is None:
        return aux, None
    joined: tuple[Mapping[str, Any], Any] = result.summaries._joined(aux)
    return joined


def _name_aux(aux: object) -> Mapping[str, Any]:
    """Return aux as metrics by their names: the entries of a mapping, or all of it as `aux`."""
    if isinstance(aux, Mapping):
        flat: Mapping[str, Any] = step_metrics.flat_metrics(aux)
        return flat
    return {"aux": aux}


def _choose_leaves(params: Params, losses: Mapping[str, LossGradients]) -> dict[str, list[int]]:
    """Return the indices of the leaves that each loss trains; they must be disjoint."""
    chosen = {name: loss.selected(params, f"loss_fn[{name!r}][1]") for name, loss in losses.items()}
    for (first, indices), (second, others) in itertools.combinations(chosen.items(), 2):
        shared = sorted({*indices} & {*others})
        if shared:
            paths = trees.leaf_paths(params)
            shared_paths = [paths[index] for index in shared[:20]]
            raise ValueError(
                f"loss_fn: the losses {first!r} and {second!r} both train {shared_paths}; "
                "give each parameter to one of them"
            )
    return chosen
