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

    def starts_with_setups(self) -> dict[str, Mapping[str, Any]]:
        """Prefix → the newest start with a setup, up to the one that represents its run.

        A prefix without one is left out.
        """
        starts: dict[str, Mapping[str, Any]] = {}
        for folder in self.folders:
            if folder.start_with_setup:
                starts[folder.prefix] = folder.start_with_setup
        return starts

    def state_changes(self) -> list[str]:
        """Describe what replaced the state in each start."""
        lines: list[str] = []
        for folder in self.folders:
            for start in folder.valid_starts:
                lines += state_change_lines(start)
        return lines


def _start_differences(a: RecordedRuns, b: RecordedRuns) -> list[str] | None:
    """Describe how the starts with setups of two runs differ; None if there is none to compare."""
    starts_a = a.starts_with_setups()
    starts_b = b.starts_with_setups()
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
        lead = f"{prefix}: " if len(prefixes) > 1 else ""
        found = changes(starts_a[prefix], starts_b[prefix], PAIR_WORDS)
        lines += [f"{lead}{line}" for line in found.lines]
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
    r"(?:\bper_|/)s(?:ec(?:ond)?s?)?\b|_per_sec|\b[mh]fu\b|(?:\b|_)(?:time|secs|seconds|ms)\b",
    re.IGNORECASE,
)
"""Tags of scalars that measure time, and differ in each run."""


_Log: TypeAlias = dict[tuple[int, str], Any]
"""Step and tag → what was logged."""


class Divergence(NamedTuple):
    """The last step at which all is equal, and the first at which something differs, if known."""

    equal_at: int | None
    differ_at: int | None
    compared_by: list[str]

    def text(self, runs: Sequence[RecordedRuns]) -> str:
        """Describe where the runs diverge, and which was started in between; "" if they do not."""
        if self.differ_at is None:
            return ""
        equal = "" if self.equal_at is None else f"equal at {self.equal_at}, "
        text = f"{equal}differ at {self.differ_at} (by {', '.join(self.compared_by)})"
        for run in runs:
            for folder in run.folders:
                for start in folder.valid_starts:
                    first, _ = start["step"] or (0, 0)
                    if first > 0 and (self.equal_at or 0) <= first <= self.differ_at:
                        text += f"; {run.path} was started at {first}"
        return text


def divergence(
    runs: Sequence[RecordedRuns], source: str = "", compared: Mapping[int, bool] | None = None
) -> Divergence:
    """Compare two runs by their logs.

    Args:
        runs: The two runs.
        source: What has compared them already, or "".
        compared: The steps that it has compared, and whether they are equal.
    """
    sources = [source] if source else []
    same = dict(compared or {})
    logs: dict[str, list[_Log]] = {}
    # Two runs in one directory have one file of fingerprints.
    if runs[0].path != runs[1].path:
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
    differ_at = min((step for step, is_same in same.items() if not is_same), default=None)
    # Not a step after the first difference, at which all that was logged may be equal by chance.
    equal_steps = [
        step
        for step, is_same in same.items()
        if is_same and (differ_at is None or step < differ_at)
    ]
    return Divergence(max(equal_steps, default=None), differ_at, sources)


def _fingerprints(run: RecordedRuns) -> _Log:
    return {(step, ""): state for step, state in logged_states(run.path, run.folders).items()}


def _scalars_of_each(runs: Sequence[RecordedRuns]) -> list[_Log]:
    # By the tag alone if there is nothing to be confused: two runs with other prefixes are compared
    # as well.
    needs_prefix = any(len(run.folders) != 1 for run in runs)
    with contextlib.suppress(OSError, ValueError, ImportError):
        return [_scalars(run, needs_prefix) for run in runs]
    return [{}, {}]


def _scalars(run: RecordedRuns, needs_prefix: bool) -> _Log:
    log: _Log = {}
    for folder in run.folders:
        for tag, points in folder.series().items():
            if _TIMED.search(tag):
                continue
            name = f"{folder.prefix}: {tag}" if needs_prefix else tag
            for step, value in zip(points.steps, points.values, strict=True):
                log[step, name] = value
    return log


