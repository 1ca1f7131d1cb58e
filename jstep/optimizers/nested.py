"""Optimizers inside others: wrapping one, calls of updates, own slots, merged names, and what inner ones report."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.exceptions import setting
from jstep.core.trees import EMPTY_CONTEXT, Array, Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers import hyperparameters
from jstep.optimizers.host_slots import loads_slots, with_slots_loaded
from jstep.optimizers.hyperparameters import held_roles, values_at
from jstep.optimizers.leaf_values import partial_params
from jstep.optimizers.rules import new_start_step
from jstep.optimizers.updates import moves, wide_updates
from jstep.slots.indexed_slices import is_slices
from jstep.slots.matching import require_slots
from jstep.slots.roles import Init, Labels, Role, Roles, labels_of, order_of, roles_of
from jstep.state.train_state import START_STEP


class StepInputs(NamedTuple):
    """Inputs of an optimizer's update besides updates and slots.

    Attributes:
        params: The parameters.
        step: The step.
        context: The context.
        h: For the update of a wrapper, the values of its hyperparameters at the step.
        starts: For the update of a wrapper, the `start_step` of each leaf, in order: the step minus the updates that
            had a gradient of its label. None for a leaf that is never updated, and if the wrapper is not aged.
    """

    params: Params
    step: Step
    context: Context
    h: Mapping[str, Any] = {}
    starts: Sequence[Array | None] = ()


WrappedUpdate: TypeAlias = Callable[[Updates, Slots, Slots, StepInputs], tuple[Updates, Slots, Slots]]
"""`update(updates, inner, own, at) -> (updates, inner, own)`, with separate slots."""


@dataclasses.dataclass(frozen=True)
class Own:
    """The slots and hyperparameters of a wrapper, besides those of the inner optimizer.

    Attributes:
        slots: The names of its slots → `make(params, global_step)`.
        roles: The roles of some of them.
        holds: What some of them hold: see `Slot`.
        hyper: Its hyperparameters, as returned by `checked`; those that are held are slots, too.
        aged: Whether it needs an age. It is that of the inner optimizer's `start_step` if there is one, otherwise of a
            separate slot; around a `partition` each label has a separate slot. The update gets them as `at.starts`.
        counted: `counted(step)`: whether the age counts an update, if it does not count all. Then it is never that of
            the inner optimizer.
        age_scope: The prefix of the separate slots; by default the name of the wrapper.
        details: Details of some slots: see `Roles`.
    """

    slots: Mapping[str, Callable[[Params, Step], Any]] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    holds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hyper: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aged: bool = False
    counted: Callable[[Step], Array] | None = None
    age_scope: str | None = None
    details: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        """Create the slots, but for the age."""
        made = {name: make(params, global_step) for name, make in self.slots.items()}
        return made | hyperparameters.held_slots(self.hyper)

    def all_roles(self) -> Roles:
        """The roles of the slots, but for the age."""
        own = Roles({**dict.fromkeys(self.slots), **self.roles}, holds=self.holds, details=self.details)
        return own.joined(held_roles(self.hyper))


_NOTHING = Own()


def wrap_optimizer(
    optimizer: Optimizer,
    by: str,
    update: WrappedUpdate,
    own: Own = _NOTHING,
    *,
    guarded: bool | None = None,
    inner_roles: Callable[[Roles], Roles] = lambda roles: roles,
    init_on: Callable[[Params], Params] = lambda params: params,
    takes_context: bool = False,
) -> Optimizer:
    """Wrap an optimizer.

    Args:
        optimizer: The inner optimizer.
        by: The wrapper's name, for errors.
        update: The wrapper's update.
        own: What the wrapper keeps in the state.
        guarded: Whether gradients that are not finite reach neither parameters nor slots; by default as for the inner
            optimizer.
        inner_roles: Maps the roles of the inner optimizer's slots to those that outer wrappers see.
        init_on: Maps params to those from which the inner optimizer creates its slots.
        takes_context: Whether the update reads the context itself.

    Raises:
        ValueError: Both have a slot or a hyperparameter of the same name.
    """
    own_roles, reported = own.all_roles(), hyperparameters.report(own.hyper)
    added = Optimizer(Init(own.init, lambda params: own_roles), lambda *args: (args[0], {}), reported)
    parts = {f"the optimizer in {by}": optimizer, by: added}
    check_names(parts)
    age_role = Role.AGE if own.counted is None else Role.OWN_AGE
    age_scope = by if own.age_scope is None else own.age_scope

    def age_slots(params: Params) -> Ages:
        if not own.aged:
            return Ages([None] * len(jax.tree.leaves(params)), {})
        inner, found = roles_of(optimizer, params), labels_of(optimizer, params)

        def free(slot: str) -> str:
            while inner.get(slot, age_role) is not age_role:  # that of an optimizer that skips steps
                slot = f"{by}/{slot}"
            return slot

        if found is None:
            slot = free(START_STEP if own.counted is None else f"{age_scope}/{START_STEP}")
            return Ages([slot] * len(jax.tree.leaves(params)), {slot: slot not in inner})
        slots = [None if label is None else free(f"{age_scope}/{label}/{START_STEP}") for label in found]
        return Ages(slots, {slot: slot not in inner for slot in slots if slot is not None})

    def init(params: Params, global_step: Step) -> Slots:
        with partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
        slots = merge(zip(parts, (inner, own.init(params, global_step)), strict=True), "slot")
        ages = [age for age, is_own in age_slots(params).slots.items() if is_own]
        return slots | {age: new_start_step(global_step) for age in ages}

    def all_roles(params: Params) -> Roles:
        ages = Roles(dict.fromkeys(age_slots(params).slots, age_role))
        return inner_roles(roles_of(optimizer, params)).joined(own_roles).joined(ages)

    @loads_slots
    def whole(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        ages = age_slots(params)
        mine, starts = require_slots(own_roles, slots), require_slots(ages.slots, slots)
        inner = own_slots(optimizer, slots, params)
        later = ages.after(starts, trees.flatten_like(params, updates, "gradients", is_leaf=is_slices), own, step)
        h, of_leaves = values_at(own.hyper, step, slots), [starts.get(slot or "") for slot in ages.of_leaves]
        at = StepInputs(params, step, context, h, of_leaves)
        updates, inner, changed = update(updates, inner, mine, at)
        return updates, mine | later | changed | inner

    made = wrapped_init(optimizer, init, all_roles, guarded)
    hyper = merged_hyperparameters(parts)
    return Optimizer(made, whole, hyper, optimizer.takes_context or takes_context)


class Ages(NamedTuple):
    """The ages of a wrapper.

    Attributes:
        of_leaves: The slot with the `start_step` of each leaf, in order; None for a leaf that is never updated, and
            for all if the wrapper is not aged.
        slots: These slots → whether the wrapper keeps them; otherwise the inner optimizer does.
    """

    of_leaves: Labels
    slots: Mapping[str, bool]

    def after(self, starts: Slots, gradients: Sequence[Any], own: Own, step: Step) -> Slots:
        """The slots that the wrapper keeps, after an update: later by one if it did not count for their leaves."""
        updated = {slot for slot, g in zip(self.of_leaves, gradients, strict=True) if g is not None}

        def later(slot: str, start: Array) -> Array:
            if slot not in updated:
                return start + 1
            return start if own.counted is None else start + (~own.counted(step)).astype(start.dtype)

        return {slot: later(slot, starts[slot]) for slot, is_own in self.slots.items() if is_own}


def call_update(
    optimizer: Optimizer, updates: Updates, slots: Slots, at: StepInputs, *, exact: bool = False
) -> tuple[Updates, Slots]:
    """Call the update of an optimizer, with the context if it takes one.

    Args:
        optimizer: The optimizer.
        updates: Its gradients.
        slots: Its slots.
        at: Its other inputs.
        exact: Whether the caller passes updates on unchanged, or adds them with `apply_updates`: then they may contain
            `Projected` leaves.
    """
    further = (at.context,) if optimizer.takes_context else ()

    def update(slots: Slots, params: Params) -> tuple[Updates, Slots]:
        # Conditions inside a custom update may belong to a program of its own.
        seen_by = CONDITIONS.get() if isinstance(optimizer.init, Init) else ()
        with setting(CONDITIONS, seen_by):
            return optimizer.update(updates, slots, params, at.step, *further)

    loads = getattr(optimizer.update, "loads_slots", False)
    new, slots = update(slots, at.params) if loads else with_slots_loaded(update, slots, at.params)
    return new if exact else moves(at.params, new), slots


def inner_context(
    context: Context, outwards: Callable[[Params], Params], inwards: Callable[[Updates], Updates] = lambda tree: tree
) -> Context:
    """The context for an inner optimizer whose parameters differ from those of the outer one.

    Args:
        context: The context of the outer optimizer.
        outwards: Maps the parameters of the inner optimizer to those of the outer one.
        inwards: Maps the gradients of the outer optimizer to those of the inner one.
    """
    known = context.value_and_grad
    if known is None:
        return context

    def value_and_grad(params: Params) -> tuple[Any, Updates]:
        loss, gradients = known(outwards(params))
        return loss, inwards(gradients)

    return context._replace(value_and_grad=value_and_grad)


def update_masters(
    optimizer: Optimizer, updates: Updates, slots: Slots, masters: Params, at: StepInputs, rounded: Callable[..., Any]
) -> tuple[Updates, Slots]:
    """Call the update of an optimizer whose parameters are the masters of others, with gradients as wide as these.

    Args:
        optimizer: The optimizer.
        updates: The gradients.
        slots: Its slots.
        masters: The master of each parameter.
        at: The inputs of its wrapper. Labels and masks see the parameters, and so does a loss that it evaluates.
        rounded: `rounded(p, master)`, the value of a parameter for its master.
    """
    context = inner_context(at.context, lambda masters: jax.tree.map(rounded, at.params, masters), wide_updates)
    with partial_params(at.params):
        inside = StepInputs(masters, at.step, context)
        return call_update(optimizer, wide_updates(updates), slots, inside, exact=True)


def own_slots(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Select the slots of one optimizer, under the names it uses itself.

    Args:
        optimizer: The optimizer.
        slots: The slots of all optimizers.
        params: The parameters they are for.
        prefix: The prefix of its names in `slots`.
    """
    roles = roles_of(optimizer, params)
    known = roles if roles.complete else [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in known if prefix + name in slots}


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether gradients that are not finite are known to reach neither parameters nor slots."""
    return isinstance(optimizer.init, Init) and optimizer.init.guarded


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether the updates of an optimizer include −learning_rate, so that another one would flip their sign."""
    return optimizer.init.finished if isinstance(optimizer.init, Init) else _reports_a_rate(optimizer)


