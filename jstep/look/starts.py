"""The starts of a run as text: a table of them, and what each of them changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jstep.core.checks import format_bytes, format_list
from jstep.look.cli import local_text, local_zone, table
from jstep.look.run_folder import MEMORY
from jstep.record.starts import KILLED

SHOWN = 40
"""How many changes of a start are shown."""
_SHOWN_STEPS = 10
"""Up to how many steps of a change of the state are all listed."""
NOT_COMPARED = "not compared: files, and data except the first batch of a restart"


def lines_of_changes(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    several = len({start["prefix"] for start in starts}) > 1
    for start in starts:
        lines, begin = start["changes"], f"{start['prefix']}: " if several else ""
        if start["problem"]:
            yield f"{begin}its start {start['number']} {start['problem']}"
            continue
        what = "changed since the start before:" if lines else "nothing has changed"
        what = "the first start" if lines is None else what
        where = "without a step" if start["first"] is None else f"from step {start['first']}"
        yield f"{begin}{local_text(start['began'])}, {where}: {what}"
        yield from first_lines(lines or [])
        yield from (f"  its state was {line}" for line in state_change_lines(start))
    if any(start["changes"] == [] for start in starts):
        yield NOT_COMPARED


def state_change_lines(start: Mapping[str, Any]) -> list[str]:
    """Describe when the body of the loop, or a hook, replaced which leaves of the state."""
    lines = list[str]()
    for change in start["state_changes"] or ():
        count, steps = change["count"], change["steps"] or [0]
        when = f"{count} steps from {steps[0]} to {steps[-1]}"
        if count == len(steps) <= _SHOWN_STEPS:
            when = f"{'steps' if count > 1 else 'step'} {', '.join(map(str, steps))}"
        others = f" and {change['leaves_left_out']} more" if change["leaves_left_out"] else ""
        lines.append(f"changed by {change['by']} at {when}: {', '.join(change['leaves'])}{others}")
    return lines


def last_step_text(start: Mapping[str, Any]) -> str | None:
    """Return the last step of a start; of one that was killed, at least as many steps were taken."""
    if start["last"] is None:
        return None
    return f"{'at least ' if start['status'] == KILLED else ''}{start['last']}"


def first_lines(lines: Sequence[str], shown: Sequence[str] | None = None, indent: str = "  ") -> list[str]:
    others = len(lines) - SHOWN
    ending = [f"and {others} more (--json lists all)"] if others > 0 else []
    return [f"{indent}{line}" for line in (*(shown or lines[:SHOWN]), *ending)]


def table_of_starts(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    times_of_starts = [start["milliseconds"] or {} for start in starts]
    parts = [part for part in times_of_starts[0] if any(times.get(part) for times in times_of_starts)]
    rows, notes = list[dict[str, Any]](), list[str]()
    for start, times in zip(starts, times_of_starts, strict=True):
        sizes = {name: format_bytes(start[name]) if start[name] else None for name in MEMORY}
        began = None if start["began"] is None else local_text(start["began"])
        end = f"{start['status']}: {start['reason'] or ''}"[:60].rstrip(": ")
        in_ms = {part: f"{value:.3g}" for part, value in times.items()}
        rows.append({**start, **in_ms, **sizes, "began": began, "last": last_step_text(start), "end": end})
        if start["problem"]:
            notes.append(f"start {start['number']} {start['problem']}")
        elif start["changes"]:
            notes.append(f"start {start['number']} changed: {format_list(start['changes'], SHOWN, '; ')}")
        notes += [f"start {start['number']}, its state was {line}" for line in state_change_lines(start)]
    places = dict.fromkeys(start["directory"] for start in starts if start["directory"])
    if len(places) > 1:
        notes.append(f"it was in {format_list(list(places), SHOWN, ', then in ')}")
    heads = {"start": "number", f"began ({local_zone()})": "began", "from": "first", "to": "last"}
    heads |= {name: name for name in ("end", "saved", *parts)}
    heads |= {"host now": "host_bytes", "host most": "host_peak_bytes", "device most": "peak_bytes"}
    units = [f"milliseconds a step: {', '.join(parts)}"] if parts else []
    return [*table(heads, rows, left=2), *units, *notes]
