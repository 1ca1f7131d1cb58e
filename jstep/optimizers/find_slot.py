"""Find the slot of one part of an optimizer in a state, by name and shape, without the optimizer itself."""

from collections.abc import Callable

from jstep.core import trees
from jstep.core.checks import kind
from jstep.state import TrainState


def find_slot(state: TrainState, name: str, hint: str, belongs: Callable[[str], bool] = lambda slot: True) -> str:
    """The full name of the only slot with a given name, under any scopes and labels.

    Args:
        state: The state.
        name: The name, with or without its prefixes.
        hint: How such a slot is created, for the error.
        belongs: A predicate on the slot's full name; slots that fail it are ignored.

    Raises:
        TypeError: The state is not a TrainState.
        ValueError: There is no such slot, or several.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state={state!r:.100}: must be a TrainState, got {kind(state)}")
    slots = state.slots if isinstance(state.slots, dict) else {}
    found = [slot for slot in slots if slot == name or slot.endswith(f"/{name}")]
    found = [slot for slot in found if trees.is_like(state.params, slots[slot]) and belongs(slot)]
    if name in found:
        return name
    if len(found) > 1:
        raise ValueError(f"name={name!r}: the state has several such slots, {sorted(found)}; give the full name of one")
    if not found:
        raise ValueError(
            f"name={name!r}: the state has no such slot{trees.nearest(str(name), slots)}; it has {sorted(slots)}. "
            f"{hint}"
        )
    return found[0]
