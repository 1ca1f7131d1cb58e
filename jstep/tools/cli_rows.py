"""`rows` of the command line: which rows of the data were in a step of a run, and which steps had a row."""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import format_list, truncate
from jstep.hooks.cards import RECIPE, Start, read_starts
from jstep.stores.run_record import newest_with_step, read_timeline
from jstep.stores.timeline import TIMELINE_FILE
from jstep.stores.urls import resolve_path, split_path
from jstep.tools.cli import Command, answer, check_span, complain
from jstep.tools.run_summary import RunSummary
from jstep.tools.runs import run_names, runs

# The definitions of the batches of a run, by its steps.


class Stretch(NamedTuple):
    """Consecutive steps with one definition of the batches; `problem` says why that is not known."""

    steps: range
    card: Mapping[str, Any]
    problem: str = ""

    def within(self, first: int, stop: int) -> "Stretch":
        return self._replace(steps=range(max(self.steps.start, first), min(self.steps.stop, stop)))

    def batches(self) -> Any:
        """Return the batches of these steps, `Batches` or a `Mixture`, without their data.

        Raises:
            ValueError: Their definition is not known.
        """
        from jstep.data.batches import from_recipe  # it imports JAX, which `--help` does not need

        try:
            return from_recipe(self._recipe())
        except Exception as error:  # a card may hold anything
            why = error if isinstance(error, ValueError) else f"its card holds what jstep does not write: {error!r}"
            raise ValueError(f"{_span(self.steps)}: the rows are not known: {truncate(str(why), 500)}") from None

    def _recipe(self) -> Mapping[str, Any]:
        if self.problem:
            raise ValueError(self.problem)
        if recipe := self.card.get(RECIPE):
            return dict(recipe)
        recipe = self.card.get("batches") or {}
        kind, version = recipe.get("kind"), (self.card.get("versions") or {}).get("jstep")
        if kind not in ("Batches", "Mixture"):
            raise ValueError(
                f"the batches were {truncate(str(kind), 100)}, whose rows only the program knows. `train` would need "
                "`jstep.batches` or `jstep.mixture` themselves, not an iterator, a function or a wrapper of them"
            )
        lacks = [name for name, value in recipe.items() if isinstance(value, str) and value.startswith("hash ")]
        lacks += ["exact weights"] * (kind == "Mixture")
        if len(recipe.get("batch_size", ())) != 1 and [part[::2] for part in recipe["steps"]] != [[0, 1]]:
            lacks += ["batch_size of the steps that were skipped"]
        if lacks:
            raise ValueError(
                f"the card of jstep {truncate(str(version), 20)} lacks {', '.join(lacks)}; newer versions record it, "
                "up to thousands of sources, weights or skips"
            )
        return recipe


def stretches(run: RunSummary, before: float | None = None, seen: Sequence[str] = ()) -> list[Stretch]:
    """Return the steps of a run in order, with the definitions of the last starts that took them.

    The steps before a branch are those of its parent, at the time when the branch began.

    Args:
        before: The time before which the starts to look at began; None for all.
        seen: The runs whose parent this one is.
    """
    starts = [start for start in read_starts(run.path) if start.prefix == run.prefix]
    timeline = read_timeline(run.path, run.prefix)
    found = _of_parent(run, min((lines[0]["time"] for lines in timeline.values()), default=None), seen)
    named = {start.id: start for start in starts}
    for name, lines in timeline.items():
        newest, began = newest_with_step(lines), lines[0]["time"]
        first, stop = (0, 0) if newest is None else newest["step"]
        if first == stop or not (before is None or began < before):
            continue
        start = named.get(name, Start(name, run.prefix))
        problem = "" if start.card else start.problem or "the start that took these steps has no card"
        found = [part for one in found for part in (one.within(0, first), one.within(stop, one.steps.stop))]
        found = [*filter(lambda part: part.steps, found), Stretch(range(first, stop), start.card or {}, problem)]
    return sorted(found, key=lambda part: part.steps.start)


def _of_parent(run: RunSummary, began: float | None, seen: Sequence[str]) -> list[Stretch]:
    if run.parent is None:
        return []
    (place, name), at = split_path(run.parent[0]), run.parent[1]
    problem, own, there = "its run is not there", [*seen, _id(run)], list[RunSummary]()
    try:
        for folder in (place, split_path(place)[0]):  # the best checkpoints of a run may be below it
            with contextlib.suppress(OSError):
                read_starts(folder)  # an error if there is no timeline; other directories are not searched
                there = there or _at(folder, runs(folder))
        if not there and run.parent_run is not None:  # it was moved, perhaps to a neighbor
            there = [one for one in runs(split_path(run.path)[0]) if one.run == run.parent_run]
        # The best checkpoints have a prefix of their own.
        parents = [one for one in there if one.prefix == name.rpartition("-")[0]] or (there if len(there) == 1 else [])
        if parents and parents[0].error is None and _id(parents[0]) not in own:
            return [part for one in stretches(parents[0], began, own) if (part := one.within(0, at)).steps]
    except (OSError, ValueError) as error:
        problem = str(error)
    return [Stretch(range(at), {}, f"they are those of {run.parent[0]}: {problem}")] if at else []


def _id(run: RunSummary) -> str:
    return f"{resolve_path(run.path)}:{run.prefix}"