# The command: of two runs, the first step at which they differ; of two checkpoints, the leaves.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        "a checkpoint, a directory of checkpoints, or a log of fingerprints (or a logdir that "
        "contains one)"
    )
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument(
        "b",
        metavar="B",
        nargs="?",
        help="the same for the other run; without it, A's starts are compared",
    )


# The kinds of a side.
_CHECKPOINT = "a checkpoint"
_DIRECTORY = "a directory of checkpoints"
_LOG = "a log of fingerprints"


class _Side(NamedTuple):
    """One side of the comparison.

    Attributes:
        path: The path that the user has given, or that of the log in it.
        kind: `_CHECKPOINT`, `_DIRECTORY` or `_LOG`.
        steps: (Step, prefix) → the checkpoint, or the entry of the log.
        problems: What cannot be compared, as sentences.
    """

    path: str
    kind: str
    steps: Mapping[tuple[int, str], Any]
    problems: Sequence[str] = ()

    def recorded_runs(self) -> RecordedRuns:
        """Return the run that a checkpoint is of, or all.

        All are returned also if none has its prefix, as for the best ones.
        """
        directory = self.path if self.kind == _DIRECTORY else split_path(self.path)[0] or "."
        prefixes = [prefix for _, prefix in self.steps] if self.kind == _CHECKPOINT else []
        # A directory that cannot be read is reported by the comparison itself.
        with contextlib.suppress(OSError):
            folders = run_folders(directory)
            return RecordedRuns(
                directory, [folder for folder in folders if folder.prefix in prefixes] or folders
            )
        return RecordedRuns(directory, [])


def _print_differences(arguments: argparse.Namespace) -> int:
    if arguments.b is None:
        # As for two runs, the starts do not decide the exit code.
        directory = location(arguments.a, "A")
        starts: list[dict[str, Any]] = []
        for folder in find_run_folders(directory):
            starts += folder.facts_with_changes
        return cli.answer(arguments, {"run": directory, "starts": starts}, lines_of_changes(starts))
    a = _side(location(arguments.a, "A"))
    b = _side(location(arguments.b, "B"))
    if a.kind != b.kind:
        raise ValueError(
            f"{a.path} is {a.kind}, and {b.path} is {b.kind}: pass two of the same kind"
        )
    runs = [a.recorded_runs(), b.recorded_runs()]
    problems: list[str] = []
    for run in runs:
        for folder in run.folders:
            problems += [f"{folder.path}: {problem}" for problem in folder.unreadable_starts]
    start_lines = _start_differences(*runs)
    state_lines = _state_changes(*runs)
    # The keys of the result are those of `--json`.
    result = _compare_checkpoints(a, b) if a.kind == _CHECKPOINT else _compare_steps(a, b)
    lines = [
        *problems,
        *changes_text(start_lines),
        *first_lines(state_lines, indent=""),
        *_differences_text(result),
    ]
    if a.kind != _CHECKPOINT:
        differ_at = result.get("step")
        compared: dict[int, bool] = {}
        for step in result["common"]:
            # Nothing was compared after the first difference.
            if differ_at is None or step <= differ_at:
                compared[step] = step != differ_at
        found = divergence(
            runs, "checkpoints" if a.kind == _DIRECTORY else "fingerprints", compared
        )
        result |= found._asdict()
        text = found.text(runs)
        if text:
            lines.append(text)
    if start_lines is not None:
        result["starts"] = start_lines
    if problems:
        result["unreadable"] = problems
    if state_lines:
        result["state_changes"] = state_lines
    is_same = result["same"] and not result.get("positions")
    code = cli.answer(arguments, result, lines, cli.OK if is_same else cli.DIFFERENT)
    return cli.complain("diff", *a.problems, *b.problems) or code


def _side(path: str) -> _Side:
    checkpoint = checkpoint_at(path)
    if checkpoint is not None:
        return _Side(path, _CHECKPOINT, {(checkpoint.step, checkpoint.prefix): checkpoint})
    if is_directory(path):
        checkpoints, errors = checkpoints_in(path)
        if checkpoints or errors:
            steps = {(checkpoint.step, checkpoint.prefix): checkpoint for checkpoint in checkpoints}
            return _Side(path, _DIRECTORY, steps, [str(error) for error in errors.values()])
        return _log_side(path, is_logdir=True)
    if not is_url(path) and not os.path.lexists(path):
        raise FileNotFoundError(f"no such checkpoint, directory or log: {path}")
    return _log_side(path, is_logdir=False)


