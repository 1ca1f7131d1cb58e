"""An optimizer around another: the inner one's slots under their names, and some of its own."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jstep.core.types import Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.age import new_start_step
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import Hyper, report, values_at
from jstep.optimizers.matched import missing_slot
from jstep.optimizers.merge import check_names, merge, merged_hyperparameters
from jstep.optimizers.names import Init, makes_finished_updates, own_slots, slot_names
from jstep.state import START_STEP

Around: TypeAlias = Callable[[Updates, Slots, Slots, Params, Step, Hyper], tuple[Updates, Slots, Slots]]
"""`update(updates, inner, own, params, step, h) -> (updates, inner, own)`, the slots of either apart."""


def wrapped(
    optimizer: Optimizer,
    by: str,
    update: Around,
    *,
    added: Mapping[str, Callable[[Params, Step], Any]] | None = None,
    hyper: Mapping[str, Any] | None = None,
    aged: bool = False,
    init_on: Callable[[Params], Params] = lambda params: params,
) -> Optimizer:
    """An optimizer around another.

    Args:
        optimizer: The inner one.
        by: The wrapper's name, for errors.
        update: The update.
        added: The names of its own slots → `make(params, global_step)`.
        hyper: Its own hyperparameters, as `checked` returned them.
        aged: Whether it needs `start_step`: the inner one's, or one of its own where the inner one has none.
            Either way it finds it in `own`, and need not return it.
        init_on: What the inner one sees as params when its slots are made.

    Raises:
        ValueError: Both have a slot or a hyperparameter of the same name.
    """
    added, hyper = added or {}, hyper or {}
    held = held_names(hyper)

    def own_init(params: Params, global_step: Step = 0) -> Slots:
        return {name: make(params, global_step) for name, make in added.items()} | held_slots(hyper)

    own = Optimizer(
        Init(own_init, lambda params: (*added, *held)),
        lambda updates, slots, params, step: (updates, {}),
        report(hyper),
    )
    parts = {f"the optimizer in {by}": optimizer, by: own}
    check_names(parts)

    def lacks_age(inner: Any) -> bool:
        return aged and START_STEP not in (inner or ())

    def init(params: Params, global_step: Step) -> Slots:
        inner = optimizer.init(init_on(params), global_step)
        slots = merge(zip(parts, (inner, own_init(params, global_step)), strict=True), "slot")
        return slots | ({START_STEP: new_start_step(global_step)} if lacks_age(inner) else {})

    def names(params: Params) -> list[str] | None:
        inner = slot_names(optimizer, params)
        if inner is None:
            return None
        return [*inner, *added, *held, *([START_STEP] if lacks_age(inner) else [])]

    def whole(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        wanted = (*added, *held, *([START_STEP] if aged else []))
        for name in wanted:
            if name not in slots:
                raise missing_slot(name, slots)
        inner = own_slots(optimizer, slots, params)
        mine = {name: slots[name] for name in wanted}
        updates, inner, changed = update(updates, inner, mine, params, step, values_at(hyper, step, slots))
        return updates, mine | changed | inner

    return Optimizer(Init(init, names, makes_finished_updates(optimizer)), whole, merged_hyperparameters(parts))
