"""Comparison of two computations of one update, on every device of every process."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.distributed import agreement
from jstep.fingerprints.fingerprint import ByDevice
from jstep.fingerprints.log import Difference

_SHOWN = 8
_SAME, _DIFFERS = 1, 2


class AuditError(RuntimeError):
    """An update was computed twice with different results.

    Attributes:
        step: The step N of an update N → N + 1, or the first step of the call, if a call takes several.
        leaves: The paths of the state's leaves that differ.
    """

    prevents_saving = True

    def __init__(self, message: str, step: int, leaves: tuple[str, ...]) -> None:
        super().__init__(message)
        self.step, self.leaves = step, leaves

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.step, self.leaves)


class Mismatch(NamedTuple):
    """The differences between the results of two computations.

    Attributes:
        leaves: The paths of the leaves that differ on some device.
        devices: The devices on which they differ; empty if they differ on all devices.
    """

    leaves: tuple[str, ...]
    devices: tuple[str, ...]

    def error(self, step: int, steps: int) -> AuditError:
        """The error for a call of `steps` steps from step `step`."""
        where = ", ".join(self.devices[:_SHOWN]) + (", …" if len(self.devices) > _SHOWN else "")
        what = Difference(step, self.leaves).text() + (f" (on {where} alone)" if where else "")
        update = f"update {step} → {step + 1} was" if steps == 1 else f"updates {step} → {step + steps} were"
        return AuditError(
            f"the {update} computed twice, from the same state and batch by the same program, and the results differ: "
            f"{what}. Either a device computes wrongly (silent data corruption): resume from the last checkpoint on "
            "other devices, and repeat the step on both with jstep.replay(train_step, state, batches, "
            f"checkpoint_dir, {step}). Or the program is not deterministic: host callbacks or a plain Python step that "
            "keep state or draw their own random numbers, or sums without a fixed order on a GPU "
            "(XLA_FLAGS=--xla_gpu_deterministic_ops=true).",
            step,
            self.leaves,
        )


def mismatch(first: ByDevice, second: ByDevice) -> Mismatch | None:
    """Compare two computations of one state, with the same result on all processes; None if equal. Waits for both.

    Raises:
        TypeError: The two states have different leaves.
    """
    if first.paths != second.paths:
        apart = sorted(set(first.paths) ^ set(second.paths))[:_SHOWN] or "in another order"
        raise TypeError(
            f"train_step: returned a state of other leaves when AuditHook repeated it ({apart}); the structure of the "
            "state must be the same in every call"
        )
    devices = jax.devices()
    marks = _marks(first, second, devices)
    found = marks if agreement.is_single_process() else agreement.max_over_processes(marks)
    differ, of_devices = found[: len(first.paths)], found[len(first.paths) :]
    if not differ.any():
        return None
    leaves = tuple(path for path, mark in zip(first.paths, differ, strict=True) if mark)
    all_do = (of_devices[of_devices > 0] == _DIFFERS).all()
    names = () if all_do else tuple(str(devices[i]) for i in np.flatnonzero(of_devices == _DIFFERS))
    return Mismatch(leaves, names)


def _marks(first: ByDevice, second: ByDevice, devices: list[Any]) -> np.ndarray[Any, Any]:
    """For each leaf, whether it differs; then for each device `_SAME`, `_DIFFERS`, or 0 if it is of another process."""
    leaves, number = len(first.paths), {device: i for i, device in enumerate(devices)}
    marks = np.zeros(leaves + len(devices), np.int32)
    a, b = first.words(), second.words()
    for device in {**a, **b}:
        differ = np.any(a[device] != b[device], axis=1) if device in a and device in b else np.ones(leaves, bool)
        marks[:leaves] |= differ
        if device in number:
            marks[leaves + number[device]] = _DIFFERS if differ.any() else _SAME
    return marks