def _log_side(path: str, *, is_logdir: bool) -> _Side:
    # Imported here, as it imports JAX, which checkpoints do not need.
    from jstep.logs.fingerprint_log import FINGERPRINTS_FILE, read_log

    if is_logdir:
        if FINGERPRINTS_FILE not in names_in(path):
            raise FileNotFoundError(f"no checkpoints and no {FINGERPRINTS_FILE} in {path}")
        path = join_path(path, FINGERPRINTS_FILE)
    log = read_log(path)
    problems = [f"{path}: {problem}; the other lines are compared" for problem in log.corrupted]
    if not log.entries:
        raise ValueError(
            problems[0] if problems else f"{path} has no complete line of a FingerprintHook"
        )
    return _Side(path, _LOG, {(step, ""): entry for step, entry in log.entries.items()}, problems)


# Comparing the sides.


def _compare_checkpoints(a: _Side, b: _Side) -> dict[str, Any]:
    (first,) = a.steps.values()
    (second,) = b.steps.values()
    compared = {*first.left_out, *first.named, *second.left_out, *second.named}
    steps = {"a": first.step, "b": second.step}
    result = _result(a, b, _leaf_differences(first, second), steps=steps, compared=len(compared))
    positions = _position_differences(first, second)
    if positions:
        result["positions"] = positions
    return result


def _compare_steps(a: _Side, b: _Side) -> dict[str, Any]:
    """Compare two directories of checkpoints, or two logs, up to the first step that differs."""
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
        raise ValueError(
            f"no step in common: {a.path} has {_steps(items_a)}, and {b.path} has {_steps(items_b)}"
        )
    common = [step for step, _ in keys]
    positions: dict[str, Any] = {}
    # `same_before` is the number of common steps before this one; all of them are the same.
    for same_before, key in enumerate(keys):
        leaves: list[LeafDifference] | None
        if a.kind == _LOG:
            leaves = _entry_differences(items_a[key], items_b[key])
        else:
            leaves = _leaf_differences(items_a[key], items_b[key]) or None
            # Of loaders, the first difference is shown, which may be earlier than that of the
            # state.
            found = [] if positions else _position_differences(items_a[key], items_b[key])
            if found:
                positions = {"positions": found, "positions_step": key[0]}
        # Not `if leaves`: of a log without leaves, a difference is an empty list.
        if leaves is not None:
            result = _result(
                a, b, leaves, step=key[0], common=common, same_before=same_before, **positions
            )
            result["same"] = False
            return result
    return _result(a, b, [], common=common, **positions)


def _steps(items: Mapping[tuple[int, str], Any]) -> str:
    return format_list([str(step) for step, _ in sorted(items)], 5) or "none"


def _position_differences(a: Checkpoint, b: Checkpoint) -> list[dict[str, str]]:
    found = position_differences(a.positions(), b.positions())
    return [{"name": name, "detail": detail} for name, detail in found]


def _entry_differences(a: Any, b: Any) -> list[LeafDifference] | None:
    """Return the leaves that differ between log entries; [] if a log has none, None if equal."""
    from jstep.logs.fingerprint_log import compare_logs

    result = compare_logs(a, b)
    if result is None:
        return None
    only = dict.fromkeys(result.first_only, "only in A")
    only |= dict.fromkeys(result.second_only, "only in B")
    leaves = result.leaves or ()
    return [
        LeafDifference(path, only.get(path, "fingerprint"), only.get(path, "")) for path in leaves
    ]