def one_run(path: str, prefix: str | None) -> RunSummary:
    """Return the run in a directory.

    Raises:
        ValueError: There is no run, or there are several; or it cannot be read.
    """
    below = runs(path)
    there = _at(path, below)
    chosen = [run for run in there if prefix in (None, run.prefix) or run.error]
    if not there:
        none = f"{path}: no run is there; a run has a {TIMELINE_FILE} in its checkpoint_dir, or else in its logdir"
        raise ValueError(directory_of_runs(path, below) or none)
    if len(chosen) != 1:
        names = format_list(sorted(run.prefix for run in there), 20)
        raise ValueError(f"{path}: --prefix must be that of one run there, {names}; got {prefix or 'none'}")
    if chosen[0].error is not None:
        raise ValueError(f"{path}: {chosen[0].error}")
    return chosen[0]


def _at(path: str, below: Sequence[RunSummary]) -> list[RunSummary]:
    return [run for run in below if resolve_path(run.path) == resolve_path(path)]


def directory_of_runs(path: str, below: Sequence[RunSummary]) -> str:
    """Return a sentence that says so if there are runs below a directory, and none in it; otherwise ""."""
    if not below or _at(path, below):
        return ""
    names = format_list(run_names(below), 5)
    return f"{path} is a directory of runs ({names}): `python -m jstep runs {path}` lists them; give the path of one"


def _span(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


# The command.

_MAX_ROWS, _MAX_PASSES = 2**26, 10**6
"""The number of rows in a batch, and of passes over the data, up to which they are listed."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="the checkpoint_dir of a run, or its logdir if it has none")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="show the rows of the batch of step N (from 0)")
    what.add_argument("--row", metavar="ROW", help="show the steps whose batches had this row; SOURCE:ROW of a mixture")
    parser.add_argument("--from", type=int, dest="first", metavar="A", help="with --row: the first step to search")
    parser.add_argument("--to", type=int, dest="last", metavar="B", help="with --row: the last step to search")
    parser.add_argument("--prefix", help="the prefix of the run's checkpoints, if several runs are there")


def _run(arguments: argparse.Namespace) -> int:
    check_span(arguments.first, arguments.last)
    run, step, last = one_run(arguments.path, arguments.prefix), arguments.step, arguments.last
    taken = stretches(run)
    first, stop = arguments.first or 0, (taken[-1].steps.stop if taken else 0) if last is None else last + 1
    if step is not None:
        if not (arguments.first is last is None):
            raise ValueError("--from and --to: are options of --row; --step is one step")
        first, stop = step, step + 1
    parts = [part for one in taken if (part := one.within(first, stop)).steps]
    if not parts:
        there = format_list([_span(part.steps) for part in taken], 5) or "no step"
        between = f"--from {first}{'' if last is None else f' --to {last}'}"
        raise ValueError(f"{between if step is None else f'--step {step}'}: must be in the run, which took {there}")
    if step is not None:
        rows = _rows_of(parts[0].batches(), step)
        head = f"batch of step {step}, whose metrics are logged at step {step + 1}: {len(rows)} rows"
        lines = [head, f"  {' '.join(map(str, rows))}"]
        return answer(arguments, {"step": step, "rows": rows}, lines)
    number = _as_row(arguments.row)
    row: Any = arguments.row if ":" in arguments.row else number
    steps, problems, outside, searched = list[int](), list[str](), list[str](), list[range]()
    for part in parts:
        try:
            steps += _steps_of(part.batches(), arguments.row, number, part.steps)
        except IndexError as error:  # the data had fewer rows, or sources
            outside.append(str(error).partition(": ")[2])
        except ValueError as error:
            problems.append(str(error))
            continue
        before = searched.pop().start if searched and searched[-1].stop == part.steps.start else part.steps.start
        searched.append(range(before, part.steps.stop))
    if len(outside) == len(parts):
        raise ValueError(f"--row {row}: {outside[-1]}")
    if len(problems) == len(parts):
        return complain("rows", *problems)
    of = format_list(list(map(_span, searched)), 5)
    lines = [f"row {row}: in {len(steps)} of the {of}", *([f"  {' '.join(map(str, steps))}"] if steps else [])]
    return max(answer(arguments, {"row": row, "steps": steps}, lines), complain("rows", *problems))


def _as_row(text: str) -> int:
    try:
        return int(text.rpartition(":")[2])
    except ValueError:
        raise ValueError(f"--row {text}: must be the number of a row, or SOURCE:ROW of a mixture") from None


def _rows_of(data: Any, step: int) -> list[Any]:
    try:
        if (size := data.batch_size_at(step)) > _MAX_ROWS:
            raise ValueError(f"step {step}: a batch of {size} rows is too large to be listed")
        rows = data.rows_of(step)
    except IndexError as error:  # of a card of others
        raise ValueError(str(error)) from None
    return [f"{source}:{row}" for source, row in rows] if isinstance(data.num_rows, dict) else rows.tolist()


def _steps_of(data: Any, text: str, number: int, steps: range) -> list[int]:
    source, colon, _ = text.rpartition(":")
    if bool(colon) != isinstance(data.num_rows, dict):
        sources = "" if colon else f"SOURCE:ROW, with the sources {format_list(list(data.num_rows), 20)}"
        raise ValueError(f"--row {text}: must be {sources or 'the number of a row'}, in {_span(steps)}")
    if colon and source not in data.num_rows:
        raise IndexError(f"row: must be SOURCE:ROW, with the sources {format_list(list(data.num_rows), 20)}")
    row = [*([source] if colon else []), number]
    low, high, of_all = data.rows_before(steps.start), data.rows_before(steps.stop), data.num_rows
    passes = (high[source] - low[source]) / of_all[source] if colon else (high - low) / of_all
    if passes > _MAX_PASSES:
        raise ValueError(f"--row {text}: {_span(steps)} pass over the data {passes:.3g} times; give --from and --to")
    found: list[int] = data.steps_of(*row, steps.start, steps.stop)
    return found


ROWS = Command(_add_arguments, _run)
