"""Formatting of a `Cost` as text and HTML."""

import textwrap
from typing import Any

from jstep.core.text import html_table, scaled, size
from jstep.tools.table import WIDTH
from jstep.topologies.compilers import versions
from jstep.topologies.names import parsed

_UNKNOWN = "not known"


def rows_of(cost: Any) -> list[tuple[str, str]]:
    """Return the rows of the table of a `Cost`: name and figure."""
    unknown = f", {cost.loops_unknown} loops of unknown length counted once" if cost.loops_unknown else ""
    moved = None if cost.collectives is None else cost.collectives.items()
    rows = [
        ("operations", _UNKNOWN if cost.flops is None else scaled(cost.flops, "FLOP") + unknown),
        ("memory traffic", _size(cost.bytes_accessed)),
        ("parameters", size(cost.params_bytes)),
        ("slots", size(cost.slots_bytes)),
        ("arguments", _size(cost.argument_bytes)),
        ("results", f"{_size(cost.output_bytes)}, {_size(cost.alias_bytes)} of it aliased to arguments"),
        ("temporaries", _size(cost.temp_bytes)),
        ("at its peak", _size(cost.peak_bytes) + _verdict(cost)),
        *([("on the host", size(cost.host_bytes))] if cost.host_bytes else []),
        *([("between devices", _UNKNOWN)] if moved is None else []),
        *((kind, f"{one.number} × per step, {size(one.bytes)} in all") for kind, one in moved or ()),
        ("compiled in", f"{cost.compile_seconds:.1f} s"),
    ]
    if cost.output_bytes is None:
        rows = [row for row in rows if row[1] != _UNKNOWN and row[0] != "results"]
    return rows


def text_of(cost: Any) -> str:
    """Format a `Cost` as text: one figure per line, then the warnings."""
    rows = rows_of(cost)
    width = max(len(name) for name, _ in rows)
    lines = [_title(cost), *(f"  {name:<{width}}  {text}" for name, text in rows)]
    for warning in cost.warnings:
        lines += textwrap.wrap(
            f"warning: {warning}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    return "\n".join(lines)


def html_of(cost: Any) -> str:
    """Format a `Cost` as HTML for a notebook."""
    return html_table(_title(cost), rows_of(cost), notes=[f"warning: {warning}" for warning in cost.warnings])


def _title(cost: Any) -> str:
    where = "on one device" if cost.devices == 1 else f"on each of {cost.devices} devices"
    if cost.topology is None:
        return f"a step {where}"
    by = ", ".join(f"{package} {version}" for package, version in versions(parsed(cost.topology).kind).items())
    return f"a step {where}, {cost.topology} (compiled, not run; {by})"


def _verdict(cost: Any) -> str:
    if cost.memory_bytes is None:
        return ""
    fits = cost.fits
    if fits is None and cost.peak_bytes is not None:
        fits = cost.peak_bytes <= cost.memory_bytes
    verdict = ": it does not fit" if fits is False else ", recomputes to fit" if cost.recomputes else ""
    return f" of {size(cost.memory_bytes, digits=4)}{verdict}"


def _size(count: float | None) -> str:
    return _UNKNOWN if count is None else size(count)
