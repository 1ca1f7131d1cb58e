"""Use different optimizers for different parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.slot_roles import AGES, Init, Labels, Roles, labels_of, roles_of
from jstep.core.trees import Context, Optimizer, Params, Slots, Step, Updates, is_slices, require_optimizer
from jstep.optimizers.held import check_prefix
from jstep.optimizers.masks import own_leaves, partial_params
from jstep.optimizers.match_gradients import NoGradientsError
from jstep.optimizers.offloading import loads_slots
from jstep.optimizers.parts import (
    EMPTY_CONTEXT,
    call_update,
    check_names,
    inner_context,
    is_guarded,
    makes_finished_updates,
    merge,
    merged_hyperparameters,
)
from jstep.optimizers.projected import is_update
from jstep.optimizers.wrappers.chain import scope


def partition(optimizers: Mapping[str, Optimizer], labels: Callable[[str, Any], str | None]) -> Optimizer:
    """Update each leaf with the optimizer of its label.

    Args:
        optimizers: Label → optimizer.
        labels: `labels(path, leaf) -> label`, or None for a frozen leaf, which has no slots. It may depend on the
            leaf's shape and dtype, not on its values.

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
    called = {f"the optimizer of label {label!r}": part for label, part in parts.items()}
    check_names(called)

    def labelled(params: Params) -> Labels:
        found: Labels = []
        for path, leaf in own_leaves(params):
            label = labels(path, leaf)
            if not (label is None or (isinstance(label, str) and label in parts)):
                raise ValueError(
                    f"labels({path!r}, …) returned {label!r}, which has no optimizer"
                    f"{trees.nearest(str(label), parts)}; optimizers has {sorted(parts)}, and None freezes a leaf"
                )
            found.append(label)
        return found

    def split(params: Params) -> dict[str, _Part]:
        names = labelled(params)
        return {label: _Part(one, params, [mine == label for mine in names]) for label, one in parts.items()}

    def inner_labels(params: Params) -> Labels:
        with partial_params(params):
            names = labelled(params)
            inner = {label: labels_of(part.optimizer, part.params) for label, part in split(params).items()}
        below = {label: iter(found) for label, found in inner.items() if found is not None}
        return [next(below[label]) if label in below else label for label in names]

    def init(params: Params, global_step: Step = 0) -> Slots:
        with partial_params(params):
            made = [
                (name, part.optimizer.init(part.params, global_step))
                for name, part in zip(called, split(params).values(), strict=True)
            ]
        return merge(made, "slot")

    def roles(params: Params) -> Roles:
        with partial_params(params):
            found = Roles()
            for part in split(params).values():
                found = found.joined(roles_of(part.optimizer, part.params))
        return found.beside_others()

    @loads_slots
    def update(
        updates: Updates, slots: Slots, params: Params, step: Step, context: Context = EMPTY_CONTEXT, /
    ) -> tuple[Updates, Slots]:
        gradients = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        merged: list[Any] = [None] * len(gradients)
        new: Slots = {}
        idle = 0
        with partial_params(params):
            divided = split(params)
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
        if idle == len(parts):
            raise NoGradientsError(params, "All gradients are None or of frozen leaves.")
        return trees.structure(params).unflatten(merged), new

    init_of_all = Init(
        init,
        roles,
        finished=any(makes_finished_updates(part) for part in parts.values()),
        guarded=all(is_guarded(part) for part in parts.values()),
        labels=inner_labels,
    )
    takes_context = any(part.takes_context for part in parts.values())
    return Optimizer(init_of_all, update, merged_hyperparameters(called), takes_context)


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

    def _in_whole(self, params: Params) -> Params:
        """All parameters, with those of this part replaced."""
        found = self._treedef.flatten_up_to(params)
        pairs = zip(found, self._leaves, self._mine, strict=True)
        return self._treedef.unflatten([one if mine else leaf for one, leaf, mine in pairs])

    def _of_gradients(self, gradients: Updates) -> Updates:
        return self._restricted(self._treedef.flatten_up_to(gradients))

    def update(self, gradients: list[Any], slots: Slots, step: Step, context: Context) -> tuple[Updates, Slots]:
        """The updates of these leaves, and the new slots."""
        own = self._restricted(gradients)
        if not jax.tree.leaves(own, is_leaf=is_slices):
            raise NoGradientsError(self.params, "All gradients of this part are None.")
        own_context = inner_context(context, self._in_whole, self._of_gradients)
        return call_update(self.optimizer, own, slots, self.params, step, own_context, exact=True)


def _slots_of(label: str, known: Mapping[str, Roles], slots: Slots) -> Slots:
    """The slots of one label: those of its optimizer or, if they are not known, those with its prefix."""
    if known[label].complete:
        return {name: slots[name] for name in known[label] if name in slots}
    others = {name for other, roles in known.items() if other != label for name in roles}
    return {name: tree for name, tree in slots.items() if name.startswith(f"{label}/") and name not in others}
