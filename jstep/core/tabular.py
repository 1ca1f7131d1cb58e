"""Results as tables: a title, rows and notes, as text at a prompt and as HTML in a notebook."""

import textwrap
from collections.abc import Sequence

from jstep.core.html_tables import html_table
from jstep.core.tables import WIDTH, columns


class Tabular:
    """Base class of results that are shown as a table, at a prompt and in a notebook."""

    _left = 1
    """The number of left-aligned columns in text."""

    def _title(self) -> str:
        raise NotImplementedError

    def _rows(self) -> Sequence[Sequence[str]]:
        raise NotImplementedError

    def _head(self) -> Sequence[str]:
        return ()

    def _notes(self) -> Sequence[str]:
        return ()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [self._title(), *(f"  {line}" for line in columns(self._rows(), self._left))]
        for note in self._notes():
            lines += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(self._title(), self._rows(), self._head(), self._notes())
