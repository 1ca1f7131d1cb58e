"""Optimizers made of others: chains and their elements, scopes, partitions of the parameters."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import (
    as_function,
    as_mapping,
    as_string,
    describe_type,
    format_bytes,
    format_value,
)
from jstep.core.exceptions import setting
from jstep.core.logs import logger
from jstep.core.placement import move_to_devices
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.trees import Array, Optimizer, OptimizerLike, Params, Slots, Step, Updates
from jstep.optimizers import draws, hyperparameters, leaf_values, nested
from jstep.optimizers.host_slots import loads_slots
from jstep.optimizers.hyperparameters import Hyper, check_prefix, held_roles, held_slots, values_at
from jstep.optimizers.nested import StepInputs, unpack_inputs
from jstep.optimizers.updates import is_update, wide_updates
from jstep.slots.indexed_slices import is_slices
from jstep.slots.matching import IS_IDLE, NoGradientsError, as_slots
from jstep.slots.optax_transformations import as_first_optimizer, as_optimizer
from jstep.slots.roles import AGES, Init, Labels, Roles, init_labels, needs_all_params, roles_of


class _Leaves:
    """The leaves of params, flattened once for all optimizers of a partition or chain."""

    def __init__(self, params: Params) -> None:
        self.leaves, self.treedef = trees.flatten(params)

    def select(self, leaves: list[Any], indices: Sequence[int]) -> Any:
        """Return the tree of some leaves, with None for the others."""
        selected: list[Any] = [None] * len(leaves)
        for index in indices:
            selected[index] = leaves[index]
        return self.treedef.unflatten(selected)


class _PartOptimizer:
    """An optimizer of some leaves, and `params` with None for the others."""

    def __init__(self, whole: _Leaves, indices: Sequence[int], optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._whole = whole
        self._indices = indices
        self.params = whole.select(whole.leaves, indices)

    def own(self, tree: Updates) -> Updates:
        return self._whole.select(self._whole.treedef.flatten_up_to(tree), self._indices)

    def call(
        self, updates: Updates, slots: Slots, inputs: StepInputs, *, exact: bool = True
    ) -> tuple[Updates, Slots]:
        whole = self._whole

        def complete(params: Params) -> Params:
            leaves = whole.treedef.flatten_up_to(params)
            own_leaves = [leaves[index] for index in self._indices]
            return whole.treedef.unflatten(
                trees.replace_leaves(whole.leaves, self._indices, own_leaves)
            )

        if len(self._indices) < len(whole.leaves):
            context = nested.inner_context(inputs.context, complete, self.own)
            updates = self.own(updates)
            inputs = inputs._replace(params=self.params, context=context)
        return nested.call_update(self.optimizer, updates, slots, inputs, exact=exact)

    def update(self, updates: Updates, slots: Slots, inputs: StepInputs) -> tuple[Updates, Slots]:
        gradients = self._whole.treedef.flatten_up_to(updates)
        if all(gradients[index] is None for index in self._indices):
            raise NoGradientsError(self.params, "All gradients of this label are None.")
        return self.call(updates, slots, inputs)

    def slots_per_step(self, slots: Slots, inputs: StepInputs, roles: Roles) -> Slots:
        if not (roles.per_step and nested.INCREMENTS.get()):
            return {}
        with setting(IS_IDLE, True):
            _, new = self.call(self._whole.select(self._whole.leaves, ()), slots, inputs)
        names = {*roles.per_step, *map(roles.halves.get, roles.per_step)}
        return {name: new[name] for name in names if name in new}


@makes_optimizer()
def chain(*optimizers: OptimizerLike) -> Optimizer:
    """Apply optimizers in sequence: the updates of one are the gradients of the next.

    Args:
        *optimizers: At least one. Two that multiply by −learning_rate give a warning.

    Returns:
        An `Optimizer` with the slots and hyperparameters of all. Parameters that a `partition`
        among them freezes have no slots in any element.

    Raises:
        ValueError: No element is given, or two have a slot or a hyperparameter of the same name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(1e-3))
        >>> sorted(optimizer.hyperparameters(0))
        ['beta1', 'beta2', 'clip_by_global_norm', 'epsilon', 'learning_rate']

    Source: `optax.chain`.
    """
    if not optimizers:
        raise ValueError("optimizers: must be at least one optimizer, got none")
    elements = [
        as_optimizer(f"optimizers[{i}]", optimizer) for i, optimizer in enumerate(optimizers)
    ]
    named = {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(elements)}
    finished = [
        name for name, optimizer in named.items() if nested.makes_finished_updates(optimizer)
    ]
    negative = [name for name, optimizer in named.items() if nested.negates_updates(optimizer)]
    # Each of these multiplies the updates by a negative number. An even number of them ascends.
    flips = finished + negative
    warning = ""
    if finished and len(flips) % 2 == 0 and len(set(flips)) > 1:
        takes = "takes them as gradients" if len(finished) > 1 else "has a negative factor"
        warning = (
            f"chain: {flips[0]} makes finished updates, and {flips[1]} {takes}: "
            "the sign flips twice, so this is gradient ascent; keep one of the two"
        )
    try:
        nested.check_names(named)
    except ValueError as error:
        if warning:
            error.add_note(warning)
        raise
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=4)  # above both decorators
    functions = _Chain(named)
    is_negative = len(flips) % 2 == 1
    init = Init(
        functions.init,
        lambda params: nested.merge_roles(named, params),
        finished=bool(finished),
        # Of the whole chain, besides the one sign that `finished` tells.
        negates=is_negative != bool(finished),
        guarded=nested.is_guarded(elements[0]),
        labels=functions.labels,
        needs_all=any(map(needs_all_params, elements)),
    )
    takes_context = any(optimizer.takes_context for optimizer in elements)
    return Optimizer(
        init, unpack_inputs(functions.update), nested.merge_hyperparameters(named), takes_context
    )


class _Chain:
    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        self._named = named
        self._has_warned = False

    def parts(self, params: Params) -> list[_PartOptimizer]:
        whole = _Leaves(params)
        every_index = range(len(whole.leaves))
        labels = self.labels(params)
        trained: Sequence[int] = every_index
        if labels is not None:
            trained = [index for index, label in enumerate(labels) if label is not None]
        parts = []
        for element in self._named.values():
            indices = every_index if needs_all_params(element) else trained
            parts.append(_PartOptimizer(whole, indices, element))
        return parts

    def labels(self, params: Params) -> Labels | None:
        """Return the labels of the leaves in all partitions of the chain.

        A leaf that one of them freezes has none.
        """
        labels_by_element = [init_labels(element, params) for element in self._named.values()]
        partition_labels = [labels for labels in labels_by_element if labels is not None]
        if not partition_labels:
            return None
        rows = zip(*partition_labels, strict=True)
        return [None if None in row else "/".join(map(str, row)) for row in rows]

    def init(self, params: Params, step: Step) -> Slots:
        with leaf_values.partial_params(params):
            values = [part.optimizer.init(part.params, step) for part in self.parts(params)]
        slots = dict(zip(self._named, values, strict=True))
        for name, size in _bytes_of_frozen(params, self.labels(params), slots).items():
            if not self._has_warned:
                logger.warning(
                    "%s: its slots of frozen parameters (of no label) take %s; jstep cannot tell "
                    "whether an Optax transformation or a custom optimizer needs them: "
                    "put it inside the partition",
                    name,
                    format_bytes(size),
                )
            self._has_warned = True
        names = [name for tree in values for name in tree]
        has_twins = len(set(names)) < len(names)
        return nested.merge(
            slots.items(), "slot", self._shared(params) if has_twins else frozenset()
        )

    def _shared(self, params: Params) -> set[str]:
        """The slots in which several elements count draws."""
        return draws.shared_names(
            roles_of(part.optimizer, part.params) for part in self.parts(params)
        )

    def update(self, updates: Updates, slots: Slots, inputs: StepInputs) -> tuple[Updates, Slots]:
        all_slots: Slots = {}
        with leaf_values.partial_params(inputs.params):
            parts = self.parts(inputs.params)
            for part in parts:
                old = nested.slots_of(part.optimizer, slots, part.params)
                updates, new = part.call(updates, old, inputs, exact=part is parts[-1])
                twins = all_slots.keys() & new.keys()
                if twins:
                    twins &= self._shared(inputs.params)
                    new |= draws.join_draws(twins, slots, all_slots, new)
                all_slots |= new
        return updates, all_slots


def _bytes_of_frozen(
    params: Params, labels: Labels | None, slots: Mapping[str, Slots]
) -> dict[str, int]:
    """Map optimizers to the bytes of their slots for leaves without a label."""
    sizes: dict[str, int] = {}
    if labels is None:
        return sizes
    for name, slots_of_optimizer in slots.items():
        for tree in slots_of_optimizer.values():
            if not trees.is_like(params, tree):
                continue
            leaves = zip(trees.structure(params).flatten_up_to(tree), labels, strict=True)
            frozen = [leaf for leaf, label in leaves if label is None and leaf is not None]
            size = sum(int(np.size(leaf)) * leaf.dtype.itemsize for leaf in frozen)
            if size:
                sizes[name] = sizes.get(name, 0) + size
    return sizes


@makes_optimizer(2)
def scope(optimizer: OptimizerLike, name: str) -> Optimizer:
    """Rename the slots and hyperparameters of an optimizer to `name/…`.

    Args:
        optimizer: The optimizer.
        name: The prefix, without a trailing slash.

    Raises:
        ValueError: The name is empty, begins or ends with a slash, or has the part `held`.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.scope(jstep.adam(), "fast"))
        >>> jstep.get_slot_names(state)
        ['fast/m', 'fast/v']
    """
    optimizer = as_first_optimizer("scope(optimizer, name)", optimizer, name)
    check_prefix("name", as_string(name, "name"))

    def update(updates: Updates, slots: Slots, inputs: StepInputs) -> tuple[Updates, Slots]:
        old = nested.slots_of(optimizer, slots, inputs.params, f"{name}/")
        updates, new = nested.call_update(optimizer, updates, old, inputs, exact=True)
        return updates, nested.add_prefix(name, new)

    def labels(params: Params) -> Labels | None:
        inner = init_labels(optimizer, params)
        if inner is None:
            return None
        return [None if label is None else f"{name}/{label}" for label in inner]

    def init(params: Params, global_step: Step) -> Slots:
        return nested.add_prefix(name, optimizer.init(params, global_step))

    def roles(params: Params) -> Roles:
        return roles_of(optimizer, params).prefixed(name)

    def hyper(step: Step, /) -> dict[str, Any]:
        return nested.add_prefix(name, optimizer.hyperparameters(step))

    outer_init = nested.wrap_init(optimizer, init, roles, labels=labels)
    return optimizer._replace(init=outer_init, update=unpack_inputs(update), hyperparameters=hyper)


@makes_optimizer(1)
def stateless(fn: Callable[[Updates, Params, Step], Updates]) -> Optimizer:
    """A chain element from a pure function, without slots or hyperparameters.

    Args:
        fn: A pure function `fn(updates, params, step) -> updates`. Leaves of updates are arrays (in
            float32 at least), `IndexedSlices` or None, which stays None.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> signs = jstep.stateless(lambda updates, params, step: jax.tree.map(jnp.sign, updates))
        >>> optimizer = jstep.chain(signs, jstep.gradient_descent(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": 3.0}, optimizer).params["w"])
        0.5

    Source: `optax.stateless`.
    """
    as_function(fn, "fn", "(updates, params, step) -> updates")
    return element(lambda updates, params, step, h: fn(updates, params, step), {})


def element(
    fn: Callable[[Updates, Params, Step, Hyper], Updates], hyper: Mapping[str, Any]
) -> Optimizer:
    """A chain element from `fn(updates, params, step, h) -> updates`.

    `fn` must handle None leaves and `IndexedSlices`; arrays are float32 at least.
    """
    roles = held_roles(hyper)

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, /
    ) -> tuple[Updates, Slots]:
        kept = as_slots(roles, slots)
        new = fn(
            wide_updates(updates), move_to_devices(params), step, values_at(hyper, step, slots)
        )
        return new, kept

    init = Init(lambda params, step: held_slots(hyper), lambda params: roles)
    return Optimizer(init, update, hyperparameters.report(hyper))


def drawing_element(
    fn: Callable[[Updates, Params, Step, Hyper, Array], Updates], hyper: Mapping[str, Any]
) -> Optimizer:
    """As `element`, of a function that draws random numbers.

    It also gets the number of the update within the step.
    """
    roles = held_roles(hyper).merge(draws.ROLES)

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, /
    ) -> tuple[Updates, Slots]:
        kept = as_slots(roles, slots)
        number = draws.number_in_step(slots, step)
        new = fn(
            wide_updates(updates),
            move_to_devices(params),
            step,
            values_at(hyper, step, slots),
            number,
        )
        return new, kept | draws.next_draws(slots, step)

    init = Init(lambda params, step: held_slots(hyper) | draws.fresh_draws(), lambda params: roles)
    return Optimizer(init, update, hyperparameters.report(hyper))


# Partitions: different optimizers for different parameters, and the leaves that one freezes.


@makes_optimizer(2)
def partition(
    optimizers: Mapping[str, OptimizerLike], labels: Callable[[str, Any], str | None] | Any
) -> Optimizer:
    """Update each leaf with the optimizer of its label.

    Args:
        optimizers: Label → optimizer.
        labels: `labels(path, leaf) -> label`, from the leaf's shape and dtype, not its values; or a
            tree of labels, a prefix of the parameters. The label None freezes a leaf: it has no
            slots and no gradient, and no norm, clipping, decay or guard includes it.

    Returns:
        An `Optimizer` whose slots and hyperparameters are named `label/…`; a slot is None for the
        leaves of other labels. A value over all leaves, such as a global norm, covers the leaves of
        one label. A label without any gradient skips the step: its slots stay unchanged and do not
        age.

    Raises:
        ValueError: Two optimizers have a slot or hyperparameter of the same name (possible with
            labels `a` and `a/b`), or, at `init`, a leaf has a label without an optimizer, or a tree
            of labels another structure.

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
    scoped = {}
    by_label = as_mapping(optimizers, "optimizers", "from labels to optimizers")
    for label, optimizer in by_label.items():
        if not isinstance(label, str):
            raise TypeError(
                f"optimizers: the label {label!r} must be a string, got {describe_type(label)}"
            )
        check_prefix("a label of optimizers", label)
        if optimizer is None:
            raise TypeError(
                f"optimizers[{label!r}]=None: must be a jstep.Optimizer; to freeze parameters, "
                "leave the label out, and let labels return None for them"
            )
        scoped[label] = scope(as_optimizer(f"optimizers[{label!r}]", optimizer), label)
    if not optimizers:
        raise ValueError(
            f"optimizers={format_value(optimizers)}: must have at least one optimizer, got none"
        )
    if (
        labels is None
        or isinstance(labels, bool | int | float)
        or (callable(labels) and trees.is_function(labels))
    ):
        as_function(labels, "labels", "(path, leaf) -> label, or a tree of labels")
    functions = _Partition(scoped, labels)
    nested.check_names(functions.named, are_in_sequence=False)
    init = Init(
        functions.init,
        functions.roles,
        finished=any(map(nested.makes_finished_updates, scoped.values())),
        guarded=all(map(nested.is_guarded, scoped.values())),
        labels=functions.inner_labels,
    )
    takes_context = any(optimizer.takes_context for optimizer in scoped.values())
    return Optimizer(
        init,
        unpack_inputs(functions.update),
        nested.merge_hyperparameters(functions.named),
        takes_context,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Partition:
    """The functions of a partition.

    `warned` has the arguments of the masks whose warning was logged.
    """

    optimizers: Mapping[str, Optimizer]
    labels: Any
    warned: set[str] = dataclasses.field(default_factory=set)

    @property
    def named(self) -> dict[str, Optimizer]:
        return {
            f"the optimizer of label {label!r}": optimizer
            for label, optimizer in self.optimizers.items()
        }

    @contextlib.contextmanager
    def parts(self, params: Params) -> Iterator[tuple[Labels, dict[str, _PartOptimizer]]]:
        """Yield the label of each leaf, and the optimizer of each label with its leaves."""
        with leaf_values.partial_params(params), leaf_values.masks_of_all_labels(self.warned):
            labels = self._labels_of(params)
            indices_of_labels: dict[str, list[int]] = {label: [] for label in self.optimizers}
            for index, label in enumerate(labels):
                if label is not None:
                    indices_of_labels[label].append(index)
            whole = _Leaves(params)
            parts: dict[str, _PartOptimizer] = {}
            for label, indices in indices_of_labels.items():
                parts[label] = _PartOptimizer(whole, indices, self.optimizers[label])
            yield labels, parts

    def _labels_of(self, params: Params) -> Labels:
        named = leaf_values.own_leaves(params)
        is_function = trees.is_function(self.labels)
        if is_function:
            names = [self.labels(path, leaf) for path, leaf in named]
        else:
            names = leaf_values.call_on_whole(
                params, functools.partial(_labels_of_leaves, self.labels)
            )
        for label, (path, _) in zip(names, named, strict=True):
            if not (label is None or (isinstance(label, str) and label in self.optimizers)):
                subject = f"labels: the leaf at {path!r} has"
                if is_function:
                    subject = f"labels({path!r}, …) returned"
                raise ValueError(
                    f"{subject} {label!r}, must be one of {sorted(self.optimizers)}, "
                    "or None to freeze the leaf"
                )
        return names

    def inner_labels(self, params: Params) -> Labels:
        """The labels of the leaves; for a part that is a partition itself, its labels."""
        with self.parts(params) as (labels, parts):
            inner = {
                label: init_labels(part.optimizer, part.params) for label, part in parts.items()
            }
        iterators = {
            label: iter(labels_of_part)
            for label, labels_of_part in inner.items()
            if labels_of_part is not None
        }
        return [next(iterators[label]) if label in iterators else label for label in labels]

    def init(self, params: Params, global_step: Step = 0) -> Slots:
        with self.parts(params) as (_, parts):
            slots = [part.optimizer.init(part.params, global_step) for part in parts.values()]
        return nested.merge(zip(self.named, slots, strict=True), "slot")

    def roles(self, params: Params) -> Roles:
        with self.parts(params) as (_, parts):
            roles = [roles_of(part.optimizer, part.params) for part in parts.values()]
        return functools.reduce(Roles.merge, roles).with_misplaced()

    def update(self, updates: Updates, slots: Slots, inputs: StepInputs) -> tuple[Updates, Slots]:
        params = inputs.params
        # This raises for another structure.
        trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        new_updates: list[Any] = [None] * len(jax.tree.leaves(params))
        all_slots: Slots = {}
        idle = 0
        with self.parts(params) as (_, parts):
            roles = {label: roles_of(part.optimizer, part.params) for label, part in parts.items()}
            for label, part in parts.items():
                old = _slots_of(label, roles, slots)
                try:
                    partial, new = part.update(updates, old, inputs)
                except NoGradientsError:
                    idle += 1
                    ages = roles[label].names_with(*AGES)
                    later = {
                        name: jax.tree.map(lambda slot: slot + 1, old[name])
                        for name in ages
                        if name in old
                    }
                    all_slots |= old | later | part.slots_per_step(old, inputs, roles[label])
                    continue
                all_slots |= new
                for i, u in enumerate(
                    trees.flatten_like(params, partial, "updates", is_leaf=is_update)
                ):
                    if u is not None:
                        new_updates[i] = u
        if idle == len(self.optimizers) and not IS_IDLE.get():
            raise NoGradientsError(params, "All gradients are None or of frozen leaves.")
        return trees.structure(params).unflatten(new_updates), all_slots


def _labels_of_leaves(labels: Any, params: Params) -> list[Any]:
    names: list[Any] = []
    if not jax.tree.leaves(params):  # wrappers query the slots of an empty tree
        return names

    def fill(label: object, subtree: object) -> None:
        names.extend([label] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(fill, labels, params, is_leaf=trees.is_none)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"labels={format_value(labels)}: a tree of labels must have the structure of params "
            "or a prefix of it"
        ) from error
    return names


def _slots_of(label: str, roles_by_label: Mapping[str, Roles], slots: Slots) -> Slots:
    if roles_by_label[label].complete:
        return {name: slots[name] for name in roles_by_label[label] if name in slots}
    # Of an optimizer that does not know its slots: those with its label that no other one has.
    others: set[str] = set()
    for other, roles in roles_by_label.items():
        if other != label:
            others.update(roles)
    return {
        name: tree
        for name, tree in slots.items()
        if name.startswith(f"{label}/") and name not in others
    }


def frozen_leaves(optimizer: Optimizer, params: Params) -> list[bool]:
    labels = init_labels(optimizer, params)
    if labels is None:
        return [False] * len(jax.tree.leaves(params))
    return [label is None for label in labels]


def drop_frozen(optimizer: Optimizer, params: Params, gradients: Updates) -> Updates:
    """Gradients, or a tree like params, with None for the leaves that a `partition` freezes."""
    frozen = frozen_leaves(optimizer, params)
    if not any(frozen):
        return gradients
    leaves = trees.flatten_like(params, gradients, "gradients", is_leaf=is_slices)
    pairs = zip(leaves, frozen, strict=True)
    return trees.structure(params).unflatten(
        [None if is_frozen else leaf for leaf, is_frozen in pairs]
    )


def trained_params(optimizer: Optimizer, params: Params) -> Params:
    return drop_frozen(optimizer, params, params)
