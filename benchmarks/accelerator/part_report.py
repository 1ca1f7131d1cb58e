"""The rows of a part: shown, and written to DIR/part.txt and DIR/part.json after each of them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUICK = bool(os.environ.get("ACCELERATOR_QUICK"))
"""Whether sizes are small: the run shows that the scripts work, and its figures mean nothing."""


class PartReport:
    """The report of one part.

    What was measured is kept if the part is stopped later: each row replaces the JSON file by a
    longer one.
    """

    def __init__(self, part: str) -> None:
        name = Path(os.environ["ACCELERATOR_OUT"], os.environ.get("ACCELERATOR_FILE", part))
        self._text, self._json = (
            name.with_name(name.name + ".txt"),
            name.with_name(name.name + ".json"),
        )
        self._rows: list[dict[str, Any]] = []
        self._head = {
            "part": part,
            "device": json.loads(os.environ["ACCELERATOR_DEVICE"]),
            "quick": QUICK,
        }
        self.backend = str(self._head["device"]["backend"])
        self._text.write_text("")
        self._write()  # not the rows of an earlier run, if this one does not come to its first
        self.say(
            f"{part}: {describe(self._head['device'])}{' (quick: no figures)' if QUICK else ''}"
        )

    def say(self, line: str) -> None:
        """Show a line."""
        print(line, flush=True)
        with self._text.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def row(self, name: str, **values: Any) -> None:
        """Show a row, and write all rows so far."""
        self._rows.append({"name": name, **values})
        self.say(
            f"  {name:58s} " + "  ".join(f"{key} {shown(value)}" for key, value in values.items())
        )
        self._write()

    def _write(self) -> None:
        new = self._json.with_name(self._json.name + ".new")
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
    return (
        f"{device['count']} × {device['kind']} ({device['backend']}), "
        f"JAX {device['jax']}, {device['driver']}"
    )


def seconds_left() -> float:
    """Return how long the part may still run."""
    return float(os.environ.get("ACCELERATOR_DEADLINE", "inf")) - time.time()


def run_child(
    command: Sequence[str], variables: dict[str, str], limit: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a process for at most some seconds.

    Its output is read from files: with pipes, what it started itself would keep the part waiting
    after the limit.

    Raises:
        subprocess.TimeoutExpired: It was killed at the limit.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        done = subprocess.run(
            command,
            env=variables,
            cwd=cwd,
            timeout=max(1.0, limit),
            stdout=out,
            stderr=err,
            check=False,
        )
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command, done.returncode, *texts)


def last_line(text: str) -> str:
    """Return the last line of a text: of a traceback, the error."""
    return (text.strip().splitlines() or ["no message"])[-1][:300]


def installed(report: PartReport, package: str) -> bool:
    """Return whether a package can be imported, and name it if not."""
    try:
        __import__(package)
    except Exception as error:  # a package that is there and does not load is one that is missing
        report.say(
            f"  {package} is not available ({type(error).__name__}: {error}): its rows are left out"
        )
        return False
    return True


def each(report: PartReport, measured: dict[str, Any]) -> int:
    """Call functions by their names, each of which adds rows; return how many failed.

    One that fails is named, and does not end the others; those that there is no time for are named,
    too.
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
            report.row(
                name,
                failed=f"{type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"[:300],
            )
            sys.excepthook(type(error), error, error.__traceback__)
    return failed
