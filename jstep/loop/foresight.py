"""Warnings about the steps of a run before they are run: averages that will be left behind."""

import logging

import jax

from jstep.core import trees
from jstep.core.meshes import mesh_of, using_mesh
from jstep.core.programs import body_of, depend_on_calls
from jstep.core.slot_roles import FOLLOWS_STEP, FOLLOWS_UPDATES, roles_in, roles_of
from jstep.loop.compiler import shapes_of
from jstep.loop.programs import Dispatched
from jstep.loop.run_record import Run
from jstep.optimizers.averages import MOVED
from jstep.state.train_state import TrainState
from jstep.training.step import minimized, pure

_logger = logging.getLogger("jstep")

_MOST_NAMES = 20


def look_ahead(run: Run) -> None:
    """Log what is foreseen, before the first step of a run."""
    if jax.process_index() != 0:
        return
    _warn_of_averages_left_behind(run)
    roles = roles_in(run.state)
    # Compact averages may move in loops over slices, which do not show calls.
    if roles.with_detail(FOLLOWS_STEP) and "compact" not in roles.formats:
        run.programs.after_first.append(_warn_of_averages_at_rest)


# Moving averages whose parameters move on without them.


def _warn_of_averages_left_behind(run: Run) -> None:
    """Warn of each stage that no longer trains leaves whose averages move only in their updates."""
    params, trained = run.state.params, [False] * len(jax.tree.leaves(run.state.params))
    for stage in run.stages.stages():
        step = minimized(stage.value)
        if stage.first >= run.options.last_step or step is None or step.trains is None or step.optimizer is None:
            continue  # it is not reached, or what it trains is not known
        try:
            trains = step.trains(params)
        except Exception:  # the step raises the same error, and says more about it
            return
        if stage.stop is None or stage.stop > run.first:
            slots = roles_of(step.optimizer, params).with_detail(FOLLOWS_UPDATES)
            averaged = _leaves_in(run.state, slots)
            left = [
                path
                for path, *of in zip(trees.paths_of(params), averaged, trained, trains, strict=False)
                if of == [True, True, False]
            ]
            if left:
                _logger.warning(
                    "train_step[%d] stops training %s: %s only in their updates, and stay where they are from step %d "
                    'on, behind the parameters. jstep.ExponentialMovingAverage(…, follows="step") moves all averages '
                    "once a step.",
                    stage.first,
                    _named(left),
                    f"their moving averages ({_named(slots)}) move",
                    max(stage.first, run.first),
                )
        trained = trains


def _leaves_in(state: TrainState, slots: list[str]) -> list[bool]:
    """Whether one of some slots has a value for each parameter."""
    found = [trees.flatten_like(state.params, state.slots[name], name) for name in slots if name in state.slots]
    return (
        [any(leaf is not None for leaf in leaves) for leaves in zip(*found, strict=True)]
        if found
        else [False for _ in jax.tree.leaves(state.params)]
    )


def _warn_of_averages_at_rest(done: Dispatched) -> None:
    """Warn if averages that follow the step move in no update of a stage, after its first call."""
    names, shapes = roles_in(done.state).with_detail(FOLLOWS_STEP), shapes_of((done.state, *done.args))
    try:
        with using_mesh(mesh_of(shapes)):
            traced, out = jax.make_jaxpr(pure(done.stage.step), return_shape=True)(*shapes)
    except Exception as error:  # a function that cannot be traced
        _logger.debug("%s: whether averages move in it is not known: %s", done.stage.name, error)
        return
    found = depend_on_calls(body_of(traced), MOVED, [False] * len(traced.in_avals))
    new, _ = jax.tree.unflatten(jax.tree.structure(out), found)
    moves = {name: jax.tree.leaves(new.slots[name]) for name in names}
    rest = [name for name, leaves in moves.items() if leaves and not any(leaves)]
    if rest:
        _logger.warning(
            '%s: moving averages that follow the step (%s, follows="step") move in none of its updates, because none '
            "of them advances the step: give the update that does increment_global_step=True, or average by follows="
            '"updates"',
            done.stage.name,
            _named(rest),
        )


def _named(names: list[str]) -> str:
    """Names for a message, the first of them if there are many."""
    more = len(names) - _MOST_NAMES
    return ", ".join(map(repr, names[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")
