"""`diff` of the command line: how two checkpoints or runs differ, and from which step on."""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jstep.core.checks import format_list
from jstep.core.tables import columns, fold
from jstep.look import cli
from jstep.look.arrays import LeafDifference, array_difference
from jstep.look.checkpoint_positions import position_differences
from jstep.look.checkpoints import Checkpoint, checkpoint_at, checkpoints_in
from jstep.look.cli import SHOWN, first_lines
from jstep.look.run_folder import (
    NOT_COMPARED,
    RunFolder,
    find_run_folders,
    lines_of_changes,
    logged_states,
    run_folders,
    state_change_lines,
)
from jstep.record.differences import PAIR_WORDS, changes
from jstep.stores.files import is_directory, names_in
from jstep.stores.urls import is_url, join_path, location, split_path

# What two directories have recorded of their runs.


class RecordedRuns(NamedTuple):
    """The runs of a directory that are compared."""

    path: str
    folders: Sequence[RunFolder]

    def last_trained_starts(self) -> dict[str, Mapping[str, Any]]:
        """Prefix → the start that represents its run, of those that have one."""
        starts: dict[str, Mapping[str, Any]] = {}
        for folder in self.folders:
            if folder.last_trained_start:
                starts[folder.prefix] = folder.last_trained_start
        return starts

    def state_changes(self) -> list[str]:
        """Describe what replaced the state in each start."""
        lines: list[str] = []
        for folder in self.folders:
            for start in folder.valid_starts:
                lines += state_change_lines(start)
        return lines


def _start_differences(a: RecordedRuns, b: RecordedRuns) -> list[str] | None:
    """Describe the differences between the last starts of two runs that trained; None if there is no record of one."""
    starts_a = a.last_trained_starts()
    starts_b = b.last_trained_starts()
    prefixes = sorted(starts_a.keys() & starts_b.keys())
    if not prefixes and len(starts_a) == len(starts_b) == 1:
        # Each directory has one run, and these are compared whatever their prefixes are.
        (start_a,) = starts_a.values()
        (start_b,) = starts_b.values()
        return changes(start_a, start_b, PAIR_WORDS).lines
    if not prefixes:
        return None
    lines: list[str] = []
    for prefix in prefixes:
        begin = f"{prefix}: " if len(prefixes) > 1 else ""
        found = changes(starts_a[prefix], starts_b[prefix], PAIR_WORDS)
        lines += [f"{begin}{line}" for line in found.lines]
    return lines


def changes_text(lines: list[str] | None) -> list[str]:
    if not lines:
        return [] if lines is None else ["the last starts do not differ", NOT_COMPARED]
    return ["the last starts differ:", *first_lines(lines)]


def _state_changes(a: RecordedRuns, b: RecordedRuns) -> list[str]:
    """Describe what replaced the state in one of two runs only."""
    lines_a = a.state_changes()
    lines_b = b.state_changes()
    only_a = [f"in A, the state was {line}" for line in lines_a if line not in lines_b]
    only_b = [f"in B, the state was {line}" for line in lines_b if line not in lines_a]
    return [*only_a, *only_b]


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
    logs: dict[str, list[_Log]] = {}
    if runs[0].path != runs[1].path:  # two runs in one directory have one file of fingerprints
        logs["fingerprints"] = [_fingerprints(run) for run in runs]
    logs["scalars"] = _scalars_of_each(runs)
    for name, (log_a, log_b) in logs.items():
        common = log_a.keys() & log_b.keys()
        if common and name not in sources:
            sources.append(name)
        for step, tag in common:
            # Equal numbers do not prove equal states, but different ones prove different states.
            is_equal = log_a[step, tag] == log_b[step, tag]
            same[step] = same.get(step, True) and is_equal
    differ = min((step for step, is_same in same.items() if not is_same), default=None)
    equal = max((step for step, is_same in same.items() if is_same and (differ is None or step < differ)), default=None)
    return Divergence(equal, differ, sources)


_Log: TypeAlias = dict[tuple[int, str], Any]
"""Step and tag → what was logged."""


def _fingerprints(run: RecordedRuns) -> _Log:
    return {(step, ""): state for step, state in logged_states(run.path, run.folders).items()}


def _scalars_of_each(runs: Sequence[RecordedRuns]) -> list[_Log]:
    # By the tag alone if there is nothing to be confused: two runs with other prefixes are compared as well.
    by_prefix = any(len(run.folders) != 1 for run in runs)
    with contextlib.suppress(OSError, ValueError, ImportError):
        return [_scalars(run, by_prefix) for run in runs]
    return [{}, {}]


def _scalars(run: RecordedRuns, by_prefix: bool) -> _Log:
    log: _Log = {}
    for folder in run.folders:
        for tag, points in folder.series().items():
            if _TIMED.search(tag):
                continue
            name = f"{folder.prefix}: {tag}" if by_prefix else tag
            for step, value in zip(points.steps, points.values, strict=True):
                log[step, name] = value
    return log


# The command: of two runs, the first step at which they differ; of two checkpoints, the leaves.


