"""`verify_resume`: whether a resumed run is bitwise identical to one that was not stopped."""

import dataclasses
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.compiling.programs import ProgramTable
from jstep.compiling.stages import as_stages, name_of_step
from jstep.core import trees
from jstep.core.checks import as_function, as_int, format_value
from jstep.core.jaxprs import find_difference, program_hash
from jstep.core.meshes import internal_transfers
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.data.loaders import loader_position, open_source, position_owner, set_position
from jstep.debug.find_nonfinite import source_line
from jstep.debug.replay import replay
from jstep.running.train import train
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState

Bits: TypeAlias = dict[str, tuple[Any, ...]]
"""Path → dtype, shape and bytes of a leaf."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """Result of `verify_resume`; true if resuming changes nothing.

    Attributes:
        ok: Whether a run that is resumed in a new process ends in the same state, bit for bit.
        first_difference: The path of the first leaf that differs; None if none does. A step that is
            another program in each process may make no difference within one.
        cause: The likely cause; empty if `ok`.
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
            return f"resuming in a new process changes the run: {self.cause}"
        return (
            f"resuming changes the run: {len(self.differing)} leaves differ, the first is "
            f"{self.first_difference!r}. Likely cause: {self.cause}"
        )


@shortens_tracebacks
def verify_resume(
    make_state: Callable[[], TrainState],
    train_step: Callable[..., Any] | Mapping[int, Callable[..., Any]],
    batches: Tree,
    at: int,
    steps: int,
) -> ResumeReport:
    """Run `steps` steps, and again with a checkpoint and a restart after `at`; compare bit for bit.

    The restart is a call of `train`, so an error with which a run could not be resumed is raised
    here, too. It is in this process, which compiles a step once: each step is therefore traced
    again, and both programs are compared. A step that draws from `np.random`, or reads a counter or
    a clock while it is traced, is reported with its line.

    Args:
        make_state: Returns the initial state, the same each time it is called.
        train_step: As for `train`.
        batches: As for `train`, but no iterator that cannot be reset (a generator).
        at: The number of steps before the restart, 0 < at < steps.
        steps: The total number of steps.

    Returns:
        A `ResumeReport`, true if the runs end in the same state.

    Raises:
        RuntimeError: make_state returned a state that was donated to an earlier step.
        ValueError: Not 0 < at < steps, there are fewer batches than steps, or they cannot be read
            again.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.adam(0.1)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> batches = lambda step: jnp.float32(step)
        >>> print(jstep.verify_resume(make_state, train_step, batches, at=3, steps=6))
        resuming changes nothing: both runs end in the same state, bit for bit
    """
    at = as_int(at, "at")
    steps = as_int(steps, "steps")
    if not 0 < at < steps:
        raise ValueError(f"at={at}, steps={steps}: must be 0 < at < steps")
    as_function(make_state, "make_state", "() -> TrainState")
    owner = position_owner(batches)
    position = None if owner is None else loader_position(owner)
    if owner is None and hasattr(batches, "__next__"):
        raise ValueError(
            f"batches={format_value(batches)}: is an iterator without a position, which is lost "
            "with its process; give jstep.batches, a function of the step, or a loader with "
            "get_state and set_state"
        )

    def run(count: int, saver: Saver | None = None) -> Bits:
        state = make_state()
        with internal_transfers():
            start = global_step(state)
        last = start + count
        state = train(train_step, state, batches, last, checkpoint_dir=saver, progress=False)
        with internal_transfers():
            missing = last - global_step(state)
        if missing:
            raise ValueError(
                f"batches ended after {count - missing} steps; steps={steps} of them are needed"
            )
        return _bits_of(state)

    def reset_loader() -> None:
        if position is not None:
            set_position(owner, position)

    # Nothing is loaded, as in a run's first process.
    reference = run(steps)
    with tempfile.TemporaryDirectory() as directory, Saver(directory, async_save=False) as saver:
        reset_loader()
        run(at, saver)
        # Not reset: the restart takes the position from the checkpoint.
        resumed = run(steps, saver)
    differing = _differing(reference, resumed)
    if not differing:
        cause = _impurity(train_step, batches, steps, make_state, reset_loader)
        return ResumeReport(ok=not cause, cause=cause)
    reset_loader()
    if _differing(reference, run(steps)):
        cause = _NOT_FUNCTIONS
    elif not open_source(batches, 0, 1).is_seekable:
        cause = _NO_POSITION
    else:
        cause = _HIDDEN_STATE
    return ResumeReport(
        ok=False, first_difference=differing[0], cause=cause, differing=tuple(differing)
    )


_NOT_FUNCTIONS = (
    "two uninterrupted runs differ as well: the step, make_state or the batches are not functions "
    "of their arguments (a random generator without a fixed seed, a loader that resumes beside its "
    "position, or an operation that is not deterministic)"
)
_NO_POSITION = (
    "batches is an iterable without a position, which starts from scratch after a restart: use "
    "jstep.batches, a function of the step, or an iterator with get_state and set_state"
)
_HIDDEN_STATE = (
    "something that the steps depend on is not in the state: a generator or counter inside "
    "train_step or the batches. Derive it from the step (minimize(..., rng=key), batches[N]), or "
    "keep it in params, slots or model_state"
)


# A step that is compiled runs its Python code once in a process. What that reads outside of its
# arguments is a constant of the program, so that both runs above have it; a new process would read
# something else.


def _impurity(
    train_step: Any,
    batches: Tree,
    steps: int,
    make_state: Callable[[], TrainState],
    reset_loader: Callable[[], None],
) -> str:
    """Return what a step reads while it is traced, as a cause; "" if all traces are alike."""
    with internal_transfers():
        start = global_step(make_state())
    for first, _, step in as_stages(train_step).stages():
        if first >= start + steps:
            break
        reset_loader()
        try:
            found = replay(train_step, make_state(), batches, None, max(first, start))
        except ValueError:
            # A loader with a position cannot be set to the step of a later stage.
            continue
        stage = ProgramTable(as_stages(step), state=found.state).stages[0]
        traced = stage.trace(found.state, found.args)
        if traced is None:
            # It is not compiled, so its Python code has run at each step.
            continue
        # Functions that the step calls may be jitted, and JAX keeps their programs. It traces them
        # anew if a setting differs; this one changes no program.
        mode = jax.config.jax_numpy_rank_promotion  # type: ignore[attr-defined]  # created at run time
        promotion = "allow" if mode == "warn" else "warn"
        with warnings.catch_warnings(), jax.numpy_rank_promotion(promotion):
            warnings.simplefilter("ignore")
            traced_again = stage.trace(found.state, found.args)
        if program_hash(traced.jaxpr) == program_hash(traced_again.jaxpr):
            continue
        different = find_difference(traced.jaxpr, traced_again.jaxpr)
        where = f": at {source_line(tuple(reversed(different)), ())}" if different else ""
        return (
            f"{name_of_step(step)} is another program each time that it is traced{where}. It reads "
            "something that is not among its arguments, such as np.random, a counter or a clock, "
            "whose value is a constant of the program: a new process would resume with another "
            "one. Derive it from the step (minimize(..., rng=key), batches[N]), or keep it in "
            "params, slots or model_state"
        )
    return ""


def _bits_of(state: TrainState) -> Bits:
    """Copies of each leaf: dtype, shape and bytes."""
    arrays = {
        path: np.asarray(trees.key_data(leaf)) for path, leaf in trees.leaves_with_paths(state)
    }
    return {path: (array.dtype, array.shape, array.tobytes()) for path, array in arrays.items()}


def _differing(a: Bits, b: Bits) -> list[str]:
    return [path for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)]
