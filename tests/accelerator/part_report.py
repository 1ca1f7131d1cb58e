"""The rows of a part: shown, and written to DIR/part.txt and DIR/part.json after each of them."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

QUICK = bool(os.environ.get("ACCELERATOR_QUICK"))
"""Whether sizes are small: the run shows that the scripts work, and its figures mean nothing."""


class PartReport:
    """The report of one part.

    What was measured is kept if the part is stopped later: each row replaces the JSON file by a longer one.
    """

    def __init__(self, part: str) -> None:
        folder = Path(os.environ["ACCELERATOR_OUT"])
        self._text, self._json = folder / f"{part}.txt", folder / f"{part}.json"
        self._rows: list[dict[str, Any]] = []
        self._head = {"part": part, "device": json.loads(os.environ["ACCELERATOR_DEVICE"]), "quick": QUICK}
        self.backend = str(self._head["device"]["backend"])
        self._text.write_text("")
        self.say(f"{part}: {describe(self._head['device'])}{' (quick: no figures)' if QUICK else ''}")

    def say(self, line: str) -> None:
        """Show a line."""
        print(line, flush=True)
        with self._text.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def row(self, name: str, **values: Any) -> None:
        """Show a row, and write all rows so far."""
        self._rows.append({"name": name, **values})
        self.say(f"  {name:58s} " + "  ".join(f"{key} {shown(value)}" for key, value in values.items()))
        new = self._json.with_suffix(".new")
        new.write_text(json.dumps({**self._head, "rows": self._rows}, indent=1), encoding="utf-8")
        new.replace(self._json)

    def left_out(self, name: str, why: str) -> None:
        """Name a row that is not measured."""
        self.row(name, left_out=why)


def shown(value: Any) -> str:
    """Return a value in four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe(device: dict[str, Any]) -> str:
    """Return the device in a line."""
    return f"{device['count']} × {device['kind']} ({device['backend']}), JAX {device['jax']}, {device['driver']}"


def seconds_left() -> float:
    """Return how long the part may still run."""
    return float(os.environ.get("ACCELERATOR_DEADLINE", "inf")) - time.time()


def installed(report: PartReport, package: str) -> bool:
    """Return whether a package can be imported, and name it if not."""
    try:
        __import__(package)
    except Exception as error:  # a package that is there and does not load is one that is missing
        report.say(f"  {package} is not available ({type(error).__name__}: {error}): its rows are left out")
        return False
    return True


def each(report: PartReport, measured: dict[str, Any]) -> int:
    """Call functions by their names, each of which adds rows; return how many failed.

    One that fails is named, and does not end the others; those that there is no time for are named, too.
    """
    failed = 0
    for name, measure in measured.items():
        if seconds_left() < 20:
            report.left_out(name, "no time is left")
            continue
        try:
            measure()
        except Exception as error:
            failed += 1
            report.row(name, failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
            sys.excepthook(type(error), error, error.__traceback__)
    return failed
