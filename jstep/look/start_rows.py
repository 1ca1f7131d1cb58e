"""The starts of a run as rows: their first and last step, their times, what they changed, and how they ended.

`runs --starts`, `diff RUN` and the page show them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jstep.core.checks import format_bytes, format_list
from jstep.look.cli import local_text, local_zone, table
from jstep.look.goodput import milliseconds
from jstep.look.run_summary import facts_of
from jstep.record.differences import changes
from jstep.record.schema import Start
from jstep.record.starts import original_of, with_card

SHOWN = 40
"""How many changes of a start are shown."""
_NO_CARD = "has no card: what it was given is not known"


def start_rows(where: str, starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return a row for each start, also of those that cannot be read, whose `problem` says why.

    `changes` are relative to the previous start with a card; None for the first one, and if they are unknown.
    """
    source, rows = original_of(where, starts), list[dict[str, Any]]()
    before: Mapping[str, Any] | None = None
    for start in starts:
        row = {"prefix": start["prefix"], **facts_of(where, start, source), "problem": start["problem"] or None}
        row |= dict.fromkeys(("from", "to", "saved", "directory", "milliseconds", "changes", *_MEMORY))
        if not start["problem"]:
            first, last = start["step"] or (None, None)
            saved = start["saved"][-1][0] if start["saved"] else None
            row |= {"from": first, "to": last, "saved": saved, "directory": start["directory"]}
            row |= {"milliseconds": milliseconds(start), **{name: start.get(name) for name in _MEMORY}}
            carded: Mapping[str, Any] = with_card(where, start)
            if not carded["card"]:
                row["problem"] = _NO_CARD
            else:
                step = start["other_batch"]
                other_batch = [] if step is None else [f"batch {step} is not the one that was read before"]
                row["changes"] = None if before is None else [*changes(before, carded).lines, *other_batch]
                card = carded["card"]
                programs = card.get("programs") or (before or carded)["card"].get("programs")  # none without a step
                before = {**carded, "card": {**card, "programs": programs}}
        rows.append(row)
    return rows


_MEMORY = ("host_bytes", "host_peak_bytes", "peak_bytes")
NOT_COMPARED = "not compared: files, and data except the first batch of a restart"


def changes_of_starts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Describe what each start changed, in lines."""
    several = len({row["prefix"] for row in rows}) > 1
    for row in rows:
        lines, begin = row["changes"], f"{row['prefix']}: " if several else ""
        if row["problem"]:
            yield f"{begin}its start {row['number']} {row['problem']}"
            continue
        what = "changed since the start before:" if lines else "nothing has changed"
        what = "the first start" if lines is None else what
        yield f"{begin}{local_text(row['began'])}, from step {row['from'] or 0}: {what}"
        yield from first_lines(lines or [])
    if any(row["changes"] == [] for row in rows):
        yield NOT_COMPARED


def first_lines(lines: Sequence[str], shown: Sequence[str] | None = None) -> list[str]:
    others = len(lines) - SHOWN
    ending = [f"and {others} more (--json lists all)"] if others > 0 else []
    return [f"  {line}" for line in (*(shown or lines[:SHOWN]), *ending)]


def table_of_starts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table, followed by the changes and the earlier directories of the run."""
    times_of_rows = [row["milliseconds"] or {} for row in rows]
    parts = [part for part in times_of_rows[0] if any(times.get(part) for times in times_of_rows)]
    cells, notes = list[dict[str, Any]](), list[str]()
    for row in rows:
        times = {part: f"{value:.3g}" for part, value in (row["milliseconds"] or {}).items()}
        sizes = {name: format_bytes(row[name]) if row[name] else None for name in _MEMORY}
        began = None if row["began"] is None else local_text(row["began"])
        end = f"{row['status']}: {row['reason'] or ''}"[:60].rstrip(": ")
        cells.append({**row, **times, **sizes, "began": began, "end": end})
        if row["problem"]:
            notes.append(f"start {row['number']} {row['problem']}")
        elif row["changes"]:
            notes.append(f"start {row['number']} changed: {format_list(row['changes'], SHOWN, '; ')}")
    places = dict.fromkeys(row["directory"] for row in rows if row["directory"])
    if len(places) > 1:
        notes.append(f"it was in {format_list(list(places), SHOWN, ', then in ')}")
    heads = {"start": "number", f"began ({local_zone()})": "began"}
    heads |= {name: name for name in ("from", "to", "end", "saved", *parts)}
    heads |= {"host now": "host_bytes", "host most": "host_peak_bytes", "device most": "peak_bytes"}
    in_ms = [f"milliseconds a step: {', '.join(parts)}"] * bool(parts)
    return [*table(heads, cells, left=2), *in_ms, *notes]
