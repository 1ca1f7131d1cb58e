"""Names of slots and hyperparameters when optimizers are put together."""

from collections.abc import Callable, Sequence
from typing import Any

from jstep.core.types import Optimizer, Params, Slots, Step


def merge(parts: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """One dict of several.

    Raises:
        ValueError: A name occurs twice; points to `scope`.
    """
    merged: dict[str, Any] = {}
    owner: dict[str, int] = {}
    for i, part in enumerate(parts):
        for name in part:
            if name in merged:
                raise ValueError(
                    f"optimizers {owner[name]} and {i} both have a {what} named {name!r}; give one of them a name of "
                    f"its own with jstep.scope('name', optimizer), which makes it 'name/{name}'"
                )
        merged.update(part)
        owner |= dict.fromkeys(part, i)
    return merged


def prefixed(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """The same values under `prefix/name`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def scoped(prefix: str, slots: Slots) -> Slots:
    """The slots under a prefix, without it."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tree for name, tree in slots.items() if name.startswith(start)}


def merged_init(optimizers: Sequence[Optimizer]) -> Callable[..., Slots]:
    """The `init` of optimizers together."""

    def init(params: Params, global_step: Step = 0) -> Slots:
        return merge([optimizer.init(params, global_step) for optimizer in optimizers], "slot")

    return init


def merged_hyperparameters(optimizers: Sequence[Optimizer]) -> Callable[[Step], dict[str, Any]]:
    """The `hyperparameters` of optimizers together."""

    def hyperparameters(step: Step, /) -> dict[str, Any]:
        return merge([optimizer.hyperparameters(step) for optimizer in optimizers], "hyperparameter")

    return hyperparameters


def check_names(optimizers: Sequence[Optimizer]) -> None:
    """Refuses colliding names when optimizers are put together, not only when they are first used.

    Raises:
        ValueError: A name occurs twice.
    """
    slots = []
    for optimizer in optimizers:
        try:
            slots.append(optimizer.init({}, 0))
        except Exception:  # a user's own init may want real params: its names are checked by `init` then
            slots.append({})
    merge(slots, "slot")
    merged_hyperparameters(optimizers)(0)
