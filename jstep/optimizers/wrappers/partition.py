"""Different optimizers for different parameters."""

from collections.abc import Callable, Mapping
from typing import Any

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.indexed_slices import is_slices
from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.held import check_prefix
from jstep.optimizers.masks import part_of
from jstep.optimizers.matched import NO_GRADIENTS
from jstep.optimizers.merge import check_names, merge, merged_hyperparameters
from jstep.optimizers.names import Init, makes_finished_updates, own_slots, slot_names
from jstep.optimizers.wrappers.scope import scope


def partition(optimizers: Mapping[str, Optimizer], labels: Callable[[str, Any], str | None]) -> Optimizer:
    """Each leaf by the optimizer of its label.

    Args:
        optimizers: Label → optimizer.
        labels: `labels(path, leaf) -> label`, or None for a leaf that stays as it is and has no slots. It may look
            at the leaf's shape and dtype, not at its values.

    Returns:
        An `Optimizer` whose slots and hyperparameters are named `label/…`; a slot holds None for the leaves of
        other labels. What an element computes over all leaves, such as a global norm, it computes over its own.

    Raises:
        TypeError: An element is not an optimizer.
        ValueError: There is none, two have a slot or hyperparameter of the same name (labels `a` and `a/b` may), or
            a leaf has a label without an optimizer (when the slots are made).

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
        raise ValueError("optimizers={}: partition needs at least one")
    as_function(labels, "labels", "(path, leaf) -> label")
    parts = {label: scope(label, require_optimizer(f"optimizers[{label!r}]", one)) for label, one in optimizers.items()}
    called = {f"the optimizer of label {label!r}": part for label, part in parts.items()}
    check_names(called)

    def labels_of(params: Params) -> list[str | None]:
        found = []
        for path, leaf in trees.leaves_with_paths(params):
            label = labels(path, leaf)
            if not (label is None or (isinstance(label, str) and label in parts)):
                raise ValueError(
                    f"labels({path!r}, …) returned {label!r}, which has no optimizer"
                    f"{trees.nearest(str(label), parts)}; optimizers has {sorted(parts)}, and None freezes a leaf"
                )
            found.append(label)
        return found

    def restricted(params: Params, leaves: list[Any], labelled: list[str | None], label: str) -> Any:
        mine = [leaf if one == label else None for leaf, one in zip(leaves, labelled, strict=True)]
        return trees.structure(params).unflatten(mine)

    def own_params(params: Params) -> dict[str, Params]:
        leaves, labelled = trees.flatten(params)[0], labels_of(params)
        return {label: restricted(params, leaves, labelled, label) for label in parts}

    def init(params: Params, global_step: Step = 0) -> Slots:
        with part_of(params):
            own = own_params(params)
            made = [
                (f"the optimizer of label {label!r}", part.init(own[label], global_step))
                for label, part in parts.items()
            ]
        return merge(made, "slot")

    def names(params: Params) -> list[str] | None:
        own = own_params(params)
        found: list[str] = []
        for label, part in parts.items():
            inner = slot_names(part, own[label])
            if inner is None:
                return None
            found += inner
        return found

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        treedef, labelled = trees.structure(params), labels_of(params)
        leaves = trees.flatten(params)[0]
        gradients = trees.flatten_like(params, updates, "gradients", is_leaf=is_slices)
        merged: list[Any] = [None] * treedef.num_leaves
        new: Slots = {}
        given = False
        with part_of(params):
            for label, part in parts.items():
                own = restricted(params, leaves, labelled, label)
                mine = own_slots(part, slots, own)
                if all(trees.is_none(g) for g, one in zip(gradients, labelled, strict=True) if one == label):
                    new |= mine
                    continue
                given = True
                partial, kept = part.update(restricted(params, gradients, labelled, label), mine, own, step)
                new |= kept
                for i, one in enumerate(trees.flatten_like(params, partial, "updates", is_leaf=is_slices)):
                    merged[i] = one if one is not None else merged[i]
        if not given:
            raise ValueError(
                f"{NO_GRADIENTS}: {trees.paths_of(params)[:20]}. All gradients are None or of frozen leaves."
            )
        return treedef.unflatten(merged), new

    finished = any(makes_finished_updates(part) for part in parts.values())
    return Optimizer(Init(init, names, finished), update, merged_hyperparameters(called))
