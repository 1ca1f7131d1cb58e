"""The updates of one training step, to warn of ages that count too many of them."""

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Iterator
from typing import NamedTuple

from jstep.core import trees
from jstep.core.checks import format_list
from jstep.core.exceptions import setting
from jstep.core.logs import log_once
from jstep.core.trees import Optimizer, Params, Updates
from jstep.differentiate.loss_gradients import UNUSED
from jstep.slots.indexed_slices import is_slices
from jstep.slots.roles import AGES, Labels, Roles, init_labels


class Update(NamedTuple):
    """An update of a step: its leaves with a gradient, those whose ages only count it, its averages."""

    updated: set[str]
    aged: set[str]
    increments: bool
    per_step: set[str]


@dataclasses.dataclass
class _StepUpdates:
    updates: list[Update] = dataclasses.field(default_factory=list)
    unused: set[str] = dataclasses.field(default_factory=set)

    def warn(self) -> None:
        updated, aged = (set[str]().union(*paths) for paths in zip(*(u[:2] for u in self.updates), strict=True))
        if leaves := sorted(map(repr, self.unused & updated & aged)):
            log_once(
                logging.WARNING,
                f"one update of the step has no gradient of {format_list(leaves)}, and another one has: the age of its "
                "slots, which corrects the bias of averages, counts both (in PyTorch a parameter's own updates). "
                "Otherwise add a term 0 * … of it to the loss that does not use it, or give it a label of its own in a "
                "jstep.partition",
            )
        averages = sorted(set[str]().union(*(map(repr, update.per_step) for update in self.updates)))
        if averages and not any(update.increments for update in self.updates):
            log_once(
                logging.WARNING,
                f"the averages {format_list(averages)} move once a step, at the update that increments the global "
                "step, and no update of this step does: make the last one with increment_global_step=True",
            )


_UPDATES: contextvars.ContextVar[_StepUpdates | None] = contextvars.ContextVar("jstep_updates", default=None)


@contextlib.contextmanager
def watch_updates() -> Iterator[None]:
    """Collect the updates of a step in this context, and then warn of them."""
    if _UPDATES.get() is not None:  # a step inside of another one
        yield
        return
    with setting(_UPDATES, _StepUpdates()) as found, setting(UNUSED, found.unused):
        yield
    if found.updates:
        found.warn()


def note_update(optimizer: Optimizer, params: Params, gradients: Updates, roles: Roles, *, increments: bool) -> None:
    if (step := _UPDATES.get()) is None:
        return
    leaves = trees.flatten_like(params, gradients, "gradients", is_leaf=is_slices)
    labels = init_labels(optimizer, params) or [""] * len(leaves)
    named = list(zip(trees.leaf_paths(params), labels, leaves, strict=True))
    counting = {label for _, label, gradient in named if gradient is not None} & _labels_with_age(labels, roles)
    updated = {path for path, _, gradient in named if gradient is not None}
    aged = {path for path, label, gradient in named if gradient is None and label in counting}
    step.updates.append(Update(updated, aged, increments, {*roles.per_step}))


def _labels_with_age(labels: Labels, roles: Roles) -> set[str | None]:
    names = {*labels}
    owners = [{name for name in names if age.startswith(f"{name}/")} for age in roles.of(*AGES)]
    return names if not all(owners) else set[str | None]().union(*owners)
