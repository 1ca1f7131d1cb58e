"""Whether the state of a run may be saved."""

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.checkpoint.saver import Saver
from jstep.compiling.dispatch import Dispatch
from jstep.core import processes
from jstep.core.exceptions import WrongStateError
from jstep.core.meshes import internal_transfers
from jstep.hooks.course import Course
from jstep.hooks.nan_loss import NanLossHook
from jstep.hooks.saver_hook import SaverHook
from jstep.loop.feeder import BatchFeeder
from jstep.metering.device_sums import is_bad
from jstep.metering.metric_sums import MetricSums
from jstep.metering.numbers import read_value, real_parts
from jstep.state.nonfinite import NanLossDuringTrainingError, StateContents, describe_contents
from jstep.training.metrics import losses_in

_ELSEWHERE = "those of another process"
_NOT_FINITE = "its loss is not finite"


class _NonfiniteParams(NamedTuple):
    """The parameters of a state that have become not finite.

    `counts` has their paths, and the numbers of elements.
    """

    state: weakref.ref[Any]
    counts: dict[str, int]


class Finiteness:
    """Whether the parameters and the loss of a run are finite.

    Parameters that were not finite when it began do not count.

    Attributes:
        initial_contents: The contents of the state when the run began; empty if no hook checks or
            saves it.
        has_nan_hook: Whether a `NanLossHook` checks the whole state before each save;
            `require_finite` then does not.
    """

    def __init__(
        self,
        course: Course,
        hooks: Sequence[Any],
        sums: MetricSums,
        dispatch: Dispatch,
        feeder: BatchFeeder,
    ) -> None:
        self._course = course
        self._sums = sums
        self._dispatch = dispatch
        self._feeder = feeder
        self.savers = [hook for hook in hooks if isinstance(hook, SaverHook)]
        self.has_nan_hook = any(isinstance(hook, NanLossHook) for hook in hooks)
        is_checked = self.has_nan_hook or self.savers
        state = course.position.state if is_checked else {}
        self.initial_contents = StateContents(state, params_only=not self.has_nan_hook)
        # The latest step with parameters that were found to be finite.
        self._finite_at = course.first
        self._found: _NonfiniteParams | None = None  # in the state that was read last

    def nonfinite_params(self) -> dict[str, int]:
        """Return the parameters that have become not finite.

        This reads the device once for a state, which savers share.
        """
        state = self._course.position.state
        if self._found is None or self._found.state() is not state:
            counts, _ = StateContents(state, params_only=True).worse_since(self.initial_contents)
            self._found = _NonfiniteParams(weakref.ref(state), counts)
        return self._found.counts

    def require_finite(self, step: int, saver: Saver) -> bool:
        """Return whether the parameters are finite, which the checkpoint records; raise if not.

        It returns False only for a `Saver` that allows it. All processes must call it, and all
        raise: if one left alone, the others would wait for it in their save.
        """
        if self.has_nan_hook:
            return True
        bad = self.nonfinite_params()
        if not processes.any_process(bool(bad)):
            self._finite_at = step
            return True
        if saver.allow_nonfinite:
            return False
        raise NanLossDuringTrainingError(
            f"the parameters are not finite at step {step}, when a checkpoint is due: "
            f"{describe_contents(bad) or _ELSEWHERE}. The cause is one of the updates "
            f"{self._finite_at} → {step}: jstep.NanLossHook() in hooks names its "
            "batch, see docs: help/errors#not-finite",
            step,
        )

    def hooks_that_may_save(
        self, error: BaseException | None = None
    ) -> tuple[list[SaverHook], str]:
        """Return the hooks that may save after a signal, this error or a stall, and why not others.

        The reason is "" if all may save, or if the error gives it.
        """
        if not self.savers:
            return [], ""
        allowing = [hook for hook in self.savers if hook.saver.allow_nonfinite]
        if isinstance(error, NanLossDuringTrainingError) and not error.may_save:
            return allowing, ""
        if isinstance(error, WrongStateError) and not error.may_save:
            # A Saver allows NaN and infinity, but not bits that differ from the run's.
            return [], ""
        bad: dict[str, int] = {}
        with contextlib.suppress(Exception):
            # If the device has failed, `_loss_problem` says so, as it reads the loss.
            bad = self.nonfinite_params()
        if processes.any_process(bool(bad)):
            return allowing, describe_contents(bad) or _ELSEWHERE
        problem = self._loss_problem()
        if problem:
            return allowing, problem
        return self.savers, ""

    def _loss_problem(self) -> str:
        """Return why a loss of the latest call prevents a save.

        The reason is "" if none does, or if that is unknown.
        """
        metrics = self._course.position.metrics
        if not isinstance(metrics, Mapping):
            return ""
        losses = jax.tree.leaves(losses_in(metrics))
        if not losses:
            return ""
        # Several processes must come to one answer, so they judge only by losses that all of them
        # have.
        if not processes.is_single_process() and not all(map(_is_on_all_processes, losses)):
            return ""
        try:
            with internal_transfers():
                return _NOT_FINITE if self._has_bad_loss(metrics, losses) else ""
        except (TypeError, ValueError):
            return ""
        except Exception as error:  # the device failed
            return f"its loss cannot be read: {type(error).__name__}: {error}"

    def _has_bad_loss(self, metrics: Mapping[str, Any], losses: list[Any]) -> bool:
        """Whether a loss of the latest call, at any step, is not finite and was not skipped."""
        # A call of several steps returns the metrics of its last one; the sums have seen each.
        latest = self._sums.latest()
        first_of_call = self._course.position.step - self._feeder.steps
        if latest is not None and latest.bad is not None and latest.bad.step > first_of_call:
            return True
        skip_metric = self._dispatch.constants.skipped
        is_skipped: Any = np.False_
        if skip_metric is not None:
            is_skipped = read_value(metrics.get(skip_metric, 0)) == 1
        for part in real_parts(losses):
            is_finite = np.isfinite(read_value(part).astype(np.float64))
            if np.any(is_bad(is_finite, is_skipped)):
                return True
        return False


def _is_on_all_processes(loss: object) -> bool:
    return (
        isinstance(loss, jax.Array) and not loss.is_fully_addressable and loss.is_fully_replicated
    )
