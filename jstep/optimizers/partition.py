"""Different optimizers for different parameters: `partition`, and the leaves that one freezes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.calls import makes_optimizer
from jstep.core.checks import as_function
from jstep.core.exceptions import scoped, setting
from jstep.core.indexed_slices import is_slices
from jstep.core.matching import NoGradientsError
from jstep.core.optax_transformations import require_optimizer
from jstep.core.slot_roles import AGES, Init, Labels, Roles, labels_of, roles_of
from jstep.core.trees import EMPTY_CONTEXT, Context, Optimizer, OptimizerLike, Params, Slots, Step, Updates
from jstep.optimizers import leaf_values, nested
from jstep.optimizers.chain import order_of_parts, scope
from jstep.optimizers.host_slots import loads_slots
from jstep.optimizers.hyperparameters import check_prefix
from jstep.optimizers.nested import StepInputs
from jstep.optimizers.updates import is_update


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
    nested.check_names(made.called)
    init = Init(
        made.init,
        made.roles,
        finished=any(map(nested.makes_finished_updates, parts.values())),
        guarded=all(map(nested.is_guarded, parts.values())),
        labels=made.inner_labels,
        order=order_of_parts(parts.values()),
        rated=all(map(nested.is_rated, parts.values())),
    )
    takes_context = any(part.takes_context for part in parts.values())
    return Optimizer(init, made.update, nested.merged_hyperparameters(made.called), takes_context)


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

        own_context = nested.inner_context(
            context, in_whole, lambda tree: self._restricted(self._treedef.flatten_up_to(tree))
        )
        return nested.call_update(self.optimizer, own, slots, StepInputs(self.params, step, own_context), exact=True)


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
        return nested.merge(zip(self.called, made, strict=True), "slot")

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
