"""Different optimizers for different parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jstep.core import trees
from jstep.core.indexed_slices import is_slices
from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.matched import NO_GRADIENTS
from jstep.optimizers.merge import merged_hyperparameters
from jstep.optimizers.wrappers.scope import scope


def partition(optimizers: Mapping[str, Optimizer], labels: Callable[[str, Any], str]) -> Optimizer:
    """Each leaf by the optimizer of its label.

    Args:
        optimizers: Label → optimizer.
        labels: `labels(path, leaf) -> label`. It may look at the leaf's shape and dtype, not at its values.

    Returns:
        An `Optimizer` whose slots and hyperparameters are named `label/…`; a slot holds None for the leaves of
        other labels. What an element computes over all leaves, such as a global norm, it computes over its own.

    Raises:
        TypeError: An element is not an optimizer.
        ValueError: There is none, or a leaf has a label without an optimizer (when the slots are made).

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
    if not optimizers:
        raise ValueError("optimizers={}: partition needs at least one")
    if not callable(labels):
        raise TypeError(f"labels={labels!r}: must be a function (path, leaf) -> label, got {type(labels).__name__}")
    parts = {label: scope(label, require_optimizer(f"optimizers[{label!r}]", one)) for label, one in optimizers.items()}

    def label_of(path: str, leaf: Any) -> str:
        label = labels(path, leaf)
        if label not in parts:
            raise ValueError(
                f"labels({path!r}, …) returned {label!r}, which has no optimizer{trees.nearest(str(label), parts)}; "
                f"optimizers has {sorted(parts)}"
            )
        return label

    def restricted(tree: Any, params: Params, label: str, what: str) -> Any:
        found = trees.flatten_like(params, tree, what, is_leaf=is_slices)
        mine = [
            part if label_of(path, leaf) == label else None
            for part, (path, leaf) in zip(found, trees.leaves_with_paths(params), strict=True)
        ]
        return trees.structure(params).unflatten(mine)

    def init(params: Params, global_step: Step = 0) -> Slots:
        slots: Slots = {}
        for label, part in parts.items():
            slots |= part.init(restricted(params, params, label, "params"), global_step)
        return slots

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        treedef = trees.structure(params)
        merged: list[Any] = [None] * treedef.num_leaves
        new: Slots = {}
        given = False
        for label, part in parts.items():
            gradients = restricted(updates, params, label, "gradients")
            own = restricted(params, params, label, "params")
            if all(trees.is_none(g) for g in jax.tree.leaves(gradients, is_leaf=trees.is_none)):
                new |= {name: tree for name, tree in slots.items() if name.startswith(f"{label}/")}
                continue
            given = True
            partial, kept = part.update(gradients, slots, own, step)
            new |= kept
            for i, one in enumerate(trees.flatten_like(params, partial, "updates", is_leaf=is_slices)):
                merged[i] = one if one is not None else merged[i]
        if not given:
            raise ValueError(f"{NO_GRADIENTS}: {trees.paths_of(params)[:20]}. All gradients are None.")
        return treedef.unflatten(merged), new

    return Optimizer(init, update, merged_hyperparameters(list(parts.values())))
