"""The record that a `KeepBest` keeps in its checkpoints' manifests, and the choice of the best."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class BestRecord(NamedTuple):
    """The evaluation for which a checkpoint was kept.

    Attributes:
        metric: The name of the metric.
        value: Its value, finite.
        mode: `"min"` or `"max"`.
        run: The name of the run that saved it; None if it was saved outside of a run.
    """

    metric: str
    value: float
    mode: str
    run: str | None = None

    @property
    def goodness(self) -> float:
        """The value, or its negative: the greater, the better."""
        return -self.value if self.mode == "min" else self.value

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "mode": self.mode}

    def notes(self) -> dict[str, Any]:
        """Return the fields for the manifest's notes, which readers may ignore: the run's name."""
        return {} if self.run is None else {"run": self.run}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> "BestRecord | None":
        """Return the record in a manifest's entries; None if the checkpoint is not of a `KeepBest`.

        Raises:
            ValueError: It is not what `to_json` returns.
        """
        if "best" not in loaded:
            return None
        fields = loaded["best"]
        metric = fields["metric"]
        value = fields["value"]
        mode = fields["mode"]
        is_value = type(value) in (int, float) and math.isfinite(value)
        if not isinstance(metric, str) or mode not in ("min", "max") or not is_value:
            raise ValueError(f"best={fields!r:.100} is not the value of a metric, and its mode")
        notes = loaded.get("notes")
        run = notes.get("run") if isinstance(notes, dict) else None
        if not isinstance(run, str):
            run = None
        return cls(metric, float(value), mode, run)


def best_step(records: Mapping[int, BestRecord | None]) -> int | None:
    """Return the step of the best checkpoint.

    Only checkpoints with the metric and mode of the newest one compete; others were kept for
    another purpose. On a tie, the earlier one is the best, as a `KeepBest` keeps it.

    Args:
        records: Step → record of each checkpoint, None for those that no `KeepBest` saved.

    Returns:
        The step; None if no checkpoint has a record.
    """
    kept = {step: record for step, record in sorted(records.items()) if record is not None}
    if not kept:
        return None
    newest = kept[max(kept)]
    best: int | None = None
    for step, record in kept.items():
        if (record.metric, record.mode) != (newest.metric, newest.mode):
            continue
        if best is None or record.goodness > kept[best].goodness:
            best = step
    return best