def is_rated(optimizer: Optimizer) -> bool:
    """Whether all updates of an optimizer have been multiplied by a learning rate that it reports or holds."""
    return optimizer.init.rated if isinstance(optimizer.init, Init) else _reports_a_rate(optimizer)


def _reports_a_rate(optimizer: Optimizer) -> bool:
    return any(map(hyperparameters.is_learning_rate, hyperparameters.reported_names(optimizer.hyperparameters)))


def wrapped_init(
    optimizer: Optimizer,
    make: Callable[[Params, Step], Slots],
    roles: Callable[[Params], Roles],
    guarded: bool | None = None,
    labels: Callable[[Params], Labels | None] | None = None,
) -> Init:
    """The `init` of a wrapper; what it does not change is as in the optimizer inside."""
    is_safe = is_guarded(optimizer) if guarded is None else guarded
    labels = labels or functools.partial(labels_of, optimizer)
    finished = makes_finished_updates(optimizer)
    return Init(make, roles, finished, is_safe, labels, order_of(optimizer), is_rated(optimizer))


Parts = Mapping[str, Optimizer]
"""The name of each part in errors → the part."""


def merge(parts: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> dict[str, Any]:
    """Merge several dicts.

    Args:
        parts: The name of each part in errors, and its dict.
        what: The kind of the entries, for the error.

    Raises:
        ValueError: A name occurs twice; the error suggests `scope`.
    """

    def refusal(name: str, first: str, second: str) -> str:
        shown = hyperparameters.shown_name(name) if what == "slot" else None
        of = "" if shown is None else f", that of the held hyperparameter {shown!r}"
        return (
            f"{first} and {second} both have a {what} named {name!r}{of}; give one of them a prefix "
            f"with jstep.scope('name', optimizer), which makes it 'name/{name}'"
        )

    return trees.merged(parts, refusal)


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under `prefix/name`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def merged_roles(parts: Parts, params: Params) -> Roles:
    """The merged slots of several optimizers, and their roles."""
    known = {part: roles_of(one, params) for part, one in parts.items()}
    merge(known.items(), "slot")
    merged = functools.reduce(Roles.joined, known.values(), Roles())
    return merged.hiding() if len(parts) > 1 else merged


def merged_hyperparameters(parts: Parts) -> Callable[[Step], dict[str, Any]]:
    """The merged `hyperparameters` of several optimizers."""
    return lambda step, /: merge([(part, one.hyperparameters(step)) for part, one in parts.items()], "hyperparameter")


def check_names(parts: Parts) -> None:
    """Raise for colliding names when optimizers are combined, not only when they are first used.

    Uses no device, because `jax.distributed.initialize` may be called later.
    """
    merged_roles(parts, {})
    # Those of a schedule that needs a concrete step are checked at first use.
    names = [(part, hyperparameters.reported_names(one.hyperparameters)) for part, one in parts.items()]
    merge(names, "hyperparameter")


def refuse_formats(by: str, optimizer: Optimizer, **why: str) -> None:
    """Reject an optimizer that contains what a wrapper must not be around.

    Args:
        by: The name of the wrapper.
        optimizer: The optimizer.
        **why: What it must not contain, as in `Roles.formats` → the reason and the remedy.

    Raises:
        ValueError: It contains one of them.
    """
    for name in sorted(roles_of(optimizer, {}).formats & why.keys()):
        raise ValueError(f"optimizer: must not contain {name} inside {by}, {why[name]}")


class Condition(NamedTuple):
    """A condition of the updates of some parameters.

    Attributes:
        params: The parameters: a tree with None in place of the others.
        holds: Whether they were updated: if not, their updates are zero.
        is_guard: Whether the update is otherwise skipped, by a guard; not if it was not due.
    """

    params: Params
    holds: Array
    is_guard: bool


Conditions = list[Condition]

CONDITIONS: contextvars.ContextVar[tuple[Conditions, ...]] = contextvars.ContextVar("jstep_conditions", default=())
"""Where the conditions of the updates that are made are collected: by each wrapper around them that asks for them."""


def observing_conditions(into: Conditions) -> contextlib.AbstractContextManager[Any]:
    """Collect the conditions of the updates made in a context, for those outside as well."""
    return setting(CONDITIONS, (*CONDITIONS.get(), into))


def report_condition(condition: Condition) -> None:
    """Report that some parameters are updated only if a condition holds."""
    for collected in CONDITIONS.get():
        collected.append(condition)


def conditions_of(params: Params, collected: Conditions) -> list[Array | None]:
    """The condition under which each leaf was updated, in order; None if it was in any case.

    Args:
        params: The parameters.
        collected: Conditions of some of them.
    """
    found: dict[Any, Array] = {}
    for part, condition, _ in collected:
        for keys, _ in jax.tree_util.tree_leaves_with_path(part):
            found[keys] = found[keys] & condition if keys in found else condition
    return [found.get(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def unless_skipped_by_guards(collected: Conditions, gradients: list[Any], params: Params) -> Array | bool:
    """Whether guards let an update through, for one leaf with a gradient at least.

    Args:
        collected: The conditions of the update.
        gradients: The gradients, in order; None for a leaf without one.
        params: The parameters.
    """
    conditions = conditions_of(params, [one for one in collected if one.is_guard])
    mine = [one for one, gradient in zip(conditions, gradients, strict=True) if gradient is not None]
    known = [one for one in mine if one is not None]
    return functools.reduce(jnp.logical_or, known) if known and len(known) == len(mine) else True


ADVANCES: contextvars.ContextVar[bool] = contextvars.ContextVar("jstep_advances", default=True)
"""Whether the update that is being computed advances the global step."""
