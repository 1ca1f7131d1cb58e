"""Optimizers made of others: wrappers, chains, partitions, cautious updates, projections."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_function, as_text
from jstep.core.exceptions import scoped, setting
from jstep.core.indexed_slices import is_slices, on_table
from jstep.core.logs import log_warning
from jstep.core.matching import NoGradientsError, require_slots
from jstep.core.optimizers import EMPTY_CONTEXT, require_optimizer
from jstep.core.placement import on_devices
from jstep.core.slot_roles import AGES, Init, Labels, Order, Role, Roles, labels_of, order_of, roles_of
from jstep.core.trees import Array, Context, Optimizer, OptimizerLike, Params, Slots, Step, Updates
from jstep.optimizers import hyperparameters, leaf_values, leafwise
from jstep.optimizers.conditions import Conditions, conditions_of, observing_conditions
from jstep.optimizers.host_slots import loads_slots
from jstep.optimizers.hyperparameters import check_prefix, held_roles, values_at
from jstep.optimizers.leafwise import StepInputs, new_start_step
from jstep.optimizers.updates import Projected, apply_updates, is_update
from jstep.state.train_state import START_STEP

# Wrap an optimizer: the slots of the inner one keep their names, and the wrapper may add its own.


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


def frozen_leaves(optimizer: Optimizer, params: Params) -> list[bool]:
    """Whether a `partition` in an optimizer freezes each leaf, in order."""
    labels = labels_of(optimizer, params)
    return [False] * len(jax.tree.leaves(params)) if labels is None else [label is None for label in labels]


def without_frozen(optimizer: Optimizer, params: Params, gradients: Updates) -> Updates:
    """Gradients, or another tree like params, with None for the leaves that a `partition` freezes."""
    frozen = frozen_leaves(optimizer, params)
    if not any(frozen):
        return gradients
    found = trees.flatten_like(params, gradients, "gradients", is_leaf=is_slices)
    return trees.structure(params).unflatten([None if out else g for out, g in zip(frozen, found, strict=True)])


def trained(optimizer: Optimizer, params: Params) -> Params:
    """The parameters that an optimizer may update, with None for those that a `partition` freezes."""
    return without_frozen(optimizer, params, params)


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
    leafwise.check_names(parts)
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
        with leaf_values.partial_params(params):
            inner = optimizer.init(init_on(params), global_step)
        slots = leafwise.merge(zip(parts, (inner, own.init(params, global_step)), strict=True), "slot")
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
        inner = leafwise.own_slots(optimizer, slots, params)
        later = ages.after(starts, trees.flatten_like(params, updates, "gradients", is_leaf=is_slices), own, step)
        h, of_leaves = values_at(own.hyper, step, slots), [starts.get(slot or "") for slot in ages.of_leaves]
        at = StepInputs(params, step, context, h, of_leaves)
        updates, inner, changed = update(updates, inner, mine, at)
        return updates, mine | later | changed | inner

    made = leafwise.wrapped_init(optimizer, init, all_roles, guarded)
    hyper = leafwise.merged_hyperparameters(parts)
    return Optimizer(made, whole, hyper, optimizer.takes_context or takes_context)


# Chain optimizers and gradient transformations, and prefix the names of one.


@makes_optimizer()
def chain(*optimizers: OptimizerLike) -> Optimizer:
    """Apply optimizers in sequence: the updates of one are the gradients of the next.

    Args:
        *optimizers: At least one; usually elements that transform gradients, then one that turns them into updates,
            then perhaps elements that transform updates. If two elements make finished updates (which include
            −learning_rate), a warning is issued: the sign flips twice, which is gradient ascent. `minimize` logs a
            warning if a clip comes after a finished update, and if nothing finishes the updates.

    Returns:
        An `Optimizer` with the slots and hyperparameters of all.

    Raises:
        ValueError: No element is given, or two have a slot or a hyperparameter of the same name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3))
        >>> sorted(optimizer.hyperparameters(0))
        ['beta1', 'beta2', 'clip_by_global_norm', 'epsilon', 'learning_rate']

    Source: `optax.chain`; the elements share the global step of the state instead of keeping separate counters.
    """
    if not optimizers:
        raise ValueError("chain() needs at least one optimizer")
    first: Any = optimizers[0]
    if len(optimizers) == 1 and type(first) in (list, tuple):  # an Optax transformation is a NamedTuple
        raise TypeError(
            f"chain: got one {type(first).__name__} of {len(first)} elements; pass them as separate "
            "arguments: chain(*[…]), or chain(first, second)"
        )
    elements = [require_optimizer(f"optimizers[{i}]", one) for i, one in enumerate(optimizers)]
    parts = {f"optimizers[{i}]": one for i, one in enumerate(elements)}
    finished = [part for part, one in parts.items() if leafwise.makes_finished_updates(one)]
    warning = len(finished) > 1 and (
        f"chain: {finished[0]} makes finished updates, which already include −learning_rate, and {finished[1]} takes "
        "them as gradients: the sign flips twice, so this is gradient ascent, and the loss climbs. Keep one of the "
        "two; replace the first by an element that transforms gradients, such as jstep.scale_by_adam() for "
        "jstep.adam(…); or train different leaves with each, using jstep.partition."
    )
    try:
        leafwise.check_names(parts)
    except ValueError as error:
        if warning:
            error.add_note(warning)
        raise
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)  # above both decorators

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        new: Slots = {}
        at = StepInputs(params, step, context)
        for i, optimizer in enumerate(elements):
            mine = leafwise.own_slots(optimizer, slots, params)
            is_last = i == len(elements) - 1
            updates, own = leafwise.call_update(optimizer, updates, mine, at, exact=is_last)
            new |= own
        return updates, new

    def labels(params: Params) -> Labels | None:
        known = [found for one in elements if (found := labels_of(one, params)) is not None]
        rows = list(zip(*known, strict=True))
        return ["/".join(map(str, row)) if None not in row else None for row in rows] if known else None

    init = Init(
        lambda params, step: leafwise.merge([(part, one.init(params, step)) for part, one in parts.items()], "slot"),
        lambda params: leafwise.merged_roles(parts, params),
        finished=bool(finished),
        guarded=leafwise.is_guarded(elements[0]),
        labels=labels,
        order=_order_of_chain(parts),
        rated=any(map(leafwise.is_rated, elements)),
    )
    return Optimizer(init, update, leafwise.merged_hyperparameters(parts), any(one.takes_context for one in elements))


_USUAL_ORDER = (
    "The usual order: jstep.chain(jstep.clip_gradients(…), jstep.adamw(rate)), or by blocks jstep.chain("
    "jstep.clip_gradients(…), jstep.scale_by_adam(), jstep.add_weight_decay(…), jstep.scale_by_learning_rate(rate))"
)


def _order_of_chain(parts: Mapping[str, Optimizer]) -> Order:
    """The place of a chain in another one, by the names and elements of the chain."""
    together = _order_of_partition(parts.values())  # what does not depend on the sequence
    orders = list(map(order_of, parts.values()))
    finished = list(map(leafwise.makes_finished_updates, parts.values()))
    # Without a learning rate it is the last factor that stands for it: those before only scale the gradients.
    factors = [i for i, order in enumerate(orders) if order.is_known and not order.raw]
    first = finished.index(True) if any(finished) else factors[-1] if factors else len(orders)
    names, late = list(parts), together.late_clip
    for i in range(first + 1, len(orders)):
        if together.is_known and orders[i].clips and not late:
            late = f"{names[i]} clips the finished updates of {names[first]}, not the gradients"
    partly_raw = any(
        order.partly_raw and all(other.raw for j, other in enumerate(orders) if i != j)
        for i, order in enumerate(orders)
    )
    return dataclasses.replace(together, partly_raw=partly_raw, late_clip=late)


def _order_of_partition(parts: Collection[Optimizer]) -> Order:
    """The place of a partition in a chain."""
    orders = list(map(order_of, parts))
    return Order(
        all(order.is_known or leafwise.makes_finished_updates(one) for order, one in zip(orders, parts, strict=True)),
        raw=all(order.raw for order in orders),
        partly_raw=any(order.partly_raw for order in orders),
        clips=any(order.clips for order in orders),
        late_clip=next((order.late_clip for order in orders if order.late_clip), ""),
    )


def warn_of_order(optimizer: Optimizer) -> None:
    """Log a warning if a clip comes after the learning rate, and one if there is no learning rate at all."""
    order = order_of(optimizer)
    if order.late_clip:
        log_warning("chain: %s. %s", order.late_clip, _USUAL_ORDER)
    if order.partly_raw:
        log_warning(
            "optimizer: nothing multiplies its updates by −learning_rate (scale_by_learning_rate, scale, "
            "on_hyperball), so that they are added as they are, uphill. %s",
            _USUAL_ORDER,
        )


@makes_optimizer(2)
def scope(name: str, optimizer: OptimizerLike) -> Optimizer:
    """Rename the slots and hyperparameters of an optimizer to `name/…`.

    Args:
        name: The prefix, without a trailing slash.
        optimizer: The optimizer.

    Returns:
        An `Optimizer`.

    Raises:
        ValueError: The name is empty, begins or ends with a slash, or has the part `held`.

    Example:
        >>> import jstep
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, jstep.scope("fast", jstep.adam())))
        ['fast/m', 'fast/v']
    """
    optimizer = require_optimizer("optimizer", optimizer)
    check_prefix("name", as_text(name, "name"))

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        mine = leafwise.own_slots(optimizer, slots, params, f"{name}/")
        updates, own = leafwise.call_update(optimizer, updates, mine, StepInputs(params, step, context), exact=True)
        return updates, leafwise.prefixed(name, own)

    def labels(params: Params) -> Labels | None:
        inner = labels_of(optimizer, params)
        return None if inner is None else [None if label is None else f"{name}/{label}" for label in inner]

    def init(params: Params, global_step: Step) -> Slots:
        return leafwise.prefixed(name, optimizer.init(params, global_step))

    def roles(params: Params) -> Roles:
        return roles_of(optimizer, params).prefixed(name)

    def hyper(step: Step, /) -> dict[str, Any]:
        return leafwise.prefixed(name, optimizer.hyperparameters(step))

    made = leafwise.wrapped_init(optimizer, init, roles, labels=labels)
    return optimizer._replace(init=made, update=update, hyperparameters=hyper)


# Use different optimizers for different parameters.


@makes_optimizer(2)
def partition(optimizers: Mapping[str, OptimizerLike], labels: Callable[[str, Any], str | None]) -> Optimizer:
    """Update each leaf with the optimizer of its label.

    Args:
        optimizers: Label → optimizer.
        labels: `labels(path, leaf) -> label`, or None for a frozen leaf, which has no slots. It may depend on the
            leaf's shape and dtype, not on its values. `minimize` does not differentiate frozen leaves, whatever is
            around the partition, and `apply_gradients` ignores their gradients: no norm, clipping, weight decay,
            noise scale or guard includes them.

    Returns:
        An `Optimizer` whose slots and hyperparameters are named `label/…`; a slot is None for the leaves of other
        labels. Values that an element computes over all leaves, such as a global norm, cover only the leaves of its
        label. A part without any gradient skips the step: its slots stay unchanged and it does not age.

    Raises:
        ValueError: No optimizer is given, two have a slot or hyperparameter of the same name (possible with labels `a`
            and `a/b`), or, at `init`, a leaf has a label without an optimizer.

    Example:
        >>> import jstep
        >>> optimizer = jstep.partition(
        ...     {"embed": jstep.adagrad(0.1), "rest": jstep.adam(1e-3)},
        ...     lambda path, leaf: "embed" if path.startswith("embed") else "rest",
        ... )
        >>> state = jstep.TrainState.create({"embed": 1.0, "dense": 2.0}, optimizer)
        >>> jstep.get_slot_names(state)
        ['embed/accumulator', 'rest/m', 'rest/v']
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(f"optimizers={optimizers!r}: must map labels to optimizers, got {type(optimizers).__name__}")
    for label in optimizers:
        if not isinstance(label, str):
            raise TypeError(f"optimizers: the label {label!r} must be a string, got {type(label).__name__}")
        check_prefix("a label of optimizers", label)
    if not optimizers:
        raise ValueError("optimizers={}: partition needs at least one optimizer")
    as_function(labels, "labels", "(path, leaf) -> label")
    parts = {label: scope(label, require_optimizer(f"optimizers[{label!r}]", one)) for label, one in optimizers.items()}
    made = _Partition(parts, labels)
    leafwise.check_names(made.called)
    init = Init(
        made.init,
        made.roles,
        finished=any(map(leafwise.makes_finished_updates, parts.values())),
        guarded=all(map(leafwise.is_guarded, parts.values())),
        labels=made.inner_labels,
        order=_order_of_partition(parts.values()),
        rated=all(map(leafwise.is_rated, parts.values())),
    )
    takes_context = any(part.takes_context for part in parts.values())
    return Optimizer(init, made.update, leafwise.merged_hyperparameters(made.called), takes_context)


