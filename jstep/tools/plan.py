"""Preview of hyperparameters, hook schedules, stages and batches of a run."""

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import as_int, html_picture, kind, shown
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Optimizer, Schedule
from jstep.data.batches import Batches, weights_of
from jstep.data.loaders import check_batches
from jstep.data.sequence import BatchSequence
from jstep.hooks.hook import name_of
from jstep.loop.feeder import name_of_step, stages_of
from jstep.loop.programs import list_of_hooks
from jstep.tools import table as _table
from jstep.tools.due_steps import steps_of

T = TypeVar("T")


class Due(Mapping[Any, Any]):
    """Mapping from hooks to the steps at which they are due; keys are hooks or names of their classes.

    The steps are a range, or a tuple if they are not evenly spaced.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = tuple(pairs)

    def __getitem__(self, hook: Any) -> Any:
        found = [steps for one, steps in self._pairs if one is hook]
        if not found and isinstance(hook, str):
            found = [steps for one, steps in self._pairs if name_of(one) == hook]
        if len(found) != 1:
            names = ", ".join(name_of(one) for one, _ in self._pairs)
            raise KeyError(f"{len(found)} hooks match {shown(hook)}; the hooks are: {names or 'none'}")
        return found[0]

    def __iter__(self) -> Iterator[Any]:
        return (hook for hook, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name_of(hook)}: {steps!r}' for hook, steps in self._pairs)}}}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Preview of a run, returned by `plan`.

    Attributes:
        steps: The steps N of the updates N → N + 1 that were evaluated, int64 `[points]`.
        hyperparameters: Name → values at these steps, `[points]`.
        due: Hook → the steps after which it is called. Hooks that are due only by time are left out.
        last_step: The step at which the run ends.
        stages: First step of each stage → the name of its training step; empty if `train_step` was not given.
        batch_size: First step of each batch size → rows of a batch; empty if unknown.
        rows: Source → rows read from it by the last step, `"rows"` for plain batches; empty if unknown.
        passes: Source → number of passes over it by the last step.
    """

    steps: np.ndarray[Any, Any]
    hyperparameters: Mapping[str, np.ndarray[Any, Any]]
    due: Mapping[Any, Any]
    last_step: int
    stages: Mapping[int, str] = dataclasses.field(default_factory=dict)
    batch_size: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    passes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    _rows_at: Mapping[str, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict, repr=False)
    _weights: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return _table.plan_text(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan.

        The plot has a panel for each hyperparameter that changes, for the batch size and for the rows of each source, a
        bar for each stage, and a line of marks for each hook.

        Args:
            path: The file; its suffix (`.png`, `.svg`, `.pdf`) selects the format.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'jstep[plot]'`.
        """
        self._draw(os.fspath(path))

    def _draw(self, file: Any, **options: Any) -> None:
        from jstep.tools.figures import draw_plan

        draw_plan(self, file, **options)

    def _repr_html_(self) -> str:
        return _table.plan_html(self) + html_picture(self._picture(), "the plan, drawn")

    def _picture(self) -> bytes | None:
        """Return the plot as a PNG; None if matplotlib is not installed."""
        picture = io.BytesIO()
        try:
            self._draw(picture, format="png")
        except ImportError:
            return None
        return picture.getvalue()


def plan(
    optimizer: Optimizer | Schedule | Mapping[str, Schedule | float],
    last_step: int,
    *,
    start: int = 0,
    hooks: Sequence[Any] = (),
    points: int = 200,
    train_step: Callable[..., Any] | Mapping[int, Callable[..., Any]] | None = None,
    batches: Any = None,
) -> Plan:
    """Preview a run: hyperparameters at the steps from start to last_step − 1, and the steps at which hooks are due.

    It shows mistakes before the run: a learning rate that decays to zero after a tenth of the run, a warm-up in the
    wrong unit, a checkpoint at every step.

    Args:
        optimizer: An optimizer, a schedule, or a dict of schedules and numbers.
        last_step: As for `train`.
        start: The step of the initial state.
        hooks: As for `train`. Hooks that are due only by time are left out.
        points: Number of steps to evaluate, evenly spaced, including the first and the last.
        train_step: As for `train`; adds the stages to the plan.
        batches: As for `train`; adds batch sizes, weights, and the rows and passes from step 0 to last_step, if made by
            `jstep.batches` or `jstep.mixture`.

    Returns:
        A `Plan`: `str()` is a table, `plot(path)` draws it.

    Raises:
        ValueError: `start` is not before last_step, or a number is out of range.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear_warmup(jstep.cosine_decay(0.1, 1000), 100)
        >>> plan = jstep.plan(jstep.adam(schedule), 1000, hooks=[jstep.LoggingHook(every_n_steps=250)], points=5)
        >>> print(plan)
        steps 0 to 999
        <BLANKLINE>
        step  learning_rate
           0          0.001
         250      0.0853553
         500           0.05
         749      0.0147559
         999     2.4674e-07
        <BLANKLINE>
        constant  beta1 0.9, beta2 0.999, epsilon 1e-08
        <BLANKLINE>
        LoggingHook  every 250 steps, 4 times: 250, 500, 750, 1 000
    """
    if last_step is None:
        raise TypeError("last_step=None: must be an integer; a plan has an end, also that of a run without a last_step")
    last_step = as_int(last_step, "last_step", 1)
    start, points = as_int(start, "start", 0), as_int(points, "points", 1)
    if start >= last_step:
        raise ValueError(f"start={start}: must be before last_step={last_step}, or there is no step to run")
    functions = _functions(optimizer)
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    if last_step > np.iinfo(dtype).max:
        raise ValueError(
            f"last_step={last_step}: must be at most {np.iinfo(dtype).max}, the last step that {dtype} counts; under "
            "jax_enable_x64 steps are int64"
        )
    steps = np.unique(np.linspace(start, last_step - 1, points).round().astype(np.int64))
    pairs = [(hook, steps_of(hook, start, last_step)) for hook in list_of_hooks(hooks)]
    return Plan(
        steps,
        _values(functions, steps, dtype),
        Due([(hook, due) for hook, due in pairs if due is not None]),
        last_step,
        {} if train_step is None else _stages(train_step, start, last_step),
        **_data(batches, start, last_step, steps),
    )


def _functions(optimizer: Any) -> Any:
    """Return a function from the step to a dict of values."""
    if callable(getattr(optimizer, "hyperparameters", None)):
        return optimizer.hyperparameters
    if isinstance(optimizer, Mapping):
        for name, one in optimizer.items():
            if not (callable(one) or _is_number(one)) or isinstance(one, type):
                raise TypeError(f"optimizer[{name!r}]={shown(one)}: must be a schedule or a number, got {kind(one)}")
        return lambda step: {str(name): one(step) if callable(one) else one for name, one in optimizer.items()}
    if callable(optimizer) and not isinstance(optimizer, type):
        return lambda step: {"schedule": optimizer(step)}
    raise TypeError(
        f"optimizer={shown(optimizer)}: must be an optimizer, a schedule or a dict of schedules, got {kind(optimizer)}"
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | str) or np.ndim(value):
        return False
    return isinstance(value, int | float) or (hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.number))


def _values(function: Any, steps: Any, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Evaluate a function at each step, compiled as in a train step, or on the host if it cannot be traced."""
    compiled = jax.jit(lambda step: {name: jnp.asarray(value) for name, value in function(step).items()})
    try:
        with internal_transfers():
            rows = jax.device_get([compiled(np.asarray(step, dtype)) for step in steps])
    except jax.errors.ConcretizationTypeError:
        rows = [{name: np.asarray(value) for name, value in function(int(step)).items()} for step in steps]
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def _stages(train_step: Any, start: int, last_step: int) -> dict[int, str]:
    """Return first step → name of the training step, for the stages between `start` and `last_step`."""
    return {
        stage.first: name_of_step(stage.value)
        for stage in stages_of(train_step).stages()
        if stage.first < last_step and (stage.stop is None or stage.stop > start)
    }


def _data(batches: Any, start: int, last_step: int, steps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the fields of a `Plan` about the batches; empty if they are not made by jstep.

    Raises:
        ValueError: The batches end before the first step.
    """
    if batches is None:
        return {}
    check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return {}
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(f"batches={shown(batches)}: they end at step {stop}, before start={start}")
    size, rows = batches.batch_size, _by_source(batches, stop)
    total = {"rows": batches.num_rows} if isinstance(batches, Batches) else batches.num_rows  # type: ignore[attr-defined]
    at = [_by_source(batches, min(int(step), stop)) for step in steps]
    return {
        "batch_size": _between(size if isinstance(size, dict) else {0: size}, start, stop),
        "rows": rows,
        "passes": {name: count / total[name] for name, count in rows.items()},
        "_rows_at": {name: np.array([one[name] for one in at]) for name in rows},
        "_weights": _between(weights_of(batches), start, stop),
    }


def _between(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    """The stages of some steps; the first of them may begin earlier."""
    in_force = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if in_force <= first < stop}


def _by_source(batches: Any, step: int) -> dict[str, int]:
    rows = batches.rows_before(step)
    return rows if isinstance(rows, dict) else {"rows": rows}
