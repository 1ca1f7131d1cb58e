"""The progress bar of a run in a notebook, with evaluations and curves below it."""

import datetime
import importlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from jstep.core.logs import is_below_bar
from jstep.core.tables import html_table, html_text
from jstep.hooks.history import History
from jstep.hooks.run_hook import RunInfo
from jstep.metering.cadence import Clock
from jstep.metering.numbers import as_numbers, read_values

_ROWS, _LINES = 20, 20
"""The maximum numbers of rows of evaluations, and of log lines."""
_SECS, _SECS_OF_CURVES = 0.5, 2.0
"""The minimum seconds between updates, and between drawings of curves."""


class ShownLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if is_below_bar(record):
            self.texts.append(record.getMessage())


class Below:
    def __init__(self, run: RunInfo, histories: Sequence[History], clock: Clock, lines: ShownLines) -> None:
        self._run = run
        self._histories = histories
        self._clock = clock
        self._lines = lines
        self._curves, self._drawn = "", float("-inf")

    def html(self, *, is_last: bool) -> str:
        if self._histories and (is_last or self._clock() - self._drawn >= _SECS_OF_CURVES):
            self._drawn = self._clock()
            self._curves = "".join(history.svg() for history in self._histories)
        rows: dict[int, dict[str, Any]] = {}
        for hook in self._run.evaluations:
            for step, values in list(hook.results.items())[-_ROWS:]:
                named = read_values(as_numbers(values))
                rows.setdefault(step, {}).update({f"{hook.prefix}/{name}": number for name, number in named.items()})
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        cells = [
            [str(step), *(f"{rows[step][name]:.4g}" if name in rows[step] else "" for name in names)]
            for step in sorted(rows)[-_ROWS:]
        ]
        lines = (line for text in tuple(self._lines.texts) for line in text.splitlines())
        shown = "".join(f"<div>{html_text(line)}</div>" for line in lines)
        return shown + (html_table("", cells, ("step", *names)) if cells else "") + self._curves


class NotebookBar:
    def __init__(
        self,
        *,
        below: Below,
        clock: Clock,
        total: int | None,
        initial: int,
        postfix: str = "",
        **others: object,
    ) -> None:
        self.n = initial
        self.total = total
        self.postfix = postfix
        self._below, self._clock = below, clock
        self._first, self._began = initial, clock()
        self._shown = float("-inf")
        self._html, self._text = "", ""
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
        self._first, self._began = self.n, self._clock()

    def refresh(self) -> None:
        if self._clock() - self._shown >= _SECS:
            self._show(is_last=False)

    def close(self) -> None:
        self._show(is_last=True)

    def _show(self, *, is_last: bool) -> None:
        self._write(is_last=is_last)
        self._handle.update(self)

    def _write(self, *, is_last: bool) -> None:
        self._shown = self._clock()
        seconds, steps = self._clock() - self._began, self.n - self._first
        rate = steps / seconds if seconds > 0 else 0.0
        is_early = is_last and self.total is not None and self.n < self.total
        step = f"step {self.n:,}" if self.total is None else f"step {self.n:,} of {self.total:,}"
        words = [f"stopped at {step}" if is_early else step]
        words += [f"{rate:.4g} steps/s"] if steps else []
        if steps and rate and self.total is not None and not is_last:
            words.append(f"{datetime.timedelta(seconds=round((self.total - self.n) / rate))} left")
        self._text = "  ".join([*words, self.postfix or ""]).rstrip()
        style = "font-variant-numeric: tabular-nums"
        value = f'value="{self.n}" max="{self.total}" style="width: 12em"'
        bar = "" if self.total is None else f"<progress {value}></progress> "
        below = self._below.html(is_last=is_last)
        self._html = f'<div style="{style}">{bar}{html_text(self._text)}</div>{below}'
