"""Stopping at a loss that is not finite, and what of the state is not finite."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.meshes import internal_transfers
from jstep.core.placement import compute_on, is_on_cpus, on_devices, placements_of
from jstep.hooks.base import RunHook, every, positive
from jstep.hooks.hook import Metrics, RunInfo, name_of, step_of
from jstep.hooks.metric_sums import BadStep, Interval
from jstep.hooks.metric_sums_program import GRAD_NORM, LOSS, host
from jstep.state.train_state import MODEL_STATE, TrainState

# Find NaN and infinity in a state.

FINITE, INFINITE, NAN = range(3)
"""The contents of an array: only finite numbers; infinity but no NaN; NaN."""
_SLOTS = "slots/"


class StateContents:
    """The contents of each parameter and slot of a state, computed where it is.

    Creating the object does not wait for accelerators. Arrays on a CPU are read at once: a program for each shape would
    take longer to compile than most of them take to read.

    The model_state is not included: it is the user's, and may hold anything.

    Args:
        state: The state; one without `params` and `slots` has no contents.
        params_only: Whether to leave out the slots.
        read_cpus: Whether to read arrays on a CPU without a compiled program.
    """

    def __init__(self, state: Any, *, params_only: bool = False, read_cpus: bool = True) -> None:
        slots = None if params_only else getattr(state, "slots", None)
        slots = {name: tree for name, tree in slots.items() if name != MODEL_STATE} if isinstance(slots, dict) else None
        named = trees.leaves_with_paths({"params": getattr(state, "params", None), "slots": slots})
        named = [(path, leaf) for path, leaf in named if _is_inexact(leaf)]
        here = {path for path, leaf in named if not isinstance(leaf, jax.Array) or (read_cpus and _is_on_cpu(leaf))}
        elsewhere = [(path, leaf) for path, leaf in named if path not in here]
        placements = placements_of([leaf for _, leaf in elsewhere])
        self._found: dict[str, Any] = dict.fromkeys(path for path, _ in named)
        with internal_transfers():
            self._found |= {path: _contents_on_host(leaf) for path, leaf in named if path in here}
            for numbers, mesh in placements.on_devices:  # one program for all leaves of a shape
                self._found |= {elsewhere[i][0]: compute_on(mesh, _contents, elsewhere[i][1]) for i in numbers}
        for path, _ in elsewhere:
            self._found[path].copy_to_host_async()

    def contents(self) -> dict[str, int]:
        """Wait for the contents of each leaf and return them by path."""
        with internal_transfers():
            return {path: int(host(one)) for path, one in self._found.items()}

    def with_nan(self) -> list[str]:
        """Wait, and return the paths of the leaves that contain NaN."""
        return [path for path, contents in self.contents().items() if contents == NAN]

    def worse_since(self, before: "StateContents") -> tuple[dict[str, int], list[str]]:
        """Wait, and compare with an earlier state.

        Returns:
            The leaves that contain NaN, and the parameters that contain infinity, and did not before; and the slots
            that contain infinity but no NaN, and did not before. The latter may be valid, such as a bound.
        """
        then = before.contents()
        worse = {path: now for path, now in self.contents().items() if now > then.get(path, FINITE)}
        infinite_slots = [path for path, now in worse.items() if now == INFINITE and path.startswith(_SLOTS)]
        return {path: now for path, now in worse.items() if path not in infinite_slots}, infinite_slots


def listed(paths: list[str]) -> str:
    """Format paths as the first one and the number of others."""
    others = len(paths) - 1
    return paths[0] + (f" and {others} other lea{'ves' if others > 1 else 'f'}" if others else "")


def _is_inexact(leaf: Any) -> bool:
    return trees.is_array(leaf) and jnp.issubdtype(leaf.dtype, np.inexact) and leaf.size > 0


def _is_on_cpu(leaf: jax.Array) -> bool:
    """Whether an array is on CPUs of this process."""
    return leaf.is_fully_addressable and is_on_cpus(leaf)


def _contents_on_host(leaf: Any) -> int:
    parts = [leaf]
    if isinstance(leaf, jax.Array):
        parts = [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]
    nonfinite = [part for part in parts if not np.isfinite(part).all()]
    if not nonfinite:
        return FINITE
    return NAN if any(np.isnan(part).any() for part in nonfinite) else INFINITE


def _contents(leaf: Any) -> jax.Array:
    leaf = on_devices(leaf)
    worst = jnp.where(jnp.isnan(leaf), np.int8(NAN), jnp.where(jnp.isinf(leaf), np.int8(INFINITE), np.int8(FINITE)))
    return worst.max()


# Warn of checkpoints whose parameters are not finite.

_logger = logging.getLogger("jstep")


class NonfiniteParametersHook(RunHook):
    """A hook of runs that save without a `NanLossHook`: it warns, once, of parameters that are not finite.

    It checks the parameters that were restored, and those of each checkpoint before it is saved, because a finite loss
    can have a gradient that is not finite, which only a later loss would show. Infinities that a run begins with, such
    as those of a mask, do not count.
    """

    def __init__(self) -> None:
        self._at_start: StateContents | None = None
        self._has_warned = False

    def begin(self, state: TrainState) -> None:
        """Start to check the parameters that the run begins with."""
        super().begin(state)
        self.run.pending.append((self, self._look_at_start))
        self._at_start = StateContents(state, params_only=True)

    def _look_at_start(self, *, wait: bool = False) -> bool:
        """Warn of restored parameters, now that the device is busy with the first step."""
        if self._at_start is None or self.run.saver is None or self.run.restored is None:
            return True
        if bad := self._at_start.with_nan():
            self._has_warned = True
            _logger.warning(
                "The restored %s has parameters that are NaN: %s. Delete all checkpoints with NaN (python -m jstep "
                "inspect shows them); the run then resumes from the newest of the others.",
                checkpoint_name(self.run.saver.prefix, self.run.restored),
                listed(bad),
            )
        return True

    def before_save(self, step: int) -> None:
        """Warn of the parameters that are about to be saved; waits for the device, as the save does."""
        if self._at_start is None:
            return
        # Also after the warning: all processes must run the same programs, and only some may have seen the numbers.
        bad, _ = StateContents(self.run.state, params_only=True).worse_since(self._at_start)
        if bad and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "Parameters that are not finite are saved at step %d: %s. jstep.NanLossHook() among the hooks stops a "
                "run before such a checkpoint, and jstep.skip_nonfinite skips such updates.",
                step,
                listed([*bad]),
            )

    def close(self) -> None:
        """Release the run."""
        super().close()
        self._at_start = None


# Stop training on a NaN or infinite loss.


class NanLossDuringTrainingError(RuntimeError):
    """The loss, a parameter or a slot was not finite, or too many consecutive updates were skipped.

    Attributes:
        step: The step of the update that has this loss or this gradient, or that reached the limit of skipped updates.
        prevents_saving: Whether the last state of the run must not be saved: True for a loss or a state that is not
            finite, False if the run ended because too many consecutive updates were skipped.
    """

    def __init__(self, message: str, step: int, *, prevents_saving: bool = True) -> None:
        super().__init__(message)
        self.step, self.prevents_saving = step, prevents_saving

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.step), {"prevents_saving": self.prevents_saving}


class NanLossHook(RunHook):
    """A hook that stops the run when the loss is NaN or infinite, and names the step.

    All losses are checked on the device. The hook reads the result one interval later, when it has long been computed,
    and also before each checkpoint and at the end. There it also checks the state, because a finite loss can have a
    gradient that is not finite, which only a later loss would show. `train` therefore saves no checkpoint with a
    parameter that became NaN or infinite during the run, or a slot that became NaN (model_state is not checked). A
    slot that became infinite, such as a second moment that overflowed, gives a warning. The metric `grad_norm`
    (`minimize(metrics=["grad_norm"])`), if there is one, gives the step of the gradient. If the state contains NaN when
    the run begins, a warning is logged, and the run stops if it skips every update.

    Steps whose whole update was skipped (`skip_nonfinite`, `dynamic_loss_scale`) do not count, so the hook can be
    combined with these guards. A custom step reports a skipped update by a metric `skipped`, 1 or 0.

    Args:
        every_n_steps: Interval in steps between checks; at its multiples, the losses up to the previous one are read.
        fail_on_nan_loss: Whether to raise; if False, the hook logs a warning and stops the run, which ends normally but
            without a checkpoint.
        max_skipped_steps: The number of consecutive skipped updates that stops the run with the same error; None for no
            limit. The state is valid in that case, and is saved.

    Attributes:
        max_skipped_steps: The argument.

    Source: `tf.train.NanTensorHook`.
    """

    def __init__(
        self, *, every_n_steps: int = 10, fail_on_nan_loss: bool = True, max_skipped_steps: int | None = None
    ) -> None:
        # The sums of a call are the same wherever it ends, so no call must end for this hook.
        self.cadence = every("every_n_steps", every_n_steps, ends_calls=False)
        self._fail = as_bool(fail_on_nan_loss, "fail_on_nan_loss")
        self.max_skipped_steps: int | None = positive("max_skipped_steps", max_skipped_steps)
        self._reset(None)

    def _reset(self, state: TrainState | None) -> None:
        self._held: Interval | None = None
        self._bad = self._over = False
        self._gradient: int | None = None
        self._has_norm = self._has_warned_of_slots = False
        self._nan_at_start: list[str] | None = None
        self._at_start = None if state is None else StateContents(state)

    def use_run(self, run: RunInfo) -> None:
        """Use the sums of the run."""
        super().use_run(run)
        self._number = run.sums.subscribe(self.max_skipped_steps, means=False)

    def begin(self, state: TrainState) -> None:
        """Reset the hook for a new run."""
        super().begin(state)
        self._reset(state)
        self._began = self._checked = step_of(state)
        self.run.pending.append((self, self._look_for_loss))

    def close(self) -> None:
        """Release the run."""
        super().close()
        self._reset(None)

    def _look_for_loss(self, *, wait: bool = False) -> bool:
        """Refuse, after the first call, metrics without a loss."""
        _check_loss(self.run.metrics)
        return True

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> bool:
        """Check the previous interval.

        Raises:
            NanLossDuringTrainingError: One of its losses is not finite, or too many consecutive updates were skipped.
        """
        _check_loss(metrics)  # of a later stage, too
        # All processes check the same steps, so that they stop together.
        before, self._held = self._held, self.run.sums.take(self._number)
        self._look_at(before)
        return self._bad or self._over

    def before_save(self, step: int) -> bool:
        """Check all losses so far and the state; return True, to prevent the save, if one is not finite.

        Raises:
            NanLossDuringTrainingError: One of them is not finite.
        """
        self._look_at_all(step, self.run.state)
        return self._bad

    def end(self, step: int, state: TrainState) -> None:
        """Check the remaining losses and the state.

        Raises:
            NanLossDuringTrainingError: One of them is not finite.
        """
        self._look_at_all(step, state)

    def _look_at(self, interval: Interval | None) -> None:
        if interval is None or self._bad or self._over:
            return
        self._look_at_start()
        self._has_norm = GRAD_NORM in interval.names()
        totals = interval.totals
        if totals is None:
            return
        if self._gradient is None:
            self._gradient = totals.gradient
        bad, over = totals.bad, totals.over.get(self.max_skipped_steps or 0)
        # NaN parameters show in the first loss, NaN slots in the second one.
        if self._nan_at_start and (interval.skipped_since(self._began) if bad is None else bad.step <= self._began + 2):
            self._bad = True
            step, what = (self._began + 1, "every update was skipped") if bad is None else (bad.step, _loss(bad))
            self._stop(f"{self._about_start()} Since then, {what}.", step, prevents_saving=True)
        elif bad is not None and (over is None or bad.step <= over):
            # Set before raising, so that the state is not saved when the run fails.
            self._bad = True
            origin = bad.step if self._gradient is None else min(bad.step, self._gradient)
            before = f", after a gradient that is not finite {_at(origin)}" if origin < bad.step else ""
            self._stop(f"{_loss(bad)}{before}{_advice(origin)}", origin, prevents_saving=True)
        elif over is not None:
            self._over = True
            self._bad = bad is not None
            self._stop(
                f"{self.max_skipped_steps} updates in a row were skipped up to step {over} (max_skipped_steps="
                f"{self.max_skipped_steps}), because their losses or gradients were not finite. Look at batch "
                f"{over - 1}, lower the learning rate, or clip gradients.",
                over,
                prevents_saving=self._bad,
            )

    def _look_at_all(self, step: int, state: TrainState | None) -> None:
        """Check the losses up to a step, and its state, if that is known."""
        before, self._held = self._held, None
        self._look_at(before)
        self._look_at(self.run.sums.take(self._number))
        if state is None or self._at_start is None or self._bad or self._over or step == self._began:
            return
        nonfinite, infinite_slots = StateContents(state).worse_since(self._at_start)
        if infinite_slots and not self._has_warned_of_slots:
            self._has_warned_of_slots = True
            _logger.warning(
                "NanLossHook: at step %d the optimizer state contains infinity: %s. If it is a second moment, the "
                "square of a large finite gradient overflowed, and these elements are not updated any more; clip "
                "gradients, and resume from an earlier checkpoint.",
                step,
                listed(infinite_slots),
            )
        if not nonfinite:
            self._checked, self._gradient = step, None
            return
        self._bad = True
        numbers = "NaN" if NAN in nonfinite.values() else "infinite numbers"
        message = f"the state contains {numbers} after step {step}, though each loss is finite: {listed([*nonfinite])}"
        if self._gradient is not None:
            message += f"; the gradient is not finite {_at(self._gradient)}"
        elif self._checked < step - 1:
            hint = "" if self._has_norm else '; minimize(metrics=["grad_norm"]) shows which one'
            message += f"; one of the updates {self._checked} → {step} made it{hint}"
        origin = self._gradient or step
        self._stop(message + _advice(origin), origin, prevents_saving=True)

    def _look_at_start(self) -> None:
        if self._at_start is None or self._nan_at_start is not None:
            return
        self._nan_at_start = self._at_start.with_nan()
        if self._nan_at_start:
            _logger.warning("NanLossHook: %s", self._about_start())

    def _about_start(self) -> str:
        return (
            f"{listed(self._nan_at_start or [])} contained NaN when this run began, at step {self._began}. If it "
            "resumed from a checkpoint, delete all that contain NaN (python -m jstep inspect shows it for each leaf); "
            "the run then resumes from the newest of the others."
        )

    def _stop(self, message: str, step: int, *, prevents_saving: bool) -> None:
        if self._fail:
            raise NanLossDuringTrainingError(message, step, prevents_saving=prevents_saving)
        _logger.warning("%s Stopping.", message)
        if not self.run.is_over:
            self.run.stopped_by = self.run.stopped_by or name_of(self)


def _check_loss(metrics: Metrics) -> None:
    if LOSS not in metrics:
        raise ValueError(f"NanLossHook: the metrics hold no 'loss', only {sorted(metrics)}")


def _loss(bad: BadStep) -> str:
    return f"the loss is {bad.loss} {_at(bad.step)}"


def _at(step: int) -> str:
    return f"at step {step} (the update {step - 1} → {step})"


def _advice(step: int) -> str:
    return (
        f". Look at batch {step - 1}, lower the learning rate, clip gradients, or guard with jstep.skip_nonfinite: "
        "this hook does not count updates that it skips, and the run resumes from the same checkpoint_dir. To find the "
        f"operation: replay = jstep.replay(train_step, state, batches, checkpoint_dir, {step - 1}), then "
        "jstep.find_nonfinite(train_step, replay.state, *replay.args)."
    )
