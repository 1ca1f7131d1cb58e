"""The parts of a composed optimizer: the names of their slots and hyperparameters, and calls of their updates."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jstep.core.slot_roles import Init, Roles, abstractly, roles_of
from jstep.core.trees import Context, Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.held import shown_name
from jstep.optimizers.offloading import can_load_slots, with_slots_loaded
from jstep.optimizers.projected import collecting_conditions, moves

EMPTY_CONTEXT = Context()


def call_update(
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    params: Params,
    step: Step,
    context: Context,
    *,
    exact: bool = False,
) -> tuple[Updates, Slots]:
    """Call the update of an optimizer, with the context if it takes one.

    Args:
        optimizer: The optimizer.
        updates: Its gradients.
        slots: Its slots.
        params: The parameters.
        step: The step.
        context: The context.
        exact: Whether the caller passes updates on unchanged, or adds them with `apply_updates`: then they may contain
            `Projected` leaves.
    """
    further = (context,) if optimizer.takes_context else ()

    def update(slots: Slots, params: Params) -> tuple[Updates, Slots]:
        if isinstance(optimizer.init, Init):
            return optimizer.update(updates, slots, params, step, *further)
        with collecting_conditions(None):  # those inside a custom update may belong to a program of its own
            return optimizer.update(updates, slots, params, step, *further)

    new, slots = update(slots, params) if can_load_slots(optimizer) else with_slots_loaded(update, slots, params)
    return new if exact else moves(params, new), slots


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


def slot_names(optimizer: Optimizer, params: Params) -> list[str] | None:
    """The names of an optimizer's slots for some parameters; None if they are not known."""
    roles = roles_of(optimizer, params)
    return list(roles) if roles.complete else None


def own_slots(optimizer: Optimizer, slots: Slots, params: Params, prefix: str = "") -> Slots:
    """Select the slots of one optimizer, under the names it uses itself.

    Args:
        optimizer: The optimizer.
        slots: The slots of all optimizers.
        params: The parameters they are for.
        prefix: The prefix of its names in `slots`.
    """
    names: Iterable[str] | None = slot_names(optimizer, params)
    if names is None:
        names = [name.removeprefix(prefix) for name in slots if name.startswith(prefix)]
    return {name: slots[prefix + name] for name in names if prefix + name in slots}


def hyperparameter_names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's hyperparameters. Uses no device."""
    names: list[str] = []
    abstractly(lambda step: names.extend(optimizer.hyperparameters(step)))
    return names


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether gradients that are not finite are known to reach neither parameters nor slots."""
    return isinstance(optimizer.init, Init) and optimizer.init.guarded


def makes_finished_updates(optimizer: Optimizer) -> bool:
    """Whether the updates of an optimizer include −learning_rate, so that another one would flip their sign."""
    if isinstance(optimizer.init, Init):
        return optimizer.init.finished
    try:
        names = hyperparameter_names(optimizer)
    except Exception:  # a user-defined function, which may need a concrete step
        return False
    return any(name.rsplit("/", 1)[-1] == "learning_rate" for name in names)


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
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for part, values in parts:
        for name, value in values.items():
            if name in merged:
                shown = shown_name(name) if what == "slot" else None
                of = "" if shown is None else f", that of the held hyperparameter {shown!r}"
                raise ValueError(
                    f"{owner[name]} and {part} both have a {what} named {name!r}{of}; give one of them a prefix "
                    f"with jstep.scope('name', optimizer), which makes it 'name/{name}'"
                )
            merged[name], owner[name] = value, part
    return merged


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under `prefix/name`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def merged_slots(parts: Parts, params: Params, global_step: Step) -> Slots:
    """The merged slots of several optimizers."""
    return merge([(part, one.init(params, global_step)) for part, one in parts.items()], "slot")


def merged_roles(parts: Parts, params: Params) -> Roles:
    """The merged slots of several optimizers, and their roles."""
    known = {part: roles_of(one, params) for part, one in parts.items()}
    merge(known.items(), "slot")
    merged = functools.reduce(Roles.joined, known.values(), Roles())
    return merged.beside_others() if len(parts) > 1 else merged


def merged_hyperparameters(parts: Parts) -> Callable[[Step], dict[str, Any]]:
    """The merged `hyperparameters` of several optimizers."""

    def hyperparameters(step: Step, /) -> dict[str, Any]:
        return merge([(part, one.hyperparameters(step)) for part, one in parts.items()], "hyperparameter")

    return hyperparameters


def check_names(parts: Parts) -> None:
    """Raise for colliding names when optimizers are combined, not only when they are first used.

    Uses no device, because `jax.distributed.initialize` may be called later.
    """
    merged_roles(parts, {})
    hyper = []
    for part, one in parts.items():
        try:
            hyper.append((part, dict.fromkeys(hyperparameter_names(one))))
        except Exception:  # a schedule may need a concrete step: names are then checked at first use
            continue
    merge(hyper, "hyperparameter")


def refuse_formats(by: str, optimizer: Optimizer, why: Mapping[str, str]) -> None:
    """Reject an optimizer that contains what a wrapper must not be around.

    Args:
        by: The name of the wrapper.
        optimizer: The optimizer.
        why: What it must not contain, as in `Roles.formats` → the reason and the remedy.

    Raises:
        ValueError: It contains one of them.
    """
    for name in sorted(roles_of(optimizer, {}).formats & why.keys()):
        raise ValueError(f"optimizer: must not contain {name} inside {by}, {why[name]}")
