"""Names of slots and hyperparameters when optimizers are put together."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jstep.core.types import Optimizer, Params, Slots, Step
from jstep.optimizers.held import shown_name
from jstep.optimizers.names import Roles, hyperparameter_names, roles_of

Parts = Mapping[str, Optimizer]
"""What each part is called in errors → the part."""


def merge(parts: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> dict[str, Any]:
    """One dict of several.

    Args:
        parts: What each is called in errors, and the dict itself.
        what: What the names name, for the error.

    Raises:
        ValueError: A name occurs twice; points to `scope`.
    """
    merged: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for part, values in parts:
        for name, value in values.items():
            if name in merged:
                shown = shown_name(name) if what == "slot" else None
                of = "" if shown is None else f", that of the held hyperparameter {shown!r}"
                raise ValueError(
                    f"{owner[name]} and {part} both have a {what} named {name!r}{of}; give one of them a name of its "
                    f"own with jstep.scope('name', optimizer), which makes it 'name/{name}'"
                )
            merged[name], owner[name] = value, part
    return merged


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under `prefix/name`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def merged_slots(parts: Parts, params: Params, global_step: Step) -> Slots:
    """The slots of optimizers together."""
    return merge([(part, one.init(params, global_step)) for part, one in parts.items()], "slot")


def merged_roles(parts: Parts, params: Params) -> Roles:
    """The slots of optimizers side by side, and their roles."""
    known = {part: roles_of(one, params) for part, one in parts.items()}
    merged = Roles(merge(known.items(), "slot"), complete=all(roles.complete for roles in known.values()))
    return merged.beside_others() if len(parts) > 1 else merged


def merged_hyperparameters(parts: Parts) -> Callable[[Step], dict[str, Any]]:
    """The `hyperparameters` of optimizers together."""

    def hyperparameters(step: Step, /) -> dict[str, Any]:
        return merge([(part, one.hyperparameters(step)) for part, one in parts.items()], "hyperparameter")

    return hyperparameters


def check_names(parts: Parts) -> None:
    """Refuses colliding names when optimizers are put together, not only when they are first used.

    Touches no device: `jax.distributed.initialize` may come later.
    """
    merged_roles(parts, {})
    hyper = []
    for part, one in parts.items():
        try:
            hyper.append((part, dict.fromkeys(hyperparameter_names(one))))
        except Exception:  # a schedule may want a concrete step: its names are checked when it is first used
            continue
    merge(hyper, "hyperparameter")
