"""The progress bar of a run in a notebook, with evaluations and curves below it."""

import datetime
import importlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from jstep.core.logs import is_below_bar
from jstep.core.tables import html_table, html_text
from jstep.hooks.cadence import Clock
from jstep.hooks.run_info import RunInfo
from jstep.logs.history import History
from jstep.metering.numbers import numbers_in, read_values

_MAX_ROWS = 20
"""The maximum number of rows of evaluations."""
_MAX_LINES = 20
"""The maximum number of log lines."""
_SECS = 0.5
"""The minimum seconds between updates."""
_CURVE_SECS = 2.0
"""The minimum seconds between drawings of curves."""


class ShownLines(logging.Handler):
    """The newest log lines, except those that the bar shows itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: deque[str] = deque(maxlen=_MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if is_below_bar(record):
            self.texts.append(record.getMessage())


class BarDetails:
    """What is below the bar: log lines, a table of evaluations, and curves."""

    def __init__(
        self, run: RunInfo, histories: Sequence[History], clock: Clock, lines: ShownLines
    ) -> None:
        self._run = run
        self._histories = histories
        self._clock = clock
        self._lines = lines
        self._curves = ""
        self._drawn_at = float("-inf")

    def html(self, *, is_last: bool) -> str:
        if self._histories and (is_last or self._clock() - self._drawn_at >= _CURVE_SECS):
            self._drawn_at = self._clock()
            self._curves = "".join(history.svg() for history in self._histories)
        return self._lines_html() + self._table_html() + self._curves

    def _lines_html(self) -> str:
        shown: list[str] = []
        for text in tuple(self._lines.texts):  # a copy, as any thread may log
            shown += [f"<div>{html_text(line)}</div>" for line in text.splitlines()]
        return "".join(shown)

    def _table_html(self) -> str:
        """Return a table of evaluated steps (rows) and results (columns); empty without any."""
        rows: dict[int, dict[str, Any]] = {}
        names: dict[str, None] = {}  # an ordered set
        for hook in self._run.evaluations:
            for step, values in list(hook.results.items())[-_MAX_ROWS:]:
                row = rows.setdefault(step, {})
                for name, number in read_values(numbers_in(values)).items():
                    row[f"{hook.prefix}/{name}"] = number
        for row in rows.values():
            names |= dict.fromkeys(row)
        cells: list[list[str]] = []
        for step in sorted(rows)[-_MAX_ROWS:]:
            numbers = [f"{rows[step][name]:.4g}" if name in rows[step] else "" for name in names]
            cells.append([str(step), *numbers])
        return html_table("", cells, ("step", *names)) if cells else ""


class NotebookBar:
    """A bar with those methods of a tqdm bar that `ProgressHook` calls."""

    def __init__(
        self,
        *,
        details: BarDetails,
        clock: Clock,
        total: int | None,
        initial: int,
        postfix: str = "",
        **others: object,
    ) -> None:
        self.n = initial
        self.total = total
        self.postfix = postfix
        self._details = details
        self._clock = clock
        # The rate counts from here. `unpause` restarts it, so that it excludes compilation.
        self._first = initial
        self._began = clock()
        self._shown_at = float("-inf")
        self._html = ""
        self._text = ""
        self._write(is_last=False)
        display: Any = importlib.import_module("IPython.display")
        self._handle = display.display(self, display_id=True)

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text
        if refresh:
            self.refresh()

    def update(self, steps: int) -> None:
        self.n += steps
        self.refresh()

    def unpause(self) -> None:
        self._first = self.n
        self._began = self._clock()

    def refresh(self) -> None:
        if self._clock() - self._shown_at >= _SECS:
            self._show(is_last=False)

    def close(self) -> None:
        self._show(is_last=True)

    def _show(self, *, is_last: bool) -> None:
        self._write(is_last=is_last)
        self._handle.update(self)

    def _write(self, *, is_last: bool) -> None:
        self._shown_at = self._clock()
        self._text = self._words(is_last=is_last)
        bar = ""
        if self.total is not None:
            bar = f'<progress value="{self.n}" max="{self.total}" style="width: 12em"></progress> '
        line = f'<div style="font-variant-numeric: tabular-nums">{bar}{html_text(self._text)}</div>'
        self._html = line + self._details.html(is_last=is_last)

    def _words(self, *, is_last: bool) -> str:
        seconds = self._clock() - self._began
        steps = self.n - self._first
        rate = steps / seconds if seconds > 0 else 0.0
        step = f"step {self.n:,}"
        if self.total is not None:
            step += f" of {self.total:,}"
            if is_last and self.n < self.total:
                step = f"stopped at {step}"
        words = [step]
        if steps:
            words.append(f"{rate:.4g} steps/s")
        if rate and self.total is not None and not is_last:
            words.append(f"{datetime.timedelta(seconds=round((self.total - self.n) / rate))} left")
        words.append(self.postfix or "")
        return "  ".join(words).rstrip()
