"""`diff` of the command line: how two checkpoints or runs differ, and from which step on."""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import format_list
from jstep.core.tables import columns, fold
from jstep.look import cli
from jstep.look.arrays import LeafDifference, array_difference
from jstep.look.checkpoints import Checkpoint, checkpoint_at, checkpoints_in
from jstep.look.cli import SHOWN, first_lines
from jstep.look.positions import position_differences
from jstep.look.run_folder import (
    NOT_COMPARED,
    RunFolder,
    find_run_folders,
    lines_of_changes,
    logged_states,
    run_folders,
    state_change_lines,
)
from jstep.record.differences import IN_A_AND_B, changes
from jstep.stores.files import is_directory, names_in
from jstep.stores.urls import is_url, join_path, location, split_path

# What two directories have recorded of their runs.


class RecordedRuns(NamedTuple):
    """The runs of a directory that are compared."""

    path: str
    folders: Sequence[RunFolder]


def _start_differences(a: RecordedRuns, b: RecordedRuns) -> list[str] | None:
    """Describe the differences between the last starts of two runs that trained; None if there is no record of one."""
    of_a, of_b = ({run.prefix: run.last_trained_start for run in x.folders if run.last_trained_start} for x in (a, b))
    pairs = [(f"{prefix}: ", of_a[prefix], of_b[prefix]) for prefix in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        pairs = [("", next(iter(of_a.values())), next(iter(of_b.values())))]
    if len(pairs) == 1:
        pairs = [("", *pairs[0][1:])]
    found = [f"{name}{line}" for name, x, y in pairs for line in changes(x, y, IN_A_AND_B).lines]
    return found if pairs else None


def changes_text(lines: list[str] | None) -> list[str]:
    if not lines:
        return [] if lines is None else ["the last starts do not differ", NOT_COMPARED]
    return ["the last starts differ:", *first_lines(lines)]


def _state_changes(runs: Sequence[RecordedRuns]) -> list[str]:
    """Describe what replaced the state in one of two runs only."""
    of_a, of_b = (
        [line for folder in x.folders for start in folder.valid_starts for line in state_change_lines(start)]
        for x in runs
    )
    only = [("A", line) for line in of_a if line not in of_b] + [("B", line) for line in of_b if line not in of_a]
    return [f"in {name}, the state was {line}" for name, line in only]


# The steps between which two runs diverge, by their checkpoints, fingerprints and common scalars.

_TIMED = re.compile(
    r"(?:\bper_|/)s(?:ec(?:ond)?s?)?\b|_per_sec|\b[mh]fu\b|(?:\b|_)(?:time|secs|seconds|ms)\b", re.IGNORECASE
)
"""Tags of scalars that measure time, and differ in each run."""


class Divergence(NamedTuple):
    """The last step at which all that was compared is equal, and the first at which something differs, if known."""

    equal_at: int | None
    differ_at: int | None
    compared_by: list[str]

    def text(self, runs: Sequence[RecordedRuns]) -> str:
        if self.differ_at is None:
            return ""
        equal = "" if self.equal_at is None else f"equal at {self.equal_at}, "
        text = f"{equal}differ at {self.differ_at} (by {', '.join(self.compared_by)})"
        for path, folders in runs:
            spans = [start["step"] for folder in folders for start in folder.valid_starts]
            firsts = [span[0] for span in spans if span and span[0] > 0 and (self.equal_at or 0) <= span[0]]
            text += "".join(f"; {path} was started at {first}" for first in firsts if first <= self.differ_at)
        return text


def divergence(
    runs: Sequence[RecordedRuns], source: str = "", compared: Mapping[int, bool] | None = None
) -> Divergence:
    """Compare two runs by their logs; `compared` has the steps that `source` has compared: step → whether equal."""
    sources = [source] if source else []
    same = dict(compared or {})
    # Two runs in one directory have one file of fingerprints.
    states = [{} if runs[0].path == runs[1].path else logged_states(*run) for run in runs]
    logs: dict[str, list[dict[tuple[int, str], Any]]] = {
        "fingerprints": [{(step, ""): state for step, state in log.items()} for log in states],
        "scalars": _scalars(runs),
    }
    for name, (of_a, of_b) in logs.items():
        common = of_a.keys() & of_b.keys()
        if common and name not in sources:
            sources.append(name)
        for key in common:  # equal numbers do not prove equal states, but different ones prove different states
            same[key[0]] = same.get(key[0], True) and of_a[key] == of_b[key]
    differ = min((step for step, is_same in same.items() if not is_same), default=None)
    equal = max((step for step, is_same in same.items() if is_same and (differ is None or step < differ)), default=None)
    return Divergence(equal, differ, sources)


def _scalars(runs: Sequence[RecordedRuns]) -> list[dict[tuple[int, str], Any]]:
    """The scalars of each run by step and tag; several prefixes of a directory are compared by name."""
    with contextlib.suppress(OSError, ValueError, ImportError):
        is_pair = all(len(run.folders) == 1 for run in runs)
        return [
            {
                (step, tag if is_pair else f"{folder.prefix}: {tag}"): value
                for folder in run.folders
                for tag, points in folder.series().items()
                if not _TIMED.search(tag)
                for step, value in zip(points.steps, points.values, strict=True)
            }
            for run in runs
        ]
    return [{}, {}]


# The command: of two runs, the first step at which they differ; of two checkpoints, the leaves.


def differences_left_out(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    of_a, of_b = a.left_out, b.left_out
    for path in of_a | of_b:
        first = of_a.get(path)
        second = of_b.get(path)
        where = "left out of both"
        if first is None or second is None:
            yield LeafDifference(path, "left out", f"left out of {'A' if second is None else 'B'} only")
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            kinds = f"{first.dtype}{list(first.shape)} in A, {second.dtype}{list(second.shape)} in B"
            yield LeafDifference(path, "shape" if first.dtype == second.dtype else "dtype", f"{kinds}, {where}")
        elif first.fingerprint != second.fingerprint:
            yield LeafDifference(path, "values", f"the fingerprint, {where}")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a checkpoint, a directory of checkpoints, or a log of fingerprints (or a logdir that contains one)"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument(
        "b", metavar="B", nargs="?", help="the same for the other run; without it, A's starts are compared"
    )


class _Side(NamedTuple):
    """One side of the comparison; `steps` maps (step, prefix) to checkpoints or entries of a log."""

    path: str
    kind: str
    steps: Mapping[tuple[int, str], Any]
    problems: Sequence[str] = ()

    def recorded_runs(self) -> RecordedRuns:
        """Return the run that a checkpoint is of, or all; all also if none has its prefix, as for the best ones."""
        where = self.path if self.kind == _DIRECTORY else split_path(self.path)[0] or "."
        prefixes = [prefix for _, prefix in self.steps] if self.kind == _CHECKPOINT else []
        with contextlib.suppress(OSError):  # a directory that cannot be read is reported by the comparison itself
            every = run_folders(where)
            return RecordedRuns(where, [folder for folder in every if folder.prefix in prefixes] or every)
        return RecordedRuns(where, [])


_CHECKPOINT, _DIRECTORY, _LOG = "a checkpoint", "a directory of checkpoints", "a log of fingerprints"


def _print_differences(arguments: argparse.Namespace) -> int:
    if arguments.b is None:
        # As for two runs, the starts do not decide the exit code.
        run = location(arguments.a, "A")
        starts = [start for folder in find_run_folders(run) for start in folder.facts_with_changes]
        return cli.answer(arguments, {"run": run, "starts": starts}, lines_of_changes(starts))
    a, b = (_side(location(path, name)) for path, name in ((arguments.a, "A"), (arguments.b, "B")))
    if a.kind != b.kind:
        raise ValueError(f"{a.path} is {a.kind}, and {b.path} is {b.kind}: pass two of the same kind")
    runs = [a.recorded_runs(), b.recorded_runs()]
    folders = [folder for run in runs for folder in run.folders]
    problems = [f"{folder.path}: {problem}" for folder in folders for problem in folder.unreadable_starts]
    of_starts, changed = _start_differences(*runs), _state_changes(runs)
    if a.kind == _CHECKPOINT:
        (first,), (second,) = a.steps.values(), b.steps.values()
        every = {name for x in (first, second) for name in (*x.left_out, *x.named)}
        steps = {"a": first.step, "b": second.step}
        result = _result(a, b, _leaves(first, second), steps=steps, compared=len(every))
        if positions := _positions(first, second):
            result["positions"] = positions
    else:
        result = _runs(a, b)
    lines = [*problems, *changes_text(of_starts), *first_lines(changed, indent=""), *_differences_text(result)]
    if a.kind != _CHECKPOINT:
        first = result.get("step")
        same = {step: step != first for step in result["common"] if first is None or step <= first}
        found = divergence(runs, "checkpoints" if a.kind == _DIRECTORY else "fingerprints", same)
        result |= found._asdict()
        lines += filter(None, [found.text(runs)])
    result |= ({} if of_starts is None else {"starts": of_starts}) | ({"unreadable": problems} if problems else {})
    result |= {"state_changes": changed} if changed else {}
    is_same = result["same"] and not result.get("positions")
    code = cli.answer(arguments, result, lines, cli.OK if is_same else cli.DIFFERENT)
    return cli.complain("diff", *a.problems, *b.problems) or code


def _side(path: str) -> _Side:
    checkpoint = checkpoint_at(path)
    if checkpoint is not None:
        return _Side(path, _CHECKPOINT, {(checkpoint.step, checkpoint.prefix): checkpoint})
    in_directory = is_directory(path)
    if in_directory:
        checkpoints, problems = checkpoints_in(path)
        if checkpoints or problems:
            by_step = {(checkpoint.step, checkpoint.prefix): checkpoint for checkpoint in checkpoints}
            return _Side(path, _DIRECTORY, by_step, list(problems.values()))
    elif not is_url(path) and not os.path.lexists(path):
        raise FileNotFoundError(f"no such checkpoint, directory or log: {path}")
    return _log_at(path, in_directory)


def _log_at(path: str, in_directory: bool) -> _Side:
    from jstep.hooks.fingerprints import FINGERPRINTS_FILE, read_log  # imports JAX, which is not needed above

    if in_directory:
        if FINGERPRINTS_FILE not in names_in(path):
            raise FileNotFoundError(f"no checkpoints and no {FINGERPRINTS_FILE} in {path}")
        path = join_path(path, FINGERPRINTS_FILE)
    log = read_log(path)
    problems = [f"{path}: {problem}; the other lines are compared" for problem in log.corrupted]
    if not log.entries:
        raise ValueError(problems[0] if problems else f"{path} has no complete line of a FingerprintHook")
    return _Side(path, _LOG, {(step, ""): entry for step, entry in log.entries.items()}, problems)


def _runs(a: _Side, b: _Side) -> dict[str, Any]:
    of_a, of_b = a.steps, b.steps
    prefixes = [{prefix for _, prefix in items} for items in (of_a, of_b)]
    if not prefixes[0] & prefixes[1] and len(prefixes[0]) == len(prefixes[1]) == 1:
        of_a, of_b = ({(step, ""): item for (step, _), item in items.items()} for items in (of_a, of_b))
    keys = sorted(of_a.keys() & of_b.keys())
    if not keys:
        some = [format_list([str(step) for step, _ in sorted(items)], 5) or "none" for items in (of_a, of_b)]
        raise ValueError(f"no step in common: {a.path} has {some[0]}, and {b.path} has {some[1]}")
    common = [step for step, _ in keys]
    positions = dict[str, Any]()
    for before, key in enumerate(keys):
        if a.kind == _LOG:
            leaves = _of_entries(of_a[key], of_b[key])
        else:
            leaves = _leaves(of_a[key], of_b[key]) or None
            if not positions and (found := _positions(of_a[key], of_b[key])):
                positions = {"positions": found, "positions_step": key[0]}
        if leaves is not None:
            at_step = {"step": key[0], "common": common, "same_before": before, "same": False}
            return _result(a, b, leaves, **at_step, **positions)
    return _result(a, b, [], common=common, **positions)


def _positions(a: Checkpoint, b: Checkpoint) -> list[dict[str, str]]:
    found = position_differences(a.positions(), b.positions())
    return [{"name": name, "detail": detail} for name, detail in found]


def _of_entries(a: Any, b: Any) -> list[LeafDifference] | None:
    """Return the leaves that differ, [] if a log has none; None if the states are the same."""
    from jstep.hooks.fingerprints import compare_logs

    result = compare_logs(a, b)
    if result is None:
        return None
    only = dict.fromkeys(result.first_only, "only in A") | dict.fromkeys(result.second_only, "only in B")
    leaves = result.leaves or ()
    return [LeafDifference(path, only.get(path, "fingerprint"), only.get(path, "")) for path in leaves]


def _leaves(a: Checkpoint, b: Checkpoint) -> list[LeafDifference]:
    for checkpoint in (a, b):
        if problems := checkpoint.problems():
            raise ValueError(f"{checkpoint.path} is corrupted: {'; '.join(problems[:3])}")
    absent = a.left_out.keys() | b.left_out.keys()
    of_a, of_b = ({name: leaf for name, leaf in x.named.items() if name not in absent} for x in (a, b))
    by_name: dict[str, LeafDifference] = {}
    for name, leaf in of_a.items():
        other = of_b.get(name)
        if other is None:
            by_name[name] = LeafDifference(name, "only in A", "only in A")
        elif (leaf.dtype, leaf.key_impl) != (other.dtype, other.key_impl):
            by_name[name] = LeafDifference(name, "dtype", f"{leaf.dtype} in A, {other.dtype} in B")
    both = [name for name in of_a if name not in by_name]
    # Read leaf by leaf, because two checkpoints may not fit into memory.
    for (name, _, array_a), (_, _, array_b) in zip(a.leaves(both), b.leaves(both), strict=True):
        if (differing := array_difference(name, array_a, array_b)) is not None:
            by_name[name] = differing
    others = [LeafDifference(name, "only in B", "only in B") for name in of_b if name not in of_a]
    return [*(by_name[name] for name in of_a if name in by_name), *others, *differences_left_out(a, b)]


def _result(a: _Side, b: _Side, differing: list[LeafDifference], **fields: object) -> dict[str, Any]:
    leaves = [{key: value for key, value in leaf._asdict().items() if value is not None} for leaf in differing]
    return {"a": a.path, "b": b.path, "kind": a.kind, "same": not differing, "leaves": leaves} | fields


def _differences_text(result: dict[str, Any]) -> list[str]:
    lines = _leaves_text(result)
    if positions := result.get("positions"):
        step = f" at step {result['positions_step']}, the first of these" if "positions_step" in result else ""
        what = "position differs" if len(positions) == 1 else "positions differ"
        lines += [f"{len(positions)} {what}{step}", *_rows([(found["name"], found["detail"]) for found in positions])]
    return lines


def _leaves_text(result: dict[str, Any]) -> list[str]:
    leaves, common = result["leaves"], result.get("common")
    if result["same"]:
        if common is None:
            return [f"identical ({result['compared']} leaves, bitwise)"]
        return [f"identical at all common steps ({len(common)}, from {common[0]} to {common[-1]})"]
    if common is None:
        steps = result["steps"]
        at_steps = f"step {steps['a']}" if steps["a"] == steps["b"] else f"step {steps['a']} in A, {steps['b']} in B"
        lines = [f"{len(leaves)} of {result['compared']} leaves differ ({at_steps})"]
    else:
        place = f"number {result['same_before'] + 1} of {len(common)} common steps"
        lines = [f"the runs diverge at step {result['step']}, {place}"]
        if leaves:
            lines.append(f"{len(leaves)} {'leaf differs' if len(leaves) == 1 else 'leaves differ'}")
        else:
            lines.append("which leaves differ is not known: a log was written with per_leaf=False")
    return lines + _rows([(leaf["path"], leaf["detail"]) for leaf in leaves])


def _rows(pairs: list[tuple[str, str]]) -> list[str]:
    shown = columns(pairs[:SHOWN], 2) if pairs else []
    texts = [f"{name}: {detail}" for name, detail in pairs]
    return first_lines(texts, [part for line in shown for part in fold(line, cli.terminal_width() - 2, 2)])


DIFF = cli.Command(_add_arguments, _print_differences)