def differences_left_out(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    for path in a.left_out | b.left_out:
        first = a.left_out.get(path)
        second = b.left_out.get(path)
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


_CHECKPOINT = "a checkpoint"
_DIRECTORY = "a directory of checkpoints"
_LOG = "a log of fingerprints"


def _print_differences(arguments: argparse.Namespace) -> int:
    if arguments.b is None:
        # As for two runs, the starts do not decide the exit code.
        run = location(arguments.a, "A")
        starts = [start for folder in find_run_folders(run) for start in folder.facts_with_changes]
        return cli.answer(arguments, {"run": run, "starts": starts}, lines_of_changes(starts))
    a = _side(location(arguments.a, "A"))
    b = _side(location(arguments.b, "B"))
    if a.kind != b.kind:
        raise ValueError(f"{a.path} is {a.kind}, and {b.path} is {b.kind}: pass two of the same kind")
    runs = [a.recorded_runs(), b.recorded_runs()]
    folders = [folder for run in runs for folder in run.folders]
    problems = [f"{folder.path}: {problem}" for folder in folders for problem in folder.unreadable_starts]
    start_lines = _start_differences(*runs)
    changed = _state_changes(*runs)
    if a.kind == _CHECKPOINT:
        (first,), (second,) = a.steps.values(), b.steps.values()
        every = {name for x in (first, second) for name in (*x.left_out, *x.named)}
        steps = {"a": first.step, "b": second.step}
        result = _result(a, b, _leaves(first, second), steps=steps, compared=len(every))
        if positions := _positions(first, second):
            result["positions"] = positions
    else:
        result = _runs(a, b)
    lines = [*problems, *changes_text(start_lines), *first_lines(changed, indent=""), *_differences_text(result)]
    if a.kind != _CHECKPOINT:
        first = result.get("step")
        same = {step: step != first for step in result["common"] if first is None or step <= first}
        found = divergence(runs, "checkpoints" if a.kind == _DIRECTORY else "fingerprints", same)
        result |= found._asdict()
        lines += filter(None, [found.text(runs)])
    if start_lines is not None:
        result["starts"] = start_lines
    if problems:
        result["unreadable"] = problems
    if changed:
        result["state_changes"] = changed
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
    from jstep.hooks.fingerprint_log import FINGERPRINTS_FILE, read_log  # imports JAX, which is not needed above

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
    """Compare two directories of checkpoints, or two logs, up to the first step at which they differ."""
    items_a = a.steps
    items_b = b.steps
    prefixes_a = {prefix for _, prefix in items_a}
    prefixes_b = {prefix for _, prefix in items_b}
    if not prefixes_a & prefixes_b and len(prefixes_a) == len(prefixes_b) == 1:
        # Each side has one run, and these are compared whatever their prefixes are.
        items_a = {(step, ""): item for (step, _), item in items_a.items()}
        items_b = {(step, ""): item for (step, _), item in items_b.items()}
    keys = sorted(items_a.keys() & items_b.keys())
    if not keys:
        raise ValueError(f"no step in common: {a.path} has {_steps(items_a)}, and {b.path} has {_steps(items_b)}")
    common = [step for step, _ in keys]
    positions: dict[str, Any] = {}
    for same_before, key in enumerate(keys):
        leaves: list[LeafDifference] | None
        if a.kind == _LOG:
            leaves = _leaves_of_entries(items_a[key], items_b[key])
        else:
            leaves = _leaves(items_a[key], items_b[key]) or None
            # Of loaders, the first difference is shown, which may be earlier than that of the state.
            found = [] if positions else _positions(items_a[key], items_b[key])
            if found:
                positions = {"positions": found, "positions_step": key[0]}
        if leaves is not None:
            at_step = {"step": key[0], "common": common, "same_before": same_before, "same": False}
            return _result(a, b, leaves, **at_step, **positions)
    return _result(a, b, [], common=common, **positions)


def _steps(items: Mapping[tuple[int, str], Any]) -> str:
    return format_list([str(step) for step, _ in sorted(items)], 5) or "none"


def _positions(a: Checkpoint, b: Checkpoint) -> list[dict[str, str]]:
    found = position_differences(a.positions(), b.positions())
    return [{"name": name, "detail": detail} for name, detail in found]


def _leaves_of_entries(a: Any, b: Any) -> list[LeafDifference] | None:
    """Return the leaves that differ, [] if a log has none; None if the states are the same."""
    from jstep.hooks.fingerprint_log import compare_logs

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
    left_out = a.left_out.keys() | b.left_out.keys()
    leaves_a = {name: leaf for name, leaf in a.named.items() if name not in left_out}
    leaves_b = {name: leaf for name, leaf in b.named.items() if name not in left_out}
    by_name: dict[str, LeafDifference] = {}
    for name, leaf in leaves_a.items():
        other = leaves_b.get(name)
        if other is None:
            by_name[name] = LeafDifference(name, "only in A", "only in A")
        elif (leaf.dtype, leaf.key_impl) != (other.dtype, other.key_impl):
            by_name[name] = LeafDifference(name, "dtype", f"{leaf.dtype} in A, {other.dtype} in B")
    common = [name for name in leaves_a if name not in by_name]
    # Read leaf by leaf, because two checkpoints may not fit into memory.
    for (name, _, array_a), (_, _, array_b) in zip(a.leaves(common), b.leaves(common), strict=True):
        difference = array_difference(name, array_a, array_b)
        if difference is not None:
            by_name[name] = difference
    in_order = [by_name[name] for name in leaves_a if name in by_name]
    only_b = [LeafDifference(name, "only in B", "only in B") for name in leaves_b if name not in leaves_a]
    return [*in_order, *only_b, *differences_left_out(a, b)]


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
