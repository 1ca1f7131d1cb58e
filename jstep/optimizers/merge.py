"""Merge the slots and hyperparameters of combined optimizers, and check their names."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jstep.core.slot_roles import Roles, roles_of
from jstep.core.types import Optimizer, Params, Slots, Step
from jstep.optimizers.held import shown_name
from jstep.optimizers.names import hyperparameter_names

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
    merged = Roles(merge(known.items(), "slot"), complete=all(roles.complete for roles in known.values()))
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