def _leaf_differences(a: Checkpoint, b: Checkpoint) -> list[LeafDifference]:
    for checkpoint in (a, b):
        problems = checkpoint.problems()
        if problems:
            raise ValueError(f"{checkpoint.path} is corrupted: {'; '.join(problems[:3])}")
    left_out = a.left_out.keys() | b.left_out.keys()
    leaves_a = {name: leaf for name, leaf in a.named.items() if name not in left_out}
    leaves_b = {name: leaf for name, leaf in b.named.items() if name not in left_out}
    found: dict[str, LeafDifference] = {}
    for name, leaf in leaves_a.items():
        other = leaves_b.get(name)
        if other is None:
            found[name] = LeafDifference(name, "only in A", "only in A")
        elif (leaf.dtype, leaf.key_impl) != (other.dtype, other.key_impl):
            found[name] = LeafDifference(name, "dtype", f"{leaf.dtype} in A, {other.dtype} in B")
    common = [name for name in leaves_a if name not in found]
    # Read leaf by leaf, because two checkpoints may not fit into memory.
    for (name, _, array_a), (_, _, array_b) in zip(a.leaves(common), b.leaves(common), strict=True):
        difference = array_difference(name, array_a, array_b)
        if difference is not None:
            found[name] = difference
    differences = [found[name] for name in leaves_a if name in found]
    differences += [
        LeafDifference(name, "only in B", "only in B") for name in leaves_b if name not in leaves_a
    ]
    return [*differences, *differences_left_out(a, b)]


def differences_left_out(a: Checkpoint, b: Checkpoint) -> Iterator[LeafDifference]:
    """Compare the leaves that a checkpoint has left out, by their kinds and fingerprints."""
    for path in a.left_out | b.left_out:
        first = a.left_out.get(path)
        second = b.left_out.get(path)
        where = "left out of both"
        if first is None or second is None:
            yield LeafDifference(
                path, "left out", f"left out of {'A' if second is None else 'B'} only"
            )
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            why = "shape" if first.dtype == second.dtype else "dtype"
            kinds = (
                f"{first.dtype}{list(first.shape)} in A, {second.dtype}{list(second.shape)} in B"
            )
            yield LeafDifference(path, why, f"{kinds}, {where}")
        elif first.fingerprint != second.fingerprint:
            yield LeafDifference(path, "values", f"the fingerprint, {where}")


def _result(
    a: _Side, b: _Side, differences: list[LeafDifference], **fields: object
) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = []
    for difference in differences:
        leaves.append(
            {key: value for key, value in difference._asdict().items() if value is not None}
        )
    about = {"a": a.path, "b": b.path, "kind": a.kind, "same": not differences}
    return {**about, "leaves": leaves, **fields}


# The results as text.


def _differences_text(result: dict[str, Any]) -> list[str]:
    lines = _leaves_text(result)
    positions = result.get("positions")
    if positions:
        what = "position differs" if len(positions) == 1 else "positions differ"
        step = ""
        if "positions_step" in result:
            step = f" at step {result['positions_step']}, the first of these"
        lines.append(f"{len(positions)} {what}{step}")
        lines += _rows([(position["name"], position["detail"]) for position in positions])
    return lines


def _leaves_text(result: dict[str, Any]) -> list[str]:
    leaves = result["leaves"]
    common = result.get("common")
    if result["same"]:
        if common is None:
            return [f"identical ({result['compared']} leaves, bitwise)"]
        return [f"identical at all common steps ({len(common)}, from {common[0]} to {common[-1]})"]
    if common is None:
        steps = result["steps"]
        where = f"step {steps['a']}"
        if steps["a"] != steps["b"]:
            where += f" in A, {steps['b']} in B"
        lines = [f"{len(leaves)} of {result['compared']} leaves differ ({where})"]
    else:
        place = f"number {result['same_before'] + 1} of {len(common)} common steps"
        lines = [f"the runs diverge at step {result['step']}, {place}"]
        if leaves:
            lines.append(f"{len(leaves)} {'leaf differs' if len(leaves) == 1 else 'leaves differ'}")
        else:
            lines.append("which leaves differ is not known: a log was written with per_leaf=False")
    return lines + _rows([(leaf["path"], leaf["detail"]) for leaf in leaves])


def _rows(pairs: list[tuple[str, str]]) -> list[str]:
    """Names and details in columns, of a long list the first."""
    shown: list[str] = []
    for line in columns(pairs[:SHOWN], 2) if pairs else ():
        shown += fold(line, cli.terminal_width() - 2, 2)
    return first_lines([f"{name}: {detail}" for name, detail in pairs], shown)


DIFF = cli.Command(_add_arguments, _print_differences)