class _Part:
    """The leaves of one label, and their optimizer.

    Attributes:
        optimizer: The optimizer, whose slots have the label as prefix.
        params: The parameters, with None for the leaves of other labels.
    """

    def __init__(self, optimizer: Optimizer, params: Params, mine: list[bool]) -> None:
        self.optimizer = optimizer
        self._leaves, self._treedef = trees.flatten(params)
        self._mine = mine
        self.params = self._restricted(self._leaves)

    def _restricted(self, leaves: list[Any]) -> Any:
        return self._treedef.unflatten([leaf if mine else None for leaf, mine in zip(leaves, self._mine, strict=True)])

    def update(self, gradients: list[Any], slots: Slots, step: Step, context: Context) -> tuple[Updates, Slots]:
        """The updates of these leaves, and the new slots."""
        own = self._restricted(gradients)
        if not jax.tree.leaves(own, is_leaf=is_slices):
            raise NoGradientsError(self.params, "All gradients of this part are None.")

        def in_whole(params: Params) -> Params:
            """All parameters, with those of this part replaced."""
            pairs = zip(self._treedef.flatten_up_to(params), self._leaves, self._mine, strict=True)
            return self._treedef.unflatten([one if mine else leaf for one, leaf, mine in pairs])

        own_context = leafwise.inner_context(
            context, in_whole, lambda tree: self._restricted(self._treedef.flatten_up_to(tree))
        )
        return leafwise.call_update(self.optimizer, own, slots, StepInputs(self.params, step, own_context), exact=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Partition:
    """The functions of a partition.

    Attributes:
        parts: Label → its optimizer, whose slots have the label as prefix.
        labels: `labels(path, leaf)`, the label of a leaf.
    """

    parts: Mapping[str, Optimizer]
    labels: Callable[[str, Any], str | None]

    @property
    def called(self) -> dict[str, Optimizer]:
        """The optimizers by what errors call them."""
        return {f"the optimizer of label {label!r}": part for label, part in self.parts.items()}

    @scoped
    def divided(self, params: Params) -> Iterator[tuple[Labels, dict[str, _Part]]]:
        """Give the label of each leaf, in order, and the leaves of each label; masks inside see all parameters."""
        with leaf_values.partial_params(params), setting(leaf_values.IN_PART, True):
            names = [self._label_of(path, leaf) for path, leaf in leaf_values.own_leaves(params)]
            parts = {label: _Part(one, params, [mine == label for mine in names]) for label, one in self.parts.items()}
            yield names, parts

    def _label_of(self, path: str, leaf: Any) -> str | None:
        label = self.labels(path, leaf)
        if not (label is None or (isinstance(label, str) and label in self.parts)):
            raise ValueError(
                f"labels({path!r}, …) returned {label!r}, which has no optimizer"
                f"{trees.nearest(str(label), self.parts)}; optimizers has {sorted(self.parts)}, and None freezes a leaf"
            )
        return label

    def inner_labels(self, params: Params) -> Labels:
        """The labels of the leaves, in parts that are partitions those of their leaves."""
        with self.divided(params) as (names, divided):
            inner = {label: labels_of(part.optimizer, part.params) for label, part in divided.items()}
        below = {label: iter(found) for label, found in inner.items() if found is not None}
        return [next(below[label]) if label in below else label for label in names]

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        """The slots of all parts."""
        with self.divided(params) as (_, divided):
            made = [part.optimizer.init(part.params, global_step) for part in divided.values()]
        return leafwise.merge(zip(self.called, made, strict=True), "slot")

    def roles(self, params: Params) -> Roles:
        """The roles of these slots."""
        with self.divided(params) as (_, divided):
            found = [roles_of(part.optimizer, part.params) for part in divided.values()]
        return functools.reduce(Roles.joined, found).hiding()

    @loads_slots
    def update(
        self, updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        """The updates and slots of all parts; one without any gradient stays as it is, and does not age."""
        gradients = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        merged: list[Any] = [None] * len(gradients)
        new: Slots = {}
        idle = 0
        with self.divided(params) as (_, divided):
            known = {label: roles_of(part.optimizer, part.params) for label, part in divided.items()}
            for label, part in divided.items():
                mine = _slots_of(label, known, slots)
                try:
                    partial, own = part.update(gradients, mine, step, context)
                except NoGradientsError:
                    idle += 1
                    ages = known[label].of(*AGES)
                    later = {name: jax.tree.map(lambda slot: slot + 1, mine[name]) for name in ages if name in mine}
                    new |= mine | later
                    continue
                new |= own
                for i, one in enumerate(trees.flatten_like(params, partial, "updates", is_leaf=is_update)):
                    merged[i] = one if one is not None else merged[i]
        if idle == len(self.parts):
            raise NoGradientsError(params, "All gradients are None or of frozen leaves.")
        return trees.structure(params).unflatten(merged), new


def _slots_of(label: str, known: Mapping[str, Roles], slots: Slots) -> Slots:
    """The slots of one label: those of its optimizer or, if they are not known, those with its prefix."""
    if known[label].complete:
        return {name: slots[name] for name in known[label] if name in slots}
    others = {name for other, roles in known.items() if other != label for name in roles}
    return {name: tree for name, tree in slots.items() if name.startswith(f"{label}/") and name not in others}


# Cautious optimizers, which mask updates that disagree with the gradient.

LEAST_SHARE = 1e-3


@makes_optimizer(1)
def cautious(optimizer: OptimizerLike) -> Optimizer:
    """Cautious updates: u ← u·mask/max(mean(mask), 0.001), mask = (u·g < 0), for each leaf.

    Elements whose update would go up the current gradient are not updated. The other updates are scaled up, so that
    the leaf's step keeps its size.

    Args:
        optimizer: The optimizer that turns gradients g into updates u. Apply `decay_weights` outside of it, because
            the mask is not meant for weight decay.

    Returns:
        An `Optimizer` with the same slots and hyperparameters.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.cautious(jstep.momentum(1.0, 0.9))
        >>> state = jstep.TrainState.create({"w": [0.0, 0.0]}, optimizer)
        >>> for g in ([1.0, 1.0], [1.0, -0.5]):
        ...     state = jstep.apply_gradients(state, {"w": [jnp.float32(x) for x in g]}, optimizer)
        >>> print(*state.params["w"])
        -2.9 -1.0

    Source: Liang et al., "Cautious Optimizers: Improving Training with One Line of Code" (2024).
    """
    optimizer = require_optimizer("optimizer", optimizer)

    def masked(u: Any, g: Any) -> Any:
        g = g.to_dense() if is_slices(g) else jnp.asarray(g)

        def of_table(u: Array) -> Array:
            agrees = (((u < 0) & (g > 0)) | ((u > 0) & (g < 0))).astype(u.dtype)
            return u * (agrees / jnp.maximum(jnp.mean(agrees), LEAST_SHARE))

        return on_table(of_table, u)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        gradients = trees.flatten_like(at.params, updates, "gradients", is_leaf=is_slices)
        updates, inner = leafwise.call_update(optimizer, updates, inner, at)
        return leafwise.map_updates(masked, at.params, updates, gradients, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "cautious", update)


# Projection of the parameters after each update: bounds, unit norms, manifolds.


@makes_optimizer(2)
def with_projection(optimizer: OptimizerLike, fn: Callable[[Params], Params]) -> Optimizer:
    """Project the parameters after each update: p ← fn(p + u).

    The new parameters are `fn(p + u)` bit for bit, so the bounds of a clip hold exactly. The metric `update_norm` is
    that of the whole move, from p to the projected parameters.

    Args:
        optimizer: The optimizer that computes the updates u. Only guards (`skip_nonfinite`, `dynamic_loss_scale`),
            `with_moving_average`, `update_every`, `master_weights`, `partition` and `scope` belong around the
            projection: wrappers that change updates undo it.
        fn: `fn(params) -> params`, of the same structure, shapes and dtypes, a pure function that JAX can trace. Below
            a label of `partition`, the leaves of other parts are None. It sees integer leaves, too; what it returns for
            them is ignored.

    Returns:
        An `Optimizer` with the same slots and hyperparameters. A leaf without an update keeps its value: if it has no
        gradient, or a guard or `update_every`, around the projection or inside it, skipped its update. Averages around
        the projection average the projected parameters. Sparse updates are added to their tables before the projection,
        which reads whole tables.

    Raises:
        TypeError: `fn` is not a function of the params alone, or (in a step) returns a leaf that is not an array.
        ValueError: In a step, `fn` returns another structure, shape or dtype; names the leaf.

    Example:
        Weights that stay in [−0.25, 0.25]:

        >>> import jax, jax.numpy as jnp, jstep
        >>> def clip(params):
        ...     return jax.tree.map(lambda p: jnp.clip(p, -0.25, 0.25), params)
        >>> optimizer = jstep.with_projection(jstep.gradient_descent(0.125), clip)
        >>> state = jstep.TrainState.create({"w": jnp.array([0.0, 3.0])}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.array([-1.0, -1.0])}, optimizer)
        >>> print(state.params["w"])
        [0.125 0.25 ]

    Source: Bertsekas, "On the Goldstein-Levitin-Polyak gradient projection method" (1976).
    """
    optimizer = require_optimizer("optimizer", optimizer)
    as_function(fn, "fn", "(params) -> params, such as a clip of each leaf", takes=1)

    def update(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        params, conditions = at.params, Conditions()
        with observing_conditions(conditions):
            updates, inner = leafwise.call_update(optimizer, updates, inner, at, exact=True)
        moved = apply_updates(params, updates)
        new = _checked(moved, fn(moved))

        def projected(_: Any, new: Any, before: Any, after: Any, condition: Any) -> Projected:
            if condition is None:
                return Projected(new)
            before = on_devices(before)
            # Behind a guard, or if no update was due, another element of a chain may still move the parameter.
            return Projected(jnp.where(condition | jnp.any(after != before), new, before))

        leaves = jax.tree.leaves(params), jax.tree.leaves(moved), conditions_of(params, conditions)
        return leafwise.map_updates(projected, params, updates, new, *leaves, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "with_projection", update)


def _checked(params: Params, projected: Any) -> list[Any]:
    """Return the leaves of projected parameters; those that are not trainable are ignored later."""
    found = trees.flatten_like(params, projected, "the result of fn", may_leave_out=False)
    for i, ((path, leaf), new) in enumerate(zip(trees.leaves_with_paths(params), found, strict=True)):
        if not trees.is_trainable(leaf):
            continue
        if not (trees.is_array(new) or isinstance(new, bool | int | float | complex)):
            what = "nothing" if new is None else type(new).__name__
            raise TypeError(f"fn: must return an array at {trees.quoted(path)}, got {what}")
        kinds = [(np.shape(one), jnp.result_type(one)) for one in (leaf, new)]
        if kinds[0] != kinds[1]:
            shown = [f"{dtype}{list(shape)}" for shape, dtype in kinds]
            cast = f"; cast it with .astype({kinds[0][1]})" if kinds[0][0] == kinds[1][0] else ""
            raise ValueError(
                f"fn: must return params of the same shapes and dtypes: {trees.quoted(path)} is {shown[0]}, and the "
                f"result {shown[1]}{cast}"
            )
        found[i] = jnp.asarray(new)
    return found
