"""Verification that a run resumes bit for bit from a checkpoint."""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.checks import as_function, as_int, kind
from jstep.core.meshes import internal_transfers
from jstep.core.placement import refuse_shapes
from jstep.data.loaders import Source, gather_positions, owner_of, position_of, source_of
from jstep.hooks.hook import check_step
from jstep.loop.feeder import LoopState, copied_batches, make_calls, run_steps, stages_of
from jstep.loop.programs import Programs, check_alive
from jstep.loop.train import train
from jstep.queues.queues import until_end
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class ResumeReport:
    """Result of `verify_resume`; true if resuming changes nothing.

    Attributes:
        ok: Whether a run that is resumed in a new process ends in the same state, bit for bit.
        first_difference: The path of the first leaf that differs; None if none does.
        cause: The likely cause; empty if `ok`. Without a leaf that differs: why a new process would get other batches.
        differing: The paths of all leaves that differ.
    """

    ok: bool
    first_difference: str | None = None
    cause: str = ""
    differing: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return "resuming changes nothing: both runs end in the same state, bit for bit"
        if not self.differing:
            return f"the state resumes bit for bit, but a new process would continue with other batches: {self.cause}"
        return (
            f"resuming changes the run: {len(self.differing)} leaves differ, the first is "
            f"{self.first_difference!r}. Likely cause: {self.cause}"
        )


def verify_resume(
    make_state: Callable[[], TrainState],
    train_step: Callable[..., Any] | Mapping[int, Callable[..., Any]],
    batches: Any,
    at: int,
    steps: int,
) -> ResumeReport:
    """Run `steps` steps uninterrupted, and again with a checkpoint and a restart after `at`; compare bit for bit.

    The restart is a call of `train`, so an error with which a run could not be resumed is raised here, too.

    Args:
        make_state: Returns the initial state, the same each time. It is called for each run, and once for the state to
            restore into, as in a restarted program.
        train_step: As for `train`.
        batches: As for `train`. An iterator that cannot be reset (a generator) is read once, and its batches are kept
            for both runs.
        at: The number of steps before the restart, 0 < at < steps.
        steps: The total number of steps.

    Returns:
        A `ResumeReport`, which is true if the runs end in the same state, and otherwise has the first leaf that differs
        and the likely cause.

    Raises:
        RuntimeError: make_state returned a state that was donated to an earlier step.
        ValueError: Not 0 < at < steps, or there are fewer batches than steps.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adam(0.1)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.verify_resume(make_state, train_step, lambda step: jnp.float32(step), at=3, steps=6))
        resuming changes nothing: both runs end in the same state, bit for bit
    """
    at, steps = as_int(at, "at"), as_int(steps, "steps")
    if not 0 < at < steps:
        raise ValueError(f"at={at}, steps={steps}: must be 0 < at < steps")
    as_function(make_state, "make_state", "() -> TrainState")
    stages = stages_of(train_step)

    position, kept, owner = None, False, owner_of(batches)
    if owner is not None:
        position = position_of(owner)
    elif hasattr(batches, "__next__"):
        # Read once. Its position would be lost with the process, which the report states.
        batches, kept = list(itertools.islice(until_end(batches), steps)), True

    def run(state: TrainState, count: int, position: Any) -> tuple[TrainState, Source]:
        with internal_transfers():
            first = global_step(state)
        at = LoopState(first, state)
        source = source_of(batches, first, first + count, position, state=lambda: at.state)
        # Read exactly as many batches as there are steps, since the position is saved.
        made = itertools.islice(make_calls(copied_batches(source), first), count)
        run_steps(at, Programs(stages, state=state), made, first + count)
        if at.step < first + count:
            raise ValueError(f"batches ended after {at.step} steps; steps={steps} of them are needed")
        check_step(at.step, at.state, first)
        return at.state, source

    def fresh() -> TrainState:
        state = make_state()
        refuse_shapes(state, "make_state()")
        if not isinstance(state, TrainState):
            raise TypeError(f"make_state returned {kind(state)}; it must return a TrainState")
        check_alive(state)
        return state

    def whole() -> TrainState:
        return run(fresh(), steps, position)[0]

    reference = _bits_of(whole())
    with tempfile.TemporaryDirectory() as directory:
        half, source = run(fresh(), at, position)
        extra = gather_positions(source.position() if source.position else None)
        before = _bits_of(half)
        with Saver(directory, async_save=False) as saver:
            saver.save(half, extra=extra)
            after = _bits_of(saver.restore(fresh()))
            with internal_transfers():
                last_step = global_step(half) + steps - at
            resumed = _bits_of(train(train_step, fresh(), batches, last_step, checkpoint_dir=saver, progress=False))

    differing = _differing(reference, resumed)
    if not differing:
        if kept:
            cause = (
                "batches is an iterator without get_state and set_state: it was read once for both runs, but in a new "
                "process its position is lost; use jstep.batches or a function of the step"
            )
            return ResumeReport(False, None, cause)
        return ResumeReport(True)
    cause = _cause(before, after, reference, whole, differing, starts_over=not kept and not source.seekable)
    return ResumeReport(False, differing[0], cause, tuple(differing))


def _cause(
    before: Any, after: Any, reference: Any, whole: Callable[[], TrainState], differing: list[str], *, starts_over: bool
) -> str:
    changed = _differing(before, after)
    if changed:
        return f"the checkpoint restored {changed[0]!r} with other bits than were saved"
    if _differing(reference, _bits_of(whole())):
        return (
            "two uninterrupted runs differ as well: the step, make_state or the batches are not functions of their "
            "arguments (a random generator without a fixed seed, or an operation that is not deterministic)"
        )
    if starts_over:
        return (
            "batches is an iterable without a position, which starts from scratch after a restart: use jstep.batches, "
            "a function of the step, or an iterator with get_state and set_state"
        )
    model = [path for path in differing if path.startswith("slots/model_state")]
    where = "model_state differs first; " if model and model[0] == differing[0] else ""
    return (
        f"{where}something that the steps depend on is not in the state: a generator or counter inside train_step or "
        "the batches. Derive it from the step (minimize(..., rng=key), batches[N]), or keep it in "
        "params, slots or model_state"
    )


def _bits_of(state: TrainState) -> dict[str, tuple[Any, ...]]:
    """The dtype, the shape and the bytes of each leaf: copies, since the leaves are donated to the next step."""

    def bits(leaf: Any) -> tuple[Any, ...]:
        array = np.asarray(trees.key_data(leaf))
        return array.dtype, array.shape, array.tobytes()

    return {path: bits(leaf) for path, leaf in trees.leaves_with_paths(state)}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [path for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)]
